"""One flipped bit, at a random place of each file that is read again: detected, or harmless."""
import importlib.util
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from conftest import assert_sentence, run, train_tiny

from common import checkpoint, runs
from common.files import UserError
from data.shards import Data

pytestmark = pytest.mark.slow


def flip_a_bit(path: Path, rng: random.Random) -> str:
    """Flips one bit of a file. Returns which, for messages."""
    content = bytearray(path.read_bytes())
    byte, bit = rng.randrange(len(content)), rng.randrange(8)
    content[byte] ^= 1 << bit
    path.write_bytes(content)
    return f'bit {bit} of byte {byte} of {path}'


@pytest.fixture(scope='module')
def trained(tiny_data, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'trained'
    result = train_tiny(tiny_data, out)
    assert result.returncode == 0, result.stderr
    return out


def weights(out):
    return checkpoint.load_checkpoint(out, ('model.safetensors',))[1]['model.safetensors']


def test_a_flipped_bit_in_a_log_costs_its_line_alone_and_is_said(trained, tmp_path, capsys):
    rng, n = random.Random(0), 50
    out = tmp_path / 'run'
    shutil.copytree(trained, out)
    whole = (out / 'log.jsonl').read_bytes()
    records = runs.read_log(out)
    for _ in range(n):
        (out / 'log.jsonl').write_bytes(whole)
        place = flip_a_bit(out / 'log.jsonl', rng)
        found = runs.read_log(out)
        lost = [record for record in records if record not in found]
        assert len(found) + len(lost) == len(records) and len(lost) <= 1, place  # and none is other than it was
        assert ('left out' in capsys.readouterr().err) == bool(lost), place


def test_a_run_with_a_damaged_log_goes_on_and_keeps_what_it_says(trained, tmp_path):
    rng, n = random.Random(0), 4
    for i in range(n):
        out = shutil.copytree(trained, tmp_path / f'run{i}')
        shutil.rmtree(out / 'ckpt/step_00000020')
        place = flip_a_bit(out / 'log.jsonl', rng)
        before = (out / 'log.jsonl').read_bytes()
        result = run('train.py', f'--out_dir={out}', '--resume')
        assert result.returncode == 0, (place, result.stderr)
        assert (out / 'log.jsonl').read_bytes().startswith(before), place
        steps = [record['step'] for record in runs.read_log(out)]
        assert set(range(1, 21)) - set(steps) <= {*range(1, 16)} and len(steps) >= 19, place


def test_a_flipped_bit_in_config_json_changes_no_training_in_silence(trained, tmp_path):
    rng, n = random.Random(0), 50
    detected = 0
    for i in range(n):
        out = shutil.copytree(trained, tmp_path / f'run{i}')
        shutil.rmtree(out / 'ckpt/step_00000020')
        place = flip_a_bit(out / 'config.json', rng)
        result = run('train.py', f'--out_dir={out}', '--resume')
        if result.returncode:
            assert_sentence(result, str(out / 'config.json'))
            detected += 1
        else:
            assert all((a == b).all() for a, b in zip(weights(out).values(), weights(trained).values())), place
    assert detected > n // 2


def test_a_flipped_bit_in_meta_json_is_a_sentence_or_harmless(trained, tiny_data, tmp_path):
    rng, n = random.Random(0), 50
    data, detected = shutil.copytree(tiny_data, tmp_path / 'data'), 0
    whole = (data / 'meta.json').read_bytes()
    for _ in range(n):
        (data / 'meta.json').write_bytes(whole)
        place = flip_a_bit(data / 'meta.json', rng)
        result = run('eval.py', trained, '--val', f'--data={data}')
        if result.returncode:
            assert_sentence(result, str(data))
            detected += 1
        assert 'Traceback' not in result.stderr, place
    assert detected > n // 4


def test_a_flipped_bit_in_a_shard_is_found_by_verify(tiny_data, tmp_path):
    rng, n = random.Random(0), 100
    data = shutil.copytree(tiny_data, tmp_path / 'data')
    files = sorted(data.glob('*.bin'))
    assert len(files) >= 3
    for _ in range(n):
        path = rng.choice(files)
        whole = path.read_bytes()
        place = flip_a_bit(path, rng)
        with pytest.raises(UserError, match=re.escape(path.stem)):
            Data(data).verify()
            raise AssertionError(f'{place} was not found')
        path.write_bytes(whole)
    Data(data).verify()


# Ends prepare_fineweb.py when its first shards are written, as a kill would.
HALF = '''
import os, sys
import prepare_fineweb
save, calls = prepare_fineweb.save_progress, []
def save_progress(*args):
    save(*args)
    calls.append(1)
    if len(calls) == 2:
        os._exit(0)
prepare_fineweb.save_progress = save_progress
prepare_fineweb.main()
'''


@pytest.mark.skipif(not importlib.util.find_spec('datasets'), reason='needs datasets')
def test_a_flipped_bit_in_progress_json_changes_no_shard_in_silence(tmp_path):
    rng, n = random.Random(0), 50
    source, half = tmp_path / 'texts.jsonl', tmp_path / 'half'
    source.write_text(''.join(json.dumps({'text': f'text {i} of some words', 'id': str(i)}) + '\n' for i in range(600)))
    command = [source, '--tokenizer=byte', '--val_share=0.3', '--workers=1', '--shard_tokens=500']
    assert run('-c', HALF, *command, f'--out_dir={half}', timeout=60).returncode == 0
    assert run('prepare_fineweb.py', *command, f'--out_dir={tmp_path / "whole"}').returncode == 0
    want, detected = contents(tmp_path / 'whole'), 0
    for i in range(n):
        out = shutil.copytree(half, tmp_path / f'half{i}')
        place = flip_a_bit(out / 'progress.json', rng)
        result = run('prepare_fineweb.py', *command, f'--out_dir={out}')
        if result.returncode:
            assert_sentence(result, str(out))
            detected += 1
        else:
            assert contents(out) == want, place
    assert detected > n // 2


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != '.lock'}


def test_a_line_of_the_log_without_tokens_is_not_drawn(tmp_path):
    (tmp_path / 'log.jsonl').write_text('{"step": 1, "tokens": 8, "nll": 2.0}\n{"step": 2, "nll": 1.0}\n')
    runs.plot_loss(tmp_path)
    assert (tmp_path / 'loss.png').exists()
