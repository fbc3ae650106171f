"""Checkpoints of a run folder.

    ckpt/step_00000100/     model.safetensors, optimizer.safetensors, state.json, SHA256SUMS; with --parallel=fsdp each
                            process writes its shards of the two: shard-<rank + 1>-model-<1 or 2>-of-00002.safetensors

A checkpoint is written to a temporary folder, which is renamed when all files are on the disk. Loading compares every
file with its checksum. A damaged checkpoint is named on stderr and the one before it is used.
"""
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import parallel
from common.files import UserError, say_once, sha256, sync_folder, write_json

FILES = ('model.safetensors', 'optimizer.safetensors')
DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)  # what reading a damaged checkpoint may raise

# torch.distributed.checkpoint is imported where it is used: the import takes a second.


# ---- weights ----

def own_tensors(model: torch.nn.Module) -> dict:
    """Return the tensors that a checkpoint of the model holds, by name: parameters, then persistent buffers."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def check_weights(model: torch.nn.Module, tensors: dict, source) -> None:
    """Raise UserError unless the tensors have the model's names and shapes."""
    own = own_tensors(model)
    for name in (*own, *tensors):
        if name not in own or name not in tensors:
            owner = 'model' if name in own else 'checkpoint'
            raise UserError(f'{source} does not fit this model: {name} is only in the {owner}')
        have, want = tuple(tensors[name].shape), tuple(own[name].shape)
        if have != want:
            raise UserError(f'{source} does not fit this model: {name} has shape {have}, the model needs {want}')


def load_weights(model: torch.nn.Module, tensors: dict, source) -> None:
    """Copy named tensors into the model's parameters and buffers; UserError unless they fit."""
    check_weights(model, tensors, source)
    own = own_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def not_finite(tensors: dict) -> str | None:
    """Return the name of a tensor that holds a NaN or an infinity, else None. Checks this process's shards only."""
    parts = {name: parallel.own_part(t) for name, t in tensors.items() if t.is_floating_point()}
    # A NaN or an infinity makes the sum non-finite, and a sum is ten times as fast. A sum may also overflow.
    return next((name for name, t in parts.items() if not t.sum().isfinite() and not t.isfinite().all()), None)


# ---- training ----

def save_training(folder, model: torch.nn.Module, optimizer, step: int, seconds: float, keep: int,
                  always: int | None = None) -> None:
    """Save a checkpoint from which training continues exactly. All processes call it.

    Random streams need no state: they are functions of seed and step. keep, always: see `remove_older`.
    """
    names = {p: name for name, p in model.named_parameters()}
    moments = {f'{key}/{names[p]}': value for p, state in optimizer.state.items() for key, value in state.items()}
    weights, state = own_tensors(model), {'step': step, 'seconds': seconds}
    if parallel.is_sharded(model):
        save_shards(folder, step, weights | moments, state)
    elif parallel.rank() == 0:
        save_checkpoint(folder, step, dict(zip(FILES, (weights, moments))), state)
    if parallel.rank() == 0:
        remove_older(folder, step, keep, always)


def restore_training(folder, model: torch.nn.Module, optimizer, up_to: int | None = None) -> tuple[int, float]:
    """Load the newest undamaged checkpoint, of step up_to at most. Returns (step, seconds of training).

    (0, 0.0) if the run was stopped before its first. Any number of processes may have written it, and may load it. All
    processes of a sharded model call this together; each reads its own shards.
    """
    if not checkpoints(folder):
        return 0, 0.0
    params = dict(model.named_parameters())
    if parallel.is_sharded(model):
        state, moments = first_undamaged(folder, lambda path: load_shards(path, model, folder), up_to)
    else:
        state, files = load_checkpoint(folder, up_to=up_to)
        load_weights(model, files['model.safetensors'], folder)
        moments = files['optimizer.safetensors']
    for name, value in moments.items():
        key, _, param = name.partition('/')
        optimizer.state[params[param]][key] = value.to(params[param].device)
    return state['step'], state['seconds']


# ---- writing ----

def save_checkpoint(folder, step: int, tensor_files: dict, state: dict) -> None:
    """Write ckpt/step_<step> of a run folder, all or nothing.

    tensor_files {file name: {tensor name: tensor}}; state: a dict for state.json. Raises UserError with nothing changed
    when the disk is full or a number is not finite.
    """
    for tensors in tensor_files.values():
        refuse_not_finite(folder, step, not_finite(tensors))
    final, temporary = checkpoint_paths(folder, step)
    try:
        clear_temporary(folder, step)
        write_json(temporary / 'state.json', state)
        mode = (temporary / 'state.json').stat().st_mode
        for name, tensors in tensor_files.items():
            save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, temporary / name)
            (temporary / name).chmod(mode)  # safetensors makes files that only their owner can read
        publish(folder, step)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f'{final} could not be written: {error}. Earlier checkpoints are whole: free some space, then '
                        'continue with --resume')


def save_shards(folder, step: int, tensors: dict, state: dict) -> None:
    """`save_checkpoint` of sharded tensors. All processes call it, and each writes its own shards."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException
    temporary = checkpoint_paths(folder, step)[1]
    if parallel.rank() == 0:
        clear_temporary(folder, step)
        write_json(temporary / 'state.json', state)
    refuse_not_finite(folder, step, parallel.first_given(not_finite(tensors)))  # also waits for rank 0
    file_numbers = {key: 2 if '/' in key else 1 for key in tensors}
    writer = checkpoint.HuggingFaceStorageWriter(str(temporary), file_numbers, save_distributed=True)
    try:
        checkpoint.save(tensors, storage_writer=writer)
    except CheckpointException as error:  # raised on all processes; not an Exception
        failed, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise UserError(f'{temporary} could not be written: process {failed}: {cause}')
    if parallel.rank() == 0:
        publish(folder, step)


def checkpoint_paths(folder, step: int) -> tuple[Path, Path]:
    """Return (path of a checkpoint, temporary path that it is written to)."""
    ckpt = Path(folder) / 'ckpt'
    return ckpt / f'step_{step:08d}', ckpt / f'.writing_{step:08d}'


def refuse_not_finite(folder, step: int, bad: str | None) -> None:
    """Raise UserError if there is a tensor, `bad`, with numbers that are not finite."""
    if bad:
        raise UserError(f'after step {step}, {bad} holds numbers that are not finite, so '
                        f'{checkpoint_paths(folder, step)[0]} is not written. {last_good(folder)}')


def last_good(folder) -> str:
    """Return a sentence that names the newest checkpoint of a run that diverged, and what to do with it."""
    newest = next(iter(checkpoints(folder)), 'none')
    return (f'The last good checkpoint is {newest}: start another run with a lower learning_rate or more '
            f'warmup_tokens, from its weights with --init_from={folder} or from the beginning')


def clear_temporary(folder, step: int) -> None:
    """Make an empty temporary folder, and remove those that killed runs have left."""
    for leftover in (Path(folder) / 'ckpt').glob('.writing_*'):
        shutil.rmtree(leftover)
    checkpoint_paths(folder, step)[1].mkdir(parents=True)


def publish(folder, step: int) -> None:
    """Add SHA256SUMS to a temporary folder, flush its files to the disk, and give it its final name."""
    final, temporary = checkpoint_paths(folder, step)
    names = sorted(path.name for path in temporary.iterdir())
    (temporary / 'SHA256SUMS').write_text(''.join(f'{sha256(temporary / name)}  {name}\n' for name in names))
    for path in temporary.iterdir():
        with open(path, 'rb') as file:
            os.fsync(file.fileno())
    sync_folder(temporary)
    if final.exists():  # a damaged one, which a resumed run has skipped
        shutil.rmtree(final)
    os.replace(temporary, final)
    sync_folder(final.parent)


def remove_older(folder, step: int, keep: int, always: int | None) -> None:
    """Keep the newest `keep` checkpoints up to `step` and the one of step `always`. Remove the others.

    Those of higher steps are damaged: this run has resumed from an earlier one.
    """
    up_to_step = [path for path in checkpoints(folder, step) if step_of(path) != always]
    kept = {*up_to_step[:keep], checkpoint_paths(folder, always or 0)[0]}
    for path in checkpoints(folder):
        if path not in kept:
            shutil.rmtree(path)


# ---- reading ----

def checkpoints(folder, up_to: int | None = None) -> list[Path]:
    """Return the checkpoint folders of a run, of step up_to at most, newest first."""
    found = [path for path in (Path(folder) / 'ckpt').glob('step_*')
             if re.fullmatch(r'step_\d{8,}', path.name) and path.is_dir()]
    return sorted((p for p in found if up_to is None or step_of(p) <= up_to), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix('step_'))


def first_undamaged(folder, read: Callable, up_to: int | None):
    """Return read(path) of the newest checkpoint that is not damaged. Names each damaged one on stderr."""
    for path in checkpoints(folder, up_to):
        try:
            return read(path)
        except UserError:
            raise
        except DAMAGE as error:
            say_once(f'checkpoint {path} is damaged ({error}); the one before it is tried')
    raise UserError(f'{folder} has no {"undamaged " if checkpoints(folder, up_to) else ""}checkpoint to load')


def load_checkpoint(folder, names=FILES, up_to: int | None = None) -> tuple[dict, dict]:
    """Load the newest undamaged checkpoint of a run folder: (state, {file name: {tensor name: tensor}}).

    Only JSON and safetensors are read, neither of which can run code. Shards are put together.
    """
    return first_undamaged(folder, lambda path: load_whole(path, names), up_to)


def load_whole(path: Path, names) -> tuple[dict, dict]:
    """Read these of FILES from a checkpoint: (state, {file name: {tensor name: tensor}})."""
    state = checked_state(path, [file for name in names for file in files_of(path, name)])
    if any(path.glob('shard-*')):
        files = {name: {} for name in FILES}
        for key, tensor in tensors_in_shards(path).items():
            files[FILES['/' in key]][key] = torch.empty_like(tensor, device='cpu')
        files = {name: files[name] for name in names}
        read_shards(path, {key: tensor for tensors in files.values() for key, tensor in tensors.items()})
    else:
        files = {name: load_file(path / name) for name in names}
    for name, tensors in files.items():
        if bad := not_finite(tensors):
            raise ValueError(f'{bad} in {name} holds numbers that are not finite')
    return state, files


def load_shards(path: Path, model: torch.nn.Module, folder) -> tuple[dict, dict]:
    """Load a checkpoint into a sharded model: (state, the optimizer's tensors).

    All processes call it together. Each compares a share of the files with their checksums and reads its own shards.
    Damage found by one is raised on all.
    """
    error, state = None, {}
    try:
        files = [file for name in FILES for file in files_of(path, name)]
        state = checked_state(path, files[parallel.rank()::parallel.world()])
    except DAMAGE as caught:
        error = f'{type(caught).__name__}: {caught}'
    if error := parallel.first_given(error):
        raise ValueError(error)
    in_files, params = tensors_in_shards(path), dict(model.named_parameters())
    check_weights(model, {name: tensor for name, tensor in in_files.items() if '/' not in name}, folder)
    tensors = {name: tensor.detach() for name, tensor in own_tensors(model).items()}
    for name in in_files.keys() - tensors.keys():
        param = params[name.partition('/')[2]]
        tensors[name] = torch.zeros(()) if in_files[name].dim() == 0 else torch.zeros_like(param)
    read_shards(path, tensors)
    if bad := parallel.first_given(not_finite(tensors)):
        raise ValueError(f'{bad} holds numbers that are not finite')
    return state, {name: tensor for name, tensor in tensors.items() if '/' in name}


def checked_state(path: Path, files: list[str]) -> dict:
    """Return state.json of a checkpoint. Raises an error in DAMAGE unless it and these files match SHA256SUMS."""
    sums = dict(reversed(line.split()) for line in (path / 'SHA256SUMS').read_text().splitlines())
    for name in sums:
        if name.startswith('shard-') and not (path / name).exists():  # the other shards alone would look whole
            raise ValueError(f'{name} is missing')
    for name in ('state.json', *files):
        if sha256(path / name) != sums[name]:
            raise ValueError(f'{name} does not match its checksum')
    return json.loads((path / 'state.json').read_text())


def files_of(path: Path, name: str) -> list[str]:
    """Return the files that hold one of FILES: itself, or a shard of each process that wrote it."""
    number = FILES.index(name) + 1
    return sorted(file.name for file in path.glob(f'shard-*-{number:05d}-of-{len(FILES):05d}.safetensors')) or [name]


def tensors_in_shards(path: Path) -> dict[str, torch.Tensor]:
    """Return {name: meta tensor} of the tensors in a folder's safetensors files, sharded or not."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device='meta')
            for name, tensor in found.items()}


def read_shards(path: Path, tensors: dict) -> None:
    """Fill named tensors from a folder's safetensors files, sharded or not, whichever processes wrote them.

    Each process reads its own shard of a sharded tensor, independently of the others.
    """
    from torch.distributed import checkpoint
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*torch.distributed is disabled')
        checkpoint.load(tensors, storage_reader=checkpoint.HuggingFaceStorageReader(str(path)), no_dist=True)
