"""Run everything that needs a GPU, most important first: tests, speed, training, decoding.

    python -m bench.gpu [--out=FOLDER] [--only=STEP,STEP] [--limit=570]

Each step has a time limit; tests beyond it are not run. A step that fails, falls
back to slower code or times out does not stop later ones; benchmarks that time out leave their
first rows. Steps that do not fit into --limit seconds are left for a second call: the last line
says which failed, and the --only that runs the rest. The output goes to FOLDER/gpu.log (default
out/gpu) as it is printed, and all measurements to FOLDER/results.json. Takes too long for this:
`bench.train_step objectives`.
"""
import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 570  # seconds per call
WORKERS = ['-n', '8'] if importlib.util.find_spec('xdist') else []
TESTS = ['-m', 'pytest', '-v', *WORKERS]
TRAINING = ['--max_tokens=500_000', '--overwrite']
STEPS = {  # name: (time limit in seconds, arguments of python). Compiling takes most of the time.
    'compiled': (100, [*TESTS, 'tests', '-k', 'compiled_cuda or compiled_loss']),
    'profile_s': (110, ['-m', 'bench.profile', 's']),
    'attention': (90, ['-m', 'bench.attention']),
    'profile_l': (150, ['-m', 'bench.profile', 'l']),
    'training': (75, ['train.py', 'config/quickstart.py', '--out_dir=out/gpu_check', *TRAINING]),
    'sampling': (15, ['sample.py', 'out/gpu_check', 'Return the', 'If', '--max_new_tokens=100']),
    'scans': (50, ['-m', 'bench.scans']),
    'kernels': (130, [*TESTS, 'tests/test_triton_kernels.py', 'tests/test_attn_kernels.py', 'tests/test_gpn_scan.py',
                      '-k', 'not cpu and not compile']),
    'inference': (70, ['-m', 'papers.sps.inference', '--scales=xs,s', '--new=512']),  # all five scales take longer
    'generate': (70, ['-m', 'bench.generate']),
    'context_ready': (40, ['-m', 'papers.context_ready.generation']),
    'drafting': (80, ['train.py', 'config/nextlat_small.py', '--out_dir=out/gpu_nextlat', *TRAINING]),
    'speculative': (40, ['-m', 'papers.nextlat.speculation', 'out/gpu_nextlat', '--n_prompts=16', '--prompt_tokens=64',
                          '--new_tokens=128']),
    'train_step': (50, ['-m', 'bench.train_step']),
    'tests': (70, [*TESTS, 'tests', '-k', 'cuda and not compiled']),
}
FELL_BACK = re.compile(r'run step by step|recomputes the text|hit config\.\w+_limit|falling back')


def run_step(args: list[str], seconds: float, log) -> tuple[str, str]:
    """Run python with these arguments. Returns (output, status).

    The output is written directly to the log file, so it survives if this script is killed. All
    processes that the step started are killed when it ends.
    """
    start = log.seek(0, os.SEEK_END)
    process = subprocess.Popen([sys.executable, *args], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                               start_new_session=True, env={**os.environ, 'PYTHONUNBUFFERED': '1'})
    try:
        code = process.wait(seconds)
        status = f'exit status {code}' if code else 'done'
    except subprocess.TimeoutExpired:
        status = 'out of time'
        process.send_signal(signal.SIGINT)  # makes pytest print its failures
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    finally:  # also on Ctrl-C, which does not reach processes in another session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log.seek(start)
    text = log.read().decode(errors='replace')
    fallback = FELL_BACK.search(text)
    return text, f'fell back: {fallback[0]!r}' if fallback and status == 'done' else status


def collect_results(out: Path, begin: float) -> None:
    """Write the benchmarks' results since `begin` to one file: {name: content of its JSON}."""
    paths = [path for path in sorted((ROOT / 'bench/results').glob('*_gpu.*json')) if path.stat().st_mtime >= begin]
    found = {path.name.partition('.')[0]: json.loads(path.read_text()) for path in paths}
    (out / 'results.json').write_text(json.dumps(found, indent=1) + '\n')


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', type=lambda text: text.split(','), default=list(STEPS))
    parser.add_argument('--limit', type=float, default=LIMIT)
    parser.add_argument('--out', type=Path, default=Path('out/gpu'))
    s = parser.parse_args(argv)
    if unknown := {*s.only} - {*STEPS}:
        parser.error(f'unknown step {min(unknown)!r}: expected some of {", ".join(STEPS)}, separated by commas')
    import torch
    if not torch.cuda.is_available():
        sys.exit('bench.gpu: PyTorch finds no GPU. On a CPU, run benchmarks one by one, such as '
                 'python -m bench.train_step')
    begin, end, failed, not_run = time.time(), time.monotonic() + s.limit, [], []
    s.out.mkdir(parents=True, exist_ok=True)
    with open(s.out / 'gpu.log', 'ab+', buffering=0) as log:
        for name in s.only:
            start, (seconds, args) = time.monotonic(), STEPS[name]
            if end - start < min(seconds, 30):
                not_run.append(name)
                continue
            log.write(f'==== {name}: python {" ".join(args)}\n'.encode())
            text, status = run_step(args, min(seconds, end - start), log)
            line = f'==== {name}: {status}, {time.monotonic() - start:.0f} s\n'
            log.write(line.encode())
            print(text[-3000:], line, sep='\n', flush=True)
            if status != 'done':
                failed.append(name)
            collect_results(s.out, begin)
    problems = [f'failed: {", ".join(failed)}'] * bool(failed)
    problems += [f'not run: --only={",".join(not_run)}'] * bool(not_run)
    sys.exit('; '.join(problems) or 0)


if __name__ == '__main__':
    main()
