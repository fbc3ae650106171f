r"""Speed and memory of any models, side by side: training steps, saves or decoding.

    python -m bench.speed train "Standard: config/standard_s.py" "SPS: config/sps_s.py" --out=step_s
    python -m bench.speed train "compiled: config/gpn_small.py" \
        "loop: config/gpn_small.py --scan=loop"
    python -m bench.speed decode "ours: config/standard_xs.py" "Llama: hf config/standard_xs.py"

A side is `NAME: ARGUMENTS OF train.py`, with random weights and tokens. The data need not exist.
`hf` before the arguments takes Llama of transformers, with the same weights.

train: one micro-batch and its optimizer step, as in train.py, on documents of about 1,000 tokens.
Llama does not keep documents apart: give both sides --mask_documents=False. `loss` is that of the
first step, equal for sides that compute the same. MFU is defined as in train.py's log.
Context-Ready draws its number of unrolls in each step, as in train.py.
save: in one run, five steps, then steps during a save, --rounds times. The first step during a save
includes copying weights and moments.
decode: prompts of equal length, then greedy decoding. --new=1 times the prefill alone. On a GPU, a
CUDA graph is captured in this time, so decode many tokens (--new=512).

The sides take turns in one process. Times are medians after a warm-up, and ratios are to the first
side. Peak memory is measured in a process per side, without what that held before the model.
"""
import itertools
import shlex
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch

from bench import reporting
from bench.timing import GPU, alternate, isolated, memory_of
from lm_architectures import train
from lm_architectures.data import open_data
from lm_architectures.decode.generation import generate
from lm_architectures.files import MissingData, UserError
from lm_architectures.hf.families import to_family
from lm_architectures.machine.devices import DType, pick_dtype, start_processes
from lm_architectures.run import checkpoint, run_settings
from lm_architectures.run.dry_run import assumed_data
from lm_architectures.run.models import count_parameters
from lm_architectures.settings import check_ranges

SMALL = '--assumed_ids=64 --n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --micro_batch_size=2'


@dataclass
class Settings(reporting.Settings):
    prompt: int = 256  # decode: prompt tokens of each sequence
    new: int = 64  # decode: new tokens of each sequence
    batch: int = 1  # decode: sequences
    dtype: DType = 'auto'  # decode: of the weights; auto: bf16 on a GPU, else fp32. For training, give it to the sides
    rounds: int = 5  # turns of each side, after a warm-up
    memory: bool = True  # measure peak memory; without a GPU, on Linux only

    def __post_init__(self):
        check_ranges(self, prompt=1, new=1, batch=1, rounds=1)


class Llama(torch.nn.Module):
    """Llama of transformers with the weights of a Standard model, called like our models."""

    def __init__(self, model):
        super().__init__()
        self.config, self.flops_per_token = model.config, model.flops_per_token
        self.llama = to_family(model.config, model.state_dict(), model.config.vocab_size)

    def forward(self, idx, targets):
        loss = self.llama(input_ids=idx, labels=idx, shift_labels=targets).loss
        return {'loss': loss, 'nll': loss.detach()}


# ---- a side ----

@dataclass
class Side:
    facts: dict  # columns of its row
    run: Callable  # what is timed
    n_tokens: int  # of a call
    seconds_at_peak: float | None = None  # of a call, at the peak FLOP/s of the machine; None: unknown
    trained: tuple = ()  # model and optimizer, of a side that trains


def make_model(text: str) -> tuple:
    """Return (model, settings of train.py, machine) of a side."""
    arguments = shlex.split(text)
    is_hf = arguments[0] == 'hf'
    s, given, _ = run_settings.read_settings(train.Settings, arguments[is_hf:])
    if s.device != 'auto' or s.threads:
        raise UserError('the sides share a process: instead of --device and --threads, set CUDA_VISIBLE_DEVICES and '
                        'OMP_NUM_THREADS')
    try:
        data = open_data(s.data)
    except MissingData:
        data = assumed_data(s, None)
    s.batch_size, machine = s.micro_batch_size, start_processes(s)
    with redirect_stdout(None):
        model = train.make_model(s, run_settings.model_config(s, given, data, None), data, machine)
    torch.manual_seed(0)  # the tokens that are drawn next are the same for all sides
    if is_hf and (s.model != 'standard' or model.config.window is not None or model.config.qkv_bias
                  or model.config.qk_norm):
        raise UserError('hf is a Llama: expected model = standard without window, qkv_bias and qk_norm')
    return Llama(model).to(machine.device) if is_hf else model, s, machine


def training(text: str, s: Settings) -> Side:
    """Make a side that trains for a step."""
    model, t, machine = make_model(text)
    c, steps, skips = model.config, itertools.count(), torch.zeros(3, device=machine.device)
    idx, targets = torch.randint(0, c.n_ids, (2, t.batch_size, t.block_size))
    if c.eos_id is not None:
        idx[torch.rand(idx.shape) < 1 / 1000] = c.eos_id
    data = SimpleNamespace(train_batch=lambda *_: (idx, targets))
    compiled, optimizer = machine.compiled(model.train(), t.compile), train.make_optimizer(model, t)

    def step():
        return train.train_step(model, compiled, optimizer, data, t, next(steps), machine, skips)['loss']
    facts = {'parameters': count_parameters(model), 'dtype': str(machine.dtype)[6:], 'T': t.block_size,
             'batch': t.batch_size, 'loss': round(step().item(), 4)}
    side, peak = Side(facts, step, idx.numel(), trained=(model, optimizer)), machine.peak_flops()
    if peak and hasattr(model, 'flops_per_token'):
        side.seconds_at_peak = side.n_tokens * model.flops_per_token(t.block_size) / peak
    return side


def decoding(text: str, s: Settings) -> Side:
    """Make a side that decodes. Its tokens are the new ones."""
    model, _, machine = make_model(text)
    dtype = pick_dtype(s.dtype, machine.device.type)
    model = model.eval().to(dtype)
    prompts = torch.randint(0, model.config.n_ids, (s.batch, s.prompt))
    inputs = {'inputs': prompts.to(machine.device), 'attention_mask': torch.ones_like(prompts, device=machine.device)}

    def decode():
        if isinstance(model, Llama):
            return model.llama.generate(**inputs, do_sample=False, max_new_tokens=s.new, min_new_tokens=s.new)
        return generate(model, prompts.tolist(), s.new, temperature=0)
    facts = {'parameters': count_parameters(model), 'dtype': str(dtype)[6:], 'prompt': s.prompt, 'new': s.new,
             'batch': s.batch}
    return Side(facts, decode, s.batch * s.new)


def ms(function: Callable) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def saving(text: str, s: Settings) -> dict:
    """Return the facts of a side that trains, and of each save."""
    side, saves = training(text, s), []
    step = lambda: side.run().item()  # waits for a GPU
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        run = train.Settings(out_dir=folder)
        for i in range(s.rounds):
            before = statistics.median(ms(step) for _ in range(5))
            copying = ms(lambda: checkpoint.save_training(run, *side.trained, i, 0.0, thread))
            is_written, during = thread.submit(int), [copying + ms(step)]
            while not is_written.done():
                during.append(ms(step))
            saves.append((before, copying, max(during), max(during) / before))
    names = 'ms before', 'ms of copying', 'longest ms', 'longest over before'
    return {**side.facts, **{name: [round(x, 2) for x in values] for name, values in zip(names, zip(*saves))}}


KINDS = {'train': training, 'save': saving, 'decode': decoding}


def peak_memory(kind: str, text: str, s: Settings) -> int:
    """Return the bytes that a side holds at the peak of a call. Call it in a new process."""
    if not GPU:  # import what a step imports, which takes as much memory as a small model
        KINDS[kind]('hf ' * text.startswith('hf ') + SMALL, replace(s, prompt=8, new=4)).run()
    return memory_of(lambda: KINDS[kind](text, s).run)[0]['peak']


# ---- side by side ----

def compare(s: Settings, kind: str = '', *arguments: str) -> Iterator[dict]:
    """Yield a row for each side. All models are in memory at the same time."""
    sides = {name: text for name, _, text in (side.partition(': ') for side in arguments) if text.strip()}
    if kind not in KINDS or not sides or len(sides) < len(arguments):
        raise UserError('expected train, save or decode, then sides as "NAME: ARGUMENTS OF train.py", each with a name '
                        f'of its own, got {shlex.join([kind, *arguments])}: see --help')
    if kind == 'save':
        yield from ({'side': name, **saving(text, s)} for name, text in sides.items())
        return
    peaks = {name: isolated(peak_memory, kind, text, s) for name, text in sides.items()} if s.memory else {}
    made, first = {name: KINDS[kind](text, s) for name, text in sides.items()}, next(iter(sides))
    seconds = alternate({name: side.run for name, side in made.items()}, s.rounds, warmup=1,
                        calls=3 if GPU and kind == 'train' else 1)
    for name, side in made.items():
        yield {'side': name, **side.facts, 'ms': round(1e3 * seconds[name], 2),
               'tokens/s': round(side.n_tokens / seconds[name], 1),
               f'time over {first}': round(seconds[name] / seconds[first], 3),
               **({'MFU': round(side.seconds_at_peak / seconds[name], 3)} if side.seconds_at_peak else {}),
               **({'peak MB': round(peaks[name] / 1e6)} if peaks else {})}


def main(argv: list[str] | None = None) -> None:
    reporting.report(argv, Settings, compare, takes_arguments=True)


if __name__ == '__main__':
    main()
