"""The Python interface gives what sample.py, eval.py and train.py give."""
import json
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
spec = importlib.util.spec_from_file_location('lm_architectures', sys.argv[1])  # as `pip install -e .` finds it
module = sys.modules['lm_architectures'] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from lm_architectures import load, train
run = load(train.main(sys.argv[2:]))
print(json.dumps([run.folder, [line['step'] for line in run.log], run.config.n_embd]))
'''


@pytest.mark.slow
def test_train_and_load_work_from_any_folder(tiny_data, tmp_path):
    """The user's own data.py and `config` folder do not hide ours."""
    (tmp_path / 'data.py').touch()
    (tmp_path / 'config').mkdir()
    args = [*TINY, f'--data={tiny_data}', '--max_tokens=384', '--out_dir=out/a']
    result = run_subprocess('-c', FROM_ELSEWHERE, ROOT / 'lm_architectures/__init__.py', *args, cwd=tmp_path)
    assert json.loads(succeeded(result).stdout.splitlines()[-1]) == ['out/a', [1, 2, 3], 16]
