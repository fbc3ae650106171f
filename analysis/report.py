"""An HTML report of run folders: a table of the runs, their curves, settings and scores.

    python -m analysis.report RUN RUN ... --out=report.html

Writes one self-contained file, by default report.html beside the runs. Everything that was logged
is drawn over tokens, FLOPs, time and steps; runs that differ only in the seed share a color.
Scores are from the last evaluation and from eval.py. Unreadable runs are skipped with a message.
"""
import statistics
from dataclasses import dataclass
from html import escape
from math import ceil
from pathlib import Path

from analysis import figures
from common.files import UserError, write_file
from common.runs import read_log, read_run

MAX_POINTS = 100  # per curve
X_KEYS = 'step', 'tokens', 'seconds'  # keys of log records that give x coordinates
AXES = 'training tokens', 'training FLOPs', 'training time, minutes', 'training steps'
NAMES = {'val': 'validation loss, nats', 'nll': 'training loss, nats', 'tokens_per_s': 'tokens/s', 'mfu': 'MFU',
         'memory_gib': 'memory, GiB', 'lr': 'learning rate', 'grad_norm': 'gradient norm'}
PAGE = '''<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<style>body {{ font: 15px system-ui, sans-serif; margin: 2em; overflow-x: auto }} table {{ border-collapse: collapse }}
td, th {{ padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: left }}</style></head>
<body><h1>{title}</h1><p>{warning}</p>
<h2>Runs</h2>{runs}<h2>Curves</h2>{curves}<h2>Settings that differ</h2>{settings}<h2>Scores</h2>{scores}</body></html>
'''


@dataclass
class Settings(figures.Settings):
    out: str | None = None  # file to write; None: report.html beside the runs


def read(run: str) -> dict:
    """Read a run: {'parameters', 'flops', 'log', 'results'}. Log or results may be empty."""
    found = {'parameters': figures.n_parameters(run), 'flops': figures.flops_per_token(run), 'log': read_log(run),
             'results': figures.evaluations(Path(run) / 'eval.jsonl')}
    if not found['log'] and not found['results']:
        raise UserError(f'{run}: nothing logged or evaluated')
    return found


def run_row(run: str, about: dict, label: str) -> dict[str, str]:
    """Return a run's row in the table of runs. about: from `read`."""
    row = {'run': Path(run).name, 'model': figures.model_name(read_run(run)), 'label': label,
           'parameters': figures.short_number(about['parameters'])}
    if log := about['log']:
        row |= {'tokens': figures.short_number(log[-1]['tokens']), 'minutes': f'{log[-1]["seconds"] / 60:.1f}'}
    texts = {'val': ('{:.4f}', lambda values: values[-1]), 'tokens_per_s': ('{:,.0f}', statistics.median),
             'mfu': ('{:.1%}', statistics.median), 'memory_gib': ('{:.2f}', max)}
    for key, (form, choose) in texts.items():
        if values := figures.logged(log, key):
            row[NAMES[key]] = form.format(choose(values))
    return row


def last_scores(log: list[dict]) -> dict[str, float]:
    """Return the other values of the last evaluation, such as the scores of a synthetic task."""
    last = ([{}] + [record for record in log if 'val' in record])[-1]
    return {key: value for key, value in last.items()
            if figures.is_number(value) and key not in {*X_KEYS, 'loss', 'skipped', *NAMES}}


def points(found: dict[str, dict], labels: dict[str, str]) -> list[dict]:
    """Return a row per run, logged value and step, with at most MAX_POINTS per curve."""
    rows = []
    for run, about in found.items():
        for key in dict.fromkeys(key for record in about['log'] for key in record if key not in X_KEYS):
            line = [record for record in about['log'] if figures.is_number(record.get(key))]
            rows += [{'run': run, 'label': labels[run], 'what': NAMES.get(key, key), 'value': r[key]}
                     | dict(zip(AXES, (r['tokens'], about['flops'] and about['flops'] * r['tokens'],
                                       r['seconds'] / 60, r['step'])))
                     for r in line[::max(1, ceil(len(line) / MAX_POINTS))]]
    return rows


def curves(rows: list[dict], axis: str):
    """Draw `points` over one of AXES with plotly: a panel per logged value, a line per run."""
    import plotly.express as px
    n_rows = ceil(len({row['what'] for row in rows}) / 3)
    figure = px.line(rows, axis, 'value', color='label', line_group='run', hover_name='run', markers=True,
                     facet_col='what', facet_col_wrap=3, facet_row_spacing=0.2 / n_rows, height=140 + 260 * n_rows,
                     category_orders={'what': list(NAMES.values())}, labels={'value': '', 'label': 'runs'},
                     title=f'Logged values over {axis.partition(",")[0]}', template='plotly_white')
    figure.for_each_annotation(lambda title: title.update(text=title.text.removeprefix('what=')))
    return figure.update_yaxes(matches=None, showticklabels=True)


def page(found: dict[str, dict], group_labels: str | None = None) -> str:
    """Return the HTML page of {run: result of `read`}."""
    import pandas as pd
    import plotly.io

    def table(rows):
        return pd.DataFrame(rows).to_html(index=False, na_rep='', border=0, float_format='{:.4g}'.format)
    runs, drawn = list(found), []
    labels = {run: label for label, members in figures.group(runs, labels=group_labels).items()
              for run in members}
    rows = points(found, labels)
    for axis in AXES:
        if known := [row for row in rows if row[axis] is not None]:
            drawn.append(plotly.io.to_html(curves(known, axis), full_html=False, include_plotlyjs=not drawn))
    scores = [{'run': Path(run).name} | own for run, about in found.items()
              if (own := last_scores(about['log']) | about['results'])]
    return PAGE.format(
        title=f'{len(runs)} runs' if len(runs) > 1 else escape(Path(runs[0]).name),
        warning=figures.comparison_warning(runs) or '',
        runs=table([run_row(run, found[run], labels[run]) for run in runs]), curves=''.join(drawn),
        settings=table([{'run': Path(run).name} | own for run, own in figures.differences(runs).items()]),
        scores=table(scores) if scores else 'None. Scores come from eval.py and from synthetic tasks.')


def main(argv: list[str] | None = None) -> None:
    with figures.runs_to_read('report RUN RUN ... --out=report.html', Settings, argv) as (s, runs):
        found = figures.map_readable(dict.fromkeys(run.rstrip('/') for run in runs), read)
        path = Path(f"{figures.output_path(s.out, list(found), 'report')}.html")
        write_file(path, page(found, s.labels).encode(errors='replace'))
        print(f'written to {path}: open it in a browser')


if __name__ == '__main__':
    main()
