"""The structure of the repository: imports, no monkey-patching, and the code loaded in training."""
import ast
import re

import pytest
from conftest import ROOT, run_subprocess

SCRIPTS = {'train', 'sample', 'eval', 'prepare_fineweb', 'lm_architectures'}
BASE = {'common.files', 'common.settings'}
ALLOWED_IMPORTS = {  # {importer: imported}; analysis, bench and tests may import anything
    'common.start': set(),
    'common.files': set(),
    'common.settings': {'common.files'},
    'common.gpu': set(),
    'common.machine': {'common.files', 'common.gpu'},
    'common.recomputing': set(),
    'common.decoding': {'common.files', 'common.recomputing', 'common.settings'},
    'data': {'data', 'common.start', 'common.decoding', *BASE},
    'common.parallel': {'common.files'},
    'common.checkpoint': {'common.files', 'common.parallel', 'common.sharding'},
    'common.models': {'common.stored_code', *BASE},
    'common.stored_code': {'common.files', 'attn_kernels'},
    'common.runs': {'common.checkpoint', 'common.models', 'data', *BASE},
    'common.sharding': {'common.parallel'},
    'common.continuing': {'common.runs', 'common.models', 'common.checkpoint', *BASE},
    'common.run_settings': {'common.runs', 'common.models', 'common.continuing', 'common.machine', 'data', *BASE},
    'common.validation': {'common.parallel', 'common.files'},
    'common.muon': {'common.files', 'common.machine'},
    'common.memory': set(),
    'common.dry_run': {'common.files', 'common.machine', 'common.models', 'common.runs', 'common.checkpoint',
                       'common.sharding', 'common.memory', 'common.continuing', 'common.run_settings', 'data'},
    'common.speculative': {'common.files', 'common.decoding'},
    'common.scoring': {'common.files', 'common.decoding', 'common.parallel'},
    'common.benchmarks': {'common.files'},
    'common.interface': {'common.decoding', 'common.files', 'common.lm_eval_adapter', 'common.machine', 'common.models',
                         'common.runs', 'common.scoring', 'common.settings', 'common.speculative', 'data'},
    'common.lm_eval_adapter': {'common.files', 'common.benchmarks', 'common.decoding', 'common.parallel',
                               'common.scoring', 'data'},
    'common.hf_model': {'models'},
    'common.hf_tokenizer': {'common.files', 'data'},
    'common.families': {'common.models', 'attn_kernels'},
    'common.export': {'common.checkpoint', 'common.families', 'common.hf_model', 'common.hf_tokenizer', 'common.models',
                      'common.runs', 'common.start', *BASE},
    'common.import_hf': {'common.checkpoint', 'common.families', 'common.hf_tokenizer', 'common.models', 'common.runs',
                         'common.start', 'data', *BASE},
    'scripts': {'scripts', 'data', 'common'},
    'models': {'attn_kernels', 'scans'},
    'scans': {'attn_kernels', 'scans'},
    'attn_kernels': set(),
}
LOADED_BY_QUICKSTART = 4000

# Documented PyTorch settings, each set once.
ALLOWED_WRITES = {('common/gpu.py', name) for name in (
    'torch._dynamo.config.optimize_ddp', 'torch._dynamo.config.recompile_limit', 'functorch.backward_pass_autocast',
    'inductor.triton.mix_order_reduction')}


def modules():
    """Return {name: path} of the modules in the root, common, data and scans."""
    paths = [*ROOT.glob('*.py'), *(p for folder in ('common', 'data', 'scans') for p in (ROOT / folder).glob('*.py'))]
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


def group(module):
    first = module.partition('.')[0]
    if first in SCRIPTS:
        return 'scripts'
    return 'models' if first.startswith('model_') else module if first == 'common' else first


def test_imports_follow_the_allowed_directions():
    known = set(modules())
    for module, path in modules().items():
        for imported in imports(path, known):
            assert group(module) in ALLOWED_IMPORTS, f'add {module} to ALLOWED_IMPORTS'
            allowed = ALLOWED_IMPORTS[group(module)]
            assert {imported, imported.partition('.')[0], group(imported)} & allowed, f'{module} imports {imported}'
            if group(module) == 'models':  # only its own scan
                own_scan = f'scans.{module.removeprefix("model_")}'
                assert imported in ('attn_kernels', 'scans', 'scans.attention', own_scan), (module, imported)


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
    assert int(result.stdout.rpartition(':')[2]) <= LOADED_BY_QUICKSTART, result.stdout


def test_config_holds_settings_files_only():
    assert (ROOT / 'config/__init__.py').read_text() == ''
    for path in (ROOT / 'config').rglob('*.py'):
        statements = {type(node) for node in ast.parse(path.read_text()).body}
        assert statements <= {ast.Assign, ast.ImportFrom}, path
