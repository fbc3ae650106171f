"""Models by name: files of this repository, files that the user names, and code stored in runs.

A name such as 'sps' stands for model_sps.py or edits/sps.py, or for a file given to `add_file`.
The path of a copy in a run's folder code/ can take the place of a name. Nothing else is imported.
"""
import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import json
import re
import sys
import tokenize
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from attn_kernels import digest
from common.files import ROOT, UserError, first_line, warn_once, write_file
from common.settings import make_settings

IMPORTS = re.compile(r'^from \.?(attn_kernels|model_\w+) import', re.MULTILINE)
STORED = 'code'  # folder of a run with its model file and what that imports of this repository
ADDED = {}  # {name: path} of the model files that `add_file` made known


# ---- files ----

def known_models() -> dict[str, Path]:
    """Return {name: file} of the models of the repository, and those given to `add_file`."""
    files = (*ROOT.glob('edits/[a-z]*.py'), *ROOT.glob('model_*.py'))
    return {model_name(path): path for path in sorted(files)} | ADDED


def model_name(model) -> str:
    """Return the name of a model: 'sps' for 'sps', 'model_sps.py' and 'folder/model_sps.py'."""
    return Path(model).name.removesuffix('.py').removeprefix('model_')


def add_file(path: str | None) -> str | None:
    """Make a model file known by its name, which is returned. None: do nothing.

    Call it with what stands on the command line or in a config file, never with data of a run.
    """
    if path is None:
        return None
    file, name = Path(path).resolve(), model_name(path)
    if file.suffix != '.py' or not file.is_file():
        raise UserError(f'model is {path!r}: expected the path of a model file, such as folder/model_mine.py')
    if is_copy(file):
        return str(file)
    other = known_models().get(name)
    if other and other.resolve() != file or not name.isidentifier():
        raise UserError(f'model is {path!r}, whose name {name!r} is '
                        + (f'that of {other}' if other else 'not a Python name') + ': rename the file')
    ADDED[name] = file
    return name


def is_copy(path: Path) -> bool:
    """Return True for the path of a model's copy in a run folder."""
    return path.parent.name == STORED and path.name == f'model_{model_name(path)}.py'


def find_file(model: str) -> Path:
    """Return the file of a model, by name or as the path of a run's copy. UserError if unknown."""
    known = known_models()
    if model in known or is_copy(Path(model)):
        return known.get(model, Path(model))
    near = difflib.get_close_matches(str(model), known, 1, 0.4)
    hint = f'did you mean {near[0]!r}?' if near else f'expected one of {", ".join(sorted(known))}'
    raise UserError(f'unknown model {model!r}: {hint} (files model_NAME.py). Name another file with --model=PATH; '
                    'for a run that you trust, --code=run uses the copy in its folder')


def model_file(model: str) -> ModuleType:
    """Return the module of a model: see `find_file`."""
    path, name = find_file(model), f'model_{model_name(model)}'
    if not is_copy(path):
        return sys.modules.get(name) or import_file(name, path)
    package = f'code_{hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:8]}'
    if package not in sys.modules:
        module = sys.modules[package] = ModuleType(package)
        module.__path__ = [str(path.parent)]
    try:
        return importlib.import_module(f'{package}.{name}')
    except Exception as error:
        raise UserError(f'{path} cannot be imported ({type(error).__name__}: {first_line(error)}): without --code=run, '
                        f'the model file of the repository is used')


def import_file(name: str, path: Path) -> ModuleType:
    """Import a file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# ---- code stored in runs ----

def code_of(model: str) -> dict[Path, str]:
    """Return {file: text} of a model's file and the files of its folder or ROOT that it imports.

    In the texts, they import each other by relative imports, so that copies work as a package.
    """
    files, found = [find_file(model)], {}
    for path in files:
        code = path.read_text(encoding='utf-8')
        root = path.parent if path.parent.name == STORED else ROOT
        files += {root / f'{name}.py' for name in IMPORTS.findall(code)} - {*files}
        found[path] = IMPORTS.sub(r'from .\1 import', code)
    return found


def copy_code(model: str, folder: Path) -> None:
    """Write `code_of` to a folder, the model's file as model_NAME.py."""
    for path, code in code_of(model).items():
        write_file(folder / copy_name(path), code.encode())


def copy_name(path: Path) -> str:
    return path.name if path.name == 'attn_kernels.py' else f'model_{model_name(path)}.py'


@functools.cache
def edited_files(model: str, folder: str) -> list[str]:
    """Return the files of `code_of` that differ from the run's copies. Comments do not count.

    Prints a line with the paths of both.
    """
    edited, stored = [], Path(folder) / STORED
    for path, code in code_of(model).items() if stored.is_dir() else ():
        copy = stored / copy_name(path)
        old = copy.read_text(encoding='utf-8', errors='replace') if copy.is_file() else ''
        if old != code and code_digest(old) != code_digest(code):
            edited.append(str(path))
            warn_once(f'{path} has changed since this run was trained with {copy}: --code=run uses that copy')
    return edited


def code_digest(text: str) -> str:
    """Return the `digest` of a text, or the text if it is not Python."""
    try:
        return digest(text)
    except (SyntaxError, tokenize.TokenError):
        return text


# ---- configs and models ----

def make_config(model: str, values: dict):
    """Return a model file's Config with these values. UserError for invalid values or defaults."""
    Config, where = model_file(model).Config, f'for model {model_name(model)!r}'
    config = make_settings(Config, values, where)
    make_settings(Config, json.loads(json.dumps(dataclasses.asdict(config))), where)  # as config.json will be read
    return config


def saved_config(record: dict, folder):
    """Return the model Config in a run's config.json (`record`). Reports code that was edited."""
    edited_files(record['model'], str(folder))
    return make_settings(model_file(record['model']).Config, record['model_config'], f'in {folder}/config.json')


def portable_config(record: dict, folder):
    """Return a run's `saved_config`, with defaults for kernels, which another machine may lack."""
    config = saved_config(record, folder)
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    for name in getattr(config, 'may_change', ()):
        setattr(config, name, defaults[name])
    return config


@contextmanager
def model_errors(model: str) -> Iterator[None]:
    """Turn a ValueError that a model raises on purpose into a UserError. Others are bugs."""
    try:
        yield
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if not last.line.startswith('raise ') or 'site-packages' in last.filename:
            raise
        raise UserError(f'model {model_name(model)!r} cannot run here: {error}')


def meta_model(model: str, config) -> torch.nn.Module:
    """Return a model on the meta device, for names, shapes, costs. UserError if impossible."""
    try:
        with torch.device('meta'), model_errors(model):
            return model_file(model).Model(config)
    except (RuntimeError, TypeError) as error:
        if not any(word in str(error).lower() for word in ('overflow', 'meta tensor')):
            raise
        raise UserError(f'model {model_name(model)!r} is too large, or its __init__ reads a value from a tensor, which '
                        f'fails on the meta device: {first_line(error)}')


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters, counting tied ones once."""
    return sum(p.numel() for p in model.parameters())
