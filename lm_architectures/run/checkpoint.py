"""The checkpoints of a run: ckpt/step_<step> with weights, the optimizer's state, and checksums.

All processes call these functions. Rank 0 writes the tensors whole, so a checkpoint has the same
files however many processes write it, and any number can read it. The files are written to a
temporary folder, which gets its name when all are on disk: a name stands for a whole checkpoint.
"""
import copy
import json
import os
import re
import shutil
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lm_architectures.files import UserError, is_number, open_in_run, remove, sha256, sync, warn_once, write_json
from lm_architectures.machine import parallel

FILES = ('model.safetensors', 'optimizer.safetensors')  # the second: tensors with '/' in their name


# ---- training ----

def save_training(s, model: torch.nn.Module, optimizer, step: int, seconds: float, thread: Executor) -> Future | None:
    """Save a checkpoint from which training continues exactly, then remove older ones.

    Random state is not saved: it is a function of seed and step. See `save_checkpoint`.
    """
    names, tensors = {p: name for name, p in model.named_parameters()}, checkpoint_tensors(model)
    rest = {}  # {parameter or group: {key: what is no tensor}}
    for owner, values in optimizer_parts(optimizer).items():
        name = names.get(owner, owner)
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f'{key}/{name}'] = value
            else:
                rest.setdefault(name, {})[key] = copy.copy(value)  # it may be a list
    state = {'step': step, 'seconds': seconds, 'optimizer': rest}
    writing = save_checkpoint(s.out_dir, step, tensors, state, thread)
    if writing:
        thread.submit(remove_older, s.out_dir, step, s.keep_checkpoints, s.last_before_decay)
    return writing


def check_save(writing: Future | None, wait: bool) -> None:
    """Raise the error of a save on all processes, if it has ended. wait: until it ends."""
    has_ended = writing and (wait or writing.done())
    if error := parallel.first_not_none(writing.exception() if has_ended else None):
        raise error


def made_with(group: dict) -> dict:
    """Return an optimizer's group as it was made. The first call, before any step, keeps it."""
    return group.setdefault('made_with', copy.deepcopy({key: group[key] for key in group if key != 'params'}))


def optimizer_parts(optimizer) -> dict:
    """Return {parameter: its state} and {'group 0': what the optimizer changed in that group}."""
    parts = dict(optimizer.state)
    for i, group in enumerate(optimizer.param_groups):  # Schedule-Free, for example, counts its steps there
        before = made_with(group)
        values = {key: group[key] for key in group if key not in ('params', 'made_with', 'lr')}
        parts[f'group {i}'] = {key: value for key, value in values.items()
                               if isinstance(value, torch.Tensor) or value != before.get(key)}
    return parts


# ---- weights ----

def checkpoint_tensors(model: torch.nn.Module) -> dict:
    """Return {name: tensor} of a model's checkpoint: parameters, then persistent buffers."""
    persistent = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in persistent}


def first_nonfinite(tensors: dict) -> str | None:
    """Return the name of a tensor with a NaN or an infinity in this process's shard, else None."""
    parts = {name: t.to_local() if hasattr(t, 'to_local') else t for name, t in tensors.items()
             if t.is_floating_point()}
    # A sum is ten times faster than isfinite on all elements, but it may overflow.
    return next((name for name, t in parts.items() if not t.sum().isfinite() and not t.isfinite().all()), None)


# ---- the checkpoints of a folder ----

def checkpoints(folder, up_to: int | None = None) -> list[Path]:
    """Return the checkpoint folders of a run up to step `up_to`, newest first."""
    found = [path for path in Path(folder).glob('ckpt/step_*')
             if re.fullmatch(r'step_\d{8,}', path.name) and path.is_dir()]
    return sorted((p for p in found if up_to is None or step_of(p) <= up_to), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix('step_'))


def remove_older(folder, step: int, keep: int, always: int | None) -> None:
    """Keep the newest `keep` checkpoints up to `step` and that of step `always`. Delete the others.

    Checkpoints after `step` are damaged: this run resumed from an earlier one. A folder that cannot
    be deleted now (on NFS, while another machine reads it) is left to the next save.
    """
    kept = [path for path in checkpoints(folder, step) if step_of(path) != always][:keep]
    for path in checkpoints(folder):
        if path not in kept and step_of(path) != always:
            shutil.rmtree(path, ignore_errors=True)


def recovery_advice(folder) -> str:
    """Return advice for a run that diverged, with the name of its newest checkpoint."""
    newest = next(iter(checkpoints(folder)), None)
    return (f'The last good checkpoint is {newest or "none"}: start a new run with a lower learning_rate or more '
            'warmup_tokens' + (f', from scratch or from these weights with --init_from={folder}' if newest else ''))


# ---- writing one ----

def save_checkpoint(folder, step: int, tensors: dict, state: dict, thread: Executor | None = None) -> Future | None:
    """Write ckpt/step_<step> of a run folder. UserError if a tensor is not finite.

    tensors: weights, and the optimizer's, which have a '/' in their name. state: a dict for
    state.json. thread: writes a copy of them while training continues, and rank 0 returns its
    future. None: this process, which is the only one, writes them now.
    """
    if bad := parallel.first_not_none(first_nonfinite(tensors)):
        raise UserError(f'{bad} contains NaN or infinity after step {step}, so no checkpoint was written. '
                        + recovery_advice(folder))
    whole = {}
    for name, tensor in tensors.items():  # one at a time: rank 0 gathers the shards
        full = parallel.full_tensor(tensor.detach())
        if parallel.rank() == 0:
            whole[name] = full.to('cpu', copy=thread is not None)
    if not thread:
        write_checkpoint(folder, step, whole, state)
    elif parallel.rank() == 0:
        return thread.submit(write_checkpoint, folder, step, whole, state)


def write_checkpoint(folder, step: int, tensors: dict, state: dict) -> None:
    """Write a checkpoint atomically, and a line in the log. UserError if the disk is full."""
    ckpt, log = Path(folder) / 'ckpt', Path(folder) / 'log.jsonl'
    temporary, final = ckpt / '.writing', ckpt / f'step_{step:08d}'
    try:
        if log.exists():  # not for a model that was imported
            sync(log)  # it is never behind the checkpoint
        ckpt.mkdir(exist_ok=True)  # not the run folder, which may have been moved
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        temporary.mkdir()
        write_json(temporary / 'state.json', state)
        for i, name in enumerate(FILES):
            save_file({key: t.contiguous() for key, t in tensors.items() if ('/' in key) == i}, temporary / name)
        names = ('state.json', *FILES)
        (temporary / 'SHA256SUMS').write_text(''.join(f'{sha256(temporary / name)}  {name}\n' for name in names))
        mode = (temporary / 'state.json').stat().st_mode
        for path in temporary.iterdir():
            with suppress(OSError):  # some file systems have no modes
                path.chmod(mode)  # safetensors creates files that only their owner can read
            sync(path)
        sync(temporary)
        remove(final)  # a damaged checkpoint that the resumed run skipped
        os.replace(temporary, final)
        sync(ckpt)
        if log.exists():
            with open_in_run(log, 'a') as lines:
                lines.write(json.dumps({'saved': step}) + '\n')
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f'the checkpoint of step {step} could not be written to {ckpt} ({error}). Earlier checkpoints '
                        'are intact: free some disk space, or find the folder if it was moved, then continue with '
                        '--resume')


# ---- reading one ----

def load_checkpoint(folder, moments: bool = False, up_to: int | None = None) -> tuple[dict, dict]:
    """Load the newest undamaged checkpoint of a run folder: (state, {name: whole tensor}).

    Warns about damaged ones. Reads only JSON and safetensors, which cannot run code. moments: also
    the optimizer's tensors. The tensors are mapped from the files.
    """
    for path in checkpoints(folder, up_to):
        names, error = ('state.json', *FILES[:1 + moments]), None
        try:
            sums = dict(reversed(line.split()) for line in (path / 'SHA256SUMS').read_text().splitlines())
            if bad := [name for name in names if sha256(path / name) != sums[name]]:
                raise ValueError(f'{bad[0]} does not match its checksum')
            state = {'seconds': 0.0, 'optimizer': {}} | json.loads((path / 'state.json').read_text())
            types = type(state['step']), is_number(state['seconds']), type(state['optimizer'])
            if types != (int, True, dict) or state['step'] != step_of(path):
                raise ValueError(f'state.json is {state}')
            tensors = {key: tensor for name in names[1:] for key, tensor in load_file(path / name).items()}
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as caught:
            error = str(caught)
        error = parallel.first_not_none(error)  # all processes take the same checkpoint
        if error is None:
            return state, tensors
        warn_once(f'checkpoint {path} is damaged ({error}); trying the previous one')
    before = '' if up_to is None else f' from before its decay, which begins after step {up_to}: train a new run'
    raise UserError(f'{folder} has no {"undamaged " if checkpoints(folder, up_to) else ""}checkpoint to load{before}')
