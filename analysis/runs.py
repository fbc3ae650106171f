"""Run folders for figures and tables: one `Run` each, grouped by settings, averaged over seeds."""
import dataclasses
import hashlib
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from lm_architectures.data.text.shards import Data
from lm_architectures.files import UserError, command, is_number, printable, read_lines, warn_once
from lm_architectures.run.continuing import MAY_CHANGE, may_change
from lm_architectures.run.folders import read_log, read_run
from lm_architectures.run.models import STORED, count_parameters, meta_model, portable_config, saved_config
from lm_architectures.run.stored_code import code_digest
from lm_architectures.settings import make_settings
from train import Settings as TrainSettings

# settings that are ignored when runs are grouped and labeled
IGNORED = MAY_CHANGE - {'data'} | {'seed', 'extend', 'model', 'vocab_size', 'n_ids', 'eos_id'}
SHORT = {'learning_rate': 'lr', 'max_tokens': 'tokens'}  # names in labels
SAME_SIZE = 1.1  # models within this ratio of parameter counts are the same size
VAL_OPTIONS = 'data', 'val_tokens', 'max_length'  # options of eval.py that affect 'val'
TEXT_OPTIONS = 'limit', 'bos', 'max_length'  # those that affect a corpus
TASK_OPTIONS = 'num_fewshot', *TEXT_OPTIONS  # those that affect a task of lm-eval


# ---- one run ----

class Run:
    """A run folder. Its log and model are read when they are first used.

    code: 'run' for the model's code as stored in the run, None for the current code.
    """

    def __init__(self, folder, code: str | None = None):
        self.folder, self.code = str(folder), code
        self.record = read_run(folder, code)

    def __str__(self) -> str:
        return self.folder

    @cached_property
    def log(self) -> list[dict]:
        return read_log(self.folder)

    @cached_property
    def settings(self) -> TrainSettings:
        """Training settings."""
        return make_settings(TrainSettings, self.record['settings'], f'in {self}/config.json')

    @cached_property
    def config(self):
        """Config of the model."""
        return saved_config(self.record, self.folder)

    def model_settings(self) -> dict:
        """Return the model's settings. Those that it did not have yet have their defaults."""
        try:
            return dataclasses.asdict(self.config)
        except UserError:  # the model file may be gone
            return self.record['model_config']

    @cached_property
    def code_digest(self) -> str:
        """Digest of the run's copy of its model's code, without attn_kernels.py."""
        files = sorted(Path(self.folder).glob(f'{STORED}/model_*.py'))
        text = code_digest('\n'.join(path.read_text(errors='replace') for path in files))
        return hashlib.sha256(text.encode()).hexdigest()[:6] if files else 'none'

    @cached_property
    def model(self):
        """Model on the meta device."""
        return meta_model(self.record['model'], portable_config(self.record, self.folder), self.record['code'])

    @property
    def parameters(self) -> int:
        """Number of parameters. Tied weights count once."""
        return count_parameters(self.model)

    @cached_property
    def flops_per_token(self) -> float | None:
        """Matmul FLOPs per training token, None if the model cannot compute them."""
        try:
            return self.model.flops_per_token(self.record['settings']['block_size'])
        except Exception:  # the model file was edited since, or has no flops_per_token
            return None

    def logged(self, key: str) -> list[float]:
        """Return all finite values of a key in the log."""
        return [record[key] for record in self.log if is_number(record.get(key))]

    def median(self, key: str) -> float | None:
        """Return the median of a logged value, or None if it was never logged."""
        values = self.logged(key)
        return statistics.median(values) if values else None

    def final_loss(self) -> float:
        """Return the final validation loss in nats per token, or raise UserError if unfinished."""
        evaluated = [record for record in self.log if is_number(record.get('val'))]
        if not evaluated:
            raise UserError(f'{self}: no validation loss was logged')
        tokens, planned = evaluated[-1]['tokens'], self.settings.max_tokens
        if tokens < planned:
            raise UserError(f'{self} was last evaluated at {tokens:,} of {planned:,} tokens: finish training it with '
                            + command('train.py', f'--out_dir={self}', '--resume'))
        return evaluated[-1]['val']

    def evaluations(self) -> dict[str, float]:
        """Return the latest scores by eval.py."""
        return evaluations(Path(self.folder) / 'eval.jsonl')


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
        step, given = record.get('step', 0), {key: value for key, value in record.get('settings', {}).items()
                                              if value is False or value not in (None, 0)}
        unfinished = [f'step={step}'] * (step < (record.get('of_steps') or 0))
        for task, metrics in record['results'].items():
            is_text = task == 'lambada_first_token' or 'word_perplexity' in metrics
            of_task = VAL_OPTIONS if task == 'val' else TEXT_OPTIONS if is_text else TASK_OPTIONS
            options = [f'{key}={value}' for key, value in given.items() if key in of_task]
            found |= {' '.join([task, metric, *options, *unfinished]): value for metric, value in metrics.items()
                      if is_number(value)}
    return found


# ---- groups of runs and their labels ----

def differences(runs: list[Run], ignored: Set[str] = frozenset()) -> dict[Run, dict]:
    """Return {run: {'model': name, setting: value}}, with the settings that differ.

    Model settings and code are compared among runs of one model, training settings among all runs.
    Imported runs have no seed, so each differs from the others by its folder.
    """
    found, values = {}, {run: {**run.record, 'model_config': run.model_settings()} for run in runs}
    for run in runs:
        skipped = IGNORED | ignored
        with suppress(UserError):  # the model file may be gone
            skipped |= may_change(run.record) - {'data'}
        found[run] = {'model': run.record['model']}
        alike = [other for other in runs if other.record['model'] == run.record['model']]
        for part, others in (('model_config', alike), ('settings', runs)):
            found[run] |= {key: value for key, value in values[run][part].items() if key not in skipped
                           and any(values[other][part].get(key, value) != value for other in others)}
        if 'edit' not in skipped and any(other.code_digest != run.code_digest for other in alike):
            found[run]['edit'] = run.code_digest
        if 'seed' not in run.record['settings']:
            found[run]['folder'] = run.folder
    return found


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


def named(keys: Iterable, labels: str | None) -> dict:
    """Return {key: label}. labels: 'A,B', one for each key; None: the names of the folders."""
    keys = list(keys)
    if labels is None:
        return {key: Path(key.folder).name for key in keys}
    names = [label.strip() for label in labels.split(',')]
    if len(set(names)) < len(names) or len(names) != len(keys):
        raise UserError(f'labels is {labels!r}: expected {len(keys)} different names, separated by commas, for '
                        + '; '.join(map(str, keys)))
    return dict(zip(keys, names))


def group(runs: list[Run], ignored: Set[str] = frozenset(), labels: str | None = None) -> dict[str, list[Run]]:
    """Group runs that differ only in the seed, or in `ignored` settings: {label: runs}.

    A label names the model if they differ, then as few settings as identify the groups. labels: see
    `figures.Settings`.
    """
    settings = differences(runs, ignored)
    members = list(group_by(runs, lambda run: repr(settings[run])).values())
    configs = [{key: setting_label(key, value) for key, value in settings[own[0]].items()} for own in members]
    parts = [()] * len(configs)
    keys = dict.fromkeys(key for config in configs for key in config if key != 'model')
    # settings missing in some groups come first: they belong to the model, not to training
    for key in ('model', *sorted(keys, key=lambda key: sum(key in config for config in configs))):
        longer = [part + ((config[key],) if key in config else ()) for part, config in zip(parts, configs)]
        if len(set(longer)) > len(set(parts)):
            parts = longer
    names = [printable(', '.join(part) or config['model']) for part, config in zip(parts, configs)]
    if len(set(names)) < len(names):  # different values may look the same when shortened
        names = [f'{name}, {own[0]}' for name, own in zip(names, members)]
    if labels:
        names = named(names, labels).values()
    return dict(zip(names, members))


def group_by(items: Iterable, key_of: Callable) -> dict:
    """Return {key: items with key_of(item) == key}, in the order of the items."""
    found = {}
    for item in items:
        found.setdefault(key_of(item), []).append(item)
    return found


def map_readable(items: Iterable, function: Callable) -> dict:
    """Return {item: function(item)}, skipping items that raise UserError or OSError.

    Errors are printed to stderr. If every item fails, the first error is raised.
    """
    found, errors = {}, []
    for item in items:
        try:
            found[item] = function(item)
        except (UserError, OSError) as error:
            errors.append(error)
    if not found:
        raise errors[0]
    for error in errors:
        warn_once(f'left out: {error}')
    return found


def curves_of(runs: list[Run], curve_of: Callable, ignored: Set[str] = frozenset(), labels: str | None = None) -> dict:
    """Return {label: curve_of(runs of that label)}, with runs grouped and labeled by `group`.

    Prints settings that differ but are not in the labels, and why it skips a run.
    """
    groups, settings = group(runs, ignored, labels), differences(runs, ignored)
    curves = map_readable(groups, lambda label: curve_of(groups[label]))
    for label in curves if labels is None else []:
        texts = [setting_label(key, value) for key, value in settings[groups[label][0]].items() if key != 'model']
        if hidden := set(texts) - set(label.split(', ')):
            print(f'{label}: also {", ".join(sorted(hidden))}')
    warn_of_other_data([run for label in curves for run in groups[label]])
    return curves


def warn_of_other_data(runs: list[Run]) -> None:
    if len({run.record['data']['sha256'] for run in runs}) > 1:
        warn_once('these runs have different data: their losses in nats per token cannot be compared')


def curves_by_size(runs: list[Run], curve_of: Callable, ignored: Set[str] = frozenset(),
                   labels: str | None = None) -> dict:
    """Return {size: {label: curve_of(runs of that size and label)}}, sizes ascending: '131.1M'.

    Labels are the same at all sizes. The first one is the baseline. Sizes without it, or with it
    alone, are skipped with a message.
    """
    parameters, sizes = map_readable(runs, lambda run: run.parameters), {}
    for run in sorted(parameters, key=parameters.get):
        if not sizes or parameters[run] > SAME_SIZE * max(sizes):
            sizes[parameters[run]] = []
        sizes[max(sizes)].append(run)

    ordered = sorted(parameters, key=runs.index)
    groups = group(ordered, ignored | settings_of_size(sizes.values(), ignored), labels)
    baseline = next(iter(groups))
    warn_of_other_data(ordered)

    def compared(n):
        here = {label: [run for run in own if run in sizes[n]] for label, own in groups.items()}
        curves = map_readable(filter(here.get, here), lambda label: curve_of(here[label]))
        if baseline not in curves or len(curves) < 2:
            raise UserError(f'the runs of {short_number(n)} parameters are {"; ".join(curves)}: expected {baseline}, '
                            'the baseline, and others')
        return {label: curves[label] for label in groups if label in curves}
    return {short_number(n): curves for n, curves in map_readable(sizes, compared).items()}


def settings_of_size(sizes: Iterable[list[Run]], ignored: Set[str]) -> set[str]:
    """Return the names of what all runs of a model share at each size, such as n_layer."""
    differing = {key for runs in sizes for own in group_by(runs, lambda run: run.record['model']).values()
                 for values in differences(own, ignored).values() for key in values}
    known = {key for runs in sizes for run in runs for key in run.model_settings() | run.record['settings']}
    return (known | {'edit'}) - differing


# ---- seeds ----

def one_per_seed(runs: list[Run], value_of: Callable) -> dict:
    """Return {run: value_of(run)} of the readable runs, of runs that differ only in the seed."""
    seeds = {}

    def checked_value(run):
        value, seed = value_of(run), run.record['settings'].get('seed')
        if seed in seeds:
            raise UserError(f'{run} duplicates {seeds[seed]}: all settings are equal, including the seed ({seed})')
        seeds[seed] = run
        return value
    return map_readable(runs, checked_value)


def finished(runs: list[Run]) -> list[Run]:
    """Return the finished runs, one per seed, of runs that differ only in the seed.

    Returns all runs if none has a training log (imported models).
    """
    return list(one_per_seed(runs, Run.final_loss)) if any(run.log for run in runs) else runs


def spread(values: Sequence[float]) -> dict:
    """Return the mean, lowest and highest of one value per seed, and the number of seeds."""
    return {'mean': statistics.mean(values), 'lowest': min(values), 'highest': max(values), 'seeds': len(values)}


def curve(runs: list[Run], key: str = 'val', minus: dict | None = None) -> list[dict]:
    """Return points {'step', 'tokens', 'minutes', 'gpu_hours', 'flops', **spread} of a value.

    Only steps that every run logged are included. minus: {seed: run whose value is subtracted}.
    gpu_hours is None unless all runs used GPUs. flops is of the first run, None if unknown.
    """
    found = one_per_seed(runs, lambda run: records_of(run, key, minus))
    runs, logs = list(found), list(found.values())
    versions, flops, points = [run.record['versions'] for run in runs], runs[0].flops_per_token, []
    gpus = [v.get('processes', 1) if str(v.get('device')).startswith('cuda') else 0 for v in versions]
    for tokens in sorted(set.intersection(*map(set, logs))):
        values = [log[tokens][key] for log in logs]
        seconds = [log[tokens]['seconds'] for log in logs]
        gpu_hours = statistics.mean(n * s / 3600 for n, s in zip(gpus, seconds)) if all(gpus) else None
        points.append({'step': logs[0][tokens]['step'], 'tokens': tokens, 'minutes': statistics.mean(seconds) / 60,
                       'gpu_hours': gpu_hours, 'flops': flops and flops * tokens} | spread(values))
    if not points:
        raise UserError(f'{" ".join(map(str, runs))}: no {key} that all of these runs logged at the same step')
    return points


def records_of(run: Run, key: str, minus: dict | None = None) -> dict[int, dict]:
    """Return {tokens: log record} of the records with `key`. minus: see `curve`."""
    records = {record['tokens']: record for record in run.log if is_number(record.get(key))}
    if minus:
        if (seed := run.settings.seed) not in minus:
            raise UserError(f'{run} has seed {seed}: --minus has no run with that seed')
        others = records_of(minus[seed], key)
        records = {n: record | {key: record[key] - others[n][key]} for n, record in records.items() if n in others}
    return records


def holds_from(points: list[dict], holds: Callable) -> dict | None:
    """Return the first point from which holds(point) is true to the end, or None."""
    last = list(itertools.takewhile(holds, reversed(points)))
    return last[-1] if last else None


# ---- validation documents ----

def long_documents(data, least: int, most: int, n: int, seed: int | None = None) -> list:
    """Return n validation documents (int64 arrays) of at least `least` tokens, truncated to `most`.

    Both lengths include eos. The documents are the first ones, or a random sample if `seed` is
    given. Warns if there are fewer than n, raises UserError if there are none.
    """
    if not isinstance(data, Data):
        raise UserError(f'{data.folder} is a task and has no documents: give --data=FOLDER with text documents')
    ids = data.tokens('val', 0, data.splits['val']['tokens'])
    *documents, _ = np.split(ids, np.flatnonzero(ids == data.eos_id) + 1)  # each with its eos
    found = [document[:most] for document in documents if len(document) >= least]
    if not found:
        raise UserError(f'{data.folder} has no validation document of {least:,} tokens or more: give shorter lengths, '
                        'or --data=FOLDER with longer documents')
    if seed is not None:
        random.Random(seed).shuffle(found)
    if len(found) < n:
        warn_once(f'{data.folder} has {len(found):,} validation documents of at least {least:,} tokens, not {n:,}')
    return found[:n]
