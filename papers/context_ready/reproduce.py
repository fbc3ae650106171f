"""Print the commands of the tables of the Context-Ready paper, or run them.

    python -m papers.context_ready.reproduce                      all tables
    python -m papers.context_ready.reproduce 1 A9                 two tables
    python -m papers.context_ready.reproduce pointer_d1 --run     run a row, or resume it

A row is a run in out/, with its settings in rows.csv. In its name, d is Context-Ready and n the
Roformer. A comment names what the paper leaves open. papers/context_ready/README.md shows how to
build the data.
"""
from papers.commands import main, read_rows

ROWS = read_rows('context_ready')
LOSS = 'python eval.py {rows} --val'
DEPTHS = 'python -m papers.context_ready.unrolls {rows} --out=out/table_{table}'
CURVES = 'python -m analysis curves {rows} --out=out/table_{table}'
SCORES = CURVES + ' --y="accuracy*"'


def commands(table: str, patterns: str, after: list[str], guess: str) -> list[str]:
    """Return the commands of a table."""
    rows = ' '.join(f'@{pattern}' for pattern in patterns.split())
    return [*[f'# guess: {guess}'] * bool(guess), f'train {rows}',
            *(command.format(rows=rows, table=table) for command in after)]


RUNS = {  # table: (its rows or patterns of rows, its commands after training, what the paper leaves open)
    '1': ('owt_d5_c1120 owt_d6_c1024 owt_n6_c1088 owt_n12_c768 owt_n2_c1888'
          ' owt_n24_c1088 owt_n12_c1536 owt_d6_c2048 owt_n6_c2176', [LOSS, DEPTHS], ''),
    '2': ('owt_n12_c1024 owt_n13_c1024 owt_d12_c1024 owt_n14_c1024 owt_n24_c1024 owt_d23_c1024', [LOSS], 'batch'),
    '3': ('owt_*_t64', [LOSS], 'tokens'),
    '4': ('owt_n6_c1088_t1024 owt_d1_c2048_t1024_k10* owt_n1_c2048_t1024 owt_d1_c2048_t1024_finetune', [LOSS],
          'unrolls of the fine-tuned run'),
    '5': ('pointer_n* pointer_d1', [SCORES], 'dropout, warm-up, weight decay'),
    '6': ('owt_d1_c2048 owt_d1_c2048_400k owt_d1_c2048_t512 owt_d1_c2048_t1024 owt_d5_c1024 owt_d12_c1024'
          ' owt_d23_c1024', [DEPTHS], 'batch; for D = 5 also steps'),
    'A2': ('wiki_d3_c446_token_blind wiki_n3_c446_hffn wiki_d3_c446_block_head wiki_n3_c446', [LOSS, DEPTHS], 'batch'),
    'A3': ('wiki_d[23]_c446_token_blind wiki_d[23]_c446_add wiki_d[23]_c446_concat', [DEPTHS], 'batch'),
    'A4': ('wiki_d3_c50 wiki_n3_c50_hffn wiki_d3_c74 wiki_n3_c74_hffn wiki_d3_c446_add wiki_n4_c446 wiki_d3_c768'
           ' wiki_n4_c768', [LOSS], 'batch'),
    'A5': ('wiki_d1_c50_k10_kmin wiki_d1_c50_k10', [DEPTHS], 'batch, data, T, heads'),
    'A6': ('owt_d1_c2048_t1024_k10 owt_n6_c1088_t1024', [CURVES], ''),
    'A7': ('owt_d1_c2048 owt_d1_c2048_400k owt_d1_c2048_t512 owt_d1_c2048_t1024 owt_d1_c2048_100k'
           ' owt_d1_c2048_t512_100k', [DEPTHS], 'batch'),
    'A8': ('owt_d5_c1024 owt_d8_c1024 owt_d12_c1024 owt_d23_c1024', [DEPTHS], 'batch; for D = 5 and 8 also steps'),
    'A9': ('owt_n6_c1088_200k owt_n6_c1088_t512 owt_n6_c1088_t1024_200k owt_d1_c2048 owt_d1_c2048_t512'
           ' owt_d1_c2048_t1024', [LOSS], 'batch at T = 512 and 1024'),
    'A10': ('owt_*_matched', [LOSS, CURVES], ''),
    'A11': ('owt_n12_c1408 owt_n24_c1024 owt_n12_c1024 owt_d??_c*_finetune *_continued', [LOSS], 'batch, K'),
    'A12': ('wiki_d5_c768_concat wiki_n6_c768 wiki_d6_c446 wiki_n6_c446_hffn wiki_d2_c446_concat wiki_n3_c446',
            [LOSS], 'batch'),
    '5.8': ('wiki_d3_c446_token_blind wiki_d3_c446_tied', [LOSS], 'batch'),
    'B': ('pointer_wave', [SCORES], 'dropout, warm-up, weight decay'),  # accuracy by hop over training
    'B20': ('pointer_20_hops', [SCORES], 'steps, dropout, warm-up, weight decay')}
TABLES = {table: commands(table, *values) for table, values in RUNS.items()} | {
    'A13': ['python -m papers.context_ready.generation']}

if __name__ == '__main__':
    main(__doc__, TABLES, ROWS)
