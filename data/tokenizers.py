"""Tokenizers by name or file. Read `load_tokenizer` first; then one function per kind.

    python -m data.tokenizers 'texts/*.txt' --vocab_size=16000 --out=bpe16k.json   train a BPE

Texts are .txt files or records with a field `text`. --split_at='<|endoftext|>' keeps that marker of
a .txt file out of the BPE. Then use prepare_fineweb.py --tokenizer=bpe16k.json.
"""
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from common.files import UserError, friendly_errors, read_json, sha256, write_file, write_json
from common.settings import check_ranges, load_settings
from data.tasks import make_task, task_class

GPT2_SHA256 = ('1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5',  # vocab.bpe, encoder.json
               '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783')
BOS_NAMES = ('<s>', '<|begin_of_text|>', '<bos>', '[BOS]')
EOS_NAMES = ('<|endoftext|>', '</s>', '<|end_of_text|>', '<eos>', '[EOS]')
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer.model', 'tokenizer_config.json', 'gpt2_vocabulary')  # last: a folder


@dataclass
class Tokenizer:
    """A tokenizer. decode returns bytes, because a token may end inside a character."""

    name: str
    n_ids: int  # ids 0 ... n_ids - 1, including eos
    eos_id: int
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], bytes]
    encode_document: Callable | None = None  # encodes '<|endoftext|>' as text; list or array
    bos_id: int | None = None  # start-of-document token, if there is one
    decode_text: Callable | None = None  # decodes to str as transformers does, if that differs
    start: tuple[int, ...] = ()  # prefix of documents and prompts: bos if `load_tokenizer(bos=True)`


def load_tokenizer(name, bos: bool = False, eos_token: str | None = None) -> Tokenizer:
    """Load a tokenizer: 'byte' (bytes and eos), 'gpt2' (via tiktoken), a synthetic task, or a path.

    A path is a Hugging Face tokenizer.json, a SentencePiece .model, or a folder with GPT-2's
    encoder.json and vocab.bpe. bos: start documents and prompts with bos. eos_token ends a
    document; None: from tokenizer_config.json next to it, else a common name. UserError if invalid.
    """
    name, path = str(name), Path(name)
    if name == 'byte':
        tokenizer = byte_tokenizer()
    elif task_class(name):
        tokenizer = symbol_tokenizer(name, make_task(name).symbols)
    elif name == 'gpt2' or path.is_dir():
        tokenizer = gpt2_tokenizer(name)
    elif path.exists():
        tokenizer = sentencepiece_tokenizer(path) if path.suffix == '.model' else huggingface_tokenizer(path, eos_token)
    else:
        raise UserError(f"unknown tokenizer {name!r}: expected 'byte', 'gpt2', or the path of a tokenizer.json, a "
                        'SentencePiece .model or a folder with encoder.json and vocab.bpe')
    if bos and tokenizer.bos_id is None:
        raise UserError(f'the tokenizer {name} has no bos token, such as <s>: leave out --bos')
    plain, document = tokenizer.encode, tokenizer.encode_document or tokenizer.encode
    return replace(tokenizer, start=(tokenizer.bos_id,) if bos else (),
                   encode=lambda text: encode_robustly(name, plain, text),
                   encode_document=lambda text: encode_robustly(name, document, text))


def encode_robustly(name: str, encode: Callable, text: str):
    """Encode a text. If the library fails, for example on a million spaces, encode it in halves."""
    try:
        return encode(text)
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        if len(text) < 1000:
            raise UserError(f'the tokenizer {name} cannot encode {text[:50]!r} ({error}): use another tokenizer')
    middle = len(text) // 2
    return [*encode_robustly(name, encode, text[:middle]), *encode_robustly(name, encode, text[middle:])]


def tokenizer_digest(name) -> str | None:
    """Return the identity of a tokenizer: its name or its file's SHA-256; None if missing."""
    name, path = str(name), Path(name)
    if name in ('byte', 'gpt2') or task_class(name):
        return name
    if path.is_dir():  # only GPT-2's tokenizer is a folder
        return 'gpt2'
    return sha256(path) if path.is_file() else None


def special_tokens(path: Path) -> dict[str, str]:
    """Return 'eos_token' and 'bos_token' from the tokenizer_config.json next to tokenizer.json."""
    file = path.with_name('tokenizer_config.json')
    config = read_json(file, 'copy it again, or remove it') if file.is_file() else {}
    named = {key: config.get(key) for key in ('eos_token', 'bos_token')}
    return {key: str(name.get('content') if isinstance(name, dict) else name) for key, name in named.items() if name}


def copy_tokenizer(folder, name: str, eos_token: str | None = None) -> str:
    """Copy a tokenizer's file or folder into a folder. Returns its name there, for meta.json.

    Names that are not paths are returned unchanged. tokenizer_config.json records eos_token.
    """
    path, own_name, files = Path(name), 'gpt2_vocabulary', ['encoder.json', 'vocab.bpe']
    if path.is_file():
        own_name, files = ('tokenizer.model' if path.suffix == '.model' else 'tokenizer.json'), ['']
        config = special_tokens(path)
        write_json(Path(folder) / 'tokenizer_config.json', config | ({'eos_token': eos_token} if eos_token else {}))
    elif not (path / files[0]).is_file():
        return name
    for file in files:
        target = Path(folder) / own_name / file
        target.parent.mkdir(exist_ok=True)
        write_file(target, (path / file).read_bytes())
    return own_name


def byte_tokenizer() -> Tokenizer:
    """Return the byte tokenizer: 256 bytes, then eos."""
    return Tokenizer('byte', 257, 256, lambda text: list(text.encode()), lambda ids: bytes(i for i in ids if i < 256),
                     lambda text: np.frombuffer(text.encode(), np.uint8))


def symbol_tokenizer(name: str, symbols: list[str]) -> Tokenizer:
    """Return a tokenizer with one token per symbol: a word, `||`, or a single other character.

    Spaces and commas separate symbols. Decoding puts a space before each symbol.
    """
    id_of = {symbol: i for i, symbol in enumerate(symbols)}
    pattern = symbol_pattern(symbols)

    def encode(text):
        found = re.findall(pattern, text)
        for symbol in found:
            if symbol not in id_of:
                raise UserError(f'unknown symbol {symbol!r} in {name}: expected one of {symbols[0]} ... {symbols[-1]}')
        return [id_of[symbol] for symbol in found]

    def decode(ids):
        return ''.join(' ' + symbols[i] for i in ids if i < len(symbols)).encode()
    return Tokenizer(name, len(symbols) + 1, len(symbols), encode, decode,
                     decode_text=lambda ids: decode(ids).decode().removeprefix(' '))


def symbol_pattern(symbols: list[str]) -> str:
    """Return a regular expression that matches one symbol."""
    return r'\w+|\|\||[^\w\s,]' if '||' in symbols else r'\w+|[^\w\s,]'


def gpt2_tokenizer(name: str) -> Tokenizer:
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
    # not encode_ordinary, which panics on a million spaces
    return Tokenizer(name, 50257, 50256, lambda text: bpe.encode(text, disallowed_special=()), bpe.decode_bytes,
                     lambda text: bpe.encode_to_numpy(text, disallowed_special=()))


def huggingface_tokenizer(path: Path, eos_token: str | None = None) -> Tokenizer:
    """Load a tokenizer.json. eos_token: see `load_tokenizer`."""
    from tokenizers import Tokenizer as Fast
    try:
        fast = Fast.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f'{path} is not a tokenizer.json: {error}')
    special, vocabulary = special_tokens(path), fast.get_vocab()
    bos, eos = (next((vocabulary[name] for name in names if name in vocabulary), None) for names in (
        (special.get('bos_token'), *BOS_NAMES), [eos_token] if eos_token else (special.get('eos_token'), *EOS_NAMES)))
    if eos is None:
        raise UserError(f'{path} has no eos token: expected {eos_token or " or ".join(EOS_NAMES)}; set another with '
                        '"eos_token" in tokenizer_config.json next to it, or --eos_token when importing')
    fast.no_truncation()
    fast.no_padding()
    if getattr(fast.model, 'dropout', None):
        fast.model.dropout = None
    decoder, byte_of, added = str(json.loads(path.read_text(encoding='utf-8')).get('decoder')), {}, {}
    if not any(kind in decoder for kind in ('ByteLevel', 'Metaspace', 'Replace')):
        raise UserError(f'{path} has the decoder {decoder}: expected a byte-level or SentencePiece decoder')
    if 'ByteLevel' in decoder:
        byte_of = bytes_of_gpt2_characters()
        added = {i: token.content.encode() for i, token in fast.get_added_tokens_decoder().items()}

    def encode(text):
        fast.encode_special_tokens = False
        return fast.encode(text, add_special_tokens=False).ids

    names = [fast.id_to_token(i) for i in (bos, eos) if i is not None]
    inside = '|'.join(f'(?<={re.escape(name[0])})(?={re.escape(name[1:])})' for name in names)

    def encode_document(text):
        fast.encode_special_tokens = True  # '<|endoftext|>' in a document is ordinary text
        ids = fast.encode(text, add_special_tokens=False).ids
        if eos in ids or bos in ids:  # a Unigram model may still match it: split it in two
            ids = [i for part in re.split(inside, text) for i in fast.encode(part, add_special_tokens=False).ids]
        return ids

    def decode(ids):
        return b''.join(added[i] if i in added else piece_bytes(fast.id_to_token(i) or '', byte_of)
                        for i in ids if i not in (bos, eos))
    return Tokenizer(str(path), max(vocabulary.values()) + 1, eos, encode, decode, encode_document, bos, fast.decode)


def bytes_of_gpt2_characters() -> dict[str, int]:
    """Return {GPT-2's printable character for a byte: the byte}."""
    from tokenizers.pre_tokenizers import ByteLevel
    characters = sorted(ByteLevel.alphabet())  # printable bytes map to themselves, others to 256 and up
    printable = [ord(c) for c in characters if ord(c) < 256]
    return dict(zip(characters, [*printable, *sorted({*range(256)} - {*printable})]))


def sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """Load a SentencePiece .model."""
    import sentencepiece
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise UserError(f'{path} is not a SentencePiece model: {error}')
    if model.eos_id() < 0:
        raise UserError(f'{path} has no eos piece: train the SentencePiece model with one')

    def decode(ids):
        return b''.join(piece_bytes(model.id_to_piece(i)) for i in ids if not model.is_control(i))
    n_blanks = int(decode(model.encode('a')).startswith(b' '))  # spaces that the model adds before a text

    def decode_text(ids):
        from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
        pieces = [model.id_to_piece(i) for i in ids if not (model.is_control(i) or model.is_unknown(i))]
        return Sequence([Replace('\u2581', ' '), ByteFallback(), Fuse(), Strip(' ', n_blanks, 0)]).decode(pieces)
    bos = model.bos_id() if model.bos_id() >= 0 else None
    return Tokenizer(str(path), model.vocab_size(), model.eos_id(), model.encode, decode, bos_id=bos,
                     decode_text=decode_text)


def piece_bytes(piece: str, byte_of: dict[str, int] | None = None) -> bytes:
    """Return a token's bytes, from GPT-2's or SentencePiece's spelling (<0x41>, U+2581: space)."""
    if byte_of:
        return bytes(byte_of[c] for c in piece) if all(c in byte_of for c in piece) else piece.encode()
    if re.fullmatch('<0x[0-9A-F]{2}>', piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace('\u2581', ' ').encode()


def padded_vocab(n_ids: int) -> int:
    """Return the number of embedding rows: n_ids + <predict>, rounded up to a multiple of 64."""
    return (n_ids // 64 + 1) * 64


# ---- training one ----

@dataclass
class Settings:
    vocab_size: int = 32000  # number of ids, including the 256 bytes and eos
    out: str = 'tokenizer.json'  # output file
    split_at: str | None = None  # text that separates documents in a .txt file, as in prepare_fineweb.py


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> str:
    """Train a byte-level BPE. Returns a tokenizer.json as text; id 0, <|endoftext|>, is eos.

    The result has fewer than vocab_size ids if the texts have too few pairs.
    """
    from tokenizers import ByteLevelBPETokenizer
    fast = ByteLevelBPETokenizer()
    fast.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[EOS_NAMES[0]])
    return fast.to_str(pretty=True)


def main(argv: list[str] | None = None) -> None:
    from data.sources import TEXTS, open_source
    with friendly_errors(argv):
        s, names, _ = load_settings(Settings, argv)
        check_ranges(s, vocab_size=(257, 10 ** 6))
        if not names:
            raise UserError("no texts given. Usage: python -m data.tokenizers 'texts/*.txt' --vocab_size=16000")
        if Path(s.out).exists():
            raise UserError(f'{s.out} already exists: choose another --out')
        of_texts = SimpleNamespace(**vars(TEXTS) | {'split_at': s.split_at})
        batches = (batch for name in names for _, batch in open_source(name, of_texts)[0](None))
        texts = (found[2] for batch in batches for found in batch if found)  # a long text takes 80x its size in RAM
        parts = (text[i:i + 10 ** 5] for text in texts for i in range(0, len(text), 10 ** 5))
        write_file(s.out, train_tokenizer(parts, s.vocab_size).encode())
        print(f'{s.out} has {load_tokenizer(s.out).n_ids} ids')


if __name__ == '__main__':
    main()
