"""The tasks of world models: rows against solvers written here from the text alone, scores on hand-made outputs."""
import json
from functools import reduce

import numpy as np
import pytest
import torch
from conftest import run

from common import runs
from data import a5, open_data
from data.tokenizers import load_tokenizer

SMALL = ['train.py', '--n_layer=1', '--n_head=2', '--n_embd=16', '--batch_size=8', '--warmup_tokens=0',
         '--eval_interval=4', '--threads=1', '--device=cpu', '--dtype=float32']


def words(d, ids):
    return load_tokenizer(d.tokenizer).decode(list(map(int, ids))).decode().split()


def eval_results(folder):
    return json.loads((folder / 'eval.jsonl').read_text().splitlines()[-1])['results']['val']


# ---- A5 ----

def matrix(element):
    """The permutation matrix of an element's digits."""
    return np.eye(5)[[int(digit) - 1 for digit in element]]


def rearranged(arrangement, element):
    """What an element, as digits, makes of an arrangement, as digits."""
    return ''.join(arrangement[int(digit) - 1] for digit in element)


def test_a5_is_the_60_even_permutations_and_its_table_their_composition():
    symbols = open_data('a5').task.symbols
    assert len(set(symbols)) == 60 and all(sorted(element) == list('12345') for element in symbols)
    assert all(np.linalg.det(matrix(element)) > 0 for element in symbols)
    for x, row in zip(symbols, a5.PRODUCT):
        assert [symbols[i] for i in row] == [rearranged(x, y) for y in symbols]
    assert symbols[a5.PRODUCT[symbols.index('23145')][symbols.index('13425')]] == '21435'  # the docstring's


@pytest.mark.parametrize('length', [1, 12, 36])
def test_every_a5_target_is_the_product_so_far(length):
    d = open_data(f'a5:length={length}')
    assert d.T == length
    idx, targets = d.train_batch(5, 1000 // length, length, seed=1)
    for x, y in zip(idx, targets):
        letters = words(d, x)
        assert words(d, y) == [reduce(rearranged, letters[:t + 1], '12345') for t in range(length)]
    assert len(set(idx[:, 0].tolist())) > 20 or length > 12


class Fixed:
    """A model that answers every row with the same ids (T,)."""

    def __init__(self, answers, n_ids):
        self.answers, self.n_ids = answers, n_ids

    def logits(self, idx):
        return torch.nn.functional.one_hot(self.answers.expand(len(idx), -1), self.n_ids).float()


def test_a5_accuracy_counts_each_position():
    d = open_data('a5:length=3,val_rows=4')
    idx = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 5, 6], [2, 5, 7]])
    targets = d.task.targets(torch.cat([idx, idx[:, :1]], 1))
    found = d.task.score(Fixed(targets[0], d.n_ids), idx, targets, 'cpu', batch_size=3)
    assert found == {'accuracy_1': 3 / 4, 'accuracy_2': 2 / 4, 'accuracy_3': 1 / 4}


def test_a5_recurrent_states_are_those_of_p_psi_after_the_first_element():
    d = open_data('a5:length=7,val_rows=5')
    torch.manual_seed(0)
    model = runs.model_file('nextlat').Model(runs.make_config('nextlat', dict(
        n_layer=2, n_head=2, n_embd=32, init_std=0.3, vocab_size=64, n_ids=d.n_ids, eos_id=None))).eval()
    idx, targets = d.val_batch(range(5), 7)
    with torch.no_grad():
        states = [model.final_hidden(idx[:, :1])[:, 0]]
        for t in range(1, 7):
            states.append(model.dynamics(states[-1], model.embed(idx[:, t])))
        want = model.head(torch.stack(states, 1))[..., :d.n_ids].argmax(-1)
    assert torch.equal(a5.recurrent_states(model, idx), want) and len(want.unique()) > 5
    found = d.score(model, 'cpu', batch_size=2)
    assert [found[f'rnn_accuracy_{t}'] for t in range(1, 8)] == (want == targets).double().mean(0).tolist()


@pytest.mark.slow
def test_a5_trains_on_short_words_and_is_judged_on_long_ones(tmp_path):
    out = tmp_path / 'a5'
    result = run(*SMALL, '--model=nextlat', '--lambda_kl=0', '--data=a5:length=4,val_rows=20', '--block_size=4',
                 '--documents=False', f'--max_tokens={8 * 8 * 4}', f'--out_dir={out}')
    assert result.returncode == 0 and 'a sample' in result.stdout, result.stderr
    judged = run('eval.py', out, '--val', '--data=a5:length=9,val_rows=20', '--dtype=float32')
    assert judged.returncode == 0, judged.stderr
    assert {'accuracy_9', 'rnn_accuracy_9'} <= eval_results(out).keys()
    drawn = run('-m', 'analysis.scores', out, '--scores=rnn_accuracy', f'--out={tmp_path / "figure"}')
    assert drawn.returncode == 0 and 'rnn_accuracy_4' in drawn.stdout, drawn.stderr
