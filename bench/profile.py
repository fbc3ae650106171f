"""A training step of Standard and SPS at a scale of the SPS paper, and where its time goes.

    python -m bench.profile s          on a GPU; also xs, m, l, xl
    python -m bench.profile s --toy

A step is one micro-batch of config/standard_<scale>.py or config/sps_<scale>.py on random documents
of 1,000 tokens. At scales xs and s both models take turns in one process. Larger ones do not fit
together: each has a process of its own. MFU counts the pattern without documents, as in the log.
`estimate` is the peak by --dry_run. Then come the 25 kernels of a step that take longest, by
torch.profiler.
"""
import functools
from collections.abc import Iterator

import torch

from bench import GPU, TOY_SHAPE, Settings, alternate, in_new_process, measure, resident
from bench.train_step import training_step
from common import models
from common.dry_run import activation_bytes, state_bytes
from common.files import ROOT

SCALES = 's', 'xs', 'm', 'l', 'xl'
TOGETHER = 's', 'xs'  # scales at which both models fit into a GPU of 80 GB
TOY = TOY_SHAPE | dict(block_size=16, micro_batch_size=2)


def profile(sides: list[str], scale: str, toy: bool) -> list[dict]:
    """Return the rows of these models: speed, memory and first step, then one per kernel."""
    steps, rows = {}, []
    for side in sides:
        held = resident()['held']  # by the other model
        step, model, s, this = training_step(f'{ROOT}/config/{side}_{scale}.py', **(TOY if toy else {}))
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        first = alternate({side: step}, rounds=1, warmup=0)[side]
        step()  # the peak of a first step lacks the moments
        peak, on_meta = resident()['peak'] - held, models.meta_model(s.model, model.config)
        estimate = state_bytes(on_meta, 1, False) + activation_bytes(on_meta, this.dtype, s.block_size, s.batch_size)
        rows.append({'model': side, 'T': s.block_size, 'batch': s.batch_size, 'dtype': str(this.dtype)[6:],
                     'first step s': round(first, 1), 'peak GiB': round(peak / 2 ** 30, 2),
                     'estimate GiB': round(estimate / 2 ** 30, 2), 'peak over estimate': round(peak / estimate, 3)})
        steps[side] = model, step
    n_tokens, peak_flops = 3 * s.batch_size * s.block_size, this.peak_flops()
    turns = {side: lambda step=step: [step() for _ in range(3)] for side, (_, step) in steps.items()}
    seconds = alternate(turns, rounds=1 if toy else 10, warmup=1)
    for row in rows:
        model, step = steps[row['model']]
        speed = n_tokens / seconds[row['model']]
        row |= {'ms': round(1e3 * seconds[row['model']] / 3, 2), 'tokens/s': round(speed),
                'MFU': peak_flops and round(speed * model.flops_per_token(s.block_size) / peak_flops, 3)}
    return rows + [{'model': side} | row for side, (_, step) in steps.items() for row in longest_kernels(step)]


def longest_kernels(step) -> list[dict]:
    """Return rows of the operators that take most device time in a step: milliseconds, calls."""
    with torch.profiler.profile() as profiler:
        step()
        resident()  # waits for the GPU
    time_of = (lambda event: event.self_device_time_total) if GPU else (lambda event: event.self_cpu_time_total)
    on_device = [event for event in profiler.key_averages() if not GPU or event.device_type.name == 'CUDA']
    total = sum(map(time_of, on_device)) or 1
    return [{'kernel': event.key, 'ms': round(time_of(event) / 1e3, 3), 'calls': event.count,
             'share': round(time_of(event) / total, 3)} for event in sorted(on_device, key=time_of)[:-26:-1]]


def figures(scale: str, s: Settings) -> Iterator[dict]:
    sides, times = ('standard', 'sps'), {}
    for group in [sides] if scale in TOGETHER else [[side] for side in sides]:
        rows = in_new_process(profile, group, scale, s.toy)
        times |= {row['model']: row['ms'] for row in rows if 'tokens/s' in row}
        yield from rows
    yield {'scale': scale, 'ms over standard': round(times['sps'] / times['standard'], 3)}


def main(argv: list[str] | None = None) -> None:
    measure(argv, Settings, 'profile_', **{scale: functools.partial(figures, scale) for scale in SCALES})


if __name__ == '__main__':
    main()
