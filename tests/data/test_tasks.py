"""Synthetic tasks: rows against independent solvers, reproducible batches, and exact scores."""
import contextlib
import json
import pickle
import re
from collections import Counter
from functools import reduce
from itertools import accumulate, combinations
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, assert_sentence, eval_lines, run, succeeded

from lm_architectures.data import generated, open_data, tasks
from lm_architectures.data.__main__ import main as print_row
from lm_architectures.data.generated import make_task
from lm_architectures.data.tasks import a5
from lm_architectures.data.tasks.manhattan import read_edges
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.files import MissingData, UserError
from lm_architectures.run import models, records

CHASE, STAR, GRID = ('pointer_chasing:hops=2,keys=3,values=10', 'path_star:degree=2,length=3,nodes=6',
                     'manhattan:grid=6,steps=20,length=128')
TRAIN = ['train.py', '--n_layer=2', '--n_head=2', '--n_embd=16', '--batch_size=8', '--warmup_tokens=0',
         '--learning_rate=1e-2', '--eval_interval=4', '--log_interval=1', '--save_interval=4', '--threads=1',
         '--device=cpu', '--dtype=float32']


def words_of(d, ids):
    """Return the symbols of ids; a dot for the end of a document."""
    return [[*d.task.symbols, '.'][i] for i in ids]


# ---- solvers: return {position: target} from the symbols of a row ----

def chase(tokens, task=None):
    """Follow the tables backwards from the key of each query."""
    left_of, found, at = {}, {}, 0
    while at < len(tokens) - 1:
        if tokens[at] == '||':
            at += 1
            continue
        if tokens[at] == 'Q':
            key = tokens[at + 1]
            while key in left_of:
                key = left_of[key]
            found[at + 1] = key
        else:
            value, equals, key = tokens[at:at + 3]
            assert equals == '=' and key not in left_of and value not in left_of.values()
            left_of[key] = value
        at += 3
    return found


def find_path(tokens, task):
    """Walk back from the goal to the start. Checks that the graph is a star."""
    edges, question = ' '.join(tokens[:tokens.index('=')]).split(' / ')
    edges, (start, goal) = [edge.split() for edge in edges.split(' | ')], question.split()
    before, path = {b: a for a, b in edges}, [goal]
    assert len(before) == len(edges) == task.degree * (task.length - 1) and goal not in before.values()
    assert Counter(before.values()) == {start: task.degree} | dict.fromkeys({*before.values()} - {start}, 1)
    while path[0] != start:
        path.insert(0, before[path[0]])
    return dict(enumerate(path, tokens.index('=')))


def permute(arrangement, element):
    """Apply a permutation to an arrangement, both written as digits."""
    return ''.join(arrangement[int(digit) - 1] for digit in element)


def multiply(tokens, task=None):
    return dict(enumerate(accumulate(tokens[:-1], permute)))


def ways(numbers, equations=()):
    """Yield reachable numbers and the symbols of their equations, in depth-first order."""
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


def count_down(tokens, task):
    *numbers, target = map(int, tokens[:5])
    assert tokens[5:-15] == ['|'] * task.pauses and max(numbers) < 100 and 10 <= target <= 100
    return dict(enumerate(next(words for n, words in ways(numbers) if n == target), len(tokens) - 16))


CITY = [[1, 'N', 2], [2, 'E', 3], [3, 'S', 1], [2, 'S', 1], [3, 'NE', 40]]  # a ring 1 2 3, and a dead end


def streets_of(task):
    """Return {(node, direction): neighbor} of the city, or of the grid of one-way streets."""
    if task.edges:
        return {(str(a), turn): str(b) for a, turn, b in CITY}
    steps, n = {'E': (1, 0), 'W': (-1, 0), 'N': (0, 1), 'S': (0, -1)}, task.grid
    return {(f'{x}_{y}', turn): f'{x + steps[turn][0]}_{y + steps[turn][1]}' for x in range(n) for y in range(n)
            for turn in ('EW'[y % 2], 'SN'[x % 2]) if {x + steps[turn][0], y + steps[turn][1]} <= {*range(n)}}


def walk(tokens, task):
    """Follow the streets. Turns and ends are targets; complete walks must reach their goal."""
    streets, found, at, start = streets_of(task), {}, None, 0
    for t, token in enumerate(tokens):
        if t == start:
            at = token
        elif t > start + 1:
            found[t - 1] = token
            if token == '.':
                assert at == tokens[start + 1] != tokens[start] and t - start - 2 in range(1, task.steps + 1)
                assert not task.is_held_out[task.nodes.index(tokens[start]), task.nodes.index(at)]
                start = t + 1
            else:
                at = streets[at, token]
    return found


SOLVERS = {'pointer_chasing': chase, 'path_star': find_path, 'a5': multiply, 'countdown': count_down, 'manhattan': walk}


@pytest.fixture
def city(tmp_path, monkeypatch):
    (tmp_path / 'city.json').write_text(json.dumps({'edges': CITY}))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize('name', [
    'pointer_chasing:hops=0,keys=3', 'pointer_chasing:hops=1,keys=1,values=1', CHASE, 'pointer_chasing:hops=10',
    'pointer_chasing:hops=20,keys=5,values=20', 'path_star:degree=2,length=5,nodes=20', 'path_star:degree=7,length=7',
    'path_star:degree=1,length=2,nodes=2', 'path_star:degree=3,length=2,nodes=4', 'a5:length=1', 'a5', 'a5:length=36',
    'countdown', 'countdown:val_targets=seen,pauses=3', GRID, 'manhattan:edges=city.json,steps=12,length=60'])
def test_counted_targets_equal_those_of_an_independent_solver(name, city):
    d = open_data(name)
    for idx, targets in (d.train_batch(3, 100, d.T, seed=1), d.val_batch(range(100), d.T)):
        assert idx.shape == targets.shape == (100, d.T)
        for x, y in zip(idx.tolist(), targets.tolist()):
            counted = {t: words_of(d, [i])[0] for t, i in enumerate(y) if i >= 0}
            found = SOLVERS[name.partition(':')[0]](words_of(d, [*x, y[-1]]), d.task)
            assert {t: word for t, word in found.items() if t in counted or t < d.T - 1} == counted


PAPER = '''
Input: v3 = A v0 = B v8 = C || Target: _ _ _ _ _ _ _ _ _ _ Input: Q A v3 Q B v0 Q C v8 || Target: _ v3 _ _ v0 _ _ v8 _ _
Input: A = D B = E C = F || Target: _ _ _ _ _ _ _ _ _ _ Input: Q D v3 Q E v0 Q F v8 || Target: _ v3 _ _ v0 _ _ v8 _ _
Input: D = G E = H F = I || Q G Target: _ _ _ _ _ _ _ _ _ _ _ v3'''  # appendix B


def test_the_papers_worked_example_is_reproduced_token_by_token():
    d = open_data(CHASE)
    row = torch.tensor(d.task.encode([3, 0, 8], [[0, 1, 2], [0, 1, 2]]))[None]
    parts = [part.split('Target:') for part in PAPER.split('Input:')[1:]]
    want, want_targets = (' '.join(column).split() for column in zip(*parts))
    assert words_of(d, row[0, :-1]) == want and len(want) == d.T
    targets = d.task.targets(row)[0]
    assert words_of(d, targets.where(targets >= 0, d.eos_id)) == [word.replace('_', '.') for word in want_targets]
    assert [open_data(f'pointer_chasing:hops={H}').T for H in (10, 20)] == [338, 658]


# ---- randomness: position alone must not give the answer ----

def test_rows_are_random_where_the_papers_draw_at_random():
    d = open_data('pointer_chasing')
    idx, targets = d.train_batch(0, 40, d.T, seed=1)
    keys = idx[:, 2::6 * d.task.keys + 2]
    assert (keys == keys[0]).all() and len(set(targets[:, -1].tolist())) > 5  # keys have a fixed order, answers do not
    d = open_data('path_star:degree=2,length=5,nodes=20')
    rows = [words_of(d, row) for row in d.rows('train', range(1000), 0)]
    on_path = [row[1] in row[row.index('='):] for row in rows]
    assert 0 < sum(on_path) < 1000  # the edges are shuffled
    d = open_data('a5')
    assert len(d.train_batch(0, 1000, 12, seed=1)[0][:, 0].unique()) == 60
    d = open_data(GRID)
    text = ' '.join(word for row in d.rows('train', range(1000), 0) for word in [*words_of(d, row), '|'])
    assert len({*re.findall(r'(\S+ \S+) [NESW]+ ', text)}) > 500  # (start, goal) pairs
    assert {len(walk.split()) - 2 for part in text.split('|') for walk in part.split('.')[:-1]} == {*range(1, 21)}


@pytest.mark.parametrize('kind', ['unseen', 'seen'])
def test_countdown_validation_targets_are_unseen_by_default(kind):
    d = open_data(f'countdown:val_targets={kind}')
    train, val = ({*d.rows(split, range(500), 0)[:, 4].tolist()} for split in ('train', 'val'))
    assert len(train) == 82 and (val == train if kind == 'seen' else val.isdisjoint(train) and len(val) == 9)


def test_a_task_in_a_folder_of_the_user_works_and_a_wrong_one_gives_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, '__path__', [*tasks.__path__, str(tmp_path)])  # as OWN_TASKS does
    own = re.search('```python\n(.*?)```', (ROOT / 'docs/tasks.md').read_text(), re.DOTALL)[1]
    for name, a, b, sentence in (('sort', '', '', ''), ('sort_b', "'largest',", '()', 'not in its symbol_options'),
                                 ('sort_c', 'def score', 'def scores', 'sort_c:largest=7 has no score')):
        (tmp_path / f'{name}.py').write_text(own.replace(a, b))
        with pytest.raises(UserError, match=sentence) if sentence else contextlib.nullcontext():
            open_data(f'{name}:largest=7')
    out = tmp_path / 'out'
    succeeded(run(*TRAIN, '--data=sort:n=2,largest=2', '--block_size=4', '--max_tokens=600', f'--out_dir={out}'))
    assert 'solved' in records.read_log(out)[-1]
    assert run('sample.py', out, '1 0->', '--max_new_tokens=1').stdout.startswith('1 0-> ')


# ---- rows ----

@pytest.mark.parametrize('name', ['', CHASE, STAR, 'a5', 'countdown', GRID])
def test_batches_depend_only_on_seed_and_step_and_examples_end_before_an_answer(name, tiny_data):
    d = open_data(name or tiny_data)
    T = d.T or 32
    idx, targets = d.train_batch(7, 8, T, seed=1)
    parts = [open_data(name or tiny_data).train_batch(7, 8, T, 1, slice(a, b)) for a, b in ((0, 3), (3, 8))]
    assert all(torch.equal(torch.cat(part), whole) for part, whole in zip(zip(*parts), (idx, targets)))
    assert not any(torch.equal(d.train_batch(step, 8, T, seed)[0], idx) for step, seed in ((7, 2), (8, 1)))
    if name:
        assert not {*map(tuple, d.train_batch(0, 50, T, 0)[0].tolist())} & {
            *map(tuple, d.val_batch(range(50), T)[0].tolist())} or name == STAR  # few graphs exist
        prompt, n = d.example(T, 100)
        start, answer = len(prompt) - 1, d.val_batch([0], T)[1][0].tolist()
        assert n >= 1 and min(answer[start:start + n]) >= 0 and (start + n == T or answer[start + n] < 0)
        with pytest.raises(UserError, match=f'block_size is {T + 1}, .* set block_size to {T}'):
            d.n_rows('val', T + 1)


def test_fresh_rows_never_repeat_and_fixed_rows_are_shuffled_each_epoch():
    d = open_data(CHASE)
    rows = torch.cat([d.train_batch(step, 50, d.T, seed)[0] for seed in (0, 1) for step in (0, 1)])
    assert len({*map(tuple, rows.tolist())}) == 200
    name = 'path_star:degree=2,length=4,nodes=12,train_rows=60'
    epochs = [[tuple(row) for row in open_data(name).train_batch(step, 60, 24, seed)[0].tolist()]
              for seed, step in ((0, 0), (0, 1), (1, 0))]
    assert all(len(set(rows)) == 60 and set(rows) == set(epochs[0]) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_symbols_round_trip_with_or_without_blanks():
    tokenizer = load_tokenizer('path_star:nodes=20')
    ids = [3, 15, 20, 20, 15, 4, 22, 3, 4, 21]
    assert tokenizer.encode('3,15||15,4/3,4=') == tokenizer.encode(' 3 15 | | 15 4 / 3 4 =') == ids
    assert tokenizer.decode([3, 15, 20, 24]).decode() == ' 3 15 |' and tokenizer.n_ids == tokenizer.eos_id + 1 == 25
    for name in (CHASE, 'path_star', 'countdown'):
        task, tokenizer = make_task(name), load_tokenizer(name)
        assert tokenizer.encode(tokenizer.decode(range(tokenizer.n_ids)).decode()) == list(range(len(task.symbols)))


def test_rows_stay_in_memory_only_if_all_of_them_fit():
    sizes = [open_data(f'a5:train_rows=10,val_rows={n}').row.cache_info().maxsize for n in (10, 10 ** 7)]
    assert sizes == [None, 0]


def test_the_checksum_covers_options_and_rows(monkeypatch):
    d = open_data(CHASE)
    assert d.sha256 == open_data(CHASE + ',val_rows=1000').sha256  # the default
    fewer = open_data(CHASE + ',val_rows=999')
    assert d.sha256 != fewer.sha256 and d.tokenizer == fewer.tokenizer
    before, encode = d.sha256, type(d.task).encode
    monkeypatch.setattr(type(d.task), 'encode', lambda self, base, maps: encode(self, base, maps[::-1]))
    assert d.sha256 != before


def test_a_row_is_printed_with_its_targets(capsys):
    print_row([CHASE])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    inputs, targets = (sum((line[1:] for line in lines if line[0] == title), []) for title in ('input', 'target'))
    assert {t: target for t, target in enumerate(targets) if target != '_'} == chase([*inputs, '?'])


def test_a_row_of_long_symbols_is_printed_one_by_one(tmp_path, capsys):
    places = 'x' * 100, 'y' * 100
    edges = [[a, turn, b] for turn, a, b in (('N', *places), ('S', *places[::-1]))]
    (tmp_path / 'long.json').write_text(json.dumps({'edges': edges}))
    print_row([f'manhattan:edges={tmp_path}/long.json,length=8'])
    assert capsys.readouterr().out.count('input') == 8


@pytest.mark.parametrize('name, sentence', [
    ('pointer_chasing:hopps=2', "unknown setting 'hopps' in data 'pointer_chasing:hopps=2': did you mean 'hops'?"),
    ('pointer_chasing:hops=two', "hops is 'two' in data 'pointer_chasing:hops=two': expected int"),
    ('a5:bogus=1', "unknown setting 'bogus' in data 'a5:bogus=1': expected length, train_rows, val_rows"),
    ('path_star:degree=5,length=5,nodes=20', 'nodes = 20: a graph of degree 5 and length 5 needs 21 nodes'),
    ('', 'no data at an empty name: expected a .txt, .jsonl, .csv or .parquet file'),
    ('path_stars', 'built-in data (a5, countdown, manhattan, path_star, pointer_chasing, python_docs)'),
    ('manhattan:edges=none.json', 'edges = none.json is not a city'),
    ('none.txt', 'expected a .txt, .jsonl, .csv or .parquet file'), ('docs', 'expected files of one format')])
def test_wrong_data_give_a_clear_error_and_a_dry_run_goes_on_without_data_to_come(name, sentence):
    is_to_come = name in ('path_stars', 'manhattan:edges=none.json')  # a command may build them
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        open_data(name)
    assert isinstance(error.value, MissingData) == is_to_come


@pytest.mark.parametrize('text', ['[]', '{"edges": []}', '{"edges": [["a b", "N", 2]]}',
                                  '{"edges": [[1, "N", 2], [1, "N", 3]]}', '{"edges": [["N", "N", 2]]}'])
def test_a_malformed_city_file_gives_a_clear_error(text, city, tmp_path):
    (tmp_path / 'city.json').write_text(text)
    with pytest.raises(UserError, match='city.json is not a city'):
        open_data('manhattan:edges=city.json')


def test_a_city_is_read_from_a_pickle_without_running_its_code(tmp_path):
    (tmp_path / 'city.pkl').write_bytes(pickle.dumps({(a, turn): b for a, turn, b in CITY}))
    assert read_edges(f'{tmp_path}/city.pkl') == [(str(a), turn, str(b)) for a, turn, b in CITY]
    for content, why in ((pickle.dumps(tmp_path), 'which is not plain data'), (b'', 'EOFError'),
                         (pickle.dumps(CITY), "'list' object has no attribute 'items'")):
        (tmp_path / 'city.pkl').write_bytes(content)
        with pytest.raises(UserError, match=f'city.pkl is not a city .*{why}'):
            read_edges(f'{tmp_path}/city.pkl')


# ---- scores ----

class Oracle:
    """Model that predicts the held-out rows, except where it should be wrong."""

    def __init__(self, d, wrong):
        rows = torch.from_numpy(d.rows('val', range(d.task.val_rows), 0))
        self.next = {tuple(row[:-1].tolist()): row[1:].where(~bad, (row[1:] + 1) % d.eos_id)
                     for row, bad in zip(rows, wrong)}
        self.n_ids = d.n_ids

    def logits(self, idx):
        return torch.nn.functional.one_hot(torch.stack([self.next[tuple(row.tolist())] for row in idx]),
                                           self.n_ids).float()


@pytest.mark.parametrize('name, perfect, errors, want', [
    (CHASE, {'accuracy_0': 1, 'accuracy_1': 1, 'accuracy_2': 1, 'levels_solved': 3},
     [(slice(5), 20 + 11), (slice(20), 51)],  # the first query of level 1, the last query
     {'accuracy_1': 1 - 5 / 60, 'accuracy_2': 0, 'levels_solved': 1}),
    (STAR, {'accuracy': 1}, [(slice(3), -1), (slice(2, 5), -3)], {'accuracy': 15 / 20})])
def test_scores_count_levels_and_whole_paths(name, perfect, errors, want):
    d = open_data(f'{name},val_rows=20')
    idx, targets = d.val_batch(range(20), d.T)
    wrong = targets < 0  # targets that are not counted
    assert d.score(Oracle(d, wrong), 'cpu', batch_size=7) == perfect
    for rows, place in errors:
        wrong[rows, place] = True
    assert d.score(Oracle(d, wrong), 'cpu', batch_size=20) == pytest.approx(perfect | want)


def test_a5_scores_each_position_for_the_transformer_and_for_p_psi():
    d = open_data('a5:length=7,val_rows=5')
    torch.manual_seed(0)
    model = models.model_file('nextlat').Model(models.make_config('nextlat', dict(
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


PROMPT = '14 83 88 91 23 | | | | | | | |'


@pytest.mark.parametrize('answer, marks', [
    ('83-14=69 91-88=3 69/3=23', (1, 1, 1, 1)),  # the example in the paper
    ('83-14=69 91-88=3 69/3=22', (0, 1, 1, 0)),  # a wrong result
    ('83-14=69 91-88=3 69-3=66', (0, 1, 1, 1)),  # not the target
    ('14-83=69 91-88=3 69/3=23', (0, 0, 1, 1)),  # a negative result
    ('83-14=69 83-14=69 69/3=23', (0, 1, 1, 1)),  # a number used twice
    ('83-14=69 91-88=3 46/2=23', (0, 1, 1, 1)),  # numbers that are not available
    ('83-14=69 91-88=3 70/3=23', (0, 1, 1, 0)),  # not divisible
    ('83-14=69 91-88=3 69/3|23', (0, 1, 1, 0)),
    ('83=14=69 91-88=3 69/3=23', (0, 0, 1, 1))])
def test_countdown_marks_a_solution_and_each_equation(answer, marks):
    tokenizer, task = load_tokenizer('countdown'), open_data('countdown').task
    assert task.marks(tokenizer.encode(PROMPT), tokenizer.encode(answer)) == marks


def test_the_countdown_score_uses_greedy_decoding(monkeypatch):
    d = open_data('countdown:val_rows=10')
    rows = d.rows('val', range(10), 0).tolist()

    def decoded(model, prompts, n, temperature, eos_id):
        assert (n, temperature, eos_id) == (15, 0, None)
        return [next(row[-15:] for row in rows if row[:-15] == prompt) for prompt in prompts]
    monkeypatch.setattr(generated, 'generate', decoded)
    assert d.score(None, 'cpu', 4) == {'solved': 1, 'valid_1': 1, 'valid_2': 1, 'valid_3': 1}
    rows[0][-1] = rows[3][-6] = rows[7][-6] = rows[7][-1] = 9_999
    assert d.score(None, 'cpu', 4) == pytest.approx({'solved': 0.7, 'valid_1': 1, 'valid_2': 0.8, 'valid_3': 0.8})


class Guide:
    """Model that follows shortest paths; to goals in `lost` it always predicts the first turn."""

    def __init__(self, d, lost=()):
        self.task, self.lost, self.n_ids = d.task, lost, d.n_ids
        self.distance = d.task.distances_to(range(len(d.task.nodes)))
        self.config = SimpleNamespace(vocab_size=d.n_ids, n_ids=d.n_ids, eos_id=d.eos_id)

    def parameters(self):
        yield torch.zeros(1)

    def logits(self, idx):
        answers = [[self.next(row[:t]) for t in range(1, len(row) + 1)] for row in idx.tolist()]
        return torch.nn.functional.one_hot(torch.tensor(answers), self.n_ids) * 99.0

    def next(self, ids):
        task = self.task
        walk = ids[len(ids) - [*ids[::-1], task.end].index(task.end):]  # since the last end
        if len(walk) < 2:
            return task.end
        node, goal = walk[0] - task.first_node, walk[1] - task.first_node
        if goal in self.lost:
            return 0
        node = reduce(lambda node, turn: task.neighbor[node, turn], walk[2:], node)
        return task.end if node == goal else min(task.exits[node], key=lambda exit: self.distance[goal, exit[1]])[0]


def test_manhattan_scores_are_1_for_a_perfect_guide_and_fall_with_each_failure():
    """Paths are at most as long as the walks in training (30 steps), here at most 9."""
    d = open_data('manhattan:grid=6,steps=30,length=64,val_rows=8,max_distance=9')
    pairs, guide = d.task.held_out_pairs, Guide(d)
    assert len(pairs) == len(set(pairs)) > 5 and all(d.task.is_held_out[pair] for pair in pairs)
    assert max(guide.distance[goal, start] for start, goal in pairs) == 9
    assert max(guide.distance[goal, start] for start, goal in make_task('manhattan:grid=6,steps=5').held_out_pairs) == 5
    with pytest.raises(UserError, match='no held-out pair of places up to'):
        assert make_task('manhattan:grid=2').held_out_pairs
    assert d.score(guide, 'cpu', 4) == {'next_token': 1, 'valid': 1}
    lost = {goal for _, goal in pairs[:2]}
    found = d.score(Guide(d, lost), 'cpu', 4)
    n_lost = sum(goal in lost for _, goal in pairs)
    assert found['valid'] == pytest.approx(1 - n_lost / len(pairs)) and 0.8 < found['next_token'] < 1


@pytest.mark.parametrize('way, is_valid', [('N E NE .', True), ('N E S N E NE .', True), ('N E NE', False),
                                           ('N E .', False), ('. N E NE .', False), ('N N E NE .', False),
                                           ('E NE .', False), ('N E 40 .', False), ('N E NE S .', False)])
def test_a_walk_is_valid_if_it_follows_streets_and_ends_at_its_goal(way, is_valid, city):
    task = open_data('manhattan:edges=city.json,steps=12,length=60').task
    ids = [[*task.symbols, '.'].index(word) for word in way.split()]
    assert task.is_valid(task.nodes.index('1'), task.nodes.index('40'), ids) is is_valid


# ---- with the scripts ----

@pytest.mark.slow
def test_scores_are_logged_and_eval_and_sample_support_tasks(tmp_path):
    out = tmp_path / 'chase'
    result = succeeded(run(*TRAIN, f'--data={CHASE},val_rows=50', '--block_size=52', f'--max_tokens={8 * 8 * 52}',
                           f'--out_dir={out}'))
    assert all(part in result.stdout for part in ('unlimited generated rows', 'levels_solved', 'Q G|'))
    log = {record['step']: record for record in records.read_log(out)}
    assert [step for step in log if 'accuracy_2' in log[step]] == [4, 8] and 0 <= log[8]['accuracy_0'] <= 1
    judged = succeeded(run('eval.py', out, '--val', '--dtype=float32'))
    assert f'val nats_per_token {log[8]["val"]:20,.4f}' in judged.stdout
    assert f'val accuracy_0     {log[8]["accuracy_0"]:20,.4f}' in judged.stdout and 'bits_per_byte' not in judged.stdout
    sampled = run('sample.py', out, 'v3 = A v0 = B v8 = C || Q A', '--max_new_tokens=1', '--dtype=float32')
    assert sampled.returncode == 0 and sampled.stdout.startswith('v3 = A v0 = B v8 = C || Q A '), sampled.stderr
    assert_sentence(run('sample.py', out, 'v3 = Z', '--max_new_tokens=1'),
                    "unknown symbol 'Z' in pointer_chasing:hops=2,keys=3,values=10")


@pytest.mark.slow
def test_a5_trains_on_short_words_and_is_evaluated_on_long_ones(tmp_path):
    out = tmp_path / 'a5'
    result = succeeded(run(*TRAIN, '--model=nextlat', '--lambda_kl=0', '--data=a5:length=4,val_rows=20',
                           '--block_size=4', '--mask_documents=False', f'--max_tokens={8 * 8 * 4}', f'--out_dir={out}'))
    assert 'a sample' in result.stdout
    succeeded(run('eval.py', out, '--val', '--data=a5:length=9,val_rows=20', '--dtype=float32'))
    assert {'accuracy_9', 'rnn_accuracy_9'} <= eval_lines(out)[-1]['results']['val'].keys()
