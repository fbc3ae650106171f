"""Settings of the scripts: dataclasses filled from defaults, a config file and the command line.

A training run's settings are `train.Settings` and the `Config` of the chosen model file. A config
file consists of plain Python assignments; `--key=value` overrides it. Unknown names, wrong types
and values outside a setting's `Literal` choices are errors.
"""
import ast
import dataclasses
import difflib
import inspect
import math
import os
import re
import reprlib
import runpy
import sys
import types
import typing
from collections.abc import Callable

from lm_architectures.files import ROOT, UserError, first_line

LARGEST = 2 ** 53  # largest number in a setting: integers up to here are exact as floats and in JSON


class Text(str):
    """A command-line value that is not yet converted to the type of its setting."""


# ---- the command line and the config file ----

def load_settings(Settings: type, argv: list[str] | None, config_of: Callable | None = None) -> tuple:
    """Parse a command line: (settings, positional arguments, {name: value} that the user gave).

    Settings: a dataclass. argv None: the process's arguments. With config_of, one positional
    argument is a config file, and the fields of config_of(settings.model), the model's Config, are
    settings too, returned only in the dict. Arguments after `--` are positional. `--help` prints
    all settings and exits. Raises UserError for an unknown name, with suggestions.
    """
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index('--') if '--' in argv else len(argv)
    argv, positional = argv[:end], argv[end + 1:]
    positional = [arg for arg in argv if not arg.startswith('--') and arg != '-h'] + positional
    given = {name: text if text is True else Text(text) for name, text in options_of(argv).items() if name != 'help'}
    where = dict.fromkeys(given, 'on the command line')
    if config_of and positional:
        from_file = settings_of_file(positional, argv, given, Settings, config_of)
        given, where = from_file | given, dict.fromkeys(from_file, f'in {positional[0]}') | where
    own = {f.name: f for f in dataclasses.fields(Settings)}
    classes = [Settings, config_of(given.get('model', own['model'].default))] if config_of else [Settings]
    if {'-h', '--help'} & set(argv):
        print_help(*classes)
        sys.exit(0)
    types_of = {name: kind for cls in classes for name, kind in typing.get_type_hints(cls).items()}
    for name in given:
        if name not in types_of:
            near = difflib.get_close_matches(name, types_of)
            hint = f'did you mean {" or ".join(map(repr, near))}?' if near else 'run with --help for the list'
            raise UserError(f'unknown setting {name!r} {where[name]}: {hint}')
        given[name] = typed(name, given[name], types_of[name], where[name])
    return Settings(**{name: value for name, value in given.items() if name in own}), positional, given


def settings_of_file(positional: list[str], argv: list[str], given: dict, Settings: type, config_of: Callable) -> dict:
    """Return the settings in the config file, the one positional argument. UserError for several.

    If the command line names another model, those that only the file's model has are left out.
    """
    if len(positional) > 1:
        spaced = [f': write {name}={text}' for name, text in zip(argv, argv[1:])
                  if re.fullmatch(r'--\w+', name) and text in positional]
        raise UserError('expected one config file and overrides as --key=value, got '
                        + ' '.join(positional) + ''.join(spaced[:1]))
    found = read_config_file(positional[0])
    if 'model' in given and 'model' in found:
        old, new = (typing.get_type_hints(config_of(values['model'])) for values in (found, given))
        for name in old.keys() - new.keys() - typing.get_type_hints(Settings).keys():
            found.pop(name, None)
    return found


def options_of(argv: list[str]) -> dict[str, str | bool]:
    """Return {name: text} of the options, True for one without =. Expands ~/, as shells do not."""
    options = [arg[2:].partition('=') for arg in argv if arg.startswith('--')]
    return {name: (os.path.expanduser(text) if text.startswith('~/') else text) if equals else True
            for name, equals, text in options}


def read_config_file(path: str) -> dict:
    """Return the assignments of a config file: no modules, functions or names starting with _."""
    if os.path.isfile(f'{path}/config.json'):
        raise UserError(f'{path} is a run folder, not a config file: to continue it, use --out_dir={path} --resume')
    if not os.path.isfile(path):
        known = sorted(os.path.relpath(p) for p in (ROOT / 'config').rglob('[a-z]*.py'))
        near = difflib.get_close_matches(path, known, 3, 0.4) or [os.path.relpath(ROOT / 'config/quickstart.py')]
        raise UserError(f'there is no config file {path}: did you mean {" or ".join(near)}?')
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise UserError(f'config file {path} does not run: {type(error).__name__}: {first_line(error)}')
    return {name: value for name, value in names.items()
            if not (name.startswith('_') or callable(value) or isinstance(value, types.ModuleType))}


# ---- the type of a setting ----

def kinds(annotation) -> tuple[list[type], list, object]:
    """Return what a setting allows: (types, values of its Literals, its tuple's elements or None).

    Of `tuple[int, ...] | None` these are [NoneType], [] and int.
    """
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    allowed, choices, element = [], [], None
    for part in parts:
        if typing.get_origin(part) is typing.Literal:
            choices += typing.get_args(part)
        elif typing.get_origin(part) is tuple:
            element, *rest = typing.get_args(part)
            if rest != [...]:
                raise UserError(f'a setting has the type {annotation}: expected tuple[X, ...]')
        else:
            allowed.append(part)
    return allowed, choices, element


def expected(annotation) -> str:
    """Describe choices and types: "'a', 'b' or None", 'int or None', 'int separated by commas'."""
    allowed, choices, element = kinds(annotation)
    names = [*map(repr, choices), *(kind.__name__.replace('NoneType', 'None') for kind in allowed)]
    if element is not None:
        names.insert(0, f'{expected(element)} separated by commas')
    return ', '.join(names[:-1]) + ' or ' * (len(names) > 1) + names[-1]


def typed(name: str, value, annotation, where: str):
    """Convert a value to the type of its setting. UserError if impossible.

    A whole float such as 20e9 is accepted as an int, and an int as a float. Text is parsed first:
    a tuple is written 1,2,4.
    """
    allowed, choices, element = kinds(annotation)
    if isinstance(value, Text):
        value = parsed(str(value), allowed, choices, element)
    if element is not None and type(value) in (tuple, list):
        return tuple(typed(name, part, element, where) for part in value)
    want, hint = expected(annotation), ''
    if type(value) in (int, float) and not -LARGEST <= value <= LARGEST:
        want = f'a number from {-LARGEST:.0e} to {LARGEST:.0e}'
    elif value == '' and {str, type(None)} <= {*allowed}:  # --init_from=$RUN with RUN unset, for example
        want = 'text or None'
    else:
        if float in allowed and type(value) is int:
            value = float(value)
        if int in allowed and type(value) is float and value.is_integer():
            value = int(value)
        if type(value) in allowed or any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        near = difflib.get_close_matches(str(value), map(str, choices), 1)
        hint = f'; did you mean {near[0]!r}?' if near else f'; write --{name}=VALUE' if value is True else ''
    raise UserError(f'{name} is {reprlib.repr(value)} {where}: expected {want}{hint}')


def parsed(text: str, allowed: list, choices: list, element):
    """Parse command-line text for a setting that `kinds` describes."""
    if text in choices or str in allowed and text not in ('None', "''", '""'):
        return text
    if element is not None and text.lower() != 'none':
        return tuple(Text(part.strip()) for part in text.strip('()[]').removesuffix(',').split(',') if text)
    try:
        return ast.literal_eval({'true': 'True', 'false': 'False', 'none': 'None'}.get(text, text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # last two: nested too deeply
        return text


# ---- dataclasses of settings ----

def make_settings(Settings: type, values: dict, where: str):
    """Return a dataclass of settings, or a model's Config, with these values and defaults.

    Raises UserError for unknown names and invalid values; its message contains `where`.
    """
    types_of = typing.get_type_hints(Settings)
    if unknown := sorted(values.keys() - types_of.keys()):
        raise UserError(f'unknown settings {where}: {file_of(Settings)} has no {", ".join(unknown)}')
    values = {name: typed(name, value, types_of[name], where) for name, value in values.items()}
    try:
        return Settings(**values)
    except (ValueError, ZeroDivisionError) as error:
        raise (type(error) if isinstance(error, UserError) else UserError)(f'{error} ({where})')


def file_of(cls: type) -> str:
    """Return the name of the file that defines a class, also of a script, which is `__main__`."""
    return os.path.basename(inspect.getfile(cls))


def check_ranges(settings, **ranges: float | tuple) -> None:
    """Raise UserError for a number below its least value, or outside (low, high). None is valid.

    Call it in __post_init__ of a settings dataclass. Numbers that it does not name may be negative.
    """
    for name, bounds in ranges.items():
        value, (low, high) = getattr(settings, name), bounds if isinstance(bounds, tuple) else (bounds, math.inf)
        if value is not None and not low <= value <= high:
            raise UserError(f'{name} is {value}: expected '
                            + (f'{low} to {high}' if high < math.inf else f'at least {low}'))


def print_help(*classes: type) -> None:
    """Print each setting of a script and model with its type, default and source comment."""
    print((inspect.getmodule(classes[0]).__doc__ or '').strip())  # none under python -OO
    for cls, title in zip(classes, ('settings and their defaults', 'settings of the model')):
        print(f'\n{title} ({file_of(cls)}):')
        source = ''.join(inspect.getsource(c) for c in cls.__mro__[-2::-1])  # base classes first
        comments = dict(re.findall(r'^    (\w+): .*?  # (.*)$', source, re.M))
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            print(f'  --{f.name}={f.default!r}  ({expected(hints[f.name])})\n        {comments.get(f.name, "")}')
