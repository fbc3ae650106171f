"""Models by name, and run folders.

A run folder holds

    config.json             model, settings, model_config, data (tokenizer and vocabulary), versions
    tokenizer.json          a copy of the tokenizer's file, if it has one (or tokenizer.model, or gpt2_vocabulary/)
    log.jsonl               one line per logged step; a line with 'resumed_from', and the digest of the model's code
                            then, where training went on, one with 'scan' where it began or went on; each ends with a
                            checksum
    loss.png                the loss curve
    decoding.json           what was found faster on a CPU for decoding (common/cpu_forms.py)
    ckpt/step_00000100/     model.safetensors, optimizer.safetensors, state.json, SHA256SUMS (common/checkpoint.py)

Read `load_run` first: what every script does with a trained run. Then the folder's records.
"""
import dataclasses
import difflib
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import sys
import tokenize
import typing
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TextIO

import torch
from torch.overrides import TorchFunctionMode

from common import kernel_check
from common.checkpoint import check_weights, checkpoints, load_checkpoint, load_weights
from common.files import (
    ROOT,
    UserError,
    checked_json,
    first_line,
    locked,
    read_json,
    say_once,
    write_file,
    write_json,
)
from common.settings import saved_settings, typed
from data import Data, open_data
from data.shards import TOKENIZER_FILES, keep_tokenizer
from data.tasks import Generated
from data.tokenizers import GPT2_SHA256, tokenizer_digest

REPLACED = '.config.json.replaced'  # config.json of a run that --overwrite is removing
OF_EVALUATION = ('eval.jsonl', 'speculative.csv', 'speculative.png')  # what eval.py writes to a run folder
LEFT_BY_A_KILL = {'.lock', *TOKENIZER_FILES,  # in a folder that was to become a run
                  *(f'.{name}.writing' for name in ('config.json', *TOKENIZER_FILES))}
# what older code did without a setting for it, where the default is another now
UNSTATED = {'eval_seed': None, 'matmul': 'blas', 'attention': 'tiles'}


# ---- models ----

def model_file(name: str) -> ModuleType | SimpleNamespace:
    """The module model_<name>.py of the repository.

    'gpn.NoDecay' is model_gpn.py with the subclass NoDecay of analysis/gpn_edits.py in place of its Model. The name
    is checked, so that a stranger's run folder cannot name other code.
    """
    base, _, subclass = str(name).partition('.')
    if subclass and (ROOT / f'analysis/{base}_edits.py').is_file():
        module = model_file(base)
        of_file = vars(importlib.import_module(f'analysis.{base}_edits')).values()
        classes = [value for value in of_file if inspect.isclass(value) and issubclass(value, module.Model)]
        known = {c.__name__: c for c in classes if c is not module.Model}
        if subclass not in known:
            raise UserError(f'unknown model {name!r}: analysis/{base}_edits.py has {", ".join(known)}')
        return SimpleNamespace(Config=module.Config, Model=known[subclass])
    known = sorted(p.stem.removeprefix('model_') for p in ROOT.glob('model_*.py'))
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1, 0.4) or known
        raise UserError(f'unknown model {name!r}: did you mean {" or ".join(map(repr, near))}? '
                        '(there is one model_NAME.py per model)')
    return importlib.import_module(f'model_{name}')


def code_files(model_name: str) -> list[Path]:
    """The files that hold the equations of a model, by the name that `model_file` takes."""
    base, _, subclass = model_name.partition('.')
    return [ROOT / f'model_{base}.py'] + ([ROOT / f'analysis/{base}_edits.py'] if subclass else [])


def code_digest(model_name: str) -> str:
    """sha256 of the code of a model, which tells whether its equations may be others than they were.

    That is `code_files`, and the definitions that models share in attn_kernels.py. Its fast forms are not: they are
    compared with these. What is digested is text: the dump of a syntax tree would be simpler, but differs between
    versions of Python.
    """
    sources = [path.read_text(encoding='utf-8') for path in code_files(model_name)] + kernel_check.definitions()
    return hashlib.sha256('\n'.join(map(_without_comments, sources)).encode()).hexdigest()


def _without_comments(source: str) -> str:
    """Without comments, docstrings and blank lines, which hold no equation."""
    lines, not_code, starts_statement = source.split('\n'), [], True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or token.type == tokenize.STRING and starts_statement:
            not_code.append((*token.start, *token.end))
        elif token.type != tokenize.NL:
            starts_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for row, column, end_row, end_column in reversed(not_code):
        lines[row - 1:end_row] = [lines[row - 1][:column] + lines[end_row - 1][end_column:]]
    return '\n'.join(line.rstrip() for line in lines if line.strip())


def tell_of_edits(folder) -> None:
    """Says on stderr, once, if the code of a run's model has changed since it was begun. Runs of older code cannot."""
    record = read_run(folder)
    begun_with = record['versions'].get('model_code')
    if begun_with not in (None, code_digest(record['model'])):
        files = ', '.join(str(path.relative_to(ROOT)) for path in code_files(record['model']))
        say_once(f'{files} or a definition in attn_kernels.py has changed since {folder} was begun: its equations may '
                 'be others than those it was trained with')


def make_config(model_name: str, values: dict):
    """The Config of a model file from {name: value}; a wrong type, or what the Config rejects, is a UserError."""
    Config = model_file(model_name).Config
    types_of = typing.get_type_hints(Config)
    try:
        return Config(**{name: typed(name, value, types_of[name], f'of model {model_name!r}') if name in types_of
                         else value for name, value in values.items()})
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f'model {model_name!r}: {error}')


def saved_config(record: dict, folder):
    """The Config of a run's model, from its config.json (`record`), which may be older than some of its settings."""
    return saved_settings(model_file(record['model']).Config, record['model_config'], Path(folder) / 'config.json')


class WithoutInit(TorchFunctionMode):
    """Parameters stay as `torch.nn.init` finds them, where all of them are loaded afterwards, or have no storage.

    Random numbers for 131M weights take a second, and so do the imports of their meta forms.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensor = kwargs.get('tensor', args[0] if args else None)
        if getattr(func, '__module__', None) == 'torch.nn.init' and isinstance(tensor, torch.nn.Parameter):
            return tensor
        return func(*args, **kwargs)


def blank_model(model_name: str, config) -> torch.nn.Module:
    """A model without storage, for its names, shapes and costs; UserError for sizes that no tensor can have."""
    try:
        with torch.device('meta'), WithoutInit():
            return model_file(model_name).Model(config)
    except (RuntimeError, TypeError) as error:
        if 'overflow' not in str(error).lower():
            raise
        raise UserError(f'model {model_name!r} cannot be so large: {first_line(error)}')


def count_parameters(model: torch.nn.Module) -> int:
    """The parameters of a model, each counted once."""
    return sum(p.numel() for p in model.parameters())


def choose_scan(model: torch.nn.Module) -> dict | None:
    """Lets a model with a fast form of its equations choose between the two: its report, None if there is none."""
    if not hasattr(model, 'choose_scan'):
        return None
    try:
        return model.choose_scan()
    except ValueError as error:
        raise UserError(str(error))


def check_kernels(model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Lets a GPU's kernels prove themselves at the sizes of this model, by common/kernel_check.py.

    A Config with `head_size` has attention, one with `persistent` that of two streams. dtype: of the products, None for
    that of the weights.
    """
    weight, c = next(model.parameters()), model.config
    n_kv_head = getattr(c, 'n_kv_head', None)
    group = c.n_head // n_kv_head if n_kv_head else 1
    kernel_check.check_kernels(weight.device, dtype or weight.dtype, getattr(c, 'head_size', None), group,
                               getattr(c, 'persistent', None))


def adopted(model: torch.nn.Module, tensors: dict, source) -> dict:
    """The tensors of another run as this model takes them: as they are, or through its `adopt`.

    A ValueError of `adopt` becomes a UserError.
    """
    try:
        return model.adopt(tensors) if hasattr(model, 'adopt') else tensors
    except ValueError as error:
        raise UserError(f'{source} does not fit this model: {error}')


def start_from(model: torch.nn.Module, source, tensors: dict, idx: torch.Tensor) -> None:
    """Loads the weights of another run, `source`. idx (B, T): tokens on which the logits of both are compared.

    Where `adopt` adds weights that the source has not, the model must still give its logits: UserError otherwise.
    Prints how near they are.
    """
    converted = adopted(model, tensors, source)
    load_weights(model, converted, source)
    new = sorted(converted.keys() - tensors.keys())
    if not new:
        return
    idx = idx.to(next(model.parameters()).device)
    original, _ = load_run(source, idx.device)
    n_ids = model.config.n_ids
    with torch.no_grad():
        want, have = (m.eval().logits(idx)[..., :n_ids] for m in (original, model))
    model.train()
    worst = (have - want).abs().max().item()
    if not worst < 1e-4:
        lost = {f.name for f in dataclasses.fields(original.config)
                if not hasattr(model.config, f.name) and getattr(original.config, f.name) != f.default}
        raise UserError(f'{source} cannot become this model: with {", ".join(new)} at their start its logits change by '
                        f'{worst:.1e}. Settings that are not about the new weights (window, documents, n_head) must be '
                        'those of the source' + (f'; this model has no {", ".join(sorted(lost))}' if lost else ''))
    print(f'{source} continues as another model: {", ".join(new)} are new, and its logits change by at most '
          f'{worst:.1e} at step 0')


# ---- a trained run ----

def load_run(folder, device='cpu', dtype: torch.dtype | None = None, scan: str | None = None) -> tuple:
    """The trained model of a run folder, in eval mode, and its config.json: (model, record), with the step as 'step'.

    device as for Tensor.to; dtype None keeps fp32. scan: 'auto', 'loop' or 'fast' for models that have a fast form;
    None: as in the run. Reads the newest checkpoint that is whole.
    """
    record = read_run(folder)
    config = saved_config(record, folder)
    tell_of_edits(folder)
    if scan is not None:
        if not hasattr(config, 'scan'):
            raise UserError(f'scan is {scan!r}, but {folder} is a run of model_{record["model"]}.py, which has no fast '
                            'form: leave scan out')
        config = make_config(record['model'], {**dataclasses.asdict(config), 'scan': scan})
    state, files = load_checkpoint(folder, ('model.safetensors',))
    tensors = files['model.safetensors']
    check_weights(blank_model(record['model'], config), tensors, folder)  # before memory is taken for sizes misread
    with WithoutInit():
        model = model_file(record['model']).Model(config)
    load_weights(model, tensors, folder)
    model = model.eval().to(device=device, dtype=dtype)
    check_kernels(model)
    choose_scan(model)
    return model, {**record, 'step': state['step']}


def blank_run(folder) -> torch.nn.Module:
    """The model of a run folder without storage or weights, as `blank_model`."""
    record = read_run(folder)
    return blank_model(record['model'], saved_config(record, folder))


def read_run(folder) -> dict:
    """config.json of a run folder, or a UserError."""
    path = Path(folder) / 'config.json'
    if not path.is_file():
        runs = sorted(str(p.parent) for p in Path('out').glob('*/config.json')) if Path('out').is_dir() else []
        known = f'runs here: {", ".join(runs)}' if runs else 'train one first: python train.py config/quickstart.py'
        raise UserError(f'{folder or "an empty name"} is not a run folder (it has no config.json); {known}')
    remedy = 'copy the run again or train it anew'
    record = {'model': None, 'versions': {}, **read_json(path, remedy)}
    if 'model_type' in record:
        name = f'out/{Path(folder).resolve().name}'
        raise UserError(f'{folder} is a Hugging Face folder: make it a run with python eval.py {folder} '
                        f'--from_llama={name}, and use {name}')
    typed('model', record['model'], str, f'in {path}')
    needed = {'settings': {'block_size': int, 'eval_seed': int | None}, 'model_config': {}, 'versions': {},
              'data': {'tokenizer': str, 'n_ids': int, 'eos_id': int, 'sha256': str}}
    for part, types_of in needed.items():
        if not isinstance(record.get(part), dict):
            raise UserError(f'{path} is damaged ({part} is missing, or no object): {remedy}')
        if part == 'settings':
            record[part] = {**UNSTATED, **record[part]}
        if missing := types_of.keys() - record[part].keys():
            raise UserError(f'{path} is damaged ({part} has no {", ".join(sorted(missing))}): {remedy}')
        for name, kind in types_of.items():
            record[part][name] = typed(name, record[part][name], kind, f'in {path}')
    data, eval_seed = record['data'], record['settings']['eval_seed'] or 0
    data['bos'] = typed('bos', data.get('bos', False), bool, f'in {path}')  # older runs have no such data
    if not (record['settings']['block_size'] >= 1 and eval_seed >= 0 and 0 <= data['eos_id'] < data['n_ids']):
        raise UserError(f'{path} is damaged (block_size, eval_seed, n_ids or eos_id out of range): {remedy}')
    if 'tokenizer_digest' in data:  # older runs have the path of a file elsewhere
        if data['tokenizer'] in TOKENIZER_FILES:
            data['tokenizer'] = str((Path(folder) / data['tokenizer']).resolve())
        if tokenizer_digest(data['tokenizer']) != data['tokenizer_digest']:
            raise UserError(f'{data["tokenizer"]} is missing, or not the tokenizer that the run was trained with: '
                            f'{remedy}')
    return {key: record[key] for key in ('model', *needed)}


def run_data(record: dict, name: str | None, folder=None) -> Data | Generated:
    """The data called `name` for the run in `folder`; None: the run's own, by its config.json (`record`).

    UserError if there are none, or with another tokenizer than the run's.
    """
    name = name or record['settings'].get('data')
    if not name:
        raise UserError('this run has no data of its own: give --data=FOLDER')
    data = open_data(name)
    check_vocabulary(record, data, folder)
    return data


def same_vocabulary(a: dict, b: dict) -> bool:
    """Whether two have one tokenizer, wherever its files lie. Each is the 'data' of a run's config.json, or as that.

    Where a file is gone, as may be with an older run, the ids alone decide.
    """
    digests = {tokenizer_digest(a['tokenizer']), tokenizer_digest(b['tokenizer'])} - {None}
    return a['n_ids'] == b['n_ids'] and a['eos_id'] == b['eos_id'] and len(digests) < 2


def check_vocabulary(record: dict, data, folder=None) -> None:
    """Raises UserError unless the run, in `folder`, was trained with the tokenizer of the data."""
    want, have = record['data'], {'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id}
    if not same_vocabulary(want, have):
        run = f'the run in {folder}' if folder else 'this run'
        raise UserError(f'{data.folder} has tokenizer {data.tokenizer!r} with {data.n_ids} ids, {run} was trained with '
                        f'{want["tokenizer"]!r} and {want["n_ids"]}: use data with the same tokenizer')


# ---- the records of a run in training ----

def check_out_dir(folder, overwrite: bool) -> None:
    """Raises UserError if a new run must not be written to this folder."""
    folder = Path(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f'{folder} is a file: give another --out_dir')
    names = {path.name for path in folder.iterdir()}
    if (folder / 'config.json').exists():
        if not overwrite:
            raise UserError(f'{folder} holds a run already: --resume goes on with it, --overwrite replaces it, '
                            'another --out_dir keeps both')
        if not is_own_config(folder / 'config.json'):
            raise UserError(f'{folder}/config.json is damaged or not one that train.py wrote, so --overwrite removes '
                            'nothing: give another --out_dir, or remove the folder yourself')
    elif (folder / REPLACED).exists():
        if not overwrite:
            raise UserError(f'{folder} holds what is left of a run that was being replaced: --overwrite goes on with '
                            'that')
    elif names and ('.lock' not in names or names - LEFT_BY_A_KILL):
        raise UserError(f'{folder} exists and is not a run folder: give another --out_dir')


def is_own_config(path: Path) -> bool:
    """Whether a config.json is one of a run, and whole."""
    try:
        record = read_json(path, '')
    except (OSError, UserError):
        return False
    return {'model', 'settings', 'model_config', 'data'} <= record.keys()


@contextmanager
def claimed(folder, is_new: bool, overwrite: bool) -> Iterator[None]:
    """Holds the lock of a run folder for its one writer. One that it made, and in which nothing was written, goes."""
    folder = Path(folder)
    was_there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'the run folder {folder} cannot be made ({error.strerror}): give another --out_dir')
    with locked(folder):
        try:
            if is_new:
                check_out_dir(folder, overwrite)  # once more: another run may have begun here meanwhile
            yield
        finally:
            if not was_there and os.listdir(folder) == ['.lock']:
                shutil.rmtree(folder)


def remove_run(folder) -> None:
    """Removes what train.py and eval.py have written to a run folder, if there is any. Other files stay, and are named.

    config.json goes first, by a rename; `save_run` removes what it became. A kill in between leaves a folder that is no
    run, and that says so.
    """
    folder = Path(folder)
    if (folder / 'config.json').exists():
        os.replace(folder / 'config.json', folder / REPLACED)
    if not (folder / REPLACED).exists():
        return
    for checkpoint in (*checkpoints(folder), *(folder / 'ckpt').glob('.writing_*')):
        shutil.rmtree(checkpoint)
    for name in ('log.jsonl', 'loss.png', 'decoding.json', *OF_EVALUATION, *tokenizer_files(folder / REPLACED)):
        if not (folder / name).is_dir():
            (folder / name).unlink(missing_ok=True)
    for name in ('ckpt', 'gpt2_vocabulary'):
        with suppress(OSError):  # it holds files of others, is a link, or is not there
            (folder / name).rmdir()
    kept = sorted({path.name for path in folder.iterdir()} - {REPLACED, '.lock'})
    if kept:
        print(f'{folder}: these files are not of the run, and stay: {", ".join(kept)}')


def tokenizer_files(config: Path) -> list[str]:
    """The files of the tokenizer that a run folder has by its config.json, or none."""
    with suppress(ValueError, TypeError, KeyError):  # it is damaged
        data = json.loads(config.read_bytes())['data']
        if 'tokenizer_digest' in data and data['tokenizer'] == 'gpt2_vocabulary':
            return [f'gpt2_vocabulary/{file}' for file in GPT2_SHA256]
        if 'tokenizer_digest' in data and data['tokenizer'] in TOKENIZER_FILES:
            return [data['tokenizer']]
    return []


def save_run(folder, record: dict) -> None:
    """Writes a new run folder's config.json, which `read_run` reads, and its copy of the tokenizer's file.

    The digest of the model's code goes with the record's versions.
    """
    data, versions = record['data'], {**record['versions'], 'model_code': code_digest(record['model'])}
    Path(folder).mkdir(parents=True, exist_ok=True)
    own = {'tokenizer': keep_tokenizer(folder, data['tokenizer']),
           'tokenizer_digest': tokenizer_digest(data['tokenizer'])}
    write_json(Path(folder) / 'config.json', checked_json({**record, 'data': {**data, **own}, 'versions': versions}))
    (Path(folder) / REPLACED).unlink(missing_ok=True)  # a run that was replaced is gone only now


def open_log(folder, step: int, model_code: str) -> TextIO:
    """Opens log.jsonl for appending. Where there is one, a run goes on: its first line says from which step.

    And by which code of the model (`code_digest`): config.json has that of the first start alone.
    """
    path = Path(folder) / 'log.jsonl'
    before = path.read_bytes() if path.exists() else b''
    log = open(path, 'a', buffering=1)
    if before:
        log.write('' if before.endswith(b'\n') else '\n')  # a line that was cut stays alone
        log.write(log_line({'resumed_from': step, 'model_code': model_code}))
    return log


def copy_log(source, folder, step: int) -> None:
    """Begins the log of a run that makes another longer: with the other's lines up to a step."""
    lines = [log_line(record) for record in read_log(source) if record['step'] <= step]
    write_file(Path(folder) / 'log.jsonl', ''.join(lines).encode())


def log_line(record: dict) -> str:
    """A record as a line of log.jsonl: JSON that ends with the crc32 of what stands before."""
    text = json.dumps(record)[:-1]
    return f'{text}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n'


def read_log(folder) -> list[dict]:
    """The records of a run's logged steps, without those that say how the equations are run.

    Drops the steps that a resumed run took again. Says on stderr how many lines are damaged.
    """
    path, records, n_damaged = Path(folder) / 'log.jsonl', [], 0
    for line in path.read_bytes().split(b'\n') if path.exists() else []:
        for record in log_records(line):
            if record is None:
                n_damaged += 1
            elif 'resumed_from' in record:
                records = [earlier for earlier in records if earlier['step'] <= record['resumed_from']]
            else:
                records.append(record)
    if n_damaged:
        print(f'{path}: left out {n_damaged} damaged line{"s" * (n_damaged > 1)}', file=sys.stderr)
    return [record for record in records if 'scan' not in record]


def log_records(line: bytes) -> list[dict | None]:
    """The records in a line of log.jsonl, None for a damaged one: two where the line's end between them is damaged."""
    checked = re.findall(rb'(\{".*?), "crc32": "(\w{8})"\}', line)
    if checked:
        texts = [text + b'}' if b'%08x' % zlib.crc32(text) == crc32 else b'' for text, crc32 in checked]
    elif line.endswith(b'"}'):  # it had a checksum
        texts = [b'']
    else:  # logged by older code, without one
        texts = [line] if line.strip() else []
    return [record_of(text) for text in texts]


def record_of(text: bytes) -> dict | None:
    """A record from its JSON, or None."""
    with suppress(ValueError):
        record = json.loads(text)
        if isinstance(record, dict) and isinstance(record.get('step', record.get('resumed_from')), int):
            return {name: value for name, value in record.items() if name != 'crc32'}
    return None


def plot_loss(folder) -> None:
    """Writes loss.png: training and validation loss against tokens."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    records = read_log(folder)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
    for key, label, style in (('nll', 'training', dict(alpha=0.5, linewidth=0.8)),
                              ('val', 'validation', dict(marker='o', markersize=3))):
        points = [(record['tokens'], record[key]) for record in records if {'tokens', key} <= record.keys()]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    axes.set(xlabel='tokens', ylabel='nats per token', title=str(folder))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(folder) / 'loss.png', dpi=130)
    plt.close(figure)
