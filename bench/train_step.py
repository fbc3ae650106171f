"""Training speed of model_standard, compared with Hugging Face Llama: 8 layers of 512.

    python -m bench.train_step [--toy]
    python -m bench.train_step objectives [--batch_size=32] [--toy]

A step is train.py's. Both sides take turns in one process, with the same optimizer, clipping and
allocator. 'same': both in the same precision; 'defaults': ours in train.py's precision, Hugging
Face in fp32. Then the step time of each two-stream method relative to Standard, with 6 layers of
384 on the same tokens.

`objectives`: the NextLat paper's table of training costs: parameters, steps/s and peak memory of
ntp, of nextlat, mtp and jtp with horizons 1, 2 and 8, and of bst with a tenth of its pairs. On a
GPU: 1.3B parameters, 8 x 1024 tokens per step (--batch_size=32: 33K, as in the paper). On a CPU: 12
layers of 384, 8 x 256 tokens; memory with a vocabulary of 50304, times with a vocabulary of bytes,
because otherwise the head would dominate.
"""
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

import bench
import train
from bench import DEVICE, FAMILY, GPU, TOY_SHAPE, added_memory, alternate, in_new_process, over_standard
from common import families, machine, models, run_settings
from common.dry_run import assumed_data
from common.settings import check_ranges

DTYPES = 'bfloat16', 'float32'
WIDTH = 2048 if GPU else 384  # of `objectives`
OBJECTIVES = {  # (objective, horizon): settings. p_psi has the paper's width relative to n_embd
    ('ntp', 1): dict(model='nextlat', objective='ntp'),
    **{(model, d): dict(model=model, horizon=d) | (dict(n_dynamics=WIDTH * 51 // 16) if model == 'nextlat' else {})
       for d in (1, 2, 8) for model in ('nextlat', 'mtp', 'jtp')},
    ('bst', 1): dict(model='bst', pair_share=0.1)}


@dataclass
class Settings(bench.Settings):
    batch_size: int = 8  # sequences per step; two streams at 1024 tokens: a quarter of this

    def __post_init__(self):
        check_ranges(self, batch_size=1)


# ---- one step ----

def training_step(config_file: str | None = None, **values) -> tuple:
    """Return (step, model, settings, machine) of train.py with a config file and settings.

    step() trains on one micro-batch and returns its loss.
    """
    args = ['--dry_run', *filter(None, [config_file]), *(f'--{name}={value}' for name, value in values.items())]
    s, given, _ = run_settings.read_settings(train.Settings, args)
    s = replace(s, batch_size=s.micro_batch_size)
    config = run_settings.model_config(s, given, assumed_data(s, None), None)
    this = machine.start_processes(s)
    this.dtype = machine.pick_dtype(s.dtype, DEVICE.type)
    torch.manual_seed(s.seed)
    model = models.model_file(s.model).Model(config).to(DEVICE)
    return make_step(model, this.compiled(model, s.compile), config, s, this), model, s, this


def make_step(model, forward: Callable, config, s, this) -> Callable:
    """Return a function that runs a step of train.py, always on the same random tokens.

    forward(idx, targets) returns {'loss': ...}. Documents have 200 tokens on average, in windows
    longer than 1024 tokens 1000.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.n_ids - 1, (2, s.batch_size, s.block_size), generator=generator)
    if config.eos_id is not None:
        length = 200 if s.block_size <= 1024 else 1000
        tokens[torch.rand(tokens.shape, generator=generator) < 1 / length] = config.eos_id
    optimizer = train.make_optimizer(model, s)
    skips = torch.zeros(3, device=DEVICE)
    data = SimpleNamespace(train_batch=lambda *_: tokens)
    return lambda: train.train_step(model, forward, optimizer, data, s, 0, this, skips)[0]['loss']


def peak_memory(values: dict) -> int:
    """Return the bytes that a model and three steps add at their peak. Call it in a new process."""
    with added_memory() as added:
        step, *_ = training_step(**values)
        for _ in range(3):
            step()
    return added['peak']


# ---- beside Hugging Face and Standard ----

def one_stream(s: Settings) -> Iterator[dict]:
    """Yield rows that compare Standard with Hugging Face Llama."""
    seconds = {}
    shape = dict(n_layer=8, n_head=8, n_embd=512, block_size=256)
    if s.toy:
        shape = TOY_SHAPE | dict(block_size=16)
    for dtype in DTYPES:
        ours, model, settings, this = training_step(
            **shape, micro_batch_size=s.batch_size, dtype=dtype, mask_documents=False, compile=False)
        llama = families.to_family(model.config, copy.deepcopy(model.state_dict()), 50304).to(DEVICE).train()
        llama.config.eos_id = None  # read by train_step
        hf = make_step(llama, lambda x, y: {'loss': llama(input_ids=x, labels=x, shift_labels=y).loss},
                       model.config, settings, this)
        assert abs(ours() - hf()) < 0.02
        seconds |= alternate({('ours', dtype): ours, ('hf', dtype): hf}, rounds=1 if s.toy else 12)
    default = str(machine.pick_dtype('auto', DEVICE.type))[6:]
    for terms in (('same', 'bfloat16', 'bfloat16'), ('same', 'float32', 'float32'), ('defaults', default, 'float32')):
        yield bench.beside_hugging_face(seconds, s.batch_size * shape['block_size'], *terms)


def two_streams(s: Settings) -> Iterator[dict]:
    """Yield rows of step times relative to Standard, on documents."""
    shape, lengths = (TOY_SHAPE, [16]) if s.toy else (dict(n_layer=6, n_head=6, n_embd=384), [1024, 256])
    for T in lengths:
        for dtype in DTYPES:
            batch_size = s.batch_size if s.toy else max(1, s.batch_size * 256 // T)
            sides = {name: training_step(model=file, **own, **shape, block_size=T, micro_batch_size=batch_size,
                                         dtype=dtype) for name, (file, own) in FAMILY.items()}
            seconds = alternate({name: step for name, (step, *_) in sides.items()}, 1 if s.toy else 7, warmup=3)
            torch.compiler.reset()  # torch.compile allows only so many versions of one function
            _, standard, _, this = sides['standard']
            tokens_per_s = batch_size * T / seconds['standard']
            peak = this.peak_flops()
            yield {'terms': 'time over standard', 'dtype': dtype, 'n_layer': shape['n_layer'], 'T': T,
                   'batch': batch_size, 'documents': True, 'standard_tokens_per_s': round(tokens_per_s),
                   'standard_mfu': peak and round(standard.flops_per_token(T) * tokens_per_s / peak, 3)
                   } | over_standard(seconds)


def figures(s: Settings) -> Iterator[dict]:
    yield from one_stream(s)
    yield from two_streams(s)


# ---- the NextLat paper's table ----

def objectives(s: Settings) -> Iterator[dict]:
    """Yield the rows of the training-cost table. At toy size memory is not measured."""
    shape = dict(n_layer=22, n_head=16, n_embd=WIDTH, block_size=1024) if GPU else dict(
        n_layer=12, n_head=6, n_embd=WIDTH, block_size=256)
    if s.toy:
        shape = TOY_SHAPE | dict(n_layer=2, block_size=16)
    sides = {side: own | shape | dict(micro_batch_size=s.batch_size, mask_documents=False)
             for side, own in OBJECTIVES.items()}
    ntp = 'ntp', 1
    ids = {} if GPU else dict(assumed_ids=257)
    base = None if s.toy else in_new_process(peak_memory, sides[ntp])
    for side, values in sides.items():
        steps = {name: training_step(**sides[name], **ids) for name in dict.fromkeys([ntp, side])}
        seconds = alternate({name: step for name, (step, *_) in steps.items()}, rounds=1 if s.toy else 7)
        row = {'objective': side[0], 'horizon': side[1], 'batch': s.batch_size,
               'parameters': models.count_parameters(steps[side][1]),
               'steps_per_s': round(1 / seconds[side], 3), 'time_over_ntp': round(seconds[side] / seconds[ntp], 3)}
        if not s.toy:
            row['peak_memory_over_ntp'] = round(in_new_process(peak_memory, values) / base, 3)
        yield row
        torch.compiler.reset()  # torch.compile allows only so many versions of one function


def main(argv: list[str] | None = None) -> None:
    bench.measure(argv, Settings, train_step=figures, objectives=objectives)


if __name__ == '__main__':
    main()
