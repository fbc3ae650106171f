"""Print the commands of the tables of the Context-Ready paper, or run them.

    python -m papers.context_ready.reproduce                      all tables
    python -m papers.context_ready.reproduce 1 A9                 two tables
    python -m papers.context_ready.reproduce pointer_d1 --run     run a row, or resume it

A row is a run in out/. In its name, d is Context-Ready and n the Roformer. "guess" names what the
paper leaves open. papers/context_ready/README.md shows how to build the data.
"""
import fnmatch

from papers.commands import main, runs, train

FIXED, RANDOM = '--K=10 --k_min=None', '--K=10'  # unrolls of a step: always 10, and 2 to 10
PLAIN = '--K=1 --bptt=False'  # a Roformer on pointer chasing
# Batches at T = 512 and 1024 are inferred. 100,000 steps at 512 (A7) come close in loss to as many
# tokens at 256 (A9). N = 6 gains 0.10 nats per doubling of tokens at T = 256. It gains 0.19 from A6
# to A9, which is two doublings.
AT_512 = f'--block_size=512 --warmup_tokens={1000 * 64 * 512}'
AT_1024 = f'--block_size=1024 --batch_size=32 --micro_batch_size=16 --warmup_tokens={1000 * 32 * 1024}'

ROWS = {  # run in out/: base in config/context_ready, settings of train.py
    'owt_d5_c1120': 'owt --n_layer=5 --n_embd=1120',
    'owt_d6_c1024': 'owt --n_layer=6 --n_embd=1024',
    'owt_n6_c1088': 'owt --K=1 --n_layer=6 --n_embd=1088',
    'owt_n12_c768': 'owt --K=1 --n_layer=12 --n_embd=768',
    'owt_n2_c1888': 'owt --K=1 --n_layer=2 --n_embd=1888',
    'owt_n24_c1088': 'owt_large --K=1 --n_layer=24 --n_embd=1088',
    'owt_n12_c1536': 'owt_large --K=1 --n_layer=12 --n_embd=1536',
    'owt_d6_c2048': 'owt_large --n_layer=6 --n_embd=2048',
    'owt_n6_c2176': 'owt_large --K=1 --n_layer=6 --n_embd=2176',

    'owt_n12_c1024': 'owt_large --K=1 --n_layer=12 --n_embd=1024',
    'owt_n13_c1024': 'owt_large --K=1 --n_layer=13 --n_embd=1024',
    'owt_d12_c1024': 'owt_large --n_layer=12 --n_embd=1024',
    'owt_n14_c1024': 'owt_large --K=1 --n_layer=14 --n_embd=1024',
    'owt_n24_c1024': 'owt_large --K=1 --n_layer=24 --n_embd=1024',
    'owt_d23_c1024': 'owt_large --n_layer=23 --n_embd=1024',

    # 20 tokens per parameter of Context-Ready
    'owt_n2_c256_t64': 'owt_short --K=1 --n_layer=2 --n_embd=256 --n_head=4 --max_tokens=370e6',
    'owt_d2_c256_t64': 'owt_short --n_layer=2 --n_embd=256 --n_head=4 --max_tokens=370e6',
    'owt_n2_c512_t64': 'owt_short --K=1 --n_layer=2 --n_embd=512 --n_head=8 --max_tokens=823e6',
    'owt_d2_c512_t64': 'owt_short --n_layer=2 --n_embd=512 --n_head=8 --max_tokens=823e6',
    'owt_n2_c1024_t64': 'owt_short --K=1 --n_layer=2 --n_embd=1024 --max_tokens=1982e6',
    'owt_d2_c1024_t64': 'owt_short --n_layer=2 --n_embd=1024 --max_tokens=1982e6',

    'owt_n6_c1088_t1024': 'owt_long --K=1 --n_layer=6 --n_embd=1088',
    'owt_d1_c2048_t1024_k10': f'owt_long {FIXED} --n_layer=1 --n_embd=2048',
    'owt_d1_c2048_t1024_k10_kmin': f'owt_long {RANDOM} --n_layer=1 --n_embd=2048',
    'owt_d1_c2048_t1024_k10_110k': f'owt_long {FIXED} --n_layer=1 --n_embd=2048 --max_tokens={110_000 * 16 * 1024}'
                                   ' --extend=out/owt_d1_c2048_t1024_k10',
    'owt_d1_c2048_t1024_k10_kmin_135k': f'owt_long {RANDOM} --n_layer=1 --n_embd=2048'
                                        f' --max_tokens={135_000 * 16 * 1024}'
                                        ' --extend=out/owt_d1_c2048_t1024_k10_kmin',
    'owt_n1_c2048_t1024': f'owt_long --K=1 --n_layer=1 --n_embd=2048 --max_tokens={85_000 * 16 * 1024}',
    'owt_d1_c2048_t1024_finetune': f'owt_long {FIXED} --n_layer=1 --n_embd=2048 --max_tokens={130_000 * 16 * 1024}'
                                   ' --init_from=out/owt_n1_c2048_t1024 --seed=1338',

    'pointer_n1': f'pointer {PLAIN} --n_layer=1',
    'pointer_n3': f'pointer {PLAIN} --n_layer=3',
    'pointer_n5': f'pointer {PLAIN} --n_layer=5',
    'pointer_n10': f'pointer {PLAIN} --n_layer=10',
    'pointer_n11': f'pointer {PLAIN} --n_layer=11',
    'pointer_n12': f'pointer {PLAIN} --n_layer=12',
    'pointer_d1': 'pointer',  # solved after about 16,000 of 50,000 steps
    # all 21 levels after about 4,000 steps
    'pointer_20_hops': 'pointer --data=pointer_chasing:hops=20,keys=5,values=10,val_rows=256 --n_embd=512'
                       f' --block_size=658 --max_tokens={10_000 * 64 * 658} --warmup_tokens={100 * 64 * 658}',
    'pointer_wave': 'pointer --data=pointer_chasing:hops=10,keys=5,values=20,val_rows=256 --n_embd=128'
                    f' --learning_rate=1e-3 --max_tokens={23_000 * 64 * 338}',

    'owt_d1_c2048': f'owt --n_layer=1 --n_embd=2048 --max_tokens={200_000 * 64 * 256}',
    'owt_d1_c2048_100k': 'owt --n_layer=1 --n_embd=2048',
    'owt_d1_c2048_400k': f'owt --n_layer=1 --n_embd=2048 --max_tokens={400_000 * 64 * 256}'
                         ' --extend=out/owt_d1_c2048',
    'owt_d1_c2048_t512': f'owt --n_layer=1 --n_embd=2048 {AT_512} --max_tokens={200_000 * 64 * 512}',
    'owt_d1_c2048_t512_100k': f'owt --n_layer=1 --n_embd=2048 {AT_512} --max_tokens={100_000 * 64 * 512}',
    'owt_d1_c2048_t1024': f'owt --n_layer=1 --n_embd=2048 {AT_1024} --max_tokens={200_000 * 32 * 1024}',
    # Steps and batch of table 1, which cannot be right: D = 5 and 8 have a perplexity of 38.60
    # and 39.10 in A8, but D = 6 has 36.56 in table 1.
    'owt_d5_c1024': 'owt --n_layer=5 --n_embd=1024',
    'owt_d8_c1024': 'owt --n_layer=8 --n_embd=1024',

    'owt_n6_c1088_200k': f'owt --K=1 --n_layer=6 --n_embd=1088 --max_tokens={200_000 * 64 * 256}',
    'owt_n6_c1088_t512': f'owt --K=1 --n_layer=6 --n_embd=1088 {AT_512} --max_tokens={200_000 * 64 * 512}',
    'owt_n6_c1088_t1024_200k': f'owt --K=1 --n_layer=6 --n_embd=1088 {AT_1024} --max_tokens={200_000 * 32 * 1024}',

    'owt_n1_c1024_matched': 'owt_short --K=1 --n_layer=1 --n_embd=1024 --max_tokens=1126e6',
    'owt_d1_c1024_matched': 'owt_short --n_layer=1 --n_embd=1024 --max_tokens=1126e6',
    'owt_n2_c1024_matched': 'owt_short --K=1 --n_layer=2 --n_embd=1024 --max_tokens=1126e6',
    'owt_d2_c1024_matched': 'owt_short --n_layer=2 --n_embd=1024 --max_tokens=1126e6',
    'owt_n3_c1024_matched': 'owt_short --K=1 --n_layer=3 --n_embd=1024 --max_tokens=1126e6',
    'owt_d3_c1024_matched': 'owt_short --n_layer=3 --n_embd=1024 --max_tokens=1126e6',
    'owt_n6_c1024_matched': 'owt_short --K=1 --n_layer=6 --n_embd=1024 --max_tokens=1126e6',
    'owt_d6_c1024_matched': 'owt_short --n_layer=6 --n_embd=1024 --max_tokens=1126e6',

    # The paper continues only N = 12, C = 1408 without conversion.
    'owt_n12_c1408': 'owt_large --K=1 --n_layer=12 --n_embd=1408',
    **{f'owt_{letter}{n}_c{C}_{kind}': f'owt_large {K}--n_layer={n} --n_embd={C} --init_from=out/owt_n{n}_c{C}'
                                       f' --seed=1338 --max_tokens={steps * 32 * 256}'
       for n, C, steps in ((12, 1408, 200_000), (24, 1024, 18_000), (12, 1024, 50_000))
       for letter, kind, K in (('d', 'finetune', ''), ('n', 'continued', '--K=1 '))},

    'wiki_d3_c446_token_blind': 'wiki --variant=token_blind --n_layer=3',
    'wiki_n3_c446_hffn': 'wiki --K=1 --variant=extra_ffn --n_layer=3',
    'wiki_d3_c446_block_head': 'wiki --variant=block_head --n_layer=3',
    'wiki_n3_c446': 'wiki --K=1 --n_layer=3',
    'wiki_d3_c446_tied': 'wiki --variant=tied --n_layer=3',
    'wiki_d2_c446_token_blind': 'wiki --variant=token_blind --n_layer=2',
    'wiki_d2_c446_add': 'wiki --n_layer=2',
    'wiki_d2_c446_concat': 'wiki --variant=concat --n_layer=2',
    'wiki_d3_c446_add': 'wiki --n_layer=3',
    'wiki_d3_c446_concat': 'wiki --variant=concat --n_layer=3',
    'wiki_d3_c50': 'wiki --n_layer=3 --n_embd=50',
    'wiki_n3_c50_hffn': 'wiki --K=1 --variant=extra_ffn --n_layer=3 --n_embd=50',
    'wiki_d3_c74': 'wiki --n_layer=3 --n_embd=74',
    'wiki_n3_c74_hffn': 'wiki --K=1 --variant=extra_ffn --n_layer=3 --n_embd=74',
    'wiki_n4_c446': 'wiki --K=1 --n_layer=4',
    'wiki_d3_c768': 'wiki --n_layer=3 --n_embd=768 --n_head=16',
    'wiki_n4_c768': 'wiki --K=1 --n_layer=4 --n_embd=768 --n_head=16',
    # Appendix C.3 has OpenWebText, T = 1024 and 16 heads for all K = 10 runs, but 16 does not
    # divide 50.
    'wiki_d1_c50_k10_kmin': f'wiki {RANDOM} --n_layer=1 --n_embd=50',
    'wiki_d1_c50_k10': f'wiki {FIXED} --n_layer=1 --n_embd=50',
    'wiki_d5_c768_concat': 'wiki --variant=concat --n_layer=5 --n_embd=768 --n_head=16',
    'wiki_n6_c768': 'wiki --K=1 --n_layer=6 --n_embd=768 --n_head=16',
    'wiki_d6_c446': 'wiki --n_layer=6',
    'wiki_n6_c446_hffn': 'wiki --K=1 --variant=extra_ffn --n_layer=6'}

LOSS = 'python eval.py {runs} --val'
DEPTHS = 'python -m papers.context_ready.unrolls {runs} --out=out/table_{table}'
CURVES = 'python -m analysis curves {runs} --out=out/table_{table}'
SCORES = CURVES + ' --y="accuracy*"'
TABLES = {  # table: (its rows or patterns of rows, its commands after training, guesses)
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
    'A13': ('', ['python -m papers.context_ready.generation'], ''),
    '5.8': ('wiki_d3_c446_token_blind wiki_d3_c446_tied', [LOSS], 'batch'),
    'B': ('pointer_wave', [SCORES], 'dropout, warm-up, weight decay'),  # accuracy by hop over training
    'B20': ('pointer_20_hops', [SCORES], 'steps, dropout, warm-up, weight decay')}


def training(row: str) -> str:
    """Return the command of a row."""
    base, _, settings = ROWS[row].partition(' ')
    return train(f'context_ready/{base}', settings, row)


def commands(table: str) -> list[str]:
    """Return the commands of a table."""
    patterns, after, _ = TABLES[table]
    rows = [row for pattern in patterns.split() for row in fnmatch.filter(ROWS, pattern)]
    return [*map(training, rows), *(command.format(runs=runs(*rows), table=table) for command in after)]


if __name__ == '__main__':
    main(__doc__, {table: commands(table) for table in TABLES}, {row: [training(row)] for row in ROWS},
         {table: guess for table, (_, _, guess) in TABLES.items()})
