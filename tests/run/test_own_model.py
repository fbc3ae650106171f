"""The minimal model in docs/own_model.md works with every script, and with the page's own loop."""
import dataclasses
import re
import shutil

import pytest
import test_models
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_sentence, contents, run, succeeded
from transformers import AutoModelForCausalLM

from lm_architectures import load, save
from lm_architectures.data import open_data
from lm_architectures.decode.generation import allocate_cache, generate
from lm_architectures.decode.speculation import speculative_generate
from lm_architectures.files import UserError
from lm_architectures.hf.export import export_run
from lm_architectures.run import folders, models, records
from lm_architectures.score.scoring import Scorer

pytestmark = pytest.mark.slow
CODE = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/own_model.md').read_text(), re.S)


@pytest.fixture(scope='module')
def bigram(tiny_data, tmp_path_factory):
    """Train the model in docs/own_model.md, in a folder that replaces the repository root."""
    folder = tmp_path_factory.mktemp('own')
    (folder / 'model_bigram.py').write_text(CODE[0])
    for name in ('model_standard.py', 'attn_kernels.py'):
        shutil.copy(ROOT / name, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, 'ROOT', folder)
        patch.setattr(models, 'ADDED', {})
        yield train_bigram(tiny_data, folder / 'run')


def train_bigram(data, out, *more):
    own = [f'--data={data}', f'--out_dir={out}', '--max_tokens=7680', '--block_size=32', '--batch_size=8',
           '--warmup_tokens=0', '--learning_rate=0.1', '--eval_tokens=640', '--eval_interval=15', '--log_interval=1',
           '--save_interval=15', '--threads=1', '--device=cpu', '--dtype=float32']
    result = succeeded(run('train.py', '--model=bigram', *own, *more))
    return out if not more else result


def test_it_trains_resumes_and_dry_runs(bigram, tiny_data, tmp_path):
    log = records.read_log(bigram)
    assert log[-1]['loss'] < log[0]['loss'] - 1 and log[-1]['val'] < log[0]['loss'] - 1 and 'mfu' not in log[0]
    dry = train_bigram(tiny_data, tmp_path / 'run', '--dry_run').stdout
    assert 'parameters' in dry and 'GiB for weights' in dry and 'FLOP' not in dry and not (tmp_path / 'run').exists()
    shutil.rmtree(bigram / 'ckpt/step_00000030')
    assert 'from step 27' in train_bigram(tiny_data, bigram, '--resume').stdout
    assert [record['loss'] for record in records.read_log(bigram)] == [record['loss'] for record in log]


def test_one_line_adds_it_to_the_tests_of_all_models(bigram, monkeypatch):
    monkeypatch.setitem(test_models.VARIANTS, 'bigram', ('bigram', dict(eos_id=59)))
    test_models.test_loss_is_the_mean_nll_of_the_counted_targets('bigram')
    with pytest.raises(pytest.skip.Exception, match='bigram has no extend'):
        test_models.test_cached_decoding_equals_full_forward('bigram', 0, 'cpu')


def test_a_default_that_cannot_be_saved_is_rejected(bigram, monkeypatch):
    module = models.model_file('bigram')
    fields = [('window', int, None)]
    monkeypatch.setattr(module, 'Config', dataclasses.make_dataclass('Config', fields, bases=(module.Config,)))
    with pytest.raises(UserError, match='window is None .*: expected int'):
        models.make_config('bigram', {})


PROMPTS = [[97, 98], [99], [100, 97, 98, 32, 97]]


def test_it_samples_by_recomputing_and_says_so(bigram):
    sampled = succeeded(run('sample.py', bigram, 'ab', '--max_new_tokens=12', '--temperature=0', '--dtype=float32'))
    assert '12 tokens' in sampled.stderr
    assert sampled.stderr.count('model_bigram has no new_cache and extend') == 1
    model, _ = folders.load_run(bigram)
    for prompt, new in zip(PROMPTS, generate(model, PROMPTS, 9, temperature=0)):
        ids = list(prompt)
        for _ in range(9):
            ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
        assert new == ids[len(prompt):]
    cache = allocate_cache(model, PROMPTS, 9)
    assert cache.max_tokens == 14 and cache.lengths.tolist() == [0, 0, 0] and cache.nbytes > 0


def test_it_is_evaluated_and_scored(bigram):
    judged = succeeded(run('eval.py', bigram, '--val', '--val_tokens=640', '--dtype=float32'))
    last = [record['val'] for record in records.read_log(bigram) if 'val' in record][-1]
    assert 'extend' not in judged.stderr  # a validation loss does not need it
    assert f'val nats_per_token {last:20,.4f}' in judged.stdout
    model, _ = folders.load_run(bigram)
    requests = [([97, 98], [99, 100, 32]), ([97, 98], [32]), ([32], [97] * 5), ([97] * 30, [98] * 10)]
    for max_logits in (2 ** 26, 700):  # continuations in one piece, and in several
        scores = Scorer(model, 32, max_logits=max_logits).score(requests)
        for (context, continuation), (nats, greedy, _) in zip(requests, scores):
            logits = model.logits(torch.tensor([(context + continuation)[-33:-1]]))[0, -len(continuation):]
            want = F.cross_entropy(logits, torch.tensor(continuation), reduction='sum')
            assert abs(nats + want) < 1e-4 and greedy == (logits.argmax(-1).tolist() == continuation)


def test_it_works_as_target_and_as_draft_model(bigram):
    """Greedy texts equal plain decoding if target, draft or both have no cache."""
    model, record = folders.load_run(bigram)
    shape = {key: record['model_config'][key] for key in ('vocab_size', 'n_ids')}
    other = test_models.small_model('standard', dict(n_layer=1, eos_id=None, init_std=0.3, **shape)).eval()
    for target, draft in ((model, other), (other, model), (model, model)):
        new, rounds = speculative_generate(target, PROMPTS, 15, draft=draft, draft_len=3, temperature=0)
        assert new == generate(target, PROMPTS, 15, temperature=0)
        assert draft is not target or all(drafted == accepted for drafted, accepted in rounds)
    assert_sentence(run('sample.py', bigram, 'ab', '--draft_len=2', '--max_new_tokens=4'),
                    'model_bigram cannot draft for itself')


@pytest.mark.usefixtures('code_folder')
def test_a_run_of_the_pages_own_loop_is_sampled_evaluated_and_exported(bigram, tiny_data, tmp_path, monkeypatch):
    folder, names, idx = tmp_path / 'run', {}, torch.tensor([PROMPTS[2]])
    code = CODE[1].replace('256', '32').replace('251', '51')
    monkeypatch.syspath_prepend(bigram.parent)
    exec(code.replace('python_docs', str(tiny_data)).replace('out/loop', str(folder)), names)
    model, data = names['model'], names['data']
    ours = load(folder)
    assert ours.model.logits(idx).equal(model.logits(idx)) and ours.block_size == 32
    new, = generate(model, [[97, 98]], 12, temperature=0)
    sampled = succeeded(run('sample.py', folder, 'ab', '--max_new_tokens=12', '--temperature=0', '--dtype=float32'))
    assert bytes(new).decode() in sampled.stdout
    judged = succeeded(run('eval.py', folder, '--val', '--val_tokens=640', '--dtype=float32'))
    loss = model(*data.val_batch(range(20), 32))['nll'].item()
    assert f'val nats_per_token {loss:20,.4f}' in judged.stdout and 'step 50' in judged.stdout
    export_run(folder, tmp_path / 'hf')
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / 'hf', trust_remote_code=True)
    assert exported(idx).logits.equal(model.logits(idx)[..., :257])
    more = train_bigram(tiny_data, tmp_path / 'more', f'--init_from={folder}')
    assert f'loaded the weights of {folder}, step 50' in more.stdout
    for args in ([f'--out_dir={folder}', '--resume'], [f'--extend={folder}', f'--out_dir={tmp_path}/b']):
        assert_sentence(run('train.py', *args), f'{folder} was not trained by train.py', f'--init_from={folder}')


def test_a_model_that_cannot_be_saved_is_named_and_leaves_no_folder(bigram, tiny_data, tmp_path):
    (model, _), data, before = folders.load_run(bigram), open_data(tiny_data), contents(bigram)
    broken, other = (type(model)(dataclasses.replace(model.config, n_ids=n_ids)) for n_ids in (257, 256))
    broken.embed.weight.data[0] = float('nan')
    for path, own, sentence in ((bigram, model, 'already exists: choose a new folder'),
                                (tmp_path / 'a', torch.nn.DataParallel(model), 'DataParallel: expected the class'),
                                (tmp_path / 'a', other, 'n_ids = 256, but'), (tmp_path / 'a', broken, 'contains NaN')):
        with pytest.raises(UserError, match=sentence):
            save(path, own, data, 3, block_size=8)
    assert contents(bigram) == before and not (tmp_path / 'a').exists()
