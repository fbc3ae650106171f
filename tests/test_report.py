"""The page about runs: what it says of whole and of damaged ones, that it loads nothing, that a browser draws it."""
import json
import re
import shutil
import subprocess

import pytest
from conftest import assert_sentence, run, train_tiny
from test_analysis import write_run

from analysis import report
from common.files import UserError
from common.runs import load_run, read_log

CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')


def report_of(folder, *runs, options=('--sample_tokens=0',)):
    """(what `python -m analysis.report` printed, the page without plotly's own script, the data in it)."""
    result = run('-m', 'analysis.report', *runs, f'--out={folder}/page.html', *options)
    assert result.returncode == 0, result.stderr
    page = re.sub(r'<script>/\*\*.*?</script>', '', (folder / 'page.html').read_text(), flags=re.S)
    assert len(page) < 1_000_000
    return result, page, json.loads(re.search(r'const runs = (.*);\n', page)[1])


@pytest.fixture
def two_runs(tmp_path):
    """Runs of two models; the first has evaluations, scores of a task and speeds of drafting."""
    runs = [write_run(tmp_path / 'a', [4.0, None, 2.0], settings={'max_tokens': 5e6}),
            write_run(tmp_path / 'b<!--<script>', [4.0, 3.5], 'sps', method='sps')]
    (tmp_path / 'a/log.jsonl').write_text('\n'.join(json.dumps(
        {'step': i, 'tokens': 100 * i, 'seconds': 60.0 * i, 'nll': 3.0, 'tokens_per_s': 10.0 * i, 'mfu': 0.25,
         'memory_gib': 1.5} | ({'val': 2.125, 'val_kl': 0.5, 'accuracy': 0.75} if i == 3 else {}))
        for i in range(1, 4)))
    results = [{'results': {'piqa': {'acc': acc}, 'speculative': {'speedup 1': 2.0}}, 'settings': {'limit': 7}}
               for acc in (0.1, 0.625)]
    (tmp_path / 'a/eval.jsonl').write_text('\n'.join(map(json.dumps, results)) + '\n{"results": {"cut')
    (tmp_path / 'a/speculative.csv').write_text('draft_len,speedup,tokens_per_s\n1,1.5,300.0\nauto,2.0,400.0\n')
    return runs


def test_the_page_has_what_the_runs_have(two_runs, tmp_path):
    _, page, data = report_of(tmp_path, *two_runs)
    row = re.search(r'<tr>(.*?)</tr>', page[page.index('<tbody>'):], re.S)[1]
    shown = re.sub(r'<[^>]*>', ' ', row).split()
    for text in ('a', 'standard', '300', '3.0', '2.1250', '20', '25.0%', '1.50', '200', '400', 'auto)'):
        assert text in shown, (text, shown)
    for text in ('href="a/"', 'piqa acc limit=7', '0.625', 'accuracy'):
        assert text in page, text
    assert 'speedup' not in page  # the table of the runs has it
    assert report.task_scores(read_log(two_runs[0])) == {'accuracy': 0.75}
    assert 'max_tokens' not in page  # only one of them has that setting
    assert [d['name'] for d in data] == ['a', 'b<!--<script>']
    assert data[0]['curves']['val'] == {'step': [3], 'tokens': [300], 'minutes': [3], 'y': [2.125]}
    assert data[0]['flops_per_token'] > 0 and data[0]['color'] != data[1]['color']
    assert 'b&lt;!--&lt;script&gt;' in page and 'b<!--' not in page  # it would hide the rest of the page


def test_the_page_loads_nothing(two_runs, tmp_path):
    report_of(tmp_path, *two_runs)
    whole = (tmp_path / 'page.html').read_text()
    assert "default-src 'none'" in whole and 'plotly.js v' in whole
    _, page, _ = report_of(tmp_path, *two_runs)
    assert not re.findall(r'https?:|//[a-z]|(?:src|@import|url)\s*[=(]', re.sub('(?m)^// .*', '', page))


def test_damaged_and_missing_records_are_notes(tmp_path):
    runs = [write_run(tmp_path / name, [4.0, 3.0]) for name in ('log', 'config', 'other_model', 'bad_types', 'whole')]
    (tmp_path / 'log/log.jsonl').write_bytes(b'\xff\x00{"step": 1')
    (tmp_path / 'log/speculative.csv').write_text('draft_len,speedup\n1,x\n')
    (tmp_path / 'whole/speculative.csv').write_text('draft_len,speedup\n1,1.5\n')
    (tmp_path / 'log/eval.jsonl').write_text('[]\n{"results": 1}\n{"results": {"a": {"b": null}}}\n')
    (tmp_path / 'config/config.json').write_text('{')
    record = json.loads((tmp_path / 'log/config.json').read_text())
    (tmp_path / 'other_model/config.json').write_text(json.dumps(record | {'model': 'gone'}))
    (tmp_path / 'bad_types/log.jsonl').write_text('{"step": 1, "tokens": [], "seconds": "x", "val": {}}')
    (tmp_path / 'file.txt').write_text('no run')
    result, page, data = report_of(tmp_path, *runs, tmp_path / 'file.txt', tmp_path / 'nowhere')
    assert 'left out' in result.stderr and 'file.txt' in result.stderr and 'nowhere' in result.stderr
    for text in ('log: nothing logged', 'log: no decoding speed', 'whole: no decoding speed', 'config: no settings',
                 'config.json is damaged', 'other_model: size and FLOPs unknown: unknown model',
                 'bad_types: nothing logged'):
        assert text in page, text
    assert [len(d['curves']) for d in data] == [0, 1, 1, 0, 1]
    assert_sentence(run('-m', 'analysis.report', tmp_path / 'file.txt'), 'is not a run folder')
    assert_sentence(run('-m', 'analysis.report'), 'which runs?')


def test_fifty_runs_and_long_logs_stay_small(tmp_path):
    runs = [write_run(tmp_path / f'{i}', [5.0 - step / 1000 for step in range(402)], seed=i % 5,
                      settings={'learning_rate': i // 5 / 10}) for i in range(50)]
    _, page, data = report_of(tmp_path, *runs)
    points = data[49]['curves']['val']
    assert len(points['y']) == 201 and points['step'][:2] == [0.5, 2.5] and points['y'][0] == 4.9995
    assert len({(d['color'], d['dash']) for d in data}) == 10 and '50 runs' in page


def test_a_sample_is_text_and_its_failure_a_note(tmp_path, monkeypatch):
    folder = write_run(tmp_path / 'a', [4.0])
    s = report.Settings(sample_tokens=5)
    monkeypatch.setattr(report, 'sample', lambda run, s: ('a prompt & ', f'{s.sample_tokens} tokens <of text>'))
    about = report.look_at(folder, s)
    assert '<b>a prompt &amp; </b>5 tokens &lt;of text&gt;' in report.page([about], tmp_path)

    def fails(run, s):
        raise UserError('no checkpoint')
    monkeypatch.setattr(report, 'sample', fails)
    assert report.look_at(folder, s)['notes'] == ['no sample: no checkpoint']


@pytest.mark.slow
def test_a_trained_run_shows_its_size_memory_and_sample(tmp_path, tiny_data):
    assert train_tiny(tiny_data, tmp_path / 'run', steps=2).returncode == 0
    result, page, data = report_of(tmp_path, tmp_path / 'run', options=['--sample_tokens=8'])
    assert result.stderr == '' and '<ul class="notes"></ul>' in page
    assert all(0.01 < gib < 1000 for gib in data[0]['curves']['memory_gib']['y'])
    n_params = sum(p.numel() for p in load_run(tmp_path / 'run')[0].parameters())
    assert f'data-sort="{n_params}"' in page
    prompt, text = re.search(r'<pre><b>(.+?)</b>(.+?)</pre>', page, re.S).groups()
    assert len(prompt) == 24 and 0 < len(text) <= 8 * len('&amp;')


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason='needs Chromium')
def test_a_browser_draws_the_page_and_hovering_shows_a_value(two_runs, tmp_path):
    report_of(tmp_path, *two_runs)
    hover = '''<script>
    const point = document.querySelector('.scatterlayer .point').getBoundingClientRect();
    document.querySelector('.nsewdrag').dispatchEvent(new MouseEvent('mousemove', {
        bubbles: true, clientX: point.x + point.width / 2, clientY: point.y + point.height / 2}));
    </script>'''
    path = tmp_path / 'page.html'
    path.write_text(path.read_text().replace('</body>', hover + '</body>'))
    result = subprocess.run([CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--virtual-time-budget=3000',
                             '--host-resolver-rules=MAP * ~NOTFOUND', f'--user-data-dir={tmp_path}/profile',
                             '--dump-dom', path.as_uri()], capture_output=True, text=True, timeout=120)
    dom = result.stdout
    shown = re.sub(r'<[^>]*>', ' ', dom[dom.index('class="hoverlayer"'):].partition('</g></g>')[0])
    assert '2.1250 at 300' in shown, shown
    assert dom.count('class="trace scatter') == 2 and 'modebar-btn' in dom and 'data-title="Share' not in dom


def test_parts_of_the_loss_are_no_scores_of_a_task():
    log = [{'step': 1, 'val': 2.0, 'kl': 0.1, 'val_kl': 0.2, 'accuracy': 0.5}]
    assert report.task_scores(log) == {'accuracy': 0.5}
