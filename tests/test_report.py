"""The page about runs: what it says, that it loads nothing."""
import json
import re

import pytest
from conftest import assert_sentence, run, succeeded
from test_analysis import write_run

from analysis import report
from analysis.figures import flops_per_token

SMALL = dict(n_layer=1, n_head=1, n_embd=32)


def report_of(folder, *runs):
    """(what `python -m analysis.report` printed, the page without scripts, its whole text)."""
    result = succeeded(run('-m', 'analysis.report', *runs, f'--out={folder}/page.html'))
    whole = (folder / 'page.html').read_text()
    return result, re.sub(r'<script.*?</script>', '', whole, flags=re.S), whole


@pytest.fixture
def two_runs(tmp_path):
    """Runs of two models; the first has evaluations and scores of a task."""
    log = [{'step': i, 'tokens': 100 * i, 'seconds': 60.0 * i, 'nll': 3.0, 'tokens_per_s': 10.0 * i, 'mfu': 0.25,
            'memory_gib': 1.5} | ({'val': 2.125, 'val_kl': 0.5, 'accuracy': 0.75} if i == 3 else {})
           for i in range(1, 4)]
    runs = [write_run(tmp_path / 'a', [], settings={'max_tokens': 5e6}, log=log, **SMALL),
            write_run(tmp_path / 'b<!--<script>', [4.0, 3.5], 'sps', method='sps', **SMALL)]
    results = [{'results': {'piqa': {'acc': acc}, 'speculative': {'speedup 1': 2.0}}, 'settings': {'limit': 7}}
               for acc in (0.1, 0.625)]
    (tmp_path / 'a/eval.jsonl').write_text('\n'.join(map(json.dumps, results)))
    return runs


def test_the_page_has_what_the_runs_have_and_loads_nothing(two_runs, tmp_path):
    _, page, whole = report_of(tmp_path, *two_runs)
    row = re.findall(r'<tr>(.*?)</tr>', page, re.S)[1]
    shown = re.sub(r'<[^>]*>', ' ', row).split()
    for text in ('a', 'standard', '300', '3.0', '2.1250', '20', '25.0%', '1.50'):
        assert text in shown, (text, shown)
    for text in ('href="a/"', 'piqa acc limit=7', '0.625', 'accuracy', '0.75'):
        assert text in page, text
    assert 'speedup' not in page and 'val_kl' not in page  # speculative.csv has it; a part of the loss is no score
    assert 'b&lt;!--&lt;script&gt;' in page and 'b<!--' not in page
    # it loads nothing
    assert "default-src 'none'" in whole and 'plotly.js v' in whole and len(whole) < 8_000_000
    assert not re.findall(r'https?:|(?:src|@import|url)\s*[=(]', page) and not re.findall(r'<script[^>]*src', whole)


def test_curves_are_drawn_over_tokens_flops_time_and_steps(two_runs):
    found = {folder: report.read(folder) for folder in two_runs}
    figure = report.curves(found, dict(zip(two_runs, ('standard', 'sps'))))
    first, second = [trace for trace in figure.data if trace.visible]
    assert (first.x, first.y, second.y) == ((300,), (2.125,), (4.0, 3.5)) and first.line.color != second.line.color
    value, axis, _ = figure.layout.updatemenus
    assert [button.label for button in value.buttons][:2] == ['validation loss, nats per token',
                                                              'training loss, nats per token']
    assert [list(button.args[0]['x'][0]) for button in axis.buttons] == [
        [300], [300 * flops_per_token(two_runs[0])], [3], [3]]


def test_long_logs_stay_small():
    log = [{'step': i, 'tokens': 10 * i, 'seconds': 60.0 * i, 'val': 5.0 - i / 1000} for i in range(402)]
    tokens, _, _, steps, values = report.points(log, 'val', None)
    assert len(values) == 134 and steps[:2] == [1, 4] and values[0] == pytest.approx(4.999) and tokens[1] == 40


def test_runs_that_cannot_be_read_are_left_out_and_named(tmp_path):
    runs = [write_run(tmp_path / name, losses, **SMALL) for name, losses in (('whole', [4.0, 3.0]), ('empty', []))]
    (tmp_path / 'file.txt').write_text('no run')
    result, page, _ = report_of(tmp_path, *runs, tmp_path / 'file.txt', tmp_path / 'nowhere')
    for name in ('empty', 'file.txt', 'nowhere'):
        assert name in result.stderr and name not in page
    assert 'There is one run.' in page and '3.0000' in page
    assert_sentence(run('-m', 'analysis.report', tmp_path / 'file.txt'), 'is not a run folder')
    assert_sentence(run('-m', 'analysis.report'), 'which runs?')
