"""Every benchmark can be imported, and those that run without a GPU do so at toy size."""
import importlib

import pytest
from conftest import ROOT, run

pytestmark = pytest.mark.slow

MODULES = sorted(path.stem for path in (ROOT / 'bench').glob('[a-z]*.py'))
TOYS = [name for name in MODULES if '--toy' in (ROOT / f'bench/{name}.py').read_text()]


@pytest.mark.parametrize('name', MODULES)
def test_every_benchmark_can_be_imported(name):
    assert importlib.import_module(f'bench.{name}').__doc__


@pytest.mark.parametrize('args', [*([name] for name in TOYS), ['train_step', 'objectives']], ids=' '.join)
def test_a_benchmark_runs_at_toy_size_and_writes_nothing(args):
    if args[0] == 'evaluation':
        pytest.importorskip('accelerate')
    results = ROOT / 'bench/results'
    before = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    result = run('-m', f'bench.{args[0]}', *args[1:], '--toy')
    assert result.returncode == 0 and result.stdout.strip(), result.stderr
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == before


def test_no_two_files_of_results_have_one_content():
    named = {}
    for path in (ROOT / 'bench/results').iterdir():
        named.setdefault(path.read_bytes(), []).append(path.name)
    assert [names for names in named.values() if len(names) > 1] == []
