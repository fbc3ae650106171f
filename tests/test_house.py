"""The structure of the repository: imports, no monkey-patching, and the code loaded in training."""
import ast
import re

import pytest
from conftest import ROOT, run_subprocess

GROUND = {'common.files', 'common.settings', 'common.start'}
LOADED_BY_QUICKSTART = 4010

# Documented PyTorch settings, each set once.
ALLOWED_WRITES = {('common/gpu.py', name) for name in (
    'torch._dynamo.config.optimize_ddp', 'torch._dynamo.config.recompile_limit', 'functorch.backward_pass_autocast',
    'inductor.triton.mix_order_reduction')}


def modules():
    """Return {name: path} of the modules in the root and the folders of code."""
    folders = ('common', 'data', 'scans', 'analysis', 'bench')
    paths = [*ROOT.glob('*.py'), *(p for folder in folders for p in (ROOT / folder).glob('*.py'))]
    names = {p: '.'.join(p.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__') for p in paths}
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
    """Return the pattern of what a module may import: never a floor above its own."""
    if module in GROUND:
        return r'common\.files'
    first = module.partition('.')[0]
    own_scan = module.removeprefix('model_')
    return {'data': r'data.*|common\.(files|settings|start|decoding)',
            'common': r'common\..*|data.*|attn_kernels' + (r'|model_standard' * (module == 'common.hf_model')),
            'scans': r'scans.*|attn_kernels', 'attn_kernels': 'nothing',
            }.get(first, rf'attn_kernels|scans|scans\.(attention|{own_scan})' if first.startswith('model_') else '.*')


def test_no_module_imports_from_a_floor_above():
    """Scripts stand on common, common on data, data on GROUND; models on attention and a scan."""
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
    found = {(str(path.relative_to(ROOT)), name) for folder in ('', 'common', 'data', 'scans', 'analysis', 'bench')
             for path in (ROOT / folder).glob('*.py') for name in writes_to_imported(path.read_text())}
    assert found == ALLOWED_WRITES


TINY_QUICKSTART = '''
import pathlib, sys
import train
train.main(sys.argv[1:])
import data.python_docs, data.writing  # what builds the quickstart's data, at first use
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
    assert 'a sample' in result.stdout and not re.search(r' data/(tasks|sources)\.py', result.stdout)
    assert int(result.stdout.rpartition(':')[2]) <= LOADED_BY_QUICKSTART, result.stdout


def test_config_holds_settings_files_only():
    assert (ROOT / 'config/__init__.py').read_text() == ''
    for path in (ROOT / 'config').rglob('*.py'):
        statements = {type(node) for node in ast.parse(path.read_text()).body}
        assert statements <= {ast.Assign, ast.ImportFrom}, path
