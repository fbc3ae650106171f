"""Print the commands of a paper's tables, or run them. Shared by the scripts in this folder."""
import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNDER_TORCHRUN = 'python train.py', 'python eval.py', 'python -m papers.nextlat.speculation'


def train(config: str, settings: str = '', out: str | None = None) -> str:
    """Return the command that trains config/{config}.py in out/{out}."""
    return ' '.join(f'python train.py config/{config}.py {settings} --out_dir=out/{out or Path(config).name}'.split())


def runs(*names: str) -> str:
    """Return the folders of these runs as arguments: 'out/NAME out/NAME'."""
    return ' '.join(f'out/{name}' for name in names)


def main(doc: str, tables: dict[str, list[str]], rows: dict[str, list[str]] | None = None,
         guesses: dict[str, str] | None = None, argv=None) -> None:
    """Print or run the commands of the named tables. A run that exists is resumed.

    tables: {table: commands}, in order; rows: {run: its command}, which can be named like a table;
    guesses: {table: what its paper leaves open}.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tables', nargs='*', metavar='TABLE', help=', '.join(tables))
    parser.add_argument('--gpus', type=int, help='train and evaluate under torchrun, one process per GPU')
    parser.add_argument('--run', action='store_true', help='run the commands, do not print them only')
    s = parser.parse_args(argv)
    known, guesses = tables | (rows or {}), guesses or {}
    if unknown := [name for name in s.tables if name not in known]:
        parser.error(f'unknown table {", ".join(unknown)}: expected {", ".join(tables)}'
                     + (' or the name of a row' if rows else ''))
    for name in s.tables or tables:
        print(f'\n# {name}' + (f' (guess: {guesses[name]})' if guesses.get(name) else ''))
        for command in known[name]:
            if s.gpus and command.startswith(UNDER_TORCHRUN):
                command = command.replace('python', f'torchrun --nproc_per_node={s.gpus}', 1)
            made = re.search(r'(?:prepare_fineweb\.py .*--out_dir|train_tokenizer .*--out)=(\S+)', command)
            if made and ((ROOT / made[1] / 'meta.json').exists() or (ROOT / made[1]).is_file()):
                print(f'# exists: {command}')
                continue
            out_dir = re.search(r'train\.py .*--out_dir=(\S+)', command)
            if out_dir and (ROOT / out_dir[1] / 'config.json').exists():
                command = re.sub(r' --extend=\S+', '', command) + ' --resume'
            print(command, flush=True)
            program, *arguments = shlex.split(command)
            program = [sys.executable] if program == 'python' else [program]
            if s.run and (code := wait_for(subprocess.Popen([*program, *arguments], cwd=ROOT))):
                sys.exit(code)


def wait_for(process: subprocess.Popen) -> int:
    """Return the exit status of a command. After Ctrl-C, it may finish, and save a checkpoint."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        return 130
