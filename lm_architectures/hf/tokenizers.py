"""Export tokenizers to Hugging Face files: tokenizer.json (same ids) and tokenizer_config.json."""
import shutil
import tempfile
from pathlib import Path

from lm_architectures.data.generated import make_task, symbol_pattern
from lm_architectures.data.tasks import task_class
from lm_architectures.data.text.tokenizer_files import EOS_NAMES
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.files import UserError, write_file, write_json

SAMPLE = ' A text  of\nwords, spaces and 12345 digits.'


def save_tokenizer(folder, name: str, bos: bool, max_tokens: int) -> None:
    """Write the tokenizer of a run into a Hugging Face folder.

    name: see `load_tokenizer`. bos: whether texts start with it. max_tokens: the training length.
    """
    from tokenizers.processors import TemplateProcessing
    folder, own, fast = Path(folder), load_tokenizer(name, bos), fast_tokenizer(name)
    eos, start = fast.id_to_token(own.eos_id), fast.id_to_token(own.bos_id) if bos else None
    if Path(name).suffix == '.json' and fast.encode('a').ids == [*own.start, *own.encode('a')]:
        content = Path(name).read_bytes()  # unchanged, so that both have the same checksum
    else:
        fast.add_special_tokens([token for token in (eos, start) if token])
        fast.post_processor = TemplateProcessing(single=[start, '$A'] if bos else ['$A'],
                                                 special_tokens=[(start, own.bos_id)] if bos else [])
        content = fast.to_str(pretty=True).encode()
    write_file(folder / 'tokenizer.json', content)
    write_json(folder / 'tokenizer_config.json', {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': eos, 'bos_token': start, 'pad_token': eos,
        'add_bos_token': bos, 'add_eos_token': False, 'clean_up_tokenization_spaces': False,
        'model_max_length': max_tokens})


def keeps_ids(folder, name: str, bos: bool) -> bool:
    """Return True if AutoTokenizer reads a folder of `save_tokenizer` with the ids of training."""
    from transformers import AutoTokenizer
    sample = ' '.join(make_task(name).symbols) if task_class(name) else f'{SAMPLE} e\u0301\n\n\t'
    return AutoTokenizer.from_pretrained(folder)(sample).input_ids == load_tokenizer(name, bos).prompt(sample)


def fast_tokenizer(name: str):
    """Return the tokenizers.Tokenizer with the same ids as `load_tokenizer(name)`.

    UserError if transformers is too old to convert a SentencePiece model faithfully.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    if name in ('byte', 'gpt2') or Path(name).is_dir():
        own = load_tokenizer(name)
        return byte_level({own.decode([i]): i for i in range(own.eos_id)}, splits_words=name != 'byte')
    if name.endswith('.model'):  # transformers converts it
        import transformers
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(name, Path(folder) / 'tokenizer.model')
            fast = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
        if fast.encode(SAMPLE, add_special_tokens=False).ids != load_tokenizer(name).encode(SAMPLE):
            raise UserError(f'transformers {transformers.__version__} converts {name} to a tokenizer with other ids: '
                            'use a newer one (5.24, for Python 3.11, converts all that we tried)')
        return fast
    if not task_class(name):
        return Tokenizer.from_file(name)
    symbols = make_task(name).symbols
    fast = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate([*symbols, EOS_NAMES[0]])}))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(symbol_pattern(symbols)), 'removed', invert=True)
    return fast


def byte_level(ranks: dict[bytes, int], splits_words: bool = True):
    """Return a byte-level BPE with tiktoken's merge ranks. The next id after them is eos."""
    from tokenizers import pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter
    converter = TikTokenConverter(ranks)
    converter.load_tiktoken_bpe = lambda ranks: ranks  # it expects a file path
    fast = converter.converted()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_words)
    fast.add_special_tokens([EOS_NAMES[0]])
    return fast
