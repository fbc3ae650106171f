"""Print the commands of the tables and figures of the NextLat paper, or run them.

    python -m papers.nextlat.reproduce --gpus=8           all of them, under torchrun
    python -m papers.nextlat.reproduce path_star --run    run the commands of one, or resume them

The parts are named by their data. `small` has small models, 4 to 33 minutes each on one core of an
AMD EPYC. papers/nextlat/README.md says what we had to choose, docs/tasks.md how to get the map.
"""
from papers.commands import main, read_rows

DRAFTS = '@fineweb_*_d?'
DOMAINS = 'data/built/domains'
PREPARE = f'--val_fraction=0.9 --max_tokens=1e7 --out_dir={DOMAINS}'
STORIES = 'TinyStoriesV2-GPT4-train.txt'
MARK = "--split_at='<|endoftext|>'"
SWEPT = {'countdown': 'solved', 'manhattan': 'valid', 'tinystories': 'val', 'path_star_g2_10': 'accuracy'}  # score
STEP = '--micro_batch_size=32'  # 33K tokens a step
COSTS = {f'{name}, d = {d}': f'nextlat_d1.py --model={name} --horizon={d}'
         for d in (1, 2, 8) for name in ('nextlat', 'mtp', 'jtp')} | {'bst': 'bst.py'}

TABLES = {
    # 100B tokens of FineWeb-Edu each. The tables have the paper's rows too.
    'language': ['python prepare_fineweb.py --max_tokens=101e9 --out_dir=data/built/fineweb_edu', 'train @fineweb_*',
                 'python eval.py @fineweb_* --val --paper=nextlat',
                 'python -m analysis final @fineweb_* --paper=nextlat --out=out/tables'],
    # AdamW and Muon: Smooth L1, KL and the acceptance rate
    'curves': ['train @*_nextlat_d1',
               'python -m analysis curves @*_nextlat_d1 --y=val_next_hidden,val_kl,acceptance --out=out/curves'],
    # speculative decoding, after `language`: the figures, then the table
    'drafts': [f'python -m papers.nextlat.speculation {DRAFTS} --out=out/speculative',
               f'python prepare_fineweb.py wikimedia/wikipedia --config=20231101.en --shuffle=200_000'
               f' {PREPARE}/wikipedia',
               'python prepare_fineweb.py lucadiliello/bookcorpusopen --id_field=None --val_fraction=0.9'
               f' --max_tokens=2e8 --out_dir={DOMAINS}/books',
               f'python prepare_fineweb.py stack_edu --id_field=blob_id {PREPARE}/code',
               f'python prepare_fineweb.py open-web-math/open-web-math --id_field=url --shuffle=20_000 {PREPARE}/math',
               f'python -m papers.nextlat.speculation {DRAFTS} --out=out/domains'
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
    'sweep': [command for task, score in SWEPT.items() for command in (
        f'train @sweep_{task}_*',
        f'python -m analysis final @sweep_{task}_* --x=lambda_mtp --y={score} --out=out/sweep_{task}')],
    # the bars are on 2,000 held-out graphs, eval.py's accuracy on 20,000
    'path_star': ['train @star_*',
                  'python -m analysis curves @star_g2_10_* --y=accuracy --out=out/over_steps',
                  'python -m analysis final @star_* --x=data --y=accuracy --out=out/star',
                  'python eval.py out/star_g2_10_nextlat_0 --val --data=path_star:degree=2,length=10,nodes=100'],
    # trained on words of 12, GPT also on 36; tested on words of 36
    'a5': ['train @a5_*', 'python eval.py @a5_* --val --data=a5:length=36,val_rows=100_000'],
    'countdown': ['train @countdown_*', 'python eval.py @countdown_* --val --data=countdown',  # 10,000 problems
                  'python -m analysis final @countdown_* --y=solved --out=out/countdown'],  # 1,000
    # probes of tokens 1 to 20 ahead
    'tinystories': ['train @stories_*', 'python -m papers.nextlat.probes @stories_* --out=out/probes'],
    # after `tinystories`
    'ablations': [command for d in (1, 8) for command in (
        f'train @ablation_{d}_*',
        f'python -m papers.nextlat.probes @stories_ntp @ablation_{d}_* --out=out/ablation_probes_{d}',
        f'python -m analysis curves @ablation_{d}_* --y=val_kl,val_next_hidden --out=out/ablation_parts_{d}')],
    'manhattan': ['train @manhattan_*', 'python eval.py @manhattan_* --val',
                  'python -m papers.nextlat.manhattan @manhattan_* --out=out/manhattan'],
    'small': ['train @small_*',
              'python -m analysis curves @small_path_star_* --y=accuracy --out=out/small_path_star',
              'python -m analysis curves @small_countdown_* --y=solved --out=out/small_countdown',
              'python eval.py @small_countdown_* --val --data=countdown:largest=999',
              'python eval.py @small_a5_* --val --data=a5:length=12,val_rows=20_000',
              'python -m papers.nextlat.probes @small_tinystories_* --steps=500 --eval_tokens=1e5 --out=out/tiny',
              'python -m papers.nextlat.manhattan @small_manhattan_* --out=out/small_manhattan']}

if __name__ == '__main__':
    main(__doc__, TABLES, read_rows('nextlat'))
