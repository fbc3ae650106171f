"""Every measurement runs at a small size, and sides that compute the same have the same loss."""
import csv
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_sentence, run, succeeded

import model_standard
from bench import reporting, speed, timing
from lm_architectures.files import UserError
from lm_architectures.run.models import count_parameters
from papers.context_ready import generation
from papers.sps import inference

RESULTS = ROOT / 'bench/results'
SMALL = '--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --micro_batch_size=2'
FAST = '--rounds=1', '--memory=False'
TOKENS = '--prompt=8', '--new=4'
PROGRAMS = ['papers.sps.inference', '--scales=xs', '--batch=2', *TOKENS], ['papers.context_ready.generation'], [
    'bench.speed', 'save', f'ours: {SMALL}', f'SPS: --model=sps {SMALL}', '--rounds=1'], *(
    ['bench.speed', kind, *(f'{side} {SMALL}' for side in sides), *TOKENS, *FAST]
    for kind in ('train', 'decode') for sides in (
        ['ours: --mask_documents=False', 'Llama: hf --mask_documents=False', 'SPS: config/sps_s.py'],
        ['NextLat: config/nextlat_small.py', 'MTP: config/nextlat_small.py --model=mtp', 'BST: --model=bst',
         'Context-Ready: config/context_ready_small.py', 'GPN: config/gpn_small.py', 'GDN: config/gdn_small.py']))


@pytest.mark.slow
@pytest.mark.parametrize('args', PROGRAMS, ids=' '.join)
def test_measurements_run_without_writing_results(args, monkeypatch):
    monkeypatch.setattr(inference, 'METHODS', {name: f'{text} {SMALL}' for name, text in inference.METHODS.items()})
    monkeypatch.setattr(inference, 'isolated', lambda memory, *args: {  # nothing may be held at this size
        what: n + 1 for what, n in memory(*args).items()})
    monkeypatch.setattr(generation, 'PAIRS', [({'n_layer': 1, 'n_embd': 32}, {'n_layer': 2, 'n_embd': 32, 'K': 1})])
    monkeypatch.setattr(generation, 'NEW', 2)
    monkeypatch.setattr(generation, 'LENGTHS', [100])
    mistyped = run('-m', *args, '--typo')
    assert_sentence(mistyped, 'typo')
    assert not mistyped.stdout
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    result = succeeded(run('-m', *args))
    assert result.stdout.count('\n') >= max(2, sum(': ' in arg for arg in args))
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before


@pytest.mark.slow
def test_sides_that_compute_the_same_have_the_same_loss():
    same = f'--mask_documents=False --data=absent/data --dtype=float32 {SMALL}'
    sides = f'ours: {same}', f'Llama: hf {same}'
    printed = succeeded(run('-m', 'bench.speed', 'train', *sides, *FAST)).stdout
    ours, theirs = map(float, re.findall(r'  loss (\S+)', printed))
    assert abs(ours - theirs) < 2e-4


@pytest.mark.slow
def test_peak_memory_of_a_training_step_holds_weights_gradients_and_moments():
    text = '--data=absent/data --dtype=float32 --n_layer=1 --n_head=2 --n_embd=256 --block_size=16 --micro_batch_size=1'
    peak = timing.isolated(speed.peak_memory, 'train', text, speed.Settings())
    n_parameters = count_parameters(speed.make_model(text)[0])
    assert 16 * n_parameters < peak < 32 * n_parameters  # and pages that malloc keeps


@pytest.mark.parametrize('args, parts', [
    ([], ['"NAME: ARGUMENTS OF train.py"']),
    (['train', 'config/sps_s.py'], ['a name of its own', 'got train config/sps_s.py']),
    (['train', 'a: config/sps_s.py', 'a: config/sps_m.py'], ['a name of its own']),
    (['decode', f'a: hf config/sps_s.py {SMALL}', '--memory=False'], ['hf is a Llama']),
    (['decode', 'a: --threads=2', '--memory=False'], ['OMP_NUM_THREADS']),
    (['decode', 'a: --n_layers=2'], ["unknown setting 'n_layers'"])], ids=str)
def test_wrong_sides_get_a_sentence(args, parts):
    assert_sentence(run('-m', 'bench.speed', *args), *parts)


def test_an_interrupted_measurement_keeps_its_rows(tmp_path, monkeypatch):
    def rows(s):
        yield {'a': 1}
        raise KeyboardInterrupt
    monkeypatch.setattr(reporting, 'RESULTS', tmp_path)
    with pytest.raises(KeyboardInterrupt):
        reporting.report(['--out=x'], reporting.Settings, rows)
    kept, = map(Path, tmp_path.iterdir())
    found = json.loads(kept.read_text())
    assert kept.name.endswith('.partial.json') and found['rows'] == [{'a': 1}]
    assert found['command'].startswith('python ') and found['commit'] and 'torch' in found['versions']
    kept.rename(str(kept).replace('.partial', ''))
    with pytest.raises(UserError, match='already exists: choose another --out'):  # what pages cite is not overwritten
        reporting.report(['--out=x'], reporting.Settings, rows)


def test_memory_ratios_of_table_2_are_those_of_fp32_weights_and_a_bf16_cache():
    for row in csv.DictReader(open(ROOT / 'papers/sps/paper.csv')):
        shape = {name: int(row[name]) for name in ('n_layer', 'n_embd')}
        with torch.device('meta'):
            model = model_standard.Model(model_standard.Config(n_head=1, **shape))
        weights, keys = count_parameters(model), 16 * 4096 * 2 * shape['n_layer'] * shape['n_embd']
        streams = 2 if row['method'] == 'two_x_memory' else 1
        assert abs((4 * weights + 2 * streams * keys) / (4 * weights + 2 * keys) - float(row['peak memory'])) < 0.03
