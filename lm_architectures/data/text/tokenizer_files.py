"""Tokenizers of other libraries: GPT-2's, tokenizer.json, SentencePiece."""
import json
import re
from functools import partial
from pathlib import Path

import numpy as np

from lm_architectures.files import UserError, read_json

GPT2_SHA256 = ('1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5',  # vocab.bpe, encoder.json
               '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783')
BOS_NAMES = ('<s>', '<|begin_of_text|>', '<bos>', '[BOS]')
EOS_NAMES = ('<|endoftext|>', '</s>', '<|end_of_text|>', '<eos>', '[EOS]')


def special_tokens(path: Path) -> dict[str, str]:
    """Return 'eos_token' and 'bos_token' from the tokenizer_config.json next to tokenizer.json."""
    file = path.with_name('tokenizer_config.json')
    config = read_json(file, 'copy it again, or remove it') if file.is_file() else {}
    named = {key: config.get(key) for key in ('eos_token', 'bos_token')}
    return {key: str(name.get('content') if isinstance(name, dict) else name) for key, name in named.items() if name}


def first_id(vocabulary: dict[str, int], names: list) -> int | None:
    """Return the id of the first of the names that is in the vocabulary."""
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def gpt2(name: str) -> dict:
    """Load GPT-2's 50257 ids with tiktoken, by download or from a folder with OpenAI's files."""
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str
    try:
        if name == 'gpt2':
            bpe = tiktoken.get_encoding('gpt2')
        else:
            ranks = data_gym_to_mergeable_bpe_ranks(f'{name}/vocab.bpe', f'{name}/encoder.json', *GPT2_SHA256)
            bpe = tiktoken.Encoding('gpt2', pat_str=r50k_pat_str, mergeable_ranks=ranks,
                                    special_tokens={'<|endoftext|>': 50256}, explicit_n_vocab=50257)
    except (OSError, ValueError) as error:  # ValueError: the files are not OpenAI's
        raise UserError(f'the GPT-2 tokenizer could not be loaded from {"the network" if name == "gpt2" else name} '
                        f'({error}): set TIKTOKEN_CACHE_DIR to a folder that tiktoken has downloaded it to, or give '
                        '--tokenizer=FOLDER with encoder.json and vocab.bpe')

    def encode(text):  # not with encode_ordinary, which panics where this raises ValueError
        try:
            return bpe.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a run of hundreds of thousands of blanks
            middle = len(text) // 2
            return np.concatenate([encode(text[:middle]), encode(text[middle:])])
    return dict(n_ids=50257, eos_id=50256, encode=lambda text: encode(text).tolist(), encode_plain=encode,
                token_bytes=bpe.decode_single_token_bytes)


def huggingface(path: Path, eos_token: str | None = None) -> dict:
    """Load a tokenizer.json. eos_token: see `load_tokenizer`."""
    from tokenizers import Tokenizer

    def load(is_plain):  # whether special tokens in a text are read as text
        fast = Tokenizer.from_file(str(path))
        fast.no_truncation()
        fast.no_padding()
        if getattr(fast.model, 'dropout', None):
            fast.model.dropout = None
        fast.encode_special_tokens = is_plain
        return fast
    try:
        fast, plain = load(False), load(True)  # the library cannot switch one that a thread is using
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f'{path} is not a tokenizer.json: {error}')
    special, vocabulary = special_tokens(path), fast.get_vocab()
    bos = first_id(vocabulary, [special.get('bos_token'), *BOS_NAMES])
    eos = first_id(vocabulary, [eos_token] if eos_token else [special.get('eos_token'), *EOS_NAMES])
    if eos is None:
        raise UserError(f'{path} has no eos token: expected {eos_token or " or ".join(EOS_NAMES)}; set another with '
                        '"eos_token" in tokenizer_config.json next to it, or --eos_token when importing')
    byte_of, added = spelling(path, fast)
    names = [fast.id_to_token(i) for i in (bos, eos) if i is not None]
    inside = '|'.join(f'(?<={re.escape(name[0])})(?={re.escape(name[1:])})' for name in names)

    def encode(text, is_plain=False):
        encode_batch = partial((plain if is_plain else fast).encode_batch_fast, add_special_tokens=False)
        ids = encode_batch([text])[0].ids  # a batch of one releases Python's lock, unlike `encode`
        if is_plain and (eos in ids or bos in ids):  # a Unigram model may still match it: split it in two
            ids = [i for part in encode_batch(re.split(inside, text)) for i in part.ids]
        return ids

    def token_bytes(i):
        if i in (bos, eos):
            return b''
        return added[i] if i in added else piece_bytes(fast.id_to_token(i) or '', byte_of)
    return dict(n_ids=max(vocabulary.values()) + 1, eos_id=eos, bos_id=bos, encode=encode,
                encode_plain=partial(encode, is_plain=True), token_bytes=token_bytes, to_text=fast.decode)


def spelling(path: Path, fast) -> tuple[dict[str, int], dict[int, bytes]]:
    """Return ({character: its byte}, {added id: its bytes}) of a byte-level tokenizer, else {}s."""
    from tokenizers.pre_tokenizers import ByteLevel
    decoder = str(json.loads(path.read_text(encoding='utf-8')).get('decoder'))
    if not any(kind in decoder for kind in ('ByteLevel', 'Metaspace', 'Replace')):
        raise UserError(f'{path} has the decoder {decoder}: expected a byte-level or SentencePiece decoder')
    if 'ByteLevel' not in decoder:
        return {}, {}
    characters = sorted(ByteLevel.alphabet())  # printable bytes as themselves, others as characters from 256 on
    printable = [ord(c) for c in characters if ord(c) < 256]
    byte_of = dict(zip(characters, [*printable, *sorted({*range(256)} - {*printable})]))
    return byte_of, {i: token.content.encode() for i, token in fast.get_added_tokens_decoder().items()}


def sentence_piece(path: Path) -> dict:
    """Load a SentencePiece .model."""
    import sentencepiece
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f'{path} is not a SentencePiece model: {error}')
    if model.eos_id() < 0:
        raise UserError(f'{path} has no eos piece: train the SentencePiece model with one')

    def token_bytes(i):
        return b'' if model.is_control(i) else piece_bytes(model.id_to_piece(i))
    n_blanks = int(token_bytes(model.encode('a')[0]).startswith(b' '))  # spaces that the model adds before a text

    def to_text(ids):  # as transformers does: model.decode writes unknown tokens as question marks
        from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
        pieces = [model.id_to_piece(i) for i in ids if not (model.is_control(i) or model.is_unknown(i))]
        return Sequence([Replace('\u2581', ' '), ByteFallback(), Fuse(), Strip(' ', n_blanks, 0)]).decode(pieces)
    return dict(n_ids=model.vocab_size(), eos_id=model.eos_id(), bos_id=model.bos_id() if model.bos_id() >= 0 else None,
                encode=model.encode, token_bytes=token_bytes, to_text=to_text)


def piece_bytes(piece: str, byte_of: dict[str, int] | None = None) -> bytes:
    """Return a token's bytes, from GPT-2's or SentencePiece's spelling (<0x41>, U+2581: space)."""
    if byte_of:
        return bytes(byte_of[c] for c in piece) if all(c in byte_of for c in piece) else piece.encode()
    if re.fullmatch('<0x[0-9A-F]{2}>', piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace('\u2581', ' ').encode()
