"""The HTML report: its contents, and that it is self-contained."""
import json
import re

import pytest
from conftest import run, succeeded
from test_analysis import write_run

from analysis import report
from analysis.figures import flops_per_token

SMALL = dict(n_layer=1, n_head=1, n_embd=32)


@pytest.fixture
def two_runs(tmp_path):
    """Write runs of two models; the first has evaluations and task scores."""
    log = [{'step': i, 'tokens': 100 * i, 'seconds': 60.0 * i, 'nll': 3.0, 'tokens_per_s': 10.0 * i, 'mfu': 0.25,
            'memory_gib': 1.5} | ({'val': 2.125, 'val_kl': 0.5, 'accuracy': 0.75} if i == 3 else {})
           for i in range(1, 4)]
    runs = [write_run(tmp_path / 'a', [], settings={'max_tokens': 5e6}, log=log, **SMALL),
            write_run(tmp_path / 'b<!--<script>', [4.0, 3.5], 'sps', method='sps', **SMALL)]
    results = [{'results': {'piqa': {'acc': acc}, 'speculative': {'speedup 1': 2.0}}, 'settings': {'limit': 7}}
               for acc in (0.1, 0.625)]
    (tmp_path / 'a/eval.jsonl').write_text('\n'.join(map(json.dumps, results)))
    return runs


def test_the_page_shows_the_runs_and_loads_nothing(two_runs, tmp_path):
    succeeded(run('-m', 'analysis.report', *two_runs, f'--out={tmp_path}/page.html'))
    whole = (tmp_path / 'page.html').read_text()
    page = re.sub(r'<script.*?</script>', '', whole, flags=re.S)
    shown = re.sub(r'<[^>]*>', ' ', page).split()
    for text in ('standard', '300', '3.0', '2.1250', '20', '25.0%', '1.50', '0.625', 'accuracy', '0.75'):
        assert text in shown, (text, shown)
    assert 'piqa acc limit=7' in page and 'speedup' not in page  # that is in speculative.csv
    assert 'b&lt;!--&lt;script&gt;' in page and 'b<!--' not in page
    # self-contained
    assert "default-src 'none'" in whole and 'plotly.js v' in whole and len(whole) < 8_000_000
    assert not re.findall(r'https?:|(?:src|@import|url)\s*[=(]', page) and not re.findall(r'<script[^>]*src', whole)


def test_curves_are_drawn_over_tokens_flops_time_and_steps(two_runs):
    found = {folder: report.read(folder) for folder in two_runs}
    rows = report.points(found, dict(zip(two_runs, ('standard', 'sps'))))
    val = [row for row in rows if row['what'] == 'validation loss, nats']
    assert [[row[axis] for axis in (*report.AXES, 'value')] for row in val[:1]] == [
        [300, 300 * flops_per_token(two_runs[0]), 3, 3, 2.125]]
    figure = report.curves(rows, 'training steps')
    drawn = {(trace.name, tuple(trace.x), tuple(trace.y)): trace.line.color for trace in figure.data}
    first, second = drawn['standard', (3,), (2.125,)], drawn['sps', (0, 1), (4.0, 3.5)]
    assert first != second and 'validation loss, nats' in [title.text for title in figure.layout.annotations]
    log = [{'step': i, 'tokens': 10 * i, 'seconds': 60.0 * i, 'val': 5.0 - i / 1000} for i in range(402)]
    assert len(report.points({'a': {'log': log, 'flops': None}}, {'a': 'a'})) == 81
