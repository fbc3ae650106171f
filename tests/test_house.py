"""The structure of the repository: imports, no monkey-patching, and the code loaded in training."""
import ast
import re

import pytest
from conftest import ROOT, run_subprocess

LOADED_BY_QUICKSTART = 3900

L = 'lm_architectures'
GROUND = rf'{L}\.(files|settings|start)'  # what may fail, in one sentence; how a setting gets its type
MAY_IMPORT = {  # what a file may import, by its folder: never from a folder to its right, in this order
    f'{L}.machine': rf'{GROUND}|{L}\.machine.*',
    f'{L}.decode': rf'{GROUND}|{L}\.(decode|machine).*',
    f'{L}.data': rf'{GROUND}|{L}\.(data|decode|machine).*',
    f'{L}.score': rf'{GROUND}|{L}\.(score|data|decode|machine).*|attn_kernels',
    f'{L}.run': rf'{GROUND}|{L}\.(run|score|data|decode|machine).*|attn_kernels',
    f'{L}.hf': rf'{GROUND}|{L}\..*|attn_kernels',
    'analysis': rf'{L}.*|analysis.*|train|bench\.reporting|attn_kernels',
    'bench': rf'{L}.*|bench.*|train|attn_kernels',
    'papers': '.*'}
CODE = ('', L, 'analysis', 'bench', 'papers', 'scans')  # folders of code


# Documented PyTorch settings, each set once.
ALLOWED_WRITES = {('lm_architectures/machine/compiling.py', name) for name in (
    'torch._dynamo.config.optimize_ddp', 'torch._dynamo.config.recompile_limit', 'functorch.backward_pass_autocast',
    'inductor.triton.mix_order_reduction')}


def code_files():
    """Return the Python files of the repository outside config/ and tests/."""
    return [path for folder in CODE for path in (ROOT / folder).glob('**/*.py' if folder else '*.py')]


def modules():
    """Return {name: path} of the modules of the repository."""
    names = {p: '.'.join(p.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__') for p in code_files()}
    return {name: path for path, name in names.items()}


def imports(path, known):
    """Return the modules of the repository that a file imports, anywhere in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f'{node.module}.{alias.name}' for alias in node.names}
            found |= {name if name in known else node.module for name in full}
    return found & known


def may_import(module):
    """Return the pattern of what a module may import."""
    if module in (f'{L}.settings', f'{L}.start'):
        return rf'{L}\.files'
    if module in (f'{L}.files', 'attn_kernels', 'state_cache'):
        return 'nothing'
    if module == f'{L}.hf.wrapper':  # in the exported copy: the run's model
        return 'model_standard'
    if module.startswith('model_'):
        return rf'attn_kernels|state_cache|scans|scans\.(attention|delta|recurrent|{module.removeprefix("model_")})'
    if module.startswith('papers.') and '.edits.' in module:
        return r'attn_kernels|model_\w+'
    folder = next((folder for folder in MAY_IMPORT if f'{module}.'.startswith(f'{folder}.')), None)
    return MAY_IMPORT.get(folder) or (r'scans.*|attn_kernels' if module.startswith('scans') else rf'{L}.*|attn_kernels')


def test_imports_go_one_way():
    known = set(modules())
    for module, path in modules().items():
        for imported in imports(path, known):
            assert re.fullmatch(may_import(module), imported), f'{module} imports {imported}'


def test_no_circular_imports():
    graph = {module: imports(path, set(modules())) for module, path in modules().items()}
    done = set()

    def visit(module, above):
        assert module not in above, ' -> '.join([*above, module])
        if module not in done:
            for imported in graph[module]:
                visit(imported, [*above, module])
            done.add(module)
    for module in graph:
        visit(module, [])


def writes_to_imported(source):
    """List assignments, deletions and patches of imported names, and of any `.forward`."""
    tree, found = ast.parse(source), []
    imported = {(alias.asname or alias.name).partition('.')[0] for node in ast.walk(tree)
                if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Call)) else ''
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if text.partition('.')[0] in imported or text.endswith('.forward'):
                found.append(text)
        patched = re.match(r"(?:setattr|[\w.]*patch(?:\.object)?)\((\w+)|\S*Library\('(aten)'", text)
        if isinstance(node, ast.Call) and patched and (patched[2] or patched[1] in imported):
            found.append(text)
    return found


def test_writes_to_imported_modules_are_found():
    wrong = ["mock.patch.object(data, 'x', 1)", "setattr(data, 'x', 1)", "torch.library.Library('aten', 'IMPL')"]
    source = ['import torch, data, os', 'import torch.nn.functional as F', 'from unittest import mock', *wrong,
              'F.dropout = f', 'module.forward = g', 'x.y = 1', 'self.forward_pass = 2', "os.environ['a'] = 'b'"]
    assert {*writes_to_imported('\n'.join(source))} == {*wrong, 'F.dropout', 'module.forward'}


def test_nothing_patches_another_module_or_a_library():
    found = {(str(path.relative_to(ROOT)), name)
             for path in code_files() for name in writes_to_imported(path.read_text())}
    assert found == ALLOWED_WRITES


TINY_QUICKSTART = '''
import pathlib, sys
import train
train.main(sys.argv[1:])
import lm_architectures.data.tasks.python_docs, lm_architectures.data.text.writing  # build the data, at first use
files = {pathlib.Path(m.__file__).resolve() for m in sys.modules.values() if getattr(m, '__file__', None)}
lines = {str(f.relative_to(pathlib.Path.cwd())): len(f.read_text().splitlines())
         for f in files if f.is_relative_to(pathlib.Path.cwd()) and 'site-packages' not in f.parts and f.exists()}
print(*(f'{n:6} {name}' for name, n in sorted(lines.items())), sep='\\n')
print('lines loaded:', sum(lines.values()))
'''


@pytest.mark.slow
def test_the_quickstart_loads_little_code(tiny_data, tmp_path):
    result = run_subprocess('-c', TINY_QUICKSTART, 'config/quickstart.py', f'--data={tiny_data}', '--block_size=32',
                       f'--out_dir={tmp_path / "run"}', '--max_tokens=256', '--warmup_tokens=0', '--eval_tokens=64',
                       '--n_layer=1', '--n_embd=32', '--n_head=2', '--sample_tokens=4', '--device=cpu')
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    assert 'a sample' in result.stdout
    assert not re.search(r' lm_architectures/data/(generated|text/sources)\.py', result.stdout)
    assert int(result.stdout.rpartition(':')[2]) <= LOADED_BY_QUICKSTART, result.stdout


def test_config_holds_settings_files_only():
    assert (ROOT / 'config/__init__.py').read_text() == ''
    for path in (ROOT / 'config').rglob('*.py'):
        statements = {type(node) for node in ast.parse(path.read_text()).body}
        assert statements <= {ast.Assign, ast.ImportFrom}, path
