"""Speculative decoding over draft lengths and over several kinds of text (NextLat paper, figures and table).

    python -m analysis.speculative RUN [RUN ...]                        prompts of the run's own validation data
    python -m analysis.speculative RUN RUN --data=FOLDER,FOLDER         of other data: Wikipedia, books, code, math
    python -m analysis.speculative RUN --draft=SMALL                    another run drafts

The NextLat paper's protocol: plain decoding and all draft lengths take turns on each batch of prompts, and no text ends
early. A speed-up is the median over the batches of the ratio of their times, because machines are noisy. `accepted` is
the mean number of accepted tokens per verification, which yields one token more. Cumulative acceptance at i is the
probability that the first i tokens of a draft are all accepted.

Prints a table for each run and folder, and writes it to RUN/speculative.csv. NAME.png (--out=NAME) has the speed-up and
the cumulative acceptance over the draft length. NAME.md has one row per run: for each folder, the fixed length of at
least 2 with the largest speed-up, its accepted tokens, and the speed-up of `auto`, which the paper does not have.
"""
import operator
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf
from pathlib import Path

from analysis.figures import new_figure, output_path, runs_to_read, save_figure, write_csv
from bench import markdown_table
from common.decoding import check_sampling, generate
from common.files import UserError, friendly_errors, write_file
from common.machine import Device, DType, decoding_dtype, pick_device
from common.runs import load_run, run_data
from common.settings import check_ranges
from common.speculative import DraftStatistics, longest_draft, read_length, speculative_generate
from sample import load_draft


@dataclass
class Settings:
    data: str | None = None  # data folders of the prompts, separated by commas; None: the run's own
    out: str | None = None  # NAME of the files to write, without ending; None: speculative, beside the first run
    draft: str | None = None  # run folder of a model that drafts; None: each model drafts for itself
    draft_lens: str = '1,2,3,4,5,6,7,8,9,10,auto'  # lengths to compare; those that the model cannot draft are left out
    n_prompts: int = 1024  # prompts of each folder, spread evenly over it
    prompt_tokens: int = 512  # tokens of each prompt
    new_tokens: int = 512  # tokens generated after each prompt
    temperature: float = 1.0  # 0: always the likeliest token
    batch_size: int = 1  # prompts decoded at a time
    device: Device = 'auto'  # auto: cuda if there is a GPU, else cpu
    dtype: DType = 'auto'  # of weights and cache; auto: bfloat16 on GPUs, float32 elsewhere

    def __post_init__(self):
        check_ranges(self, n_prompts=(1, inf), prompt_tokens=(1, inf), new_tokens=(2, inf), batch_size=(1, inf))
        check_sampling(self.temperature)


def draft_lengths(text: str, model, draft) -> list[int | str]:
    """Return the lengths in `draft_lens` that the model can draft; UserError for an invalid one."""
    longest = inf if draft is not None else getattr(model, 'longest_draft', 0)
    lengths = [n for n in map(read_length, text.split(',')) if isinstance(n, str) or n <= longest]
    try:
        for n in ('auto', *lengths):
            longest_draft(model, draft, n)
    except ValueError as error:
        raise UserError(str(error))
    if not lengths:
        raise UserError(f'draft_lens is {text}: this model drafts up to {longest} tokens')
    return lengths


def read_prompts(record: dict, folder: str | None, s: Settings) -> list[list[int]]:
    """Return prompts spread evenly over the validation data; UserError if they do not fit the context or the data."""
    data, T, block_size = run_data(record, folder), s.prompt_tokens, record['settings']['block_size']
    if hasattr(data, 'score'):
        raise UserError(f'prompts are taken from texts, and {data.folder} is a synthetic task: give --data=FOLDER')
    if T + s.new_tokens > block_size:
        raise UserError(f'prompts of {T} tokens and {s.new_tokens} new ones do not fit the context of {block_size} '
                        'tokens that the run was trained with: lower prompt_tokens or new_tokens')
    n_windows = data.n_windows('val', T)
    if n_windows < s.n_prompts:
        raise UserError(f'{data.folder} has {n_windows} validation windows of {T} tokens: lower n_prompts from '
                        f'{s.n_prompts}')
    return data.val_batch([i * n_windows // s.n_prompts for i in range(s.n_prompts)], T)[0].tolist()


# ---- measuring ----

def compare_lengths(model, draft, prompts, s: Settings) -> list[dict]:
    """Return one row per draft length: draft_len, speedup, accepted, tokens_per_s and cumulative, a list."""
    lengths = draft_lengths(s.draft_lens, model, draft)
    sides = {n: partial(decode, model, draft, n, s.temperature) for n in (*lengths, 'plain')}
    seconds, statistics_of = time_decoding(sides, prompts, s)
    rows = []
    for n in lengths:
        speedup = statistics.median(plain / own for plain, own in zip(seconds['plain'], seconds[n]))
        accepted, cumulative = acceptance(statistics_of[n])
        rows.append({'draft_len': n, 'speedup': speedup, 'accepted': accepted,
                     'tokens_per_s': len(prompts) * s.new_tokens / sum(seconds[n]), 'cumulative': cumulative})
    return rows


def decode(model, draft, draft_len, temperature: float, prompts, n_new: int, seed: int = 0) -> DraftStatistics:
    """Continue the prompts by n_new tokens, without drafts where draft_len is 'plain'."""
    if draft_len == 'plain':
        generate(model, prompts, n_new, temperature=temperature, seed=seed)
        return DraftStatistics()
    options = dict(draft=draft, draft_len=draft_len, temperature=temperature, seed=seed)
    return speculative_generate(model, prompts, n_new, **options)[1]


def time_decoding(sides: dict, prompts, s: Settings) -> tuple[dict, dict]:
    """Return ({side: seconds of each batch of prompts}, {side: DraftStatistics of each}); the sides take turns."""
    batches = [prompts[start:start + s.batch_size] for start in range(0, len(prompts), s.batch_size)]
    for decode_batch in sides.values():
        decode_batch(batches[0], min(32, s.new_tokens))  # warm-up
    seconds, statistics_of = {n: [] for n in sides}, {n: [] for n in sides}
    for seed, batch in enumerate(batches):
        for n, decode_batch in sides.items():
            start = time.perf_counter()
            statistics_of[n].append(decode_batch(batch, s.new_tokens, seed))
            seconds[n].append(time.perf_counter() - start)
    return seconds, statistics_of


def acceptance(parts: list[DraftStatistics]) -> tuple[float, list[float]]:
    """Return the accepted tokens per verification and the cumulative acceptance by position."""
    tried, accepted = sum((p.tried_at for p in parts), Counter()), sum((p.accepted_at for p in parts), Counter())
    shares = accumulate((accepted[i] / n for i, n in sorted(tried.items())), operator.mul)
    return accepted.total() / sum(part.rounds for part in parts), list(shares)


# ---- results ----

def length_table(rows: list[dict]) -> str:
    """Return the rows of `compare_lengths` as a Markdown table."""
    return markdown_table([{
        'draft_len': row['draft_len'], 'tokens per verification': f'{1 + row["accepted"]:.2f}',
        'tokens/s': f'{row["tokens_per_s"]:,.1f}', 'speed-up': f'{row["speedup"]:.2f}'} for row in rows])


def csv_rows(rows: list[dict]) -> list[dict]:
    """Return the rows with one column per position of `cumulative`, empty beyond the draft's length."""
    n = max(len(row['cumulative']) for row in rows)
    return [{**{name: value for name, value in row.items() if name not in ('run', 'cumulative')},
             **{f'cumulative_{i + 1}': row['cumulative'][i] if i < len(row['cumulative']) else '' for i in range(n)}}
            for row in rows]


def best(rows: list[dict]) -> dict:
    """Return the row of the fixed length with the largest speed-up: of at least 2 where there is one."""
    fixed = [row for row in rows if row['draft_len'] != 'auto']
    return max([row for row in fixed if row['draft_len'] > 1] or fixed or rows, key=lambda row: row['speedup'])


def markdown(rows: list[dict]) -> str:
    """Return the table of all runs and folders."""
    table = {row['run']: {'run': Path(row['run']).name} for row in rows}
    for run, folder in dict.fromkeys((row['run'], row['data']) for row in rows):
        own = [row for row in rows if (row['run'], row['data']) == (run, folder)]
        auto, row, name = [row for row in own if row['draft_len'] == 'auto'], best(own), Path(folder).name
        table[run] |= {f'{name}: speed-up': f'{row["speedup"]:.2f}', f'{name}: accepted': f'{row["accepted"]:.2f}',
                       f'{name}: length': row['draft_len'],
                       f'{name}: auto': f'{auto[0]["speedup"]:.2f}' if auto else ''}
    return markdown_table(list(table.values())) + '\n'


def plot(rows: list[dict], path) -> None:
    """Draw speed-up and cumulative acceptance over the draft length, one line per run and folder."""
    figure, (left, right) = new_figure(1, 2, figsize=(10, 4))
    pairs = list(dict.fromkeys((row['run'], row['data']) for row in rows))
    for i, (run, folder) in enumerate(pairs):
        own = [row for row in rows if (row['run'], row['data']) == (run, folder)]
        fixed = [row for row in own if row['draft_len'] != 'auto']
        style = dict(color=f'C{i}', label=f'{Path(run).name}, {Path(folder).name}')
        left.plot([row['draft_len'] for row in fixed], [row['speedup'] for row in fixed], marker='o', **style)
        for row in own:
            if row['draft_len'] == 'auto':
                left.axhline(row['speedup'], color=f'C{i}', linestyle='--')
        shares = max((row['cumulative'] for row in fixed or own), key=len)
        right.plot(range(1, len(shares) + 1), shares, marker='o', **style)
    left.set(xlabel='draft length (dashed: auto)', ylabel='times plain decoding')
    right.set(xlabel='draft length', ylabel='cumulative acceptance', ylim=(0, 1))
    left.legend()
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs = runs_to_read('speculative RUN RUN ...', Settings, argv)
        device, rows = pick_device(s.device), []
        for run in runs:
            model, record = load_run(run, device, decoding_dtype(s.dtype, device))
            draft = None if s.draft is None else load_draft(s.draft, record, device, s.dtype)
            own = []
            for folder in s.data.split(',') if s.data else [record['settings']['data']]:
                found = compare_lengths(model, draft, read_prompts(record, folder, s), s)
                own += [{'run': run, 'data': folder, **row} for row in found]
                print(f'{run} on {folder}')
                print(length_table(found))
            write_csv(Path(run) / 'speculative.csv', csv_rows(own))
            rows += own
        out = output_path(s.out, runs, 'speculative')
        write_file(Path(f'{out}.md'), markdown(rows).encode())
        plot(rows, f'{out}.png')
        print(f'written to {out}.md, {out}.png and speculative.csv of each run folder')


if __name__ == '__main__':
    main()
