"""Speculative decoding over draft lengths and over several kinds of text (NextLat paper, figures and table).

    python -m analysis.speculative RUN [RUN ...]                        prompts of the run's own validation data
    python -m analysis.speculative RUN RUN --data=FOLDER,FOLDER         of other data: Wikipedia, books, code, math
    python -m analysis.speculative RUN --draft=SMALL                    another run drafts
    torchrun --nproc_per_node=8 -m analysis.speculative RUN             on several GPUs: each decodes a share

The NextLat paper's protocol: prompts are the beginnings of validation documents, plain decoding and all draft lengths
take turns on each batch of them, and no text ends early. A speed-up is the median over the batches of the ratio of
their times, because machines are noisy. `accepted` is the mean number of accepted tokens per verification, which yields
one token more. Cumulative acceptance at i is the probability that the first i tokens of a draft are all accepted.

Prints a table for each run, and writes it to RUN/speculative.csv. NAME.png (--out=NAME) has the speed-up and
the cumulative acceptance over the draft length. NAME.md has one row per run: for each folder, the fixed length of at
least 2 with the largest speed-up, its accepted tokens, and the speed-up of `auto`, which the paper does not have.
"""
import operator
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from pathlib import Path

from analysis.figures import long_documents, new_figure, output_path, runs_to_read, save_figure, write_csv
from bench import markdown_table
from common.decoding import SAMPLING, generate
from common.files import UserError, write_file
from common.machine import Device, DType, decoding_dtype, init_distributed, local_device
from common.parallel import all_gather, rank, world
from common.runs import load_run, run_data
from common.settings import check_ranges
from common.speculative import longest_draft, read_length, speculative_generate
from sample import load_draft


@dataclass
class Settings:
    data: str | None = None  # data folders of the prompts, separated by commas; None: the run's own
    out: str | None = None  # NAME of the files to write, without ending; None: speculative, beside the first run
    draft: str | None = None  # run folder of a model that drafts; None: each model drafts for itself
    draft_lens: str = '1,2,3,4,5,6,7,8,9,10,auto'  # lengths to compare; those that the model cannot draft are left out
    n_prompts: int = 1024  # prompts of each folder: its first validation documents that are long enough
    prompt_tokens: int = 512  # tokens of each prompt; shorter documents are left out
    new_tokens: int = 512  # tokens generated after each prompt
    temperature: float = 1.0  # 0: always the likeliest token
    batch_size: int = 1  # prompts decoded at a time
    device: Device = 'auto'  # auto: cuda if there is a GPU, else cpu
    dtype: DType = 'auto'  # of weights and cache; auto: bfloat16 on GPUs, float32 elsewhere

    def __post_init__(self):
        check_ranges(self, new_tokens=(2, inf), temperature=SAMPLING['temperature'])


def draft_lengths(text: str, model, draft) -> list[int | str]:
    """Return the lengths in `draft_lens` that the model can draft; UserError for an invalid one."""
    longest = inf if draft is not None else getattr(model, 'longest_draft', 0)
    lengths = [n for n in map(read_length, text.split(',')) if isinstance(n, str) or n <= longest]
    for n in ('auto', *lengths):
        longest_draft(model, draft, n)
    if not lengths:
        raise UserError(f'draft_lens is {text}: this model drafts up to {longest} tokens')
    return lengths


def read_prompts(record: dict, folder: str | None, s: Settings) -> list[list[int]]:
    """Return the beginnings of validation documents; UserError if they do not fit the context or none is long."""
    T, block_size = s.prompt_tokens, record['settings']['block_size']
    if T + s.new_tokens > block_size:
        raise UserError(f'prompts of {T} tokens and {s.new_tokens} new ones do not fit the context of {block_size} '
                        'tokens that the run was trained with: lower prompt_tokens or new_tokens')
    documents = long_documents(run_data(record, folder), T + 1, T, s.n_prompts)  # each ends with eos, which is left out
    return [document.tolist() for document in documents]


# ---- measuring ----

def compare_lengths(model, draft, prompts, s: Settings) -> list[dict]:
    """Return one row per draft length: draft_len, speedup, accepted, tokens_per_s of one process, cumulative_1, ..."""
    sides = list(dict.fromkeys(('plain', *draft_lengths(s.draft_lens, model, draft))))
    batches = [prompts[start:start + s.batch_size] for start in range(0, len(prompts), s.batch_size)]
    for side in sides:
        decode(model, draft, side, batches[0], min(32, s.new_tokens), s)  # warm-up
    own = [{side: decode(model, draft, side, batch, s.new_tokens, s, seed) for side in sides}
           for seed, batch in list(enumerate(batches))[rank()::world()]]
    measured = [batch for share in all_gather(own) for batch in share]
    plain, rows = [batch['plain'][0] for batch in measured], []
    for n in sides[1:]:
        seconds, drafts = zip(*(batch[n] for batch in measured))
        tried, accepted = sum((d.tried_at for d in drafts), Counter()), sum((d.accepted_at for d in drafts), Counter())
        shares = accumulate((accepted[i] / n_tried for i, n_tried in sorted(tried.items())), operator.mul)
        rows.append({
            'draft_len': n, 'speedup': statistics.median(a / b for a, b in zip(plain, seconds)),
            'accepted': accepted.total() / sum(d.rounds for d in drafts),
            'tokens_per_s': len(prompts) * s.new_tokens / sum(seconds),
            **{f'cumulative_{i}': share for i, share in enumerate(shares, 1)}})
    return rows


def decode(model, draft, draft_len, prompts, n_new: int, s: Settings, seed: int = 0) -> tuple:
    """Continue the prompts by n_new tokens. Returns the seconds, and DraftStatistics unless draft_len is 'plain'."""
    start, drafts = time.perf_counter(), None
    if draft_len == 'plain':
        generate(model, prompts, n_new, temperature=s.temperature, seed=seed)
    else:
        _, drafts = speculative_generate(model, prompts, n_new, draft=draft, draft_len=draft_len,
                                         temperature=s.temperature, seed=seed)
    return time.perf_counter() - start, drafts


# ---- results ----

def markdown(tables: dict[tuple[str, str], list[dict]]) -> str:
    """Return a table with a row per run, from {(run, folder): rows of `compare_lengths`}.

    The length is the fixed one with the largest speed-up, of at least 2 where there is one.
    """
    found = {run: {'run': Path(run).name} for run, _ in tables}
    for (run, folder), rows in tables.items():
        name, fixed = Path(folder).name, [row for row in rows if row['draft_len'] != 'auto']
        row = max([row for row in fixed if row['draft_len'] > 1] or fixed or rows, key=lambda row: row['speedup'])
        auto = [f'{row["speedup"]:.2f}' for row in rows if row['draft_len'] == 'auto']
        found[run] |= {f'{name}: speed-up': f'{row["speedup"]:.2f}', f'{name}: accepted': f'{row["accepted"]:.2f}',
                       f'{name}: length': row['draft_len'], f'{name}: auto': ''.join(auto)}
    return markdown_table(list(found.values())) + '\n'


def plot(tables: dict[tuple[str, str], list[dict]], path) -> None:
    """Draw speed-up and cumulative acceptance over the draft length, one line per run and folder."""
    figure, (left, right) = new_figure(1, 2, figsize=(10, 4))
    for i, ((run, folder), rows) in enumerate(tables.items()):
        style = dict(color=f'C{i}', label=f'{Path(run).name}, {Path(folder).name}')
        speedups = {row['draft_len']: row['speedup'] for row in rows}
        if 'auto' in speedups:
            left.axhline(speedups.pop('auto'), color=f'C{i}', linestyle='--')
        left.plot(list(speedups), list(speedups.values()), marker='o', **style)
        longest = max([row for row in rows if row['draft_len'] != 'auto'] or rows, key=len)
        shares = [share for name, share in longest.items() if name.startswith('cumulative')]
        right.plot(range(1, len(shares) + 1), shares, marker='o', **style)
    left.set(xlabel='draft length (dashed: auto)', ylabel='times plain decoding')
    right.set(xlabel='draft length', ylabel='cumulative acceptance', ylim=(0, 1))
    left.legend()
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    with runs_to_read('speculative RUN RUN ...', Settings, argv) as (s, runs):
        init_distributed('gloo')
        device, tables = local_device(s.device), {}
        dtype = decoding_dtype(s.dtype, device.type)
        for run in runs:
            model, record = load_run(run, device, dtype)
            draft = None if s.draft is None else load_draft(s.draft, record, device, dtype)
            folders = s.data.split(',') if s.data else [record['settings']['data']]
            tables |= {(run, folder): compare_lengths(model, draft, read_prompts(record, folder, s), s)
                       for folder in folders}
            if rank() == 0:
                rows = [{'data': folder, **row} for folder in folders for row in tables[run, folder]]
                write_csv(Path(run) / 'speculative.csv', [dict.fromkeys(max(rows, key=len), '') | row for row in rows])
                print(run, markdown_table([{
                    'data': row['data'], 'draft_len': row['draft_len'], 'tokens/s': f'{row["tokens_per_s"]:,.1f}',
                    'tokens per verification': f'{1 + row["accepted"]:.2f}', 'speed-up': f'{row["speedup"]:.2f}'}
                    for row in rows]), sep='\n')
        if rank() == 0:
            out = output_path(s.out, runs, 'speculative')
            write_file(Path(f'{out}.md'), markdown(tables).encode())
            plot(tables, f'{out}.png')
            print(f'written to {out}.md, {out}.png and speculative.csv of each run folder')


if __name__ == '__main__':
    main()
