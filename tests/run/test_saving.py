"""Checkpoints are written while training continues, one at a time."""
import concurrent.futures
import copy
import errno
import threading
import time

import pytest
import torch
from conftest import assert_sentence, losses, run, succeeded, train_tiny
from safetensors.torch import load_file

import train
from lm_architectures.run import checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def hook(monkeypatch):
    """Return a function that replaces module.name by new(original, *arguments)."""
    def replace(module, name, new):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: new(original, *args))
    return replace


def test_training_continues_during_a_save_and_the_next_save_waits(tiny_data, tiny_run, tmp_path, hook):
    """Here, a save takes until the step of the next one. It saves what was at its own step."""
    next_save, done, events = {5: 10, 10: 15, 15: 18, 18: 20, 20: 20}, [threading.Event() for _ in range(21)], []
    wanted = {}

    def train_step(original, model, ddp, optimizer, data, s, step, *rest):
        result = original(model, ddp, optimizer, data, s, step, *rest)
        for name, p in model.named_parameters():
            values = {name: p.detach(), f'exp_avg/{name}': optimizer.state[p]['exp_avg']}
            wanted.setdefault(step + 1, {}).update(copy.deepcopy(values))
        done[step + 1].set()
        return result

    def write(original, folder, step, *rest):
        assert done[next_save[step]].wait(60)
        original(folder, step, *rest)
        events.append(f'written {step}')

    def first_nonfinite(original, tensors):
        events.append('copy')
        return original(tensors)
    hook(train, 'train_step', train_step)
    hook(checkpoint, 'write_checkpoint', write)
    hook(checkpoint, 'first_nonfinite', first_nonfinite)
    succeeded(train_tiny(tiny_data, tmp_path))
    assert events == [event for step in next_save for event in ('copy', f'written {step}')]
    assert losses(tmp_path) == losses(tiny_run)
    for path in checkpoint.checkpoints(tmp_path):
        found = {name: t for file in checkpoint.FILES for name, t in load_file(path / file).items()}
        assert all(torch.equal(found[name], want) for name, want in wanted[checkpoint.step_of(path)].items()), path


def test_a_full_disk_stops_the_run_at_the_next_logged_step(tiny_data, tiny_run, tmp_path, hook, monkeypatch):
    saves = {}  # {step: future}

    def save_training(original, *args):
        saves[args[3]] = None
        saves[args[3]] = original(*args)
        return saves[args[3]]

    def train_step(original, *args):
        if args[5] == 10:
            concurrent.futures.wait([saves[10]])
        return original(*args)

    def save_file(original, *args):
        if 10 in saves:
            raise OSError(errno.ENOSPC, 'No space left on device')
        original(*args)
    hook(checkpoint, 'save_training', save_training)
    hook(train, 'train_step', train_step)
    hook(checkpoint, 'save_file', save_file)
    result = train_tiny(tiny_data, tmp_path)
    assert_sentence(result, 'checkpoint of step 10 could not be written', 'No space left', '--resume')
    assert result.stderr.count('could not be written') == 1 and max(losses(tmp_path)) == 11
    assert [path.name for path in (tmp_path / 'ckpt').iterdir()] == ['step_00000005']
    monkeypatch.undo()
    assert 'from step 5' in succeeded(run('train.py', f'--out_dir={tmp_path}', '--resume')).stdout
    assert losses(tmp_path) == losses(tiny_run)


@pytest.mark.parametrize('kind', ['diverged', 'bug'])
def test_an_error_of_training_leaves_the_checkpoint_whole_that_is_being_written(tiny_data, tmp_path, hook, kind):
    """And the advice for a run that diverged names it."""
    reached = threading.Event()

    def train_step(original, *args):
        if args[5] == 7:
            reached.set()
            if kind == 'bug':
                raise ZeroDivisionError
            args[-1][2] = 3  # steps in a row with a gradient that is not finite
        return original(*args)

    def write(original, *args):
        assert reached.wait(60)
        time.sleep(0.2)  # until training has failed
        original(*args)
    hook(train, 'train_step', train_step)
    hook(checkpoint, 'write_checkpoint', write)
    if kind == 'bug':
        with pytest.raises(ZeroDivisionError):
            train_tiny(tiny_data, tmp_path)
    else:
        assert_sentence(train_tiny(tiny_data, tmp_path), 'last good checkpoint is', 'step_00000005')
    assert checkpoint.load_checkpoint(tmp_path, moments=True)[0]['step'] == 5
