"""Print the commands of the tables and figures of the NextLat paper, or run them.

    python -m papers.nextlat.reproduce                      all of them
    python -m papers.nextlat.reproduce countdown            one part
    python -m papers.nextlat.reproduce path_star --run      run its commands, or resume them
    python -m papers.nextlat.reproduce --gpus=8             all, under torchrun

The parts are named by their data. `small` has small models, 4 to 33 minutes each on one core of an
AMD EPYC. papers/nextlat/README.md says what we had to choose, docs/data.md how to get the map.
"""
from papers.commands import main, runs, train

OBJECTIVES = {'nextlat': '--model=nextlat', 'ntp': '--objective=ntp', 'mtp': '--model=mtp', 'jtp': '--model=jtp'}
MULTI = 'nextlat', 'mtp', 'jtp'  # models with a horizon d
FINEWEB = ['ntp', 'nextlat_d1', 'nextlat_d2', *(f'{m}_d{d}' for m in ('mtp', 'jtp') for d in (1, 2, 4))]
DRAFTS = [f'fineweb_{name}' for name in FINEWEB[1:]]
ACCEPTANCE = '--acceptance_prompts=8'  # logs the acceptance rate of drafts, for the pretraining curves
DOMAINS = 'data/built/domains'
PREPARE = f'--val_fraction=0.9 --max_tokens=1e7 --out_dir={DOMAINS}'
STORIES = 'TinyStoriesV2-GPT4-train.txt'
MARK = "--split_at='<|endoftext|>'"
SCORE_OF = {'countdown': 'solved', 'manhattan': 'valid', 'tinystories': 'val', 'path_star': 'accuracy',
            'path_star_g2_10': 'accuracy'}  # the logged score of a task
COSTS = {f'{name}, d = {d}': f'nextlat_d1.py {OBJECTIVES[name]} --horizon={d}' for d in (1, 2, 8) for name in MULTI}
COSTS['bst'] = 'bst.py'
STEP = '--micro_batch_size=32'  # 33K tokens a step


def trained(chosen: dict[str, tuple]) -> list[str]:
    """Return the commands that train {run: (config, settings)}."""
    return [train(f'nextlat/{config}', settings, run) for run, (config, settings) in chosen.items()]


def by_objective(prefix: str, config: str, settings: str = '', names=tuple(OBJECTIVES), suffix: str = '') -> dict:
    """Return {run: (config, settings)} of the same config with each objective."""
    return {f'{prefix}_{name}{suffix}': (config, f'{OBJECTIVES[name]} {settings}') for name in names}


LANGUAGE = {f'fineweb_{name}': (f'fineweb_{name}', ACCEPTANCE * (name == 'nextlat_d1')) for name in FINEWEB}
CURVES = {'fineweb_nextlat_d1': ('fineweb_nextlat_d1', ACCEPTANCE),
          'muon_nextlat_d1': ('fineweb_nextlat_d1', f'{ACCEPTANCE} --optimizer=muon')}
SWEEPS = {task: {f'sweep_{task}_{name}_{weight}': (task, f'{OBJECTIVES[name]} --lambda_mtp={weight}')
                 for weight in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0) for name in ('mtp', 'jtp')}
          for task in ('countdown', 'manhattan', 'tinystories', 'path_star_g2_10')}
STARS = {graph: {run: values for seed in range(5) for run, values in (
    by_objective(f'star_{graph}', f'path_star_{graph}', f'--seed={seed}', suffix=f'_{seed}')
    | {f'star_{graph}_bst_{seed}': (f'path_star_bst_{graph}', f'--seed={seed}')}).items()}
    for graph in ('g2_10', 'g5_5', 'g7_7')}
ALL_STARS = [run for of_graph in STARS.values() for run in of_graph]
A5 = by_objective('a5', 'a5', names=('nextlat', 'ntp')) | {'a5_ntp_36': (
    'a5', '--objective=ntp --block_size=36 --max_tokens=14_745_600_000'
    ' --data=a5:length=36,train_rows=800_000,val_rows=2000')}
COUNTDOWN = {}
for seed in range(3):
    COUNTDOWN |= by_objective('countdown', 'countdown', f'--seed={seed}', ['ntp'], f'_{seed}')
    COUNTDOWN |= {f'countdown_bst_{seed}': ('countdown_bst', f'--seed={seed}')}
    for d in (1, 4, 8):
        COUNTDOWN |= by_objective('countdown', 'countdown', f'--horizon={d} --seed={seed}', MULTI, f'_{d}_{seed}')
STORY_RUNS = by_objective('stories', 'tinystories', names=['ntp']) | {'stories_bst': ('tinystories_bst', '')}
for d in (1, 8):
    STORY_RUNS |= by_objective('stories', 'tinystories', f'--horizon={d}', MULTI, f'_{d}')
PARTS = {'lambda_kl=1': '--lambda_kl=1', 'lambda_kl=0': '--lambda_kl=0', 'lambda_h=0': '--lambda_h=0',
         'token_loss=ce': '--token_loss=ce --stop_head=False'}  # unchanged, no KL, no Smooth L1, CE for KL
ABLATIONS = {d: {f'ablation_{d}_{name}': ('tinystories', f'--horizon={d} {settings}')
                 for name, settings in PARTS.items()} for d in (1, 8)}
ABLATIONS[1] |= {f'ablation_1_{name}': ('tinystories', f'--{name}=False') for name in ('stop_target', 'stop_head')}
CITY = by_objective('manhattan', 'manhattan')
TASKS = 'path_star', 'a5', 'countdown', 'tinystories', 'manhattan'
SMALL = {task: {run: values for seed in (1, 2, 3) for run, values in by_objective(
    f'small_{task}', f'{task}_small', f'--seed={seed}', ('ntp', 'nextlat'), f'_{seed}').items()} for task in TASKS}
for task in ('path_star', 'tinystories'):
    SMALL[task] |= by_objective(f'small_{task}', f'{task}_small', '--seed=1', ('mtp', 'jtp'), '_1')
for task in ('path_star', 'countdown', 'tinystories'):
    SMALL[task] |= {f'small_{task}_bst_1': (f'{task}_bst_small', '--seed=1')}

TABLES = {
    # 100B tokens of FineWeb-Edu each. The tables have the paper's rows too.
    'language': ['python prepare_fineweb.py --max_tokens=101e9 --out_dir=data/built/fineweb_edu', *trained(LANGUAGE),
                 f'python eval.py {runs(*LANGUAGE)} --val --paper=nextlat',
                 f'python -m analysis final {runs(*LANGUAGE)} --paper=nextlat --out=out/tables'],
    # AdamW and Muon: Smooth L1, KL and the acceptance rate
    'curves': [*trained(CURVES), f'python -m analysis curves {runs(*CURVES)}'
               ' --y=val_next_hidden,val_kl,acceptance --out=out/curves'],
    # speculative decoding, after `language`: the figures, then the table
    'drafts': [f'python -m papers.nextlat.speculation {runs(*DRAFTS)} --out=out/speculative',
               f'python prepare_fineweb.py wikimedia/wikipedia --config=20231101.en --shuffle=200_000'
               f' {PREPARE}/wikipedia',
               'python prepare_fineweb.py lucadiliello/bookcorpusopen --id_field=None --val_fraction=0.9'
               f' --max_tokens=2e8 --out_dir={DOMAINS}/books',
               f'python prepare_fineweb.py stack_edu --id_field=blob_id {PREPARE}/code',
               f'python prepare_fineweb.py open-web-math/open-web-math --id_field=url --shuffle=20_000 {PREPARE}/math',
               f'python -m papers.nextlat.speculation {runs(*DRAFTS)} --out=out/domains'
               f' --data={",".join(f"{DOMAINS}/{name}" for name in ("wikipedia", "books", "code", "math"))}'],
    'costs': [f'python -m bench.speed train "GPT: config/nextlat/fineweb_ntp.py {STEP}"'
              f' "{name}: config/nextlat/fineweb_{config} {STEP}"' for name, config in COSTS.items()],
    # TinyStories with a vocabulary of 1,000
    'stories_data': [f'hf download roneneldan/TinyStories {STORIES} --repo-type=dataset --local-dir=.',
                     f'python -m lm_architectures.data.text.train_tokenizer {STORIES} {MARK} --vocab_size=1000'
                     ' --out=tinystories.json',
                     f'python prepare_fineweb.py {STORIES} {MARK} --tokenizer=tinystories.json'
                     ' --out_dir=data/built/tinystories'],
    # lambda_mtp: give the best value for a task to its MTP and JTP runs below
    'sweep': [command for task, of_task in SWEEPS.items() for command in (
        *trained(of_task), f'python -m analysis final {runs(*of_task)} --x=lambda_mtp --y={SCORE_OF[task]}'
                           f' --out=out/sweep_{task}')],
    # the bars are on 2,000 held-out graphs, eval.py's accuracy on 20,000
    'path_star': [*(command for of_graph in STARS.values() for command in trained(of_graph)),
                  f'python -m analysis curves {runs(*STARS["g2_10"])} --y=accuracy --out=out/over_steps',
                  f'python -m analysis final {runs(*ALL_STARS)} --x=data --y=accuracy --out=out/star',
                  'python eval.py out/star_g2_10_nextlat_0 --val --data=path_star:degree=2,length=10,nodes=100'],
    # trained on words of 12, GPT also on 36; tested on words of 36
    'a5': [*trained(A5), f'python eval.py {runs(*A5)} --val --data=a5:length=36,val_rows=100_000'],
    'countdown': [*trained(COUNTDOWN), f'python eval.py {runs(*COUNTDOWN)} --val --data=countdown',  # 10,000 problems
                  f'python -m analysis final {runs(*COUNTDOWN)} --y=solved --out=out/countdown'],  # 1,000
    # probes of tokens 1 to 20 ahead
    'tinystories': [*trained(STORY_RUNS), f'python -m papers.nextlat.probes {runs(*STORY_RUNS)} --out=out/probes'],
    # after `tinystories`
    'ablations': [command for d, of_d in ABLATIONS.items() for command in (
        *trained(of_d), f'python -m papers.nextlat.probes {runs("stories_ntp", *of_d)} --out=out/ablation_probes_{d}',
        f'python -m analysis curves {runs(*of_d)} --y=val_kl,val_next_hidden --out=out/ablation_parts_{d}')],
    'manhattan': [*trained(CITY), f'python eval.py {runs(*CITY)} --val',
                  f'python -m papers.nextlat.manhattan {runs(*CITY)} --out=out/manhattan'],
    'small': [*(command for of_task in SMALL.values() for command in trained(of_task)),
              *(f'python -m analysis curves {runs(*SMALL[task])} --y={SCORE_OF[task]} --out=out/small_{task}'
                for task in ('path_star', 'countdown')),
              f'python eval.py {runs(*SMALL["countdown"])} --val --data=countdown:largest=999',
              f'python eval.py {runs(*SMALL["a5"])} --val --data=a5:length=12,val_rows=20_000',
              f'python -m papers.nextlat.probes {runs(*SMALL["tinystories"])} --steps=500'
              ' --eval_tokens=1e5 --out=out/tiny',
              f'python -m papers.nextlat.manhattan {runs(*SMALL["manhattan"])} --out=out/small_manhattan']}

if __name__ == '__main__':
    main(__doc__, TABLES)
