"""Checkpoints of a run folder.

    ckpt/step_00000100/     model.safetensors, optimizer.safetensors, state.json, SHA256SUMS; with --parallel=fsdp each
                            process writes a file of its parts of either (`file_number`)

One is written under another name, and gets its own by one rename when it is whole. One that is damaged is named, and
the one before it is read.
"""
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import parallel
from common.files import UserError, say_once, sha256, sync_folder, write_json

FILES = ('model.safetensors', 'optimizer.safetensors')  # of a checkpoint
DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)  # what reading a damaged one may raise


# ---- weights ----

def own_tensors(model: torch.nn.Module) -> dict:
    """The tensors of a model that a checkpoint has, by name: parameters, then persistent buffers."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def check_weights(model: torch.nn.Module, tensors: dict, source) -> None:
    """Raises UserError unless the tensors have the model's names and shapes. Buffers may be missing."""
    own, params = own_tensors(model), dict(model.named_parameters())
    for name in (*params, *tensors):
        if name not in own or name not in tensors:
            owner = 'model' if name in own else 'checkpoint'
            raise UserError(f'{source} does not fit this model: {name} is only in the {owner}')
        have, want = tuple(tensors[name].shape), tuple(own[name].shape)
        if have != want:
            raise UserError(f'{source} does not fit this model: {name} has shape {have}, the model needs {want}')


def load_weights(model: torch.nn.Module, tensors: dict, source) -> None:
    """Copies named tensors into the model's parameters and buffers; UserError unless they fit."""
    check_weights(model, tensors, source)
    own = own_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


# ---- training ----

def save_training(folder, model: torch.nn.Module, optimizer, step: int, seconds: float, keep: int,
                  always: int | None = None) -> Future | None:
    """A checkpoint from which training goes on exactly. The newest `keep` stay, and that of step `always`.

    Random streams need no state: they are functions of seed and step. A sharded model is saved by all its processes
    together, while training goes on: wait for the Future's result before the next checkpoint and before the end.
    """
    tensors, state = training_tensors(model, optimizer), {'step': step, 'seconds': seconds}
    if parallel.is_sharded(model):
        return save_parts(folder, step, tensors, state, keep, always)
    files = {name: {} for name in FILES}
    for key, tensor in tensors.items():
        files[FILES[file_number(key) - 1]][key] = tensor
    save_checkpoint(folder, step, files, state, keep, always)


class Saver:
    """Saves the checkpoints of a run. The checkpoints of a sharded model are written while training continues.

    Leaving its context waits until the last one is written.
    """

    def __init__(self, folder, model: torch.nn.Module, optimizer, keep: int, always: int | None):
        """keep, always: see `save_training`."""
        self.folder, self.model, self.optimizer, self.keep, self.always = folder, model, optimizer, keep, always
        self.written = None  # Future of the last checkpoint

    def save(self, step: int, seconds: float) -> None:
        """Save a checkpoint, after the one before is written."""
        self.wait()
        if parallel.rank() == 0 or parallel.is_sharded(self.model):
            self.written = save_training(self.folder, self.model, self.optimizer, step, seconds, self.keep, self.always)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if that is known by now."""
        if self.written and self.written.done():
            self.wait()

    def wait(self) -> None:
        written, self.written = self.written, None
        if written:
            written.result()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.wait()


def training_tensors(model: torch.nn.Module, optimizer) -> dict:
    """The tensors of a checkpoint by name: the model's, and the optimizer's as 'exp_avg/<parameter>' and the like."""
    names = {p: name for name, p in model.named_parameters()}
    moments = {f'{key}/{names[p]}': value for p, state in optimizer.state.items() for key, value in state.items()}
    return own_tensors(model) | moments


def file_number(key: str) -> int:
    """In which of FILES a tensor of this name is, from 1; those of processes end with '<number>-of-00002'."""
    return 2 if '/' in key else 1


def restore_training(folder, model: torch.nn.Module, optimizer, up_to: int | None = None) -> tuple[int, float]:
    """Loads the newest whole checkpoint, of the step up_to at most. Returns (step, seconds).

    (0, 0.0) if the run was stopped before its first. Any number of processes may have written it, and may load it. All
    processes of a sharded model must call this together; each reads its own parts.
    """
    if not checkpoints(folder):
        return 0, 0.0
    if parallel.is_sharded(model):
        state, moments = load_parts(folder, model, up_to)
    else:
        state, files = load_checkpoint(folder, up_to=up_to)
        load_weights(model, files['model.safetensors'], folder)
        moments = files['optimizer.safetensors']
    params = dict(model.named_parameters())
    for name, value in moments.items():
        key, _, param = name.partition('/')
        check_moment(name, params, folder)
        optimizer.state[params[param]][key] = value.to(params[param].device)
    return state['step'], state['seconds']


def check_moment(name: str, params: dict, folder) -> None:
    """Raises UserError unless an optimizer's tensor of this name belongs to one of the parameters."""
    if name.partition('/')[2] not in params:
        raise UserError(f'optimizer.safetensors of {folder} does not fit this model: it has a tensor {name!r}')


def save_checkpoint(folder, step: int, tensor_files: dict, state: dict, keep: int = 2,
                    always: int | None = None) -> None:
    """Writes ckpt/step_<step> of a run folder, all or nothing, then removes older checkpoints.

    The newest `keep` stay, and the one of the step `always`.

    tensor_files {file name: {tensor name: tensor}}, state a dict for state.json. The files go to a temporary folder,
    reach the disk (fsync), and get their final name by one rename. Raises UserError with nothing changed when the disk
    is full or a number is not finite.
    """
    for tensors in tensor_files.values():
        refuse_not_finite(folder, step, not_finite(tensors))
    temporary = begin_checkpoint(folder, step)
    with friendly_writes(folder, step):
        write_json(temporary / 'state.json', state)
        mode = (temporary / 'state.json').stat().st_mode
        for name, tensors in tensor_files.items():
            save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, temporary / name)
            (temporary / name).chmod(mode)  # safetensors lets nobody else read
        publish_checkpoint(folder, step)
    remove_older(folder, step, keep, always)


def save_parts(folder, step: int, tensors: dict, state: dict, keep: int, always: int | None) -> Future:
    """`save_checkpoint` of tensors of which each process has parts. All processes call it; it ends behind training.

    The tensors are copied before it returns. A UserError, by the Future or at once, comes to all processes, but one in
    the first process's last steps (checksums, the rename) to the first alone.
    """
    is_first = parallel.rank() == 0
    refuse_not_finite(folder, step, parallel.first_given(not_finite(tensors)))
    error = None
    temporary = checkpoint_paths(folder, step)[1]
    if is_first:
        try:
            with friendly_writes(folder, step):
                begin_checkpoint(folder, step)
                write_json(temporary / 'state.json', state)
        except UserError as caught:
            error = str(caught)
    if error := parallel.first_given(error):  # before anybody writes
        raise UserError(error)
    written = parallel.write_parts(temporary, tensors, {key: file_number(key) for key in tensors})

    def finish():
        with friendly_writes(folder, step):
            parallel.wait_for(written)
            if is_first:
                publish_checkpoint(folder, step)
        if is_first:
            remove_older(folder, step, keep, always)
    thread = ThreadPoolExecutor(1)
    finished = thread.submit(finish)
    thread.shutdown(wait=False)
    return finished


def checkpoint_paths(folder, step: int) -> tuple[Path, Path]:
    """Where the checkpoint of a step is, and where it is written."""
    ckpt = Path(folder) / 'ckpt'
    return ckpt / f'step_{step:08d}', ckpt / f'.writing_{step:08d}'


def refuse_not_finite(folder, step: int, bad: str | None) -> None:
    """Raises UserError if there is a tensor, `bad`, with numbers that are not finite."""
    if bad:
        raise UserError(f'after step {step}, {bad} holds numbers that are not finite, so '
                        f'{checkpoint_paths(folder, step)[0]} is not written. {last_good(folder)}')


def begin_checkpoint(folder, step: int) -> Path:
    """An empty temporary folder for a checkpoint's files; what a kill left in another is removed."""
    for left_by_a_kill in (Path(folder) / 'ckpt').glob('.writing_*'):
        shutil.rmtree(left_by_a_kill)
    temporary = checkpoint_paths(folder, step)[1]
    temporary.mkdir(parents=True)
    return temporary


@contextmanager
def friendly_writes(folder, step: int) -> Iterator[None]:
    """A failure to write a checkpoint is a UserError, and leaves nothing of it."""
    final, temporary = checkpoint_paths(folder, step)
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f'{final} could not be written: {error}. Earlier checkpoints are whole: make room, then go on '
                        'with --resume')


def publish_checkpoint(folder, step: int) -> None:
    """Gives a temporary folder whose files are written its checksums, and then its name, by one rename."""
    final, temporary = checkpoint_paths(folder, step)
    names = sorted(path.name for path in temporary.iterdir())
    (temporary / 'SHA256SUMS').write_text(''.join(f'{sha256(temporary / name)}  {name}\n' for name in names))
    for path in temporary.iterdir():
        with open(path, 'rb') as file:
            os.fsync(file.fileno())
    sync_folder(temporary)
    if final.exists():  # only a damaged one that a resumed run fell back from
        shutil.rmtree(final)
    os.replace(temporary, final)
    sync_folder(final.parent)


def remove_older(folder, step: int, keep: int, always: int | None) -> None:
    """Removes all checkpoints but the newest `keep`, that of `step` first, and the one of the step `always`."""
    newest_first = checkpoints(folder)
    n_damaged = newest_first.index(checkpoint_paths(folder, step)[0])  # of higher steps: this run fell back from them
    others = [path for path in newest_first[n_damaged:] if step_of(path) != always]
    for old in newest_first[:n_damaged] + others[keep:]:
        shutil.rmtree(old)


def checkpoints(folder) -> list[Path]:
    """The checkpoint folders of a run, newest first."""
    found = [path for path in (Path(folder) / 'ckpt').glob('step_*') if re.fullmatch(r'step_\d{8,}', path.name)]
    return sorted(filter(Path.is_dir, found), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix('step_'))


def last_good(folder) -> str:
    """A sentence that names the newest checkpoint of a run that diverged, and what to do with it."""
    newest = next(iter(checkpoints(folder)), None)
    if newest is None:
        return 'There is no checkpoint from before: start again with a lower learning_rate or more warmup_tokens'
    return (f'The last good checkpoint is {newest}: start another run with a lower learning_rate or more '
            f'warmup_tokens, from its weights with --init_from={folder} or from the beginning')


def not_finite(tensors: dict) -> str | None:
    """The name of a tensor that holds a NaN or an infinity, or None. Of a sharded one, in this process's part."""
    parts = {name: parallel.own_part(t) for name, t in tensors.items() if t.is_floating_point()}
    # One such number makes the sum another, which is ten times as fast to see. A sum may also be too large itself.
    return next((name for name, t in parts.items() if not t.sum().isfinite() and not t.isfinite().all()), None)


def load_checkpoint(folder, names=FILES, up_to: int | None = None) -> tuple[dict, dict]:
    """The newest whole checkpoint of a run folder: (state, {file name: {tensor name: tensor}}).

    With up_to, the newest up to that step. Each file is checked against SHA256SUMS and for numbers that are not finite;
    a bad checkpoint is named on stderr and the one before it is taken. Only JSON and safetensors are read, neither of
    which can run code. One that several processes wrote in parts is put together, and looks like any other.
    """
    for path in candidates(folder, up_to):
        try:
            on_disk = {name: files_of(path, name) for name in names}
            check_sums(path, ['state.json', *(file for files in on_disk.values() for file in files)])
            state = json.loads((path / 'state.json').read_text())
            files = {name: read_tensors(path, name, on_disk[name]) for name in names}
            for name, tensors in files.items():
                if bad := not_finite(tensors):
                    raise ValueError(f'{bad} in {name} holds numbers that are not finite')
            return state, files
        except DAMAGE as error:
            say_once(f'checkpoint {path} is damaged ({error}); the one before it is tried')
    raise no_checkpoint(folder, up_to)


def load_parts(folder, model: torch.nn.Module, up_to: int | None) -> tuple[dict, dict]:
    """`load_checkpoint` for a sharded model: (state, the optimizer's tensors). The weights are loaded into the model.

    All processes call it together: each compares a share of the files with their checksums, and reads its own parts. If
    one finds damage, all take the checkpoint before.
    """
    for path in candidates(folder, up_to):
        error, state, moments = None, {}, {}
        try:
            files = [file for name in FILES for file in files_of(path, name)]
            check_sums(path, ['state.json', *files[parallel.rank()::parallel.world()]])
            state = json.loads((path / 'state.json').read_text())
        except DAMAGE as caught:
            error = str(caught) or type(caught).__name__
        error = parallel.first_given(error)
        if not error:
            weights, moments = parts_to_fill(path, model, folder)
            parallel.read_parts(path, weights | moments)
            bad = parallel.first_given(not_finite(weights | moments))
            error = f'{bad} holds numbers that are not finite' if bad else None
        if not error:
            return state, moments
        say_once(f'checkpoint {path} is damaged ({error}); the one before it is tried')
    raise no_checkpoint(folder, up_to)


def parts_to_fill(path: Path, model: torch.nn.Module, folder) -> tuple[dict, dict]:
    """The tensors of a checkpoint, for this process's parts to be filled: (the model's, new ones of the optimizer).

    Raises UserError unless they fit the model.
    """
    in_files, params = parallel.tensors_in_files(path), dict(model.named_parameters())
    in_model = {name: tensor for name, tensor in in_files.items() if file_number(name) == 1}
    check_weights(model, in_model, folder)
    moments = {}
    for name in in_files.keys() - in_model.keys():
        check_moment(name, params, folder)
        param = params[name.partition('/')[2]]
        moments[name] = torch.zeros(()) if in_files[name].dim() == 0 else torch.zeros_like(param)
    own = own_tensors(model)
    return {name: own[name].detach() for name in in_model}, moments


def candidates(folder, up_to: int | None) -> list[Path]:
    """The checkpoints to try, newest first: all, or up to a step."""
    return [path for path in checkpoints(folder) if up_to is None or step_of(path) <= up_to]


def no_checkpoint(folder, up_to: int | None) -> UserError:
    return UserError(f'{folder} has no {"whole " if candidates(folder, up_to) else ""}checkpoint to load')


def files_of(path: Path, name: str) -> list[str]:
    """The files that hold what one of FILES does: itself, or one of each process that wrote a part of it."""
    if (path / name).exists():
        return [name]
    number = FILES.index(name) + 1
    return sorted(file.name for file in path.glob(f'shard-*-{number:05d}-of-{len(FILES):05d}.safetensors')) or [name]


def check_sums(path: Path, names: list[str]) -> None:
    """Raises ValueError unless these files of a checkpoint are as they were written, and OSError if one is gone."""
    sums = dict(reversed(line.split()) for line in (path / 'SHA256SUMS').read_text().splitlines())
    parts = {file.name for file in path.glob('shard-*')}
    if missing := {name for name in sums if name.startswith('shard-')} - parts:
        raise ValueError(f'{min(missing)} is missing')  # the others alone would look whole
    for name in names:
        if sha256(path / name) != sums[name]:
            raise ValueError(f'{name} does not match its checksum')


def read_tensors(path: Path, name: str, files: list[str]) -> dict:
    """The whole tensors of one of FILES by name, from the files that hold them."""
    if files == [name]:
        return load_file(path / name)
    number = FILES.index(name) + 1
    tensors = {key: torch.empty_like(tensor, device='cpu') for key, tensor in parallel.tensors_in_files(path).items()
               if file_number(key) == number}
    parallel.read_parts(path, tensors)
    return tensors
