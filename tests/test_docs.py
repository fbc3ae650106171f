"""The commands of the pages, and those that the papers' scripts print, parse where they stand."""
import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, run_subprocess

from analysis import commands as of_analysis
from lm_architectures import train
from lm_architectures.run import models
from lm_architectures.settings import convert, parse_args, read_config_file
from papers.commands import main as reproduce

PAGES = [str(path.relative_to(ROOT)) for pattern in ('*.md', 'docs/*.md', 'papers/*/*.md', 'bench/results/trials.md')
         for path in ROOT.glob(pattern)]
PAPERS = [f'papers.{path.parent.name}.reproduce' for path in ROOT.glob('papers/*/reproduce.py')]
COMMAND = re.compile(r'(?:python3? |torchrun --nproc_per_node=\d+ )(?:-m )?([a-z][\w./]*\w)'
                     r'((?: (?:[^\s`|;)"\'#]+|"[^"]*"|\'[^\']*\')+)*)')
OTHERS = 'venv', 'pytest', 'ruff', 'pip', 'torch.distributed.run', 'http.server'  # programs of others
PLACEHOLDER = re.compile(r'[A-Z]{3}|[.]{3}|[$]')  # NAME, RUN, ..., $variable


def commands(page):
    """Return (script or module, arguments) of each command on a page or printed by a module."""
    text = (ROOT / page).read_text() if page.endswith('.md') else run_subprocess('-m', page).stdout
    found = COMMAND.findall(re.sub(r' *\\\n\s*', ' ', text))
    return [(name, shlex.split(arguments)) for name, arguments in found if not name.startswith(OTHERS)]


def check_training(arguments):
    """Check names and values of the settings of a training run.

    If the model is not named, or only by a placeholder, its settings may be those of any model.
    """
    values, files = parse_args(arguments)
    values.pop('help', None)
    configs = [read_config_file(file) for file in files if not PLACEHOLDER.search(file)]
    model = values.get('model') or next((config['model'] for config in configs if 'model' in config), 'standard')
    if len(configs) < len(files) or model not in models.known_models() or {'init_from', 'extend', 'resume'} & {*values}:
        known = {f.name for name in models.known_models() for f in dataclasses.fields(models.model_file(name).Config)}
        values = {name: value for name, value in values.items() if name not in known}
        convert(values, 'on the page', train.Settings)
    else:
        convert(values, 'on the page', train.Settings, models.model_file(model).Config)


@pytest.mark.parametrize('page', [*PAGES, *PAPERS])
def test_every_command_parses(page):
    for name, arguments in commands(page):
        if name == 'train.py':
            check_training(arguments)
            continue
        values, positional = parse_args(arguments)
        values = {key: value for key, value in values.items() if key != 'help' and '$' not in str(value)}
        module = importlib.import_module(name.removesuffix('.py').replace('/', '.'))
        if name == 'analysis':
            convert(values, f'on {page}', of_analysis.COMMANDS[positional[0]][0])
        elif hasattr(module, 'Settings'):
            convert(values, f'on {page}', module.Settings)
        else:
            assert hasattr(module, 'main') or (Path(module.__file__).parent / '__main__.py').exists(), name
        assert name != 'bench.speed' or positional[0] in ('train', 'decode')
        for side in positional:  # 'NAME: CONFIG --key=value ...'
            if name in ('analysis.compare', 'bench.speed') and ': ' in side:
                check_training(shlex.split(side.partition(': ')[2].removeprefix('hf ')))


def test_commands_of_a_paper_run_in_order_and_runs_are_resumed(tmp_path, monkeypatch, capfd):
    from papers import commands as of_papers
    monkeypatch.setattr(of_papers, 'ROOT', tmp_path)
    (tmp_path / 'out/y').mkdir(parents=True)
    (tmp_path / 'train.py').write_text('import sys\nopen("out/y/config.json", "w").close()\n'
                                       'print("trained", *sys.argv[1:])\n')
    tables = {'a': ['python train.py --extend=out/x --out_dir=out/y'] * 2,
              'b': ['python -c "raise SystemExit(3)"', 'x']}
    of_papers.main('', tables, {}, argv=['a', '--run'])
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith('trained')] == [
        'trained --extend=out/x --out_dir=out/y', 'trained --out_dir=out/y --resume']
    with pytest.raises(SystemExit, match='3'):
        of_papers.main('', tables, {}, argv=['b', '--run'])
    of_papers.main('', tables, {}, argv=['a', '--gpus=8'])
    assert 'torchrun --nproc_per_node=8 train.py --out_dir=out/y --resume' in capfd.readouterr().out


def test_a_pattern_that_matches_no_run_is_an_error(capsys):
    with pytest.raises(SystemExit):
        reproduce('', {'a': ['train @x @none_*']}, {'x': 'python train.py'}, [])
    assert 'a: no run in rows.csv matches @none_*' in capsys.readouterr().err
