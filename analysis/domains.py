"""Speculative decoding over several kinds of text (NextLat paper, the table of Wikipedia, books, code and math).

    python -m analysis.domains RUN RUN ... --data=FOLDER,FOLDER,... --out=NAME

Each run drafts for itself on prompts of each data folder, by the protocol of `eval.py --speculative`: lengths 1 to
10 and `auto`, those that it can draft. Writes all lengths to NAME.csv, and to NAME.md a row for each run: speed-up over
plain decoding and accepted tokens in each folder, at the fixed length from 2 up with the largest speed-up there, and
the speed-up of `auto`, which the paper does not have.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

from dataclasses import asdict, dataclass
from pathlib import Path

import eval
from analysis.figures import output_path, write_csv
from common.files import UserError, friendly_errors, write_file
from common.settings import load_settings

COLUMNS = 'draft_len', 'speedup', 'accepted', 'tokens_per_s'


@dataclass
class Settings:
    data: str | None = None  # data folders, with commas between them
    out: str | None = None  # NAME of the files to write, without ending; None: domains beside the runs
    draft_lens: str = '1,2,3,4,5,6,7,8,9,10,auto'  # lengths to compare, those that the model can
    n_prompts: int = 1024  # prompts of each folder
    prompt_tokens: int = 512  # tokens of each prompt
    new_tokens: int = 512  # tokens that each prompt is continued by
    temperature: float = 1.0  # 0: always the likeliest token
    batch_size: int = 1  # prompts decoded at a time
    dtype: str = 'auto'  # of weights and products: bfloat16 or float32; auto: bfloat16 where it is faster
    device: str = 'auto'  # auto, cuda, cpu or mps


def measure(runs: list[str], folders: list[str], s: Settings) -> list[dict]:
    """Rows of the CSV: one for each run, folder and draft length."""
    shared = {name: value for name, value in asdict(s).items() if name not in ('data', 'out')}
    rows = []
    for run in runs:
        asked = eval.Settings(**shared)
        scorer, _, record = eval.load_scorer(run, asked)
        for folder in folders:
            asked.data = folder
            for row in eval.speculative(scorer.model, record, asked):
                rows.append({'run': run, 'data': folder, **{name: row[name] for name in COLUMNS}})
                print('  '.join(f'{key} {value:.3f}' if isinstance(value, float) else f'{key} {value}'
                                for key, value in rows[-1].items()), flush=True)
    return rows


def best(rows: list[dict]) -> dict:
    """The row with the largest speed-up of a run in a folder: of fixed lengths from 2 up, if it drafted by such."""
    fixed = [row for row in rows if row['draft_len'] != 'auto']
    return max([row for row in fixed if row['draft_len'] > 1] or fixed or rows, key=lambda row: row['speedup'])


def markdown(rows: list[dict]) -> str:
    """The table: a row for each run; of each folder speed-up, accepted tokens and length, and the speed-up of auto."""
    runs, folders = (list(dict.fromkeys(row[name] for row in rows)) for name in ('run', 'data'))
    heads = [f'{Path(folder).name}: speed-up | accepted | length | auto' for folder in folders]
    lines = [f'| run | {" | ".join(heads)} |', '|---|' + '---|' * (4 * len(folders))]
    for run in runs:
        cells = []
        for folder in folders:
            own = [row for row in rows if (row['run'], row['data']) == (run, folder)]
            auto, row = [f'{row["speedup"]:.2f}' for row in own if row['draft_len'] == 'auto'], best(own)
            cells += [f'{row["speedup"]:.2f}', f'{row["accepted"]:.2f}', str(row['draft_len']), *(auto or [''])]
        lines.append(f'| {Path(run).name} | {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs, _ = load_settings(Settings, argv)
        folders = [name.strip() for name in (s.data or '').split(',') if name.strip()]
        if not (runs and folders):
            raise UserError('which runs, and which texts? python -m analysis.domains RUN RUN ... --data=FOLDER,FOLDER')
        out = output_path(s.out, runs, 'domains')
        rows = measure(runs, folders, s)
        write_csv(f'{out}.csv', rows)
        write_file(Path(f'{out}.md'), markdown(rows).encode())
        print(f'\n{markdown(rows)}\nwritten to {out}.md and {out}.csv')


if __name__ == '__main__':
    main()
