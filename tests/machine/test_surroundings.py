"""Scripts elsewhere than on a plain terminal: notebooks, threads, odd streams and environments."""
import io
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import TINY, assert_sentence, train_tiny

import train
from lm_architectures.files import friendly_errors
from lm_architectures.machine import devices, terminal
from lm_architectures.run import run_settings
from lm_architectures.settings import load_settings
from lm_architectures.start import quiet_start

# ---- notebooks, threads, streams ----

def test_scripts_start_in_a_notebook(monkeypatch):
    """Jupyter's streams have no `reconfigure`, and its backend may be missing in `!python`."""
    monkeypatch.setattr(sys, 'stdout', io.StringIO())
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    monkeypatch.setenv('MPLBACKEND', 'module://matplotlib_inline.backend_inline')
    monkeypatch.delitem(sys.modules, 'IPython', raising=False)  # another test may have imported it
    quiet_start()
    assert os.environ['MPLBACKEND'] == 'agg'
    terminal.make_progress()('step 1')
    terminal.say('step 2')
    assert sys.stdout.getvalue() == 'step 1\nstep 2\n'


@pytest.mark.slow
def test_a_reader_of_the_output_may_exit():
    script = f'{sys.executable} -u train.py --help | head -1'
    found = subprocess.run(['bash', '-c', script], capture_output=True, text=True)
    assert found.stdout == 'Train a language model.\n' and found.stderr == ''


@pytest.mark.slow
def test_a_run_needs_no_open_streams(tiny_data, tmp_path):
    """As with >&-. Every script calls `quiet_start` first."""
    args = shlex.join([*TINY, f'--data={tiny_data}', f'--out_dir={tmp_path}/run', '--max_tokens=256'])
    assert subprocess.run(f'{sys.executable} train.py {args} <&- >&- 2>&-', shell=True).returncode == 0
    assert (tmp_path / 'run/loss.png').exists()


def test_training_in_a_thread_leaves_signals_alone():
    def catch():
        with terminal.catch_signals() as stop:
            return stop
    with ThreadPoolExecutor() as pool:
        assert pool.submit(catch).result() == []


@pytest.mark.parametrize('name, flops', [
    ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H200', 989e12), ('A100-SXM4-40GB', 312e12),
    ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', None), ('NVIDIA GeForce RTX 4090 Laptop GPU', None),
    ('NVIDIA GeForce RTX 4090 D', None), ('NVIDIA GeForce RTX 3090 Ti', None)])
def test_only_gpus_of_exactly_a_known_name_have_an_mfu(name, flops, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: name)
    assert devices.Machine(0, 1, torch.device('cuda'), torch.bfloat16).peak_flops() == flops


# ---- environment ----

@pytest.mark.slow
def test_a_missing_compiler_is_named(tiny_data, tmp_path):
    env = {**os.environ, 'CXX': 'no-such-compiler', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path / 'cache')}
    result = train_tiny(tiny_data, tmp_path / 'run', '--compile=True', '--device=cpu', env=env)
    assert_sentence(result, 'need a C++ compiler', 'no-such-compiler')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('error', [  # of Triton without a C compiler, and without Python.h
    RuntimeError('Failed to find C compiler. Please specify via CC environment variable'),
    subprocess.CalledProcessError(1, ['/usr/bin/gcc', 'cuda_utils.c'])])
def test_errors_of_triton_become_a_sentence(error):
    with pytest.raises(SystemExit, match=r'Triton need a C\+\+ compiler and the headers'), friendly_errors(None):
        raise error


@pytest.mark.parametrize('threads, local_world, omp, quota, expected', [
    (None, 1, None, None, 8), (None, 1, '3', None, None), (5, 1, '3', None, 5), (None, 1, 'abc', '250 100', 3),
    (None, 1, None, 'max 100', 8), (None, 2, None, '50 100', 1), (None, 2, None, None, 4), (None, 2, '1', None, 4),
    (None, 2, '4,2', None, None), (5, 2, '1', None, 5), (None, 99, None, None, 1)])
def test_threads_follow_the_setting_or_omp_or_cores_and_quota(monkeypatch, tmp_path, threads, local_world, omp, quota,
                                                              expected):
    """PyTorch's default is 8 here. An expected value of None leaves OMP_NUM_THREADS to it."""
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    if omp is not None:
        monkeypatch.setenv('OMP_NUM_THREADS', omp)
    if quota is not None:
        (tmp_path / 'cpu.max').write_text(quota)
    monkeypatch.setattr(devices, 'QUOTA', tmp_path / 'cpu.max')
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: range(8), raising=False)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 8)
    chosen = []
    monkeypatch.setattr(torch, 'set_num_threads', chosen.append)
    devices.set_threads(threads, local_world)
    assert chosen == ([] if expected is None else [expected])


@pytest.mark.slow
def test_a_home_folder_is_expanded_on_the_command_line(monkeypatch, tmp_path, tiny_run):
    monkeypatch.setenv('HOME', str(tmp_path))
    s, positional, _ = load_settings(train.Settings, ['--out_dir=~/x', '--data=a~/b', '~/config.py'])
    assert (s.out_dir, s.data, positional) == (f'{tmp_path}/x', 'a~/b', ['~/config.py'])
    shutil.copytree(tiny_run, tmp_path / 'x')
    assert run_settings.read_settings(train.Settings, ['--resume', '--out_dir=~/x'])[0].out_dir == f'{tmp_path}/x'
