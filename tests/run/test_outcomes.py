"""Figures and tables of final results, against textbook formulas and hand-computed numbers."""
import dataclasses
import json
import math
import re
import statistics
from pathlib import Path

import pytest
from conftest import ROOT, assert_sentence, run, succeeded
from scipy.stats import t as student
from test_analysis import write_run

import train
from analysis import figures, seeds, tables, tokens_to_match
from analysis.runs import Run, curves_by_size
from lm_architectures.settings import read_config_file

SMALL = dict(n_layer=1, n_head=1, n_embd=32)
LOSSES = {'standard': (3.10, 3.13, 3.11), 'sps': (3.06, 3.07, 3.068), 'two_x_memory': (3.085, 3.083, 3.081),
          'delayed_state': (3.080, 3.082, 3.086)}


def family_run(folder, method, losses, **kwargs):
    """Write a run of one of the SPS paper's methods, by default one layer of width 32."""
    own = {'standard': {}, 'two_x_memory': {'method': 'two_x_memory', 'window': None}}.get(method, {'method': method})
    model = 'standard' if method == 'standard' else 'sps'
    settings = {'max_tokens': 100} | kwargs.pop('settings', {})
    return write_run(folder, losses, model, settings=settings, **{**SMALL, **own, **kwargs})


def drawn(folder, module, *args):
    """Draw a figure; return the rows of its CSV and the result of the script."""
    found = succeeded(run('-m', f'analysis.{module}', *args, f'--out={folder}/figure'))
    assert module == 'tables' or (folder / 'figure.png').read_bytes()[:4] == b'\x89PNG'
    return figures.read_csv(folder / 'figure.csv'), found


def write_results(folder, results, **settings):
    with open(f'{folder}/eval.jsonl', 'a') as file:
        file.write(json.dumps({'settings': settings, 'results': results}) + '\n')


# ---- seeds ----

def welch(a, b, shift=0.0):
    """Return Welch's t of mean(a) - mean(b) - shift, and its degrees of freedom."""
    u, v = (statistics.variance(x) / len(x) for x in (a, b))
    degrees = (u + v) ** 2 / (u ** 2 / (len(a) - 1) + v ** 2 / (len(b) - 1))
    return (sum(a) / len(a) - sum(b) / len(b) - shift) / math.sqrt(u + v), degrees


@pytest.mark.parametrize('a, b', [('sps', 'standard'), ('delayed_state', 'two_x_memory'), ('standard', 'sps')])
def test_seed_statistics_equal_textbook_formulas(a, b):
    a, b = LOSSES[a], (*LOSSES[b], 3.09)  # different lengths
    gap, (t, degrees) = sum(a) / 3 - sum(b) / 4, welch(a, b)
    assert seeds.lower_test(a, b) == pytest.approx(dict(gap=gap, t=t, degrees=degrees, p=student.cdf(t, degrees)))
    worse = max(welch(a, b, 0.01)[0], welch(b, a, 0.01)[0])
    assert seeds.equivalence_test(a, b, 0.01) == pytest.approx(
        dict(gap=gap, t=worse, degrees=degrees, p=student.cdf(worse, degrees)))
    half = student.ppf(0.975, 2) * statistics.stdev(a) / math.sqrt(3)
    mean = sum(a) / 3
    assert figures.mean_and_interval(a) == pytest.approx(dict(mean=mean, low=mean - half, high=mean + half))
    assert figures.mean_and_interval([2.0, 2.0], *'abc') == {'a': 2.0, 'b': None, 'c': None}


def test_seed_tests_need_several_seeds(tmp_path):
    runs = [family_run(tmp_path / f'{method}_{seed}', method, [9.0, loss], seed=seed)
            for method, losses in LOSSES.items() for seed, loss in enumerate(losses)]
    alone = family_run(tmp_path / 'alone', 'reverse_sps', [9.0, 3.0])
    asked = '--labels=standard,sps,2x,delayed,reverse', '--better=sps', '--alike=delayed;2x'
    rows, _ = drawn(tmp_path, 'seeds', *runs, alone, *asked)
    groups = {row['label']: row for row in rows}
    assert groups['sps']['seeds'] == '3' and groups['reverse']['low'] == ''
    tests = figures.read_csv(tmp_path / 'figure_tests.csv')
    assert [(row['a'], row['b']) for row in tests] == [
        ('sps', 'standard'), ('sps', '2x'), ('sps', 'delayed'), ('delayed', '2x')]
    assert float(tests[0]['p']) == seeds.lower_test(LOSSES['sps'], LOSSES['standard'])['p'] < 0.05
    assert float(tests[3]['p']) == seeds.equivalence_test(LOSSES['delayed_state'], LOSSES['two_x_memory'], 0.01)['p']
    _, found = drawn(tmp_path, 'seeds', *runs[:3])
    assert 'standard 3 3.1133' in ' '.join(found.stdout.split())
    assert_sentence(run('-m', 'analysis.seeds', *runs, alone, *asked[:1], '--better=reverse'),
                    "no test of 'reverse': labels with several seeds: standard; sps; 2x; delayed")


# ---- tokens to match ----

def length_run(folder, method, losses, max_tokens, every=100, **kwargs):
    """Write a run with batches of 100 tokens, evaluations every `every` tokens, and 10% decay."""
    settings = {'block_size': 10, 'batch_size': 10, 'max_tokens': max_tokens, 'warmup_tokens': 100,
                'decay_fraction': 0.1, **kwargs}
    log = [{'step': i * every // 100, 'tokens': i * every, 'seconds': 1.0, 'val': loss}
           for i, loss in enumerate(losses)]
    return family_run(folder, method, [], settings=settings, log=log)


def test_tokens_to_match_use_only_the_constant_rate_phase(tmp_path):
    # Standard: 2,000 tokens, decay from 1,800; then 10,000 tokens, decay from 9,000, start ignored
    short = length_run(tmp_path / 'short', 'standard', [1.0] + [5.0 - 0.1 * i for i in range(1, 19)] + [1.0, 1.0], 2000)
    constant = [1.0] * 10 + [4.0 - 0.05 * i for i in range(10, 46)]
    long = length_run(tmp_path / 'long', 'standard', constant + [0.5] * 5, 10_000, every=200, extend=short)
    sps = length_run(tmp_path / 'sps', 'sps', [1.0] + [4.5 - 0.1 * i for i in range(1, 19)] + [0.1, 0.1], 2000)
    (first, second), found = drawn(tmp_path, 'tokens_to_match', short, sps, long)
    # SPS is at 2.7 after 1,800 tokens. Standard: 3.2, then 4 - tokens / 4000: 2.7 at 5,200
    assert (first['loss_of'], first['by'], first['tokens'], first['budget']) == ('sps', 'standard', '5200', '1800')
    assert float(first['tokens_ratio']) == pytest.approx(5200 / 1800, abs=1e-12)
    # conversely: SPS first reaches 3.2 or less at 1,300
    assert (second['loss_of'], second['by'], second['tokens']) == ('standard', 'sps', '1300')
    assert '5200 2.8889' in ' '.join(found.stdout.split())
    assert drawn(tmp_path, 'tokens_to_match', sps, short, long)[0][0]['by'] == 'sps'  # the first is the baseline
    stopped = length_run(tmp_path / 'stopped', 'standard', constant[:31], 10_000, every=200, extend=short)
    assert drawn(tmp_path, 'tokens_to_match', short, sps, stopped)[0][0]['tokens'] == '5200'
    # without the long run, Standard never reaches it, whatever an unfinished second seed says
    half = length_run(tmp_path / 'half', 'standard', [1.0] * 10, 2000, seed=2)
    (first, _), _ = drawn(tmp_path, 'tokens_to_match', short, sps, half)
    assert (first['tokens'], first['searched'], first['tokens_ratio']) == ('', '1800', '')


def test_constant_runs_count_to_the_end_and_cosine_gives_a_clear_error(tmp_path):
    constant = length_run(tmp_path / 'constant', 'standard', [3.0, 2.0, 1.0], 200, schedule='constant')
    assert [p['mean'] for p in tokens_to_match.constant_rate([Run(constant)]).points] == [2.0, 1.0]
    half = length_run(tmp_path / 'half', 'standard', [3.0, 2.0], 200)
    assert_sentence(run('-m', 'analysis.tokens_to_match', half), 'was last evaluated at 100 of 200 tokens')
    cosine = length_run(tmp_path / 'cosine', 'standard', [3.0, 2.0], 2000, schedule='cosine')
    assert_sentence(run('-m', 'analysis.tokens_to_match', cosine), 'without a constant learning rate')


# ---- window sweep ----

def test_a_window_sweep_has_one_line_per_method(tmp_path):
    values = {('sps', 0): (3.2, 3.2, 3.5), ('sps', 64): (3.0, 3.1), ('sps', None): (3.15, 3.05),
              ('reverse_sps', 64): (3.3,), ('reverse_sps', 0): (4.0,)}
    runs = [family_run(tmp_path / f'{method}_{window}_{seed}', method, [9.0, loss], window=window, seed=seed)
            for (method, window), losses in values.items() for seed, loss in enumerate(losses)]
    runs.append(family_run(tmp_path / 'standard', 'standard', [9.0, 3.25]))
    rows, found = drawn(tmp_path, 'window_sweep', *runs)
    sps, reverse = 'sps, method=sps', 'sps, method=reverse_sps'
    assert [(row['label'], row['window'], round(float(row['mean']), 9), row['seeds']) for row in rows] == [
        (sps, '0', 3.3, '3'), (sps, '64', 3.05, '2'), (sps, 'all', 3.1, '2'), (reverse, '0', 4.0, '1'),
        (reverse, '64', 3.3, '1'), ('standard', 'all', 3.25, '1')]
    assert 'sps, method=sps 64 3.05' in ' '.join(found.stdout.split())


# ---- scaling ----

TASKS = dict.fromkeys(('arc_easy', 'hellaswag', 'piqa', 'sciq'), 'acc_norm') | {'lambada_openai': 'acc'}


def evaluated(folder, *scores, **settings):
    """Write accuracies of the paper's tasks to eval.jsonl, one evaluation per task."""
    for (task, metric), score in zip(TASKS.items(), scores):
        write_results(folder, {task: {metric: score, 'other': 0.9}}, **settings)
    return folder


def test_scaling_is_the_mean_difference_at_each_size(tmp_path):
    runs = []
    for width, losses in ((32, (3.0, 2.9)), (64, (2.5, 2.45))):
        for method, loss, scores in zip(('standard', 'sps'), losses, ((.5, .4, .3, .2, .1), (.52, .4, .36, .2, .2))):
            folder = family_run(tmp_path / f'{method}_{width}', method, [9.0, loss], n_embd=width)
            runs.append(evaluated(folder, *(score * width / 64 for score in scores)))
    other_seed = family_run(tmp_path / 'seed', 'sps', [9.0, 2.8], n_embd=32, seed=1)
    runs += [evaluated(other_seed, .1, .2, .3, .4, .5), family_run(tmp_path / 'lonely', 'sps', [9.0, 2.0], n_embd=128)]
    (small, large), found = drawn(tmp_path, 'scaling', *runs)
    mean_of_seeds = ((.52 + .4 + .36 + .2 + .2) / 5 / 2 + .3) / 2
    assert float(small['accuracy_gain']) == pytest.approx(100 * (mean_of_seeds - 0.15), abs=1e-9)
    assert float(large['accuracy_gain']) == pytest.approx(100 * 0.18 / 5, abs=1e-9)
    assert float(small['loss_difference']) == pytest.approx(-0.15)
    assert float(large['loss_difference']) == pytest.approx(-0.05)
    assert 'parameters are sps: expected standard, the baseline, and others' in found.stderr  # `lonely` is alone
    (tmp_path / 'standard_32/log.jsonl').unlink()
    (only,), found = drawn(tmp_path, 'scaling', *runs)
    assert only == large and 'expected standard, the baseline, and others' in found.stderr


def test_labels_and_baseline_are_the_same_at_all_sizes(tmp_path):
    losses = {('standard', 32): 3.0, ('sps', 32): 2.9, ('two_x_memory', 32): 2.8,
              ('sps', 64): 2.4, ('standard', 64): 2.5}
    runs = [Run(family_run(tmp_path / f'{method}_{width}', method, [9.0, loss], n_embd=width, settings={
        'learning_rate': 0.1 / width})) for (method, width), loss in losses.items()]
    for run_, code in zip(runs, 'aaabb'):  # edited between the sizes
        (Path(run_.folder) / 'code').mkdir()
        (Path(run_.folder) / 'code/model_x.py').write_text(f'{code} = 1')
    small, large = curves_by_size(runs, lambda own: own[0].final_loss()).values()
    assert list(small.items()) == [('standard', 3.0), ('sps, method=sps', 2.9), ('sps, method=two_x_memory', 2.8)]
    assert list(large.items()) == [('standard', 2.5), ('sps, method=sps', 2.4)]


# ---- tables ----

def paper_run(folder, method='sps', **values):
    """Write a run with the SPS paper's recipe at scale S."""
    settings = {'max_tokens': 20_000_000_000, 'batch_size': 96, 'block_size': 4096, **values.pop('settings', {})}
    record = {'step': 50863, 'tokens': 20_000_145_408, 'seconds': 7200.0, 'val': 2.75, 'tokens_per_s': 2e6,
              'memory_gib': 70.5}
    return family_run(folder, method, [], settings=settings, versions={'device': 'cuda:0', 'processes': 8},
                      log=[record], **dict(n_layer=12, n_head=12, n_embd=768) | values)


@pytest.mark.parametrize('paper, config, name', [
    ('sps', 'standard_xl', 'Standard XL'), ('sps', 'sps/two_x_memory_m', '2x Memory M'),
    ('gpn', 'gpn/gpn_130m', 'GPN+M, 1 layer'), ('gpn', 'gpn/gpn_2l', 'GPN+M, 2 layers'),
    ('gpn', 'gpn/gpn_nomem', 'GPN, no memory'), ('gpn', 'gpn/gpn_transformer', 'Transformer++'),
    ('gpn', 'gpn/gdn_130m', 'Gated DeltaNet'), ('nextlat', 'nextlat/fineweb_ntp', 'GPT'),
    ('nextlat', 'nextlat/fineweb_jtp_d4', 'JTP (d = 4)'), ('nextlat', 'nextlat/fineweb_nextlat_d2', 'NextLat (d = 2)')])
def test_configs_match_the_papers_rows(tmp_path, paper, config, name):
    values = read_config_file(f'{ROOT}/config/{config}.py')
    names = {field.name for field in dataclasses.fields(train.Settings)}
    settings = dataclasses.asdict(train.Settings()) | {key: values[key] for key in names & values.keys()}
    of_model = {key: values[key] for key in values.keys() - names} | {'n_ids': settings['assumed_ids'], 'eos_id': None}
    own = Run(write_run(tmp_path / 'run', [3.0], settings['model'], settings=settings, **of_model))
    row = tables.row_of_paper(own, figures.read_csv(tables.PAPERS / f'{paper}.csv'))
    assert row['name'] == name
    sizes = tables.state_size(own)
    for column in sizes if row.get('memory cells') else ():
        number, unit = re.fullmatch(r'([\d.]+)([KM]?)', row[column]).groups()
        scale = {'': 1, 'K': 1e3, 'M': 1e6}[unit]
        assert abs(sizes[column] - float(number) * scale) <= scale * (0.01 if '.' in number else 1)


def test_a_paper_run_is_followed_by_the_papers_row(tmp_path):
    whole = paper_run(tmp_path / 'sps')
    other = [paper_run(tmp_path / name, **values) for name, values in (
        ('longer', {'settings': {'max_tokens': 20_000_100_000}}), ('token', {'predict_input': 'token'}),
        ('window', {'window': 0}))]
    rows = figures.read_csv(tables.PAPERS / 'sps.csv')
    assert tables.row_of_paper(Run(whole), rows)['name'] == 'SPS S'
    assert [tables.row_of_paper(Run(folder), rows) for folder in other] == [None] * 3
    write_results(whole, {'wikitext': {'nats_per_word': 3.25}, 'c4': {'nats_per_word': 4.25}}, data_dir='files')
    write_results(whole, {name: {'nats_per_word': 4.5} for name in ('books3', 'govreport')})
    write_results(whole, {'sciq': {'acc_norm': 0.5}, 'piqa': {'acc_norm': 0.25}}, limit=7)
    write_results(whole, {'piqa': {'acc_norm': 0.625}})
    rates = [{'scale': 's', 'what': what, 'sps': ratio, 'sps_window_0': 9.0}
             for what, ratio in (('throughput, end to end', 0.94), ('throughput, prefill', 0.6), ('memory, held', 1.01),
                                 ('memory, peak', 5.0))]
    assert [tables.inference_of(Run(folder), rates) for folder in other] == [
        dict(zip(tables.INFERENCE, (0.94, 0.6, 1.01))), {}, dict.fromkeys(tables.INFERENCE, 9.0)]
    (tmp_path / 'inference.json').write_text(json.dumps({'rows': rates}))
    (ours, paper), _ = drawn(tmp_path, 'tables', whole, f'--inference={tmp_path}/inference.json')
    assert paper['run'] == 'paper: SPS S' and paper['corpus NLL'] == '3.913' and ours['validation loss'] == '2.75'
    assert float(ours['corpus NLL']) == pytest.approx((3.25 + 4.25 + 4.5 + 4.5) / 4)
    assert ours['task accuracy, %'] == '' and float(ours['piqa acc_norm, %']) == 62.5 and ours['sciq acc_norm, %'] == ''
    assert [ours[column] for column in tables.INFERENCE] == ['0.94', '0.6', '1.01']
    assert float(ours['GPU-hours']) == 16 and float(ours['training GiB']) == 70.5
    flops = Run(whole).flops_per_token
    assert float(ours['training FLOPs']) == pytest.approx(20_000_145_408 * flops)
    lines = (tmp_path / 'figure.md').read_text().splitlines()
    assert len({line.count('|') for line in lines}) == 1 and '| 2.810 | 3.913 | 51.8 |' in lines[3]


def test_a_table_takes_runs_of_any_model(tmp_path):
    runs = [write_run(tmp_path / 'gpn', [4.0, 3.0], 'gpn', settings={'max_tokens': 100}, n_embd=16, n_head=1, d_k=4,
                      d_v=4, d_emb=8),
            family_run(tmp_path / 'standard', 'standard', [4.0, 3.5])]
    imported = family_run(tmp_path / 'imported', 'standard', [], n_embd=48)
    (tmp_path / 'imported/log.jsonl').unlink()
    write_results(imported, {'piqa': {'acc_norm': 0.5}})
    by_run = {row['run']: row for row in drawn(tmp_path, 'tables', *runs, imported)[0]}
    assert by_run['gpn']['validation loss'] == '3.0' and len(by_run) == 3
    (row, *_), _ = drawn(tmp_path, 'tables', *runs, '--paper=gpn')
    assert float(row['validation perplexity']) == pytest.approx(math.exp(3))
