"""Print the commands of the tables and figures of the SPS paper, or run them.

    python -m papers.sps.reproduce                  all of them
    python -m papers.sps.reproduce table2           one table
    python -m papers.sps.reproduce figure4 --run    run its commands, or resume them
    python -m papers.sps.reproduce --gpus=8         all, under torchrun

papers/sps/README.md shows how to prepare FineWeb-Edu, and what we had to choose. `forks` is ours:
it compares variants beyond the paper on a CPU.
"""
from papers.commands import main, runs, train

SIZES = 'xs', 's', 'm', 'l', 'xl'
METHODS = {'standard': 'standard', 'sps': 'sps', 'two_x_memory': 'sps/two_x_memory',
           'delayed_state': 'sps/delayed_state', 'reverse_sps': 'sps/reverse_sps'}  # run: config
RESTRICTED = [f'{method}_{size}' for size in SIZES for method in ('sps', 'delayed_state')]  # in figure 5
COMPARED = 'standard', 'two_x_memory', 'delayed_state', 'sps'  # in tables 2 and 3
ALL = [f'{method}_{size}' for size in SIZES for method in COMPARED]
SCALED = [name for name in ALL if name.startswith(('standard', 'sps'))]  # in figure 3
ACCURACY = '+'.join(f'{task} acc_norm' for task in ('arc_easy', 'hellaswag', 'piqa', 'sciq')) + '+lambada_openai acc'
LONGER = {'xs': 40, 's': 40, 'm': 40, 'l': 40, 'xl': 100}  # size: tokens of Standard in figures 1 and 2, in billions
PAIRS = {size: [f'standard_{size}', f'sps_{size}', f'standard_{size}_{LONGER[size]}b'] for size in SIZES}
SWEEP = {f'{method}_s_w{w}': (f'{METHODS[method]}_s', f'--window={w}')
         for w in (0, 16, 256) for method in ('sps', 'delayed_state', 'reverse_sps')}  # run: config, settings
SMALL = 'config/quickstart.py --n_layer=4 --n_embd=128 --n_head=4 --learning_rate=1.35e-3 --sample_tokens=0'
FORKS = {'Standard': '--model=standard', 'SPS': '', 'fork, top 1': '--predict_input=state --predict_layers=1',
         'fork, top 2': '--predict_input=state --predict_layers=2', 'from the token': '--predict_input=token'}
SEEDS = {f'{method}_s_10b_{seed}': (f'{METHODS[method]}_s', f'--max_tokens=10e9 --eval_interval=51 --seed={seed}')
         for seed in (1337, 0, 1) for method in COMPARED}
NAMES = '--labels="Standard,2x Memory,Delayed State,SPS"'


def trained(names) -> list[str]:
    """Return the commands that train these runs, METHOD_SIZE."""
    return [train('{}_{}'.format(METHODS[name.rpartition('_')[0]], name.rpartition('_')[2])) for name in names]


def longer(size: str) -> str:
    """Return the command that trains Standard further: to 40B tokens, at XL to 100B."""
    billions = LONGER[size]
    return (f'python train.py --extend=out/standard_{size} --max_tokens={billions}e9'
            f' --out_dir=out/standard_{size}_{billions}b')


MAIN = [*trained(ALL), f'python eval.py {runs(*ALL)} --val --paper=sps', 'python -m papers.sps.inference',
        f'python -m analysis final {runs(*ALL)} --paper=sps --out=out/tables']
TABLES = {
    'table2': MAIN, 'table3': MAIN,
    # Press Ctrl-C when Standard has the loss that SPS has after 18B tokens (paper: after 47B), and
    # type the commands after it by hand
    'figure1': [*trained(['standard_xl', 'sps_xl']), longer('xl'),
                f'python -m analysis match {runs(*PAIRS["xl"])} --out=out/tokens_xl'],
    'figure2': [*trained(f'{method}_{size}' for size in SIZES for method in ('standard', 'sps')), *map(longer, SIZES),
                *(f'python -m analysis curves {runs(*pair)} --out=out/loss_curves_{size}'
                  for size, pair in PAIRS.items()),
                f'python -m analysis match {runs(*sum(PAIRS.values(), []))} --out=out/tokens'],
    'figure3': [*trained(ALL), f'python eval.py {runs(*ALL)} --paper=sps',
                *(f'python -m analysis final {runs(*SCALED)} --x=parameters --minus=standard --y="{y}" --out=out/{out}'
                  for out, y in (('scaling', 'val'), ('scaling_accuracy', ACCURACY)))],
    'figure4': [*trained(f'{method}_s' for method in METHODS if method != 'two_x_memory'),
                *(train(*values, name) for name, values in SWEEP.items()),
                f'python -m analysis final {runs(*SWEEP)}'
                f' {runs("sps_s", "delayed_state_s", "reverse_sps_s", "standard_s")} --x=window --out=out/windows'],
    # panel (a) at S, because the paper names no size; panel (b) at all sizes
    'figure5': [*trained(['standard_s', *RESTRICTED]),
                f'python -m papers.sps.gradient_flow {runs("standard_s", "sps_s", "delayed_state_s")}'
                ' --dtype=auto --batch_size=32',
                *(f'python -m papers.sps.restricted_state {runs(f"sps_{size}", f"delayed_state_{size}")} --dtype=auto'
                  f' --out=out/restricted_state_{size}' for size in SIZES)],
    'figure6': [*(train(*values, name) for name, values in SEEDS.items()),
                f'python -m analysis final {runs(*SEEDS)} {NAMES} --out=out/seeds',
                f'python -m papers.sps.seeds {runs(*SEEDS)} {NAMES} --better=SPS --alike="2x Memory;Delayed State"'
                ' --out=out/seeds_tests'],
    'forks': ['python -m analysis.compare --seeds=3 --max_tokens=1_500_000 --out_dir=out/forks '
              + ' '.join(f'"{label}: {SMALL} {settings}"' for label, settings in FORKS.items())]}

if __name__ == '__main__':
    main(__doc__, TABLES)
