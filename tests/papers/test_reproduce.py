"""Every command that the papers' reproduce scripts print is one that its program accepts."""
import importlib
import shlex

import pytest
from conftest import run_subprocess

from analysis import commands, compare
from lm_architectures import train
from lm_architectures.run.run_settings import read_settings
from lm_architectures.settings import load_settings


def check(program, argv):
    """Parse the arguments of a program of this repository."""
    if program == 'train.py':  # the runs that it may start from do not exist here
        return read_settings(train.Settings, [arg for arg in argv if not arg.startswith(('--extend=', '--init_from='))])
    if program == 'analysis':
        assert argv.pop(0) in commands.COMMANDS
        return load_settings(commands.Settings, argv)
    s, sides, _ = load_settings(importlib.import_module(program.removesuffix('.py')).Settings, argv)
    if program == 'analysis.compare':
        assert len(compare.read_methods(s, sides)) == len(sides)
    elif program == 'bench.speed':
        assert sides.pop(0) in ('train', 'decode')
        for side in sides:
            read_settings(train.Settings, shlex.split(side.partition(': ')[2]))


@pytest.mark.parametrize('paper', ['sps', 'context_ready', 'nextlat', 'gpn'])
def test_every_printed_command_is_accepted(paper):
    printed = run_subprocess('-m', f'papers.{paper}.reproduce').stdout
    lines = {line for line in printed.splitlines() if line.startswith('python ')}
    assert len(lines) > 10 and all(line.startswith(('python ', '#', 'hf ')) for line in printed.splitlines() if line)
    for line in lines:
        program, *argv = [arg for arg in shlex.split(line)[1:] if arg != '-m']
        check(program, argv)
