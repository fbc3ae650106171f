"""Save and load the checkpoints of a run folder. docs/runs.md and docs/scale.md list their files.

A checkpoint is written to a temporary folder, which is renamed once all files are on disk.
"""
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import parallel
from common.files import UserError, first_line, is_number, remove, sha256, sync, warn_once, write_json

FILES = ('model.safetensors', 'optimizer.safetensors')

# common.sharding is imported where it is used, because the import takes a second.


# ---- weights ----

def checkpoint_tensors(model: torch.nn.Module) -> dict:
    """Return {name: tensor} of a model's checkpoint: parameters, then persistent buffers."""
    persistent = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in persistent}


def check_weights(model: torch.nn.Module, tensors: dict, source) -> None:
    """Raise UserError unless the tensors have the model's names and shapes."""
    own = checkpoint_tensors(model)
    for name in own | tensors:
        have, want = (tuple(some[name].shape) if name in some else 'missing' for some in (tensors, own))
        if have != want:
            raise UserError(f'{source} does not fit this model: {name} has shape {have}, expected {want}')


def load_weights(model: torch.nn.Module, tensors: dict, source) -> None:
    """Copy named tensors into the model's parameters and buffers. UserError on a mismatch."""
    check_weights(model, tensors, source)
    own = checkpoint_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def first_nonfinite(tensors: dict) -> str | None:
    """Return the name of a tensor with a NaN or an infinity in this process's shard, else None."""
    parts = {name: parallel.local_shard(t) for name, t in tensors.items() if t.is_floating_point()}
    # A sum is ten times faster than isfinite on all elements, but it may overflow.
    return next((name for name, t in parts.items() if not t.sum().isfinite() and not t.isfinite().all()), None)


# ---- training ----

def save_training(folder, model: torch.nn.Module, optimizer, step: int, seconds: float, keep: int,
                  always: int | None = None) -> None:
    """Save a checkpoint from which training continues exactly. Call it on all processes.

    Random state is not saved: it is a function of seed and step. keep, always: see `remove_older`.
    """
    names, is_sharded = {p: name for name, p in model.named_parameters()}, parallel.is_sharded(model)
    if is_sharded or parallel.rank() == 0:
        moments, rest = {}, {}  # {'key/parameter': tensor}; {parameter: {key: other values}}
        for p, of_param in optimizer.state.items():
            for key, value in of_param.items():
                packed = pack(value, key, names[p], moments)
                if not (isinstance(value, torch.Tensor) and value.device == p.device):
                    rest.setdefault(names[p], {})[key] = packed
        state = {'step': step, 'seconds': seconds, 'optimizer': rest}
        save_checkpoint(folder, step, checkpoint_tensors(model) | moments, state, is_sharded)
    if parallel.rank() == 0:
        remove_older(folder, step, keep, always)


def restore_training(folder, model: torch.nn.Module, optimizer, up_to: int | None = None) -> tuple[int, float]:
    """Load the newest undamaged checkpoint up to step `up_to`. Returns (step, seconds of training).

    (0, 0.0) if there is no checkpoint yet. If the model is sharded, call it on all processes.
    """
    if not checkpoints(folder):
        return 0, 0.0
    is_sharded, params = parallel.is_sharded(model), dict(model.named_parameters())
    state, tensors = load_checkpoint(folder, True, up_to, model if is_sharded else None)
    if not is_sharded:
        load_weights(model, {name: tensor for name, tensor in tensors.items() if '/' not in name}, folder)
    for name, value in tensors.items():
        key, is_moment, param = name.partition('/')
        if is_moment and '[' not in key:
            optimizer.state[params[param]][key] = value.to(params[param].device)
    on_device = {p for group in optimizer.param_groups if group.get('fused') or group.get('capturable')
                 for p in group['params']}  # with their step counts
    try:
        for name, of_param in state['optimizer'].items():
            p = params[name]
            for key, value in of_param.items():
                optimizer.state[p][key] = unpack(value, tensors, p.device, p in on_device)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the optimizer's state in {folder} does not fit this model ({first_line(error)})")
    return state['step'], state['seconds']


def pack(value, key: str, param: str, tensors: dict):
    """Return a part of an optimizer's state as JSON. Its tensors are added to `tensors`.

    {'tensor': name, ...} stands for a tensor, {'dict': ...} for a dict. UserError for other types.
    """
    if isinstance(value, torch.Tensor):
        tensors[f'{key}/{param}'] = value
        return {'tensor': f'{key}/{param}', 'device': value.device.type}
    if isinstance(value, list):
        return [pack(x, f'{key}[{i}]', param, tensors) for i, x in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {'dict': {name: pack(x, f'{key}[{name}]', param, tensors) for name, x in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"the optimizer's state has {key} = {value!r} for {param}: a checkpoint holds only tensors, "
                    'numbers, strings, None, and lists and dicts (not tuples) of them')


def unpack(value, tensors: dict, device, scalars_too: bool):
    """Return what `pack` was given, with its tensors on the device. scalars_too: those as well."""
    if isinstance(value, list):
        return [unpack(x, tensors, device, scalars_too) for x in value]
    if not isinstance(value, dict):
        return value
    if 'dict' in value:
        return {name: unpack(x, tensors, device, scalars_too) for name, x in value['dict'].items()}
    tensor = tensors[value['tensor']]
    return tensor if tensor.dim() == 0 and value['device'] == 'cpu' and not scalars_too else tensor.to(device)


# ---- writing ----

def save_checkpoint(folder, step: int, tensors: dict, state: dict, is_sharded: bool = False) -> None:
    """Write ckpt/step_<step> of a run folder atomically.

    tensors: weights and moments (names with '/'). state: a dict for state.json. Call it on all
    processes if tensors are sharded. UserError if the disk is full or a tensor is not finite.
    """
    ckpt, bad = Path(folder) / 'ckpt', first_nonfinite(tensors)
    if bad := parallel.first_not_none(bad) if is_sharded else bad:
        raise UserError(f'{bad} contains NaN or infinity after step {step}, so no checkpoint was written. '
                        + recovery_advice(folder))
    temporary = ckpt / f'.writing_{step:08d}'
    try:
        if parallel.rank() == 0:
            ckpt.mkdir(exist_ok=True)  # not the run folder, which may have been moved
            remove_old(ckpt.glob('.writing_*'))  # from runs that were killed
            temporary.mkdir()
            write_json(temporary / 'state.json', state)
        if is_sharded:
            from common.sharding import save_shards
            torch.distributed.barrier()
            save_shards(temporary, tensors)
        else:
            for i, name in enumerate(FILES):
                save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()
                           if ('/' in key) == i}, temporary / name)
        if parallel.rank() == 0:
            publish(temporary, ckpt / f'step_{step:08d}')
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not Path(folder).is_dir():
            raise UserError(f'{folder} was moved or removed during training, so the checkpoint of step {step} was not '
                            'saved: continue from the one before, with --resume and the new --out_dir')
        raise UserError(f'the checkpoint of step {step} could not be written to {ckpt}: {error}. Earlier checkpoints '
                        'are intact: if the disk is full, free some disk space; then continue with --resume')


def recovery_advice(folder) -> str:
    """Return advice for a run that diverged, with the name of its newest checkpoint."""
    newest = next(iter(checkpoints(folder)), None)
    return (f'The last good checkpoint is {newest or "none"}: start a new run with a lower learning_rate or more '
            'warmup_tokens' + (f', from scratch or from these weights with --init_from={folder}' if newest else ''))


def publish(temporary: Path, final: Path) -> None:
    """Add SHA256SUMS to a temporary folder, flush its files to disk and give it its final name."""
    mode = (temporary / 'state.json').stat().st_mode
    names = sorted(path.name for path in temporary.iterdir())
    (temporary / 'SHA256SUMS').write_text(''.join(f'{sha256(temporary / name)}  {name}\n' for name in names))
    for path in temporary.iterdir():
        with suppress(OSError):  # some file systems have no modes
            path.chmod(mode)  # safetensors creates files that only their owner can read
        sync(path)
    sync(temporary)
    remove(final)  # a damaged checkpoint that the resumed run skipped
    os.replace(temporary, final)
    sync(final.parent)


def remove_older(folder, step: int, keep: int, always: int | None) -> None:
    """Keep the newest `keep` checkpoints up to `step` and that of step `always`. Delete the others.

    Checkpoints after `step` are damaged: this run resumed from an earlier one.
    """
    kept = [path for path in checkpoints(folder, step) if step_of(path) != always][:keep]
    remove_old(path for path in checkpoints(folder) if path not in kept and step_of(path) != always)


def remove_old(paths) -> None:
    """Delete folders. Warns about those that cannot be deleted now: the next save tries again."""
    for path in paths:
        try:
            remove(path)
        except OSError as error:  # for example on NFS, while another machine reads it
            warn_once(f'{path} could not be removed ({error}); the next save tries again')


# ---- reading ----

def checkpoints(folder, up_to: int | None = None) -> list[Path]:
    """Return the checkpoint folders of a run up to step `up_to`, newest first."""
    found = [path for path in Path(folder).glob('ckpt/step_*')
             if re.fullmatch(r'step_\d{8,}', path.name) and path.is_dir()]
    return sorted((p for p in found if up_to is None or step_of(p) <= up_to), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix('step_'))


def load_checkpoint(folder, moments: bool = False, up_to: int | None = None, model=None) -> tuple[dict, dict]:
    """Load the newest undamaged checkpoint of a run folder: (state, {tensor name: tensor}).

    Warns about damaged ones. Reads only JSON and safetensors, which cannot run code. With a sharded
    `model`, all processes call this and fill their shards in place; else shards are merged.
    """
    for path in checkpoints(folder, up_to):
        found = error = None
        try:
            found = read_checkpoint(path, moments, model, folder)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as caught:
            error = str(caught)
        if model is not None:
            error = parallel.first_not_none(error)
        if error is None:
            return found
        warn_once(f'checkpoint {path} is damaged ({error}); trying the previous one')
    raise UserError(f'{folder} has no {"undamaged " if checkpoints(folder, up_to) else ""}checkpoint to load')


def read_checkpoint(path: Path, moments: bool, model, folder) -> tuple[dict, dict]:
    """Read one checkpoint for `load_checkpoint`. A damaged one may raise any kind of error."""
    shards = sorted(file.name for file in path.glob('shard-*'))
    if not moments:
        shards = [name for name in shards if name.endswith('-00001-of-00002.safetensors')]
    files = shards or FILES[:1 + moments]
    share = slice(None) if model is None else slice(parallel.rank(), None, parallel.world())
    state = read_state(path, files[share])
    if model is None and not shards:
        tensors = {key: tensor for name in files for key, tensor in load_file(path / name).items()}
    else:
        from common.sharding import load_in_place, target_tensors, tensor_metadata
        tensors = {key: t for key, t in tensor_metadata(path).items() if moments or '/' not in key}
        if model is None:
            tensors = {key: torch.empty_like(tensor, device='cpu') for key, tensor in tensors.items()}
        else:
            check_weights(model, {key: tensor for key, tensor in tensors.items() if '/' not in key}, folder)
            tensors = target_tensors(checkpoint_tensors(model), tensors)
        load_in_place(tensors, path)
    if bad := first_nonfinite(tensors):
        raise ValueError(f'{bad} contains NaN or infinity')
    return state, tensors


def read_state(path: Path, files) -> dict:
    """Return a checkpoint's state.json. Raises an error unless it and `files` match SHA256SUMS."""
    sums = dict(reversed(line.split()) for line in (path / 'SHA256SUMS').read_text().splitlines())
    for name in sums:
        if name.startswith('shard-') and not (path / name).exists():  # the remaining shards alone would look complete
            raise ValueError(f'{name} is missing')
    for name in ('state.json', *files):
        if sha256(path / name) != sums[name]:
            raise ValueError(f'{name} does not match its checksum')
    state = {'seconds': 0.0, 'optimizer': {}} | json.loads((path / 'state.json').read_text())
    is_whole = type(state['step']) is int and state['step'] == step_of(path) and is_number(state['seconds'])
    if not is_whole or not isinstance(state['optimizer'], dict):
        raise ValueError(f'state.json is {state}')
    return state
