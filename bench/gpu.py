"""All that needs a GPU, in order of need, within a time limit: python bench/gpu.py [--limit=540] [--out=FOLDER]

Each step gets the time that is left; a step that fails or runs out of time does not stop the ones after it. With --out,
the figures and the output are also copied there.
"""
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = {
    'kernels': ['-m', 'pytest', '-q', 'tests/test_triton_kernels.py', 'tests/test_scans.py', 'tests/test_int8.py', '-m',
                'not slow'],
    'tests': ['-m', 'pytest', '-q', 'tests', '-k', 'cuda'],
    'attention': ['-m', 'bench.attention'],
    'training': ['train.py', 'config/quickstart.py', '--max_tokens=500_000', '--out_dir=out/gpu_check', '--overwrite'],
    'drafting': ['train.py', 'config/quickstart_nextlat.py', '--max_tokens=500_000', '--out_dir=out/gpu_nextlat',
                 '--overwrite'],
    'speculative': ['eval.py', 'out/gpu_nextlat', '--speculative', '--n_prompts=16', '--prompt_tokens=64',
                    '--new_tokens=128'],
    'sampling': ['sample.py', 'out/gpu_check', 'Return the', 'If', '--max_new_tokens=100'],
    'gpn': ['-m', 'bench.gpn'],
    'scales': ['-m', 'bench.train_step', 'scales'],
    'objectives': ['-m', 'bench.train_step', 'objectives'],
    'train_step': ['-m', 'bench.train_step'],
    'generate': ['-m', 'bench.generate'],
    'inference': ['-m', 'bench.inference', '--scales=xs,s'],  # all five take longer than the limit
    'context_ready': ['-m', 'bench.context_ready'],
}


def main(argv=None):
    import torch
    if not torch.cuda.is_available():
        sys.exit('gpu.py: PyTorch sees no GPU here; without one, run the benchmarks one by one: '
                 'python -m bench.train_step')
    options = dict(arg.removeprefix('--').split('=', 1) for arg in (sys.argv[1:] if argv is None else argv))
    end = time.time() + float(options.pop('limit', 540))
    out = options.pop('out', None)
    if options:
        sys.exit(f'gpu.py: unknown option {next(iter(options))!r}: expected --limit=SECONDS or --out=FOLDER')
    log, failed = [], []
    for name, args in STEPS.items():
        left = end - time.time()
        if left < 10:
            log.append(f'== {name}: not run, the time limit is reached')
        else:
            start = time.time()
            try:
                done = subprocess.run([sys.executable, *args], cwd=ROOT, timeout=left, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                text, status = done.stdout[-6000:], f'exit status {done.returncode}'
            except subprocess.TimeoutExpired as error:
                text, status = (error.stdout or b'').decode(errors='replace')[-6000:], 'out of time'
            log.append(f'== {name}: {status}, {time.time() - start:.0f} s\n{text}')
            if status != 'exit status 0':
                failed.append(name)
        print(log[-1], flush=True)
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / 'gpu.log').write_text('\n'.join(log))
        for path in (ROOT / 'bench/results').glob('*_gpu.*'):
            shutil.copy(path, out)
    sys.exit(f'failed: {", ".join(failed)}' if failed else 0)


if __name__ == '__main__':
    main()
