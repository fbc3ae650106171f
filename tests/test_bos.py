"""Documents that start with bos: prepared, recorded, and prompts and tasks that then start with it too."""
import json
import math
import shutil
from types import SimpleNamespace

import pytest
from conftest import assert_sentence, config_json, run, succeeded, train_tiny

import eval as judge
import sample
from common import export, runs
from common.files import write_json
from data import Data
from data.tokenizers import load_tokenizer

TEXTS = [f'a text of {i} words and more of them' for i in range(60)]


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    """The path of a tokenizer.json that has <s> (id 0) and </s> (id 1)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=270, special_tokens=['<s>', '</s>'],
                                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    path = tmp_path_factory.mktemp('tokenizer') / 'own.json'
    fast.save(str(path))
    return path


@pytest.fixture(scope='module')
def prepared(tokenizer, tmp_path_factory):
    pytest.importorskip('datasets')
    folder = tmp_path_factory.mktemp('bos')
    (folder / 'texts.jsonl').write_text(''.join(json.dumps({'text': text, 'id': text}) + '\n' for text in TEXTS))
    succeeded(run('prepare_fineweb.py', folder / 'texts.jsonl', f'--tokenizer={tokenizer}', '--bos', '--val_share=0.3',
                  '--workers=1', f'--out_dir={folder}/data'))
    return folder / 'data'


@pytest.fixture(scope='module')
def trained(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp('run') / 'run'
    succeeded(train_tiny(prepared, out, steps=2))
    return out


def test_each_document_starts_with_bos_and_ends_with_eos(prepared, tokenizer):
    d = Data(prepared)
    assert d.bos and d.eos_id == 1 and json.loads((prepared / 'meta.json').read_text())['bos'] is True
    encode, found = load_tokenizer(tokenizer).encode, []
    for split, info in d.splits.items():
        for i in d.tokens(split, 0, info['tokens']).tolist():
            if i == 0:
                found.append([])
            found[-1].append(i)
    assert sorted(found) == sorted([0, *encode(text), 1] for text in TEXTS)


def test_prompts_start_as_the_documents_did(trained, tokenizer):
    record = runs.read_run(trained)
    assert config_json(trained)['data']['bos'] is True
    settings = sample.Settings(max_new_tokens=4)
    encode = load_tokenizer(tokenizer).encode
    for bos, want in ((True, [[0, *encode('a text')], [0]]), (False, [encode('a text'), [1]])):
        assert sample.encode_prompts(settings, load_tokenizer(tokenizer, bos), record, ['a text', ''])[0] == want
    assert run('sample.py', trained, 'a text', '', '--max_new_tokens=4', '--device=cpu').returncode == 0


def test_transformers_starts_the_texts_of_an_exported_run_as_training_did(trained, tokenizer, tmp_path):
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer
    encode, ids = load_tokenizer(tokenizer).encode, {}
    plain = shutil.copytree(trained, tmp_path / 'plain')
    fast = Tokenizer.from_file(str(tokenizer))
    fast.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)])
    fast.save(str(plain / 'tokenizer.json'))
    record = config_json(plain)
    write_json(plain / 'config.json', {**record, 'data': {**record['data'], 'bos': False}})
    for run_folder in (trained, plain):
        export.export_run(run_folder, tmp_path / 'llama' / run_folder.name)
        ids[run_folder.name] = AutoTokenizer.from_pretrained(tmp_path / 'llama' / run_folder.name)('a text').input_ids
    assert ids == {'run': [0, *encode('a text')], 'plain': encode('a text')}


@pytest.mark.parametrize('bos', [None, False])
def test_tasks_start_with_bos_unless_told_not_to(trained, bos, tmp_path, monkeypatch):
    pytest.importorskip('lm_eval')
    from common.lm_eval_adapter import RunLM
    (tmp_path / 'lambada_openai.jsonl').write_text(json.dumps({'text': 'a text of words'}) + '\n')
    asked = []

    def score(self, requests):
        asked.extend((list(context), list(continuation)) for context, continuation in requests)
        return [(-1.0, False, False)] * len(requests)
    monkeypatch.setattr(judge.Scorer, 'score', score)
    s = judge.Settings(bos=bos, data_dir=str(tmp_path), device='cpu')
    scorer, encoding, _ = judge.load_scorer(trained, s)
    judge.lambada_first_token(scorer, encoding, s)
    lm = RunLM(scorer, encoding)
    lm.loglikelihood([SimpleNamespace(args=pair) for pair in (('a text', ' of'), ('', 'words'))])
    lm.loglikelihood_rolling([SimpleNamespace(args=('a text',))])
    encode, start = encoding.encode, [] if bos is False else [0]
    empty = [1] if bos is False else [0]
    assert asked[0] == (start + encode('a text of'), encode(' words'))
    assert asked[1] == (start + encode('a text'), encode(' of')) and asked[2] == (empty, encode('words'))
    assert asked[3] == (empty, encode('a text'))


def test_both_readings_of_lambadas_perplexity_have_a_name(tokenizer, tmp_path):
    """The continuation is what follows the last space; blanks at the end are no word."""
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


def test_a_tokenizer_without_bos_is_a_sentence(trained, tiny_data, tmp_path):
    (tmp_path / 'a.txt').write_text('a')
    assert_sentence(run('prepare_fineweb.py', tmp_path / 'a.txt', '--tokenizer=byte', '--bos',
                        f'--out_dir={tmp_path}/data'), 'the tokenizer byte has no token that starts a document')
    assert not (tmp_path / 'data').exists()
    out = tmp_path / 'bytes'
    assert train_tiny(tiny_data, out, steps=1).returncode == 0
    assert_sentence(run('eval.py', out, '--tasks=lambada_first_token', '--bos', '--device=cpu'),
                    'the tokenizer byte has no token that starts a document')
