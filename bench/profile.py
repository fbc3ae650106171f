"""A training step of Standard and SPS at a scale of the SPS paper, and where its time goes.

    python -m bench.profile s          on a GPU; also xs, m, l, xl
    python -m bench.profile s --toy

A step is one micro-batch of config/standard_<scale>.py or config/sps_<scale>.py on random documents
of 1,000 tokens. Each model has a process of its own. At scales XS and S they take turns; larger
ones run one after the other, because both do not fit. MFU counts the pattern without documents, as
in the log. `estimate` is the peak by --dry_run. Then come the 25 kernels of a step that take
longest, by torch.profiler.
"""
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch

import train
from bench import DEVICE, GPU, TOY_SHAPE, Settings, measure, process, resident
from common import gpu, machine, models, run_settings
from common.dry_run import activation_bytes, assumed_data, state_bytes
from common.files import ROOT

TOY = [*(f'--{name}={value}' for name, value in TOY_SHAPE.items()), '--block_size=16', '--micro_batch_size=2']
SCALES = {'s': [['standard', 'sps']], 'xs': [['standard', 'sps']],  # models that are in memory together
          **dict.fromkeys(('m', 'l', 'xl'), [['standard'], ['sps']])}


class RandomText:
    """Random tokens in documents of 1,000 tokens, with the method of Data that a step calls."""

    def __init__(self, eos_id: int):
        self.eos_id = eos_id

    def train_batch(self, step: int, batch_size: int, T: int, seed: int, part=slice(None)) -> tuple:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, self.eos_id, (batch_size, T + 1), generator=generator)
        tokens[torch.rand(tokens.shape, generator=generator) < 1 / 1000] = self.eos_id
        return tokens[:, :-1], tokens[:, 1:]


@functools.cache
def make_step(side: str, scale: str, toy: bool) -> tuple[Callable, dict]:
    """Return a function that runs a step of train.py, and what is known before the first step."""
    args = [f'{ROOT}/config/{side}_{scale}.py', '--dry_run', *(TOY if toy else [])]
    s, given, _ = run_settings.read_settings(train.Settings, args)
    s = replace(s, batch_size=s.micro_batch_size)
    this, config = machine.start_processes(s), run_settings.model_config(s, given, assumed_data(s, None), None)
    this.dtype = machine.pick_dtype(s.dtype, DEVICE.type)
    torch.manual_seed(s.seed)
    model = models.model_file(s.model).Model(config).to(DEVICE)
    compiled, optimizer = this.compiled(model, s.compile), train.make_optimizer(model, s)
    data, skips, on_meta = RandomText(config.eos_id), torch.zeros(3, device=DEVICE), models.meta_model(s.model, config)
    estimate = state_bytes(on_meta, 1, False) + activation_bytes(on_meta, this.dtype, s.block_size, s.batch_size)

    def step():
        train.train_step(model, compiled, optimizer, data, s, 0, this, skips)
    return step, {'T': s.block_size, 'batch': s.batch_size, 'dtype': str(this.dtype)[6:], 'estimate': estimate,
                  'flops': model.flops_per_token(s.block_size), 'peak': gpu.peak_flops(DEVICE, this.dtype)}


def seconds_of(n: int, *side) -> float:
    """Return the mean seconds of n steps."""
    step, _ = make_step(*side)
    resident()  # waits for the GPU
    start = time.perf_counter()
    for _ in range(n):
        step()
    resident()
    return (time.perf_counter() - start) / n


def known(*side) -> dict:
    """Return what is known of a side, with its peak memory in bytes so far."""
    return make_step(*side)[1] | {'used': resident()['peak']}


def longest_kernels(*side) -> list[dict]:
    """Return rows of the operators that take most device time in a step: milliseconds, calls."""
    step, _ = make_step(*side)
    with torch.profiler.profile() as profile:
        step()
        resident()
    time_of = (lambda event: event.self_device_time_total) if GPU else (lambda event: event.self_cpu_time_total)
    on_device = [event for event in profile.key_averages() if not GPU or event.device_type.name == 'CUDA']
    total = sum(map(time_of, on_device)) or 1
    return [{'model': side[0], 'kernel': event.key, 'ms': round(time_of(event) / 1e3, 3), 'calls': event.count,
             'share': round(time_of(event) / total, 3)} for event in sorted(on_device, key=time_of)[:-26:-1]]


def figures(scale: str, toy: bool) -> Iterator[dict]:
    times, rounds = {}, 1 if toy else 5
    for group in SCALES[scale]:
        with ExitStack() as stack:
            ask = {side: stack.enter_context(process(toy)) for side in group}
            first = {side: ask[side](seconds_of, 1, side, scale, toy) for side in group}
            measured = [(side, ask[side](seconds_of, 3, side, scale, toy)) for _ in range(rounds + 1) for side in group]
            times |= {side: statistics.median([s for name, s in measured if name == side][1:]) for side in group}
            for side in group:
                yield row(side, first[side], times[side], ask[side](known, side, scale, toy))
            for side in group:
                yield from ask[side](longest_kernels, side, scale, toy)
    yield {'scale': scale, 'ms over standard': round(times['sps'] / times['standard'], 3)}


def row(side: str, first: float, seconds: float, c: dict) -> dict:
    """Return the row of a model: speed, memory, and the time of its first step."""
    tokens_per_s = c['T'] * c['batch'] / seconds
    return {'model': side, 'T': c['T'], 'batch': c['batch'], 'dtype': c['dtype'], 'first step s': round(first, 1),
            'ms': round(1e3 * seconds, 2), 'tokens/s': round(tokens_per_s),
            'MFU': c['peak'] and round(tokens_per_s * c['flops'] / c['peak'], 3),
            'peak GiB': round(c['used'] / 2 ** 30, 2), 'estimate GiB': round(c['estimate'] / 2 ** 30, 2),
            'peak over estimate': round(c['used'] / c['estimate'], 3)}


def main(argv: list[str] | None = None) -> None:
    measure(argv, Settings, 'profile_', **{scale: functools.partial(figures, scale) for scale in SCALES})


if __name__ == '__main__':
    main()
