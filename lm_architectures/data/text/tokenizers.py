"""Tokenizers by name or file: read `load_tokenizer` first."""
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm_architectures.data.tasks import task_class
from lm_architectures.files import UserError, sha256, without_surrogates, write_file, write_json

TOKENIZER_FILES = ('tokenizer.json', 'tokenizer.model', 'tokenizer_config.json', 'gpt2_vocabulary')  # last: a folder


@dataclass
class Tokenizer:
    """Convert between text and ids 0 ... n_ids - 1, with one or two functions of the library."""

    name: str
    n_ids: int  # including eos
    eos_id: int  # ends each document
    encode: Callable[[str], list[int]]  # text -> ids; '<|endoftext|>' may be read as eos
    token_bytes: Callable[[int], bytes]  # a token may end inside a character
    bos_id: int | None = None  # start-of-document token, if there is one
    encode_plain: Callable | None = None  # as `encode`, but '<|endoftext|>' is text; ids in a list or array
    to_text: Callable[[list[int]], str] | None = None  # as the library decodes, if not byte by byte
    start: tuple[int, ...] = ()  # prefix of documents and prompts: bos if `load_tokenizer(bos=True)`

    def prompt(self, text: str) -> list[int]:
        """Return a prompt's ids: start and text. An empty prompt is bos or eos."""
        return [*self.start, *self.encode(text)] or [self.eos_id]

    def decode(self, ids) -> bytes:
        return b''.join(map(self.token_bytes, ids))

    def decode_text(self, ids) -> str:
        return self.to_text(ids) if self.to_text else self.decode(ids).decode(errors='replace')


def load_tokenizer(name, bos: bool = False, eos_token: str | None = None) -> Tokenizer:
    """Load a tokenizer: 'byte' (bytes and eos), 'gpt2' (via tiktoken), a synthetic task, or a path.

    A path is a Hugging Face tokenizer.json, a SentencePiece .model, or a folder with GPT-2's
    encoder.json and vocab.bpe. bos: start documents and prompts with bos. eos_token ends a
    document; None: from tokenizer_config.json next to it, else a common name. UserError if invalid.
    """
    name, path = str(name), Path(name)
    if name == 'byte':
        found = dict(n_ids=257, eos_id=256, encode=lambda text: list(text.encode()),
                     encode_plain=lambda text: np.frombuffer(text.encode(), np.uint8),
                     token_bytes=lambda i: bytes([i]) if i < 256 else b'')
    elif task_class(name):
        from lm_architectures.data.generated import symbol_tokenizer
        found = symbol_tokenizer(name)
    elif name == 'gpt2' or path.exists():
        from lm_architectures.data.text.tokenizer_files import gpt2, huggingface, sentence_piece
        found = (gpt2(name) if name == 'gpt2' or path.is_dir() else
                 sentence_piece(path) if path.suffix == '.model' else huggingface(path, eos_token))
    else:
        raise UserError(f"unknown tokenizer {name!r}: expected 'byte', 'gpt2', a task (OWN_TASKS has your own), or the "
                        'path of a tokenizer.json, a SentencePiece .model or a folder with encoder.json and vocab.bpe')
    tokenizer, encode = Tokenizer(name, **found), found['encode']
    tokenizer.encode = lambda text: encode(without_surrogates(text))
    if bos and tokenizer.bos_id is None:
        raise UserError(f'the tokenizer {name} has no bos token, such as <s>: leave out --bos')
    tokenizer.start = (tokenizer.bos_id,) if bos else ()
    return tokenizer


def tokenizer_digest(name) -> str | None:
    """Return the identity of a tokenizer: its name or its file's SHA-256; None if missing."""
    name, path = str(name), Path(name)
    if name in ('byte', 'gpt2') or task_class(name):
        return name
    if path.is_dir():  # only GPT-2's tokenizer is a folder
        return 'gpt2'
    return sha256(path) if path.is_file() else None


def copy_tokenizer(folder, name: str, eos_token: str | None = None) -> str:
    """Copy a tokenizer's file or folder into a folder. Returns its name there, for meta.json.

    Names that are not paths are returned unchanged. tokenizer_config.json records eos_token.
    """
    path, folder = Path(name), Path(folder)
    if tokenizer_digest(name) in (name, None):  # not a path, even if there is such a file; or missing
        return name
    if path.is_dir():
        (folder / 'gpt2_vocabulary').mkdir(exist_ok=True)
        for file in ('encoder.json', 'vocab.bpe'):
            write_file(folder / 'gpt2_vocabulary' / file, (path / file).read_bytes())
        return 'gpt2_vocabulary'
    from lm_architectures.data.text.tokenizer_files import special_tokens
    write_json(folder / 'tokenizer_config.json', special_tokens(path) | ({'eos_token': eos_token} if eos_token else {}))
    own_name = 'tokenizer.model' if path.suffix == '.model' else 'tokenizer.json'
    write_file(folder / own_name, path.read_bytes())
    return own_name


def padded_vocab(n_ids: int) -> int:
    """Return the number of embedding rows: n_ids + <predict>, rounded up to a multiple of 64."""
    return (n_ids // 64 + 1) * 64
