"""Print the commands of the tables and figures of the SPS paper, or run them.

    python -m papers.sps.reproduce --gpus=8         all of them, under torchrun
    python -m papers.sps.reproduce figure4 --run    run the commands of one, or resume them

papers/sps/README.md shows how to prepare FineWeb-Edu, and what we had to choose. `forks` is ours:
it compares variants beyond the paper on a CPU.
"""
from papers.commands import main, read_rows

SIZES = 'xs', 's', 'm', 'l', 'xl'
ALL = ' '.join(f'@{method}_{size}' for size in SIZES
               for method in ('standard', 'two_x_memory', 'delayed_state', 'sps'))
BOTH = ' '.join(f'@standard_{size} @sps_{size}' for size in SIZES)
LONGER = ' '.join(f'@standard_{size}_*b' for size in SIZES)  # 40B tokens, XL 100B
PAIRS = {size: f'@standard_{size} @sps_{size} @standard_{size}_*b' for size in SIZES}
RESTRICTED = {size: f'@sps_{size} @delayed_state_{size}' for size in SIZES}
ACCURACY = '+'.join(f'{task} acc_norm' for task in ('arc_easy', 'hellaswag', 'piqa', 'sciq')) + '+lambada_openai acc'
SMALL = 'config/quickstart.py --n_layer=4 --n_embd=128 --n_head=4 --learning_rate=1.35e-3 --sample_tokens=0'
FORKS = {'Standard': '--model=standard', 'SPS': '', 'fork, top 1': '--predict_input=state --predict_layers=1',
         'fork, top 2': '--predict_input=state --predict_layers=2', 'from the token': '--predict_input=token'}
NAMES = '--labels="Standard,2x Memory,Delayed State,SPS"'

TABLES = {
    'tables2and3': [f'train {ALL}', f'python eval.py {ALL} --val --paper=sps', 'python -m papers.sps.inference',
                    f'python -m analysis final {ALL} --paper=sps --out=out/tables'],
    # Press Ctrl-C when Standard has the loss that SPS has after 18B tokens (paper: after 47B), and
    # type the commands after it by hand
    'figure1': [f'train {PAIRS["xl"]}', f'python -m analysis match {PAIRS["xl"]} --out=out/tokens_xl'],
    'figure2': [f'train {BOTH} {LONGER}',
                *(f'python -m analysis curves {runs} --out=out/loss_curves_{size}' for size, runs in PAIRS.items()),
                f'python -m analysis match {" ".join(PAIRS.values())} --out=out/tokens'],
    'figure3': [f'train {ALL}', f'python eval.py {ALL} --paper=sps',
                *(f'python -m analysis final {BOTH} --x=parameters --minus=standard --y="{y}" --out=out/{out}'
                  for out, y in (('scaling', 'val'), ('scaling_accuracy', ACCURACY)))],
    'figure4': ['train @standard_s @sps_s @delayed_state_s @reverse_sps_s @*_s_w*',
                'python -m analysis final @*_s_w* @sps_s @delayed_state_s @reverse_sps_s @standard_s --x=window'
                ' --out=out/windows'],
    # panel (a) at S, because the paper names no size; panel (b) at all sizes
    'figure5': [f'train @standard_s {" ".join(RESTRICTED.values())}',
                'python -m papers.sps.gradient_flow @standard_s @sps_s @delayed_state_s --dtype=auto --batch_size=32',
                *(f'python -m papers.sps.restricted_state {runs} --dtype=auto --out=out/restricted_state_{size}'
                  for size, runs in RESTRICTED.items())],
    'figure6': ['train @*_s_10b_*', f'python -m analysis final @*_s_10b_* {NAMES} --out=out/seeds',
                f'python -m papers.sps.seeds @*_s_10b_* {NAMES} --better=SPS --alike="2x Memory;Delayed State"'
                ' --out=out/seeds_tests'],
    'forks': ['python -m analysis.compare --seeds=3 --max_tokens=1_500_000 --out_dir=out/forks '
              + ' '.join(f'"{label}: {SMALL} {settings}"' for label, settings in FORKS.items())]}

if __name__ == '__main__':
    main(__doc__, TABLES, read_rows('sps'))
