"""A dry run of train.py: what data it assumes that are not there, and the memory of a step."""
import math
import shlex
from types import SimpleNamespace

from common import parallel, runs
from common.files import first_line
from common.machine import pick_dtype
from common.memory import memory_by_rows
from common.muon import hidden_matrices


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


def print_memory(s, c, blank_model, machine, make_optimizer):
    """Prints the estimated memory of a process, and whether it fits a GPU of s.memory GiB."""
    n_params = runs.count_parameters(blank_model)
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
        fixed, by_row = memory_by_rows(lambda: runs.blank_model(s.model, c), make_optimizer, dtype, s.block_size,
                                       on_gpu)
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
