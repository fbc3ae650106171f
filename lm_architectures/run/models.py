"""Models by name: files of this repository, files that the user names, and code stored in runs.

A name such as 'sps' stands for model_sps.py or papers/*/edits/sps.py, or for a file given to `add_file`.
Where `code` is a run folder, it stands for the copy in that folder. Nothing else is imported.
"""
import dataclasses
import difflib
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from lm_architectures.files import ROOT, UserError, first_line
from lm_architectures.settings import make_settings

STORED = 'code'  # folder of a run with copies of its model's file and of the files that it imports
SCRIPTS = {'train', 'eval', 'sample', 'prepare_fineweb', 'lm_architectures'}  # never part of a model
IMPORTS = re.compile(r'^( *)(?:from \.?(\w+) import|'
                     r'(?:from \. )?import (\w+)(?: as (\w+))?[ \t]*(?:#.*)?$)', re.MULTILINE)
ADDED = {}  # {name: path} of the model files that `add_file` made known


# ---- files ----

def known_models() -> dict[str, Path]:
    """Return {name: file} of the models of the repository, and those given to `add_file`."""
    files = {model_name(path): path for path in (*ROOT.glob('papers/*/edits/[a-z]*.py'), *ROOT.glob('model_*.py'))}
    return {name: path for name, path in files.items() if name.isidentifier()} | ADDED


def model_name(path) -> str:
    """Return the name of a model's file: 'sps' for 'folder/model_sps.py'."""
    return Path(path).stem.removeprefix('model_')


def add_file(path: str) -> str:
    """Make a model file known by its name, which is returned.

    Call it with what stands on the command line or in a config file, never with data of a run.
    """
    file, name = Path(os.path.abspath(Path(path).expanduser())), model_name(path)
    if not file.is_file():
        raise UserError(f'model is {path!r}: there is no such file in {Path.cwd()}')
    if file.parent.name == STORED and (file.parent.parent / 'config.json').exists():
        raise UserError(f'model is {path!r}, the copy in a run: use --code=run with that run')
    other = known_models().get(name)
    if other and not other.samefile(file) or not name.isidentifier():
        raise UserError(f'model is {path!r}, whose name {name!r} is '
                        + (f'that of {other}' if other else 'not a Python name') + ': rename the file')
    ADDED[name] = other or file  # the same file, perhaps by another path
    sys.path.append(str(file.parent))  # for what it imports from there
    return name


def given_model(model: str) -> str:
    """Return the name of a model that the user gave by name or by path."""
    if not isinstance(model, str):
        raise UserError(f'model is {model!r}: expected the name of a model or the path of its file')
    return add_file(model) if model.endswith('.py') else model


def find_file(name: str, code: str | None = None) -> Path:
    """Return the file of a model. code: a run folder whose copy is meant. UserError if unknown."""
    known, stored = known_models(), Path(code or '') / STORED / f'model_{name}.py'
    edits = [*ROOT.glob(f'papers/*/edits/{name}.py')] if name.isidentifier() else []
    if not code and edits and (ROOT / f'model_{name}.py').is_file():
        raise UserError(f'{edits[0].relative_to(ROOT)} has the name of model_{name}.py: rename it')
    if code and not stored.is_file():
        raise UserError(f'{code} has no copy of the code of its model, {stored}: leave out --code=run')
    if code or name in known:
        return stored if code else known[name]
    near = difflib.get_close_matches(name, known, 1, 0.4)
    nearest = f'did you mean {near[0]!r}? Otherwise ' if near else ''
    raise UserError(f'unknown model {name!r}: {nearest}give the path of its file with --model=PATH or, for a run that '
                    'you trust, use the copy in it with --code=run (train.py --resume, sample.py, eval.py, '
                    f'lm_architectures.hf.export). Models here: {", ".join(sorted(known))}')


def model_file(name: str, code: str | None = None) -> ModuleType:
    """Return the module of a model: see `find_file`. Imports it again after an edit."""
    path = find_file(name, code)
    if code:
        from lm_architectures.run.stored_code import import_copy
        return import_copy(path)
    texts = {str(file): text for file, text in code_of(name).values()}
    loaded = {key: module for key, module in [*sys.modules.items()] if getattr(module, '__file__', None) in texts}
    edited = {file for module in loaded.values() for file, text in getattr(module, '__texts__', {}).items()
              if texts.get(file, text) != text}
    for key, module in loaded.items():
        if edited and (key != 'attn_kernels' or module.__file__ in edited):
            Path(importlib.util.cache_from_source(module.__file__)).unlink(missing_ok=True)  # may be as old as the edit
            del sys.modules[key]
    try:
        return sys.modules.get(f'model_{name}') or import_file(f'model_{name}', path)
    finally:  # also for what a file imported that failed
        for module in [*sys.modules.values()]:
            if getattr(module, '__file__', None) in texts:
                module.__texts__ = texts


def import_file(name: str, path: Path) -> ModuleType:
    """Import a model's file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(path.read_bytes(), path, 'exec'), vars(module))  # never from a .pyc file
        if missing := [part for part in ('Config', 'Model') if not hasattr(module, part)]:
            raise UserError(f'{path} is not a model file: it has no {missing[0]}')
    except BaseException:
        del sys.modules[name]
        raise
    return module


# ---- code stored in runs ----

def code_of(name: str, code: str | None = None) -> dict[str, tuple[Path, str]]:
    """Return {name of a copy: (file, text)} of a model's file and the files that it imports.

    Those are in ROOT, or beside it, and imported by `from x import` or `import x` on a
    line of its own. In the texts, they import each other by relative imports, so that copies work
    as a package. code: see `find_file`. UserError if two files have the same name.
    """
    files, found = [find_file(name, code)], {}
    for path in files:
        def relative(match):
            indent, of, whole, alias = match.groups()
            folders = [path.parent] if code else [ROOT, path.parent]  # in the order of sys.path
            file = next(filter(Path.is_file, (folder / f'{of or whole}.py' for folder in folders)), None)
            if file is None or (of or whole) in {*SCRIPTS, *sys.stdlib_module_names}:
                return match[0]
            files.extend({file} - {*files})
            if of:
                return f'{indent}from .{copy_name(file)} import'
            alias = alias or whole
            return f'{indent}from . import {copy_name(file)}' + f' as {alias}' * (alias != copy_name(file))
        text = IMPORTS.sub(relative, path.read_text(encoding='utf-8'))
        if (other := found.get(f'{copy_name(path)}.py', (path,))[0]) != path:
            raise UserError(f'{other} and {path} would have the same name in a run: rename one of them')
        found[f'{copy_name(path)}.py'] = path, text
    return found


def copy_name(path: Path) -> str:
    """Return the name of a file's copy in a run."""
    return path.stem if path.name == 'attn_kernels.py' else f'model_{model_name(path)}'


def report_edits(record: dict, folder) -> list[str] | None:
    """Return the files of a run's model that differ from the run's copies; None without copies.

    Prints a line for each, with both paths.
    """
    stored = Path(folder) / STORED
    if record['code']:
        return []  # the copies are used
    if not stored.is_dir():
        return None
    from lm_architectures.run.stored_code import edited_files
    return edited_files(code_of(record['model']), stored)


# ---- configs and models ----

def make_config(name: str, values: dict, code: str | None = None):
    """Return a model file's Config with these values. UserError for invalid values or defaults."""
    Config, where = model_file(name, code).Config, f'for model {name!r}'
    config = make_settings(Config, values, where)
    make_settings(Config, json.loads(json.dumps(dataclasses.asdict(config))), where)  # as config.json will be read
    known = {f.name for f in dataclasses.fields(Config)}
    for attribute in ('may_change', 'defining', 'own', 'shared'):
        names = getattr(Config, attribute, ())
        if not isinstance(names, tuple) or not known.issuperset(names):
            raise UserError(f'Config.{attribute} of model {name!r} is {names!r}: expected a tuple of names of settings')
    return config


def saved_config(record: dict, folder):
    """Return the model Config in a run's config.json (`record`). Reports code that was edited."""
    report_edits(record, folder)
    Config = model_file(record['model'], record['code']).Config
    return make_settings(Config, record['model_config'], f'in {folder}/config.json')


def portable_config(record: dict, folder):
    """Return a run's `saved_config`, with defaults for kernels, which another machine may lack."""
    config = saved_config(record, folder)
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    for name in getattr(config, 'may_change', ()):
        setattr(config, name, defaults[name])
    return config


@contextmanager
def model_errors(name: str) -> Iterator[None]:
    """Turn a ValueError that a model raises on purpose into a UserError. Others are bugs."""
    try:
        yield
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not last.line.startswith('raise ') or 'site-packages' in last.filename:
            raise
        raise UserError(f'model {name!r} cannot run here: {error}')


def meta_model(name: str, config, code: str | None = None) -> torch.nn.Module:
    """Return a model on the meta device, for names, shapes, costs. UserError if impossible."""
    try:
        with torch.device('meta'), model_errors(name):
            return model_file(name, code).Model(config)
    except (RuntimeError, TypeError) as error:
        if not any(word in str(error).lower() for word in ('overflow', 'meta tensor')):
            raise
        raise UserError(f'model {name!r} is too large, or its __init__ reads a value from a tensor, which fails on the '
                        f'meta device: {first_line(error)}')


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters, counting tied ones once."""
    return sum(p.numel() for p in model.parameters())
