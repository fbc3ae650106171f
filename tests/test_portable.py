"""Systems that we cannot test on: what Windows lacks is not needed, and an Apple GPU is asked for in a sentence."""
import os
import signal
import sys

import pytest
import torch
from conftest import TINY, run_apart

import sample
import train
from common.files import UserError
from common.machine import pick_device, pick_dtype

ABSENT = [(os, name) for name in ('pread', 'sysconf', 'O_DIRECTORY', 'fork', 'sched_getaffinity', 'getuid', 'openpty')]
ABSENT += [(signal, name) for name in ('SIGHUP', 'SIGKILL', 'SIGUSR1', 'alarm')]
ABSENT_MODULES = ('fcntl', 'resource', 'termios', 'pwd', 'grp', 'pty', 'readline')


@pytest.fixture
def as_windows(monkeypatch):
    for owner, name in ABSENT:
        monkeypatch.delattr(owner, name, raising=False)
    for name in ABSENT_MODULES:
        monkeypatch.setitem(sys.modules, name, None)


IMPORTS = f'''
import importlib, pathlib, os, signal, sys
sys.path.insert(0, os.getcwd())
for owner, name in {[(owner.__name__, name) for owner, name in ABSENT]!r}:
    vars(sys.modules[owner]).pop(name, None)
for name in {ABSENT_MODULES!r}:
    sys.modules[name] = None
for path in pathlib.Path().glob('*.py'):
    importlib.import_module(path.stem)
for room in ('common', 'data', 'scans', 'analysis', 'bench'):
    for path in pathlib.Path(room).glob('[a-z]*.py'):
        if path.stem != 'lm_eval_adapter':  # lm_eval is optional
            importlib.import_module(f'{{room}}.{{path.stem}}')
'''


@pytest.mark.slow
def test_every_module_imports_without_what_windows_lacks():
    result = run_apart('-c', IMPORTS)
    assert result.returncode == 0, result.stderr


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
