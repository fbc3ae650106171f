"""Training speed of model_standard, compared with Hugging Face Llama: 8 layers of 512.

    python -m bench.train_step [--toy]
    python -m bench.train_step objectives [--batch_size=32] [--toy]

Both sides take turns in one process, with the same precision, optimizer, clipping and allocator.
Then the step time of each two-stream method relative to Standard, with 6 layers of 384 on the same
tokens.

`objectives`: the NextLat paper's table of training costs: parameters, steps/s and peak memory of
ntp, of nextlat, mtp and jtp with horizons 1, 2 and 8, and of bst with a tenth of its pairs. On a
GPU: 1.3B parameters, 8 x 1024 tokens per step (--batch_size=32: 33K, as in the paper). On a CPU: 12
layers of 384, 8 x 256 tokens; memory with a vocabulary of 50304, times with a vocabulary of bytes,
because otherwise the head would dominate.
"""
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import bench
import model_standard
import train
from bench import DEVICE, FAMILY, GPU, TOY_SHAPE, alternate, isolated, make_model, measure, over_standard, resident
from lm_architectures.hf import families
from lm_architectures.machine import devices
from lm_architectures.run import models
from lm_architectures.settings import check_ranges

SHAPE = dict(n_layer=8, n_head=8, n_embd=512)
T, VOCABULARY = 256, 50304
DTYPES = torch.bfloat16, torch.float32
OBJECTIVES = [('ntp', 1), *((objective, d) for d in (1, 2, 8) for objective in ('nextlat', 'mtp', 'jtp')), ('bst', 1)]


@dataclass
class Settings(bench.Settings):
    batch_size: int = 8  # sequences per step; two streams at 1024 tokens: a quarter of this

    def __post_init__(self):
        check_ranges(self, batch_size=1)


# ---- one step ----

def optimizer_step(model, forward: Callable, optimizer, tokens, dtype) -> Callable[[], float]:
    """Return a function that does a training step and returns the loss. tokens: (2, B, T)."""
    def step():
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = forward(*tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    return step


def our_step(model, tokens, dtype, compile: bool = False) -> Callable[[], float]:
    """Return a training step of one of our models, as in train.py."""
    called = devices.Machine(0, 1, DEVICE).compiled(model, compile)
    optimizer = train.make_optimizer(model, train.Settings())
    return optimizer_step(model, lambda x, y: called(x, y)['loss'], optimizer, tokens, dtype)


def make_steps(shape: dict, dtype, tokens) -> dict[str, Callable[[], float]]:
    """Return one training step per side, with the same weights and tokens (2, B, T)."""
    torch.manual_seed(0)
    model = model_standard.Model(model_standard.Config(eos_id=None, n_ids=50304, **shape)).to(DEVICE)
    llama = families.to_family(model.config, copy.deepcopy(model.state_dict()), 50304).to(DEVICE).train()
    return {'ours': our_step(model, tokens, dtype),
            'hf': optimizer_step(llama, lambda x, y: llama(input_ids=x, labels=x, shift_labels=y).loss,
                                 train.make_optimizer(llama, train.Settings()), tokens, dtype)}


# ---- beside Hugging Face ----

def beside_hugging_face(shape: dict, rounds: int, batch_size: int) -> Iterator[dict]:
    """Yield rows that compare both sides."""
    tokens = torch.randint(0, 50257, (2, batch_size, T if shape == SHAPE else 16), device=DEVICE)
    for dtype in DTYPES:
        steps = make_steps(shape, dtype, tokens)
        losses = {side: step() for side, step in steps.items()}
        assert max(losses.values()) - min(losses.values()) < 0.02, losses
        seconds = alternate(steps, rounds)
        yield {'terms': 'same', 'dtype': str(dtype)[6:],
               'ours_tokens_per_s': round(tokens[0].numel() / seconds['ours']),
               'hf_tokens_per_s': round(tokens[0].numel() / seconds['hf']),
               'ratio': round(seconds['hf'] / seconds['ours'], 3)}


def beside_standard(methods, shape: dict, T: int, batch_size: int, dtype, rounds: int) -> dict:
    """Return a row of step times relative to Standard, on documents of 200 or 1000 tokens."""
    tokens = torch.randint(0, 50256, (2, batch_size, T), device=DEVICE)
    tokens.masked_fill_(torch.rand(tokens.shape, device=DEVICE) < 1 / (200 if T <= 1024 else 1000), 50256)
    models = {name: make_model(name, **shape) for name in methods}
    seconds = alternate({name: our_step(model, tokens, dtype, compile=GPU)
                         for name, model in models.items()}, rounds, warmup=3)
    torch.compiler.reset()  # torch.compile allows only eight versions of one forward
    return {'terms': 'time over standard', 'dtype': str(dtype)[6:], 'n_layer': shape['n_layer'], 'T': T,
            'batch': batch_size, 'documents': True,
            'standard_tokens_per_s': round(tokens[0].numel() / seconds['standard']), **over_standard(seconds)}


def two_streams(toy: bool, batch_size: int) -> Iterator[dict]:
    shape, lengths = (TOY_SHAPE, [16]) if toy else (dict(n_layer=6, n_head=6, n_embd=384), [1024, 256])
    for T in lengths:
        for dtype in DTYPES:
            rows, rounds = (2, 1) if toy else (max(1, batch_size * 256 // T), 7)
            yield beside_standard(FAMILY, shape, T, rows, dtype, rounds)


# ---- the papers' tables ----

def objective_step(objective: str, horizon: int, batch_size: int, vocabulary=VOCABULARY, toy=False) -> tuple:
    """Return a training step as in train.py, and its model. objective: ntp or a model's name.

    p_psi has the paper's width relative to n_embd. bst has no horizon.
    """
    shape, n_dynamics, tokens_per_row = dict(n_layer=22, n_head=16, n_embd=2048), 6528, 1024
    if not GPU:
        shape, n_dynamics, tokens_per_row = dict(n_layer=12, n_head=6, n_embd=384), 1224, T
    if toy:
        shape, n_dynamics, tokens_per_row = TOY_SHAPE | {'n_layer': 2}, 32, 16
    torch.manual_seed(0)
    shape |= dict(vocab_size=vocabulary, n_ids=vocabulary, eos_id=None)
    own = {'ntp': dict(objective='ntp'), 'nextlat': dict(horizon=horizon, n_dynamics=n_dynamics),
           'bst': dict(pair_share=0.1)}.get(objective, dict(horizon=horizon))
    module = models.model_file('nextlat' if objective == 'ntp' else objective)
    model = module.Model(module.Config(**own, **shape)).to(DEVICE)
    tokens = torch.randint(0, vocabulary, (2, batch_size, tokens_per_row), device=DEVICE)
    dtype = devices.pick_dtype('auto', DEVICE.type)
    return our_step(model, tokens, dtype, compile=GPU), model


def peak_memory(objective: str, horizon: int, batch_size: int) -> int:
    """Return the peak memory of three steps in bytes. Call it in a new process."""
    devices.start_processes(train.Settings())
    torch.zeros(1, device=DEVICE)
    before = resident()['held']
    step, _ = objective_step(objective, horizon, batch_size)
    for _ in range(3):
        step()
    return resident()['peak'] - before


def objectives(toy: bool, batch_size: int) -> Iterator[dict]:
    """Yield the rows of the training-cost table. At toy size memory is not measured."""
    devices.start_processes(train.Settings())
    vocabulary, ntp = VOCABULARY if GPU else 320, OBJECTIVES[0]
    base = None if toy else isolated(peak_memory, *ntp, batch_size)
    for side in OBJECTIVES:
        steps = {name: objective_step(*name, batch_size, vocabulary, toy) for name in dict.fromkeys([ntp, side])}
        seconds = alternate({name: step for name, (step, _) in steps.items()}, rounds=1 if toy else 7)
        row = {'objective': side[0], 'horizon': side[1], 'batch': batch_size,
               'parameters': sum(p.numel() for p in steps[side][1].parameters()),
               'steps_per_s': round(1 / seconds[side], 3), 'time_over_ntp': round(seconds[side] / seconds[ntp], 3)}
        if not toy:
            row['peak_memory_over_ntp'] = round(isolated(peak_memory, *side, batch_size) / base, 3)
        yield row
        torch.compiler.reset()  # torch.compile allows only eight versions of one forward


# ---- the command line ----

def figures(toy: bool, batch_size: int) -> Iterator[dict]:
    devices.start_processes(train.Settings())  # both sides have the allocator and threads of train.py
    yield from beside_hugging_face(TOY_SHAPE if toy else SHAPE, 1 if toy else 12, batch_size)
    yield from two_streams(toy, batch_size)


def main(argv: list[str] | None = None) -> None:
    measure(argv, Settings, train_step=figures, objectives=objectives)


if __name__ == '__main__':
    main()
