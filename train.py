"""Trains a language model.

    python train.py config/quickstart.py                      a small one on this machine, in minutes
    python train.py config/standard_s.py --learning_rate=3e-4 any setting can be overridden
    torchrun --nproc_per_node=8 train.py config/standard_l.py several GPUs: same batches, same losses
    python train.py config/quickstart.py --resume             goes on after an interruption, on the very same batches

Reads top to bottom: settings, processes and device, run folder, schedule and optimizer, evaluation, the loop.
"""
import contextlib
import importlib.util
import json
import math
import os
import platform
import random
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

os.environ.setdefault('GOMP_SPINCOUNT', '1000')  # before torch: threads that wait longer leave the core to other programs

import torch
import torch.distributed as dist

from common import runs
from common.decoding import generate
from common.files import UserError, friendly_errors
from common.machine import peak_flops, pick_dtype, start_processes
from common.runs import check_vocabulary, make_config
from common.settings import check_ranges, load_settings, saved_settings
from common.speculative import longest_draft, speculative_generate
from data import open_data
from data.tokenizers import load_tokenizer, padded_vocab


@dataclass
class Settings:
    """Defaults are those of the SPS paper, section 4, so that a config file holds only what differs."""

    # the run
    model: str = 'standard'  # model_<name>.py; its Config fields are settings too
    out_dir: str | None = None  # run folder; None: out/<name of the config file>
    resume: bool = False  # go on with the run in out_dir, on the same batches
    overwrite: bool = False  # replace the run in out_dir
    init_from: str | None = None  # run folder whose weights to start from; model settings that are not given are that run's
    eval_only: bool = False  # print the validation loss of out_dir (or init_from) and stop
    dry_run: bool = False  # check everything, print sizes and costs, and stop
    seed: int = 1337  # of the initial weights, the data order and dropout
    # data
    data: str = 'data/built/fineweb_edu'  # data folder, or the name of built-in data, a task's with its options: path_star:degree=2,length=5
    documents: bool = True  # stop attention at document boundaries; False sets the model's eos_id to None
    verify: bool = False  # compare every shard with its checksum before the first step
    # batch and length
    batch_size: int = 96  # sequences per optimizer step, over all processes and micro-batches
    micro_batch_size: int = 8  # sequences per forward pass of one process; changes memory and speed, not the result
    block_size: int = 4096  # tokens per sequence, T
    max_tokens: int = 20_000_000_000  # tokens to train on, the decay included
    # optimizer: AdamW
    learning_rate: float = 6e-4  # peak
    min_lr: float | None = None  # at the end of the schedule; None: learning_rate / 10
    schedule: str = 'wsd'  # after a linear warm-up: wsd (constant, then linear decay), cosine or constant
    warmup_tokens: int = 50_000_000  # tokens of linear warm-up
    decay_fraction: float = 0.1  # share of max_tokens that wsd decays over
    beta1: float = 0.9  # decay of the gradient's running mean
    beta2: float = 0.95  # decay of the squared gradient's running mean
    weight_decay: float = 0.1  # on tensors of two and more dimensions, the embedding included
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    # evaluation and records, in steps
    eval_interval: int = 1000  # steps between validation losses
    eval_tokens: int = 4_000_000  # tokens of the fixed validation set, from its start
    acceptance_prompts: int = 0  # validation prompts on which each evaluation also drafts, 5 tokens at a time; for models that can
    log_interval: int = 10  # steps between lines of log.jsonl
    save_interval: int = 1000  # steps between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints that stay; at least 2, so that a damaged one has one to fall back to
    sample_tokens: int = 200  # tokens of the text generated after training
    wandb_project: str | None = None  # also log there, if wandb is installed
    # machine
    device: str = 'auto'  # auto (cuda where there is one), cuda or cpu
    dtype: str = 'auto'  # of the products: bfloat16 or float32; weights are fp32 always; auto: bfloat16 where it is faster
    compile: bool | None = None  # torch.compile; None: on GPUs
    threads: int | None = None  # CPU threads per process; None: the machine's cores, shared by its processes


MAY_CHANGE = {'resume', 'overwrite', 'eval_only', 'dry_run', 'out_dir', 'verify', 'micro_batch_size', 'eval_interval', 'log_interval',
              'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens', 'wandb_project', 'device', 'compile', 'threads'}  # on --resume
BF16_PARAMETERS = 1_000_000  # CPUs with bf16 units gain from bf16 at this size and above; 4 layers x 128 (0.8M) may lose


# ---- processes and device ----


# ---- the run folder ----

def read_settings(argv):
    """Settings, the model's Config values given by the user, and the saved record if this continues a run."""
    s, positional, given = load_settings(Settings, argv, lambda name: runs.model_file(name).Config)
    if s.out_dir is None:
        s.out_dir = f'out/{Path(positional[0]).stem}' if positional else f'out/{s.model}'
    own = {f.name for f in fields(Settings)}
    record = None
    if s.resume or (s.eval_only and not s.init_from):
        record = runs.read_run(s.out_dir)
        if s.dtype == 'auto':
            given.pop('dtype', None)  # the run recorded what auto was
        saved = {**record['settings'], **record['model_config']}
        for name in given.keys() - MAY_CHANGE:
            if s.resume and saved.get(name, given[name]) != given[name]:
                raise UserError(f'the run in {s.out_dir} has {name} = {saved[name]!r}, but {given[name]!r} is asked for: go on as it was '
                                f'with python train.py --out_dir={s.out_dir} --resume, or start another with another --out_dir')
        values = {**record['settings'], **{k: v for k, v in given.items() if k in own}, 'out_dir': s.out_dir}
        s = saved_settings(Settings, values, f'{s.out_dir}/config.json')
    elif s.init_from:  # what is not given is as in the source
        source = runs.read_run(s.init_from)
        source = source['model_config'] if source['model'] == s.model else {}
        if 'documents' not in given and 'eos_id' in source:
            s.documents = source['eos_id'] is not None
        given = {k: v for k, v in source.items() if k not in ('vocab_size', 'n_ids', 'eos_id')} | given
    return s, {k: v for k, v in given.items() if k not in own}, record


def check_settings(s, data, world):
    """Raises UserError for what would fail later."""
    if s.schedule not in ('wsd', 'cosine', 'constant'):
        raise UserError(f"schedule is {s.schedule!r}: expected 'wsd', 'cosine' or 'constant'")
    inf = math.inf
    check_ranges(s, batch_size=(1, inf), micro_batch_size=(1, inf), block_size=(1, inf), max_tokens=(1, inf), eval_interval=(1, inf),
                 log_interval=(1, inf), save_interval=(1, inf), keep_checkpoints=(2, inf), threads=(1, inf), sample_tokens=(0, inf),
                 acceptance_prompts=(0, inf), learning_rate=(0, inf), min_lr=(0, inf), warmup_tokens=(0, inf), decay_fraction=(0, 1),
                 beta1=(0, 1 - 1e-9), beta2=(0, 1 - 1e-9), weight_decay=(0, inf), grad_clip=(0, inf), seed=(0, 2 ** 31))
    if s.sample_tokens:
        load_tokenizer(data.tokenizer)  # now, not after the training
    if s.batch_size < world:
        raise UserError(f'batch_size is {s.batch_size}, fewer sequences than the {world} processes: each needs one')
    if s.wandb_project and importlib.util.find_spec('wandb') is None:
        raise UserError(f'wandb_project is {s.wandb_project!r}, but wandb is not installed: pip install wandb, or leave it out')
    for split in ('train', 'val'):
        if data.n_windows(split, s.block_size) < 1:
            raise UserError(f'{data.folder} has {data.splits[split]["tokens"]} {split} tokens, too few for windows of '
                            f'block_size = {s.block_size}: use a smaller block_size or more data')


def model_config(s, given, data, record):
    """The model's Config: the saved one, or the user's values with the vocabulary of the data."""
    if record:
        check_vocabulary(record, data, s.out_dir)
        if s.resume and record['data']['sha256'] != data.sha256:
            raise UserError(f'{data.folder} is not the data that the run in {s.out_dir} was trained on (its checksums differ): '
                            'bring that data back, or start another run with --init_from')
        return make_config(record['model'], record['model_config'])
    if s.init_from:
        check_vocabulary(runs.read_run(s.init_from), data, s.init_from)
    vocabulary = {'vocab_size': padded_vocab(data.n_ids), 'n_ids': data.n_ids, 'eos_id': data.eos_id if s.documents else None}
    if given.get('n_ids', data.n_ids) != data.n_ids:
        raise UserError(f'n_ids is {given["n_ids"]}, but the tokenizer of {data.folder} has {data.n_ids} ids: leave n_ids out')
    return make_config(s.model, {**vocabulary, **given})


def claim_folder(s):
    """Raises UserError if out_dir holds something that this run must not touch."""
    out = Path(s.out_dir)
    if s.resume or s.eval_only or not out.exists():
        return
    if (out / 'config.json').exists():
        if not s.overwrite:
            raise UserError(f'{out} holds a run already: --resume goes on with it, --overwrite replaces it, '
                            'another --out_dir keeps both')
    elif not out.is_dir() or any(p.name != '.config.json.writing' for p in out.iterdir()):  # left by a kill at the very start
        raise UserError(f'{out} exists and is not a run folder: give another --out_dir')


def start_folder(s, c, data, machine):
    """Makes the run folder of a new run."""
    out = Path(s.out_dir)
    if (out / 'config.json').exists():  # claim_folder has seen --overwrite; one rename, so that a kill leaves no half of it
        old = out.with_name(f'.{out.name}.replaced')
        shutil.rmtree(old, ignore_errors=True)
        os.replace(out, old)
        shutil.rmtree(old)
    flags = dict(resume=False, overwrite=False, eval_only=False, dry_run=False, dtype=str(machine.dtype)[6:])
    runs.save_run(s.out_dir, {
        'model': s.model, 'settings': {**asdict(s), **flags}, 'model_config': asdict(c),
        'data': {'folder': str(data.folder), 'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id, 'sha256': data.sha256},
        'versions': {'python': platform.python_version(), 'torch': torch.__version__, 'device': str(machine.device), 'processes': machine.world}})


def start_log(s, step):
    """Opens log.jsonl for appending, cut back to the records up to `step`: those after it will come again."""
    path = Path(s.out_dir) / 'log.jsonl'
    kept = [r for r in runs.read_log(s.out_dir) if r['step'] <= step]
    temporary = path.with_name('.log.jsonl.writing')
    with open(temporary, 'w') as file:
        file.write(''.join(json.dumps(r) + '\n' for r in kept))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return open(path, 'a', buffering=1)


def plot_loss(folder):
    """Writes loss.png: training and validation loss against tokens."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    records = runs.read_log(folder)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
    for key, style, label in (('nll', dict(alpha=0.5, linewidth=0.8), 'training'), ('val', dict(marker='o', markersize=3), 'validation')):
        points = [(r['tokens'], r[key]) for r in records if key in r]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    axes.set(xlabel='tokens', ylabel='nats per token', title=str(folder))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(folder) / 'loss.png', dpi=130)
    plt.close(figure)


# ---- schedule, optimizer, checkpoints ----

def learning_rate(s, tokens):
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


def make_optimizer(model, s):
    """AdamW; weight decay on tensors of two and more dimensions."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': s.weight_decay},
              {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]
    return torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=True)


def save(s, model, optimizer, step, seconds):
    """A checkpoint from which training goes on exactly. Random streams need no state: they are functions of seed and step."""
    names = {p: name for name, p in model.named_parameters()}
    moments = {f'{key}/{names[p]}': value for p, state in optimizer.state.items() for key, value in state.items()}
    files = {'model.safetensors': {name: p for p, name in names.items()}, 'optimizer.safetensors': moments}
    runs.save_checkpoint(s.out_dir, step, files, {'step': step, 'seconds': seconds}, s.keep_checkpoints)


def read_weights(s, record):
    """The weights to start from, if not from random ones or by `restore`: (run folder, state, tensors) or (None, None, None)."""
    source = s.init_from
    if record:
        source = s.out_dir if s.eval_only else None if runs.checkpoints(s.out_dir) else s.init_from
    if not source:
        return None, None, None
    state, files = runs.load_checkpoint(source, ('model.safetensors',))
    return source, state, files['model.safetensors']


def check_conversion(model, source, new, data, s):
    """Raises UserError unless the model, with weights that `source` has not, still gives the logits of `source`; prints how near it is."""
    idx = data.val_batch(range(min(2, data.n_windows('val', s.block_size))), s.block_size)[0].to(model.head.weight.device)
    with torch.no_grad():
        want, have = (m.eval().logits(idx)[..., :data.n_ids] for m in (runs.load_run(source, idx.device)[0], model))
    model.train()
    worst = (have - want).abs().max().item()
    if not worst < 1e-4:
        raise UserError(f'{source} cannot become this model: with {", ".join(new)} at their start its logits change by {worst:.1e}. '
                        'Settings that are not about the new weights (window, documents, n_head) must be those of the source')
    print(f'{source} continues as another model: {", ".join(new)} are new, and its logits change by at most {worst:.1e} at step 0')


def restore(s, model, optimizer):
    """Loads the newest whole checkpoint of out_dir. Returns (step, seconds); (0, 0) if the run was stopped before its first."""
    if not runs.checkpoints(s.out_dir):
        return 0, 0.0
    state, files = runs.load_checkpoint(s.out_dir)
    runs.load_weights(model, files['model.safetensors'], s.out_dir)
    params = dict(model.named_parameters())
    for name, value in files['optimizer.safetensors'].items():
        key, _, param = name.partition('/')
        if param not in params:
            raise UserError(f'optimizer.safetensors of {s.out_dir} does not fit this model: it has a tensor {name!r}')
        optimizer.state[params[param]][key] = value.to(params[param].device)
    return state['step'], state['seconds']


# ---- evaluation ----

@torch.no_grad()
def evaluate(model, data, s, machine):
    """Validation loss in nats per token: the same tokens for any number of processes, summed in float64."""
    model.eval()
    T = s.block_size
    n = min(data.n_windows('val', T), max(1, s.eval_tokens // T))
    totals = torch.zeros(2, dtype=torch.float64)
    mine = range(machine.rank, n, machine.world)
    for a in range(0, len(mine), s.micro_batch_size):
        idx, targets = data.val_batch(mine[a:a + s.micro_batch_size], T)
        count = counted(idx, targets, model.config.eos_id)
        with machine.autocast():
            nll = model(idx.to(machine.device), targets.to(machine.device))['nll']
        totals += torch.tensor([nll.item() * count, count], dtype=torch.float64)
    if machine.world > 1:
        dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[1]).item()


def counted(idx, targets, eos_id):
    """How many positions the loss is a mean over: a target that counts, and an input that does not end a document."""
    mask = targets >= 0
    if eos_id is not None:
        mask &= idx != eos_id
    return int(mask.sum())


@torch.no_grad()
def scores(model, data, s, machine):
    """{name: value} of a synthetic task's exact scores and, if asked for, of 'acceptance': the share of the tokens drafted, 5 at a time or
    as many as the model can, that is accepted (NextLat paper, appendix). `model` is the one that is not compiled."""
    model.eval()
    with machine.autocast():
        found = data.score(model, machine.device, s.micro_batch_size) if hasattr(data, 'score') else {}
        if s.acceptance_prompts:
            length, T = min(5, model.longest_draft), s.block_size // 2
            prompts = data.val_batch(range(min(s.acceptance_prompts, data.n_windows('val', T))), T)[0].tolist()
            _, drafts = speculative_generate(model, prompts, s.block_size - T, draft_len=length, seed=s.seed)
            found['acceptance'] = drafts.accepted_per_step / length
    model.train()
    return found


def print_sample(model, data, s, machine):
    """Continues the start of the validation set, or the prompt of a task."""
    tokenizer = load_tokenizer(data.tokenizer)
    prompt, room = data.example(s.block_size, s.sample_tokens)
    with machine.autocast():
        new = generate(model.eval(), [prompt], room, temperature=0.8, top_k=50, seed=s.seed, eos_id=data.eos_id)[0]
    text = [tokenizer.decode(ids).decode(errors='replace') for ids in (prompt, new)]
    print(f'\na sample, from a prompt between bars:\n|{text[0]}|{text[1]}\n')


# ---- the loop ----

def describe(s, c, data, world):
    """Prints parameters, costs and estimated memory. Returns a model without storage and the number of steps."""
    with torch.device('meta'):
        model = runs.model_file(s.model).Model(c)
    n = sum(p.numel() for p in model.parameters())
    try:
        flops = model.flops_per_token(s.block_size)
        if s.acceptance_prompts:
            longest_draft(model, None, 'auto')
    except ValueError as error:  # block_size does not suit the model, or it cannot draft
        raise UserError(str(error))
    steps = math.ceil(s.max_tokens / (s.batch_size * s.block_size))
    rows = min(s.micro_batch_size, math.ceil(s.batch_size / world))
    tokens = data.splits['train']['tokens']
    amount = f'{tokens:,} training tokens, {s.max_tokens / tokens:.2f} epochs' if tokens else 'fresh training rows without end'
    print(f'model {s.model}: {n:,} parameters, vocabulary {data.n_ids} ({data.tokenizer})\n'
          f'data {data.folder}: {amount}\n'
          f'{steps:,} steps of {s.batch_size} x {s.block_size} = {s.batch_size * s.block_size:,} tokens, '
          f'{flops / 1e6:,.1f} MFLOP per token')
    if s.dry_run:
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.head]
        weights = sum(m.weight.numel() for m in layers)
        # how often a token passes a layer, two streams being two: flops_per_token counts 6 for each (at T = 1 attention is nothing)
        passes = (model.flops_per_token(1) / 6 - model.head.weight.numel()) / weights
        widths = sum(m.in_features + m.out_features for m in layers)
        activations = rows * s.block_size * widths * passes * 2  # what linear layers take and give, in bf16
        print(f'estimated memory per process: {16 * n / 2**30:.2f} GiB for weights, gradients and AdamW, '
              f'{activations / 2**30:.2f} GiB for activations (micro-batches of {rows}, less with checkpoint_blocks or checkpoint_unrolls)')
    return model, steps


def progress(line, last=[0.0]):
    """One updating line on a terminal; elsewhere a line every ten seconds."""
    if sys.stdout.isatty():
        print(f'\r{line:<100}', end='', flush=True)
    elif time.time() - last[0] > 10:
        last[0] = time.time()
        print(line, flush=True)


def say(line):
    """A line of its own that stays, above the updating one."""
    print(f'\r{line:<100}' if sys.stdout.isatty() else line, flush=True)


def train_step(model, ddp, optimizer, data, s, step, machine, stop):
    """One optimizer step. Returns (means of the loss parts over the global batch, gradient norm, whether any process must stop).

    The loss is the mean over the counted tokens of the global batch: each micro-batch weighs as many as it has. The parts are
    this process's share; their sum over processes is the mean.
    """
    rank, world = machine.rank, machine.world
    torch.manual_seed(((s.seed << 32) + (step << 10) + rank) % 2 ** 63)  # dropout's stream
    if hasattr(model, 'begin_step'):
        model.begin_step(random.Random(f'{s.seed} {step}'))
    for group in optimizer.param_groups:
        group['lr'] = learning_rate(s, (step + 1) * s.batch_size * s.block_size)
    mine = slice(rank * s.batch_size // world, (rank + 1) * s.batch_size // world)
    idx, targets = data.train_batch(step, s.batch_size, s.block_size, s.seed, mine)
    n_micro = math.ceil(len(idx) / s.micro_batch_size)
    micro = list(zip(idx.tensor_split(n_micro), targets.tensor_split(n_micro)))  # of one size where they can be
    counts = [counted(x, y, model.config.eos_id) for x, y in micro]
    agreed = torch.tensor([sum(counts), stop], dtype=torch.int64)
    if world > 1:
        dist.all_reduce(agreed)  # on the host: does not wait for a GPU
    total, stop = max(1, int(agreed[0])), bool(agreed[1])
    parts = {}
    for i, ((x, y), count) in enumerate(zip(micro, counts)):
        if machine.device.type == 'cuda':
            x, y = (t.pin_memory().to(machine.device, non_blocking=True) for t in (x, y))
        last = i == len(micro) - 1
        with contextlib.nullcontext() if world == 1 or last else ddp.no_sync():
            with machine.autocast():
                out = ddp(x, y)
            (out['loss'] * (count / total * world)).backward()  # DDP takes the mean over processes
        for name, value in out.items():
            parts[name] = parts.get(name, 0) + value.detach() * (count / total)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return parts, norm, stop


def read_numbers(parts, norm, machine):
    """The global means of the loss parts and the gradient norm as Python numbers. Waits for the device."""
    values = torch.stack([*(v.float() for v in parts.values())])
    if machine.world > 1:
        dist.all_reduce(values)
    return {**dict(zip(parts, values.tolist())), 'grad_norm': norm.item()}


def main():
    with friendly_errors():
        s, given_model, record = read_settings(sys.argv[1:])
        machine = start_processes(s)
        master = machine.rank == 0
        if not master:
            dist.barrier()  # the first process builds data that is not there yet
        try:
            data = open_data(s.data)
        finally:
            if master and machine.world > 1:
                dist.barrier()
        if s.verify:
            data.verify()
        check_settings(s, data, machine.world)
        c = model_config(s, given_model, data, record)
        claim_folder(s)
        with contextlib.redirect_stdout(sys.stdout if master else open(os.devnull, 'w')):
            run(s, c, data, record, machine)
    if machine.world > 1:
        if master and s.wandb_project:
            importlib.import_module('wandb').finish()  # its exit hook will not run
        sys.stdout.flush()
        os._exit(0)  # gloo's threads now and then abort a process that ends in the usual way


def run(s, c, data, record, machine):
    """Everything after the settings are known to be good: model, optimizer, loop."""
    model, n_steps = describe(s, c, data, machine.world)
    device = machine.device
    machine.dtype = pick_dtype(s.dtype, device.type, sum(p.numel() for p in model.parameters()) >= BF16_PARAMETERS)
    compile = s.compile if s.compile is not None else device.type == 'cuda'
    print(f'{machine.world} process{"es" * (machine.world > 1)} on {device.type}, products in {str(machine.dtype)[6:]}, '
          f'{"" if compile else "not "}compiled')
    source, state, weights = read_weights(s, record)
    if source:
        runs.check_weights(model, runs.adopted(model, weights, source), source)
    if s.dry_run:
        return

    torch.manual_seed(s.seed)
    model = runs.model_file(s.model).Model(c).to(device)
    if source:
        converted = runs.adopted(model, weights, source)
        runs.load_weights(model, converted, source)
        if converted.keys() != weights.keys():
            check_conversion(model, source, sorted(converted.keys() - weights.keys()), data, s)
    fast = torch.compile(model) if compile else model
    if s.eval_only:
        print(f'validation loss {evaluate(fast, data, s, machine):.4f} nats per token at step {state["step"]} of {source}')
        return
    optimizer = make_optimizer(model, s)
    step, seconds = restore(s, model, optimizer) if record else (0, 0.0)
    ddp = fast
    if machine.world > 1:
        ddp = torch.nn.parallel.DistributedDataParallel(fast, device_ids=[device] if device.type == 'cuda' else None)

    log = wandb = None
    if machine.rank == 0:
        if not record:
            start_folder(s, c, data, machine)
        log, wandb = start_log(s, step), start_wandb(s, c)
    stop = catch_signals()
    print(f'run folder {s.out_dir}, from step {step}; Ctrl-C finishes the step, saves and stops')
    peak = peak_flops(device, machine.dtype) * machine.world
    tokens_per_step = s.batch_size * s.block_size
    first_step, first_seconds = step, seconds
    since, since_step = time.perf_counter(), step
    while step < n_steps:
        parts, norm, stopping = train_step(model, ddp, optimizer, data, s, step, machine, bool(stop))
        step += 1
        log_due, save_due, eval_due = (step % n == 0 or step == n_steps for n in (s.log_interval, s.save_interval, s.eval_interval))
        if log_due or save_due or eval_due or stopping:
            numbers = read_numbers(parts, norm, machine)
            now = time.perf_counter()
            seconds += now - since
            speed = (step - since_step) * tokens_per_step / (now - since)
            lr = optimizer.param_groups[0]['lr']
            if not math.isfinite(numbers['loss'] + numbers['grad_norm']):
                raise UserError(f'the loss became {numbers["loss"]} (gradient norm {numbers["grad_norm"]}) at step {step}, learning rate '
                                f'{lr:.2e}. Its checkpoints are from before: start another run with a lower learning_rate or more '
                                f'warmup_tokens, from its weights with --init_from={s.out_dir} or from the beginning')
            line = {'step': step, 'tokens': step * tokens_per_step, 'seconds': seconds, **numbers, 'lr': lr, 'tokens_per_s': speed,
                      'mfu': speed * model.flops_per_token(s.block_size) / peak}
            left = (n_steps - step) * (seconds - first_seconds) / (step - first_step)
            progress(f'step {step}/{n_steps} | loss {numbers["loss"]:.4f} | {speed:,.0f} tokens/s | ETA {left // 60:.0f}m{left % 60:02.0f}s')
            if eval_due:
                line['val'] = evaluate(fast, data, s, machine)
                found = scores(model, data, s, machine) if log else {}
                line |= found
                say(f'step {step}: training loss {numbers["nll"]:.4f}, validation loss {line["val"]:.4f} nats per token'
                    + ''.join(f', {name} {value:.3g}' for name, value in found.items()))
            if log:
                log.write(json.dumps(line) + '\n')
            if wandb:
                wandb.log(line, step=step)
            if log and (save_due or stopping):
                os.fsync(log.fileno())  # never behind the checkpoint
                save(s, model, optimizer, step, seconds)
            since, since_step = time.perf_counter(), step  # evaluation and saving are not training time
        if stopping:
            say(f'stopped after step {step}. Go on with: {resume_command(machine.world)}')
            return

    if machine.rank == 0:
        plot_loss(s.out_dir)
        if s.sample_tokens:
            print_sample(model, data, s, machine)
        look = 'python -m analysis.scores {}    draws its scores' if hasattr(data, 'score') else 'python sample.py {} "Return the"    generates text'
        print(f'done in {seconds / 60:.1f} minutes of training. Next:\n'
              f'  {look.format(s.out_dir)}\n'
              f'  {s.out_dir}/loss.png                   is the loss curve; log.jsonl has its numbers\n'
              f'  python train.py --help                     lists every setting')


def catch_signals():
    """A list that the first SIGINT or SIGTERM makes non-empty; the second ends the program as usual."""
    stop = []

    def on_signal(number, _):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop


def resume_command(world):
    args = [a for a in sys.argv[1:] if a not in ('--resume', '--overwrite')]
    start = f'torchrun --nproc_per_node={world}' if world > 1 else 'python'
    return f'{start} {shlex.join(["train.py", *args, "--resume"])}'


def start_wandb(s, c):
    """A wandb run, or None if none is asked for."""
    if not s.wandb_project:
        return None
    import wandb
    return wandb.init(project=s.wandb_project, name=s.out_dir, config={**asdict(s), **asdict(c)})


if __name__ == '__main__':
    main()
