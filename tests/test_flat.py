"""A long run needs no more than a short one."""
import json

import pytest
from conftest import STEP_TOKENS, TINY, run

pytestmark = pytest.mark.long

# Runs train.py, which prints {step: [KiB of resident memory, open files, threads]} of every 1,000th step.
WATCHED = '''
import json, os, sys
from pathlib import Path
import train
train_step, seen = train.train_step, {}
def watched(model, ddp, optimizer, data, s, step, *others):
    if step and step % 1000 == 0 or step == 9999:
        status = dict(line.split(':') for line in Path('/proc/self/status').read_text().splitlines())
        seen[step] = int(status['VmRSS'].split()[0]), len(os.listdir('/proc/self/fd')), int(status['Threads'])
    return train_step(model, ddp, optimizer, data, s, step, *others)
train.train_step = watched
train.main()
print(json.dumps(seen))
'''


def test_memory_open_files_and_threads_stay_as_they_were_over_10_000_steps(tiny_data, tmp_path):
    often = ['--log_interval=10', '--eval_interval=100', '--save_interval=100']
    result = run('-c', WATCHED, *TINY, *often, f'--data={tiny_data}', f'--out_dir={tmp_path / "run"}',
                 f'--max_tokens={10_000 * STEP_TOKENS}', timeout=1800)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout.splitlines()[-1])
    print(seen)
    (memory, files, threads), (memory_later, files_later, threads_later) = seen['1000'], seen['9999']
    assert (files, threads) == (files_later, threads_later), seen
    assert memory_later < 1.01 * memory, seen
