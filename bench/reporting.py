"""The command line and the output of a measurement."""
import datetime
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from bench.timing import GPU
from lm_architectures.files import ROOT, UserError, friendly_errors
from lm_architectures.settings import load_settings

RESULTS = ROOT / 'bench/results'


@dataclass
class Settings:
    out: str | None = None  # write the rows to bench/results/NAME_cpu.json or NAME_gpu.json; None: only print them


def where_and_when(is_on_gpu: bool = GPU, threads: int | None = None) -> dict[str, str]:
    """Return {'device', 'date', 'commit', 'versions'} of a measurement. threads None: as here."""
    cpuinfo = Path('/proc/cpuinfo')
    named = re.search(r'model name\s*: (.*)', cpuinfo.read_text()) if cpuinfo.exists() else None
    cpu = f'{named[1] if named else platform.processor()}, {threads or torch.get_num_threads()} threads'
    describe = ['git', 'describe', '--always', '--dirty']
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    versions = [f'{name} {version(name)}' for name in ('torch', 'transformers')]
    return {'device': torch.cuda.get_device_name() if is_on_gpu else cpu, 'date': datetime.date.today().isoformat(),
            'commit': commit or 'unknown', 'versions': ', '.join([f'python {platform.python_version()}', *versions])}


def report(argv: list[str] | None, settings: type, rows: Callable[..., Iterable[dict]], takes_arguments=False):
    """Print the dicts of rows(settings, *arguments) as they arrive, and write them to --out.

    An interrupted measurement leaves NAME_cpu.partial.json. argv None: the process's arguments.
    """
    with friendly_errors(argv):
        s, arguments, _ = load_settings(settings, argv)
        if arguments and not takes_arguments:
            raise UserError(f'unexpected {arguments[0]!r}: expected settings as --key=value, see --help')
        path, found = s.out and RESULTS / f'{s.out}_{"gpu" if GPU else "cpu"}.json', []
        if path and path.exists():
            raise UserError(f'{path} already exists: choose another --out')
        for row in rows(s, *arguments):
            found.append(row)
            print('  '.join(f'{k} {v}' for k, v in row.items()), flush=True)
            if path:
                about = {'command': shlex.join(['python', *sys.orig_argv[1:]])} | where_and_when()
                path.with_suffix('.partial.json').write_text(json.dumps(about | {'rows': found}, indent=1) + '\n')
        if path:
            path.with_suffix('.partial.json').replace(path)
            print(f'written to {path}')
