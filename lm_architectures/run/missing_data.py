"""Data that do not exist yet: how to build them, and a stand-in for dry runs."""
import re
from os.path import relpath
from pathlib import Path
from types import SimpleNamespace

from lm_architectures.files import ROOT, command
from lm_architectures.run import folders


def assumed_data(s, record) -> SimpleNamespace:
    """Return a stand-in for missing data, with the vocabulary of a run or of s.assumed_ids ids.

    Its field `hint` says how to build the data that a config names, or a dataset of the hub.
    """
    record = record or (folders.read_run(s.init_from) if s.init_from else {})
    like = {'tokenizer': 'gpt2' if s.assumed_ids == 50257 else 'FILE', 'n_ids': s.assumed_ids,
            'eos_id': s.assumed_ids - 1, 'sha256': '', 'bos': False, **record.get('data', {})}
    tokenizer = [] if like['tokenizer'] == 'gpt2' else [f'--tokenizer={like["tokenizer"]}']
    max_tokens = f'--max_tokens={1.05 * s.max_tokens:.3g}'.replace('e+', 'e')  # 5% more, for validation
    hint = ''
    if s.make_data and s.data in s.make_data:
        hint = f'. To build it: {s.make_data}'.replace('prepare_fineweb.py', relpath(ROOT / 'prepare_fineweb.py'))
    elif s.data == type(s).data:
        hint = '. To build it: ' + command('prepare_fineweb.py', *tokenizer, f'--out_dir={s.data}', max_tokens)
    elif re.fullmatch(r'[\w.-]+/[\w.-]+', s.data):
        hint = '. If it is a dataset on the Hugging Face hub: ' + command(
            'prepare_fineweb.py', s.data, *tokenizer, f'--out_dir=data/built/{Path(s.data).name}', max_tokens)
    return SimpleNamespace(**{**like, 'folder': s.data, 'splits': {'train': {'tokens': s.max_tokens}},
                              'n_rows': lambda split, T: 1, 'hint': hint})
