"""Train a byte-level BPE tokenizer.

    python -m lm_architectures.data.text.train_tokenizer 'texts/*.txt' --vocab_size=16000

Texts are .txt files or records with a field `text` (--text_field). --split_at='<|endoftext|>' keeps
that marker of a .txt file out of the BPE. Then use prepare_fineweb.py --tokenizer=tokenizer.json.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lm_architectures.data.text.sources import Reading, Source
from lm_architectures.data.text.tokenizer_files import EOS_NAMES
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.files import UserError, friendly_errors, write_file
from lm_architectures.settings import check_ranges, load_settings

PART = 10 ** 5  # characters of a text that are read at a time: a long text takes 80 times its size in memory


@dataclass
class Settings:
    vocab_size: int = 32000  # number of ids, including the 256 bytes and eos
    out: str = 'tokenizer.json'  # output file
    text_field: str = 'text'  # field of records with the text
    split_at: str | None = None  # text that separates documents in a .txt file, as in prepare_fineweb.py


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> str:
    """Train a byte-level BPE of at most vocab_size ids. Returns a tokenizer.json; id 0 is eos."""
    from tokenizers import ByteLevelBPETokenizer
    fast = ByteLevelBPETokenizer()
    fast.train_from_iterator(texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=[EOS_NAMES[0]])
    return fast.to_str(pretty=True)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, names, _ = load_settings(Settings, argv)
        check_ranges(s, vocab_size=(257, 10 ** 6))
        if not names:
            raise UserError("no texts given: expected files, such as 'texts/*.txt'")
        if Path(s.out).exists():
            raise UserError(f'{s.out} already exists: choose another --out')
        reading = Reading(id_field=None, text_field=s.text_field, split_at=s.split_at)
        texts = (found[1] for name in names for _, found in Source(name, reading).documents() if found)
        parts = (text[i:i + PART] for text in texts for i in range(0, len(text), PART))
        write_file(s.out, train_tokenizer(parts, s.vocab_size).encode())
        print(f'{s.out} has {load_tokenizer(s.out).n_ids} ids')


if __name__ == '__main__':
    main()
