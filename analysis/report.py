"""Run folders on one page to open in a browser: what the runs are, their curves, settings and scores.

    python -m analysis.report RUN RUN ... --out=report.html

Writes one file, report.html beside the runs or --out, that loads nothing else. It has a table of the runs, everything
they logged as curves over tokens, FLOPs, time or steps, the settings that differ, and the scores of synthetic tasks and
of eval.py. Runs that differ only in the seed have one colour. Runs that cannot be read are left out and named.
"""
import html
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from analysis import figures
from common.files import UserError, friendly_errors, write_file
from common.runs import read_log, read_run

MAX_POINTS = 200  # of a curve; where more was logged, a point is the mean of neighbours
DASHES = 'solid', 'dash', 'dot', 'dashdot'
ALWAYS_LOGGED = {'step', 'tokens', 'seconds', 'val', 'loss', 'nll', 'grad_norm', 'lr', 'tokens_per_s', 'mfu',
                 'memory_gib', 'skipped'}
NAMES = {'val': 'validation loss, nats per token', 'nll': 'training loss, nats per token', 'mfu': 'MFU',
         'tokens_per_s': 'tokens/s', 'lr': 'learning rate', 'grad_norm': 'gradient norm', 'memory_gib': 'memory, GiB'}
AXES = 'tokens', 'training FLOPs', 'minutes of training', 'steps'
PAGE = '''<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<style>body {{ font: 15px system-ui, sans-serif; margin: 2em }} div.wide {{ overflow-x: auto }}
td, th {{ padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: left }}</style></head>
<body><h1>{title}</h1><p>{warning}</p>
<h2>Runs</h2>{runs}<h2>Curves</h2>{curves}<h2>Settings that differ</h2>{settings}<h2>Scores</h2>{scores}</body></html>
'''


@dataclass
class Settings:
    out: str | None = None  # the page; None: report.html beside the runs


def read(run: str) -> dict:
    """Return the size, the log and the evaluations of a run; UserError if it has neither of the last two."""
    found = {'parameters': figures.n_parameters(run), 'log': read_log(run),
             'results': figures.evaluations(Path(run) / 'eval.jsonl')}
    if not found['log'] and not found['results']:
        raise UserError(f'{run}: nothing logged or evaluated')
    return found


def task_scores(log: list[dict]) -> dict[str, float]:
    """Return a synthetic task's scores in the last evaluation: what is logged with a validation loss only."""
    last = ([{}] + [record for record in log if 'val' in record])[-1]
    parts = {key for record in log if 'val' not in record for key in record} | ALWAYS_LOGGED
    return {key: value for key, value in last.items() if figures.is_number(value)
            and key not in parts and f'val_{key}' not in last and not key.startswith('val_')}


def run_row(run: str, about: dict, label: str, folder: Path) -> dict[str, str]:
    """Return a row of the table of runs. folder: where the page will be, for links."""
    log, link = about['log'], html.escape(os.path.relpath(run, folder), quote=True)
    row = {'run': f'<a href="{link}/">{html.escape(Path(run).name)}</a>', 'model': figures.model_name(read_run(run)),
           'what differs': html.escape(label), 'parameters': figures.short_number(about['parameters'])}
    if log:
        row |= {'tokens': figures.short_number(log[-1]['tokens']), 'minutes': f'{log[-1]["seconds"] / 60:.1f}'}
    texts = {'val': ('validation loss', '{:.4f}', lambda values: values[-1]),
             'tokens_per_s': ('tokens/s', '{:,.0f}', statistics.median), 'mfu': ('MFU', '{:.1%}', statistics.median),
             'memory_gib': ('memory, GiB', '{:.2f}', max)}
    for key, (name, form, choose) in texts.items():
        if values := figures.logged(log, key):
            row[name] = form.format(choose(values))
    return row


def html_table(rows: list[dict[str, str]]) -> str:
    """Return rows of HTML cells as a table, without columns that are empty in every row."""
    columns = [name for name in dict.fromkeys(name for row in rows for name in row)
               if any(row.get(name, '') != '' for row in rows)]
    head = ''.join(f'<th>{html.escape(name)}</th>' for name in columns)
    body = ''.join('<tr>' + ''.join(f'<td>{row.get(name, "")}</td>' for name in columns) + '</tr>\n' for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def points(log: list[dict], key: str, flops: float | None) -> list[list[float]]:
    """Return a logged value over each of AXES: lists of tokens, FLOPs, minutes, steps and values."""
    rows = [(r['tokens'], (flops or math.nan) * r['tokens'], r['seconds'] / 60, r['step'], r[key])
            for r in log if figures.is_number(r.get(key))]
    size = max(1, math.ceil(len(rows) / MAX_POINTS))
    means = [[statistics.fmean(column) for column in zip(*rows[i:i + size])] for i in range(0, len(rows), size)]
    return [list(column) for column in zip(*means)]


def curves(found: dict[str, dict], labels: dict[str, str]):
    """Return a plotly figure with a trace for each logged value and run, and menus to choose value, axis and scale."""
    import plotly.graph_objects as go
    from plotly.colors import qualitative
    logged_keys = dict.fromkeys(key for about in found.values() for record in about['log'] for key in record)
    keys = [key for key in dict.fromkeys(['val', *logged_keys])
            if key in logged_keys and key not in ('step', 'tokens', 'seconds')]
    flops, colours = {run: figures.flops_per_token(run) for run in found}, qualitative.D3
    order = list(dict.fromkeys(labels.values()))
    traces, lines = [], []
    for key in keys:
        for run, about in found.items():
            if line := points(about['log'], key, flops[run]):
                i = order.index(labels[run])
                lines.append((key, line))
                traces.append(go.Scatter(
                    x=line[0], y=line[-1], name=Path(run).name, mode='lines+markers', marker={'size': 4},
                    line={'color': colours[i % len(colours)], 'dash': DASHES[i // len(colours) % 4]},
                    hovertemplate=f'%{{y:.4f}} at %{{x}}<extra>{html.escape(labels[run])}</extra>',
                    visible=key == keys[0]))
    menus = [
        [{'label': NAMES.get(key, key), 'method': 'update', 'args': [
            {'visible': [own == key for own, _ in lines]}, {'yaxis.title.text': NAMES.get(key, key)}]} for key in keys],
        [{'label': f'over {name}', 'method': 'update', 'args': [
            {'x': [line[i] for _, line in lines]}, {'xaxis.title.text': name}]} for i, name in enumerate(AXES)],
        [{'label': f'{x} x, {y} y', 'method': 'relayout', 'args': [{'xaxis.type': x, 'yaxis.type': y}]}
         for x in ('linear', 'log') for y in ('linear', 'log')]]
    places = [{'buttons': buttons, 'x': 0.25 * i, 'y': 1.15, 'xanchor': 'left'} for i, buttons in enumerate(menus)]
    return go.Figure(traces, go.Layout(template='plotly_white', height=600, updatemenus=places, showlegend=True,
                                       xaxis_title=AXES[0], yaxis_title=NAMES.get(keys[0], keys[0]) if keys else ''))


def page(found: dict[str, dict], folder: Path) -> str:
    """Return the page of {run: what `read` returned}. folder: where it will be, for links to the runs."""
    import plotly.io
    runs = list(found)
    labels = {run: label for label, members in figures.group(runs).items() for run in members}
    settings = [{'run': Path(run).name} | own for run, own in figures.differences(runs).items()]
    scores = [{'run': Path(run).name} | {key: f'{value:.4g}' for key, value in values.items()}
              for run, about in found.items() if (values := task_scores(about['log']) | about['results'])]

    def escaped(rows):
        return html_table([{key: html.escape(str(value)) for key, value in row.items()} for row in rows])
    return PAGE.format(
        title=f'{len(runs)} runs' if len(runs) > 1 else html.escape(Path(runs[0]).name),
        warning=figures.not_comparable(runs) or '',
        runs=html_table([run_row(run, about, labels[run], folder) for run, about in found.items()]),
        curves=plotly.io.to_html(curves(found, labels), full_html=False, config={'displaylogo': False}),
        settings=escaped(settings) if len(runs) > 1 else 'There is one run.',
        scores=escaped(scores) if scores else 'None: eval.py and synthetic tasks make them.')


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = figures.runs_to_read('report RUN RUN ... --out=report.html', Settings, argv)
        found = figures.of_each(dict.fromkeys(run.rstrip('/') for run in runs), read)
        path = Path(f"{figures.output_path(s.out, list(found), 'report')}.html")
        write_file(path, page(found, Path(os.path.abspath(path)).parent).encode(errors='replace'))
        print(f'written to {path}: open it in a browser')


if __name__ == '__main__':
    main()
