"""One page about runs, to open in a browser: it holds all it needs, and loads nothing from anywhere.

    python -m analysis.report out/* --out=report.html

The page has a table of the runs (parameters, tokens, validation loss, speed, MFU, memory, and decoding speed where
`analysis.speculative` measured it), everything they logged as curves over tokens, FLOPs, time and steps, the settings
in which they differ, their scores (of eval.jsonl and of synthetic tasks), a sample of each, and links to the folders.
A run that is damaged or not complete is there with what it has, and with a note that says what it has not.

`look_at` reads a run, the functions after it make the parts of the page, and report.html beside this file is its frame.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import csv
import datetime
import html
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from analysis.figures import is_number, line_styles, output_path
from analysis.loss_curves import (
    MINUTES,
    differences,
    group,
    model_name,
    not_comparable,
    runs_to_read,
    short_number,
    unit_for,
)
from common.decoding import generate
from common.files import UserError, first_line, friendly_errors, write_file
from common.machine import make_progress, pick_device
from common.runs import blank_run, count_parameters, load_run, read_log, read_run, run_data
from common.settings import check_ranges
from data.tokenizers import load_tokenizer

FRAME = Path(__file__).with_name('report.html')
CSS_BORDERS = {'solid': 'solid', 'dash': 'dashed', 'dot': 'dotted', 'dashdot': 'double'}  # of plotly's dashes
MAX_POINTS = 400  # of a curve; where more was logged, a point is the mean of neighbours
ALWAYS_LOGGED = {'step', 'tokens', 'seconds', 'val', 'loss', 'nll', 'grad_norm', 'lr', 'tokens_per_s', 'mfu',
                 'memory_gib', 'skipped'}


@dataclass
class Settings:
    out: str | None = None  # the page; None: report.html beside the runs
    sample_tokens: int = 100  # of the text that each run writes; 0: no text, and no weights are read
    device: str = 'auto'  # for the samples: auto (cuda where there is one), cuda or cpu

    def __post_init__(self):
        check_ranges(self, sample_tokens=(0, math.inf))


# ---- what a run folder holds ----

def look_at(run: str, s: Settings) -> dict:
    """What the page tells of a run: 'log', 'results' (of evaluations), 'decoding', 'notes', and where they can be had
    'model' (or its method), 'parameters', 'flops_per_token' and 'sample' (prompt, text)."""
    about = {'run': run, 'log': [], 'results': {}, 'decoding': None, 'notes': []}
    noted = note_taker(about['notes'])
    with noted('no log'):
        about['log'] = [r for r in read_log(run) if all(is_number(r.get(key)) for key in ('step', 'tokens', 'seconds'))]
    if not about['log']:
        about['notes'].append('nothing logged')
    with noted('no evaluations'):
        about['results'] = evaluations(Path(run) / 'eval.jsonl')
    with noted('no decoding speed'):
        about['decoding'] = decoding(Path(run) / 'speculative.csv')
    with noted('no settings'):
        record = read_run(run)
        about['model'] = model_name(record)
        with noted('size and FLOPs unknown'):
            model = blank_run(run)
            about['parameters'] = count_parameters(model)
            if hasattr(model, 'flops_per_token'):
                about['flops_per_token'] = model.flops_per_token(record['settings']['block_size'])
        if s.sample_tokens:
            with noted('no sample'):
                about['sample'] = sample(run, s)
    return about


def note_taker(notes: list[str]) -> Callable:
    """noted(what): a block in which an error, of a damaged file or of a model file that was edited, becomes a note."""
    @contextmanager
    def noted(what: str) -> Iterator[None]:
        try:
            yield
        except (UserError, OSError) as error:
            notes.append(f'{what}: {error}')
        except Exception as error:
            notes.append(f'{what}: {type(error).__name__}: {first_line(error)}')
    return noted


def evaluations(path: Path) -> dict[str, float]:
    """{'task metric': value} of eval.jsonl, the latest where there are several. Lines that are damaged are left out.

    What was asked for besides stands after the metric, and the step where training had not ended.
    """
    found = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            settings = record.get('settings', {})
            asked = ('data', 'val_tokens', 'limit', 'bos', 'max_length')  # None unless they were
            limits = [f'{key}={settings[key]}' for key in asked if settings.get(key) is not None]
            if record.get('of_steps') and record['step'] < record['of_steps']:
                limits.append(f'step={record["step"]}')
            for task, metrics in record['results'].items():
                if task != 'speculative':  # a table of its own, speculative.csv
                    names = {f'{" ".join([task, metric, *limits])}': value for metric, value in metrics.items()}
                    found |= {name: value for name, value in names.items() if is_number(value)}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def decoding(path: Path) -> dict | None:
    """'draft_len', 'speedup', 'tokens_per_s' and 'plain', tokens/s without drafts, of the draft length in
    speculative.csv that decoded fastest; or None."""
    if not path.exists():
        return None
    with open(path, newline='') as file:
        rows = [{'draft_len': row['draft_len'], 'speedup': float(row['speedup']),
                 'tokens_per_s': float(row['tokens_per_s'])} for row in csv.DictReader(file)]
    best = max(rows, key=lambda row: row['speedup'], default=None)
    return best and {**best, 'plain': best['tokens_per_s'] / best['speedup']}


def sample(run: str, s: Settings) -> tuple[str, str]:
    """(prompt, what the run writes after it): the start of its validation data, or the prompt of its task."""
    model, record = load_run(run, pick_device(s.device))
    prompt, room = run_data(record, None).example(record['settings']['block_size'], s.sample_tokens)
    tokenizer = load_tokenizer(record['data']['tokenizer'])
    new, = generate(model, [prompt], room, temperature=0.8, top_k=50, eos_id=record['data']['eos_id'])
    return tuple(tokenizer.decode(ids).decode(errors='replace') for ids in (prompt, new))


def task_scores(log: list[dict]) -> dict[str, float]:
    """A synthetic task's scores in the last evaluation: what only lines with a validation loss have, but for parts of
    that loss (val_...)."""
    evaluated = [record for record in log if 'val' in record]
    last = (evaluated or [{}])[-1]
    parts = {key for record in log if 'val' not in record for key in record} | ALWAYS_LOGGED
    return {key: value for key, value in last.items()
            if key not in parts and f'val_{key}' not in last and not key.startswith('val_') and is_number(value)}


def curves(log: list[dict]) -> dict[str, dict]:
    """{logged value: {'step', 'tokens', 'minutes' and 'y': lists}} of at most MAX_POINTS points."""
    names = dict.fromkeys(key for record in log for key in record if key not in ('step', 'tokens', 'seconds'))
    found = {}
    for name in names:
        points = [(r['step'], r['tokens'], r['seconds'] / 60, r[name]) for r in log if is_number(r.get(name))]
        size = math.ceil(len(points) / MAX_POINTS)
        means = [[float(f'{statistics.fmean(column):.6g}') for column in zip(*points[i:i + size])]
                 for i in range(0, len(points), size or 1)]
        if means:
            found[name] = dict(zip(('step', 'tokens', 'minutes', 'y'), zip(*means)))
    return found


# ---- the parts of the page ----

def page(found: list[dict], folder: Path) -> str:
    """The page of runs that `look_at` has read. folder: where it will be, for links to the runs."""
    import plotly.offline
    names = short_names([about['run'] for about in found])
    readable = [about['run'] for about in found if 'model' in about]
    styles = run_styles(readable)
    for about in found:
        label, style = styles.get(about['run'], ('', {'color': '#888', 'dash': 'solid'}))
        about |= {'name': names[about['run']], 'label': label, **style}
    warning = not_comparable(readable) if readable else None
    data = [{key: about.get(key) for key in ('name', 'label', 'color', 'dash', 'flops_per_token')}
            | {'curves': curves(about['log'])} for about in found]
    parts = {
        'title': f'{len(found)} runs' if len(found) > 1 else found[0]['name'],
        'date': f'{datetime.datetime.now():%Y-%m-%d %H:%M}',
        'warning': f'<p class="warning">{html.escape(warning.capitalize())}.</p>' if warning else '',
        'runs': run_table(found, folder),
        'settings': settings_table(found, differences(readable)),
        'scores': score_table(found),
        'samples': samples(found),
        'plotly': plotly.offline.get_plotlyjs(),
        'data': json.dumps(data).replace('<', '\\u003c'),  # or </script> in a name would end the script
    }
    parts['title'] = html.escape(parts['title'])
    return re.sub(r'\{\{(\w+)\}\}', lambda match: parts[match[1]], FRAME.read_text(encoding='utf-8'))


def short_names(runs: list[str]) -> dict[str, str]:
    """{run: the name of its folder, or as it was given where two have the same}."""
    names = {run: os.path.basename(os.path.abspath(run)) for run in runs}
    return {run: name if list(names.values()).count(name) == 1 else run for run, name in names.items()}


def run_styles(runs: list[str]) -> dict[str, tuple]:
    """{run: (what tells it from the others, {'color', 'dash'})}; runs that differ only in the seed look alike."""
    if not runs:
        return {}
    from matplotlib.colors import to_hex
    dashes = {'-': 'solid', '--': 'dash', ':': 'dot', '-.': 'dashdot'}
    groups = group(runs)
    return {run: (label, {'color': to_hex(style['color']), 'dash': dashes[style['linestyle']]})
            for (label, members), style in zip(groups.items(), line_styles(len(groups))) for run in members}


def run_table(found: list[dict], folder: Path) -> str:
    """The table of the runs. folder: where the page will be."""
    longest = max([about['log'][-1]['seconds'] / 60 for about in found if about['log']], default=0)
    minutes, unit = unit_for(longest, MINUTES)
    rows = []
    for about in found:
        log, model = about['log'], about.get('model')
        vals = [r['val'] for r in log if is_number(r.get('val'))]
        href = quote(os.fsencode(os.path.relpath(about['run'], folder)))
        swatch = f'<i class="swatch" style="border-top: 3px {CSS_BORDERS[about["dash"]]} {about["color"]}"></i>'
        row = {'run': (f'{swatch}<a href="{href}/">{html.escape(about["name"])}</a>', about['name']),
               'model': cell(model),
               'what differs': cell(', '.join(part for part in about['label'].split(', ') if part != model)),
               'parameters': number(about.get('parameters'), short_number),
               'tokens': number(log[-1]['tokens'] if log else None, short_number),
               unit: number(log[-1]['seconds'] / 60 / minutes if log else None, '{:.1f}'.format),
               'validation loss': number(vals[-1] if vals else None, '{:.4f}'.format),
               'tokens/s': number(median(log, 'tokens_per_s'), '{:,.0f}'.format),
               'MFU': number(median(log, 'mfu'), '{:.1%}'.format),
               'memory, GiB': number(max(logged(log, 'memory_gib'), default=None), '{:.2f}'.format)}
        if about['decoding']:
            best = about['decoding']
            row['decoding, tokens/s'] = number(best['plain'], '{:,.0f}'.format)
            row['with drafts'] = (f'{best["tokens_per_s"]:,.0f} ({best["speedup"]:.2f} times, length '
                                  f'{html.escape(best["draft_len"])})', repr(best['tokens_per_s']))
        rows.append(row)
    notes = [html.escape(f'{about["name"]}: {note}') for about in found for note in about['notes']]
    return table(rows) + '<ul class="notes">' + ''.join(f'<li>{note}</li>' for note in notes) + '</ul>'


def settings_table(found: list[dict], settings: dict[str, dict]) -> str:
    rows = [{'run': cell(about['name'])} | {key: cell(value) for key, value in settings[about['run']].items()}
            for about in found if about['run'] in settings]
    return table(rows) if len(rows) > 1 else '<p class="quiet">There is one run.</p>'


def score_table(found: list[dict]) -> str:
    rows = []
    for about in found:
        values = task_scores(about['log']) | about['results']
        if values:
            rows.append({'run': cell(about['name'])} | {name: number(v, '{:.4g}'.format) for name, v in values.items()})
    return table(rows) if rows else '<p class="quiet">None: eval.py and synthetic tasks make them.</p>'


def samples(found: list[dict]) -> str:
    blocks = []
    for about in found:
        if 'sample' in about:
            prompt, text = map(html.escape, about['sample'])
            blocks.append(f'<div>{html.escape(about["name"])}</div><pre><b>{prompt}</b>{text}</pre>')
    return '\n'.join(blocks) or '<p class="quiet">None.</p>'


def median(log: list[dict], key: str) -> float | None:
    return statistics.median(logged(log, key)) if logged(log, key) else None


def logged(log: list[dict], key: str) -> list[float]:
    return [record[key] for record in log if is_number(record.get(key))]


def cell(value) -> tuple[str, str]:
    """A text as (HTML, what to sort by)."""
    text = '' if value is None else str(value)
    return html.escape(text), text


def number(value: float | None, form: Callable) -> tuple[str, str]:
    """A number as (HTML, what to sort by); None is an empty cell."""
    return ('', '') if value is None else (form(value), repr(value))


def table(rows: list[dict[str, tuple[str, str]]]) -> str:
    """{column: (HTML, what to sort by)} as a table, without columns that are empty in every row."""
    columns = [name for name in dict.fromkeys(name for row in rows for name in row)
               if any(row.get(name, ('', ''))[0] for row in rows)]

    def kind(name):
        sorts = [row[name][1] for row in rows if name in row and row[name][1]]
        return 'number' if all(map(is_numeric, sorts)) else 'text'
    kinds = {name: kind(name) for name in columns}
    head = ''.join(f'<th class="{kinds[name]}">{html.escape(name)}</th>' for name in columns)
    body = ''
    for row in rows:
        cells = [(kinds[name], *row.get(name, ('', ''))) for name in columns]
        body += '<tr>' + ''.join(f'<td class="{kind}" data-sort="{html.escape(key)}">{text}</td>'
                                 for kind, text, key in cells) + '</tr>\n'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def is_numeric(text: str) -> bool:
    try:
        float(text)
        return True
    except ValueError:
        return False


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = runs_to_read('report RUN RUN ... --out=report.html', Settings, argv)
        runs = list(dict.fromkeys(run.rstrip('/') for run in runs))
        folders = [run for run in runs if (Path(run) / 'config.json').exists() or (Path(run) / 'log.jsonl').exists()]
        if not folders:
            read_run(runs[0])  # says what is missing
        if others := [run for run in runs if run not in folders]:
            print(f'left out, as these are not run folders: {", ".join(others)}', file=sys.stderr)
        progress, found = make_progress(), []
        for i, run in enumerate(folders):
            progress(f'reading run {i + 1}/{len(folders)}: {run}')
            found.append(look_at(run, s))
        path = Path(f"{output_path(s.out, folders, 'report')}.html")
        write_file(path, page(found, Path(os.path.abspath(path)).parent).encode(errors='replace'))
        for about in found:
            for note in about['notes']:
                print(f'{about["run"]}: {note}', file=sys.stderr)
        print(f'written to {path}: open it in a browser')


if __name__ == '__main__':
    main()
