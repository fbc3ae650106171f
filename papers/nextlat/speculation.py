"""Speculative decoding by draft length and kind of text (NextLat paper, figures and table).

    python -m papers.nextlat.speculation RUN RUN ...                    prompts from the run's data
    python -m papers.nextlat.speculation RUN --data=FOLDER,FOLDER       or from other data
    python -m papers.nextlat.speculation RUN --draft=SMALL              another run drafts
    torchrun --nproc_per_node=8 -m papers.nextlat.speculation RUN       on eight GPUs

The paper has 1024 prompts of 512 tokens and 512 new ones, like the defaults. Here, prompts are the
starts of validation documents, and no text ends early. On each batch of prompts, plain decoding and
all draft lengths take turns; the speed-up is the median over batches of the ratio of times.
`accepted` is the mean number of accepted tokens per verification, which yields one more token.
Cumulative acceptance at i is the probability that the first i tokens of a draft are all accepted.

Writes NAME.csv (--out=NAME), and NAME.png with speed-up and cumulative acceptance over the draft
length. NAME.md has, for each run and data folder, the best fixed length (2 or more), its accepted
tokens, and the speed-up of `auto`, which the paper lacks.
"""
import operator
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from pathlib import Path

import pandas as pd

from analysis import figures
from analysis.runs import named
from lm_architectures.decode.generation import generate
from lm_architectures.decode.speculation import DraftLen, longest_draft, speculative_generate
from lm_architectures.files import UserError
from lm_architectures.machine.devices import Device, DType, local_device, pick_dtype
from lm_architectures.machine.parallel import all_gather, init_distributed, rank, world
from lm_architectures.run.folders import load_run, run_data
from lm_architectures.run.load import load_draft
from lm_architectures.settings import check_ranges
from papers import models


@dataclass
class Settings(figures.Settings):
    data: tuple[str, ...] | None = None  # data folders of the prompts; None: the run's own
    draft: str | None = None  # run folder of a draft model; None: each model drafts for itself
    draft_lens: tuple[DraftLen, ...] = (*range(1, 11), 'auto')  # lengths to compare; skips those the model cannot draft
    n_prompts: int = 1024  # prompts per data folder: the first validation documents that are long enough
    prompt_tokens: int = 512  # tokens of each prompt; shorter documents are skipped
    new_tokens: int = 512  # tokens generated after each prompt
    temperature: float = 1.0  # 0: greedy decoding
    batch_size: int = 1  # prompts decoded at a time
    device: Device = 'auto'  # auto: cuda if there is a GPU, else cpu
    dtype: DType = 'auto'  # weights and cache; auto: bfloat16 on CUDA, float32 elsewhere

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, new_tokens=2)


def draft_lengths(lengths: tuple[DraftLen, ...], model, draft) -> list[DraftLen]:
    """Return the lengths that the model can draft. UserError if there is none."""
    longest_draft(model, draft, 'auto')  # UserError for a model that cannot draft
    longest = inf if draft is not None else model.longest_draft
    possible = [n for n in lengths if n == 'auto' or n <= longest]
    if not possible:
        raise UserError(f'draft_lens is {lengths}: this model drafts up to {longest} tokens')
    return possible


def read_prompts(record: dict, folder: str | None, s: Settings) -> list[list[int]]:
    """Return the starts of validation documents. UserError if prompt and new tokens do not fit."""
    T, block_size = s.prompt_tokens, record['settings']['block_size']
    if T + s.new_tokens > block_size:
        raise UserError(f'{T} prompt tokens and {s.new_tokens} new ones do not fit the context of {block_size} tokens '
                        'that the run was trained on: lower prompt_tokens or new_tokens')
    documents = models.long_documents(run_data(record, folder), T + 1, T, s.n_prompts)  # + 1: prompts exclude eos
    return [document.tolist() for document in documents]


# ---- measuring ----

def compare_lengths(model, draft, prompts, s: Settings) -> list[dict]:
    """Return a row {'draft_len', 'speedup', 'accepted', 'tokens_per_s', ...} per draft length."""
    lengths = dict.fromkeys(draft_lengths(s.draft_lens, model, draft))
    batches = [prompts[start:start + s.batch_size] for start in range(0, len(prompts), s.batch_size)]

    def decode(n, batch, n_new, seed):
        """Return (seconds, rounds) with drafts of length n; None: plain decoding."""
        start, rounds, options = time.perf_counter(), [], dict(temperature=s.temperature, seed=seed)
        if n is None:
            generate(model, batch, n_new, **options)
        else:
            _, rounds = speculative_generate(model, batch, n_new, draft=draft, draft_len=n, **options)
        return time.perf_counter() - start, rounds
    for n in (None, *lengths):
        decode(n, batches[0], min(32, s.new_tokens), 0)  # warm-up
    own = [{n: decode(n, batch, s.new_tokens, seed) for n in (None, *lengths)}
           for seed, batch in list(enumerate(batches))[rank()::world()]]
    measured = [batch for share in all_gather(own) for batch in share]
    plain, rows = [batch[None][0] for batch in measured], []
    for n in lengths:
        seconds, rounds = zip(*(batch[n] for batch in measured))
        rounds = sum(rounds, [])
        tried = Counter(i for drafted, accepted in rounds for i in range(min(drafted, accepted + 1)))
        accepted = Counter(i for _, accepted in rounds for i in range(accepted))
        shares = accumulate((accepted[i] / n_tried for i, n_tried in sorted(tried.items())), operator.mul)
        rows.append({
            'draft_len': n, 'speedup': statistics.median(a / b for a, b in zip(plain, seconds)),
            'accepted': accepted.total() / len(rounds),
            'tokens_per_s': len(prompts) * s.new_tokens / sum(seconds),
            **{f'cumulative_{i}': share for i, share in enumerate(shares, 1)}})
    return rows


def measure(folder: str, device, dtype, s: Settings) -> list[dict]:
    """Return the rows of `compare_lengths` of a run, for each data folder."""
    model, record = load_run(folder, device, dtype, s.code)
    draft = None if s.draft is None else load_draft(s.draft, record, device, dtype, s.code)
    return [{'data': data or record['settings']['data']} | row for data in s.data or [None]
            for row in compare_lengths(model, draft, read_prompts(record, data, s), s)]


# ---- results ----

def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of NAME.md, per run and data folder, from those of NAME.csv."""
    found = []
    for (label, data), own in rows.groupby(['label', 'data'], sort=False):
        fixed = own[own.draft_len != 'auto']
        best = next(some for some in (fixed[fixed.draft_len != 1], fixed, own) if len(some))
        best = best.loc[best.speedup.idxmax()]
        found.append({'run': label, 'data': data, 'speed-up': f'{best.speedup:.2f}',
                      'accepted': f'{best.accepted:.2f}', 'length': best.draft_len,
                      'auto': ''.join(own.speedup[own.draft_len == 'auto'].map('{:.2f}'.format))})
    return pd.DataFrame(found)


def plot(rows: pd.DataFrame):
    """Draw speed-up and cumulative acceptance: a line per run and folder."""
    figure, (left, right) = figures.new_figure('Speculative decoding by draft length', 2, (6, 4))
    for i, ((label, data), own) in enumerate(rows.groupby(['label', 'data'], sort=False)):
        style = dict(color=f'C{i}', label=f'{label}, {Path(data).name}', marker='o')
        is_auto = own.draft_len == 'auto'
        for speedup in own.speedup[is_auto]:
            left.axhline(speedup, color=f'C{i}', linestyle='--')
        left.plot([*own.draft_len[~is_auto]], own.speedup[~is_auto], **style)
        shares = (own if is_auto.all() else own[~is_auto]).filter(like='cumulative_')
        longest = shares.loc[shares.count(axis=1).idxmax()].dropna()
        right.plot(range(1, len(longest) + 1), longest, **style)
    left.set(xlabel='draft length, tokens', ylabel='speed-up over plain decoding', title='dashed: automatic length')
    right.set(xlabel='position in the draft', ylabel='cumulative acceptance probability', ylim=(0, 1))
    figures.add_legend(figure, 'Run, data')
    return figure


@figures.script(Settings)
def main(runs: pd.DataFrame, s: Settings) -> dict:
    init_distributed('gloo')
    device = local_device(s.device)
    rows = models.measured(named(runs, s.labels), measure, device, pick_dtype(s.dtype, device.type), s)
    if rank() > 0:
        return {}
    figures.show(rows, 'run', 'data', 'draft_len', 'tokens_per_s', 'accepted', 'speedup')
    return {'.csv': rows, '.md': figures.markdown(summary(rows)) + '\n', '.png': plot(rows)}


if __name__ == '__main__':
    main()
