"""A Markdown table of any runs, with the paper's row below each run that reproduces one.

    python eval.py RUN RUN ... --paper=sps
    python -m analysis.tables RUN RUN ... --out=NAME

Tables 2 and 3 of the SPS paper, table 1 of the GPN paper and the language-modeling table of the
NextLat paper. Writes NAME.md and NAME.csv with means over seeds. Scores are from eval.jsonl,
decoding speed and memory (ratios to Standard) from papers.sps.inference, everything else from the logs.

analysis/papers/PAPER.csv has the paper's table. Columns without a space are settings that identify
a run (an empty cell matches any value). Columns with a space are
numbers: those of FORMATS and MEANS below, or a task and metric as in eval.jsonl, in percent if the
name ends in ', %'. An empty cell is a number that our copy of the paper lacks.
"""
import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from analysis import figures
from analysis.runs import curve, curves_of, finished, short_number
from bench import FAMILY, RESULTS
from lm_architectures.files import ROOT, UserError, read_json
from lm_architectures.run.models import make_config
from lm_architectures.score.scoring import perplexity
from lm_architectures.settings import read_config_file

PAPERS = Path(__file__).parent / 'papers'
FIRST = 'seeds', 'parameters', 'tokens'  # columns before the paper's
LAST = 'training tokens/s', 'training GiB', 'GPU-hours', 'training FLOPs'  # columns after the paper's
FORMATS = {'seeds': '{:d}'.format, 'parameters': short_number, 'tokens': short_number,
           'state dim': '{:d}'.format, 'memory cells': '{:,d}'.format, 'validation loss': '{:.4f}'.format,
           'validation perplexity': '{:.2f}'.format, 'end-to-end throughput': '{:.2f}'.format,
           'prefill throughput': '{:.2f}'.format, 'peak memory': '{:.2f}'.format,
           'training tokens/s': '{:,.0f}'.format, 'training GiB': '{:.1f}'.format,
           'GPU-hours': '{:,.1f}'.format, 'training FLOPs': '{:.2e}'.format}
MEANS = {'corpus NLL': ' nats_per_word', 'task accuracy, %': ', %'}  # column: suffix of the columns it averages
INFERENCE = {'end-to-end throughput': 'throughput, end to end', 'prefill throughput': 'throughput, prefill',
             'peak memory': 'memory, held'}  # `what` in its file
DECODING = {'method', 'window', 'persistent_window', 'predict_layers', 'predict_input'}  # settings that affect it


@dataclass
class Settings(figures.Settings):
    paper: Literal['sps', 'nextlat', 'gpn'] = 'sps'  # paper whose columns and rows are shown
    inference: str = str(RESULTS / 'inference_gpu.json')  # output of papers.sps.inference


def row_of_paper(run, rows: list[dict[str, str]]) -> dict[str, str] | None:
    """Return the row whose settings match the run, or None."""
    own = run.record['settings'] | dataclasses.asdict(run.config) | {'model': run.record['model']}
    for row in rows:
        settings = {key: value for key, value in row.items() if value and key != 'name' and ' ' not in key}
        if all(str(own.get(key)) == value for key, value in settings.items()):
            return row
    return None


def inference_of(run, measured: list[dict]) -> dict[str, float]:
    """Return a run's INFERENCE columns (ratios to Standard) from rows of papers.sps.inference."""
    own, found = dataclasses.asdict(run.config), {}
    for name, (model, values) in FAMILY.items():
        config = dataclasses.asdict(make_config(model, values))
        if run.record['model'] != model or any(own[key] != config[key] for key in DECODING & own.keys()):
            continue
        for row in measured:
            shape = read_config_file(str(ROOT / f'config/standard_{row["scale"]}.py'))
            if all(own[key] == shape[key] for key in ('n_layer', 'n_head', 'n_embd')):
                ratio = {'standard': 1.0, **row}.get(name)
                found |= {column: ratio for column, what in INFERENCE.items() if what == row['what']}
    return found


def own_row(runs: list, columns: list[str], measured: list[dict]) -> dict[str, float]:
    """Return {column: mean over finished seeds}. measured: rows of papers.sps.inference."""
    is_logged, runs = any(run.log for run in runs), finished(runs)
    row = {'seeds': len(runs), 'parameters': runs[0].parameters} | state_size(runs[0])
    if is_logged:
        end = curve(runs)[-1]
        row |= {'tokens': end['tokens'], 'validation loss': statistics.mean(run.final_loss() for run in runs),
                'training tokens/s': mean_of(run.median('tokens_per_s') for run in runs),
                'training GiB': mean_of(max(run.logged('memory_gib'), default=None) for run in runs),
                'GPU-hours': end['gpu_hours'], 'training FLOPs': end['flops']}
        row['validation perplexity'] = perplexity(row['validation loss'])
    results = [run.evaluations() for run in runs]
    if not is_logged and not all(results):
        raise UserError(f'{" ".join(map(str, runs))}: nothing logged or evaluated: run python eval.py RUN '
                        '--paper=PAPER')
    for column in columns:
        key = column.removesuffix(', %')
        value = mean_of(found.get(key) for found in results)
        if value is not None:
            row[column] = value if key == column else 100 * value
    for column, suffix in MEANS.items():
        row[column] = mean_of(row.get(name) for name in columns if name.endswith(suffix) and name not in MEANS)
    row |= inference_of(runs[0], measured)
    return {column: value for column, value in row.items() if value is not None}


def state_size(run) -> dict[str, int]:
    """Return model width and, for recurrent models, the size of the matrix memory."""
    row = {'state dim': run.config.n_embd} if hasattr(run.config, 'n_embd') else {}
    if hasattr(run.model, 'memory_cells'):
        row['memory cells'] = run.model.memory_cells
    return row


def mean_of(values) -> float | None:
    """Return the mean, or None if there are no values or one of them is None."""
    values = list(values)
    return statistics.mean(values) if values and None not in values else None


def as_text(column: str, value: float) -> str:
    """Format a number for its column."""
    if column in FORMATS:
        return FORMATS[column](value)
    return f'{value:.1f}' if column.endswith(', %') else f'{value:.3f}'


def rows_of(groups: dict[str, tuple], columns: list[str]) -> list[dict]:
    """Return rows of {label: (our {column: number}, paper's row or None)}, no empty columns."""
    rows = []
    for label, (own, of_paper) in groups.items():
        rows.append({'run': label} | own)
        if of_paper:
            numbers = {column: of_paper[column] for column in columns if of_paper[column]}
            rows.append({'run': f'paper: {of_paper["name"]}'} | numbers)
    order = dict.fromkeys(['run', *FIRST, *columns, *LAST])
    shown = [column for column in order if any(column in row for row in rows)]
    return [{column: row.get(column, '') for column in shown} for row in rows]


@figures.script(Settings)
def main(runs: list, s: Settings) -> dict:
    paper = figures.read_csv(PAPERS / f'{s.paper}.csv')
    measured = read_json(s.inference, 'make it with python -m papers.sps.inference')['rows']
    columns = [column for column in paper[0] if ' ' in column]
    groups = curves_of(runs, lambda own: (own_row(own, columns, measured), row_of_paper(own[0], paper)),
                       labels=s.labels)
    rows = rows_of(groups, columns)
    text = figures.markdown_table([{column: value if isinstance(value, str) else as_text(column, value)
                                    for column, value in row.items()} for row in rows])
    print(text)
    return {'.csv': rows, '.md': f'{text}\n'}


if __name__ == '__main__':
    main()
