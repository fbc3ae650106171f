"""Run everything that needs a GPU, most important first: tests, speed, training, decoding.

    python -m bench.gpu [--out=FOLDER] [--only=STEP,STEP] [--limit=570]

Each step has a time limit, enough for a machine with an H100 and 16 cores. A step that fails, falls
back to slower code or times out does not stop later ones; benchmarks that time out leave their
first rows. Steps that do not fit into --limit seconds are left for a second call: the last line
says which failed, and the --only that runs the rest. The output goes to FOLDER/gpu.log (default
out/gpu) as it is printed, and all measurements to FOLDER/results.json. Takes too long for this:
`bench.train_step objectives`.
"""
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench import GPU, RESULTS
from common.files import ROOT, UserError, friendly_errors, write_json
from common.settings import load_settings

LIMIT = 570  # seconds per call
WORKERS = ['-n', '8'] if importlib.util.find_spec('xdist') else []
TESTS = ['-m', 'pytest', '-v', *WORKERS]
TRAINING = ['--max_tokens=500_000', '--overwrite']
STEPS = {  # name: (time limit in seconds, arguments of python). Compiling takes most of the time.
    'compiled': (100, [*TESTS, 'tests', '-k', 'compiled_cuda or compiled_loss']),
    'profile_s': (90, ['-m', 'bench.profile', 's']),
    'attention': (90, ['-m', 'bench.attention']),
    'profile_l': (150, ['-m', 'bench.profile', 'l']),
    'training': (75, ['train.py', 'config/quickstart.py', '--out_dir=out/gpu_check', *TRAINING]),
    'sampling': (15, ['sample.py', 'out/gpu_check', 'Return the', 'If', '--max_new_tokens=100']),
    'scans': (50, ['-m', 'bench.scans']),
    'kernels': (150, [*TESTS, 'tests/test_triton_kernels.py', 'tests/test_attn_kernels.py', 'tests/test_gpn_scan.py',
                      '-k', 'not cpu and not compile']),
    'inference': (70, ['-m', 'bench.inference', '--scales=xs,s', '--new=512']),  # all five scales take longer
    'generate': (40, ['-m', 'bench.generate']),
    'context_ready': (40, ['-m', 'bench.context_ready']),
    'drafting': (80, ['train.py', 'config/nextlat_small.py', '--out_dir=out/gpu_nextlat', *TRAINING]),
    'speculative': (40, ['-m', 'analysis.speculative', 'out/gpu_nextlat', '--n_prompts=16', '--prompt_tokens=64',
                          '--new_tokens=128']),
    'train_step': (50, ['-m', 'bench.train_step']),
    'tests': (90, [*TESTS, 'tests', '-k', 'cuda and not compiled']),
}
FELL_BACK = re.compile(r'run step by step|recomputes the text|hit config\.\w+_limit|falling back')


@dataclass
class Settings:
    out: str = 'out/gpu'  # folder for gpu.log and results.json
    only: tuple[Literal[tuple(STEPS)], ...] = tuple(STEPS)  # steps to run
    limit: float = LIMIT  # seconds for all of them


def run_step(args: list[str], seconds: float, log) -> tuple[str, str]:
    """Run python with these arguments. Returns (output, status).

    The output is written directly to the log file, so it survives if this script is killed. All
    processes that the step started are killed when it ends. On time-out they first get Ctrl-C, so
    that pytest prints its failures.
    """
    start = log.seek(0, os.SEEK_END)
    limited = ['timeout', '--signal=INT', '--kill-after=10', str(seconds)]
    process = subprocess.Popen([*limited, sys.executable, *args], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                               start_new_session=True, env={**os.environ, 'PYTHONUNBUFFERED': '1'})
    try:
        code = process.wait()
    finally:  # also on Ctrl-C, which does not reach processes in another session
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log.seek(start)
    text = log.read().decode(errors='replace')
    if code:
        return text, 'out of time' if code in (124, -signal.SIGKILL) else f'exit status {code}'
    fallback = FELL_BACK.search(text)
    return text, f'fell back: {fallback[0]!r}' if fallback else 'done'


def collect_results(out: Path, begin: float) -> None:
    """Write the benchmarks' results since `begin` to one file: {name: content of its JSON}."""
    paths = [path for path in sorted(RESULTS.glob('*_gpu.*json')) if path.stat().st_mtime >= begin]
    write_json(out / 'results.json', {path.name.partition('.')[0]: json.loads(path.read_text()) for path in paths})


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, _, _ = load_settings(Settings, argv)
        if not GPU:
            raise UserError('PyTorch finds no GPU. On a CPU, run benchmarks one by one, such as '
                            'python -m bench.train_step')
        begin = time.time()
        out = Path(s.out)
        statuses = {}
        out.mkdir(parents=True, exist_ok=True)
        with open(out / 'gpu.log', 'ab+', buffering=0) as log:
            for name in s.only:
                start, (seconds, args) = time.time(), STEPS[name]
                left = begin + s.limit - start
                if left < min(seconds, 30):
                    statuses[name] = 'not run'
                    continue
                log.write(f'==== {name}: python {" ".join(args)}\n'.encode())
                text, statuses[name] = run_step(args, min(seconds, left), log)
                line = f'==== {name}: {statuses[name]}, {time.time() - start:.0f} s\n'
                log.write(line.encode())
                print(text[-3000:], line, sep='\n', flush=True)
                collect_results(out, begin)
        left_out = [name for name in s.only if statuses[name] == 'not run']
        failed = [name for name in s.only if statuses[name] not in ('done', 'not run')]
        if left_out or failed:
            raise UserError(f'failed: {", ".join(failed) or "none"}; not run: --only={",".join(left_out)}')


if __name__ == '__main__':
    main()
