"""All that needs a GPU, in order of need, within a time limit.

    python bench/gpu.py [--limit=540] [--only=STEP,STEP] [--out=FOLDER]

Each step has a limit of its own, and of the time that is left. One that fails or runs out of time does not stop those
after it: --only runs it again, alone, with all of the time. With --out, the figures and the output are also copied
there.
"""
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ['-n', '8'] if importlib.util.find_spec('xdist') else []
TESTS = ['-m', 'pytest', '-q', *WORKERS]
STEPS = {  # seconds, and arguments of python
    'training': (90, ['train.py', 'config/quickstart.py', '--max_tokens=500_000', '--out_dir=out/gpu_check',
                      '--overwrite']),
    'sampling': (40, ['sample.py', 'out/gpu_check', 'Return the', 'If', '--max_new_tokens=100']),
    'kernels': (150, [*TESTS, 'tests/test_triton_kernels.py', 'tests/test_scans.py', '-m', 'not slow']),
    'attention': (120, ['-m', 'bench.attention']),
    'drafting': (90, ['train.py', 'config/quickstart_nextlat.py', '--max_tokens=500_000', '--out_dir=out/gpu_nextlat',
                      '--overwrite']),
    'speculative': (60, ['eval.py', 'out/gpu_nextlat', '--speculative', '--n_prompts=16', '--prompt_tokens=64',
                         '--new_tokens=128']),
    'gpn': (120, ['-m', 'bench.gpn']),
    'tests': (240, [*TESTS, 'tests', '-k', 'cuda and not compiled']),
    'scales': (240, ['-m', 'bench.train_step', 'scales']),
    'generate': (120, ['-m', 'bench.generate']),
    'objectives': (240, ['-m', 'bench.train_step', 'objectives']),
    'train_step': (120, ['-m', 'bench.train_step']),
    'inference': (240, ['-m', 'bench.inference', '--scales=xs,s']),  # all five take longer than the limit
    'context_ready': (120, ['-m', 'bench.context_ready']),
    'compiled': (480, [*TESTS, 'tests', '-k', 'compiled_cuda']),
}


def run_step(args: list[str], seconds: float) -> tuple[str, str]:
    """The end of what python with these arguments prints, and how it ended. Its own processes end with it."""
    process = subprocess.Popen([sys.executable, *args], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        text, _ = process.communicate(timeout=seconds)
        status = f'exit status {process.returncode}'
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        status = 'out of time'
    except BaseException:  # Ctrl-C does not reach a process of another session
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return text[-6000:], status


def main(argv=None):
    import torch
    if not torch.cuda.is_available():
        sys.exit('gpu.py: PyTorch sees no GPU here; without one, run the benchmarks one by one: '
                 'python -m bench.train_step')
    options = dict(arg.removeprefix('--').partition('=')[::2] for arg in (sys.argv[1:] if argv is None else argv))
    end = time.time() + float(options.pop('limit', 540))
    out, only = options.pop('out', None), options.pop('only', None)
    names = only.split(',') if only else list(STEPS)
    unknown = [*options, *(name for name in names if name not in STEPS)]
    if unknown:
        sys.exit(f'gpu.py: unknown {unknown[0]!r}: expected --limit=SECONDS, --out=FOLDER or --only= some of '
                 f'{", ".join(STEPS)}, with commas between')
    log, problems = [], {'failed': [], 'not run': []}
    for name in names:
        seconds, args = STEPS[name]
        left = end - time.time()
        if left < 10:
            log.append(f'== {name}: not run, the time limit is reached')
            problems['not run'].append(name)
        else:
            start = time.time()
            text, status = run_step(args, left if only else min(seconds, left))
            log.append(f'== {name}: {status}, {time.time() - start:.0f} s\n{text}')
            if status != 'exit status 0':
                problems['failed'].append(name)
        print(log[-1], flush=True)
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / 'gpu.log').write_text('\n'.join(log))
        for path in (ROOT / 'bench/results').glob('*_gpu.*'):
            shutil.copy(path, out)
    sys.exit('; '.join(f'{what}: {", ".join(names)}' for what, names in problems.items() if names) or 0)


if __name__ == '__main__':
    main()
