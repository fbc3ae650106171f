"""The house: who imports whom, read from the source; config/ holds settings alone; no line is too long."""
import ast

from conftest import ROOT

SCRIPTS = {'train', 'sample', 'eval', 'prepare_fineweb'}
COMMON = {'start', 'files', 'settings', 'machine', 'matmul', 'runs', 'llama', 'decoding', 'speculative', 'scoring',
          'benchmarks', 'memory', 'muon', 'kernel_check', 'parallel', 'int8', 'checkpoint', 'cpu_forms',
          'run_settings', 'dry_run', 'extend_check'}
ARROWS = {  # room: the rooms that it imports; analysis, bench and tests import anything
    'common.start': set(),
    'common.files': set(),
    'common.settings': {'common.files'},
    'common.machine': {'common.files'},
    'data': {'data', 'common.start', 'common.files', 'common.settings', 'common.decoding'},
    'common.parallel': {'common.files'},
    'common.checkpoint': {'common.files', 'common.parallel'},
    'common.runs': {'common.files', 'common.settings', 'common.checkpoint', 'common.kernel_check', 'data'},
    'common.llama': {'common.files', 'common.runs', 'common.checkpoint', 'data'},
    'common.matmul': {'common.files', 'common.machine', 'common.parallel'},
    'common.extend_check': {'common.files'},
    'common.decoding': {'common.files', 'common.extend_check'},
    'common.cpu_forms': {'common.files', 'common.machine', 'common.parallel', 'common.decoding', 'attn_kernels'},
    'common.int8': {'common.files', 'common.extend_check', 'common.cpu_forms', 'attn_kernels'},
    'common.speculative': {'common.decoding', 'common.extend_check'},
    'common.scoring': {'common.files', 'common.decoding', 'common.extend_check', 'common.parallel'},
    'common.benchmarks': {'common.files'},
    'common.memory': {'attn_kernels'},
    'common.run_settings': {'common.files', 'common.settings', 'common.runs', 'common.parallel', 'data'},
    'common.dry_run': {'common.files', 'common.machine', 'common.runs', 'common.parallel', 'common.memory',
                       'common.muon'},
    'common.muon': set(),
    'common.kernel_check': {'attn_kernels', 'common.machine', 'common.parallel'},
    'scripts': {'scripts', 'data', *(f'common.{name}' for name in COMMON)},
    'models': {'attn_kernels', 'scans'},
    'scans': {'attn_kernels', 'scans.delta_rule'},
    'attn_kernels': set(),
}


def modules():
    """{name: path} of the repository's modules outside tests, bench and analysis."""
    paths = [*ROOT.glob('*.py'), *(p for room in ('common', 'data', 'scans') for p in (ROOT / room).glob('*.py'))]
    names = {p: '.'.join(p.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__') for p in paths}
    return {name: path for path, name in names.items()}


def imports(path, known):
    """The repository's modules that a file imports, by name or through `import_scan`, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f'{node.module}.{alias.name}' for alias in node.names}
            found |= {name if name in known else node.module for name in full}
        elif isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'import_scan':
            found.add(f'scans.{node.args[0].value}')
    return found & known


def room(module):
    first = module.partition('.')[0]
    if first in ('data', 'attn_kernels'):
        return first
    if first in SCRIPTS:
        return 'scripts'
    return 'models' if first.startswith('model_') else 'scans' if first == 'scans' else module


def test_arrows_are_those_of_the_plan():
    known = set(modules())
    for module, path in modules().items():
        for imported in imports(path, known):
            assert room(module) in ARROWS or module == 'common', f'{module} has no place in the house: give it one here'
            allowed, target = ARROWS[room(module)], room(imported)
            assert target in allowed or imported in allowed, f'{module} imports {imported}'
            if room(module) == 'models':  # each has its own scan, if any
                own_scan = f'scans.{module.removeprefix("model_")}'
                assert target == 'attn_kernels' or imported == own_scan, (module, imported)


def test_no_circle_of_imports():
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


def test_config_holds_settings_files_alone():
    assert (ROOT / 'config/__init__.py').read_text() == ''
    for path in (ROOT / 'config').rglob('*.py'):
        statements = {type(node) for node in ast.parse(path.read_text()).body}
        assert statements <= {ast.Assign, ast.ImportFrom}, path


def test_no_line_is_longer_than_120_characters():
    for path in (p for p in ROOT.rglob('*.py') if '.venv' not in p.parts):
        long = [i for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
        assert not long, (path, long)
