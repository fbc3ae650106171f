"""Mixtures of texts: shares, epochs, validation losses, and the scripts."""
import re
import shutil

import pytest
import torch
from conftest import assert_sentence, losses, run, succeeded, train_tiny, trained_run

from lm_architectures.data import open_data
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.data.text.writing import write_data
from lm_architectures.files import UserError
from lm_architectures.run import folders, records
from lm_architectures.score.validation import validation_loss

T = 32


@pytest.fixture(scope='module')
def mix(tiny_data, tmp_path_factory):
    """Return the name of a mixture of tiny_data and of a small text of capital letters."""
    folder = tmp_path_factory.mktemp('data') / 'capitals'
    write_data(folder, load_tokenizer('byte'), [('train', 'ABCDEFG' * 100), ('val', 'GFEDCBA' * 40)])
    return f'mix:{tiny_data}=7,{folder}=3'


def test_rows_have_the_shares_and_each_source_its_own_epochs(mix):
    m = open_data(mix)
    idx = torch.cat([m.train_batch(step, 25, T, seed=1)[0] for step in range(125)])  # 100,000 tokens
    is_small, small = (idx == 65).any(1), m.datas[1]
    assert is_small.float().mean() == pytest.approx(0.3, abs=0.02) and small.n_rows('train', T) < 25
    assert is_small[:3000].view(-1, 100).any(1).all()  # in a random order
    whole_blocks, want = idx[:3000][is_small[:3000]], small.train_batch(0, 900, T, seed=1)[0]
    assert sorted(whole_blocks.tolist()) == sorted(want.tolist())  # many epochs
    parts = [open_data(mix).train_batch(30, 100, T, 1, part)[0] for part in (slice(0, 37), slice(37, 100))]
    assert torch.equal(torch.cat(parts), idx[3000:3100])  # whatever the batches and processes
    assert not torch.equal(m.train_batch(0, 25, T, seed=2)[0], idx[:25])
    assert m.val_batch(range(2000), T)[0].shape == (2000, T)  # the small text repeats
    assert open_data(m.folder).sha256 == m.sha256  # `save` keeps this name


@pytest.mark.slow
def test_the_scripts_run_on_a_mixture_and_log_the_loss_of_each_source(mix, tmp_path):
    out = trained_run(mix, tmp_path / 'run')
    want = losses(out)
    shutil.rmtree(out / 'ckpt/step_00000020')
    assert 'val_tiny' in succeeded(run('train.py', f'--out_dir={out}', '--resume')).stdout and losses(out) == want
    (model, _), m, last = folders.load_run(out), open_data(mix), records.read_log(out)[-1]
    tiny, capitals = (validation_loss(model, data, T, 640, 42, 8, 'cpu')[0]['nll'] for data in m.datas)
    assert (last['val_tiny'], last['val_capitals']) == (tiny, capitals) and tiny != capitals
    assert last['val'] == pytest.approx(0.7 * tiny + 0.3 * capitals)
    judged = succeeded(run('eval.py', out, '--val', '--dtype=float32')).stdout
    assert all(f'val {name}' in judged for name in ('nats_per_token', 'tiny', 'capitals', 'bits_per_byte'))
    succeeded(run('sample.py', out, 'abc', '--max_new_tokens=8'))
    shown = succeeded(train_tiny(mix, tmp_path / 'new', '--dry_run')).stdout
    assert re.search('data tiny: .* epochs\ndata capitals: 701 training tokens, 1.10 epochs', shown)
    assert_sentence(train_tiny(mix, tmp_path / 'new', '--block_size=300'), 'capitals has 281 val tokens, too few')


def test_wrong_mixtures_give_a_sentence(tiny_data):
    for name, sentence in (('a', "the weight of '' is 'a' in data"), (f'{tiny_data}=1,a5=1', 'has tokenizer a5'),
                           *((f'a=1,b={x}', 'each with a weight of at least 0.1%') for x in (-2, 0, 1e-5)),
                           ('a=1,a=2', 'different sources'), ('a5:length=3=1', 'a mixture needs texts'),
                           (f'mix:{tiny_data}=1=1', 'a mixture needs texts')):
        with pytest.raises(UserError, match=re.escape(sentence)):
            open_data(f'mix:{name}')
