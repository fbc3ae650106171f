"""Tokenizers given by path: round trips, long documents, and the copy kept in a run."""
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import assert_sentence, run, succeeded, train_tiny, trained_run

from lm_architectures.data import Data
from lm_architectures.data.text import writing
from lm_architectures.data.text.tokenizers import copy_tokenizer, load_tokenizer, tokenizer_digest
from lm_architectures.data.text.train_tokenizer import train_tokenizer
from lm_architectures.data.text.writing import document_ids, write_data
from lm_architectures.files import UserError
from lm_architectures.run import folders
from lm_architectures.run.load import load_draft

TRAIN_TOKENIZER = 'lm_architectures.data.text.train_tokenizer'
TEXTS = ['a text of some words', 'and naïve words of a 日本 text'] * 40


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
    """Make two tokenizer.json of equal size, data with each, and SentencePiece models."""
    sentencepiece = pytest.importorskip('sentencepiece')
    folder = tmp_path_factory.mktemp('tokenizers')
    for name, step in (('own', 1), ('other', -1)):
        (folder / f'{name}.json').write_text(train_tokenizer([text[::step] for text in TEXTS], 270))
        write_data(folder / name, load_tokenizer(folder / f'{name}.json'),
                   [('val' if i % 4 == 0 else 'train', text) for i, text in enumerate(TEXTS)])
    plain = {'normalization_rule_name': 'identity', 'remove_extra_whitespaces': False}
    for name, options in (('own', plain), ('bpe', {'model_type': 'bpe'})):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=str(folder / name), vocab_size=320, byte_fallback=True,
            hard_vocab_limit=False, minloglevel=2, **options)
    return folder


@pytest.fixture(scope='module')
def trained(tokenizers, tmp_path_factory):
    return trained_run(tokenizers / 'own', tmp_path_factory.mktemp('run') / 'run', steps=2)


# ---- texts and ids ----

@pytest.mark.parametrize('name', ['byte', 'own.json', 'own.model'])
def test_decoding_returns_the_encoded_text(tokenizers, name):
    tokenizer = load_tokenizer(name if name == 'byte' else tokenizers / name)
    text = 'a naïve Hund 日本 and new ☃ things'
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eos_id]).decode().removeprefix(' ') == text and max(ids) < tokenizer.n_ids
    assert b''.join(tokenizer.decode([i]) for i in ids) == tokenizer.decode(ids)


@pytest.mark.parametrize('name', ['byte', 'own.json', 'own.model', 'gpt2'])
def test_a_lone_surrogate_is_a_question_mark(tokenizers, name, monkeypatch):
    use_tiny_gpt2(monkeypatch)
    tokenizer = load_tokenizer(tokenizers / name if '.' in name else name)
    assert tokenizer.encode('a \udcff b') == tokenizer.encode('a ? b')


def test_a_special_token_spelled_in_a_document_is_text(tokenizers, tmp_path):
    library = pytest.importorskip('tokenizers')
    fast, path = library.Tokenizer.from_file(str(tokenizers / 'own.json')), tmp_path / 'tokenizer.json'
    fast.add_special_tokens(['[PAD]'])
    fast.save(str(path))
    tokenizer, text = load_tokenizer(path), 'before <|endoftext|> after [PAD]'
    assert tokenizer.encode(text).count(tokenizer.eos_id) == 1  # allowed in a prompt
    ids = document_ids(tokenizer, text).tolist()
    assert ids.index(tokenizer.eos_id) == len(ids) - 1 and tokenizer.decode(ids).decode() == text
    assert fast.token_to_id('[PAD]') not in ids
    with ThreadPoolExecutor(4) as pool:  # threads may encode prompts and documents at the same time
        found = pool.map(lambda i: (tokenizer.encode_plain if i % 2 else tokenizer.encode)(50 * text), range(100))
        assert [part.count(tokenizer.eos_id) for part in found] == 50 * [50, 0]
    fast = library.Tokenizer(library.models.Unigram(  # eos is an ordinary piece
        [('<unk>', 0.0), ('</s>', 0.0), *((c, -3.0) for c in '</s>ab\u2581')], unk_id=0))
    fast.pre_tokenizer, fast.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    fast.add_special_tokens(['</s>'])
    fast.save(str(path))
    own = load_tokenizer(path)
    assert document_ids(own, 'a </s> b').tolist().count(own.eos_id) == 1


def test_added_tokens_decode_to_themselves_and_padding_truncation_and_dropout_are_off(tokenizers, tmp_path):
    library = pytest.importorskip('tokenizers')
    fast, path = library.Tokenizer.from_file(str(tokenizers / 'own.json')), tmp_path / 'tokenizer.json'
    fast.add_tokens(['caf\u00e9'])
    fast.enable_padding(length=16, pad_id=0, pad_token='<|endoftext|>')
    fast.enable_truncation(2)
    fast.model.dropout = 0.9
    fast.save(str(path))
    tokenizer = load_tokenizer(path)
    assert {tuple(tokenizer.encode(TEXTS[0])) for _ in range(9)} == {
        tuple(load_tokenizer(tokenizers / 'own.json').encode(TEXTS[0]))}
    ids = tokenizer.encode('caf\u00e9 \u00e9')
    assert 2 < len(ids) < 5 and tokenizer.decode(ids).decode() == 'caf\u00e9 \u00e9'
    fast.decoder = library.decoders.WordPiece()
    fast.save(str(path))
    with pytest.raises(UserError, match='expected a byte-level or SentencePiece decoder'):
        load_tokenizer(path)


def test_a_tokenizer_can_be_trained_to_a_given_size(tmp_path):
    text = 'Träume aus Glas, dreams of glass, 夢. ' * 20 + ' '.join(f'word{i}' for i in range(200))
    (tmp_path / 'a.jsonl').write_text(json.dumps({'text': text}) + '\n{"text": null}\n{"text": "\\ud800x"}\n')
    (tmp_path / 'b.txt').write_text(text + '\n<|endoftext|>' * 30)
    train = TRAIN_TOKENIZER, tmp_path / 'a.jsonl', tmp_path / 'b.txt', '--vocab_size=300', '--split_at=<|endoftext|>'
    assert 'has 300 ids' in succeeded(run('-m', *train, f'--out={tmp_path}/bpe.json')).stdout
    tokenizer = load_tokenizer(tmp_path / 'bpe.json')
    assert tokenizer.n_ids == 300 and tokenizer.decode(tokenizer.encode(text)).decode() == text
    assert len(tokenizer.encode(text)) < 0.6 * len(text.encode())
    assert 'endoftext' not in json.loads((tmp_path / 'bpe.json').read_text())['model']['vocab']  # a marker, not a word
    assert_sentence(run('-m', *train, f'--out={tmp_path}/bpe.json'), 'already exists: choose another --out')


def test_a_missing_gpt2_tokenizer_gives_a_clear_error(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip('tiktoken')
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'empty'))
    monkeypatch.setattr('tiktoken.load.read_file', lambda *_: (_ for _ in ()).throw(OSError('no network')))
    monkeypatch.setattr(tiktoken.registry, 'ENCODINGS', {})
    with pytest.raises(UserError, match='TIKTOKEN_CACHE_DIR .* --tokenizer=FOLDER'):
        load_tokenizer('gpt2')
    with pytest.raises(UserError, match=f'could not be loaded from {tmp_path}'):
        load_tokenizer(tmp_path)


# ---- long documents, and texts that the libraries cannot encode ----

@pytest.fixture(scope='module')
def kinds(tokenizers):
    """Return {name: function} of tokenizers that split texts in different ways."""
    library = pytest.importorskip('tokenizers')
    norm = library.normalizers
    fast = library.Tokenizer(library.models.BPE(unk_token='<unk>', fuse_unk=True))  # like Llama's tokenizer.json
    fast.normalizer = norm.Sequence([norm.NFKC(), norm.Prepend('\u2581'), norm.Replace(' ', '\u2581')])
    fast.decoder = library.decoders.Metaspace()
    fast.train_from_iterator(TEXTS, library.trainers.BpeTrainer(vocab_size=320, special_tokens=['</s>', '<unk>']))
    fast.add_tokens(['some words'])
    fast.save(str(tokenizers / 'llama.json'))
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_gpt2(patch)
        files = [tokenizers / name for name in ('own.json', 'llama.json', 'own.model', 'bpe.model')]
        return {name: own.encode_plain or own.encode for name, own in zip(
            ('byte', 'gpt2', *files), map(load_tokenizer, ('byte', 'gpt2', *files)))}


def use_tiny_gpt2(patch):
    """Replace 'gpt2' by a tiktoken encoding with GPT-2's splitting rules, but few merges."""
    tiktoken, public = pytest.importorskip('tiktoken'), pytest.importorskip('tiktoken_ext.openai_public')
    ranks = {bytes([i]): i for i in range(256)} | {b'\n\n': 257, b' a': 258, b'te': 259, b'xt': 260, b'text': 261}
    encoding = tiktoken.Encoding('gpt2', pat_str=public.r50k_pat_str, mergeable_ranks=ranks,
                                 special_tokens={'<|endoftext|>': 50256})
    patch.setattr(tiktoken, 'get_encoding', lambda name: encoding)


WORDS = ['a', 'text', 'some words', 'naïve', '日本', '語', '12345', '0', '...', '!', '</s>', '<unk>', 'e\u0301',
         "don't", '😀', '\u00a0', 'x' * 50, 'ab' * 30]
BLANKS = [' ', '  ', '\n', '\n\n', ' \n ', '\t', '', '', '', '\r\n', '\u3000', '   ']


@pytest.mark.parametrize('seed, blank', [*enumerate(' \n\n \n')])
def test_encoding_a_long_text_in_pieces_gives_the_same_ids(kinds, seed, blank, monkeypatch):
    monkeypatch.setattr(writing, 'PIECE', 2000)
    rng = random.Random(seed)
    words, blanks = rng.sample(WORDS, rng.randint(3, len(WORDS))), rng.sample(BLANKS, rng.randint(2, 5))
    text = ''.join(rng.choice(words) + rng.choice(blanks) for _ in range(3000))
    runs = [rng.choice([' ', '\n', 'a', '0', '!', '日', 'ab']) * rng.randint(1000, 5000) for _ in range(seed % 3)]
    for run_of_one in runs:
        i = rng.randrange(len(text))
        text = text[:i] + run_of_one + text[i:]
    text = f'{"a " * 700}{blank * 1500}{text}'  # the first piece ends in blanks, whose ids depend on the next word
    for name, encode in kinds.items():
        lengths = []

        def counted(part, encode=encode):
            lengths.append(len(part))
            return encode(part)
        pieces = [[*ids] for ids in writing.encoded_pieces(counted, text)]
        assert [i for ids in pieces for i in ids] == [*encode(text)], name
        assert len(pieces) > 1 and max(lengths) <= 2000 + 1009 + 2000 + sum(map(len, runs)), name
        lengths.clear()
        assert len([*writing.encoded_pieces(counted, text[:2000])]) == 1 and lengths == [2000]


@pytest.mark.parametrize('blank', [' ', '\n'])
def test_a_million_blanks_are_encoded_in_prompts_and_documents(blank, monkeypatch, capfd):
    use_tiny_gpt2(monkeypatch)
    tokenizer, text = load_tokenizer('gpt2'), f'a{blank * 10 ** 6}b'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids).decode() == text and document_ids(tokenizer, text).tolist() == [*ids, 50256]
    assert capfd.readouterr().err == ''  # no stack trace from the library


# ---- in data and runs ----

@pytest.mark.slow
def test_a_copied_run_samples_without_data_and_evaluates_on_moved_data(trained, tokenizers, tmp_path, monkeypatch):
    assert (trained / 'tokenizer.json').read_bytes() == (tokenizers / 'own.json').read_bytes()
    copy, data = shutil.copytree(trained, tmp_path / 'copy'), shutil.copytree(tokenizers / 'own', tmp_path / 'moved')
    succeeded(run('sample.py', copy, 'a text', '--max_new_tokens=3'))
    monkeypatch.chdir(tmp_path)
    for name in (data, 'moved'):
        succeeded(run('eval.py', copy, '--val', f'--data={name}'))
        succeeded(run('train.py', f'--out_dir={copy}', '--resume', f'--data={name}'))


def test_gpt2_files_are_copied_and_recognized(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('byte').touch()
    assert copy_tokenizer(tmp_path, 'byte') == 'byte'  # not that file
    (tmp_path / 'own').mkdir()
    for name in ('encoder.json', 'vocab.bpe'):  # compared with OpenAI's files when loaded
        (tmp_path / 'own' / name).write_text(name)
    kept = tmp_path / copy_tokenizer(tmp_path, str(tmp_path / 'own'))
    assert (kept / 'vocab.bpe').read_text() == 'vocab.bpe' and tokenizer_digest(kept) == 'gpt2'


@pytest.mark.slow
def test_tokenizers_are_compared_by_content(trained, tokenizers, tmp_path):
    record = folders.read_run(trained)
    other = Data(tokenizers / 'other')
    assert other.n_ids == record['data']['n_ids']
    with pytest.raises(UserError, match='use data with that tokenizer'):
        folders.run_data(record, str(tokenizers / 'other'))
    assert_sentence(train_tiny(other.folder, tmp_path / 'new', f'--init_from={trained}'), 'with that tokenizer')
    load_draft(shutil.copytree(trained, tmp_path / 'draft'), record, 'cpu', torch.float32)
    draft = {'tokenizer': other.tokenizer, 'n_ids': other.n_ids, 'eos_id': other.eos_id}
    with pytest.raises(UserError, match='choose a draft run with the same tokenizer'):
        load_draft(trained, {'data': draft}, 'cpu', torch.float32)
