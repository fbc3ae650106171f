"""The Python interface gives what sample.py, eval.py and train.py give."""
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, make_run, run, run_subprocess, succeeded

from lm_architectures import load
from lm_architectures.files import UserError
from lm_architectures.score.scoring import Scorer

TEXTS = ['Return the', 'naïve words']


@pytest.mark.parametrize('name', ['standard', 'sps', 'gpn'])
def test_generate_stream_loss_and_hidden_equal_the_scripts(name, tmp_path, monkeypatch):
    make_run(tmp_path / 'run', name)
    ours = load(tmp_path / 'run', 'cpu')
    options, args = dict(max_new_tokens=30, temperature=0.8, top_k=90), ['--max_new_tokens=30', '--temperature=0.8']
    printed = succeeded(run('sample.py', tmp_path / 'run', *TEXTS, *args, '--top_k=90', '--device=cpu')).stdout
    texts = ours.generate(TEXTS, **options)
    assert printed == ''.join(f'--- {i}\n{a}{b}\n' for i, (a, b) in enumerate(zip(TEXTS, texts), 1)) and texts[0]
    decoded, decode = [], ours.tokenizer.token_bytes
    monkeypatch.setattr(ours.tokenizer, 'token_bytes', lambda i: decoded.append(i) or decode(i))
    pieces = [*ours.stream(TEXTS[1], **options)]
    assert len(decoded) <= 30  # each token once
    assert [''.join(pieces)] == ours.generate(TEXTS[1], **options) and len(pieces) > 10
    ids = ours.tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        assert ours.hidden(TEXTS[0]).equal(ours.model.final_hidden(torch.tensor([ids]))[0])
    pytest.importorskip('lm_eval')
    from lm_architectures.score.lm_eval_adapter import RunLM
    long = 'some words of a text ' * 6  # longer than the context
    nats, = RunLM(Scorer(ours.model, 64), ours.tokenizer).loglikelihood_rolling([SimpleNamespace(args=(long,))])
    assert ours.loss(long) == pytest.approx(-nats / len(long), rel=1e-12)


def test_texts_end_as_in_training_and_drafts_and_wrong_options_are_checked(tmp_path):
    """All ids that end a text do; without them the text continues."""
    make_run(tmp_path / 'run', 'nextlat', ends=[*range(100, 256)])
    ours = load(tmp_path / 'run')
    free, cut = (ours.generate('ab', ignore_eos=ignore, max_new_tokens=40)[0] for ignore in (True, False))
    assert free.startswith(cut) and len(cut) < len(free)
    greedy = ours.generate('ab', temperature=0, max_new_tokens=40)
    for drafts in (dict(draft_len=3), dict(draft=str(tmp_path / 'run'))):
        assert ours.generate('ab', temperature=0, max_new_tokens=40, **drafts) == greedy
        assert ''.join(ours.stream('ab', temperature=0, max_new_tokens=40, **drafts)) == greedy[0]
    for call, part in ((lambda: ours.generate('ab', temperature=-1), 'temperature is -1'),
                       (lambda: ours.generate('a' * 65), 'exceeds the context of 64'),
                       (lambda: ours.loss(''), 'has no tokens'), (lambda: load(tmp_path), 'is not a run folder')):
        with pytest.raises(UserError, match=part):
            call()


FROM_ELSEWHERE = '''
import importlib.util, json, sys
from pathlib import Path
root, theirs_first, *args = sys.argv[1:]

class Editable:  # as `pip install -e .` finds what pyproject.toml lists
    def find_spec(name, path=None, target=None):
        file = {'lm_architectures': 'lm_architectures/__init__.py', 'attn_kernels': 'attn_kernels.py'}.get(name)
        return file and importlib.util.spec_from_file_location(name, f'{root}/{file}')

def theirs():
    for name in ('data', 'train', 'config', 'common', 'analysis', 'scans'):
        assert importlib.import_module(name).mine == name

sys.meta_path.append(Editable)
path = [*sys.path]
if theirs_first == 'True':
    theirs()
from lm_architectures import load, read_log, train
run = load(train.main([f'{root}/config/gdn_small.py', *args]))
assert run.generate('ab', max_new_tokens=3, temperature=0) and len(read_log(run.folder)) == 3
assert run.model.fast  # of scans/
files = {name: str(getattr(module, '__file__', '')) for name, module in sys.modules.items()}
ours = {name for name, file in files.items() if file.startswith(root) and 'site-packages' not in file}
assert all(name.startswith(('lm_architectures', 'attn_kernels', 'state_cache', 'model_')) for name in ours), ours
theirs()
assert sys.path == path
'''


@pytest.mark.slow
@pytest.mark.parametrize('theirs_first', [True, False])
def test_train_and_load_work_in_a_folder_with_files_of_the_same_names(theirs_first, tiny_data, tmp_path):
    """Neither side's modules shadow the other's."""
    for name in ('data', 'train', 'config', 'common', 'analysis', 'scans'):
        (tmp_path / f'{name}.py').write_text(f'mine = {name!r}')
    args = [*TINY, '--d_k=4', '--d_v=8', f'--data={tiny_data}', '--max_tokens=384', '--out_dir=out/a']
    succeeded(run_subprocess('-c', FROM_ELSEWHERE, ROOT, theirs_first, *args, cwd=tmp_path))
