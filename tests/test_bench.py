"""Every benchmark can be imported, and those that run without a GPU do so at toy size."""
import importlib.util
import json
import re
import time

import pytest
import torch
from conftest import ROOT, assert_sentence, run

import bench
from bench import gpu

pytestmark = pytest.mark.slow

RESULTS = ROOT / 'bench/results'
MODULES = sorted(path.stem for path in (ROOT / 'bench').glob('[a-z]*.py'))
TOYS = [name for name in MODULES if name != 'gpu' and '--toy' in (ROOT / f'bench/{name}.py').read_text()]


@pytest.mark.parametrize('name', MODULES)
def test_every_benchmark_can_be_imported(name):
    assert importlib.import_module(f'bench.{name}').__doc__


@pytest.fixture
def results_stay():
    """No file of bench/results is written."""
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    yield
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before


@pytest.mark.parametrize('args', [
    *([name] for name in TOYS), ['train_step', 'objectives'], ['train_step', 'scales'],
    pytest.param(['train_step', 'nanogpt'], marks=pytest.mark.long)], ids=' '.join)
def test_a_benchmark_runs_at_toy_size_and_writes_nothing(args, results_stay):
    if args[0] == 'evaluation':
        pytest.importorskip('accelerate')
    result = run('-m', f'bench.{args[0]}', *args[1:], '--toy')
    assert result.returncode == 0 and result.stdout.strip(), result.stderr


@pytest.mark.parametrize('name', TOYS)
def test_a_mistyped_argument_is_a_sentence_and_nothing_is_measured(name, results_stay):
    result = run('-m', f'bench.{name}', '--toy', '--typo')
    assert_sentence(result, 'typo')
    assert not result.stdout


def test_a_benchmark_makes_one_measurement_at_a_time():
    known = '--toy', 'nanogpt', 'scales'
    assert bench.options(['--toy', 'scales'], *known) == {'--toy', 'scales'}
    with pytest.raises(SystemExit, match='too many measurements: nanogpt, scales: expected one of nanogpt, scales'):
        bench.options(['scales', 'nanogpt'], *known)


def test_where_and_when_is_one_line():
    about = {'device': 'a CPU', 'date': '2026-01-02', 'commit': 'abc', 'versions': {'python': '3.12', 'torch': '2.9'}}
    assert bench.one_line(about) == 'a CPU; 2026-01-02; commit abc; python 3.12, torch 2.9'


def test_every_benchmark_has_files_of_its_own():
    names = [name for path in (ROOT / 'bench').glob('*.py')
             for name in set(re.findall(r"write_results\('(\w+)'", path.read_text()))]
    assert sorted(names) == sorted(set(names))


def test_no_two_files_of_results_have_one_content():
    named = {}
    for path in RESULTS.rglob('*.*'):
        named.setdefault(path.read_bytes(), []).append(path.name)
    assert [names for names in named.values() if len(names) > 1] == []


def test_a_step_on_a_gpu_ends_with_its_own_processes_and_its_output_is_kept(tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    start = time.perf_counter()
    with open(tmp_path / 'log', 'ab+', buffering=0) as log:
        assert gpu.run_step(['-c', f"print('begun'); {child}"], 2, log)[1] == 'out of time'
        assert time.perf_counter() - start < 30, 'it waited for what its step had started'
        assert gpu.run_step(['-c', 'print(1); raise SystemExit(3)'], 60, log) == ('1\n', 'exit status 3')
        assert gpu.run_step(['-c', 'print(2)'], 60, log) == ('2\n', 'done')
        _, status = gpu.run_step(['-c', "print('its equations run step by step')"], 60, log)
    assert status == "fell back: 'run step by step'"
    text = (tmp_path / 'log').read_text()
    assert text.startswith('begun\n') and text.endswith('\n1\n2\nits equations run step by step\n')


@pytest.mark.parametrize('argument', ['--only=kernels,atention', '--limits=3'])
def test_a_wrong_argument_for_the_gpu_is_a_sentence(argument, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    with pytest.raises(SystemExit, match="gpu.py: unknown '(atention|limits)': expected --limit=SECONDS"):
        gpu.main([argument])


def test_the_steps_on_a_gpu_are_files_and_modules_that_there_are():
    for first, *rest in gpu.STEPS.values():
        assert importlib.util.find_spec(rest[0]) if first == '-m' else (ROOT / first).exists(), first


def test_rows_of_a_benchmark_that_is_stopped_are_kept(tmp_path, monkeypatch):
    def rows():
        yield {'a': 1}
        raise KeyboardInterrupt
    monkeypatch.setattr(bench, 'RESULTS', tmp_path)
    with pytest.raises(KeyboardInterrupt):
        bench.write_results('x', rows())
    kept, = tmp_path.iterdir()
    assert kept.name.endswith('.partial.json') and json.loads(kept.read_text())['rows'] == [{'a': 1}]


def test_gpu_py_says_what_it_did_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    for argv, sentence in ((['--limit=5'], 'not run: --only=kernels,compiled'), (['--help'], "unknown 'help'")):
        with pytest.raises(SystemExit, match=sentence):
            gpu.main([*argv, f'--out={tmp_path}'])
