"""Writing a run: config.json, code/ (its model's package), log.jsonl and what training adds.

train.py holds `locked_run` and adds to the folder through `Records`. A folder is a run if it has a
config.json, which is written last. docs/runs.md lists the files.
"""
import dataclasses
import io
import itertools
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from lm_architectures import files
from lm_architectures.data.text.tokenizers import TOKENIZER_FILES, copy_tokenizer
from lm_architectures.files import UserError, write_file
from lm_architectures.run.models import STORED, code_folder, code_of

CHAT_TEMPLATE = 'chat_template.jinja'  # of an imported chat model
STARTED = {'.lock', STORED, CHAT_TEMPLATE, *TOKENIZER_FILES}  # what a start that was killed may have left
BEFORE, MOVING = 'before_', '.before.writing'  # before_1 ...: the runs that --overwrite replaced


# ---- a new run ----

@contextmanager
def locked_run(folder, is_new: bool, overwrite: bool) -> Iterator[None]:
    """Lock a run folder. UserError if a new run must not be written to it."""
    folder = Path(folder)
    names = {path.name for path in folder.iterdir()} if is_new and folder.exists() else set()
    if 'config.json' in names:
        from lm_architectures.run.folders import read_run
        read_run(folder)  # only a run may be replaced
        if not overwrite:
            raise UserError(f'{folder} already contains a run: use --resume to continue it, --overwrite to replace it, '
                            'or another --out_dir')
    elif names:
        rest = {name for name in names - STARTED if not name.endswith('.writing') and not name.startswith(BEFORE)}
        was_killed = not rest or overwrite and (rest == {'log.jsonl'} or MOVING in names)
        if '.lock' not in names or not was_killed:
            raise UserError(f'{folder} already exists and is not a run folder: choose another --out_dir')
    with files.locked(folder):
        try:
            yield
        finally:
            with suppress(OSError):
                if os.listdir(folder) == ['.lock']:  # failed before its first log line
                    shutil.rmtree(folder)


def save_run(folder, record: dict, eos_token: str | None = None, code: dict | None = None) -> None:
    """Write a new run folder: its model's code and tokenizer, and config.json.

    code: the package of its model, see `models.code_of`; None: as it is now.
    """
    (Path(folder) / STORED).mkdir(parents=True, exist_ok=True)
    for module, (_, text) in (code or code_of(record['model'])).items():
        write_file(Path(folder) / STORED / f'{module}.py', text.encode())
    data = {**record['data'], 'tokenizer': copy_tokenizer(folder, record['data']['tokenizer'], eos_token)}
    files.write_json(Path(folder) / 'config.json', {**record, 'data': data})


def start_run(s, record: dict, code: dict, step: int) -> None:
    """Write a new run folder. With s.extend, its log starts with that run's lines up to `step`."""
    folder, source = Path(s.out_dir), s.extend or s.init_from
    if s.overwrite:
        set_aside(folder)
    if source and (Path(source) / CHAT_TEMPLATE).is_file():
        write_file(folder / CHAT_TEMPLATE, (Path(source) / CHAT_TEMPLATE).read_bytes())
    lines = [json.dumps(line) + '\n' for line in (read_log(s.extend) if s.extend else ()) if line['step'] <= step]
    write_file(folder / 'log.jsonl', ''.join(lines).encode())
    save_run(folder, record, code=code)


def set_aside(folder: Path) -> None:
    """Move the run in a folder, and whatever else is there, to the first free before_<n> in it.

    config.json moves first. After a kill, the folder is no run until --overwrite moves the rest.
    """
    moving = folder / MOVING
    if moving.is_symlink():
        moving.unlink()
    found = [path for path in folder.iterdir()
             if path.name not in ('.lock', MOVING) and not path.name.startswith(BEFORE)]
    if found or moving.exists():
        moving.mkdir(exist_ok=True)
        for path in sorted(found, key=lambda path: path.name != 'config.json'):
            path.rename(moving / path.name)
        before = next(path for n in itertools.count(1) if not (path := folder / f'{BEFORE}{n}').exists())
        moving.rename(before)
        print(f'moved the previous run to {before}')


def run_record(s, config, data, machine) -> dict:
    """Return config.json of a new run. config: the model's Config."""
    this_start = dict(resume=False, overwrite=False, dry_run=False, gpu_gib=None, code=None)  # not of the run
    parent = {}  # how the tokenizer of an imported run ends a text
    if source := s.extend or s.init_from:
        from lm_architectures.run.folders import read_run
        parent = {key: value for key, value in read_run(source)['data'].items() if key in ('ends', 'n_rows')}
    return {
        'model': s.model,
        'settings': {**dataclasses.asdict(s), **this_start, 'dtype': str(machine.dtype)[6:]},
        'model_config': dataclasses.asdict(config),
        'data': {**data_record(data), **parent},
        'versions': {'python': platform.python_version(), 'torch': torch.__version__, 'device': str(machine.device),
                     'processes': machine.world}}


def data_record(data) -> dict:
    """Return what config.json says of the data."""
    return {'folder': str(data.folder), 'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id,
            'bos': data.bos, 'sha256': data.sha256}


# ---- a run in training ----

class Records:
    """Write to a run during training: lines of log.jsonl and wandb, by rank 0, and loss.png.

    A new run folder is written with its first log line, so a start that fails leaves nothing.
    """

    def __init__(self, s, config, data, machine, step: int):
        """Open the folder of a run to resume, after `step`, or prepare a new run."""
        self.s, self.step, self.log, self.wandb, self.new = s, step, None, None, None
        if machine.rank > 0:
            return
        self.id_file = Path(s.out_dir) / 'wandb_id'  # so that --resume continues the same wandb run
        if s.wandb_project:
            from lm_architectures.run.weights_and_biases import start_wandb
            known = self.id_file.read_text() if s.resume and self.id_file.exists() else None
            self.wandb = start_wandb(s, config, known)
        if s.resume:
            from lm_architectures.run.folders import report_edits
            self.open(report_edits(s.model, s.code, s.out_dir))
        else:  # the code as it is now, because it may be edited before the first log line
            self.new = run_record(s, config, data, machine), code_of(s.model, code_folder(s))

    def open(self, edited: list[str] | None = None) -> None:
        """Open the log. If it has lines, add one with the step, and the number of edited files."""
        path = Path(self.s.out_dir) / 'log.jsonl'
        self.log = files.open_lines(path)
        if path.stat().st_size:
            more = {'edited_files': len(edited)} if edited else {}
            self.log.write(json.dumps({'resumed_from': self.step, **more}) + '\n')
        if self.wandb:
            write_file(self.id_file, self.wandb.id.encode())

    def write(self, line: dict) -> None:
        """Append a line to the log, without non-finite values, which JSON cannot represent."""
        line = {name: value for name, value in line.items() if math.isfinite(value)}
        if self.new and not self.log:
            start_run(self.s, *self.new, self.step)
            self.open()
        if self.log:
            self.log.write(json.dumps(line) + '\n')
        if self.wandb:
            self.wandb.log(line, step=line['step'])

    def close(self, finished: bool) -> None:
        """End the wandb run and, if the run has finished, draw its loss.png."""
        if self.wandb:
            self.wandb.finish()
        if self.log and finished:
            plot_loss(self.s.out_dir)


# ---- log.jsonl ----

def read_log(folder) -> list[dict]:
    """Return the logged steps of a run, without steps that were repeated after resuming.

    Warns about damaged lines on stderr.
    """
    def is_whole(record):
        is_step = {'step', 'tokens', 'seconds'} <= record.keys()
        return all(map(files.is_number, record.values())) and (is_step or {'resumed_from', 'saved'} & record.keys())
    records = []
    for record in files.read_lines(Path(folder) / 'log.jsonl', is_whole):
        if 'resumed_from' in record:
            records = [earlier for earlier in records if earlier['step'] <= record['resumed_from']]
        elif 'step' in record:
            records.append(record)
    return records


def plot_loss(folder) -> None:
    """Write loss.png: training and validation loss over tokens."""
    from matplotlib.figure import Figure
    records, figure, png = read_log(folder), Figure(figsize=(7, 4.5), layout='constrained'), io.BytesIO()
    axes = figure.subplots()
    for key, label, style in (('nll', 'training', dict(alpha=0.5, linewidth=0.8)),
                              ('val', 'validation', dict(marker='o', markersize=3))):
        points = [(record['tokens'], record[key]) for record in records if {'tokens', key} <= record.keys()]
        axes.plot([tokens for tokens, _ in points], [loss for _, loss in points], label=label, **style)
    axes.set(xlabel='tokens', ylabel='nats per token', title=str(folder))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=130)
    write_file(Path(folder) / 'loss.png', png.getvalue())
