"""The validation loss of a data folder: which rows it reads, and that windows do not matter."""
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import shard_ids

from lm_architectures.data import Data, open_data
from lm_architectures.score.scoring import perplexity
from lm_architectures.score.validation import validation_loss


@pytest.mark.parametrize('n_tokens, seed, n', [(320, 42, 10), (320, None, 10), (0, None, 1)])
def test_validation_reads_eval_tokens(tiny_data, n_tokens, seed, n):
    d, T, seen = Data(tiny_data), 32, []

    def model(idx, targets):
        seen.extend(idx.tolist())
        mean = idx.double().mean()
        return {'loss': 3 * mean, 'nll': mean, 'kl': 2 * mean}
    model.config = SimpleNamespace(eos_id=None)
    parts, n_counted = validation_loss(model, d, T, n_tokens, seed, 3, 'cpu')
    assert seen == d.val_batch(range(n), T, seed)[0].tolist() and n_counted == n * T
    mean = np.mean(seen)
    assert parts == pytest.approx({'loss': 3 * mean, 'nll': mean, 'kl': 2 * mean})


def test_every_row_of_a_task_is_evaluated_even_of_one_token():
    model = lambda idx, targets: {'nll': torch.zeros(())}
    model.config = SimpleNamespace(eos_id=None)
    assert validation_loss(model, open_data('a5:length=1,val_rows=7'), 1, None, 42, 3, 'cpu')[1] == 7


@pytest.mark.parametrize('eos_id', [None, 256])
@pytest.mark.parametrize('n_tokens', [None, 10 ** 5])
def test_validation_loss_of_the_whole_split_does_not_depend_on_block_size(tiny_data, eos_id, n_tokens):
    """A bigram model must have one loss, because its predictions do not depend on the window."""
    d, table = Data(tiny_data), torch.randn(257, 257).log_softmax(1)

    def model(idx, targets):
        is_counted = (targets >= 0) & (idx != (eos_id or -1))
        return {'nll': -table[idx, targets][is_counted].mean()}
    model.config = SimpleNamespace(eos_id=eos_id)
    whole = torch.from_numpy(shard_ids(tiny_data, 'val').astype(np.int64))
    pairs = [(a, b) for a, b in whole.unfold(0, 2, 1).tolist() if a != eos_id]
    want = -sum(table[a, b].item() for a, b in pairs) / len(pairs)
    for T, batch_size in ((1, 500), (7, 3), (32, 20), (1000, 2)):
        parts, n_counted = validation_loss(model, d, T, n_tokens, 42, batch_size, 'cpu')
        assert n_counted == len(pairs) and parts['nll'] == pytest.approx(want, rel=1e-5)


def test_perplexity_of_huge_losses_is_infinite_and_of_nan_is_nan():
    assert perplexity(0) == 1 and perplexity(1e4) == math.inf and math.isnan(perplexity(math.nan))
