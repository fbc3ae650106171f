"""Systems that we cannot test on: what Windows lacks is not needed, and an Apple GPU is asked for in a sentence."""
import importlib.util
import os
import signal
import sys

import pytest
import torch
from conftest import ROOT, TINY

import sample
import train
from common.files import UserError
from common.machine import pick_device, pick_dtype

ABSENT = [(os, name) for name in ('pread', 'sysconf', 'O_DIRECTORY', 'fork', 'sched_getaffinity', 'getuid', 'openpty')]
ABSENT += [(signal, name) for name in ('SIGHUP', 'SIGKILL', 'SIGUSR1', 'alarm')]


@pytest.fixture
def as_windows(monkeypatch):
    for owner, name in ABSENT:
        monkeypatch.delattr(owner, name, raising=False)
    for name in ('fcntl', 'resource', 'termios', 'pwd', 'grp', 'pty', 'readline'):
        monkeypatch.setitem(sys.modules, name, None)


def test_every_module_imports_without_what_windows_lacks(as_windows, monkeypatch):
    rooms = [ROOT, *(ROOT / name for name in ('common', 'data', 'scans', 'analysis', 'bench'))]
    for path in sorted(path for room in rooms for path in room.glob('*.py')):
        name = f'windows_{path.parent.name}_{path.stem}'  # a second copy, beside the one that is imported already
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)


@pytest.mark.slow
def test_a_run_trains_and_samples_without_what_windows_lacks(as_windows, tiny_data, tmp_path, monkeypatch, capsys):
    threads, out = torch.get_num_threads(), str(tmp_path / 'run')
    train.main([*TINY, f'--data={tiny_data}', f'--out_dir={out}', '--max_tokens=640', '--batch_size=4'])
    sample.main([out, 'ab', '--max_new_tokens=3', '--ignore_eos', '--dtype=float32'])
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    assert 'ab' in capsys.readouterr().out


@pytest.mark.skipif(torch.backends.mps.is_available(), reason='there is an Apple GPU')
def test_an_apple_gpu_that_is_not_there_is_a_sentence():
    with pytest.raises(UserError, match='device is mps, but PyTorch sees no Apple GPU here: use --device=cpu'):
        pick_device('mps')
    assert pick_dtype('auto', 'mps') == torch.float32
