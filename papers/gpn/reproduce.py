"""Print the commands of the tables and figures of the GPN paper, or run them.

    python -m papers.gpn.reproduce --gpus=8        all of them, under torchrun
    python -m papers.gpn.reproduce table1 --run    run the commands of one, or resume them

papers/gpn/README.md shows how to get the tokenizer. `data` tokenizes FineWeb-Edu for the paper's
tables. `ablations` and `small` are ours. Each edit of `ablations` changes one equation of GPN.
`small` is table 1 on a CPU.
"""
from papers.commands import main, read_rows

TABLE_1 = '@gpn_130m @gpn_2l @gpn_nomem @gpn_transformer @gdn_130m'
ABLATION = 'config/gpn/gpn_ablation.py --learning_rate=6.75e-3'
EDITS = {'gate at 1': 'gate_at_one', 'prediction not carried': 'prediction_not_carried',
         'key from s^g_t': 'key_from_this_state', 'no write gate': 'no_write_gate', 'no decay': 'no_decay'}

SMALL = {'GPN+M': 'gpn_small.py', 'GPN+M, 2 layers': 'gpn_small.py --n_layer=2 --n_embd=176 --n_ffn=496',
         'GPN': 'gpn_small.py --n_head=0 --n_embd=304', 'Transformer': 'gpn/gpn_small_transformer.py',
         'Transformer, N(0, 0.06)': 'gpn/gpn_small_transformer.py --init=normal --init_std=0.06',
         'Gated DeltaNet': 'gdn_small.py'}  # label: config and settings

TABLES = {
    'data': ['python prepare_fineweb.py --config=sample-10BT --tokenizer=tokenizer.model --bos --shuffle=200_000'
             ' --max_tokens=2.8e9 --out_dir=data/built/fineweb_edu_llama2'],  # bos and eos around each document
    'table1': [f'train {TABLE_1}', f'python eval.py {TABLE_1} --val --paper=gpn',
               f'python eval.py {TABLE_1} --paper=gpn --bos=False',
               f'python -m analysis final {TABLE_1} --paper=gpn --out=out/table_1'],
    # The paper tests a bias without memory only.
    'section7.2': [command for name in ('50m_bias', '50m_memory_bias') for bias in (True, False) for command in (
        f'train @gpn_{name}_{bias}',
        f'python -m papers.gpn.state @gpn_{name}_{bias} --out=out/state_gpn_{name}_{bias}')],
    # 8 x 2,048 states; also the numbers of section 7
    'figures4and5': ['train @gpn_130m', 'python -m papers.gpn.state @gpn_130m --out=out/state'],
    'ablations': [f'python -m analysis.compare --seeds=3 --out_dir=out/gpn_ablations "GPN: {ABLATION}" '
                  + ' '.join(f'"{label}: {ABLATION} --model=gpn_{edit}"' for label, edit in EDITS.items())],
    'small': ['python -m analysis.compare --seeds=3 --out_dir=out/table_1_small '
              + ' '.join(f'"{label}: config/{arguments}"' for label, arguments in SMALL.items())]}

if __name__ == '__main__':
    main(__doc__, TABLES, read_rows('gpn'))
