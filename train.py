"""Trains a language model.

    python train.py config/quickstart.py                      a small one on this machine, in minutes
    python train.py config/standard_s.py --learning_rate=3e-4 any setting can be overridden
    torchrun --nproc_per_node=8 train.py config/standard_l.py several GPUs: same batches, same losses (docs/scale.md)
    python train.py config/quickstart.py --resume             goes on after an interruption, on the very same batches
    python train.py --extend=out/A --max_tokens=2e9 --out_dir=out/B   makes a run longer, in a folder of its own

Reads top to bottom: settings, the model and its optimizer, evaluation, the loop, and at the end `main`, which tells the
story. A model needs `forward` and `logits`; what else it may have is used where it is there (docs/own_model.md).
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import contextlib
import importlib.util
import math
import os
import platform
import random
import re
import shlex
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from common import checkpoint, parallel, runs
from common.cpu_forms import use_attention
from common.decoding import generate, has_right_extend, tell_of_another_loss
from common.files import UserError, first_line, friendly_errors
from common.machine import (
    caught_signals,
    make_progress,
    memory_bytes,
    peak_flops,
    peak_memory,
    pick_dtype,
    say,
    start_processes,
)
from common.matmul import use_matmul
from common.memory import memory_by_rows
from common.muon import MuonAndAdamW, hidden_matrices
from common.scoring import counted, validation_loss
from common.settings import check_ranges, join_values, load_settings, saved_settings
from common.speculative import longest_draft, speculative_generate
from data import open_data
from data.tasks import builtin_data, task_class
from data.tokenizers import load_tokenizer, padded_vocab


@dataclass
class Settings:
    """Defaults are those of the SPS paper, section 4, so that a config file holds only what differs."""

    # the run
    model: str = 'standard'  # model_<name>.py; its Config fields are settings too
    out_dir: str | None = None  # run folder; None: out/<name of the config file>
    resume: bool = False  # go on with the run in out_dir, on the same batches
    overwrite: bool = False  # replace the run in out_dir
    extend: str | None = None  # run folder to go on from into a new out_dir, with more max_tokens; it stays as it is
    init_from: str | None = None  # run whose weights to start from; model and its settings not given are its
    eval_only: bool = False  # print the validation loss of out_dir (or init_from) and stop
    dry_run: bool = False  # check everything, print sizes, costs and memory, and stop; works without the data
    memory: float | None = None  # with --dry_run: GiB of a GPU that a step is to fit
    seed: int = 1337  # of the initial weights, the data order and dropout
    # data
    data: str = 'data/built/fineweb_edu'  # data folder, or built-in data; a task's options: path_star:degree=2,length=5
    make_data: str | None = None  # what makes `data` and names it, said where it is missing; None: FineWeb-Edu's
    assumed_ids: int = 50257  # of its tokenizer, in a dry run without it
    documents: bool = True  # stop attention at document boundaries; False sets the model's eos_id to None
    verify: bool = False  # compare every shard with its checksum before the first step
    # batch and length
    batch_size: int = 96  # sequences per optimizer step, over all processes and micro-batches
    micro_batch_size: int = 8  # sequences of a forward pass; for memory and speed, not the result: docs/scale.md
    block_size: int = 4096  # tokens per sequence, T
    max_tokens: int = 20_000_000_000  # tokens to train on, the decay included
    # optimizer
    optimizer: str = 'adamw'  # adamw, or muon: Muon for hidden matrices, its updates as large as AdamW's
    learning_rate: float = 6e-4  # peak
    min_lr: float | None = None  # at the end of the schedule; None: learning_rate / 10
    schedule: str = 'wsd'  # after a linear warm-up: wsd (constant, then linear decay), cosine or constant
    warmup_tokens: int = 50_000_000  # tokens of linear warm-up
    decay_fraction: float = 0.1  # share of max_tokens that wsd decays over
    beta1: float = 0.9  # AdamW's decay of the gradient's running mean
    beta2: float = 0.95  # AdamW's decay of the squared gradient's running mean
    weight_decay: float = 0.1  # on tensors of two and more dimensions, the embedding included
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    # evaluation and records, in steps
    eval_interval: int = 102  # steps between validation losses: 40M tokens (official SPS code)
    eval_tokens: int = 10_000_000  # tokens of a validation loss; all of the validation data, in order, if it has fewer
    eval_seed: int | None = 42  # of its windows' random offsets, each time the same; None: in order, from the start
    acceptance_prompts: int = 0  # validation prompts on which each evaluation also drafts, 5 tokens at a time
    log_interval: int = 10  # steps between lines of log.jsonl
    save_interval: int = 1000  # steps between checkpoints
    keep_checkpoints: int = 2  # newest ones that stay; 2 or more, as one may be damaged; and wsd's before its decay
    sample_tokens: int = 200  # tokens of the text generated after training
    wandb_project: str | None = None  # also log there, if wandb is installed
    # machine
    device: str = 'auto'  # auto (cuda where there is one), cuda, cpu or mps
    dtype: str = 'auto'  # of the products: bfloat16 or float32, weights are fp32; auto: bfloat16 where it is faster
    matmul: str = 'auto'  # fp32 products on a CPU: blas (PyTorch's own), onednn, or auto, the faster one here
    attention: str = 'auto'  # in bf16 on a CPU: tiles, fused (PyTorch's own), or auto, the faster one here
    compile: bool | None = None  # torch.compile; None: on GPUs (bench.train_step nanogpt: on a CPU it gains 1% to 18%)
    parallel: str = 'ddp'  # several processes: ddp, each holds the whole model; fsdp, each a part of every weight
    shard: int | None = None  # with fsdp: processes that share one copy of the weights; None: all
    threads: int | None = None  # CPU threads per process; None: the machine's cores, shared by its processes

    def __post_init__(self):
        at_least_0, at_least_1 = (0, math.inf), (1, math.inf)
        check_ranges(
            self, seed=(0, 2 ** 31), batch_size=(1, 2 ** 20), micro_batch_size=at_least_1, block_size=at_least_1,
            max_tokens=at_least_1, learning_rate=at_least_0, min_lr=at_least_0, warmup_tokens=at_least_0,
            decay_fraction=(0, 1), beta1=(0, 1 - 1e-9), beta2=(0, 1 - 1e-9), weight_decay=at_least_0,
            grad_clip=at_least_0, assumed_ids=at_least_1, eval_interval=at_least_1, eval_tokens=at_least_0,
            eval_seed=(0, 2 ** 31), acceptance_prompts=at_least_0, log_interval=at_least_1, save_interval=at_least_1,
            keep_checkpoints=(2, math.inf), sample_tokens=at_least_0, threads=(1, 1024), memory=at_least_0,
            shard=(2, math.inf))


MAY_CHANGE = {  # on --resume; the last line has settings of models, which change memory and time alone
    'resume', 'overwrite', 'eval_only', 'dry_run', 'memory', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'matmul', 'attention', 'compile', 'parallel', 'shard', 'threads', 'make_data',
    'assumed_ids',
    'data',  # where it lies: what it holds is compared by its checksum
    'scan', 'segment_len', 'chunk_len', 'checkpoint_blocks', 'checkpoint_unrolls'}
BF16_PARAMETERS = 1_000_000  # CPUs with bf16 units gain from bf16 at this size; 4 layers x 128 (0.8M) may lose


# ---- settings, checked ----

def read_settings(argv: list[str]) -> tuple[Settings, dict, dict | None]:
    """Settings, the model's Config values given by the user, and the saved record if this continues a run."""
    argv = with_model_of_run(argv)
    s, positional, given = load_settings(Settings, argv, lambda name: runs.model_file(name).Config)
    if s.out_dir is None:
        s.out_dir = f'out/{Path(positional[0]).stem}' if positional else f'out/{s.model}'
    own = {f.name for f in fields(Settings)}
    record = None
    if is_extension(s):
        s, record = extended_settings(s, given)
    elif s.resume or (s.eval_only and not s.init_from):
        record = runs.read_run(s.out_dir)
        if s.dtype == 'auto':
            given.pop('dtype', None)  # the run recorded what auto was
        saved = saved_settings(Settings, record['settings'], f'{s.out_dir}/config.json')
        of_model = {name: value for name, value in given.items() if name not in own or name in ('model', 'documents')}
        check_unchanged(s.out_dir, {**asdict(saved), **asdict(runs.saved_config(record, s.out_dir))},
                        given if s.resume else of_model)
        asked = {name: value for name, value in given.items() if name in own}
        s = replace(saved, **{**asked, 'out_dir': s.out_dir})
        if not s.data:
            raise UserError(f'the run in {s.out_dir} has no data of its own: give --data=FOLDER')
    elif s.init_from:  # what is not given is as in the source
        if is_new(s) and Path(s.out_dir).resolve() == Path(s.init_from).resolve():
            raise UserError(f'--init_from={s.init_from} is the source of the weights: give a new folder, --out_dir=NEW')
        source = runs.read_run(s.init_from)
        values = asdict(runs.saved_config(source, s.init_from))
        if source['model'] != s.model:  # what both have; in SPS a window is that of the predict stream
            known = {f.name for f in fields(runs.model_file(s.model).Config)}
            known -= {'window'} if 'sps' in (source['model'], s.model) else set()
            values = {k: v for k, v in values.items() if k in known}
        if 'documents' not in given and 'eos_id' in values:
            s.documents = values['eos_id'] is not None
        given = {k: v for k, v in values.items() if k not in ('n_ids', 'eos_id')} | given
    return s, {k: v for k, v in given.items() if k not in own}, record


def extended_settings(s, given) -> tuple[Settings, dict]:
    """Settings of a run that makes the run s.extend longer, and that run's record."""
    record = runs.read_run(s.extend)
    saved = saved_settings(Settings, record['settings'], f'{s.extend}/config.json')
    if saved.schedule == 'cosine':
        raise UserError(f'{s.extend} has schedule = cosine, whose learning rates depend on max_tokens from the start, '
                        'so it cannot be made longer: train anew with more max_tokens, or use wsd or constant')
    if 'out_dir' not in given or Path(s.out_dir).resolve() == Path(s.extend).resolve():
        raise UserError(f'--extend={s.extend} leaves that run as it is: give a new folder, --out_dir=NEW')
    if s.max_tokens <= saved.max_tokens or 'max_tokens' not in given:
        raise UserError(f'{s.extend} has max_tokens = {saved.max_tokens}: give --max_tokens, more than that')
    if s.init_from and 'init_from' in given:
        raise UserError('--extend and --init_from name two runs to start from: give one')
    if s.dtype == 'auto':
        given.pop('dtype', None)
    known = {**asdict(saved), **asdict(runs.saved_config(record, s.extend))}
    check_unchanged(s.extend, known, {k: v for k, v in given.items() if k not in ('extend', 'max_tokens')})
    own = {f.name for f in fields(Settings)} - {'overwrite'}
    asked = {name: value for name, value in given.items() if name in own}
    return replace(saved, **{**asked, 'overwrite': s.overwrite}), record


def with_model_of_run(argv):
    """argv; with the model of the run it goes on with or starts from, if it names neither a model nor a config file."""
    options = dict(arg[2:].partition('=')[::2] for arg in argv if arg.startswith('--'))
    source = options.get('extend') or options.get('init_from')
    is_on = {name for name in ('resume', 'eval_only') if options.get(name, 'False') != 'False'}
    if 'resume' in is_on or 'eval_only' in is_on and 'init_from' not in options:
        source = options.get('out_dir')
    if source and source != 'None' and 'model' not in options and all(arg.startswith('-') for arg in argv):
        return [*argv, f'--model={runs.read_run(source)["model"]}']
    return argv


def check_unchanged(folder, saved, given):
    """Raises UserError if a saved run is given other settings than it was started with, but for MAY_CHANGE."""
    for name in sorted(given.keys() - MAY_CHANGE, key=lambda name: name != 'model'):  # another model has other settings
        if saved[name] != given[name]:
            other = 'start another with another --out_dir'
            if name == 'max_tokens' and saved['schedule'] != 'cosine' and saved[name] < given[name]:
                other = f'make it longer with --extend={folder} --max_tokens={given[name]} --out_dir=NEW'
            raise UserError(f'the run in {folder} has {name} = {saved[name]!r}, but {given[name]!r} is asked for: '
                            f'leave {name} out (a saved run needs no config file either), or {other}')


def has_data(name: str) -> bool:
    """Whether there is data of this name, or such as is built when asked for; a .txt file nobody could make.

    A task may need a file, as a city.
    """
    if task_class(name):
        return all(Path(file).exists() for file in re.findall(r'=([^,]+\.json)', name))
    return name in builtin_data() or not name or name.endswith('.txt') or Path(name).exists()


def assumed_data(s, record):
    """What a dry run takes data to be that is not there: its run's, or text in s.assumed_ids ids."""
    record = record or (runs.read_run(s.init_from) if s.init_from else None)
    like = record['data'] if record else {'tokenizer': 'gpt2' if s.assumed_ids == 50257 else 'FILE', 'sha256': '',
                                          'n_ids': s.assumed_ids, 'eos_id': s.assumed_ids - 1}
    print(f'no data at {s.data}: assumed a vocabulary of {like["n_ids"]:,} ids (tokenizer {like["tokenizer"]}) and '
          f'enough text. To make it:\n  {command_for_data(s, like["tokenizer"])}')
    return SimpleNamespace(folder=s.data, tokenizer=like['tokenizer'], n_ids=like['n_ids'], eos_id=like['eos_id'],
                           bos=False, sha256=like['sha256'], splits={'train': {'tokens': s.max_tokens}},
                           n_windows=lambda split, T: 1)


def command_for_data(s, tokenizer: str) -> str:
    """The command that makes s.data: the config's, if it names that folder, else FineWeb-Edu's in these tokens."""
    if s.make_data and s.data in s.make_data:
        return s.make_data
    n_tokens = f'{1.05 * s.max_tokens:.3g}'.replace('e+', 'e')  # validation data are held out of them
    of_tokenizer = '' if tokenizer == 'gpt2' else f'--tokenizer={shlex.quote(tokenizer)} '
    return f'python prepare_fineweb.py --out_dir={shlex.quote(s.data)} {of_tokenizer}--max_tokens={n_tokens}'


def check_settings(s, data, world):
    """Raises UserError for what would fail later."""
    if s.schedule not in ('wsd', 'cosine', 'constant'):
        raise UserError(f"schedule is {s.schedule!r}: expected 'wsd', 'cosine' or 'constant'")
    if s.optimizer not in ('adamw', 'muon'):
        raise UserError(f"optimizer is {s.optimizer!r}: expected 'adamw' or 'muon'")
    if s.optimizer == 'muon' and s.parallel == 'fsdp':
        raise UserError('optimizer = muon needs whole matrices, of which each process has a part with parallel = fsdp: '
                        'use --parallel=ddp or --optimizer=adamw')
    if s.sample_tokens and has_data(s.data):
        load_tokenizer(data.tokenizer)  # now, not after the training
    parallel.check_sharding(s.parallel, s.shard, world)
    if s.batch_size < world:
        raise UserError(f'batch_size is {s.batch_size}, fewer sequences than the {world} processes: each needs one')
    if s.parallel == 'fsdp' and s.micro_batch_size == 1 and s.batch_size % world:
        raise UserError(f'batch_size = {s.batch_size} gives some of the {world} processes one sequence more than '
                        'others, and with parallel = fsdp and micro_batch_size = 1 one micro-batch more, for which the '
                        f'others would wait: use --micro_batch_size=2, or a batch_size that {world} divides')
    if s.memory is not None and not s.dry_run:
        raise UserError(f'--memory={s.memory:g} asks whether a step would fit: add --dry_run, or leave it out to train')
    if s.acceptance_prompts and hasattr(data, 'score'):
        raise UserError(f'acceptance_prompts = {s.acceptance_prompts} continues text, {data.folder} is a task: use 0')
    if s.wandb_project and importlib.util.find_spec('wandb') is None:
        raise UserError(f'wandb_project is {s.wandb_project!r}, but wandb is not installed: pip install wandb, or '
                        'leave it out')
    for split in ('train', 'val'):
        if data.n_windows(split, s.block_size) < 1:
            raise UserError(f'{data.folder} has {data.splits[split]["tokens"]} {split} tokens, too few for windows of '
                            f'block_size = {s.block_size}: use a smaller block_size or more data')


def is_new(s) -> bool:
    """Whether a run folder is to be made."""
    return not (s.resume or s.eval_only)


def is_extension(s) -> bool:
    """Whether this is the start of a longer run of s.extend."""
    return bool(s.extend) and is_new(s)


def run_of(s) -> str:
    """The run folder that the settings are those of."""
    return s.extend if is_extension(s) else s.out_dir


def model_config(s, given, data, record):
    """The model's Config: the saved one, or the user's values with the vocabulary of the data."""
    if record:
        runs.check_vocabulary(record, data, run_of(s))
        if not s.eval_only and record['data']['sha256'] != data.sha256:
            raise UserError(f'{data.folder} is not the data that the run in {run_of(s)} was trained on (its checksums '
                            'differ): bring that data back, or start another run with --init_from')
        changed = {name: value for name, value in given.items() if name in MAY_CHANGE}
        return runs.saved_config({**record, 'model_config': {**record['model_config'], **changed}}, run_of(s))
    if s.init_from:
        runs.check_vocabulary(runs.read_run(s.init_from), data, s.init_from)
    if given.get('n_ids', data.n_ids) != data.n_ids:
        raise UserError(f'n_ids is {given["n_ids"]}, but the tokenizer of {data.folder} has {data.n_ids} ids: leave '
                        'n_ids out')
    eos_id = data.eos_id if s.documents else None
    vocabulary = {'vocab_size': padded_vocab(data.n_ids), 'n_ids': data.n_ids, 'eos_id': eos_id}
    return runs.make_config(s.model, {**vocabulary, **given})


# ---- model, schedule, optimizer ----

def count_parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


def describe(s, c, data):
    """Prints parameters and costs. Returns a model without storage and the number of steps."""
    model = runs.blank_model(s.model, c)
    try:
        flops = model.flops_per_token(s.block_size) if hasattr(model, 'flops_per_token') else None
        if s.acceptance_prompts:
            longest_draft(model, None, 'auto')
    except ValueError as error:  # block_size does not suit the model, or it cannot draft
        raise UserError(str(error))
    n_steps = math.ceil(s.max_tokens / (s.batch_size * s.block_size))
    tokens = data.splits['train']['tokens']
    amount = 'fresh training rows without end'
    if tokens:
        amount = f'{tokens:,} training tokens, {s.max_tokens / tokens:.2f} epochs'
    print(f'model {s.model}: {count_parameters(model):,} parameters, vocabulary {data.n_ids} ({data.tokenizer})\n'
          f'data {data.folder}: {amount}\n'
          f'{n_steps:,} steps of {s.batch_size} x {s.block_size} = {s.batch_size * s.block_size:,} tokens'
          + (f', {flops / 1e6:,.1f} MFLOP per token' if flops else ''))
    constant_until = s.max_tokens * (1 - s.decay_fraction * (s.schedule == 'wsd'))
    if s.warmup_tokens > constant_until and not s.eval_only:
        what = 'decay begins' if constant_until < s.max_tokens else 'run ends'
        print(f'learning_rate = {s.learning_rate:g} is never reached: the warm-up takes {s.warmup_tokens:,} tokens, '
              f'and the {what} after {constant_until:,.0f}')
    return model, n_steps


def print_memory(s, c, blank_model, machine):
    """Prints the estimated memory of a process, and whether it fits a GPU of s.memory GiB."""
    n_params = count_parameters(blank_model)
    n_processes = processes_meant(s, machine.world)
    most = math.ceil(s.batch_size / n_processes)  # sequences of a process
    n_rows = min(s.micro_batch_size, most)
    whole = 16 * n_params  # weights, gradients, two moments
    if s.optimizer == 'muon':
        whole -= 4 * sum(p.numel() for p in hidden_matrices(blank_model))  # which have one moment
    held, what = whole + 4 * n_params * (n_processes > 1), 'weights, gradients and moments'  # DDP has buckets besides
    evaluation = 0
    if s.parallel == 'fsdp' and n_processes > 1:
        n_shards = s.shard or n_processes
        gathered, evaluation = parallel.gathered_bytes(blank_model, n_rows < most)
        held, what = whole / n_shards + gathered, f'1/{n_shards} of {what}, and gathered parts'
        evaluation += whole / n_shards
    # of windows too long for a CPU, the tiles of its attention would take minutes to count
    on_gpu = s.memory is not None or machine.device.type == 'cuda' or s.block_size > 1024
    dtype = pick_dtype(s.dtype, 'cuda') if on_gpu else machine.dtype
    print(f'estimated memory per process: {held / 2**30:.2f} GiB for {what}', end='', flush=True)
    try:
        fixed, by_row = memory_by_rows(lambda: runs.blank_model(s.model, c), lambda model: make_optimizer(model, s),
                                       dtype, s.block_size, on_gpu)
    except Exception as error:  # an operator that only numbers can answer, in an edited model
        print(f'; activations cannot be told: {type(error).__name__}: {first_line(error)}')
        return
    fixed += held - whole
    needed = max(fixed + by_row * n_rows, evaluation)
    print(f', {needed / 2**30:.2f} GiB at the peak of a step, micro-batches of {n_rows}, products in '
          f'{str(dtype)[6:]}, {"attention as on a GPU" if on_gpu else "on a CPU, whose allocator may take half more"}')
    if s.memory is None:
        return
    room = 0.95 * s.memory * 2 ** 30  # the rest is the driver's, and between tensors
    largest = min(most, int((room - fixed) / by_row)) if evaluation <= room else 0
    advice = f'the largest micro_batch_size that does is {largest}'
    if largest < 1:
        advice = 'no micro_batch_size does: choose a smaller block_size or model, or see checkpoint_ in --help'
    print(f'a step {"fits" if needed <= room else "does not fit"} {s.memory:g} GiB; {advice}')


def processes_meant(s, world):
    """How many processes there are; in a dry run with --shard=64 and no torchrun, the 64 that would be started."""
    return s.shard if s.dry_run and s.shard and world == 1 else world


def check_memory(s, model, device):
    """Raises UserError for a model that cannot be held: later the kernel would end the process without a word."""
    bytes_per_weight = 8 if s.eval_only else 16  # `loss_error` holds a second copy
    if device.type == 'cuda':  # the model is made on the host
        bytes_per_weight = 4
    needed = bytes_per_weight * count_parameters(model)
    have = memory_bytes()
    if needed > have:
        raise UserError(f'the model needs {needed / 2**30:,.0f} GiB of memory, this machine has {have / 2**30:,.0f}: '
                        'choose a smaller one')


def read_weights(s, record):
    """The weights to start from, if not from random ones or from this run's checkpoint: (run folder, step, tensors)."""
    source = s.init_from
    if record and s.eval_only:
        source = s.out_dir
    elif s.extend or record and checkpoint.checkpoints(s.out_dir):
        source = None
    if not source:
        return None, 0, None
    state, files = checkpoint.load_checkpoint(source, ('model.safetensors',))
    return source, state['step'], files['model.safetensors']


def make_model(s, c, data, device, source, weights):
    """The model on its device, from seeded random weights or from those of the run `source`."""
    torch.manual_seed(s.seed)
    model = runs.model_file(s.model).Model(c).to(device)
    if source:
        n_windows = min(2, data.n_windows('val', s.block_size))
        runs.start_from(model, source, weights, data.val_batch(range(n_windows), s.block_size)[0])
    return model


def choose_scan(model, machine) -> dict:
    """Whether the model trains by its equations or by their fast form. Prints it; returns the record for log.jsonl."""
    with machine.autocast():
        report = runs.choose_scan(model)
    if report is None:
        return {}
    scan, difference, seconds = report['scan'], report['difference'], report['seconds']
    if difference is None:
        print(f'scan: {scan}, not compared with another form')
    elif scan == 'fast':
        print(f'scan: fast, within {difference:.0e} of the equations (checked in {seconds:.1f} s)')
    else:  # the model has said why
        print(f'scan: loop (checked in {seconds:.1f} s)')
    is_number = difference is not None and math.isfinite(difference)
    return {'scan': scan, 'scan_difference': difference if is_number else None, 'scan_seconds': seconds}


def last_before_decay(s: Settings) -> int | None:
    """Steps of a wsd run before its learning rate decays: from there it can be made longer. None for other schedules.

    At this step there is always a checkpoint, and it stays.
    """
    tokens_per_step = s.batch_size * s.block_size
    return int(s.max_tokens * (1 - s.decay_fraction) // tokens_per_step) if s.schedule == 'wsd' else None


def learning_rate(s: Settings, tokens: int) -> float:
    """Learning rate of the step that ends at `tokens`."""
    floor = s.learning_rate / 10 if s.min_lr is None else s.min_lr
    if tokens < s.warmup_tokens:
        return s.learning_rate * tokens / s.warmup_tokens
    if s.schedule == 'wsd':
        start = s.max_tokens * (1 - s.decay_fraction)
        left = 1 - min(1.0, max(0.0, tokens - start) / max(1.0, s.max_tokens - start))
    elif s.schedule == 'cosine':
        done = (tokens - s.warmup_tokens) / max(1, s.max_tokens - s.warmup_tokens)
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        left = 1.0
    return floor + (s.learning_rate - floor) * left


def make_optimizer(model: torch.nn.Module, s: Settings) -> torch.optim.AdamW | MuonAndAdamW:
    """The optimizer; weight decay on tensors of two and more dimensions."""
    params = [p for p in model.parameters() if p.requires_grad]
    if s.optimizer == 'muon':
        of_muon = hidden_matrices(model)
        hidden = [p for p in params if p in of_muon]
        if not hidden:
            raise UserError('optimizer = muon trains linear layers but heads, and this model has none: take adamw')
        params = [p for p in params if p not in of_muon]
    groups = [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': s.weight_decay},
              {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]
    adamw = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=True)
    if s.optimizer == 'adamw':
        return adamw
    muon = torch.optim.Muon(hidden, lr=s.learning_rate, weight_decay=s.weight_decay, adjust_lr_fn='match_rms_adamw')
    return MuonAndAdamW(muon, adamw, pick_dtype('auto', hidden[0].device.type))


def compile_model(model: torch.nn.Module):
    """torch.compile of it. On a CPU, where attention cuts each block's graph, all blocks share the parts."""
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # else each block is compiled anew, for its number
    import torch._functorch.config as functorch
    if hasattr(functorch, 'backward_pass_autocast'):  # else what is fp32 in the backward would be bf16
        functorch.backward_pass_autocast = 'off'  # as without a compiler
    return torch.compile(model)


# ---- evaluation ----

def evaluate(model, data, s, machine) -> dict[str, float]:
    """'val', the validation loss in nats per token, and for each further part of the loss 'val_<its name>'.

    The same tokens each time, and for any number of processes.
    """
    model.eval()
    with machine.autocast():
        parts, _ = validation_loss(model, data, s.block_size, s.eval_tokens, s.eval_seed, s.micro_batch_size,
                                   machine.device)
    model.train()
    further = {f'val_{name}': mean for name, mean in parts.items() if name not in ('loss', 'nll')}
    return {'val': parts['nll'], **further}


@torch.no_grad()
def scores(model, data, s, machine) -> dict[str, float]:
    """A synthetic task's exact scores by name and, if asked for, 'acceptance'. `model` is the one that is not compiled.

    Acceptance is the share of drafted tokens that is accepted, 5 at a time or as many as the model can (NextLat paper,
    appendix).
    """
    model.eval()
    with machine.autocast():
        found = data.score(model, machine.device, s.micro_batch_size) if hasattr(data, 'score') else {}
        if s.acceptance_prompts and has_right_extend(model):
            length, T = min(5, model.longest_draft), s.block_size // 2
            n_prompts = min(s.acceptance_prompts, data.n_windows('val', T))
            prompts = data.val_batch(range(n_prompts), T)[0].tolist()
            _, drafts = speculative_generate(model, prompts, s.block_size - T, draft_len=length, seed=s.seed)
            found['acceptance'] = sum(drafts.accepted) / max(1, drafts.drafted)
    model.train()
    return found


def print_sample(model, data, s, machine):
    """Continues the start of the validation set, or the prompt of a task."""
    tokenizer = load_tokenizer(data.tokenizer)
    prompt, room = data.example(s.block_size, s.sample_tokens)
    with machine.autocast():
        new, = generate(model.eval(), [prompt], room, temperature=0.8, top_k=50, seed=s.seed, eos_id=data.eos_id)
    before, after = (tokenizer.decode(ids).decode(errors='replace') for ids in (prompt, new))
    print(f'\na sample, from a prompt between bars:\n|{before}|{after}\n')


# ---- the loop ----

def train_step(model, ddp, optimizer, data, s, step, machine, skips, stop):
    """One optimizer step: (means of the loss parts over the global batch, gradient norm, whether a process must stop).

    The loss is the mean over the counted tokens of the global batch: each micro-batch weighs as many as it has, or as
    its `loss_count` where the model's loss is a mean over something else. The parts are this process's share; their sum
    over processes is the mean. skips: see `skip_if_not_finite`.
    """
    rank, world = machine.rank, machine.world
    torch.manual_seed(((s.seed << 32) + (step << 10) + rank) % 2 ** 63)  # dropout's stream
    if hasattr(model, 'begin_step'):
        model.begin_step(random.Random(f'{s.seed} {step}'))
    for group in optimizer.param_groups:
        group['lr'] = learning_rate(s, (step + 1) * s.batch_size * s.block_size)
    mine = slice(rank * s.batch_size // world, (rank + 1) * s.batch_size // world)
    idx, targets = data.train_batch(step, s.batch_size, s.block_size, s.seed, mine)
    most = math.ceil(s.batch_size / world)  # sequences of a process: all have equally many micro-batches, as FSDP needs
    n_micro = min(len(idx), math.ceil(most / s.micro_batch_size))
    micro_batches = list(zip(idx.tensor_split(n_micro), targets.tensor_split(n_micro)))  # of one size where they can be
    counts = [counted(x, y, model.config.eos_id) for x, y in micro_batches]
    loss_counts = [model.loss_count(x, y) for x, y in micro_batches] if hasattr(model, 'loss_count') else counts
    agreed = torch.tensor([sum(counts), sum(loss_counts), stop], dtype=torch.int64)
    if world > 1:
        dist.all_reduce(agreed)  # on the host: does not wait for a GPU
    total, loss_total, stop = max(1, int(agreed[0])), max(1, int(agreed[1])), bool(agreed[2])
    if machine.device.type == 'cuda':  # one copy behind the host's back, which windows with gaps between would not be
        whole = (t.contiguous().pin_memory().to(machine.device, non_blocking=True) for t in (idx, targets))
        micro_batches = list(zip(*(t.tensor_split(n_micro) for t in whole)))
    parts = {}
    for i, ((x, y), count, loss_count) in enumerate(zip(micro_batches, counts, loss_counts)):
        x, y = x.to(machine.device), y.to(machine.device)  # Apple's GPUs have no pinned memory: only now
        is_last = i == n_micro - 1
        parallel.reduce_gradients(model, ddp, is_last)
        with machine.autocast():
            out = ddp(x, y)
        share, loss_share = count / total, loss_count / loss_total
        (out['loss'] * (loss_share * world)).backward()  # DDP and FSDP take the mean over processes
        for name, value in out.items():
            parts[name] = parts.get(name, 0) + value.detach() * (share if name == 'nll' else loss_share)
    norm = parallel.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf))
    skip_if_not_finite(optimizer, norm, skips)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return parts, norm, stop


def read_numbers(parts, norm, machine) -> dict[str, float]:
    """The global means of the loss parts and the gradient norm as Python numbers. Waits for the device."""
    values = torch.stack([value.float() for value in parts.values()])
    if machine.world > 1:
        dist.all_reduce(values)
    return {**dict(zip(parts, values.tolist())), 'grad_norm': norm.item()}


def skip_if_not_finite(optimizer, norm, skips):
    """Lets the next optimizer step change nothing if the gradient norm is not finite. Does not wait for the device.

    skips (3,) on the device counts: steps skipped since it was last read, those in a row now, the most in a row.
    """
    bad = (~norm.isfinite()).float()
    optimizer.found_inf = bad  # all processes have the same norm
    in_a_row = (skips[1] + 1) * bad
    skips.copy_(torch.stack([skips[0] + bad, in_a_row, torch.maximum(skips[2], in_a_row)]))


def read_skips(s, step, skips, lr) -> int:
    """Steps skipped since the last call. Raises UserError if there were three in a row. Waits for the device."""
    n_skipped, _, most_in_a_row = map(int, skips.tolist())
    if most_in_a_row >= 3:
        raise UserError(f'the gradients were not finite three steps in a row, up to step {step}, at a learning rate of '
                        f'{lr:.2e}; these steps changed nothing. {checkpoint.last_good(s.out_dir)}')
    if n_skipped:
        say(f'step {step}: {n_skipped} steps skipped since the last line of the log: their gradients were not finite')
    skips[0] = 0
    return n_skipped


def train(s, model, compiled, ddp, optimizer, data, machine, step, n_steps, seconds, log, wandb, stop, saving):
    """The loop, from `step` to n_steps or until `stop` is not empty: (step, seconds of training, whether stopped).

    The same model in three forms: as it is, compiled, and wrapped for several processes. Only the first process has a
    log. saving: see `save`.
    """
    progress = make_progress()
    tokens_per_step = s.batch_size * s.block_size
    peak = flops = None
    if hasattr(model, 'flops_per_token'):
        flops = model.flops_per_token(s.block_size)
        peak = peak_flops(machine.device, machine.dtype) * machine.world
    first_step, first_seconds = step, seconds
    skips = torch.zeros(3, device=machine.device)
    since, since_step, stopping = time.perf_counter(), step, False
    while step < n_steps and not stopping:
        stop_here = bool(stop) or machine.is_orphan()
        parts, norm, stopping = train_step(model, ddp, optimizer, data, s, step, machine, skips, stop_here)
        step += 1
        intervals = s.log_interval, s.save_interval, s.eval_interval
        log_due, save_due, eval_due = (step % n == 0 or step == n_steps for n in intervals)
        save_due |= step == last_before_decay(s)
        if not (log_due or save_due or eval_due or stopping):
            continue
        numbers = read_numbers(parts, norm, machine)
        now = time.perf_counter()
        seconds += now - since
        speed = (step - since_step) * tokens_per_step / (now - since)
        lr = optimizer.param_groups[0]['lr']
        n_skipped = read_skips(s, step, skips, lr)
        for written in filter(Future.done, saving):
            written.result()  # raises what went wrong, while there is time to make room
        line = {'step': step, 'tokens': step * tokens_per_step, 'seconds': seconds, **numbers, 'lr': lr,
                'tokens_per_s': speed}
        if flops:
            line['mfu'] = speed * flops / peak
        if held := peak_memory(machine.device):
            line['memory_gib'] = held / 2 ** 30
        if n_skipped:
            line['skipped'] = n_skipped
        left = (n_steps - step) * (seconds - first_seconds) / (step - first_step)
        progress(f'step {step}/{n_steps} | loss {numbers["loss"]:.4f} | {speed:,.0f} tokens/s | '
                 f'ETA {left // 60:.0f}m{left % 60:02.0f}s')
        if eval_due:
            with parallel.whole_weights(model):
                found = evaluate(compiled, data, s, machine) | (scores(model, data, s, machine) if log else {})
            line |= found
            further = ''.join(f', {name} {value:.3g}' for name, value in found.items() if name != 'val')
            say(f'step {step}: training loss {numbers["nll"]:.4f}, validation loss {line["val"]:.4f} nats per token'
                + further)
        line = {name: value for name, value in line.items() if math.isfinite(value)}  # JSON has no other numbers
        if log:
            log.write(runs.log_line(line))
        if wandb:
            wandb.log(line, step=step)
        if log and (save_due or stopping):
            os.fsync(log.fileno())  # never behind the checkpoint
        if save_due or stopping:
            save(s, model, optimizer, step, seconds, saving)
        since, since_step = time.perf_counter(), step  # evaluation and saving are not training time
    return step, seconds, stopping


def save(s, model, optimizer, step, seconds, saving):
    """Saves a checkpoint, when the one before is written. saving: Futures of those that are written behind training."""
    for written in saving:
        written.result()
    saving.clear()
    if parallel.rank() == 0 or parallel.is_sharded(model):
        written = checkpoint.save_training(s.out_dir, model, optimizer, step, seconds, s.keep_checkpoints,
                                           last_before_decay(s))
        saving += [written] if written else []


# ---- the story ----

def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        argv = join_values(sys.argv[1:] if argv is None else argv, Settings)
        s, given_model, record = read_settings(argv)
        machine = start_processes(s)
        is_first = machine.rank == 0
        if not is_first:
            dist.barrier()  # the first process builds data that is not there yet
        try:
            data = assumed_data(s, record) if s.dry_run and not has_data(s.data) else open_data(s.data)
        finally:
            if is_first and machine.world > 1:
                dist.barrier()
        if s.verify:
            data.verify()
        check_settings(s, data, processes_meant(s, machine.world))
        c = model_config(s, given_model, data, record)
        if is_new(s):
            try:
                runs.check_out_dir(s.out_dir, s.overwrite)
            except UserError as e:
                if not s.dry_run:
                    raise
                if is_first:
                    print(f'training would stop here: {e}', file=sys.stderr)
        claim = contextlib.nullcontext()
        if is_first and not (s.eval_only or s.dry_run):
            claim = runs.claimed(s.out_dir, is_new(s), s.overwrite)
        with claim, contextlib.redirect_stdout(sys.stdout if is_first else open(os.devnull, 'w')):
            run(s, c, data, record, machine, argv)
    if machine.world > 1:
        if is_first and s.wandb_project:
            importlib.import_module('wandb').finish()  # its exit hook will not run
        sys.stdout.flush()
        os._exit(0)  # gloo's threads now and then abort a process that ends in the usual way


def run(s, c, data, record, machine, argv):
    """Everything after the settings are known to be good: model, optimizer, loop."""
    blank_model, n_steps = describe(s, c, data)
    is_large = count_parameters(blank_model) >= BF16_PARAMETERS
    device, world = machine.device, machine.world
    machine.dtype = pick_dtype(s.dtype, device.type, is_large)
    s.matmul = use_matmul(s.matmul, device.type, machine.dtype)
    s.attention = use_attention(s.attention, device.type, machine.dtype, s.block_size)
    is_compiled = s.compile if s.compile is not None else device.type == 'cuda'
    is_sharded = s.parallel == 'fsdp' and world > 1 and not s.eval_only
    by_onednn = ' by oneDNN' if s.matmul == 'onednn' and machine.dtype == torch.float32 else ''
    print(f'{world} process{"es" * (world > 1)} on {device.type}, products in {str(machine.dtype)[6:]}{by_onednn}, '
          f'{"" if is_compiled else "not "}compiled'
          + (f', weights in parts on {s.shard or world} processes' if is_sharded else ''))
    source, source_step, weights = read_weights(s, record)
    if trained := source or (run_of(s) if record else None):
        runs.tell_of_edits(trained)
    if source:
        checkpoint.check_weights(blank_model, runs.adopted(blank_model, weights, source), source)
    if s.dry_run:
        print_memory(s, c, blank_model, machine)
        return
    check_memory(s, blank_model, device)

    model = make_model(s, c, data, device, source, weights)
    runs.check_kernels(model, machine.dtype)
    scan = choose_scan(model, machine)
    if machine.rank == 0:
        tell_of_another_loss(model)
    if is_sharded:
        parallel.shard_model(model, device, s.shard)
    if not s.eval_only:
        optimizer = make_optimizer(model, s)
        step, seconds = restore(s, model, optimizer) if record else (0, 0.0)
    compiled = compile_model(model) if is_compiled else model
    if s.eval_only:
        val = evaluate(compiled, data, s, machine)['val']
        print(f'validation loss {val:.4f} nats per token at step {source_step} of {source}')
        return
    ddp = compiled
    if world > 1 and not is_sharded:
        ddp = torch.nn.parallel.DistributedDataParallel(
            compiled, device_ids=[device] if device.type == 'cuda' else None,
            find_unused_parameters=bool(scan and model.scan_report['unused']))

    log = wandb = None
    if machine.rank == 0:
        if is_new(s):
            start_folder(s, c, data, machine)
        if is_extension(s):
            runs.copy_log(s.extend, s.out_dir, step)
        log, wandb = runs.open_log(s.out_dir, step, runs.code_digest(s.model)), start_wandb(s, c)
        if scan:
            log.write(runs.log_line({'step': step, **scan}))
    saving = []
    if is_extension(s):
        save(s, model, optimizer, step, seconds, saving)
    print(f'run folder {s.out_dir}, from step {step}; Ctrl-C finishes the step, saves and stops')
    try:
        with log or contextlib.nullcontext(), caught_signals() as stop:
            step, seconds, stopped = train(s, model, compiled, ddp, optimizer, data, machine, step, n_steps, seconds,
                                           log, wandb, stop, saving)
    finally:
        for written in saving:  # as long as this process holds the folder's lock
            written.result()
    if stopped:
        say(f'stopped after step {step}. Go on with: {resume_command(argv, world)}')
    else:
        with parallel.whole_weights(model):
            if machine.rank == 0:
                finish(s, model, data, machine, seconds)


def restore(s, model, optimizer) -> tuple[int, float]:
    """(step, seconds of training) of the checkpoint that training goes on from, loaded."""
    if not is_extension(s):
        if s.extend and not checkpoint.checkpoints(s.out_dir):
            raise UserError(f'{s.out_dir} was stopped before it had the weights of {s.extend}: start it once more, '
                            f'with --extend={s.extend} --max_tokens={s.max_tokens} --overwrite in place of --resume')
        return checkpoint.restore_training(s.out_dir, model, optimizer)
    saved = saved_settings(Settings, runs.read_run(s.extend)['settings'], f'{s.extend}/config.json')
    up_to = last_before_decay(saved)
    if not any(up_to is None or checkpoint.step_of(path) <= up_to for path in checkpoint.checkpoints(s.extend)):
        before = '' if up_to is None else f' from before its decay, which begins after step {up_to}'
        raise UserError(f'{s.extend} has no checkpoint{before}, so it cannot be made longer: train anew with more '
                        'max_tokens')
    return checkpoint.restore_training(s.extend, model, optimizer, up_to)


def start_folder(s, c, data, machine):
    """Makes the run folder of a new run."""
    runs.remove_run(s.out_dir)  # check_out_dir has seen --overwrite
    for_one_start = dict(resume=False, overwrite=False, eval_only=False, dry_run=False, memory=None)
    runs.save_run(s.out_dir, {
        'model': s.model,
        'settings': {**asdict(s), **for_one_start, 'dtype': str(machine.dtype)[6:]},
        'model_config': asdict(c),
        'data': {'folder': str(data.folder), 'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id,
                 'bos': data.bos, 'sha256': data.sha256},
        'versions': {'python': platform.python_version(), 'torch': torch.__version__, 'device': str(machine.device),
                     'processes': machine.world}})


def start_wandb(s, c):
    """A wandb run, or None if none is asked for."""
    if not s.wandb_project:
        return None
    import wandb
    return wandb.init(project=s.wandb_project, name=s.out_dir, config={**asdict(s), **asdict(c)})


def resume_command(argv, world):
    args = [a for a in argv if a not in ('--resume', '--overwrite') and not a.startswith('--extend=')]
    start = f'torchrun --nproc_per_node={world}' if world > 1 else 'python'
    return f'{start} {shlex.join(["train.py", *args, "--resume"])}'


def finish(s, model, data, machine, seconds):
    """The loss curve, a sample, and what to do next."""
    runs.plot_loss(s.out_dir)
    if s.sample_tokens:
        print_sample(model, data, s, machine)
    look = f'python sample.py {s.out_dir} "Return the"    generates text'
    if hasattr(data, 'score'):
        look = f'python -m analysis.scores {s.out_dir}    draws its scores'
    print(f'done in {seconds / 60:.1f} minutes of training. Next:\n'
          f'  {look}\n'
          f'  {s.out_dir}/loss.png                   is the loss curve; log.jsonl has its numbers\n'
          f'  python train.py --help                     lists every setting')


if __name__ == '__main__':
    main()
