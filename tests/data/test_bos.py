"""With --bos, documents start with bos, and so do prompts and evaluation contexts."""
import json
import math
from types import SimpleNamespace

import conftest
import pytest
from conftest import config_json, run, succeeded, trained_run

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


@pytest.fixture(scope='module')
def prepared(tokenizer, tmp_path_factory):
    pytest.importorskip('datasets')
    folder = tmp_path_factory.mktemp('bos')
    (folder / 'texts.jsonl').write_text(''.join(json.dumps({'text': text, 'id': text}) + '\n' for text in TEXTS))
    return conftest.prepared(folder / 'texts.jsonl', folder / 'data', f'--tokenizer={tokenizer}', '--bos',
                             '--val_fraction=0.3')


@pytest.fixture(scope='module')
def trained(prepared, tmp_path_factory):
    return trained_run(prepared, tmp_path_factory.mktemp('run') / 'run', steps=2)


def test_each_document_starts_with_bos_and_ends_with_eos(prepared, tokenizer):
    d, own = Data(prepared), load_tokenizer(tokenizer, bos=True)
    assert d.bos and d.eos_id == 0 and json.loads((prepared / 'meta.json').read_text())['bos'] is True
    found = []
    for split, info in d.splits.items():
        for i in d.tokens(split, 0, info['tokens']).tolist():
            if i == own.bos_id:
                found.append([])
            found[-1].append(i)
    assert sorted(found) == sorted([*own.start, *own.encode(text), 0] for text in TEXTS)


def test_prompts_start_with_bos_if_the_documents_do(trained, tokenizer):
    assert config_json(trained)['data']['bos'] is True
    for bos, empty in ((True, [load_tokenizer(tokenizer).bos_id]), (False, [0])):
        own, loaded = load_tokenizer(tokenizer, bos), load(trained, 'cpu')
        loaded.tokenizer = own
        assert loaded.encode('a text') == [*own.start, *own.encode('a text')] and bool(own.start) is bos
        assert loaded.encode('') == empty
    succeeded(run('sample.py', trained, 'a text', '', '--max_new_tokens=4', '--device=cpu'))


@pytest.mark.parametrize('bos', [None, False])
def test_task_contexts_start_with_bos_unless_disabled(trained, bos, tmp_path, monkeypatch):
    pytest.importorskip('lm_eval')
    from lm_architectures.score.lm_eval_adapter import RunLM
    (tmp_path / 'lambada_openai.jsonl').write_text(json.dumps({'text': 'a text of words'}) + '\n')
    asked = []

    def score(self, requests):
        asked.extend((list(context), list(continuation)) for context, continuation in requests)
        return [(-1.0, False, False)] * len(requests)
    monkeypatch.setattr(judge.Scorer, 'score', score)
    s = judge.Settings(bos=bos, data_dir=str(tmp_path), device='cpu')
    scorer, own, _ = judge.load_scorer(trained, s)
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
