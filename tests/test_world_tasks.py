"""The tasks of world models: rows against solvers written here from the text alone, scores on hand-made outputs."""
import json
import operator
from fractions import Fraction
from functools import cache, reduce
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import run

from common import runs
from common.files import UserError
from data import a5, countdown, open_data
from data.tokenizers import load_tokenizer

SMALL = ['train.py', '--n_layer=1', '--n_head=2', '--n_embd=16', '--batch_size=8', '--warmup_tokens=0',
         '--eval_interval=4', '--threads=1', '--device=cpu', '--dtype=float32']


tokenizer_of = cache(load_tokenizer)


def words(d, ids):
    return tokenizer_of(d.tokenizer).decode(list(map(int, ids))).decode().split()


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


# ---- Countdown ----

@pytest.mark.parametrize('options', ['val_rows=500', 'val_rows=500,val_targets=seen,pauses=3'])
def test_countdown_rows_are_problems_and_their_solutions(options):
    d = open_data(f'countdown:{options}')
    idx, targets = (torch.cat(parts) for parts in zip(d.train_batch(0, 500, d.T, 1), d.val_batch(range(500), d.T)))
    seen, of_val = set(), set()
    for i, (x, y) in enumerate(zip(idx, targets)):
        row = words(d, [*x, y[-1]])
        numbers, target, pauses = row[:4], int(row[4]), row[5:5 + d.task.pauses]
        assert 10 <= target <= 100 and pauses == ['|'] * d.task.pauses
        assert words(d, y[y >= 0]) == row[-15:] and (y >= 0).sum() == 15  # the equations count, the prompt does not
        left = [Fraction(n) for n in numbers]
        assert all(1 <= n <= 99 for n in left)
        for a, operation, b, equals, result in np.reshape(row[-15:], (3, 5)):
            value = {'+': operator.add, '-': operator.sub, '*': operator.mul, '/': operator.truediv}[operation](
                Fraction(a), Fraction(b))
            assert equals == '=' and value == Fraction(result) and 1 <= value <= 10_000
            for number in (a, b):
                left.remove(Fraction(number))
            left.append(value)
        assert left == [target]
        (seen if i < 500 else of_val).add(target)
    assert len(seen) == 82 and (of_val <= seen if d.task.val_targets == 'seen' else of_val.isdisjoint(seen))
    assert len(of_val) == (82 if d.task.val_targets == 'seen' else 9)


def reachable(numbers):
    """All that can be made of whole numbers by + - * / with no result below 1, above 10,000 or broken."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i != j:
                rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
                results = [a + b, a * b, a - b, *([a // b] if a % b == 0 else [])]
                found |= set().union(*(reachable([*rest, c]) for c in results if 1 <= c <= 10_000))
    return found


def test_countdown_finds_a_solution_where_there_is_one():
    rng = np.random.default_rng(0)
    for numbers in rng.integers(1, 100, size=(5, 4)):
        can = reachable(numbers.tolist())
        assert [t for t in range(10, 101) if countdown.solve(numbers[None], t, 10_000)[1]] == [t for t in range(10, 101)
                                                                                      if t in can]


PROMPT = '14 83 88 91 23 | | | | | | | |'


@pytest.mark.parametrize('answer, marks', [
    ('83-14=69 91-88=3 69/3=23', (1, 1, 1, 1)),  # the paper's
    ('91-88=3 83-14=69 69/3=23', (1, 1, 1, 1)),
    ('83-14=69 91-88=3 69/3=22', (0, 1, 1, 0)),  # a wrong result
    ('83-14=69 91-88=3 69-3=66', (0, 1, 1, 1)),  # another target
    ('83-14=68 91-88=3 69/3=23', (0, 0, 1, 1)),
    ('14-83=69 91-88=3 69/3=23', (0, 0, 1, 1)),  # below 0
    ('83-14=69 83-14=69 69/3=23', (0, 1, 1, 1)),  # a number taken twice
    ('83-14=69 91-88=3 46/2=23', (0, 1, 1, 1)),  # numbers that are not there
    ('83-14=69 69*1=69 69/3=23', (0, 1, 1, 1)),
    ('83-14=69 91-88=3 23+0=23', None),
    ('83-14=69 91-88=3 70/3=23', (0, 1, 1, 0)),  # leaves 1 over
    ('83-14=69 91 88 - =3 69/3=23', (0, 1, 0, 1)),
    ('83-14=69 91-88=3 69/3|23', (0, 1, 1, 0)),
    ('83|14=69 91-88=3 69/3=23', (0, 0, 1, 1)),
    ('83=14=69 91-88=3 69/3=23', (0, 0, 1, 1))])
def test_countdown_marks_a_solution_and_each_equation(answer, marks):
    tokenizer, task = tokenizer_of('countdown'), open_data('countdown').task
    if marks is None:  # 0 is no token
        with pytest.raises(UserError, match="'0' is no symbol of countdown"):
            tokenizer.encode(answer)
    else:
        assert task.marks(tokenizer.encode(PROMPT), tokenizer.encode(answer)) == marks


def test_an_answer_of_the_end_of_text_alone_is_wrong():
    d = open_data('countdown')
    assert d.task.marks(tokenizer_of('countdown').encode(PROMPT), [d.eos_id] * 15) == (0, 0, 0, 0)


def test_bars_may_stand_together_where_the_symbol_is_one_bar():
    tokenizer = tokenizer_of('countdown')
    assert tokenizer.encode('14,83,88,91,23||||||||83-14=69') == tokenizer.encode(PROMPT + ' 83 - 14 = 69')


class Continues:
    """Decodes held-out rows as they are, but for the tokens told: {row: [(position, token)]}. Has `logits` alone."""

    def __init__(self, d, changes):
        self.rows, self.n_ids = torch.from_numpy(d.rows('val', range(d.task.val_rows), 0)), d.n_ids
        self.prompts = self.rows[:, :d.task.prompt_tokens].clone()
        for i, changed in changes.items():
            for position, token in changed:
                self.rows[i, position] = token
        self.config = SimpleNamespace(vocab_size=d.n_ids, n_ids=d.n_ids, eos_id=None)

    def parameters(self):
        yield torch.zeros(1)

    def logits(self, idx):
        n = self.prompts.shape[1]
        which = [int((self.prompts == row[:n]).all(1).nonzero()[0]) for row in idx]
        return torch.nn.functional.one_hot(self.rows[which, 1:idx.shape[1] + 1], self.n_ids).float()


def test_the_countdown_score_is_that_of_greedy_decoding():
    d = open_data('countdown:val_rows=10')
    assert d.score(Continues(d, {}), 'cpu', 4) == {'solved': 1, 'valid_1': 1, 'valid_2': 1, 'valid_3': 1}
    changes = {0: [(-1, 9_999)], 3: [(-6, 9_999)], 7: [(-6, 9_999), (-1, 9_999)]}
    assert d.score(Continues(d, changes), 'cpu', 4) == pytest.approx(
        {'solved': 0.7, 'valid_1': 1, 'valid_2': 0.8, 'valid_3': 0.8})
