"""With --bos, documents start with bos, and so do prompts and evaluation contexts."""
import json
import math
from types import SimpleNamespace

import conftest
import pytest
from conftest import make_run, run, succeeded, trained_run

import eval as judge
from lm_architectures.data import Data
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.data.text.train_tokenizer import train_tokenizer
from lm_architectures.run.load import load

TEXTS = [f'a text of {i} words and more of them' for i in range(60)]


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    """Return the path of a tokenizer.json that has <|endoftext|> (id 0) and <s>."""
    from tokenizers import Tokenizer
    path, fast = tmp_path_factory.mktemp('tokenizer') / 'own.json', Tokenizer.from_str(train_tokenizer(TEXTS, 270))
    fast.add_special_tokens(['<s>'])
    fast.save(str(path))
    return path


@pytest.mark.slow
def test_documents_and_prompts_start_with_bos(tokenizer, tmp_path):
    """And documents end with eos."""
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'text': text, 'id': text}) + '\n' for text in TEXTS))
    folder = conftest.prepared(tmp_path / 'a.jsonl', tmp_path / 'data', f'--tokenizer={tokenizer}', '--bos',
                               '--val_fraction=0.3')
    d, own, found = Data(folder), load_tokenizer(tokenizer, bos=True), []
    assert d.bos and d.eos_id == 0
    for split, info in d.splits.items():
        for i in d.tokens(split, 0, info['tokens']).tolist():
            if i == own.bos_id:
                found.append([])
            found[-1].append(i)
    assert sorted(found) == sorted([*own.start, *own.encode(text), 0] for text in TEXTS)
    loaded = load(trained_run(folder, tmp_path / 'run', steps=2), 'cpu')
    assert loaded.encode('a text') == [own.bos_id, *own.encode('a text')] and loaded.encode('') == [own.bos_id]
    assert load_tokenizer(tokenizer).prompt('a text') == own.encode('a text')
    assert load_tokenizer(tokenizer).prompt('') == [own.eos_id]
    succeeded(run('sample.py', tmp_path / 'run', 'a text', '', '--max_new_tokens=4', '--device=cpu'))


@pytest.mark.parametrize('bos', [None, False])
def test_task_contexts_start_with_bos_unless_disabled(tokenizer, bos, tmp_path, monkeypatch):
    pytest.importorskip('lm_eval')
    from lm_architectures.score.lm_eval_adapter import RunLM
    (tmp_path / 'lambada_openai.jsonl').write_text(json.dumps({'text': 'a text of words'}) + '\n')
    asked = []

    def score(self, requests):
        asked.extend((list(context), list(continuation)) for context, continuation in requests)
        return [(-1.0, False, False)] * len(requests)
    monkeypatch.setattr(judge.Scorer, 'score', score)
    make_run(tmp_path / 'run', tokenizer=tokenizer, bos=True)
    s = judge.Settings(bos=bos, data_dir=str(tmp_path), device='cpu')
    scorer, own, _ = judge.load_scorer(tmp_path / 'run', s)
    judge.lambada_first_token(scorer, own, s)
    lm = RunLM(scorer, own)
    lm.loglikelihood([SimpleNamespace(args=pair) for pair in (('a text', ' of'), ('', 'words'))])
    lm.loglikelihood_rolling([SimpleNamespace(args=('a text',))])
    start, empty = ([], [0]) if bos is False else ([own.bos_id], [own.bos_id])
    assert asked == [(start + own.encode('a text of'), own.encode(' words')),
                     (start + own.encode('a text'), own.encode(' of')), (empty, own.encode('words')),
                     (empty, own.encode('a text'))]


def test_lambada_perplexity_is_averaged_over_examples_and_pooled_over_tokens(tokenizer, tmp_path):
    """The continuation follows the last space; trailing whitespace is ignored."""
    (tmp_path / 'lambada_openai.jsonl').write_text('{"text": "a text"}\n{"text": "a of7words\\n "}\n')
    encoding, lengths = load_tokenizer(tokenizer), []

    def score(requests):
        lengths.extend(len(continuation) for _, continuation in requests)
        return [(-3.0, True, True), (-9.0, False, False)]
    found = judge.lambada_first_token(SimpleNamespace(score=score), encoding, judge.Settings(data_dir=str(tmp_path)))
    m, n = lengths
    assert n == len(encoding.encode('a of7words')) - len(encoding.encode('a')) != m
    assert found == pytest.approx({'acc': 0.5, 'perplexity_of_examples': math.exp((3 / m + 9 / n) / 2),
                                   'perplexity_pooled': math.exp(12 / (m + n))})
