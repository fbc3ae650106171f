"""Every benchmark runs at toy size; bench/gpu.py stops its steps in time and logs them."""
import contextlib
import fcntl
import importlib.util
import json
import re
import sys
import time

import pytest
import torch
from conftest import ROOT, assert_sentence, run

import bench
import model_standard
from analysis import figures
from bench import gpu
from lm_architectures.run.models import count_parameters

pytestmark = pytest.mark.slow

RESULTS = ROOT / 'bench/results'
TOYS = re.findall(r'python -m bench\.(\w+)', bench.__doc__)


@pytest.mark.parametrize('args', [
    *([name] for name in TOYS if name != 'gpu'), ['train_step', 'objectives'], ['profile', 'l']], ids=' '.join)
def test_benchmarks_run_at_toy_size_without_writing_results(args):
    mistyped = run('-m', f'bench.{args[0]}', *args[1:], '--toy', '--typo')
    assert_sentence(mistyped, 'typo')
    assert not mistyped.stdout
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    result = run('-m', f'bench.{args[0]}', *args[1:], '--toy')
    assert result.returncode == 0 and result.stdout.strip(), result.stderr
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before


def test_memory_ratios_of_table_2_are_those_of_fp32_weights_and_a_bf16_cache():
    for row in figures.read_csv(ROOT / 'analysis/papers/sps.csv'):
        shape = {name: int(row[name]) for name in ('n_layer', 'n_embd')}
        with torch.device('meta'):
            model = model_standard.Model(model_standard.Config(n_head=1, **shape))
        weights, keys = count_parameters(model), 16 * 4096 * 2 * shape['n_layer'] * shape['n_embd']
        streams = 2 if row['method'] == 'two_x_memory' else 1
        assert abs((4 * weights + 2 * streams * keys) / (4 * weights + 2 * keys) - float(row['peak memory'])) < 0.03


def test_an_interrupted_benchmark_keeps_its_rows(tmp_path, monkeypatch):
    def rows():
        yield {'a': 1}
        raise KeyboardInterrupt
    monkeypatch.setattr(bench, 'RESULTS', tmp_path)
    with pytest.raises(KeyboardInterrupt):
        bench.write_results('x', rows())
    kept, = tmp_path.iterdir()
    found = json.loads(kept.read_text())
    assert kept.name.endswith('.partial.json') and found['rows'] == [{'a': 1}]
    assert found['command'].startswith('python -m bench.') and found['commit']


# ---- bench/gpu.py ----

LOCKED = ("import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
          "print('locked', flush=True); time.sleep(600)")  # holds a lock until it ends


def test_a_gpu_step_ends_all_its_processes_and_logs_their_output(tmp_path):
    command = [sys.executable, '-c', LOCKED, str(tmp_path / 'lock')]
    start_it = f"import subprocess; print(subprocess.Popen({command}, stdout=subprocess.PIPE).stdout.readline())"
    with open(tmp_path / 'log', 'ab+', buffering=0) as log:
        assert gpu.run_step(['-c', start_it], 300, log) == ("b'locked\\n'\n", 'done')
        assert gpu.run_step(['-c', 'import time; time.sleep(600)'], 1, log)[1] == 'out of time'
        assert gpu.run_step(['-c', 'print(1); raise SystemExit(3)'], 300, log) == ('1\n', 'exit status 3')
        _, status = gpu.run_step(['-c', "print('its equations run step by step')"], 300, log)
    assert status == "fell back: 'run step by step'"
    text = (tmp_path / 'log').read_text()
    assert text.startswith("b'locked") and text.endswith('\n1\nits equations run step by step\n')
    with open(tmp_path / 'lock', 'w') as lock:
        for _ in range(100):  # a killed process closes its files with a delay
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.1)
    raise AssertionError('a process started by the step is still running')


def test_gpu_steps_exist_and_fit_in_two_calls():
    for _, (first, *rest) in gpu.STEPS.values():
        assert importlib.util.find_spec(rest[0]) if first == '-m' else (ROOT / first).exists(), first
    assert sum(seconds for seconds, _ in gpu.STEPS.values()) <= 2 * gpu.LIMIT < 1200
