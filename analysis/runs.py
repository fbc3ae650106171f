"""Runs as pandas tables: `read_runs` has a row for each run, `read_logs` one for each logged step.

    runs = labeled(read_runs(['out/a', 'out/b']))   # settings, parameters, FLOPs, final loss
    compared(runs)                                  # means, differences paired by seed, intervals
    curve(read_logs(runs))                          # validation loss over tokens

Columns of `read_runs` are the settings of model and training, and MEASURED. Runs that differ only
in the seed have the same label.
"""
import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd

from lm_architectures import train
from lm_architectures.files import UserError, command, is_number, printable, read_lines, warn_once
from lm_architectures.run.dry_run import meta_model
from lm_architectures.run.folders import MAY_CHANGE, may_change, portable_config, read_run, saved_config
from lm_architectures.run.models import STORED, count_parameters
from lm_architectures.run.records import read_log
from lm_architectures.settings import make_settings

TRAINING = {field.name for field in dataclasses.fields(train.Settings)}  # the other settings are the model's
MEASURED = ('folder', 'label', 'parameters', 'flops_per_token', 'state_bytes', 'memory_cells', 'tokens', 'flops',
            'minutes', 'gpus', 'tokens_per_s', 'memory_gib', 'loss', 'sha256')
IGNORED = MAY_CHANGE - {'data'} | {'seed', 'extend', 'vocab_size', 'n_ids', 'eos_id', *MEASURED}  # not in labels
SHORT = {'learning_rate': 'lr', 'max_tokens': 'tokens'}  # names in labels
VAL_OPTIONS = 'data', 'val_tokens', 'max_length'  # options of eval.py that affect 'val'
TEXT_OPTIONS = 'limit', 'bos', 'max_length'  # those that affect a corpus
TASK_OPTIONS = 'num_fewshot', *TEXT_OPTIONS  # those that affect a task of lm-eval


# ---- a row for each run ----

def usable(items, function: Callable) -> list:
    """Return [function(item), ...] without the items for which it fails, and name these.

    If it fails for all items, the first error is raised.
    """
    found, errors = [], []
    for item in items:
        try:
            found.append(function(item))
        except (UserError, OSError) as error:
            errors.append(error)
    if not found:
        raise errors[0]
    for error in errors:
        warn_once(f'left out: {error}')
    return found


def passing(runs: pd.DataFrame, check: Callable) -> pd.DataFrame:
    """Return the runs for which check(run) raises no UserError, and name the others."""
    return runs.loc[usable(runs.itertuples(), lambda run: check(run) or run.Index)]


def read_runs(folders, code: str | None = None) -> pd.DataFrame:
    """Return a row for each run: its settings and MEASURED. Runs that cannot be read are left out.

    code: 'run' for the model's code as stored in the runs, None for today's.
    """
    runs = pd.DataFrame(usable(folders, lambda folder: run_row(str(folder), code)), dtype=object)
    if runs.sha256.nunique() > 1:
        warn_once('these runs have different data: their losses in nats per token cannot be compared')
    return runs


def run_row(folder: str, code: str | None = None) -> dict:
    """Return a run's row. What is unknown is None. The loss is NaN if training is unfinished."""
    record, log = read_run(folder, code), read_log(folder)
    settings = make_settings(train.Settings, record['settings'], f'in {folder}/config.json')
    model, values, flops, state = None, record['model_config'], None, None
    with suppress(UserError):  # the model file may be gone
        model = meta_model(record['model'], portable_config(record, folder), record['code'])
        hidden, values = may_change(record), dataclasses.asdict(saved_config(record, folder))
        values = {name: value for name, value in values.items() if name not in hidden}
    with suppress(Exception):  # the model has no flops_per_token, or it does not fit the settings
        flops = model.flops_per_token(settings.block_size)
    with suppress(Exception):  # it has no cache
        state = model.new_cache(1, settings.block_size).nbytes
    steps, last, device = log_table(log), last_evaluation(log), record['versions'].get('device')
    tokens = last.get('tokens', 0)
    return {
        **values, **dataclasses.asdict(settings),
        'seed': record['settings'].get('seed', folder),  # an imported model's is unknown: see `finished`
        'edit': edit(folder), 'folder': folder, 'parameters': model and count_parameters(model),
        'flops_per_token': flops, 'state_bytes': state,
        'memory_cells': getattr(model, 'memory_cells', None), 'tokens': tokens, 'flops': flops and flops * tokens,
        'minutes': last.get('seconds', np.nan) / 60,
        'gpus': record['versions'].get('processes', 1) if str(device).startswith('cuda') else 0,
        'tokens_per_s': steps['tokens_per_s'].median() if 'tokens_per_s' in steps else None,
        'memory_gib': steps['memory_gib'].max() if 'memory_gib' in steps else None,
        'loss': last['val'] if last and tokens >= settings.max_tokens else np.nan,
        'sha256': record['data']['sha256']}


def last_evaluation(log: list[dict]) -> dict:
    """Return the last line of a log that has a validation loss, or {}."""
    return next((line for line in reversed(log) if 'val' in line), {})


def edit(folder: str) -> str:
    """Return a digest of the run's copy of its model's code, without attn_kernels.py."""
    files = sorted(Path(folder).glob(f'{STORED}/model_*.py'))
    return hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest()[:6] if files else 'none'


def finished(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs without those whose training is unfinished, and name these.

    Imported models, which were not trained here, count as finished. Their folder is their seed.
    """
    def check(run):
        if np.isnan(run.loss) and run.seed != run.folder:
            raise UserError(f'{run.folder} was last evaluated at {run.tokens:,} of {run.max_tokens:,} tokens: finish '
                            'training it with ' + command('train.py', f'--out_dir={run.folder}', '--resume'))
    return passing(runs, check)


# ---- labels ----

def labeled(runs: pd.DataFrame, labels: str | None = None, ignored=()) -> pd.DataFrame:
    """Return the runs with a column `label`, without duplicates: runs with equal label and seed.

    labels: 'A,B', names of the groups of runs that differ only in the seed and in `ignored`
    settings; None: the settings that differ.
    """
    runs = runs.assign(label=label(runs, labels, ignored))
    again = runs[['label', 'seed', *ignored]].map(repr).duplicated()
    for folder in runs.folder[again]:
        warn_once(f'left out: {folder} duplicates another run: all settings are equal, including the seed')
    return runs[~again]


def named(runs: pd.DataFrame, labels: str | None = None) -> pd.DataFrame:
    """Label each run by its own name in 'A,B' or, if `labels` is None, by its folder."""
    if labels is not None:
        return runs.assign(label=given_labels(labels, runs.folder))
    names = runs.folder.map(lambda folder: Path(folder).name)
    return runs.assign(label=names.where(~names.duplicated(keep=False), runs.folder))


def label(runs: pd.DataFrame, labels: str | None = None, ignored=()) -> pd.Series:
    """Return each run's label: the model, then as few settings as tell the groups of runs apart."""
    text, names, n_groups = differences(runs, ignored), [], 1
    for name in text:
        if (n := text.groupby([*names, name]).ngroups) > n_groups:
            names, n_groups = [*names, name], n
    names = names or ['model']
    groups = text.groupby(names, sort=False).ngroup()
    if labels is not None:
        return groups.map(dict(enumerate(given_labels(labels, runs.folder[~groups.duplicated()]))))
    for name in text.columns.drop(['model', *names], errors='ignore'):
        print(f'also different: {name} is ' + ', '.join(runs[name][text[name] != ''].map(str).unique()))
    found = pd.Series([printable(', '.join(setting_label(name, runs[name][i]) for name in names if text[name][i]))
                       for i in runs.index], runs.index)
    if found.nunique() < n_groups:  # different values may look the same when shortened
        found += ', ' + runs.folder.groupby(groups).transform('first')
    return found


def differences(runs: pd.DataFrame, ignored=()) -> pd.DataFrame:
    """Return the model and the settings that differ, as texts: '' for runs that agree on it.

    A model's settings are compared among the runs of that model, training settings among all runs.
    The model is first, then settings of one model, of several models, and of training.
    """
    text = runs[[name for name in runs if name not in IGNORED | {*ignored}]].map(repr)  # lists have no hash
    n_absent = (text == 'nan').sum()  # in runs of other models
    differs = text.groupby(runs.model).transform('nunique') > 1
    for name in TRAINING & {*text}:
        differs[name] = text[name].nunique() > 1
    text = text.where(differs, '').assign(model=runs.model, folder=runs.folder.where(runs.seed == runs.folder, ''))
    order = sorted(text, key=lambda name: (name != 'model', name in TRAINING, -n_absent.get(name, 0)))
    return text[[name for name in order if (text[name] != '').any()]]


def given_labels(labels: str, folders) -> list[str]:
    """Return the names in 'A,B', one for each group. folders: the first one of each group."""
    names = [part.strip() for part in labels.split(',')]
    if len({*names}) < len(names) or len(names) != len(folders):
        raise UserError(f'labels is {labels!r}: expected {len(folders)} different names, separated by commas, for '
                        + '; '.join(folders))
    return names


def setting_label(name: str, value) -> str:
    """Format a setting for a label: 'lr=0.0013', 'tokens=2.5M', 'data=fineweb_edu'."""
    if name == 'model':
        return value
    text = short_number(value) if isinstance(value, (int, float)) else Path(str(value)).name[:32]
    return f'{SHORT.get(name, name)}={text}'


def short_number(value: float) -> str:
    """Format a number for a label: '2.5M', '12345', '0.0001778'."""
    for unit, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
        if abs(value) >= unit:
            return f'{value / unit:.4g}{letter}'
    return f'{value:.4g}' if isinstance(value, float) else str(value)


# ---- statistics over seeds ----

def interval(values: pd.Series) -> pd.Series:
    """Return mean, low and high (95%, Student's t) and n of values, without NaN.

    low and high are NaN if all values are equal.
    """
    from scipy import stats
    values = values.dropna().astype(float)
    half = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1) if values.nunique() > 1 else np.nan
    mean = values.mean()
    return pd.Series({'mean': mean, 'low': mean - half, 'high': mean + half, 'n': len(values)})


def by_seed(runs: pd.DataFrame, value: str = 'loss') -> pd.DataFrame:
    """Return one value of all runs: a row for each seed, a column for each label."""
    return runs.pivot(index='seed', columns='label', values=value)[[*dict.fromkeys(runs.label)]]


def baseline(rows: pd.DataFrame, label: str) -> pd.DataFrame:
    """Return the rows of a label that others are compared with. UserError if there are none."""
    if label not in {*rows.label}:
        raise UserError(f'minus is {label!r}: expected one of {"; ".join(rows.label.unique())}')
    return rows[rows.label == label]


def relative(rows: pd.DataFrame, value: str, minus: str, at: str) -> pd.DataFrame:
    """Subtract a value of the label `minus`, of the same seed and at the same `at`."""
    first = baseline(rows, minus).set_index(['seed', at])[value].rename('first')
    rows = rows.join(first, on=['seed', at], how='inner')
    return rows.assign(**{value: rows[value] - rows['first']})


def averaged(rows: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """Return mean, lowest, highest and number of seeds of a value, for each group of rows."""
    groups = rows.groupby(by, sort=False)[value]
    return groups.agg(mean='mean', lowest='min', highest='max', seeds='size').reset_index()


def compared(runs: pd.DataFrame, value: str = 'loss', first: str | None = None) -> pd.DataFrame:
    """Return a row for each label: its `interval`, and `minus_...`, that of its gaps to `first`.

    Gaps are differences between runs of the same seed. first: a label; None: the first one.
    """
    values = by_seed(runs, value)
    gaps = values.sub(values[first or values.columns[0]], axis=0)
    return values.apply(interval).T.join(gaps.apply(interval).T.add_prefix('minus_'))


# ---- the logs ----

def log_table(log: list[dict]) -> pd.DataFrame:
    """Return a run's log as a table. Integers of more than 64 bits become floats."""
    table = pd.DataFrame(log)
    return table.astype(dict.fromkeys(table.select_dtypes(object), float))


def read_logs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each logged step: the logged values, costs, and the run's label and seed."""
    logs = []
    for _, run in runs.iterrows():
        if (log := log_table(read_log(run.folder))).empty:
            warn_once(f'left out: {run.folder}: nothing was logged')
        logs.append(log.assign(**run[['folder', 'label', 'seed', 'learning_rate', 'gpus', 'flops_per_token']]))
    log = pd.concat(logs, ignore_index=True)
    if 'val' not in log:
        raise UserError(f'{" ".join(runs.folder)}: no validation loss was logged')
    return log.assign(minutes=log.seconds / 60, gpu_hours=(log.gpus * log.seconds / 3600).where(log.gpus > 0),
                      flops=log.tokens * log.flops_per_token.astype(float))


def curve(log: pd.DataFrame, value: str = 'val', minus: str | None = None) -> pd.DataFrame:
    """Return mean, lowest, highest and number of seeds of a value, at steps that all seeds logged.

    minus: the label whose values are subtracted, seed by seed.
    """
    log = log.dropna(subset=value)
    if minus:
        log = relative(log, value, minus, 'tokens')
    seeds = log.groupby('label').seed.nunique()
    points = log.groupby(['label', 'tokens'], sort=False).agg(
        step=('step', 'first'), minutes=('minutes', 'mean'), gpu_hours=('gpu_hours', 'mean'), flops=('flops', 'first'),
        mean=(value, 'mean'), lowest=(value, 'min'), highest=(value, 'max'), seeds=('seed', 'nunique')).reset_index()
    return points[points.seeds == points.label.map(seeds)]


# ---- last values ----

def last_values(folder: str) -> dict[str, float]:
    """Return a run's last logged numbers and its latest scores of eval.py, {name: value}."""
    log = log_table(read_log(folder)).select_dtypes('number')
    found = {name: log[name].dropna().iloc[-1] for name in log if log[name].notna().any()}
    return found | evaluations(Path(folder) / 'eval.jsonl')


def evaluations(path: Path) -> dict[str, float]:
    """Read the latest scores of eval.jsonl as {'task metric': value}.

    Options that affect the score are appended to the key, and the step if training was unfinished.
    """
    def is_whole(record):
        parts = record.get('settings', {}), *record['results'].values()
        return (all(isinstance(part, dict) for part in parts) and is_number(record.get('step', 0))
                and is_number(record.get('of_steps') or 0))
    found = {}
    for record in read_lines(path, is_whole):
        step, given = record.get('step', 0), record.get('settings', {})
        unfinished = [f'step={step}'] * (step < (record.get('of_steps') or 0))
        for task, metrics in record['results'].items():
            is_text = task == 'lambada_first_token' or 'word_perplexity' in metrics
            of_task = VAL_OPTIONS if task == 'val' else TEXT_OPTIONS if is_text else TASK_OPTIONS
            options = [f'{key}={value}' for key, value in given.items()
                       if key in of_task and (value is False or value not in (None, 0))]
            found |= {' '.join([task, metric, *options, *unfinished]): value for metric, value in metrics.items()
                      if is_number(value)}
    return found
