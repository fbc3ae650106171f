"""Who imports whom: the house's arrows, read from the source. analysis, bench and tests may import anything."""
import ast

import pytest
from conftest import ROOT

SCRIPTS = {'train', 'eval', 'sample', 'prepare_fineweb'}
MAY_IMPORT = {  # a file, or a folder of files: what of the repository it imports
    'attn_kernels': set(),
    'scans': {'attn_kernels', 'scans.delta_rule'},
    'common.files': set(),
    'common.settings': {'common.files'},
    'common.machine': {'common.files'},
    'common.benchmarks': {'common.files'},
    'common.decoding': {'common.files'},
    'common.speculative': {'common.decoding'},
    'common.scoring': {'common.files', 'common.decoding'},
    'common.runs': {'common.files', 'common.settings', 'data'},
    'common.llama': {'common.files', 'common.runs', 'data'},
    'data': {'common.files', 'common.settings', 'data'},
    'scripts': {'common', 'data', *SCRIPTS},
}


def modules():
    """{module: its path} of the files that have arrows."""
    folders = [ROOT / name for name in ('common', 'data', 'scans') if (ROOT / name).is_dir()]
    paths = [*ROOT.glob('*.py'), *(path for folder in folders for path in folder.glob('*.py'))]
    names = {'.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path for path in paths}
    return {name: path for name, path in names.items() if name != 'common'}


def imported(path):
    """Modules of the repository that a file imports anywhere in it."""
    own, found = {'common', 'data', 'scans', 'analysis', 'bench', 'attn_kernels', *SCRIPTS}, set()
    own |= {model.stem for model in ROOT.glob('model_*.py')}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            is_folder = node.module in ('common', 'data', 'scans') and node.module != 'data'
            found |= {f'{node.module}.{alias.name}' for alias in node.names} if is_folder else {node.module}
    return {name for name in found if name.split('.')[0] in own}


def allowed(name):
    if name.startswith('model_'):
        return {'attn_kernels', f'scans.{name.removeprefix("model_")}'}
    if name in SCRIPTS:
        return MAY_IMPORT['scripts']
    return MAY_IMPORT.get(name, MAY_IMPORT.get(name.split('.')[0]))


@pytest.mark.parametrize('name', sorted(modules()))
def test_a_file_imports_only_what_it_may(name):
    may = allowed(name)
    assert may is not None, f'{name}.py has no place in the house: give it one in MAY_IMPORT'
    for other in imported(modules()[name]):
        assert other in may or other.split('.')[0] in may, f'{name} imports {other}'


def test_nothing_imports_itself_in_a_circle():
    others = {name: imported(path) & modules().keys() - {name} for name, path in modules().items()}

    def visit(name, path):
        assert name not in path, ' -> '.join([*path, name])
        for other in others[name]:
            visit(other, [*path, name])
    for name in others:
        visit(name, [])
