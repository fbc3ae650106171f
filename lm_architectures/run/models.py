"""Model files: found by name or path, imported as a package, and stored in runs.

A name such as 'sps' stands for model_sps.py or papers/*/edits/sps.py, or for a file given to
`add_file`. Where `code` is a run folder, it stands for the copy in that folder. The file and the
files that it imports, from its own folder or from the repository, are one dict, {module: (file,
text)}. It is imported as a package from memory, and written into runs and exports.
"""
import ast
import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import linecache
import os
import re
import symtable
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType

import torch

import attn_kernels
from lm_architectures.files import ROOT, UserError, first_line
from lm_architectures.settings import make_settings

STORED = 'code'  # folder of a run with its model's package
SCRIPTS = {'train', 'eval', 'sample', 'prepare_fineweb'}  # files of the repository that are no part of a model
LIBRARIES = {'scans', 'lm_architectures', *sys.stdlib_module_names}  # never files beside a model
KERNELS = decode_source(Path(attn_kernels.__file__).read_bytes())
ADDED = {}  # {name: path} of the model files that `add_file` made known
flat = lambda module: module.replace('.', '_')  # a module's name in a run, which has no packages: pkg_part
parse = functools.lru_cache(ast.parse)
COUNT = itertools.count(1)  # of the texts imported in this process


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
        raise UserError(f'model is {path!r}, but the name {name!r} is '
                        + (f'taken by {other}' if other else 'not a Python name') + ': rename the file')
    ADDED[name] = other or file  # the same file, perhaps by another path
    return name


def given_model(model: str) -> str:
    """Return the name of a model that the user gave by name or by path."""
    return add_file(model) if model.endswith('.py') else model


def find_file(name: str, code: str | None = None) -> Path:
    """Return the file of a model. code: a run folder whose copy is meant. UserError if unknown."""
    if code:
        stored = Path(code) / STORED / f'model_{name}.py'
        if not stored.is_file():
            raise UserError(f'{code} has no copy of the code of its model, {stored}: leave out --code=run')
        return stored
    known = known_models()
    edits = [*ROOT.glob(f'papers/*/edits/{name}.py')] if name.isidentifier() else []
    if edits and (ROOT / f'model_{name}.py').is_file():
        raise UserError(f'{edits[0].relative_to(ROOT)} has the name of model_{name}.py: rename it')
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1, 0.4)
    nearest = f'did you mean {near[0]!r}? Otherwise ' if near else ''
    raise UserError(f'unknown model {name!r}: {nearest}give the path of its file with --model=PATH or, for a run that '
                    'you trust, use the copy in it with --code=run (train.py --resume, sample.py, eval.py, '
                    f'lm_architectures.hf.export). Models here: {", ".join(sorted(known))}')


def code_folder(s) -> str | None:
    """Return the run whose copy of the code is trained, or None. Not s.init_from, the source."""
    return (s.out_dir if s.resume else s.extend) if s.code else None


# ---- packages ----

def code_of(name: str, code: str | None = None) -> dict[str, tuple[Path, str]]:
    """Return {module: (file, text)} of a model's file and the files that it imports, imports first.

    They are beside the model's file or in the repository. In the texts, they import each other by
    relative imports, `flat`. code: see `find_file`. UserError if two files have the same name.
    """
    path, found, seen = find_file(name, code), {}, {}
    folders = [path.parent] if code else [path.parent, ROOT]

    def add(module, file):
        if (other := seen.setdefault(flat(module), file)) != file:
            raise UserError(f'{file} and {other} would have the same name in a run: rename one of them')
        text, imported = relative_imports(module, file, folders)
        for its_module, its_file in imported.items():
            if seen.get(flat(its_module)) != its_file:
                add(its_module, its_file)
        found[flat(module)] = file, text
    add(f'model_{name}', path)
    return found


def find_module(module: str, folders: list[Path]) -> dict[str, Path]:
    """Return {module: file} of a module in `folders`, after its packages. Empty for a library."""
    for folder, end in itertools.product(folders, ('.py', '/__init__.py')):
        file, is_script = folder / f'{module.replace(".", "/")}{end}', module in SCRIPTS and folder == ROOT
        if file.is_file() and not is_script and module.partition('.')[0] not in LIBRARIES:
            return find_module(module.rpartition('.')[0], folders) | {module: file}
    return {}


def is_hidden(module: str, files: dict[str, Path]) -> bool:
    """Return True if a package gives a module's name to another thing: `from .norm import norm`."""
    package, _, name = module.rpartition('.')
    text = decode_source(files[package].read_bytes()) if package in files else ''
    symbols = symtable.symtable(text, package, 'exec').get_symbols()
    return any(x.get_name() == name and (x.is_imported() or x.is_assigned()) for x in symbols)


def relative_imports(module: str, path: Path, folders: list[Path]) -> tuple[str, dict[str, Path]]:
    """Return a module's text, with relative imports of the files in `folders`; {module: its file}.

        from x import y         ->  from .x import y, and `import x` is `from . import x`
        from pkg import part    ->  from . import pkg_part as part
        import pkg.part         ->  from . import pkg, pkg_part; pkg.part = pkg_part
        from scans import gdn   ->  from lm_architectures.scans import gdn

    Another form is a UserError. `scans` is the repository's folder, which is not in the package.
    """
    lines, files = decode_source(path.read_bytes()).split('\n'), {}
    package = module.split('.')[:None if path.name == '__init__.py' else -1]
    nodes = [node for node in ast.walk(parse('\n'.join(lines), path)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in sorted(nodes, key=lambda node: (node.lineno, -node.col_offset)):  # an edit moves what follows it
        line, source = lines[node.lineno - 1], ''
        before, statement, after = line[:node.col_offset], line[node.col_offset:], line[node.end_col_offset:]
        if isinstance(node, ast.ImportFrom):
            above = package[:len(package) + 1 - node.level] if node.level else []
            source = '.'.join([*above, node.module or '']).strip('.')
        names = {f'{source}.{alias.name}'.strip('.'): alias.asname or alias.name for alias in node.names}
        top = (source or [*names][0]).partition('.')[0]
        its_file = find_module(source, folders)
        parts = {name: found for name in names if (found := find_module(name, folders))}  # names of files
        if source and top != module.partition('.')[0]:  # inside of a package, its names are not defined yet
            parts = {name: found for name, found in parts.items() if not is_hidden(name, found)}
        if source and not parts and (its_file or top == 'scans'):
            where = f'.{flat(source)}' if its_file else f'lm_architectures.{source}'
            statement = re.sub(r'^from\s+[\w.]+', f'from {where}', statement)
            files |= its_file
        elif [*names] == ['scans']:
            statement = f'from lm_architectures {statement}'
        elif parts or top == 'scans':
            top = [*parts, top][0].partition('.')[0]
            # of `import pkg.part`, pkg needs a file, too
            if node.lineno < node.end_lineno or any(len(parts.get(x, ())) <= y.count('.') for x, y in names.items()):
                raise UserError(f'{path}, line {node.lineno}: write the import of {top} on a line of its own, as '
                                f'`from {top} import ...`, with files apart from other names')
            imported, attributes = [], ''
            for name, local in names.items():
                imported += [f'{flat(name)} as {local}'] if name != local else map(flat, parts[name])
                attributes += ''.join(f'; {x} = {flat(x)}' for x in parts[name]
                                      if name == local and '.' in x and not is_hidden(x, parts[name]))
                files |= parts[name]
            statement = f'from . import {", ".join(imported)}{attributes}{after}'
        lines[node.lineno - 1] = before + statement
    return '\n'.join(lines), files


def model_file(name: str, code: str | None = None) -> ModuleType:
    """Return the module of a model: see `find_file`. Imports it again after an edit."""
    files = code_of(name, code)
    package = f'model_{name}_{hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]}'
    if package not in sys.modules:
        try:
            import_package(package, files)
        except Exception as error:
            if not code:
                raise
            path, _ = files[f'model_{name}']
            raise UserError(f'{path} cannot be imported ({type(error).__name__}: {first_line(error)})')
    module = sys.modules[f'{package}.model_{name}']
    if missing := [part for part in ('Config', 'Model') if not hasattr(module, part)]:
        raise UserError(f'{files[f"model_{name}"][0]} is not a model file: it has no {missing[0]}')
    if not dataclasses.is_dataclass(module.Config):
        raise UserError(f'Config of model {name!r} is not a dataclass: write @dataclass above it')
    return module


def import_package(package: str, files: dict[str, tuple[Path, str]]) -> None:
    """Execute the texts of `code_of` as modules of a package, which is then in sys.modules.

    All models share attn_kernels and what it compiles, unless their copy differs. Each other text
    gets a file name of its own, under which tracebacks and `inspect` show what runs, even if the
    file was edited later. Debuggers resolve the name.
    """
    modules = {package: ModuleType(package), **{f'{package}.{name}': ModuleType(f'{package}.{name}') for name in files}}
    modules[package].__path__ = []  # of a package
    if 'attn_kernels' in files and files['attn_kernels'][1] == KERNELS:
        modules[f'{package}.attn_kernels'] = attn_kernels
    sys.modules.update(modules)
    try:
        for name, (path, text) in files.items():
            module = modules[f'{package}.{name}']
            if module is not attn_kernels:
                file = f'{path.parent}/{"./" * next(COUNT)}{path.name}'
                linecache.cache[file] = len(text), None, text.splitlines(True), file
                module.__file__, module.__package__ = file, package
                exec(compile(text, file, 'exec', dont_inherit=True), vars(module))
    except BaseException:
        for name in modules:
            sys.modules.pop(name, None)
        raise


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


@contextmanager
def model_errors(name: str) -> Iterator[None]:
    """Turn a ValueError that a model raises on purpose into a UserError. Others are bugs."""
    try:
        yield
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, UserError) or not last.line.startswith('raise ') or 'site-packages' in last.filename:
            raise
        raise UserError(f'model {name!r} cannot run here: {error}')


def check_forward(out) -> None:
    """Raise UserError unless a model's forward returned a dict of scalars that training can use."""
    parts = out if isinstance(out, dict) else {}
    wrong = {'loss', 'nll'} - parts.keys() or {k for k, x in parts.items() if not torch.is_tensor(x) or x.dim()}
    if wrong or not parts['loss'].requires_grad:
        raise UserError(f"forward returned a {type(out).__name__} with a wrong or missing {min(wrong or ['loss'])!r} "
                        "(docs/own_model.md): expected a dict of scalar tensors with 'nll' and 'loss', with a gradient")


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters, counting tied ones once."""
    return sum(p.numel() for p in model.parameters())


def describe(s, model, data) -> None:
    """Print the size and cost of a run. UserError for s.acceptance_prompts without drafting."""
    if s.acceptance_prompts and not getattr(model, 'longest_draft', 0):
        raise UserError(f'acceptance_prompts = {s.acceptance_prompts} measures drafting, but this model ({s.model}) '
                        'cannot draft for itself: use 0')
    flops = model.flops_per_token(s.block_size) if hasattr(model, 'flops_per_token') else None
    print(f'model {s.model}: {count_parameters(model):,} parameters, vocabulary {data.n_ids} ({data.tokenizer})')
    for name, (share, source) in data.sources.items():
        tokens = source.splits['train']['tokens']
        amount = f'{tokens:,} training tokens, {share * s.max_tokens / tokens:.2f} epochs' if tokens else None
        print(f'data {name}: {amount or "unlimited generated rows"}')
    print(f'{s.n_steps:,} steps of {s.batch_size} x {s.block_size} = {s.tokens_per_step:,} tokens'
          + (f', {flops / 1e6:,.1f} MFLOP per token' if flops else ''))
    constant_until = float(s.decay_start) if s.schedule == 'wsd' else s.max_tokens
    if s.warmup_tokens > constant_until:
        print(f'learning_rate = {s.learning_rate:g} is never reached: the warm-up takes {s.warmup_tokens:,} tokens, '
              f'but the decay begins, or the run ends, after {constant_until:,.0f}')
