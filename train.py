"""Train a language model.

    python train.py config/quickstart.py                      a small model, in minutes
    python train.py config/standard_s.py --learning_rate=3e-4 override any setting
    torchrun --nproc_per_node=8 train.py config/standard_l.py several GPUs, same batches
    python train.py --out_dir=out/quickstart --resume         resume a run, same batches
    python train.py --extend=out/A --max_tokens=2e9 --out_dir=out/B   train a finished run further

Read this file from top to bottom. docs/own_model.md lists what a model must and may define.
"""
if __name__ == '__main__':
    from lm_architectures.start import quiet_start
    quiet_start()

import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch

from attn_kernels import counted_targets
from lm_architectures.files import UserError, command, friendly_errors, warn_once
from lm_architectures.machine import devices, parallel, terminal
from lm_architectures.run import checkpoint, models, records, run_settings
from lm_architectures.score.validation import validation_loss
from lm_architectures.settings import check_ranges


@dataclass
class Settings:
    """Defaults follow the SPS paper, section 4. A config file only lists what differs."""

    # the run
    model: str = 'standard'  # trains model_<name>.py; the fields of its Config are settings too
    out_dir: str | None = None  # run folder to write; None: out/<name of the config file>
    resume: bool = False  # continue the run in out_dir from its last checkpoint
    code: Literal['run'] | None = None  # run: with resume or extend, train the code stored in that run
    overwrite: bool = False  # start a new run in out_dir; the run that was there moves to out_dir/before_1
    extend: str | None = None  # run folder to train further, with more max_tokens, in a new out_dir
    init_from: str | None = None  # run to take weights and model settings from (without a config file, also `model`)
    dry_run: bool = False  # check the settings, print size, cost and memory, and exit; the data need not exist
    gpu_gib: float | None = None  # with --dry_run: the GPU's memory in GiB; says whether a step fits
    seed: int = 1337  # random seed for the initial weights, the data order and dropout
    # data
    data: str = 'data/built/fineweb_edu'  # folder, file, built-in data, task or mix:A=0.7,B=0.3 (docs/data.md)
    make_data: str | None = None  # command that builds `data`, to print if it is missing; None: FineWeb-Edu's
    assumed_ids: int = 50257  # tokenizer size that a dry run assumes if the data do not exist
    mask_documents: bool = True  # mask attention between documents; False sets the model's eos_id to None
    verify: bool = False  # check the checksum of every shard before the first step
    # batch and length
    batch_size: int = 96  # sequences per optimizer step, over all processes and micro-batches
    micro_batch_size: int = 8  # sequences per forward pass; only auxiliary losses and dropout feel it (docs/scale.md)
    block_size: int = 4096  # tokens per sequence, T
    max_tokens: int = 20_000_000_000  # tokens to train on, including the decay
    # optimizer
    optimizer: Literal['adamw', 'muon'] = 'adamw'  # muon: Muon for hidden matrices, with AdamW-sized updates
    learning_rate: float = 6e-4  # peak learning rate
    min_lr: float | None = None  # learning rate at the end of the schedule; None: learning_rate / 10
    schedule: Literal['wsd', 'cosine', 'constant'] = 'wsd'  # after the warm-up; wsd: constant, then linear decay
    warmup_tokens: int = 50_000_000  # tokens of linear warm-up
    decay_fraction: float = 0.1  # fraction of max_tokens over which wsd decays
    beta1: float = 0.9  # AdamW's decay rate of the first moment
    beta2: float = 0.95  # AdamW's decay rate of the second moment
    weight_decay: float = 0.1  # for tensors with two or more dimensions, including the embedding
    grad_clip: float = 1.0  # maximum gradient norm; 0: no clipping
    # evaluation and logging, in steps
    eval_interval: int = 102  # steps between evaluations; 102 are 40M tokens, as in the official SPS code
    eval_tokens: int = 10_000_000  # validation tokens per evaluation; all of them if there are fewer
    eval_seed: int | None = 42  # seed of the validation windows' offsets; None: windows in order from the start
    acceptance_prompts: int = 0  # validation prompts for measuring how many drafted tokens are accepted; 0: none
    log_interval: int = 10  # steps between lines in log.jsonl
    save_interval: int = 1000  # steps between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep, at least 2 in case one is damaged; wsd keeps one more
    sample_tokens: int = 200  # length of the text sample generated after training; 0: none
    wandb_project: str | None = None  # Weights & Biases project to log to (needs wandb); None: log.jsonl only
    # machine
    device: devices.Device = 'auto'  # auto: cuda if available, else cpu
    dtype: devices.DType = 'auto'  # of matmuls; auto: bfloat16 on CUDA, and on CPUs with bf16 units from 1M parameters
    compile: bool | None = None  # use torch.compile; None: on GPUs only (on CPUs the gain is 1% to 20%)
    parallel: Literal['ddp', 'fsdp'] = 'ddp'  # multi-GPU: ddp copies the model to each GPU, fsdp shards it
    shard: int | None = None  # with fsdp: processes that share one sharded copy of the weights; None: all
    threads: int | None = None  # CPU threads per process; None: OMP_NUM_THREADS, or all cores (docs/runs.md)

    def __post_init__(self):
        counts = ('batch_size', 'micro_batch_size', 'block_size', 'max_tokens', 'eval_interval', 'log_interval',
                  'save_interval', 'threads', 'assumed_ids')
        amounts = ('gpu_gib', 'seed', 'learning_rate', 'min_lr', 'warmup_tokens', 'weight_decay', 'grad_clip',
                   'eval_tokens', 'eval_seed', 'acceptance_prompts', 'sample_tokens')
        check_ranges(self, **dict.fromkeys(counts, 1), **dict.fromkeys(amounts, 0), keep_checkpoints=2, shard=2,
                     decay_fraction=(0, 1), beta1=(0, 1 - 1e-9), beta2=(0, 1 - 1e-9))

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size

    @property
    def n_steps(self) -> int:
        return math.ceil(self.max_tokens / self.tokens_per_step)

    @property
    def decay_start(self) -> Fraction:
        """Tokens after which wsd decays: exact for the decimal digits of decay_fraction."""
        return self.max_tokens * (1 - Fraction(repr(self.decay_fraction)))

    @property
    def last_before_decay(self) -> int | None:
        """Last step before wsd's decay, from which --extend continues; None without wsd."""
        return int(self.decay_start // self.tokens_per_step) if self.schedule == 'wsd' else None


# ---- schedule and optimizer ----

def learning_rate(s: Settings, tokens: int) -> float:
    """Return the learning rate of the step that ends at `tokens`."""
    floor = s.learning_rate / 10 if s.min_lr is None else s.min_lr
    if tokens < s.warmup_tokens:
        return s.learning_rate * tokens / s.warmup_tokens
    left = 1.0
    if s.schedule == 'wsd':
        start = float(s.decay_start)
        left = 1 - max(0.0, min(tokens, s.max_tokens) - start) / max(1.0, s.max_tokens - start)
    elif s.schedule == 'cosine':
        done = (tokens - s.warmup_tokens) / max(1, s.max_tokens - s.warmup_tokens)
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return floor + (s.learning_rate - floor) * left


def make_optimizer(model: torch.nn.Module, s: Settings):
    """Return the optimizer. Tensors with fewer than two dimensions have no weight decay."""
    params = [p for p in model.parameters() if p.requires_grad]
    hidden = []
    if s.optimizer == 'muon':
        from lm_architectures.run import muon
        hidden = muon.hidden_matrices(model)
    groups = [{'params': [p for p in params if p.dim() >= 2 and p not in hidden], 'weight_decay': s.weight_decay},
              {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]
    adamw = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=True)
    return adamw if s.optimizer == 'adamw' else muon.MuonAndAdamW(hidden, adamw, s.learning_rate, s.weight_decay)


def check_state(optimizer) -> None:
    """Raise UserError for an optimizer whose state a checkpoint cannot hold."""
    for key, value in (item for values in checkpoint.optimizer_parts(optimizer).values() for item in values.items()):
        parts = value if isinstance(value, (list, tuple)) else [value]
        if not isinstance(value, torch.Tensor) and not all(isinstance(x, (int, float, str, type(None))) for x in parts):
            raise UserError(f"the optimizer's state has {key} = {value!r}: a checkpoint holds only tensors, numbers, "
                            'strings and lists of numbers. Use another optimizer in make_optimizer (train.py)')


# ---- one training step ----

def micro_batches(model, data, s, step, machine) -> Iterator[tuple]:
    """Yield this process's micro-batches of a step: (idx, targets, share, loss_share, is_last).

    idx, targets: (n, T) on the device. share: fraction of the global batch's counted tokens.
    loss_share: the same in units of `model.loss_count`, by default tokens.
    """
    rank, world, device = machine.rank, machine.world, machine.device
    mine = slice(rank * s.batch_size // world, (rank + 1) * s.batch_size // world)
    idx, targets = data.train_batch(step, s.batch_size, s.block_size, s.seed, mine)
    n = math.ceil(len(idx) / s.micro_batch_size)
    parts = list(zip(idx.tensor_split(n), targets.tensor_split(n)))
    counts = [int((counted_targets(x, y, model.config.eos_id) >= 0).sum()) for x, y in parts]
    loss_counts = [model.loss_count(x, y) for x, y in parts] if hasattr(model, 'loss_count') else counts
    total, loss_total = parallel.all_reduce(torch.tensor([sum(counts), sum(loss_counts)])).clamp(min=1).tolist()
    if device.type == 'cuda':  # one asynchronous copy; pinning needs contiguous memory
        idx, targets = (t.contiguous().pin_memory().to(device, non_blocking=True) for t in (idx, targets))
        parts = zip(idx.tensor_split(n), targets.tensor_split(n))
    for i, (x, y) in enumerate(parts):
        yield x.to(device), y.to(device), counts[i] / total, loss_counts[i] / loss_total, i == n - 1


def train_step(model, ddp, optimizer, data, s, step, machine, skips) -> dict[str, torch.Tensor]:
    """Run one optimizer step. Returns the loss parts of the global batch and 'grad_norm'.

    ddp: compiled and wrapped model. skips: see `step_if_finite`.
    """
    torch.manual_seed(((s.seed << 32) + (step << 10) + machine.rank) % 2 ** 63)  # for dropout
    if hasattr(model, 'begin_step'):
        model.begin_step(random.Random(f'{s.seed} {step}'))
    rate = learning_rate(s, (step + 1) * s.tokens_per_step)
    for group in optimizer.param_groups:  # each keeps its ratio to s.learning_rate
        own = checkpoint.made_with(group).get('lr', s.learning_rate)
        group['lr'] = rate * (own / s.learning_rate if s.learning_rate else 1)
    parts = {}
    for idx, targets, share, loss_share, is_last in micro_batches(model, data, s, step, machine):
        parallel.reduce_gradients(model, ddp, is_last)  # only on the last micro-batch
        with machine.autocast():
            out = ddp(idx, targets)
        models.check_forward(out)
        (out['loss'] * (loss_share * machine.world)).backward()  # because DDP and FSDP average over processes
        for name, value in out.items():
            parts[name] = parts.get(name, 0) + value.detach() * (share if name == 'nll' else loss_share)
    parts = dict(zip(parts, parallel.all_reduce(torch.stack([value.float() for value in parts.values()]))))
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] if step == 0 else []
    if unused:
        warn_once(f'the loss does not depend on {", ".join(unused)}: no gradient in the first step')
    norm = parallel.full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf))
    step_if_finite(optimizer, norm, skips)
    optimizer.zero_grad(set_to_none=not getattr(ddp, 'keeps_gradients', False))
    return {**parts, 'grad_norm': norm}


def step_if_finite(optimizer, norm, skips):
    """Step the optimizer, unless the gradient norm is not finite: then the step changes nothing.

    PyTorch's fused optimizers skip a step by themselves; others wait for the GPU here. skips (3,),
    on the device: steps skipped since the last log line; in a row now; most in a row.
    """
    bad = (~norm.isfinite()).float()  # equal on all processes, like the norm
    in_a_row = (skips[1] + 1) * bad
    skips.copy_(torch.stack([skips[0] + bad, in_a_row, torch.maximum(skips[2], in_a_row)]))
    if getattr(optimizer, '_step_supports_amp_scaling', False) and norm.device.type != 'mps':  # as in GradScaler
        optimizer.found_inf = bad  # before PyTorch 2.13, Apple GPUs ignore it
        optimizer.step()
    elif not bad:
        optimizer.step()


def read_skips(s, step, skips, writing) -> dict[str, int]:
    """Return {'skipped': steps skipped since the last call} or {}. UserError for three in a row."""
    n_skipped, _, most_in_a_row = map(int, skips.tolist())
    if most_in_a_row >= 3:
        checkpoint.check_save(writing, wait=True)  # it may be the last good checkpoint
        lr = learning_rate(s, step * s.tokens_per_step)
        raise UserError(f'the gradients were not finite in three consecutive steps, at or before step {step}, with '
                        f'learning rate {lr:.2e}; these steps were skipped. {checkpoint.recovery_advice(s.out_dir)}')
    if not n_skipped:
        return {}
    terminal.say(f'step {step}: {n_skipped} step{"s" * (n_skipped > 1)} skipped since the last log line, because the '
        'gradients were not finite')
    skips[0] = 0
    return {'skipped': n_skipped}


# ---- evaluation ----

@torch.no_grad()
def evaluate(model, compiled, data, s, machine) -> dict[str, float]:
    """Return 'val' (validation loss, nats per token), 'val_<part>' for other loss parts and scores.

    Only rank 0 computes scores: those of a task, or 'acceptance', the fraction of accepted drafts.
    """
    model.eval()
    scores = {}  # before the loss: FSDP prefetches what ran last, which must be equal on all processes
    with parallel.gather_weights(model), machine.autocast():
        if machine.rank == 0:
            with machine.eager():
                if data.T:
                    scores |= data.score(model, machine.device, s.micro_batch_size)
                if s.acceptance_prompts:
                    from lm_architectures.decode.speculation import acceptance
                    scores['acceptance'] = acceptance(model, data, s.block_size, s.acceptance_prompts, s.seed)
        parts, _ = validation_loss(compiled, data, s.block_size, s.eval_tokens, s.eval_seed, s.micro_batch_size,
                                   machine.device)
    model.train()
    return {'val': parts['nll'], **{f'val_{k}': mean for k, mean in parts.items() if k not in ('loss', 'nll')}} | scores


# ---- the training run ----

def make_model(s, config, data, machine) -> torch.nn.Module:
    """Return the model on its device, with initial or loaded weights. Sets machine.dtype.

    With FSDP, only rank 0 needs weights, and gives the others their shards in wrapping.py.
    """
    is_sharded, model = s.parallel == 'fsdp' and machine.world > 1, None
    torch.manual_seed(s.seed)
    with models.model_errors(s.model), torch.no_grad():  # a missing kernel fails before the run folder is written
        if is_sharded and machine.rank > 0:
            from lm_architectures.run.dry_run import model_without_weights
            model = model_without_weights(s.model, config, models.code_folder(s))
        if model is None:
            model = models.model_file(s.model, models.code_folder(s)).Model(config).to(machine.device)
        is_big = models.count_parameters(model) >= 1_000_000  # on CPUs, bf16 pays off from here on
        models.describe(s, model, data)
        machine.dtype = devices.pick_dtype(s.dtype, machine.device.type, is_big)
        if not next(model.parameters()).is_meta:
            with machine.autocast():
                model.logits(torch.zeros(1, 1, dtype=torch.int64, device=machine.device))
    if s.init_from:
        idx, _ = data.val_batch(range(min(2, data.n_rows('val', s.block_size))), s.block_size)
        from lm_architectures.run import folders
        folders.load_initial_weights(s, model, idx.to(machine.device))
    print(f'{machine.world} process{"es" * (machine.world > 1)} on {machine.device.type}, matrix products in '
          f'{str(machine.dtype)[6:]}' + f', weights in {s.shard or machine.world} shards' * is_sharded)
    return model


class Meter:
    """Measure speed and training time, excluding evaluation and copying for a checkpoint."""

    def __init__(self, s, model, machine, step, seconds):
        self.tokens_per_step, self.seconds, self.machine = s.tokens_per_step, seconds, machine
        self.flops = model.flops_per_token(s.block_size) if hasattr(model, 'flops_per_token') else None
        self.peak = machine.peak_flops()
        self.restart(step)

    def restart(self, step):
        self.since, self.since_step = time.perf_counter(), step

    def read(self, step) -> dict[str, float]:
        """Return speed, memory and total training time for the log."""
        elapsed = time.perf_counter() - self.since
        self.seconds += elapsed
        speed = (step - self.since_step) * self.tokens_per_step / elapsed
        found = {'seconds': self.seconds, 'tokens_per_s': speed, 'memory_gib': self.machine.peak_bytes() / 2 ** 30}
        if self.flops and self.peak:
            found['mfu'] = speed * self.flops / (self.peak * self.machine.world)
        return found


def train(s, config, data, record, machine, argv):
    """Train a model. record: config.json of the run to continue. argv: the command line."""
    model = make_model(s, config, data, machine)
    compiled = machine.compiled(model, s.compile)
    ddp = compiled
    if machine.world > 1:
        from lm_architectures.machine import wrapping
        ddp = wrapping.wrap_model(model, compiled, machine, s)
    optimizer = make_optimizer(model, s)
    step, seconds = 0, 0.0
    if record:
        from lm_architectures.run import folders
        step, seconds = folders.restore(s, model, optimizer)
    first_step = step
    log = records.Records(s, config, data, machine, step)
    meter, progress = Meter(s, model, machine, step, seconds), terminal.make_progress()
    print(f'run folder {s.out_dir}, starting from step {step}; Ctrl-C saves a checkpoint and stops')
    if machine.compiles:
        print('The first step and the first validation compile the model, which takes a minute or so.', flush=True)
    progress(f'step {step}/{s.n_steps}')
    with terminal.catch_signals() as stop, ThreadPoolExecutor(1) as thread:  # which writes checkpoints
        stopping, skips, writing = False, torch.zeros(3, device=machine.device), None
        while step < s.n_steps and not stopping:
            stopping = parallel.any_rank(bool(stop) or machine.is_orphan())  # stop after this step
            parts = train_step(model, ddp, optimizer, data, s, step, machine, skips)
            step += 1
            if step == first_step + 1:
                check_state(optimizer)  # fail now, not at the first save
            log_due, save_due, eval_due = (step % n == 0 or step == s.n_steps for n in (
                s.log_interval, s.save_interval, s.eval_interval))
            save_due |= stopping or step == s.last_before_decay  # --extend starts from last_before_decay
            if not (log_due or save_due or eval_due):
                continue
            line = {'step': step, 'tokens': step * s.tokens_per_step, 'lr': learning_rate(s, step * s.tokens_per_step),
                    **{k: value.item() for k, value in parts.items()}, **meter.read(step),
                    **read_skips(s, step, skips, writing)}
            minutes_left = (s.n_steps - step) * s.tokens_per_step / line['tokens_per_s'] / 60
            progress(f'step {step}/{s.n_steps} | loss {line["loss"]:.4f} | {line["tokens_per_s"]:,.0f} tokens/s | '
                     f'{minutes_left:.1f} minutes left')
            if eval_due:
                found = evaluate(model, compiled, data, s, machine)
                further = ''.join(f', {name} {value:.3g}' for name, value in found.items() if name != 'val')
                terminal.say(f'step {step}: training loss {line["nll"]:.4f}, validation loss {found["val"]:.4f} nats '
                            f'per token{further}')
                line |= found
            log.write(line)
            checkpoint.check_save(writing, wait=save_due)
            if save_due:
                writing = checkpoint.save_training(s, model, optimizer, step, meter.seconds, thread)
            meter.restart(step)
        checkpoint.check_save(writing, wait=True)
    log.close(finished=not stopping)
    if stopping:
        terminal.say(f'stopped after step {step}. Continue with: '
                    f'{run_settings.resume_command(argv, machine.world, s.out_dir)}')
    else:
        finish(s, model, data, machine, meter.seconds)


def finish(s, model, data, machine, seconds):
    """Generate a sample and suggest the next commands."""
    if s.sample_tokens:
        print_sample(s, model, data, machine)
    outside = [f'--model={file}' for file in [models.ADDED.get(s.model)] if file]
    look = (command('-m', 'analysis', 'curves', s.out_dir) + '    plots its losses' if data.T else
            command('sample.py', s.out_dir, 'Return the', *outside) + '    generates text')
    print(f'done in {seconds / 60:.1f} minutes of training. Next:\n'
          f'  {look}\n'
          f'  {s.out_dir}/loss.png is the loss curve, log.jsonl has its numbers\n'
          f'  {command("train.py", "--help")}    lists all settings')


def print_sample(s, model, data, machine):
    from lm_architectures.data.text.tokenizers import load_tokenizer
    from lm_architectures.decode.generation import generate
    with parallel.gather_weights(model), machine.autocast(), machine.eager():
        if machine.rank > 0:
            return
        prompt, n_new = data.example(s.block_size, s.sample_tokens)
        new, = generate(model.eval(), [prompt], n_new, temperature=0.8, top_k=50, seed=s.seed, eos_id=data.eos_id)
    tokenizer = load_tokenizer(data.tokenizer)
    before, after = (tokenizer.decode(ids).decode(errors='replace') for ids in (prompt, new))
    print(f'\na sample, |prompt|continuation|:\n|{before}|{after}\n')


def main(argv: list[str] | None = None) -> str:
    """Train with the given command line (None: the process's own). Returns the run folder."""
    with friendly_errors(argv):
        argv = sys.argv[1:] if argv is None else argv
        s, given, record = run_settings.read_settings(Settings, argv)
        machine = devices.start_processes(s)
        with contextlib.redirect_stdout(sys.stdout if machine.rank == 0 else open(os.devnull, 'w')):
            data = run_settings.training_data(s, record)
            config = run_settings.model_config(s, given, data, record)
            world = machine.world if machine.world > 1 or not s.dry_run else s.shard or 1  # estimates one of s.shard
            run_settings.check_settings(s, data, world)
            if s.dry_run:
                from lm_architectures.run.dry_run import dry_run
                dry_run(s, config, data, world, make_optimizer)
            else:
                claim = records.locked_run(s.out_dir, not s.resume, s.overwrite)
                with claim if machine.rank == 0 else contextlib.nullcontext():
                    train(s, config, data, record, machine, argv)
    parallel.leave_together()
    return s.out_dir


if __name__ == '__main__':
    main()
