"""Models by name, run folders and checkpoints.

A run folder holds

    config.json             model, settings, model_config, data (tokenizer and vocabulary), versions
    log.jsonl               one line per logged step
    loss.png                the loss curve
    ckpt/step_00000100/     model.safetensors, optimizer.safetensors, state.json, SHA256SUMS
"""
import difflib
import importlib
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.files import UserError, sha256, sync_folder, write_json

ROOT = Path(__file__).resolve().parent.parent


# ---- models ----


def model_file(name):
    """The module model_<name>.py of the repository. The name is checked, so that a stranger's run folder cannot name other code."""
    known = sorted(p.stem.removeprefix('model_') for p in ROOT.glob('model_*.py'))
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1, 0.4) or known
        raise UserError(f'unknown model {name!r}: did you mean {" or ".join(map(repr, near))}? (there is one model_NAME.py per model)')
    return importlib.import_module(f'model_{name}')


def make_config(model_name, values):
    """The Config of a model file from {name: value}; what the Config itself rejects becomes a UserError."""
    try:
        return model_file(model_name).Config(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f'model {model_name!r}: {error}')


def adopted(model, tensors, source):
    """The tensors of another run as this model takes them: as they are, or through its `adopt`, whose ValueError becomes a UserError."""
    try:
        return model.adopt(tensors) if hasattr(model, 'adopt') else tensors
    except ValueError as error:
        raise UserError(f'{source} does not fit this model: {error}')


def check_weights(model, tensors, source):
    """Raises UserError unless the names and shapes of the tensors are those of the model's parameters."""
    params = dict(model.named_parameters())
    for name in (*params, *tensors):
        if name not in params or name not in tensors:
            raise UserError(f'{source} does not fit this model: {name} is only in the {"model" if name in params else "checkpoint"}')
        have, want = tuple(tensors[name].shape), tuple(params[name].shape)
        if have != want:
            raise UserError(f'{source} does not fit this model: {name} has shape {have}, the model needs {want}')


def load_weights(model, tensors, source):
    """Copies named tensors into the model's parameters; UserError unless they fit exactly."""
    check_weights(model, tensors, source)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[name])


# ---- run folders ----


def save_run(folder, record):
    """Writes config.json of a new run folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_json(Path(folder) / 'config.json', record)


def read_run(folder):
    """config.json of a run folder as a dict, or a UserError."""
    path = Path(folder) / 'config.json'
    if not path.is_file():
        runs = sorted(str(p.parent) for p in Path('out').glob('*/config.json')) if Path('out').is_dir() else []
        known = f'runs here: {", ".join(runs)}' if runs else 'train one first: python train.py config/quickstart.py'
        raise UserError(f'{folder} is not a run folder (it has no config.json); {known}')
    try:
        record = json.loads(path.read_text())
        for part, keys in (('settings', ['block_size']), ('model_config', []), ('data', ['tokenizer', 'n_ids', 'eos_id', 'sha256'])):
            if not isinstance(record[part], dict) or not all(key in record[part] for key in keys):
                raise ValueError(f'{part} is incomplete')
        return {key: record[key] for key in ('model', 'settings', 'model_config', 'data', 'versions')}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path} is damaged ({type(error).__name__}: {error}); copy the run again or train it anew')


def check_vocabulary(record, data, folder):
    """Raises UserError unless the run in `folder` was trained with the tokenizer of the data."""
    want, have = record['data'], {'tokenizer': data.tokenizer, 'n_ids': data.n_ids}
    if any(want[key] != have[key] for key in have):
        raise UserError(f'{data.folder} has tokenizer {data.tokenizer!r} with {data.n_ids} ids, the run in {folder} was trained '
                        f'with {want["tokenizer"]!r} and {want["n_ids"]}: use data with the same tokenizer')


def read_log(folder):
    """The records of a run's log.jsonl; a last line cut by a kill is left out."""
    path, records = Path(folder) / 'log.jsonl', []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def load_run(folder, device='cpu', dtype=None):
    """The trained model of a run folder, in eval mode, and its config.json: (model, record).

    device as for Tensor.to; dtype None keeps fp32. Reads the newest checkpoint that is whole.
    """
    record = read_run(folder)
    config = make_config(record['model'], record['model_config'])
    tensors = load_checkpoint(folder, ('model.safetensors',))[1]['model.safetensors']
    model = model_file(record['model']).Model(config)
    load_weights(model, tensors, folder)
    return model.eval().to(device=device, dtype=dtype), record


# ---- checkpoints ----


def save_checkpoint(folder, step, tensor_files, state, keep=2):
    """Writes ckpt/step_<step> of a run folder, all or nothing, then removes all but the newest `keep` checkpoints.

    tensor_files {file name: {tensor name: tensor}}, state a dict for state.json. The files go to a temporary folder, reach the
    disk (fsync), and get their final name by one rename. Raises UserError with nothing changed when the disk is full.
    """
    ckpt = Path(folder) / 'ckpt'
    final, temporary = ckpt / f'step_{step:08d}', ckpt / f'.writing_{step:08d}'
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, tensors in tensor_files.items():
            save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, temporary / name)
        write_json(temporary / 'state.json', state)
        sums = ''.join(f'{sha256(temporary / name)}  {name}\n' for name in (*tensor_files, 'state.json'))
        (temporary / 'SHA256SUMS').write_text(sums)
        for path in temporary.iterdir():
            with open(path, 'rb') as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        if final.exists():  # only a damaged one that a resumed run fell back from
            shutil.rmtree(final)
        os.replace(temporary, final)
        sync_folder(ckpt)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f'{final} could not be written: {error}. Earlier checkpoints are whole: make room, then go on with --resume')
    newest_first = checkpoints(folder)
    at = newest_first.index(final)  # those above are damaged ones that this run fell back from
    for old in newest_first[:at] + newest_first[at + keep:]:
        shutil.rmtree(old)


def checkpoints(folder):
    """The checkpoint folders of a run, newest first."""
    return sorted((Path(folder) / 'ckpt').glob('step_*'), reverse=True)


def load_checkpoint(folder, names=('model.safetensors', 'optimizer.safetensors')):
    """The newest whole checkpoint of a run folder: (state, {file name: {tensor name: tensor}}).

    Each file is checked against SHA256SUMS; a damaged checkpoint is named on stderr and the one before it is taken. Only JSON
    and safetensors are read, neither of which can run code.
    """
    found = checkpoints(folder)
    for path in found:
        try:
            sums = dict(reversed(line.split()) for line in (path / 'SHA256SUMS').read_text().splitlines())
            for name in ('state.json', *names):
                if sha256(path / name) != sums[name]:
                    raise ValueError(f'{name} does not match its checksum')
            state = json.loads((path / 'state.json').read_text())
            return state, {name: load_file(path / name) for name in names}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            print(f'checkpoint {path} is damaged ({error}); trying the one before it', file=sys.stderr)
    raise UserError(f'{folder} has no {"whole " if found else ""}checkpoint to load')
