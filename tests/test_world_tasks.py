"""The tasks of world models: rows against solvers written here from the text alone, scores on hand-made outputs."""
import csv
import json
from functools import reduce
from itertools import accumulate, combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import run, succeeded
from test_tasks import TRAIN, tokenizer_of, words

from analysis import manhattan
from common import runs
from common.files import UserError
from config.nextlat import manhattan_small
from data import a5, countdown, open_data


def eval_results(folder):
    return json.loads((folder / 'eval.jsonl').read_text().splitlines()[-1])['results']['val']


# ---- A5 ----

def rearranged(arrangement, element):
    """What an element, as digits, makes of an arrangement, as digits."""
    return ''.join(arrangement[int(digit) - 1] for digit in element)


def test_a5_is_the_60_even_permutations():
    symbols = open_data('a5').task.symbols
    assert len(set(symbols)) == 60 and all(sorted(element) == list('12345') for element in symbols)
    assert all(np.linalg.det(np.eye(5)[[int(digit) - 1 for digit in element]]) > 0 for element in symbols)
    assert rearranged('23145', '13425') == '21435'  # the docstring's


@pytest.mark.parametrize('length', [1, 12, 36])
def test_every_a5_target_is_the_product_so_far(length):
    d = open_data(f'a5:length={length}')
    assert d.T == length
    idx, targets = d.train_batch(5, 1000, length, seed=1)
    for x, y in zip(idx, targets):
        assert words(d, y) == [*accumulate(words(d, x), rearranged, initial='12345')][1:]
    assert len(idx[:, 0].unique()) == 60


def test_a5_scores_count_each_position_by_the_transformer_and_by_p_psi_after_the_first_element():
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
    for name, states in (('accuracy', model.logits(idx).argmax(-1)), ('rnn_accuracy', want)):
        right = [sum(int(a[t] == b[t]) for a, b in zip(states, targets)) / 5 for t in range(7)]
        assert [found[f'{name}_{t + 1}'] for t in range(7)] == pytest.approx(right)


@pytest.mark.slow
def test_a5_trains_on_short_words_and_is_judged_on_long_ones(tmp_path):
    out = tmp_path / 'a5'
    result = succeeded(run(*TRAIN, '--model=nextlat', '--lambda_kl=0', '--data=a5:length=4,val_rows=20',
                           '--block_size=4', '--documents=False', f'--max_tokens={8 * 8 * 4}', f'--out_dir={out}'))
    assert 'a sample' in result.stdout
    succeeded(run('eval.py', out, '--val', '--data=a5:length=9,val_rows=20', '--dtype=float32'))
    assert {'accuracy_9', 'rnn_accuracy_9'} <= eval_results(out).keys()
    drawn = succeeded(run('-m', 'analysis.a5', out, '--length=9', '--words=20', '--batch_size=7', '--device=cpu',
                          f'--out={tmp_path / "words"}'))
    assert 'p_psi as an RNN' in drawn.stdout
    found = {who + row['position']: float(row['mean']) for row in csv.DictReader(open(tmp_path / 'words.csv'))
             for who in ['rnn_accuracy_' if row['who'] else 'accuracy_']}
    assert found == {name: value for name, value in eval_results(out).items() if 'accuracy' in name}
    assert (tmp_path / 'words.png').exists()


# ---- Countdown ----

def ways(numbers, equations=()):
    """Each number that can be made of numbers, with the words of the equations, in the order of depth-first search."""
    if len(numbers) == 1:
        yield numbers[0], [word for equation in equations for word in map(str, equation)]
    for i, j in combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest, high, low = [n for k, n in enumerate(numbers) if k not in (i, j)], max(a, b), min(a, b)
        whole = high // low if high % low == 0 else 0
        for x, operation, y, result in ((a, '+', b, a + b), (a, '*', b, a * b), (high, '-', low, high - low),
                                        (high, '/', low, whole)):
            if 1 <= result <= 10_000:
                yield from ways([*rest, result], [*equations, (x, operation, y, '=', result)])


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
        assert all(1 <= int(n) <= 99 for n in numbers)
        assert row[-15:] == next(equations for n, equations in ways(list(map(int, numbers))) if n == target)
        (seen if i < 500 else of_val).add(target)
    assert len(seen) == 82 and (of_val <= seen if d.task.val_targets == 'seen' else of_val.isdisjoint(seen))
    assert len(of_val) == (82 if d.task.val_targets == 'seen' else 9)


def test_countdown_finds_a_solution_where_there_is_one():
    for numbers in np.random.default_rng(0).integers(1, 100, size=(5, 4)):
        found = {t for t in range(10, 101) if countdown.solve(numbers[None], t, 10_000)[1]}
        assert found == {n for n, _ in ways(numbers.tolist())} & {*range(10, 101)}


PROMPT = '14 83 88 91 23 | | | | | | | |'


@pytest.mark.parametrize('answer, marks', [
    ('83-14=69 91-88=3 69/3=23', (1, 1, 1, 1)),  # the paper's
    ('91-88=3 83-14=69 69/3=23', (1, 1, 1, 1)),
    ('83-14=69 91-88=3 69/3=22', (0, 1, 1, 0)),  # a wrong result
    ('83-14=69 91-88=3 69-3=66', (0, 1, 1, 1)),  # another target
    ('14-83=69 91-88=3 69/3=23', (0, 0, 1, 1)),  # below 0
    ('83-14=69 83-14=69 69/3=23', (0, 1, 1, 1)),  # a number taken twice
    ('83-14=69 91-88=3 46/2=23', (0, 1, 1, 1)),  # numbers that are not there
    ('83-14=69 91-88=3 70/3=23', (0, 1, 1, 0)),  # leaves 1 over
    ('83-14=69 91 88 - =3 69/3=23', (0, 1, 0, 1)),
    ('83-14=69 91-88=3 69/3|23', (0, 1, 1, 0)),
    ('| ' * 15, (0, 0, 0, 0)),
    ('83=14=69 91-88=3 69/3=23', (0, 0, 1, 1))])
def test_countdown_marks_a_solution_and_each_equation(answer, marks):
    tokenizer, task = tokenizer_of('countdown'), open_data('countdown').task
    assert task.marks(tokenizer.encode(PROMPT), tokenizer.encode(answer)) == marks


def test_the_countdown_score_is_that_of_greedy_decoding(monkeypatch):
    d = open_data('countdown:val_rows=10')
    rows = d.rows('val', range(10), 0).tolist()

    def decoded(model, prompts, n, temperature):
        assert (n, temperature) == (15, 0)
        return [next(row[-15:] for row in rows if row[:-15] == prompt) for prompt in prompts]
    monkeypatch.setattr(countdown, 'generate', decoded)
    assert d.score(None, 'cpu', 4) == {'solved': 1, 'valid_1': 1, 'valid_2': 1, 'valid_3': 1}
    rows[0][-1] = rows[3][-6] = rows[7][-6] = rows[7][-1] = 9_999
    assert d.score(None, 'cpu', 4) == pytest.approx({'solved': 0.7, 'valid_1': 1, 'valid_2': 0.8, 'valid_3': 0.8})


# ---- Manhattan ----

CITY = [[1, 'N', 2], [2, 'E', 3], [3, 'S', 1], [2, 'S', 1], [3, 'NE', 40]]  # a ring of 1 2 3, and a dead end


@pytest.fixture
def city(tmp_path):
    path = tmp_path / 'city.json'
    path.write_text(json.dumps({'edges': CITY}))
    return f'manhattan:edges={path},steps=12,window=60'


def grid_streets(n):
    """{(node, direction): neighbour} of the grid of one-way streets, from its description."""
    steps = {'E': (1, 0), 'W': (-1, 0), 'N': (0, 1), 'S': (0, -1)}
    found = {}
    for x in range(n):
        for y in range(n):
            for direction in ('EW'[y % 2], 'SN'[x % 2]):
                dx, dy = steps[direction]
                if 0 <= x + dx < n and 0 <= y + dy < n:
                    found[f'{x}_{y}', direction] = f'{x + dx}_{y + dy}'
    return found


def walks_of(d, row):
    """The walks of a row of ids, as lists of words. The last one is cut."""
    text = ' '.join([*d.task.symbols, '.'][i] for i in row)
    return [walk.split() for walk in text.split('.')]


def walked(start, turns, streets):
    """Where the turns lead from start; KeyError where there is no such street."""
    return reduce(lambda node, turn: streets[node, turn], turns, start)


@pytest.mark.parametrize('name', ['grid', 'city'])
def test_walks_follow_the_streets_to_their_destination(name, city):
    d = open_data('manhattan:grid=6,steps=20,window=128' if name == 'grid' else city)
    known = grid_streets(6) if name == 'grid' else {(str(a), turn): str(b) for a, turn, b in CITY}
    assert {(d.task.nodes[a], d.task.symbols[turn]): d.task.nodes[b] for a, exits in enumerate(d.task.exits)
            for turn, b in exits} == known
    lengths, used, pairs = set(), set(), set()
    for row in d.rows('train', range(1000), 0):
        *whole, cut = walks_of(d, row)
        for start, goal, *turns in whole:
            assert walked(start, turns, known) == goal != start and not d.task.is_held_out[
                d.task.nodes.index(start), d.task.nodes.index(goal)]
            lengths.add(len(turns))
            pairs.add((start, goal))
            used |= {(walked(start, turns[:k], known), turn) for k, turn in enumerate(turns)}
        if len(cut) > 2:
            walked(cut[0], cut[2:], known)
    assert lengths == set(range(1, 21 if name == 'grid' else 13)) and used == known.keys()
    assert len(pairs) > (500 if name == 'grid' else 4)


def test_turns_and_ends_count_and_starts_and_destinations_do_not(city):
    d = open_data(city)
    idx, targets = d.train_batch(0, 20, d.T, 1)
    for row, y in zip(torch.cat([idx, targets[:, -1:].clamp(min=0)], 1), targets):
        row, is_turn = row.tolist(), []
        for t in range(len(row)):
            walk_ends = [i for i in range(t) if row[i] == d.eos_id]
            is_turn.append(t - (walk_ends[-1] + 1 if walk_ends else 0) >= 2)
        assert (y >= 0).tolist()[:-1] == is_turn[1:-1]
        assert all(b in (-1, a) for a, b in zip(row[1:-1], y.tolist()))


class Guide:
    """Knows a city: leads along a shortest way, or to a goal in `lost` by the first turn of all, there or not."""

    def __init__(self, d, lost=()):
        self.task, self.lost, self.n_ids = d.task, lost, d.n_ids
        self.distance = d.task.distances_to(range(len(d.task.nodes)))
        self.config = SimpleNamespace(vocab_size=d.n_ids, n_ids=d.n_ids, eos_id=d.eos_id)

    def parameters(self):
        yield torch.zeros(1)

    def logits(self, idx):
        answers = torch.tensor([self.guided(row) for row in idx.tolist()])
        return torch.nn.functional.one_hot(answers, self.n_ids) * 99.0

    def guided(self, row):
        answers, walk = [], []
        for token in row:
            walk = [*walk, token] if token != self.task.end else []
            answers.append(self.next(walk) if len(walk) >= 2 else self.task.end)
        return answers

    def next(self, walk):
        task = self.task
        node, goal = walk[0] - task.first_node, walk[1] - task.first_node
        if goal in self.lost:
            return 0
        for turn in walk[2:]:
            node = task.neighbour[node, turn]
        return task.end if node == goal else min(task.exits[node], key=lambda exit: self.distance[goal, exit[1]])[0]


def test_the_manhattan_scores_are_1_for_one_who_knows_the_way_and_fall_with_each_wrong_one():
    d = open_data('manhattan:grid=6,steps=30,window=64,val_rows=8,max_distance=9')
    pairs = d.task.held_out_pairs
    assert len(pairs) == len(set(pairs)) > 5 and all(d.task.is_held_out[pair] for pair in pairs)
    guide = Guide(d)
    assert {guide.distance[goal, start] for start, goal in pairs} <= set(range(1, 10))
    assert d.score(guide, 'cpu', 4) == {'next_token': 1, 'valid': 1}
    lost = {goal for _, goal in pairs[:2]}
    found = d.score(Guide(d, lost), 'cpu', 4)
    n_lost = sum(goal in lost for _, goal in pairs)
    assert found['valid'] == pytest.approx(1 - n_lost / len(pairs)) and 0.8 < found['next_token'] < 1


def test_the_small_city_holds_out_hundreds_of_pairs_and_no_way_between_them_is_as_long_as_a_walk():
    task = open_data(manhattan_small.data).task
    assert len(task.held_out_pairs) > 400 and task.max_distance <= task.steps / 2


@pytest.mark.parametrize('way, is_valid', [('N E NE .', True), ('N E S N E NE .', True), ('N E NE', False),
                                           ('N E .', False), ('. N E NE .', False), ('N N E NE .', False),
                                           ('E NE .', False), ('N E 40 .', False), ('N E NE S .', False)])
def test_a_way_is_valid_if_it_keeps_to_the_streets_and_ends_at_its_goal(way, is_valid, city):
    task = open_data(city).task
    ids = [[*task.symbols, '.'].index(word) for word in way.split()]
    assert task.is_valid(task.nodes.index('1'), task.nodes.index('40'), ids) is is_valid


def test_a_next_token_is_legal_where_the_street_is_and_the_end_at_the_destination(city):
    task = open_data(city).task
    words = [*task.symbols, '.']
    rows = '1 40 N E NE . 3 2', '3 2 S N . 1 3 N'
    idx = torch.tensor([[words.index(word) for word in row.split()] for row in rows])
    legal = '? N E|S S|NE . ? ? S|NE', '? S|NE N .|E|S ? ? N E|S'  # what may come after each token; ?: no turn or end
    for i, row in enumerate(legal):
        for t, allowed in enumerate(row.split()):
            if allowed != '?':
                found = [word for k, word in enumerate(words)
                         if task.legal(idx, torch.full_like(idx, k))[i, t]]
                assert set(found) == set(allowed.split('|')), (i, t)


@pytest.mark.parametrize('text, sentence', [
    *((text, 'city.json is no city') for text in (
        None, '', '[]', '{"edges": []}', '{"edges": [["a b", "N", 2]]}', '{"edges": [[1, "N", 2], [1, "N", 3]]}',
        '{"edges": [["N", "N", 2]]}')),
    ('{"edges": [[1, "N", 1]]}', 'city.json has no walk between two places')])
def test_a_file_that_is_no_city_is_a_sentence(text, sentence, tmp_path):
    path = tmp_path / 'city.json'
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        open_data(f'manhattan:edges={path}')


# ---- analysis.manhattan ----

@pytest.fixture(scope='module')
def grid():
    d = open_data('manhattan:grid=6,steps=30,window=64,val_rows=8')
    return d.task, Guide(d)


def test_who_knows_the_way_finds_it_after_detours_too(grid):
    task, guide = grid
    pairs = task.held_out_pairs
    straight, around = (manhattan.ways_with_detours(guide, task, pairs, share, np.random.default_rng(0))
                        for share in (0, 0.75))
    assert [len(way) for way in straight] == [guide.distance[goal, start] + 1 for start, goal in pairs]
    assert all(task.is_valid(*pair, way) for ways in (straight, around) for pair, way in zip(pairs, ways))
    assert sum(len(way) for way in around) > 1.3 * sum(len(way) for way in straight)


def test_compression_is_1_where_only_place_and_goal_decide(grid, monkeypatch):
    task, guide = grid
    prefixes = manhattan.pairs_of_walks(task, 20, np.random.default_rng(0))
    measured = lambda: [share(guide, task, prefixes, 64) for share in (manhattan.same_way, manhattan.compression)]
    assert measured() == [1, 1]
    monkeypatch.setattr(guide, 'next', lambda walk: task.end if walk[2:3] == [0] else Guide.next(guide, walk))
    same_way, compression = measured()
    assert same_way == compression and 0.2 < compression < 0.9  # the first turn of the walk decides too
    start, goal, *turns = manhattan.prefixes_to(task, 7, 9, 12, np.random.default_rng(0))
    assert goal == task.first_node + 9 and len(turns) == 12
    assert reduce(lambda node, turn: task.neighbour[node, turn], turns, start - task.first_node) == 7


def test_of_a_pair_of_walks_every_continuation_must_be_possible(monkeypatch):
    """Here one of 30 is not, of the second of four pairs."""
    prefixes = [[i] for i in range(8)]

    def possible(model, second, tokens, end):
        assert tokens.flatten().tolist() == [i - 1 for i, in second]
        return torch.arange(len(second)) != second.index([3])
    monkeypatch.setattr(manhattan, 'continuations', lambda model, first, *_: torch.tensor(first))
    monkeypatch.setattr(manhattan, 'possible', possible)
    assert manhattan.compression(None, SimpleNamespace(steps=4, end=9), prefixes, batch_size=240) == 3 / 4


def test_continuations_are_sampled_and_judged_token_by_token():
    torch.manual_seed(0)
    model = runs.model_file('standard').Model(runs.make_config('standard', dict(
        n_layer=2, n_head=2, n_embd=32, init_std=0.4, vocab_size=64, n_ids=40, eos_id=39))).eval()
    first, second = [[5, 6, 7], [1, 2, 3, 4]], [[7, 6, 5], [4, 3, 2, 1]]
    tokens = manhattan.continuations(model, first * 200, 6, 39, torch.Generator().manual_seed(0))
    possible = manhattan.possible(model, second * 200, tokens, 39)
    has_ended = (tokens == 39).cumsum(1) > (tokens == 39)
    for other in range(0, 39, 3):  # what stands after the end does not count
        assert manhattan.possible(model, first * 200, tokens.where(~has_ended, other), 39).all()
    n_ended = 0
    for row, (own, is_possible) in enumerate(zip(tokens.tolist(), possible)):
        own = own[:own.index(39) + 1] if 39 in own else own
        n_ended += len(own) < 6
        for prefix, expected in ((first[row % 2], True), (second[row % 2], bool(is_possible))):
            probs = model.logits(torch.tensor([prefix + own])).softmax(-1)[0, len(prefix) - 1:-1]
            assert all(p[token] > 0.01 for p, token in zip(probs, own)) == expected
    assert 10 < n_ended < 390 and 10 < possible.sum() < 390
    probs = model.logits(torch.tensor([first[0]]))[0, -1].softmax(-1)
    probs = probs.where(probs > 0.01, 0)
    drawn = torch.bincount(tokens[::2, 0], minlength=64) / 200
    assert (drawn - probs / probs.sum()).abs().max() < 0.12


def test_effective_rank_is_that_of_the_entropy_of_the_sizes_of_directions():
    directions = torch.linalg.qr(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))[0].T[:3]
    for sizes, want in ((torch.ones(3), 3), (torch.tensor([1, 2, 5.]), 8 / (2 ** 2 * 5 ** 5) ** (1 / 8))):
        assert manhattan.effective_rank(sizes[:, None] * directions) == pytest.approx(want, abs=1e-4)


def test_a_map_has_no_invented_street_but_those_that_walks_need(grid):
    task, _ = grid
    true = {(node, turn): after for node, exits in enumerate(task.exits) for turn, after in exits}
    positions = manhattan.layout(task)
    assert all(np.linalg.norm(positions[a] - positions[b]) == pytest.approx(1, abs=1e-3) for (a, _), b in true.items())
    near = [[b for b in range(36) if np.linalg.norm(positions[a] - positions[b]) <= 2] for a in range(36)]
    rng, walks = np.random.default_rng(0), []
    for _ in range(200):
        start, goal, *turns, _ = task._walk(rng)
        walks.append((start - task.first_node, goal - task.first_node, turns))
    used, n_failed = manhattan.rebuild(walks, true, near, 8)
    assert used.items() <= true.items() and len(used) > 50 and n_failed == 0
    east, north, *_ = (task.symbols.index(name) for name in 'ENSW')
    at = {name: task.nodes.index(name) for name in task.nodes}
    wrong = at['0_0'], at['2_1'], [east, north, east]  # 1_0 north is a street to 1_1, whose row leads west alone
    used, n_failed = manhattan.rebuild([*walks, wrong], true, near, 8)
    assert n_failed == 0 and used.items() - true.items() == {((at['1_1'], east), at['2_1'])}
    far = at['0_0'], at['5_5'], [east, north, east]
    used, n_failed = manhattan.rebuild([*walks, far], true, near, 8)
    assert n_failed == 1 and used.items() <= true.items()
    n_failed = [manhattan.rebuild([*walks, wrong], true, near, max_degree)[1] for max_degree in (2, 3)]
    assert n_failed == [1, 0]  # two streets leave 1_1 already


@pytest.mark.slow
def test_a_run_on_manhattan_is_judged_samples_a_way_and_its_map_is_drawn(tmp_path):
    out = tmp_path / 'city'
    result = succeeded(run(*TRAIN, '--data=manhattan:grid=4,steps=6,window=32,pairs=5,val_rows=5', '--block_size=32',
                           f'--max_tokens={4 * 8 * 32}', f'--out_dir={out}', '--sample_tokens=0'))
    assert 'next_token' in result.stdout
    succeeded(run('eval.py', out, '--val', '--data=manhattan:grid=4,pairs=4,steps=9,window=64,val_rows=2',
                  '--dtype=float32'))
    assert {'next_token', 'valid'} <= eval_results(out).keys()
    drawn = succeeded(run('-m', 'analysis.scores', out, f'--out={tmp_path / "figure"}'))
    assert 'next_token' in drawn.stdout and 'valid' in drawn.stdout
    sampled = succeeded(run('sample.py', out, '0_0 2_1', '--max_new_tokens=3', '--dtype=float32'))
    assert sampled.stdout.startswith('0_0 2_1')
    drawn = succeeded(run('-m', 'analysis.manhattan', out, f'--out={tmp_path / "map"}', '--n_walks=20',
                          '--n_prefixes=3'))
    assert '  rank ' in drawn.stdout and (tmp_path / 'map.png').exists()
    assert (tmp_path / 'map.csv').read_text().startswith('run,detours,')
    few, many = (manhattan.measure(str(out), manhattan.Settings(n_walks=200, n_prefixes=3, detours=share))[0]
                 for share in (0.1, 0.9))
    assert {**few, 'detours': None} == {**many, 'detours': None}  # the other walks are the same, whatever ways drew
