"""A run folder: config.json, code/ (its model's package), log.jsonl and ckpt/.

Scripts open a run with `load_run`, or with `read_run` if they do not need the model. train.py holds
`locked_run` and adds to the folder through `Records`. A folder is a run if it has a config.json,
which is written last. docs/runs.md lists the files.
"""
import dataclasses
import functools
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
from typing import IO

import torch

from lm_architectures import files
from lm_architectures.data import open_data
from lm_architectures.data.text.tokenizers import TOKENIZER_FILES, copy_tokenizer, tokenizer_digest
from lm_architectures.files import ROOT, UserError, command, warn_once, write_file
from lm_architectures.run import checkpoint
from lm_architectures.run.models import STORED, code_of, given_model, model_file, portable_config, report_edits
from lm_architectures.settings import typed

REQUIRED_KEYS = {  # keys of config.json and their types, besides the other settings of training and of the model
    'model': str, 'settings': dict, 'settings.block_size': int, 'settings.eval_seed': int | None, 'model_config': dict,
    'versions': dict, 'data': dict, 'data.tokenizer': str, 'data.n_ids': int, 'data.eos_id': int, 'data.bos': bool,
    'data.sha256': str}
OPTIONAL_KEYS = {  # imported runs lack some of them, other runs lack others
    'settings.data': str, 'settings.max_tokens': int, 'settings.batch_size': int, 'settings.seed': int,
    'data.ends': list, 'data.n_rows': int, 'versions.processes': int}
CHAT_TEMPLATE = 'chat_template.jinja'  # of an imported chat model
BEFORE, MOVING = 'before_', '.before.writing'  # before_1 ...: the runs that --overwrite replaced


# ---- reading a run ----

def load_run(folder, device='cpu', dtype: torch.dtype | None = None, code: str | None = None,
             model: str | None = None) -> tuple:
    """Load a trained run from its newest undamaged checkpoint.

    Returns (model in eval mode, config.json plus the checkpoint's 'step'). dtype None: fp32. code:
    see `read_run`. model: path of the model's file, if the user gave one; UserError for another's.
    """
    given, record = given_model(model or ''), read_run(folder, code)
    if model and given != record['model']:
        raise UserError(f'{folder} is a run of the model {record["model"]!r}: {model} is not its file')
    if torch.device(device).type == 'cuda':
        from lm_architectures.machine.compiling import set_compiler_options
        set_compiler_options()  # attention, and GPN's gates, are compiled for each shape
    model = model_file(record['model'], record['code']).Model(portable_config(record, folder))
    state, tensors = checkpoint.load_checkpoint(folder)
    checkpoint.load_weights(model, tensors, folder)
    return model.eval().to(device=device, dtype=dtype), {**record, 'step': state['step']}


def read_run(folder, code: str | None = None) -> dict:
    """Return config.json of a run folder. UserError if it is missing or damaged.

    'code' is the folder if code = 'run': its copy of the model's code will be imported. Else None.
    """
    if code not in (None, 'run'):
        raise UserError(f"code is {code!r}: expected 'run' or None")
    path = Path(folder) / 'config.json'
    if not path.is_file():
        known = ', '.join(sorted(str(p.parent) for p in Path('out').glob('*/config.json')))
        quickstart = command('train.py', os.path.relpath(ROOT / 'config/quickstart.py'))
        raise UserError(f'{folder or "an empty name"} is not a run folder (it has no config.json). Runs here: '
                        + (known or f'none; train one with {quickstart}'))
    remedy = 'copy the run again or retrain it'
    if 'model_type' in files.read_json(path, remedy):
        name = f'out/{Path(folder).resolve().name}_run'
        convert = command('-m', 'lm_architectures.hf.import_model', folder, f'--out_dir={name}')
        raise UserError(f'{folder} is a Hugging Face folder: if it is a Llama, Mistral or Qwen, convert it with '
                        f'{convert}, then use {name}')
    record = files.read_json(path, remedy, check_record)
    data = record['data']
    if data['tokenizer'] in TOKENIZER_FILES:
        data['tokenizer'] = str((Path(folder) / data['tokenizer']).resolve())
    return {**{name: record[name] for name in REQUIRED_KEYS if '.' not in name},
            'code': str(folder) if code == 'run' else None}


def check_record(record: dict) -> None:
    """Raise ValueError for a missing key or a wrong type in config.json. Converts 2.0 to 2."""
    for name, kind in (REQUIRED_KEYS | OPTIONAL_KEYS).items():
        part, _, key = name.rpartition('.')
        owner = record[part] if part else record
        if key in owner:
            owner[key] = typed(key, owner[key], kind, 'there')
            if type(owner[key]) is int and owner[key] < (key in ('block_size', 'batch_size', 'n_ids')):
                raise ValueError(f'{key} is {owner[key]}')
        elif name in REQUIRED_KEYS:
            raise ValueError(f'no {name}')
    data = record['data']
    if not record['model'].isidentifier():  # a path, perhaps: what is imported is the user's decision
        raise ValueError(f'{record["model"]!r} is not the name of a model')
    if data['eos_id'] >= data['n_ids']:
        raise ValueError('eos_id is not an id of the tokenizer')
    ends, n_rows = data.get('ends', [data['eos_id']]), data.get('n_rows', data['n_ids'])
    if not ends or not all(type(i) is int and 0 <= i < n_rows for i in ends):
        raise ValueError(f'ends of text are {ends}: expected ids from 0 to {n_rows - 1}')


def run_data(record: dict, name: str | None, folder=None):
    """Return the data `name`, or the run's own: Data, or Generated for a task.

    UserError if there is none or tokenizers differ.
    """
    own = record['settings'].get('data')
    if not name and not own:  # an imported run
        raise UserError(f'{folder or "this run"} has no data: give --data=FOLDER')
    data = open_data(str(name or own))
    if not name and data.sha256 != record['data']['sha256']:
        warn_once(f'{data.folder} has changed since the run was trained')
    check_vocabulary(record, data, folder)
    return data


def same_vocabulary(a: dict, b: dict) -> bool:
    """Return True if two 'data' records have the same tokenizer. A missing file matches any."""
    digests = {tokenizer_digest(a['tokenizer']), tokenizer_digest(b['tokenizer'])} - {None}
    return a['n_ids'] == b['n_ids'] and a['eos_id'] == b['eos_id'] and len(digests) < 2


def check_vocabulary(record: dict, data, folder=None) -> None:
    """Raise UserError unless the run in `folder` was trained with the data's tokenizer."""
    want, have = record['data'], {'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id}
    if not same_vocabulary(want, have):
        run = f'the run in {folder}' if folder else 'this run'
        raise UserError(f'{data.folder} has tokenizer {data.tokenizer!r} ({data.n_ids} ids), but {run} was trained '
                        f'with {want["tokenizer"]!r} ({want["n_ids"]}): use data with that tokenizer')


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


# ---- writing a run ----

@contextmanager
def locked_run(folder, is_new: bool, overwrite: bool) -> Iterator[None]:
    """Lock a run folder. UserError if a new run must not be written to it."""
    folder = Path(folder)
    names = {path.name for path in folder.iterdir()} if is_new and folder.exists() else set()
    passed_over = {name for name in names if name.endswith('.writing') or name.startswith(BEFORE)}
    left_by_a_kill = {'.lock', STORED, CHAT_TEMPLATE, *TOKENIZER_FILES} | ({'log.jsonl'} if overwrite else set())
    if 'config.json' in names:
        read_run(folder)  # only a run may be replaced
        if not overwrite:
            raise UserError(f'{folder} already contains a run: use --resume to continue it, --overwrite to replace it, '
                            'or another --out_dir')
    elif names and not ('.lock' in names and (names - passed_over <= left_by_a_kill or overwrite and MOVING in names)):
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
    """Move the run in a folder, and whatever else is there, to the first free before_<n> in it."""
    moving, kept = folder / MOVING, ('.lock', MOVING)
    found = [path for path in folder.iterdir() if path.name not in kept and not path.name.startswith(BEFORE)]
    if moving.is_symlink():
        moving.unlink()
    if found or moving.exists():  # after a kill
        moving.mkdir(exist_ok=True)
        for path in sorted(found, key=lambda path: path.name != 'config.json'):
            path.rename(moving / path.name)
        before = next(path for n in itertools.count(1) if not (path := folder / f'{BEFORE}{n}').exists())
        moving.rename(before)  # only when all is there
        print(f'the run before is now in {before}')


def run_record(s, config, data, machine) -> dict:
    """Return config.json of a new run. config: the model's Config."""
    source = s.extend or s.init_from
    parent = read_run(source)['data'] if source else {}
    this_start = dict(resume=False, overwrite=False, dry_run=False, gpu_gib=None, code=None)
    return {
        'model': s.model,
        'settings': {**dataclasses.asdict(s), **this_start, 'dtype': str(machine.dtype)[6:]},
        'model_config': dataclasses.asdict(config),
        'data': {'folder': str(data.folder), 'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id,
                 'bos': data.bos, 'sha256': data.sha256,
                 **{key: parent[key] for key in ('ends', 'n_rows') if key in parent}},
        'versions': {'python': platform.python_version(), 'torch': torch.__version__, 'device': str(machine.device),
                     'processes': machine.world}}


class Records:
    """What train.py adds to a run: lines of log.jsonl (and wandb), by rank 0, and checkpoints.

    A new run folder is written with its first log line, so a start that fails leaves nothing.
    """

    def __init__(self, s, config, data, machine, step: int):
        """Open the folder of a run to resume. Training continues after `step`."""
        self.s, self.step, self.log, self.wandb, self.start = s, step, None, None, None
        if machine.rank > 0:
            return
        self.id_file = Path(s.out_dir) / 'wandb_id'  # so that --resume continues the same wandb run
        if s.wandb_project:
            known = self.id_file.read_text() if s.resume and self.id_file.exists() else None
            self.wandb = start_wandb(s, config, known)
        if s.resume:
            self.open(report_edits({'model': s.model, 'code': s.code}, s.out_dir))
        else:  # the code as it is now, because it may be edited before the first log line
            code = code_of(s.model, s.code and s.extend)
            self.start = functools.partial(start_run, s, run_record(s, config, data, machine), code, step)

    def open(self, edited: list[str] | None = None) -> None:
        self.log = open_log(self.s.out_dir, self.step, edited)
        if self.wandb:
            write_file(self.id_file, self.wandb.id.encode())

    def write(self, line: dict) -> None:
        """Append a line to the log, without non-finite values, which JSON cannot represent."""
        line = {name: value for name, value in line.items() if math.isfinite(value)}
        if self.start and not self.log:
            self.start()
            self.open()
        if self.log:
            self.log.write(json.dumps(line) + '\n')
        if self.wandb:
            self.wandb.log(line, step=line['step'])

    def save(self, model, optimizer, step: int, seconds: float) -> None:
        """Save a checkpoint. Call it on all processes, after `write`."""
        if self.log:
            os.fsync(self.log.fileno())  # so that the log is never behind the checkpoint
        checkpoint.save_training(self.s.out_dir, model, optimizer, step, seconds, self.s.keep_checkpoints,
                                 self.s.last_before_decay)
        if self.log:
            self.log.write(json.dumps({'saved': step}) + '\n')

    def close(self, finished: bool) -> None:
        """End the wandb run and, if the run has finished, draw its loss.png."""
        if self.wandb:
            self.wandb.finish()
        if self.log and finished:
            plot_loss(self.s.out_dir)


def start_wandb(s, config, known: str | None):
    """Start or continue a run of Weights & Biases. known: its id, None for a new one."""
    try:
        import wandb
        return wandb.init(project=s.wandb_project, name=s.out_dir, id=known, resume='allow',
                          config=dataclasses.asdict(s) | dataclasses.asdict(config), allow_val_change=True)
    except Exception as error:  # not installed, no key, no network
        raise UserError(f'wandb could not start ({type(error).__name__}: {error}): pip install wandb, run '
                        '`wandb login`, or set --wandb_project=None')


def open_log(folder, step: int, edited: list[str] | None = None) -> IO:
    """Open log.jsonl for appending. If it has lines, add one with the step the run resumes from.

    edited: files of the model's code that have changed, whose number is added.
    """
    path = Path(folder) / 'log.jsonl'
    log = files.open_lines(path)
    if path.stat().st_size:
        log.write(json.dumps({'resumed_from': step, **({'edited_files': len(edited)} if edited else {})}) + '\n')
    return log


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


# ---- weights to start from ----

def has_checkpoint(s) -> bool:
    """Return True if the run is resumed from a checkpoint of its own."""
    return s.resume and any(Path(s.out_dir).glob('ckpt/step_*'))


def restore(s, model: torch.nn.Module, optimizer) -> tuple[int, float]:
    """Load the checkpoint to continue from. Returns (step, seconds of training), or (0, 0.0)."""
    source, up_to, log = s.out_dir, None, Path(s.out_dir) / 'log.jsonl'
    if not has_checkpoint(s):
        if s.resume and log.exists() and b'{"saved": ' in log.read_bytes():
            raise UserError(f'{source} has no checkpoint, but its log lists one: copy {source}/ckpt back, or '
                            'repeat the command that started it, with --overwrite')
        if not s.extend:  # killed before the first checkpoint
            return 0, 0.0
        planned = read_run(s.extend)['settings']['max_tokens']
        source, up_to = s.extend, dataclasses.replace(s, max_tokens=planned).last_before_decay
    return checkpoint.restore_training(source, model, optimizer, up_to)


def load_initial_weights(s, model: torch.nn.Module, idx: torch.Tensor) -> None:
    """Load the weights of s.init_from, unless the run continues from a checkpoint.

    If the model's `adopt` adds new weights, check on idx (B, T) that the logits are unchanged.
    """
    if s.extend or has_checkpoint(s):
        return
    source = s.init_from
    state, tensors = checkpoint.load_checkpoint(source)
    try:
        converted = model.adopt(tensors) if hasattr(model, 'adopt') else tensors
    except ValueError as error:
        raise UserError(f'{source} does not fit this model: {error}')
    checkpoint.load_weights(model, converted, source)
    print(f'loaded the weights of {source}, step {state["step"]}')
    if new := sorted(converted.keys() - tensors.keys()):
        original, _ = load_run(source, idx.device, code=None if s.resume else s.code)
        with torch.no_grad():
            want, have = (m.eval().logits(idx)[..., :model.config.n_ids] for m in (original, model))
        model.train()
        worst = (have - want).abs().max().item()
        if not worst < 1e-4:
            raise UserError(f'{source} cannot be converted to this model: its logits change by {worst:.1e} before any '
                            'training. Settings unrelated to the new weights (window, mask_documents, n_head) must '
                            "match the source's and be supported by this model")
        print(f'converted {source}: {", ".join(new)} are new weights; at step 0 the logits differ by at most '
              f'{worst:.1e}')
