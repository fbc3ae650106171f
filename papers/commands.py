"""Print the commands of a paper's tables, or run them. Shared by the scripts reproduce.py.

rows.csv, beside the script, has a row for each run: its name, config and settings. In the commands,
@PATTERN stands for the folders of the runs with matching names. 'train @PATTERN ...' trains them.
"""
import argparse
import csv
import fnmatch
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNDER_TORCHRUN = 'python train.py', 'python eval.py', 'python -m papers.nextlat.speculation'


def read_rows(paper: str) -> dict[str, str]:
    """Return {run: the command that trains it} of papers/PAPER/rows.csv."""
    with open(ROOT / f'papers/{paper}/rows.csv') as file:
        return {row['run']: ' '.join(['python train.py', *[f'config/{row["config"]}.py'] * bool(row['config']),
                                      *row['settings'].split(), f'--out_dir=out/{row["run"]}'])
                for row in csv.DictReader(file)}


def expanded(command: str, rows: dict[str, str]) -> list[str]:
    """Replace @PATTERN in a command by folders, or 'train @PATTERN ...' by training commands."""
    if command.startswith('train '):
        return [rows[run] for pattern in command.split()[1:] for run in fnmatch.filter(rows, pattern[1:])]
    return [re.sub(r'(?<= )@(\S+)', lambda found: ' '.join(
        f'out/{run}' for run in fnmatch.filter(rows, found[1])), command)]


def main(doc: str, tables: dict[str, list[str]], rows: dict[str, str], argv=None) -> None:
    """Print or run the commands of the named tables or rows. A run that exists is resumed.

    tables: {table: commands}, in order. A command that starts with # is a comment.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('tables', nargs='*', metavar='TABLE', help=f'{", ".join(tables)}, or a run in rows.csv')
    parser.add_argument('--gpus', type=int, help='train and evaluate under torchrun, one process per GPU')
    parser.add_argument('--run', action='store_true', help='run the commands, do not print them only')
    s = parser.parse_args(argv)
    known = tables | {run: [command] for run, command in rows.items()}
    if unknown := [name for name in s.tables if name not in known]:
        parser.error(f'unknown table {", ".join(unknown)}: expected {", ".join(tables)}, or a run in rows.csv')
    for name in s.tables or tables:
        for pattern in re.findall(r'(?<= )@(\S+)', ' '.join(known[name])):
            if not fnmatch.filter(rows, pattern):
                parser.error(f'{name}: no run in rows.csv matches @{pattern}')
        print(f'\n# {name}')
        for command in [one for line in known[name] for one in expanded(line, rows)]:
            if s.gpus and command.startswith(UNDER_TORCHRUN):
                command = command.replace('python', f'torchrun --nproc_per_node={s.gpus}', 1)
            made = re.search(r'(?:prepare_fineweb\.py .*--out_dir|train_tokenizer .*--out)=(\S+)', command)
            if made and ((ROOT / made[1] / 'meta.json').exists() or (ROOT / made[1]).is_file()):
                command = f'# exists: {command}'
            out_dir = re.search(r'train\.py .*--out_dir=(\S+)', command)
            if out_dir and (ROOT / out_dir[1] / 'config.json').exists():
                command = re.sub(r' --extend=\S+', '', command) + ' --resume'
            print(command, flush=True)
            arguments = shlex.split(command, comments=True)
            if s.run and arguments:
                program = sys.executable if arguments[0] == 'python' else arguments[0]
                if code := wait_for(subprocess.Popen([program, *arguments[1:]], cwd=ROOT)):
                    sys.exit(code)


def wait_for(process: subprocess.Popen) -> int:
    """Return the exit status of a command. After Ctrl-C, it may finish, and save a checkpoint."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        return 130
