"""A training step of Standard and SPS at a scale of the SPS paper, and where its time goes.

    python -m bench.profile s          on a GPU; also xs, m, l, xl
    python -m bench.profile s --toy

A step is one micro-batch of config/standard_<scale>.py or config/sps_<scale>.py on random documents
of 1,000 tokens. The models run one after the other, each in a process of its own, because two large
ones do not fit. (bench.train_step has the ratio, measured in turns.) MFU counts the pattern without
documents, as in the log. `estimate` is the peak by --dry_run. Then come the 25 kernels of a step
that take longest, by torch.profiler.
"""
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import train
from bench import DEVICE, GPU, TOY_SHAPE, alternate, isolated, measure, resident
from lm_architectures.files import ROOT
from lm_architectures.machine import compiling, devices
from lm_architectures.run import models, run_settings
from lm_architectures.run.dry_run import activation_bytes, state_bytes
from lm_architectures.run.missing_data import assumed_data

TOY = [*(f'--{name}={value}' for name, value in TOY_SHAPE.items()), '--block_size=16', '--micro_batch_size=2']
SCALES = 's', 'xs', 'm', 'l', 'xl'


class RandomText:
    """Random tokens in documents of 1,000 tokens, with the method of Data that a step calls."""

    def __init__(self, eos_id: int):
        self.eos_id = eos_id

    def train_batch(self, step: int, batch_size: int, T: int, seed: int, part=slice(None)) -> tuple:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, self.eos_id, (batch_size, T + 1), generator=generator)
        tokens[torch.rand(tokens.shape, generator=generator) < 1 / 1000] = self.eos_id
        return tokens[:, :-1], tokens[:, 1:]


def measure_model(side: str, scale: str, toy: bool) -> list[dict]:
    """Return the rows of a model: its speed and memory, then its longest kernels."""
    args = [f'{ROOT}/config/{side}_{scale}.py', '--dry_run', *(TOY if toy else [])]
    s, given, _ = run_settings.read_settings(train.Settings, args)
    s = replace(s, batch_size=s.micro_batch_size)
    this, config = devices.start_processes(s), run_settings.model_config(s, given, assumed_data(s, None), None)
    this.dtype = devices.pick_dtype(s.dtype, DEVICE.type)
    torch.manual_seed(s.seed)
    model = models.model_file(s.model).Model(config).to(DEVICE)
    compiled, optimizer = this.compiled(model, s.compile), train.make_optimizer(model, s)
    data, skips, on_meta = RandomText(config.eos_id), torch.zeros(3, device=DEVICE), models.meta_model(s.model, config)

    def step():
        train.train_step(model, compiled, optimizer, data, s, 0, this, skips)
    first, = alternate({side: step}, rounds=1, warmup=0).values()
    three, = alternate({side: lambda: [step() for _ in range(3)]}, rounds=1 if toy else 5, warmup=1).values()
    used = resident()['peak']
    estimate = state_bytes(on_meta, 1, False) + activation_bytes(on_meta, this.dtype, s.block_size, s.batch_size)
    tokens_per_s, peak = 3 * s.block_size * s.batch_size / three, compiling.peak_flops(DEVICE, this.dtype)
    row = {'model': side, 'T': s.block_size, 'batch': s.batch_size, 'dtype': str(this.dtype)[6:],
           'first step s': round(first, 1), 'ms': round(1e3 * three / 3, 2), 'tokens/s': round(tokens_per_s),
           'MFU': peak and round(tokens_per_s * model.flops_per_token(s.block_size) / peak, 3),
           'peak GiB': round(used / 2 ** 30, 2), 'estimate GiB': round(estimate / 2 ** 30, 2),
           'peak over estimate': round(used / estimate, 3)}
    return [row, *longest_kernels(side, step)]


def longest_kernels(side: str, step: Callable) -> list[dict]:
    """Return rows of the operators that take most device time in a step: milliseconds, calls."""
    with torch.profiler.profile() as profile:
        step()
        resident()  # waits for the GPU
    time_of = (lambda event: event.self_device_time_total) if GPU else (lambda event: event.self_cpu_time_total)
    on_device = [event for event in profile.key_averages() if not GPU or event.device_type.name == 'CUDA']
    total = sum(map(time_of, on_device)) or 1
    return [{'model': side, 'kernel': event.key, 'ms': round(time_of(event) / 1e3, 3), 'calls': event.count,
             'share': round(time_of(event) / total, 3)} for event in sorted(on_device, key=time_of)[:-26:-1]]


def figures(scale: str, toy: bool) -> Iterator[dict]:
    for side in ('standard', 'sps'):
        yield from measure_model(side, scale, toy) if toy else isolated(measure_model, side, scale, toy)


def main(argv: list[str] | None = None) -> None:
    measure(argv, prefix='profile_', **{scale: functools.partial(figures, scale) for scale in SCALES})


if __name__ == '__main__':
    main()
