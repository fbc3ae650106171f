"""Models by name, and run folders (files: docs/runs.md)."""
import dataclasses
import difflib
import importlib
import inspect
import io
import json
import math
import os
import platform
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO

import torch

from common.checkpoint import checkpoints, load_checkpoint, load_weights
from common.files import (ROOT, UserError, command, first_line, is_number, locked, open_lines, read_json, read_lines,
                          remove, warn_once, write_file, write_json)
from common.settings import make_settings, typed
from data import Data, open_data
from data.tasks import Generated
from data.tokenizers import TOKENIZER_FILES, copy_tokenizer, tokenizer_digest

REQUIRED_KEYS = {  # required keys of config.json, besides the settings of training and of the model
    'model': str, 'settings': dict, 'settings.block_size': int, 'settings.eval_seed': int | None, 'model_config': dict,
    'versions': dict, 'data': dict, 'data.tokenizer': str, 'data.n_ids': int, 'data.eos_id': int, 'data.bos': bool,
    'data.sha256': str}
OPTIONAL_KEYS = {  # imported runs lack some of them, other runs lack others
    'settings.data': str, 'settings.max_tokens': int, 'settings.batch_size': int, 'settings.seed': int,
    'data.ends': list, 'data.n_rows': int, 'versions.processes': int}
CHAT_TEMPLATE = 'chat_template.jinja'  # of an imported chat model
RUN_FILES = ('config.json', 'log.jsonl', 'loss.png', 'wandb_id', CHAT_TEMPLATE, *TOKENIZER_FILES,
             'eval.jsonl', 'speculative.csv')  # last: written by eval.py and analysis.speculative


# ---- models ----

def model_file(name: str) -> ModuleType | SimpleNamespace:
    """Return the module model_<name>.py of the repository.

    'gpn.NoDecay' is model_gpn.py with Model replaced by its subclass NoDecay of analysis/edits.py.
    """
    base, _, subclass = str(name).partition('.')
    known = sorted(p.stem.removeprefix('model_') for p in ROOT.glob('model_*.py'))
    if base not in known:
        near = difflib.get_close_matches(base, known, 1, 0.4)
        hint = f'did you mean {near[0]!r}?' if near else f'expected one of {", ".join(known)}'
        raise UserError(f'unknown model {name!r}: {hint} (each model is a file model_NAME.py)')
    module = importlib.import_module(f'model_{base}')
    if not subclass:
        return module
    edit = vars(importlib.import_module('analysis.edits')).get(subclass)
    if not (inspect.isclass(edit) and issubclass(edit, module.Model)):
        raise UserError(f'unknown model {name!r}: analysis/edits.py has no subclass {subclass} of model_{base}.Model')
    return SimpleNamespace(Config=module.Config, Model=edit)


def make_config(model_name: str, values: dict):
    """Return a model file's Config with these values. UserError for invalid values or defaults."""
    Config, where = model_file(model_name).Config, f'for model {model_name!r}'
    config = make_settings(Config, values, where)
    make_settings(Config, json.loads(json.dumps(dataclasses.asdict(config))), where)  # as config.json will be read
    return config


def saved_config(record: dict, folder):
    """Return the model Config in a run's config.json (`record`)."""
    return make_settings(model_file(record['model']).Config, record['model_config'], f'in {folder}/config.json')


def portable_config(record: dict, folder):
    """Return a run's `saved_config`, with defaults for kernels, which another machine may lack."""
    config = saved_config(record, folder)
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    for name in getattr(config, 'may_change', ()):
        setattr(config, name, defaults[name])
    return config


@contextmanager
def model_errors(model_name: str) -> Iterator[None]:
    """Turn a ValueError that a model raises on purpose into a UserError. Others are bugs."""
    try:
        yield
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not last.line.startswith('raise ') or 'site-packages' in last.filename:
            raise
        raise UserError(f'model {model_name!r} cannot run here: {error}')


def meta_model(model_name: str, config) -> torch.nn.Module:
    """Return a model on the meta device, for names, shapes, costs. UserError if impossible."""
    try:
        with torch.device('meta'), model_errors(model_name):
            return model_file(model_name).Model(config)
    except (RuntimeError, TypeError) as error:
        if not any(word in str(error).lower() for word in ('overflow', 'meta tensor')):
            raise
        raise UserError(f'model {model_name!r} is too large, or its __init__ reads a value from a tensor, which fails '
                        f'on the meta device: {first_line(error)}')


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters, counting tied ones once."""
    return sum(p.numel() for p in model.parameters())


# ---- a trained run ----

def load_run(folder, device='cpu', dtype: torch.dtype | None = None) -> tuple:
    """Load a trained run from its newest undamaged checkpoint.

    Returns (model in eval mode, config.json plus the checkpoint's 'step'). dtype None: fp32.
    """
    record = read_run(folder)
    state, tensors = load_checkpoint(folder)
    model = model_file(record['model']).Model(portable_config(record, folder))
    load_weights(model, tensors, folder)
    return model.eval().to(device=device, dtype=dtype), {**record, 'step': state['step']}


def meta_run(folder) -> torch.nn.Module:
    """Return the model of a run folder on the meta device."""
    record = read_run(folder)
    return meta_model(record['model'], portable_config(record, folder))


def read_run(folder) -> dict:
    """Return config.json of a run folder. UserError if it is missing or damaged."""
    path = Path(folder) / 'config.json'
    if not path.is_file():
        known = ', '.join(sorted(str(p.parent) for p in Path('out').glob('*/config.json')))
        quickstart = command('train.py', os.path.relpath(ROOT / 'config/quickstart.py'))
        raise UserError(f'{folder or "an empty name"} is not a run folder (it has no config.json). Runs here: '
                        + (known or f'none; train one with {quickstart}'))
    remedy = 'copy the run again or retrain it'
    if 'model_type' in read_json(path, remedy):
        name = f'out/{Path(folder).resolve().name}'
        raise UserError(f'{folder} is a Hugging Face folder: convert it to a run with '
                        f'{command("-m", "common.import_hf", folder, f"--out_dir={name}")}, then use {name}')
    record = read_json(path, remedy, check_record)
    data = record['data']
    if data['tokenizer'] in TOKENIZER_FILES:
        data['tokenizer'] = str((Path(folder) / data['tokenizer']).resolve())
    return {name: record[name] for name in REQUIRED_KEYS if '.' not in name}


def check_record(record: dict) -> None:
    """Raise ValueError for a missing key or a wrong type in config.json. Converts 2.0 to 2."""
    for name, kind in (REQUIRED_KEYS | OPTIONAL_KEYS).items():
        part, _, key = name.rpartition('.')
        owner = record[part] if part else record
        if key in owner:
            owner[key] = typed(key, owner[key], kind, 'there')
        elif name in REQUIRED_KEYS:
            raise ValueError(f'no {name}')
    data = record['data']
    if data['eos_id'] >= data['n_ids']:
        raise ValueError('eos_id is not an id of the tokenizer')
    ends, n_rows = data.get('ends', [data['eos_id']]), data.get('n_rows', data['n_ids'])
    if not ends or not all(type(i) is int and 0 <= i < n_rows for i in ends):
        raise ValueError(f'ends of text are {ends}: expected ids from 0 to {n_rows - 1}')


def run_data(record: dict, name: str | None, folder=None) -> Data | Generated:
    """Return the data `name`, or the run's own. UserError if there is none or tokenizers differ."""
    own = record['settings'].get('data')
    if not name and not own:  # an imported run
        raise UserError('this run has no data: give --data=FOLDER')
    data = open_data(str(name or own))
    if not name and data.sha256 != record['data']['sha256']:
        warn_once(f'{data.folder} has changed since the run was trained')
    check_vocabulary(record, data, folder)
    return data


def same_vocabulary(a: dict, b: dict) -> bool:
    """Return True if two 'data' records have the same tokenizer. A missing file matches any."""
    digests = {tokenizer_digest(a['tokenizer']), tokenizer_digest(b['tokenizer'])} - {None}
    return a['n_ids'] == b['n_ids'] and a['eos_id'] == b['eos_id'] and len(digests) < 2


def check_vocabulary(record: dict, data, folder=None) -> None:
    """Raise UserError unless the run in `folder` was trained with the data's tokenizer."""
    want, have = record['data'], {'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id}
    if not same_vocabulary(want, have):
        run = f'the run in {folder}' if folder else 'this run'
        raise UserError(f'{data.folder} has tokenizer {data.tokenizer!r} ({data.n_ids} ids), but {run} was trained '
                        f'with {want["tokenizer"]!r} ({want["n_ids"]}): use data with that tokenizer')


# ---- the length of a run ----

def n_steps(s) -> int:
    return math.ceil(s.max_tokens / (s.batch_size * s.block_size))


def last_before_decay(s) -> int | None:
    """Return the last step before wsd's decay, from which --extend continues; None without wsd."""
    tokens_per_step = s.batch_size * s.block_size
    return int(s.max_tokens * (1 - s.decay_fraction) // tokens_per_step) if s.schedule == 'wsd' else None


def extension_starts(s) -> bool:
    """Return True if the run starts from a checkpoint of s.extend because it has none itself."""
    return bool(s.extend) and not (s.resume and checkpoints(s.out_dir))


# ---- writing a run folder ----

def check_out_dir(folder, overwrite: bool) -> None:
    """Raise UserError if a new run must not be written to this folder."""
    folder = Path(folder)
    if overwrite and (folder / 'ckpt').is_symlink():
        raise UserError(f'{folder}/ckpt is a link, and --overwrite would delete the checkpoints that it leads to: '
                        'remove the link, or choose another --out_dir')
    if (folder / 'config.json').exists():
        if not overwrite:
            raise UserError(f'{folder} already contains a run: use --resume to continue it, --overwrite to replace it, '
                            'or another --out_dir')
        read_run(folder)  # only a run may be replaced
    elif folder.exists():
        names = {path.name for path in folder.iterdir() if not path.name.endswith('.writing')}
        left_by_a_kill = {'.lock', *RUN_FILES, 'ckpt'} if overwrite else {'.lock', *TOKENIZER_FILES}
        if names and not {'.lock'} <= names <= left_by_a_kill:
            raise UserError(f'{folder} already exists and is not a run folder: choose another --out_dir')


@contextmanager
def locked_run(folder, is_new: bool, overwrite: bool) -> Iterator[None]:
    """Lock a run folder. Deletes a new run again if it fails before a step is logged or saved."""
    folder = Path(folder)
    if is_new:
        check_out_dir(folder, overwrite)
    with locked(folder):
        try:
            yield
        except BaseException:
            has_steps = (folder / 'config.json').exists() and (checkpoints(folder) or read_log(folder))
            with suppress(OSError):
                if is_new and not has_steps:
                    remove_run(folder)
                if os.listdir(folder) == ['.lock']:
                    shutil.rmtree(folder)
            raise


def remove_run(folder: Path) -> None:
    """Delete the files of a run, config.json first: what a kill leaves is not a run to resume."""
    for path in (*(folder / name for name in RUN_FILES), *checkpoints(folder), *folder.glob('ckpt/.writing_*')):
        remove(path)
    if (folder / 'ckpt').is_dir() and not os.listdir(folder / 'ckpt'):
        (folder / 'ckpt').rmdir()


def save_run(folder, record: dict) -> None:
    """Write a new run folder's config.json (see `read_run`) and a copy of its tokenizer."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    data = {**record['data'], 'tokenizer': copy_tokenizer(folder, record['data']['tokenizer'])}
    write_json(Path(folder) / 'config.json', {**record, 'data': data})


def start_run(s, config, data, machine) -> None:
    """Create the run folder s.out_dir, replacing an old run. config: the model's Config."""
    folder = Path(s.out_dir)
    remove_run(folder)  # there is one only with --overwrite: see `check_out_dir`
    this_start = dict(resume=False, overwrite=False, dry_run=False, memory=None)
    source = s.init_from or s.extend
    parent = read_run(source)['data'] if source else {}
    if source and (Path(source) / CHAT_TEMPLATE).is_file():
        write_file(folder / CHAT_TEMPLATE, (Path(source) / CHAT_TEMPLATE).read_bytes())
    save_run(folder, {
        'model': s.model,
        'settings': {**dataclasses.asdict(s), **this_start, 'dtype': str(machine.dtype)[6:]},
        'model_config': dataclasses.asdict(config),
        'data': {'folder': str(data.folder), 'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id,
                 'bos': data.bos, 'sha256': data.sha256,
                 **{key: parent[key] for key in ('ends', 'n_rows') if key in parent}},
        'versions': {'python': platform.python_version(), 'torch': torch.__version__, 'device': str(machine.device),
                     'processes': machine.world}})


def open_log(folder, step: int) -> IO:
    """Open log.jsonl for appending. If it has lines, add one with the step the run resumes from."""
    path = Path(folder) / 'log.jsonl'
    log = open_lines(path)
    if path.stat().st_size:
        log.write(json.dumps({'resumed_from': step}) + '\n')
    return log


def read_log(folder) -> list[dict]:
    """Return the logged steps of a run, without steps that were repeated after resuming.

    Warns about damaged lines on stderr.
    """
    def is_whole(record):
        is_step = {'step', 'tokens', 'seconds'} <= record.keys()
        return all(map(is_number, record.values())) and (is_step or {'resumed_from', 'saved'} & record.keys())
    records = []
    for record in read_lines(Path(folder) / 'log.jsonl', is_whole):
        if 'resumed_from' in record:
            records = [earlier for earlier in records if earlier['step'] <= record['resumed_from']]
        elif 'step' in record:
            records.append(record)
    return records


def plot_loss(folder) -> None:
    """Write loss.png: training and validation loss over tokens."""
    from matplotlib.figure import Figure
    records, figure, png = read_log(folder), Figure(figsize=(7, 4.5), layout='constrained'), io.BytesIO()
    axes = figure.subplots()
    for key, label, style in (('nll', 'training', dict(alpha=0.5, linewidth=0.8)),
                              ('val', 'validation', dict(marker='o', markersize=3))):
        points = [(record['tokens'], record[key]) for record in records if {'tokens', key} <= record.keys()]
        axes.plot([tokens for tokens, _ in points], [loss for _, loss in points], label=label, **style)
    axes.set(xlabel='tokens', ylabel='nats per token', title=str(folder))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=130)
    write_file(Path(folder) / 'loss.png', png.getvalue())
