"""Trains a language model.

    python train.py config/quickstart.py                      a small one on this machine, in minutes
    python train.py config/standard_s.py --learning_rate=3e-4 any setting can be overridden
    torchrun --nproc_per_node=8 train.py config/standard_l.py several GPUs: same batches, same losses (docs/scale.md)
    python train.py config/quickstart.py --resume             goes on after an interruption, on the very same batches
    python train.py --extend=out/A --max_tokens=2e9 --out_dir=out/B   makes a run longer, in a folder of its own

Reads top to bottom: settings, the model and its optimizer, evaluation, the loop, and at the end `main`, which tells the
story. What --resume, --extend and --init_from take over from another run is in common/run_settings.py. A model needs
`forward` and `logits`; what else it may have is used where it is there (docs/own_model.md).
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import contextlib
import importlib
import math
import os
import platform
import random
import shlex
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from common import checkpoint, parallel, runs
from common.cpu_forms import use_attention
from common.decoding import generate
from common.dry_run import assumed_data, print_memory, processes_meant
from common.extend_check import has_right_extend, tell_of_another_loss, weights_moved
from common.files import UserError, friendly_errors
from common.machine import (
    caught_signals,
    make_progress,
    memory_bytes,
    peak_flops,
    peak_memory,
    pick_dtype,
    say,
    start_processes,
    torchrun_ranks,
)
from common.matmul import use_matmul
from common.muon import MuonAndAdamW, hidden_matrices
from common.run_settings import check_settings, is_extension, is_new, model_config, read_settings, run_of
from common.scoring import counted, validation_loss
from common.settings import check_ranges, join_values, saved_settings
from common.speculative import longest_draft, speculative_generate
from data import has_data, open_data
from data.tokenizers import load_tokenizer


@dataclass
class Settings:
    """Defaults are those of the SPS paper, section 4, so that a config file holds only what differs."""

    # the run
    model: str = 'standard'  # model_<name>.py; its Config fields are settings too
    out_dir: str | None = None  # run folder; None: out/<name of the config file>
    resume: bool = False  # go on with the run in out_dir, on the same batches
    overwrite: bool = False  # replace the run in out_dir
    extend: str | None = None  # run folder to go on from into a new out_dir, with more max_tokens; it stays as it is
    init_from: str | None = None  # run to start from: weights, model settings and, without a config file, the model
    eval_only: bool = False  # print the validation loss of out_dir (or init_from) and stop
    dry_run: bool = False  # check everything, print sizes, costs and memory, and stop; works without the data
    memory: float | None = None  # with --dry_run: GiB of a GPU that a step is to fit
    seed: int = 1337  # of the initial weights, the data order and dropout
    # data
    data: str = 'data/built/fineweb_edu'  # data folder, or built-in data; a task's options: path_star:degree=2,length=5
    make_data: str | None = None  # command that makes `data` and names it, for a dry run to print; None: FineWeb-Edu's
    assumed_ids: int = 50257  # ids of the data's tokenizer, where a dry run has no data to ask
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
    compile: bool | None = None  # torch.compile; None: on GPUs (bench.train_step nanogpt: on a CPU it gains 1% to 20%)
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


BF16_PARAMETERS = 1_000_000  # CPUs with bf16 units gain from bf16 at this size; 4 layers x 128 (0.8M) may lose


# ---- model, schedule, optimizer ----

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
    print(f'model {s.model}: {runs.count_parameters(model):,} parameters, vocabulary {data.n_ids} ({data.tokenizer})\n'
          f'data {data.folder}: {amount}\n'
          f'{n_steps:,} steps of {s.batch_size} x {s.block_size} = {s.batch_size * s.block_size:,} tokens'
          + (f', {flops / 1e6:,.1f} MFLOP per token' if flops else ''))
    constant_until = s.max_tokens * (1 - s.decay_fraction * (s.schedule == 'wsd'))
    if s.warmup_tokens > constant_until and not s.eval_only:
        what = 'decay begins' if constant_until < s.max_tokens else 'run ends'
        print(f'learning_rate = {s.learning_rate:g} is never reached: the warm-up takes {s.warmup_tokens:,} tokens, '
              f'and the {what} after {constant_until:,.0f}')
    return model, n_steps


def check_memory(s, model, device):
    """Raises UserError for a model that cannot be held: later the kernel would end the process without a word."""
    bytes_per_weight = 8 if s.eval_only else 16  # `loss_error` holds a second copy
    if device.type == 'cuda':  # the model is made on the host
        bytes_per_weight = 4
    needed = bytes_per_weight * runs.count_parameters(model)
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
        left = 1 - max(0.0, min(tokens, s.max_tokens) - start) / max(1.0, s.max_tokens - start)
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
    weights_moved(model.eval())
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
    if machine.device.type != 'mps' or not optimizer.found_inf:  # Apple's AdamW ignores it before PyTorch 2.13
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
        raise UserError(f'the gradients were not finite three steps in a row, at or before step {step}, at a learning '
                        f'rate of {lr:.2e}; these steps changed nothing. {checkpoint.last_good(s.out_dir)}')
    if n_skipped:
        say(f'step {step}: {n_skipped} step{"s" * (n_skipped > 1)} skipped since the last line of the log, as their '
            'gradients were not finite')
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
        s, given_model, record = read_settings(Settings, argv)
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
        if is_first and s.wandb_project and not s.eval_only:
            importlib.import_module('wandb').finish()  # its exit hook will not run
        sys.stdout.flush()
        os._exit(0)  # gloo's threads now and then abort a process that ends in the usual way


def run(s, c, data, record, machine, argv):
    """Everything after the settings are known to be good: model, optimizer, loop."""
    blank_model, n_steps = describe(s, c, data)
    is_large = runs.count_parameters(blank_model) >= BF16_PARAMETERS
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
        print_memory(s, c, blank_model, machine, lambda model: make_optimizer(model, s))
        return
    check_memory(s, blank_model, device)

    model = make_model(s, c, data, device, source, weights)
    del weights  # a second copy of the model
    runs.check_kernels(model, machine.dtype)
    scan = choose_scan(model, machine)
    if machine.rank == 0:
        tell_of_another_loss(model)
    if is_sharded:
        parallel.shard_model(model, device, s.shard)
    if not s.eval_only:
        optimizer = make_optimizer(model, s)
        step, seconds = restore(s, model, optimizer, record) if record else (0, 0.0)
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
    with log or contextlib.nullcontext(), caught_signals() as stop:
        try:
            step, seconds, stopped = train(s, model, compiled, ddp, optimizer, data, machine, step, n_steps, seconds,
                                           log, wandb, stop, saving)
        finally:
            for written in saving:  # as long as this process holds the folder's lock
                written.result()
    if stopped:
        say(f'stopped after step {step}. Go on with: {resume_command(argv, world, s.out_dir)}')
    else:
        with parallel.whole_weights(model):
            if machine.rank == 0:
                finish(s, model, data, machine, seconds)


def restore(s, model, optimizer, record) -> tuple[int, float]:
    """(step, seconds of training) of the checkpoint that training goes on from, loaded. record: of that run."""
    if not is_extension(s):
        if s.extend and not checkpoint.checkpoints(s.out_dir):
            raise UserError(f'{s.out_dir} was stopped before it had the weights of {s.extend}: start it once more, '
                            f'with --extend={s.extend} --max_tokens={s.max_tokens} --overwrite in place of --resume')
        return checkpoint.restore_training(s.out_dir, model, optimizer)
    saved = saved_settings(Settings, record['settings'], f'{s.extend}/config.json')
    up_to = last_before_decay(saved)
    if not checkpoint.candidates(s.extend, up_to):
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


def resume_command(argv, world, out_dir):
    args = [a for a in argv if a not in ('--resume', '--overwrite') and not a.startswith('--extend=')]
    if not any(a.startswith('--out_dir=') for a in args):
        args.append(f'--out_dir={out_dir}')
    here = torchrun_ranks()[-1]  # processes of this machine
    start = f'torchrun --nproc_per_node={here}' if world > 1 else 'python'
    if world > here:
        start = f'torchrun --nnodes={world // here} --nproc_per_node={here} ...'
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
