"""Dry run of train.py: check the settings, print sizes and costs, estimate a step's memory."""
import bisect
import functools
import math
import re
from os.path import relpath
from pathlib import Path
from types import SimpleNamespace

from common import models, runs
from common.files import ROOT, command, first_line
from common.machine import pick_dtype
from common.memory import activation_bytes
from common.run_settings import check_settings, code_folder, describe, model_config
from common.sharding import gathered_modules
from data import has_data, open_data


def dry_run(s, given: dict, record, machine) -> None:
    """Check all that train.py checks before it builds the model, and print memory estimates."""
    data = open_data(s.data) if has_data(s.data) else assumed_data(s, record)
    if not has_data(s.data):
        print(f'no data at {s.data}: assuming a vocabulary of {data.n_ids:,} ids (tokenizer {data.tokenizer}) and '
              f'enough text{data.hint}')
    config = model_config(s, given, data, record)
    n_processes = s.shard if s.shard and machine.world == 1 else machine.world  # simulate s.shard processes
    check_settings(s, data, n_processes)
    model = models.meta_model(s.model, config, code_folder(s))
    describe(s, model, data)
    print_memory(s, model, n_processes)


def assumed_data(s, record) -> SimpleNamespace:
    """Return a stand-in for missing data, with the vocabulary of a run or of s.assumed_ids ids.

    Its field `hint` says how to build the data that a config names, or a dataset of the hub.
    """
    record = record or (runs.read_run(s.init_from) if s.init_from else {})
    like = {'tokenizer': 'gpt2' if s.assumed_ids == 50257 else 'FILE', 'n_ids': s.assumed_ids,
            'eos_id': s.assumed_ids - 1, 'sha256': '', 'bos': False, **record.get('data', {})}
    tokenizer = [] if like['tokenizer'] == 'gpt2' else [f'--tokenizer={like["tokenizer"]}']
    max_tokens = f'--max_tokens={1.05 * s.max_tokens:.3g}'.replace('e+', 'e')  # 5% more, for validation
    hint = ''
    if s.make_data and s.data in s.make_data:
        hint = f'. To build it: {s.make_data}'.replace('prepare_fineweb.py', relpath(ROOT / 'prepare_fineweb.py'))
    elif s.data == type(s).data:
        hint = '. To build it: ' + command('prepare_fineweb.py', *tokenizer, f'--out_dir={s.data}', max_tokens)
    elif re.fullmatch(r'[\w.-]+/[\w.-]+', s.data):
        hint = '. If it is a dataset on the Hugging Face hub: ' + command(
            'prepare_fineweb.py', s.data, *tokenizer, f'--out_dir=data/built/{Path(s.data).name}', max_tokens)
    return SimpleNamespace(**{**like, 'folder': s.data}, splits={'train': {'tokens': s.max_tokens}},
                           n_rows=lambda split, T: 1, hint=hint)


def print_memory(s, model, n_processes: int) -> None:
    """Print the estimated GPU memory per process, and whether it fits into s.memory GiB.

    model: on the meta device.
    """
    most = math.ceil(s.batch_size / n_processes)  # sequences per process and step
    n_rows = min(s.micro_batch_size, most)
    n_shards = (s.shard or n_processes) if s.parallel == 'fsdp' else 1
    held = state_bytes(model, n_shards, n_rows < most)
    share = f'1/{n_shards} of ' if n_shards > 1 else ''
    print(f'estimated memory per process: {held / 2**30:.2f} GiB for {share}weights, gradients and moments', end='',
          flush=True)
    if any(getattr(module, 'fast', None) for module in model.modules()):
        return print('; activations in the scan of a recurrent model are not estimated')
    dtype = pick_dtype(s.dtype, 'cuda')
    activations = functools.cache(lambda n: activation_bytes(model, dtype, s.block_size, n))
    try:
        needed = held + activations(n_rows)
    except (RuntimeError, NotImplementedError) as error:  # an operator without a meta implementation
        print(f'; activations cannot be estimated for this model ({type(error).__name__}: {first_line(error)})')
        return
    print(f', {needed / 2**30:.2f} GiB at the peak of a step on a GPU, with micro-batches of {n_rows} and matrix '
          f'products in {str(dtype)[6:]}')
    if s.memory is None:
        return
    room = 0.95 * s.memory * 2 ** 30  # 5% for the driver and fragmentation
    print('searching for the largest micro_batch_size that fits, which takes a while for a large model', flush=True)
    low, high = (n_rows, most) if needed <= room else (0, n_rows - 1)  # it is one of these or between them
    largest = low + bisect.bisect(range(low + 1, high + 1), room - held, key=activations)
    advice = f'the largest micro_batch_size that fits is {largest}'
    if largest < 1:
        advice = 'no micro_batch_size fits: use a smaller block_size or model, or a checkpoint_ setting (--help)'
    print(f'a step {"fits" if needed <= room else "does not fit"} {s.memory:g} GiB; {advice}')


def state_bytes(model, n_shards: int, accumulates: bool) -> float:
    """Return bytes per process of fp32 weights, gradients, two moments and FSDP's buffers.

    n_shards processes share a copy of the weights; DDP's buffers are the gradients. docs/scale.md
    lists what FSDP holds; for the blocks: one block, the prefetched one, its gradients and two
    buffers. This follows PyTorch's source code and was not measured.
    """
    n_params = models.count_parameters(model)
    if n_shards == 1:
        return 16 * n_params
    blocks = [models.count_parameters(module) for module in gathered_modules(model)]
    outside = n_params - sum(blocks)
    waiting = sum(blocks) if accumulates else 0
    return 16 * n_params / n_shards + 4 * (2 * outside + max(outside, 5 * max(blocks, default=0)) + waiting)
