"""Settings of the scripts: a dataclass each, whose values come from the defaults, a config file and the command line.

A training run's settings are `train.Settings` plus the `Config` of the chosen model file. A config file is plain Python
assignments; `--key=value` overrides it, and so does `--key value`. A name nobody knows is an error, in the file as on
the command line.

`load_settings` is what a script calls. `saved_settings` reads what an earlier run recorded, perhaps by older code.
"""
import ast
import dataclasses
import difflib
import inspect
import math
import os
import re
import runpy
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path

from common.files import ROOT, UserError, first_line

LARGEST = 2 ** 53  # number in a setting: up to here whole numbers are exact as floats and in JSON
EXAMPLES = [f'config/{name}.py' for name in ('quickstart', 'standard_xs', 'sps_xs', 'gpn_quick', 'gdn_quick')]
OTHER_NAMES = {  # what a setting is called in nanoGPT and in other repositories
    'lr': 'learning_rate', 'wd': 'weight_decay', 'max_iters': 'max_tokens', 'warmup_iters': 'warmup_tokens',
    'eval_iters': 'eval_tokens', 'dataset': 'data', 'd_model': 'n_embd', 'dim': 'n_embd', 'hidden_size': 'n_embd',
    'context_length': 'block_size', 'seq_len': 'block_size', 'max_length': 'max_new_tokens'}


class Text(str):
    """A value from the command line, still to be read as the type of its setting."""


def load_settings(Settings: type, argv: list[str] | None, config_of: Callable | None = None) -> tuple:
    """Reads a script's command line into (settings, positional arguments, {name: value} of what the user gave).

    Settings is a dataclass, argv None for the process's. With config_of, one positional argument is a config file, and
    the fields of the dataclass config_of(settings.model), a model's Config, are settings too; they are only in the
    returned dict. Raises UserError with the nearest valid names for an unknown one. `--help` prints all settings and
    exits.
    """
    given, where, positional, wants_help = _parse(join_values(sys.argv[1:] if argv is None else argv, Settings))
    if config_of and positional:
        path, *more = positional
        if more:
            raise UserError(f'one config file is expected, got {len(positional)}: {" ".join(positional)}. '
                            'Overrides are --key=value')
        from_file = read_config_file(path)
        given = {**from_file, **given}
        where = {**dict.fromkeys(from_file, f'in {path}'), **where}
    own = {f.name: f for f in dataclasses.fields(Settings)}
    types_of = typing.get_type_hints(Settings)
    Config = None
    if config_of:
        Config = config_of(str(given.get('model', own['model'].default)))
        types_of |= typing.get_type_hints(Config)
    if wants_help:
        print_help(Settings, Config)
        sys.exit(0)
    for name in given:
        if name not in types_of:
            near = difflib.get_close_matches(name, types_of, 3, 0.6)
            if OTHER_NAMES.get(name) in types_of:
                near = [OTHER_NAMES[name]]
            hint = f'did you mean {" or ".join(map(repr, near))}?' if near else 'run with --help for the list'
            raise UserError(f'unknown setting {name!r} {where[name]}: {hint}')
        given[name] = typed(name, given[name], types_of[name], where[name])
    return Settings(**{name: value for name, value in given.items() if name in own}), positional, given


def join_values(argv: list[str], Settings: type) -> list[str]:
    """A script's arguments with `--key value` written as `--key=value`.

    A boolean setting is a flag: after it only True or False is a value, all else stands for itself, as a prompt does.
    The settings of a model are not known here: after one of them a name in .py is a config file, all else is its value.
    """
    types_of = typing.get_type_hints(Settings)
    joined = []
    for arg in argv:
        name = joined[-1].removeprefix('--') if joined else ''
        is_open = joined and joined[-1].startswith('--') and '=' not in name and name != 'help'
        if name not in types_of:
            is_value = not arg.endswith('.py')
        else:
            is_value = bool not in _options(types_of[name]) or arg.lower() in ('true', 'false')
        if is_open and is_value and not arg.startswith('--'):
            joined[-1] += f'={arg}'
        else:
            joined.append(arg)
    return joined


def _options(annotation) -> tuple:
    """The types that a setting may have."""
    return typing.get_args(annotation) or (annotation,)


def _parse(argv):
    """({name: value}, {name: where it was given}, positional arguments, whether help is asked for)."""
    given, where, positional, wants_help = {}, {}, [], False
    for arg in argv:
        if arg in ('-h', '--help'):
            wants_help = True
        elif re.fullmatch('-[A-Za-z]', arg):
            raise UserError(f'unknown option {arg}: settings are --name=value, run with --help for the list')
        elif arg.startswith('--'):
            name, equals, text = arg[2:].partition('=')
            given[name] = Text(text) if equals else True
            where[name] = 'on the command line'
        else:
            positional.append(arg)
    return given, where, positional, wants_help


def read_config_file(path: str) -> dict:
    """The assignments of a config file as {name: value}.

    Modules, functions and names with a leading underscore are not settings.
    """
    if not os.path.isfile(path):
        files = (ROOT / 'config').rglob('*.py')
        known = sorted(str(p.relative_to(ROOT)) for p in files if p.name != '__init__.py')
        if os.path.isfile(f'{path}/config.json'):
            raise UserError(f'{path} is a run folder, no config file: go on with it with --out_dir={path} --resume')
        near = difflib.get_close_matches(path, known, 3, 0.4)
        hint = f'did you mean {" or ".join(near)}?' if near else f'expected one such as {", ".join(EXAMPLES)}'
        raise UserError(f'there is no config file {path}: {hint}')
    try:
        names = runpy.run_path(str(path))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        raise UserError(f'config file {path} does not run: {type(error).__name__}: {first_line(error)}')

    def is_setting(name, value):
        return not (name.startswith('_') or callable(value) or isinstance(value, types.ModuleType))
    return {name: value for name, value in names.items() if is_setting(name, value)}


def typed(name: str, value, annotation, where: str):
    """value as the type of its setting, or a UserError.

    20e9 may be an int and an int may be a float. What is on the command line is text, and read as the type needs it.
    """
    options = _options(annotation)
    if isinstance(value, Text):
        if not value and {str, type(None)} <= set(options):  # as --init_from=$RUN where RUN is not set
            raise UserError(f'setting {name!r} {where} is empty: expected text, or None for none')
        if str in options and value not in ('None', "''", '""'):
            return str(value)
        try:
            value = ast.literal_eval({'true': 'True', 'false': 'False', 'none': 'None'}.get(value, value))
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deeply
            value = str(value)
    if type(value) in (int, float) and not abs(value) <= LARGEST:
        raise UserError(f'{name} is {shown(value)} {where}: expected a number of at most {LARGEST:.0e}')
    for option in options:
        if option is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if option is float and type(value) is int:
            return float(value)
        if type(value) is option:
            return value
    if value is True and where == 'on the command line':
        raise UserError(f'--{name} needs a value: write --{name}=VALUE')
    wanted = ' or '.join('None' if o is type(None) else o.__name__ for o in options)
    raise UserError(f'setting {name!r} {where} is {shown(value)}, a {type(value).__name__}: expected {wanted}')


def shown(value) -> str:
    """The repr of a value that may be anything, short enough for a sentence."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python prints, or a class of the user's
        return '...'
    return text if len(text) <= 80 else f'{text[:80]}...'


def saved_settings(Settings: type, values: dict, path):
    """A dataclass of settings, or a model's Config, from the dict of a config.json at `path`.

    A run may be older than a setting: what is missing takes its default. So the default of a new setting must be what
    the code did before there was one. Raises UserError for a name that is unknown or a value that is wrong.
    """
    types_of = typing.get_type_hints(Settings)
    unknown = sorted(values.keys() - types_of.keys())
    if unknown:
        raise UserError(f'{path} has settings that {Path(inspect.getsourcefile(Settings)).name} does not know: '
                        f'{", ".join(unknown)}. Use the code that the run was made with')
    values = {name: typed(name, value, types_of[name], f'in {path}') for name, value in values.items()}
    try:
        return Settings(**values)
    except ValueError as error:
        raise UserError(f'{path}: {error}')


def check_ranges(settings, **ranges: tuple) -> None:
    """Raises UserError for a number outside its (low, high), both included; None is always inside.

    A dataclass of settings calls it in __post_init__, so that its numbers are right wherever they come from.
    """
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            expected = f'{low} to {high}' if high < math.inf else f'at least {low}'
            raise UserError(f'{name} is {value}: expected {expected}')


def print_help(Settings: type, ModelConfig: type | None = None) -> None:
    """Every setting with type, default and the comment beside it in the source."""
    print(inspect.getmodule(Settings).__doc__.strip() + '\n')
    sections = [(Settings, 'settings and their defaults, which a config may change')]
    if ModelConfig:
        sections.append((ModelConfig, f'model settings ({ModelConfig.__module__}.py)'))
    for cls, title in sections:
        print(f'{title}:')
        comments = dict(re.findall(r'^    (\w+): .*?  # (.*)$', inspect.getsource(cls), re.M))
        for f in dataclasses.fields(cls):
            kind = f.type.__name__ if isinstance(f.type, type) else str(f.type)
            print(f'  --{f.name}={f.default!r}  ({kind})\n        {comments.get(f.name, "")}')
