"""Commands in the documentation use scripts, modules, configs and options that exist."""
import contextlib
import json
import pickle
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [str(path.relative_to(ROOT)) for folder in ('', 'docs/', 'papers/*/') for path in ROOT.glob(f'{folder}*.md')]
ALL_SETTINGS = ['train.py', *(path.name for path in ROOT.glob('model_*.py')), 'lm_architectures/settings.py',
                'lm_architectures/run/folders.py']


def commands(page):
    """Return (script or module path, arguments) of each command on a page."""
    text = re.sub(r'\\\n\s*', ' ', (ROOT / page).read_text())
    found = re.findall(r'python3? (?:-m )?([a-z][\w./]*\w)((?: +(?:"[^"]*"|\'[^\']*\'|[^\s`|;)]+))*)', text)
    names = [(name if name.endswith('.py') else name.replace('.', '/') + '.py', rest) for name, rest in found]
    return [(name, rest) for name, rest in names if not name.startswith(('venv', 'pytest', 'ruff', 'pip'))]


@pytest.mark.parametrize('page', PAGES)
def test_commands_on_the_pages_exist(page):
    wrong = []
    for name, arguments in commands(page):
        script = ROOT / name if (ROOT / name).exists() else ROOT / name.removesuffix('.py') / '__init__.py'
        if not script.exists():
            wrong.append(name)
            continue
        sources = [script, *(ROOT / path for path in ALL_SETTINGS
                               if name == 'train.py' or 'compare' in name or 'speed' in name)]
        sources += [ROOT / 'analysis/commands.py'] * (name == 'analysis.py')
        sources += [ROOT / 'lm_architectures/data/text/sources.py'] * (name == 'prepare_fineweb.py')  # Reading
        code = '\n'.join(path.read_text() for path in sources)
        wrong += [f'{name} --{option}' for option in re.findall(r'--(\w+)', arguments) if not re.search(
            rf'\b{option}\b', code) and option not in ('help', 'toy')]
        wrong += [config for config in re.findall(r'\bconfig/[\w/]+\.py', arguments) if not (ROOT / config).exists()
                  and 'NAME' not in config]
    assert wrong == []


def test_the_map_is_read_without_running_code_of_its_pickle(tmp_path, monkeypatch):
    code = re.search(r"python - <<'END'\n(.*?)\n *END", (ROOT / 'docs/data.md').read_text(), re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    Path('data/built/manhattan').mkdir(parents=True)
    for content, error in (({(1, 'NE'): 2, (2, 'S'): 1}, None), (Path('x'), pickle.UnpicklingError)):
        Path('node_and_direction_to_neighbor.pkl').write_bytes(pickle.dumps(content))
        with pytest.raises(error) if error else contextlib.nullcontext():
            exec(textwrap.dedent(code), {})
    edges = Path('data/built/manhattan/edges.json').read_text()
    assert json.loads(edges) == {'edges': [[1, 'NE', 2], [2, 'S', 1]]}


def test_commands_of_a_paper_run_in_order_and_runs_are_resumed(tmp_path, monkeypatch, capfd):
    from papers import commands as of_papers
    monkeypatch.setattr(of_papers, 'ROOT', tmp_path)
    (tmp_path / 'out/y').mkdir(parents=True)
    (tmp_path / 'train.py').write_text('import sys\nopen("out/y/config.json", "w").close()\n'
                                       'print("trained", *sys.argv[1:])\n')
    tables = {'a': ['python train.py --extend=out/x --out_dir=out/y'] * 2,
              'b': ['python -c "raise SystemExit(3)"', 'x']}
    of_papers.main('', tables, argv=['a', '--run'])
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith('trained')] == [
        'trained --extend=out/x --out_dir=out/y', 'trained --out_dir=out/y --resume']
    with pytest.raises(SystemExit, match='3'):
        of_papers.main('', tables, argv=['b', '--run'])
    of_papers.main('', tables, argv=['a', '--gpus=8'])
    assert 'torchrun --nproc_per_node=8 train.py --out_dir=out/y --resume' in capfd.readouterr().out
