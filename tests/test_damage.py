"""One flipped bit in a file of a run: detected in checkpoints, no traceback elsewhere."""
import shutil

import pytest
from conftest import assert_sentence, bit_flips, run

from common import checkpoint, runs
from common.files import UserError
from data.shards import Data

pytestmark = pytest.mark.slow


@pytest.mark.parametrize('name', ['model.safetensors', 'optimizer.safetensors', 'state.json', 'SHA256SUMS'])
def test_a_flipped_bit_in_a_checkpoint_falls_back_to_the_previous_one(tiny_run, tmp_path, name):
    out = shutil.copytree(tiny_run, tmp_path / 'run')
    newest, before = map(checkpoint.step_of, checkpoint.checkpoints(out)[:2])
    for place in bit_flips(out / f'ckpt/step_{newest:08d}' / name, 25):
        assert checkpoint.load_checkpoint(out, moments=True)[0]['step'] == before, place
    assert checkpoint.load_checkpoint(out, moments=True)[0]['step'] == newest


@pytest.mark.parametrize('name', ['config.json', 'log.jsonl'])
def test_resuming_with_a_flipped_bit_works_or_gives_a_clear_error(tiny_run, tmp_path, name):
    for place in bit_flips(tiny_run / name, 50):
        out = shutil.copytree(tiny_run, tmp_path / 'run')
        shutil.rmtree(out / 'ckpt/step_00000020')
        before = (out / 'log.jsonl').read_bytes()
        result = run('train.py', f'--out_dir={out}', '--resume')
        if result.returncode:
            assert name == 'config.json', (place, result.stderr)
            assert_sentence(result)
        assert (out / 'log.jsonl').read_bytes().startswith(before), place
        assert len(runs.read_log(out)) >= 18, place
        shutil.rmtree(out)


def test_verify_finds_a_flipped_bit_in_a_shard(tiny_data, tmp_path):
    data = shutil.copytree(tiny_data, tmp_path / 'data')
    shards = [*data.glob('*.bin')]
    for shard in shards:
        for place in bit_flips(shard, -(-100 // len(shards))):
            with pytest.raises(UserError, match=shard.name):
                Data(data).verify()
                raise AssertionError(f'{place} was not detected')
    Data(data).verify()
