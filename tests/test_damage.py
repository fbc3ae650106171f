"""One flipped bit in a checkpoint or a shard is detected. test_fuzz.py damages the other files."""
import shutil

import pytest
from conftest import bit_flips

from common import checkpoint
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


def test_verify_finds_a_flipped_bit_in_a_shard(tiny_data, tmp_path):
    data = shutil.copytree(tiny_data, tmp_path / 'data')
    shards = [*data.glob('*.bin')]
    for shard in shards:
        for place in bit_flips(shard, -(-100 // len(shards))):
            with pytest.raises(UserError, match=shard.name):
                Data(data).verify()
                raise AssertionError(f'{place} was not detected')
    Data(data).verify()
