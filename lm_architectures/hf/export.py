"""Export a run to a new Hugging Face folder.

    python -m lm_architectures.hf.export RUN --to_hf=FOLDER
    python -m lm_architectures.hf.export RUN --to_hf=FOLDER --exact     always with the model's code

A run that gives the logits of a Llama, Mistral (with a window), Qwen2 (with biases) or Qwen3 (with
norms of queries and keys) is written as one. Other runs, and all with `--exact`, get the model's
code, so load them with `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.
Before the folder appears, another process loads it from an empty folder.
"""
if __name__ == '__main__':
    from lm_architectures.start import quiet_start
    quiet_start()

import ast
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from lm_architectures.files import ROOT, UserError, friendly_errors, remove, write_file, write_json
from lm_architectures.hf.families import FAMILIES, family_of, to_family
from lm_architectures.hf.tokenizers import keeps_ids, save_tokenizer
from lm_architectures.run import checkpoint, folders, models, records
from lm_architectures.settings import load_settings

RECIPE = ('optimizer', 'learning_rate', 'schedule', 'warmup_tokens', 'batch_size', 'max_tokens', 'weight_decay', 'seed',
          'dtype')  # settings of training in the model card
MODEL_IMPORT = 'from model_standard import Config, Model'  # of wrapper.py; in an export, of the run's own files
LARGE = 1e8  # parameters from which on an export's logits are not compared with the run's
SCANS_IMPORT = r'^([ \t]*)from lm_architectures(?:\.scans[.\w]* import| import scans\b) *(?:\([^)]*\))?.*$'
CARD = '''---
license: unknown
library_name: transformers
pipeline_tag: text-generation
---

# {title}

{about}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained('FOLDER'{code})
tokenizer = AutoTokenizer.from_pretrained('FOLDER'{code})
```

| | |
|---|---|
{facts}

The license is yours to choose. If the weights started from another model, its license
still applies. The model's settings:

```json
{config}
```
'''


@dataclass
class Settings:
    to_hf: str | None = None  # new folder to write
    code: Literal['run'] | None = None  # run: the model's code as stored in the run, not as it is now
    model: str | None = None  # path of the model's file, if it is not in this repository
    exact: bool = False  # include the model's code even if a family has its shape: logits equal the run's everywhere


def export_run(run, folder, exact: bool = False, code: str | None = None) -> None:
    """Write a run as a new Hugging Face folder, in its checkpoint's dtype, with its tokenizer.

    exact: with the model's code, even if a family of transformers gives its logits. code: see
    `folders.read_run`.
    """
    from transformers import GenerationConfig
    run, folder = Path(run), Path(folder)
    if folder.exists():
        raise UserError(f'{folder} already exists: choose a new folder')
    record = folders.read_run(run, code)
    c, data, block_size = folders.portable_config(record, run), record['data'], record['settings']['block_size']
    state, tensors = checkpoint.load_checkpoint(run)
    family = None if exact else family_of(record, c, tensors)
    n_rows, ends = data.get('n_rows', c.n_ids), data.get('ends', data['eos_id'])
    new = folder.with_name(f'.{folder.name}.writing')  # becomes `folder` when it is whole
    remove(new)
    try:
        if family:
            to_family(c, tensors, n_rows, block_size, ends, family).save_pretrained(new, max_shard_size='1TB')
        else:
            save_with_code(record, c, tensors, n_rows, ends, new)
        with suppress(OSError):  # some file systems have no modes; safetensors makes files owner-only
            (new / 'model.safetensors').chmod((new / 'config.json').stat().st_mode)
        GenerationConfig(eos_token_id=ends).save_pretrained(new)
        save_tokenizer(new, data['tokenizer'], data['bos'], block_size)
        if (run / records.CHAT_TEMPLATE).is_file():
            shutil.copy(run / records.CHAT_TEMPLATE, new)
        n_parameters = sum(tensor.numel() for tensor in tensors.values())
        write_file(new / 'README.md', model_card(run, record, state['step'], n_parameters, family).encode())
        if failure := why_it_fails(new, run, record, c, tensors):
            raise UserError(f'{folder} is not written, because it would not work without this repository: {failure}')
        os.replace(new, folder)
    finally:
        remove(new)
    print_advice(folder, data, family, exact, masks_documents=c.eos_id is not None)


def why_it_fails(folder: Path, run: Path, record: dict, c, tensors: dict) -> str:
    """Load an export in another process (loading.py). Returns '' or the error.

    Its logits are compared with those of the run's model, unless that is LARGE.
    """
    reference = {}
    if sum(tensor.numel() for tensor in tensors.values()) < LARGE:
        model = models.model_file(record['model'], record['code']).Model(c)
        folders.load_weights(model, tensors, run)
        ids = [i % c.n_ids for i in range(-32, 32) if i % c.n_ids != c.eos_id][:record['settings']['block_size']]
        with torch.no_grad():
            logits = model.eval().logits(torch.tensor([ids]))[..., :c.n_ids].contiguous()
        reference = {'tokens': torch.tensor([ids]), 'logits': logits}
    with tempfile.TemporaryDirectory() as work:
        (empty := Path(work, 'empty')).mkdir()
        save_file(reference, f'{work}/reference')
        text = (ROOT / 'lm_architectures/hf/loading.py').read_text(encoding='utf-8')
        loaded = subprocess.run([sys.executable, '-c', text, folder.resolve(), f'{work}/reference'], cwd=empty,
                                env={**os.environ, 'HF_MODULES_CACHE': f'{work}/modules', 'HF_HUB_OFFLINE': '1'},
                                capture_output=True, text=True)
    return (loaded.stderr.strip() or 'it was killed').splitlines()[-1] if loaded.returncode else ''


def print_advice(folder: Path, data: dict, family: str | None, exact: bool, masks_documents: bool) -> None:
    """Print how to load an export and, for a family, where it differs from the run."""
    kind = (f'{FAMILIES[family]}, because it gives the same logits' if family else
            'with the model code' + ', because no family gives its logits' * (not exact))
    print(f'{folder} is a Hugging Face folder, {kind}: load it with AutoModelForCausalLM.from_pretrained('
          f'{str(folder)!r}{"" if family else ", trust_remote_code=True"})')
    if family == 'qwen2' and not keeps_ids(folder, data['tokenizer'], data['bos']):
        print('AutoTokenizer splits the texts of a Qwen2 with its own rules, which give other ids than in this run: '
              'load the tokenizer with PreTrainedTokenizerFast, or export with --exact')
    if family and masks_documents:
        print(f'A {FAMILIES[family]} does not mask attention between documents: its logits differ from this run after '
              'an end-of-text token, as in rolling likelihoods of lm-eval, which start with one. --exact keeps the '
              'mask')


def model_card(run: Path, record: dict, step: int, n_parameters: int, family: str | None) -> str:
    """Return the README.md of an export: what the run was trained on and how to load it."""
    settings, data, log = record['settings'], record['data'], records.read_log(run)
    about = inspect.getdoc(models.model_file(record['model'], record['code'])) or ''
    facts = {'model': f'model_{record["model"]}.py',
             'written as': FAMILIES.get(family, 'the model code'),
             'parameters': f'{n_parameters:,}', 'context, tokens': f'{settings["block_size"]:,}',
             'tokenizer': f'{Path(data["tokenizer"]).name}, {data["n_ids"]:,} ids',
             'training data': Path(data['folder']).name or 'imported weights', 'training step': f'{step:,}'}
    for key, name, form in (('tokens', 'training tokens', ','), ('nll', 'training loss, nats per token', '.4f'),
                            ('val', 'validation loss, nats per token', '.4f')):
        if found := [line[key] for line in log if key in line and line['step'] <= step]:
            facts[name] = format(found[-1], form)
    facts |= {name: f'`{settings[name]}`' for name in RECIPE if name in settings}
    return CARD.format(
        title=run.resolve().name, about='\n\n'.join(about.split('\n\n')[:2]),  # the first paragraphs name the paper
        facts='\n'.join(f'| {name} | {value} |' for name, value in facts.items()),
        code='' if family else ', trust_remote_code=True', config=json.dumps(record['model_config'], indent=1))


def save_with_code(record: dict, c, tensors: dict, n_rows: int, ends: int | list[int], folder: Path) -> None:
    """Write a Hugging Face folder with the weights, the model's code, and wrapper.py to run it."""
    folder.mkdir(parents=True)
    dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    write_json(folder / 'config.json', {
        'model_type': 'language-model-architectures', 'model_config': dataclasses.asdict(c), 'vocab_size': n_rows,
        'dtype': str(dtype).removeprefix('torch.'), 'hidden_size': getattr(c, 'n_embd', None),
        'num_hidden_layers': getattr(c, 'n_layer', None), 'eos_token_id': ends,
        'max_position_embeddings': record['settings']['block_size'],
        'architectures': ['AutoModelForCausalLM'],  # `transformers serve` only loads classes of transformers
        'auto_map': {'AutoConfig': 'hf_model.RunConfig', 'AutoModel': 'hf_model.RunModel',
                     'AutoModelForCausalLM': 'hf_model.RunForCausalLM'}})
    save_file({f'model.{ours}': tensor for ours, tensor in tensors.items()}, folder / 'model.safetensors',
              {'format': 'pt'})
    files = models.code_of(record['model'], record['code'])
    imports = [f'from .model_{record["model"]} import Config, Model',
               *(f'from .{name} import __name__ as _' for name in files)]  # transformers copies what this file imports
    wrapper = (ROOT / 'lm_architectures/hf/wrapper.py').read_text(encoding='utf-8')
    write_file(folder / 'hf_model.py', wrapper.replace(MODEL_IMPORT, '\n'.join(imports)).encode())
    for name, (_, code) in files.items():
        code = re.sub(SCANS_IMPORT, without_scans, code, flags=re.MULTILINE)
        write_file(folder / f'{name}.py', code.encode())


def without_scans(found: re.Match) -> str:
    """Return what replaces an import of scans/, which reads weights itself and would miss adapters.

    An indented one, perhaps in `try`, raises ModuleNotFoundError. Others set the names to None.
    """
    if found[1]:
        return f"{found[1]}raise ModuleNotFoundError('scans/ is not exported')"
    names = [alias.asname or alias.name for alias in ast.parse(found[0]).body[0].names]
    return f'{" = ".join(names)} = None  # scans/ is not exported'


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        if len(positional) != 1 or s.to_hf is None:
            raise UserError('expected one run and --to_hf. Usage: python -m lm_architectures.hf.export RUN '
                            '--to_hf=FOLDER')
        from transformers.utils import logging
        logging.disable_progress_bar()
        if s.model:
            models.add_file(s.model)
        export_run(positional[0], s.to_hf, s.exact, s.code)


if __name__ == '__main__':
    main()
