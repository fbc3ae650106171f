"""An architecture of one's own: the file in README, with `Config`, `forward` and `logits`, works with every script."""
import importlib
import re
import shutil
import sys

import pytest
import test_models
import torch
from conftest import ROOT, assert_sentence, run, succeeded

from common import runs
from common.decoding import generate, roomy_cache
from common.files import say_once
from common.scoring import Scorer
from common.speculative import speculative_generate
from data.tokenizers import load_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def bigram(tiny_data, tmp_path_factory):
    """A trained run of the model in README, in a folder that stands for the repository's while it is used."""
    folder = tmp_path_factory.mktemp('own')
    source = re.search(r'```python\n(.*?)```', (ROOT / 'README.md').read_text().partition('Your own model')[2], re.S)
    (folder / 'model_bigram.py').write_text(source[1])
    shutil.copy(ROOT / 'model_standard.py', folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, 'ROOT', folder)
        patch.syspath_prepend(folder)
        yield train_bigram(tiny_data, folder / 'run')
    sys.modules.pop('model_bigram')


def train_bigram(data, out, *more):
    own = [f'--data={data}', f'--out_dir={out}', '--max_tokens=7680', '--block_size=32', '--batch_size=8',
           '--warmup_tokens=0', '--learning_rate=0.1', '--eval_tokens=640', '--eval_interval=15', '--log_interval=1',
           '--save_interval=15', '--threads=1', '--device=cpu', '--dtype=float32']
    result = succeeded(run('train.py', '--model=bigram', *own, *more))
    return out if not more else result


def test_it_trains_and_dry_runs(bigram, tiny_data, tmp_path):
    log = runs.read_log(bigram)
    assert log[-1]['loss'] < log[0]['loss'] - 1 and log[-1]['val'] < log[0]['loss'] - 1 and 'mfu' not in log[0]
    dry = train_bigram(tiny_data, tmp_path / 'run', '--dry_run').stdout
    assert 'parameters' in dry and 'GiB for weights' in dry and 'FLOP' not in dry and not (tmp_path / 'run').exists()
    shutil.rmtree(bigram / 'ckpt/step_00000030')
    before = [record['loss'] for record in log]
    assert 'from step 27' in train_bigram(tiny_data, bigram, '--resume').stdout
    assert [record['loss'] for record in runs.read_log(bigram)] == before


def test_one_line_puts_it_into_the_tests_of_all_models(bigram, monkeypatch):
    monkeypatch.setitem(test_models.VARIANTS, 'bigram', ('bigram', dict(eos_id=59)))
    test_models.test_loss_is_the_mean_nll_of_the_counted_targets('bigram')
    with pytest.raises(pytest.skip.Exception, match='bigram has no extend'):
        test_models.test_cached_decoding_equals_full_forward('bigram', 0, 'cpu')


def test_it_samples_by_recomputing_and_says_so(bigram, capsys):
    say_once.cache_clear()
    sampled = succeeded(run('sample.py', bigram, 'ab', '--max_new_tokens=12', '--temperature=0', '--dtype=float32'))
    assert '12 tokens' in sampled.stderr
    assert sampled.stderr.count('model_bigram has no new_cache and extend') == 1
    model, _ = runs.load_run(bigram)
    prompts = [[97, 98], [99], [100, 97, 98, 32, 97]]
    for prompt, new in zip(prompts, generate(model, prompts, 9, temperature=0)):
        ids = list(prompt)
        for _ in range(9):
            ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
        assert new == ids[len(prompt):]
    assert 'extend' not in capsys.readouterr().err  # once is enough
    cache = roomy_cache(model, prompts, 9)
    assert cache.max_tokens == 14 and cache.lengths.tolist() == [0, 0, 0] and cache.nbytes > 0


def test_it_is_evaluated_and_scored(bigram):
    say_once.cache_clear()
    judged = succeeded(run('eval.py', bigram, '--val', '--val_tokens=640', '--dtype=float32'))
    last = [record['val'] for record in runs.read_log(bigram) if 'val' in record][-1]
    assert 'extend' not in judged.stderr  # a validation loss needs none
    assert f'val nats_per_token {last:20,.4f}' in judged.stdout
    model, _ = runs.load_run(bigram)
    requests = [([97, 98], [99, 100, 32]), ([97, 98], [32]), ([32], [97] * 5), ([97] * 30, [98] * 10)]
    for max_logits in (2 ** 26, 700):  # continuations read at once, and in pieces
        for (context, continuation), (nats, greedy, _) in zip(requests,
                                                              Scorer(model, 32, max_logits=max_logits).score(requests)):
            text = torch.tensor([(context + continuation)[-33:-1]])
            logits = model.logits(text)[0, -len(continuation):].log_softmax(-1).detach()
            targets = torch.tensor(continuation)
            assert abs(float(logits.gather(1, targets[:, None]).sum()) - nats) < 1e-4
            assert greedy == bool((logits.argmax(-1) == targets).all())


def test_lm_eval_reads_it(bigram):
    pytest.importorskip('lm_eval')
    from common.lm_eval_adapter import RunLM
    request = lambda *args: type('Request', (), {'args': args})
    model, _ = runs.load_run(bigram)
    lm = RunLM(Scorer(model, 32), load_tokenizer('byte'))
    text = [256, *b'ab cd ab']  # lm-eval starts a document after eos
    logits = model.logits(torch.tensor([text[:-1]]))[0].log_softmax(-1).detach()
    want = logits.gather(1, torch.tensor(text[1:])[:, None]).sum()
    assert abs(lm.loglikelihood_rolling([request('ab cd ab')])[0] - want) < 1e-4
    assert len(lm.generate_until([request('ab', {'until': ['e'], 'max_gen_toks': 5})])[0]) <= 5


def test_it_drafts_and_is_drafted_for(bigram):
    """Greedy texts are those of plain decoding, whichever of the two models has no cache."""
    model, record = runs.load_run(bigram)
    standard = importlib.import_module('model_standard')
    torch.manual_seed(0)
    shape = {key: record['model_config'][key] for key in ('vocab_size', 'n_ids')}
    other = standard.Model(standard.Config(n_layer=1, n_head=2, n_embd=16, eos_id=None, init_std=0.3, **shape)).eval()
    prompts = [[97, 98], [99], [100, 97, 98, 32, 97]]
    for target, draft in ((model, other), (other, model), (model, model)):
        new, statistics = speculative_generate(target, prompts, 15, draft=draft, draft_len=3, temperature=0)
        assert new == generate(target, prompts, 15, temperature=0)
        assert draft is not target or statistics.accepted_at == statistics.tried_at
    assert_sentence(run('sample.py', bigram, 'ab', '--draft_len=2', '--max_new_tokens=4'),
                    'model_bigram cannot draft for itself')
