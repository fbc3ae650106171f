"""Synthetic tasks: rows that an independent solver can follow, the same however they are read, and scores that count
exactly."""
import re
from collections import Counter
from functools import cache

import pytest
import torch
from conftest import assert_sentence, run, succeeded

from common import runs
from common.files import UserError
from data import open_data
from data.__main__ import main as print_row
from data.tasks import make_task
from data.tokenizers import load_tokenizer

CHASE, STAR = 'pointer_chasing:hops=2,keys=3,values=10', 'path_star:degree=2,length=3,nodes=6'
TRAIN = ['train.py', '--n_layer=2', '--n_head=2', '--n_embd=16', '--batch_size=8', '--warmup_tokens=0',
         '--learning_rate=1e-2', '--eval_interval=4', '--log_interval=1', '--save_interval=4', '--threads=1',
         '--device=cpu', '--dtype=float32']
tokenizer_of = cache(load_tokenizer)


def words(d, ids):
    return tokenizer_of(d.tokenizer).decode(list(map(int, ids))).decode().split()


def labelled(d, idx, targets):
    """[(input tokens of a row, [(position, target token) that counts])]."""
    return [(words(d, x), [(t, words(d, [y[t]])[0]) for t in range(len(y)) if y[t] >= 0]) for x, y in zip(idx, targets)]


# ---- pointer chasing ----

PAPER = '''
Input: v3 = A v0 = B v8 = C || Target: _ _ _ _ _ _ _ _ _ _ Input: Q A v3 Q B v0 Q C v8 || Target: _ v3 _ _ v0 _ _ v8 _ _
Input: A = D B = E C = F || Target: _ _ _ _ _ _ _ _ _ _ Input: Q D v3 Q E v0 Q F v8 || Target: _ v3 _ _ v0 _ _ v8 _ _
Input: D = G E = H F = I || Q G Target: _ _ _ _ _ _ _ _ _ _ _ v3'''  # appendix B


def test_the_papers_worked_example_is_reproduced_token_by_token():
    d = open_data(CHASE)
    row = torch.tensor(d.task.encode([3, 0, 8], [[0, 1, 2], [0, 1, 2]]))[None]
    idx = row[:, :-1]
    parts = [part.split('Target:') for part in PAPER.split('Input:')[1:]]
    want, want_targets = (' '.join(column).split() for column in zip(*parts))
    assert words(d, idx[0]) == want and len(want) == d.T
    (_, counted), = labelled(d, idx, row[:, 1:].where(d.task.counted(idx), -1))
    assert counted == [(t, target) for t, target in enumerate(want_targets) if target != '_']


def chase(tokens):
    """{position: value} of the queries of a row, by following its tables backwards from each key; reads the tokens
    alone."""
    left_of, found, at = {}, {}, 0
    while at < len(tokens):
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


@pytest.mark.parametrize('options', ['hops=0,keys=3', 'hops=1,keys=1,values=1', 'hops=2,keys=3', 'hops=10',
                                     'hops=20,keys=5,values=20'])
def test_every_target_is_what_the_tables_say(options):
    d = open_data(f'pointer_chasing:{options}')
    H, M = d.task.hops, d.task.keys
    idx, targets = d.train_batch(3, 40, d.T, seed=1)
    for tokens, counted in labelled(d, idx, targets):
        assert len(tokens) == {(10, 5): 338, (20, 5): 658}.get((H, M), (6 * M + 2) * H + 3 * M + 3)
        assert tokens[3 * M::3 * M + 1] == ['||'] * (2 * H + 1)
        assert dict(counted) == chase(tokens) and len(counted) == M * H + 1
    keys = idx[:, 2::6 * M + 2] if H else idx[:, 2:3]
    assert (keys == keys[0]).all()  # each level's first key, in the same place in every row
    assert M == 1 or len(set(targets[:, -1].tolist())) > M  # the answers are not


# ---- path-star ----

@pytest.mark.parametrize('options', ['degree=2,length=5,nodes=20', 'degree=7,length=7', 'degree=1,length=2,nodes=2',
                                     'degree=3,length=2,nodes=4'])
def test_graphs_are_stars_and_the_target_is_the_way_to_the_goal(options):
    d = open_data(f'path_star:{options}')
    degree, length = d.task.degree, d.task.length
    first_edges = []
    for tokens, counted in labelled(d, *d.train_batch(0, 1000, d.T, seed=1)):
        text = ' '.join([*tokens, counted[-1][1]])
        prompt, path = text.split(' = ')
        edges, question = prompt.split(' / ')
        edges = [tuple(edge.split()) for edge in edges.split(' | ')]
        (start, goal), path = question.split(), path.split()
        after = {}
        for a, b in edges:
            after.setdefault(a, []).append(b)
        assert len(after.pop(start)) == degree and all(len(b) == 1 for b in after.values())
        assert len({start, *(b for _, b in edges)}) == len(edges) + 1 == degree * (length - 1) + 1  # all nodes differ
        assert path[0] == start and path[-1] == goal and len(path) == length and goal not in after
        assert set(zip(path, path[1:])) <= set(edges)
        assert [target for _, target in counted] == path  # all of it counts, the prompt does not
        first_edges.append(edges[0] in zip(path, path[1:]))
    assert degree == 1 or 0 < sum(first_edges) < 1000  # the edges are shuffled


# ---- recall ----

def recalled(tokens):
    """{position: (value, tokens from pair to query)} of the queries of a row, read from left to right."""
    stood, found = {}, {}
    for t, token in enumerate(tokens):
        if token[0] != 'k':
            continue
        if tokens[t - 1] == 'Q':
            value, place = stood[token]
            found[t] = value, t - place
        else:
            assert token not in stood and tokens[t + 1][0] == 'v'
            stood[token] = tokens[t + 1], t
    assert len(found) == len(stood) == tokens.count('Q')  # all are asked for, and once each
    return found


@pytest.mark.parametrize('options, n_rows', [
    ('', 1000), ('pairs=1,distances=3,length=5,keys=1,values=1,fillers=1', 20),
    ('pairs=6,distances=3-5-100,length=140,values=2', 100)])
def test_every_query_asks_for_its_pair_at_a_chosen_distance(options, n_rows):
    d = open_data(f'recall:{options}')
    distances = [int(part) for part in d.task.distances.split('-')]
    idx, targets = d.train_batch(0, n_rows, d.T, seed=1)
    assert idx.shape == (n_rows, d.T)
    symbols, places = d.task.symbols, set()
    for ids, wanted, asked in zip(idx.tolist(), targets.tolist(), d.task.asked_distance(idx).tolist()):
        found = recalled([symbols[i] for i in ids])
        assert {t: symbols[i] for t, i in enumerate(wanted) if i >= 0} == {t: value for t, (value, _) in found.items()}
        assert {t: far for t, far in enumerate(asked) if far} == {t: far for t, (_, far) in found.items()}
        n_asked = Counter(far for _, far in found.values())
        assert set(n_asked) == set(distances) and max(n_asked.values()) - min(n_asked.values()) <= 1
        places |= set(found)
    if not options:
        assert places == set(range(8, d.T))  # a query may stand wherever its distance leaves room


def test_fewer_keys_than_pairs_by_default_make_fewer_pairs():
    assert [open_data(name).task.pairs for name in ('recall:keys=5', 'recall')] == [5, 8]


# ---- rows ----

@pytest.mark.parametrize('name', ['', CHASE, STAR])
def test_a_batch_depends_on_seed_and_step_only(name, tiny_data):
    d = open_data(name or tiny_data)
    T = getattr(d, 'T', 32)
    idx, targets = d.train_batch(7, 8, T, seed=1)
    parts = [open_data(name or tiny_data).train_batch(7, 8, T, 1, slice(a, b)) for a, b in ((0, 3), (3, 8))]
    assert all(torch.equal(torch.cat(part), whole) for part, whole in zip(zip(*parts), (idx, targets)))
    assert not any(torch.equal(d.train_batch(step, 8, T, seed)[0], idx) for step, seed in ((7, 2), (8, 1)))
    counted = targets >= 0
    assert (counted[:, :-1] <= (targets[:, :-1] == idx[:, 1:])).all() and counted.any()


def test_rows_are_tokens_one_after_the_other_and_windows():
    d = open_data(CHASE)
    assert (d.tokens('val', d.T - 2, 7) == d.rows('val', range(2), 0).ravel()[d.T - 2:d.T + 5]).all()
    with pytest.raises(UserError, match=f'block_size is 9, .* set block_size to {d.T}'):
        d.n_windows('val', 9)


def test_fresh_rows_never_repeat_and_held_out_ones_are_the_same_for_every_seed():
    d = open_data('pointer_chasing:val_rows=100')
    train = torch.cat([d.train_batch(step, 50, d.T, seed)[0] for seed in (0, 1) for step in (0, 1)])
    val = d.val_batch(range(100), d.T)[0]
    assert len({tuple(row) for row in torch.cat([train, val]).tolist()}) == 300


def test_a_fixed_training_set_is_read_once_an_epoch_in_an_order_of_the_seed():
    name = 'path_star:degree=2,length=4,nodes=12,train_rows=60'
    d = open_data(name)
    epoch = lambda seed, step: [tuple(row) for row in open_data(name).train_batch(step, 60, d.T, seed)[0].tolist()]
    epochs = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    assert all(len(set(rows)) == 60 and set(rows) == set(epochs[0]) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert not set(epochs[0]) & {tuple(row) for row in d.val_batch(range(60), d.T)[0].tolist()}


def test_symbols_round_trip_with_or_without_blanks():
    tokenizer = load_tokenizer('path_star:nodes=20')
    ids = [3, 15, 20, 20, 15, 4, 22, 3, 4, 21]
    assert tokenizer.encode('3,15||15,4/3,4=') == tokenizer.encode(' 3 15 | | 15 4 / 3 4 =') == ids
    assert tokenizer.decode([3, 15, 20, 24]).decode() == ' 3 15 |' and tokenizer.n_ids == tokenizer.eos_id + 1 == 25
    for name in (CHASE, 'pointer_chasing', 'path_star'):
        task, tokenizer = make_task(name), load_tokenizer(name)
        assert tokenizer.encode(tokenizer.decode(range(tokenizer.n_ids)).decode()) == list(range(len(task.symbols)))
    with pytest.raises(UserError, match="'20' is no symbol of path_star:nodes=20"):
        load_tokenizer('path_star:nodes=20').encode('3 20')


def test_the_checksum_knows_options_and_rows(monkeypatch):
    d = open_data(CHASE)
    assert d.sha256 == open_data(CHASE + ',val_rows=1000').sha256  # the default, spelled out
    fewer = open_data(CHASE + ',val_rows=999')
    assert d.sha256 != fewer.sha256 and d.tokenizer == fewer.tokenizer
    before, encode = d.sha256, type(d.task).encode
    monkeypatch.setattr(type(d.task), 'encode', lambda self, base, maps: encode(self, base, maps[::-1]))
    assert d.sha256 != before


def test_a_row_is_printed_with_its_targets(capsys):
    print_row([CHASE])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    inputs, targets = (sum((line[1:] for line in lines if line[0] == title), []) for title in ('input', 'target'))
    assert {t: target for t, target in enumerate(targets) if target != '_'} == chase(inputs) and len(inputs) == 52
    with pytest.raises(SystemExit, match='which task'):
        print_row(['python_docs'])


@pytest.mark.parametrize('name, sentence', [
    ('pointer_chasing:hopps=2', 'has no hopps'),
    ('pointer_chasing:hops=two', "hops is 'two' in data 'pointer_chasing:hops=two': expected int"),
    ('pointer_chasing:keys=11', 'values = 10 and keys = 11'),
    ('path_star:degree=5,length=5,nodes=20', 'nodes = 20: a graph of degree 5 and length 5 has 21 different nodes'),
    ('recall:distances=8-x', "distances is '8-x': expected whole numbers of at least 3 joined by -"),
    ('recall:pairs=17', 'at most the 16 keys, as those of a row are different'),
    ('manhattan:grid=7', 'grid is 7: expected an even number'),
    ('recall:length=50', 'length is 50: 8 pairs and their queries at 8-16-32-64 tokens do not fit'),
    ('', 'data is empty: expected a .txt file'),
    ('path_stars', 'built-in data (a5, countdown, manhattan, path_star, pointer_chasing, python_docs, recall)')])
def test_bad_options_are_sentences(name, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        open_data(name)


# ---- scores ----

class Oracle:
    """Knows the held-out rows, and is wrong where it is told to be."""

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
    (STAR, {'accuracy': 1}, [(slice(3), -1), (slice(2, 5), -3)], {'accuracy': 15 / 20}),
    ('recall', {'accuracy_8': 1, 'accuracy_16': 1, 'accuracy_32': 1, 'accuracy_64': 1},
     [(row, 32) for row in range(10)], {'accuracy_32': 1 - 10 / 40})])
def test_scores_count_levels_whole_paths_and_distances(name, perfect, errors, want):
    d = open_data(f'{name}{"," if ":" in name else ":"}val_rows=20')
    idx, targets = d.val_batch(range(20), d.T)
    wrong = targets < 0  # what does not count
    assert d.score(Oracle(d, wrong), 'cpu', batch_size=7) == perfect
    for rows, place in errors:
        if name == 'recall':  # one of the two queries at that distance
            place = min(t for t, (_, far) in recalled(words(d, idx[rows])).items() if far == place)
        wrong[rows, place] = True
    assert d.score(Oracle(d, wrong), 'cpu', batch_size=20) == pytest.approx(perfect | want)


# ---- with the scripts ----

@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'chase'
    result = succeeded(run(*TRAIN, f'--data={CHASE},val_rows=50', '--block_size=52', f'--max_tokens={8 * 8 * 52}',
                           f'--out_dir={out}'))
    assert all(part in result.stdout for part in ('unlimited generated rows', 'levels_solved', 'Q G|'))
    return out


@pytest.mark.slow
def test_scores_are_logged_and_eval_and_sample_know_the_task(trained):
    log = {record['step']: record for record in runs.read_log(trained)}
    assert [step for step in log if 'accuracy_2' in log[step]] == [4, 8] and 0 <= log[8]['accuracy_0'] <= 1
    judged = succeeded(run('eval.py', trained, '--val', '--dtype=float32'))
    assert f'val nats_per_token {log[8]["val"]:20,.4f}' in judged.stdout
    assert f'val accuracy_0     {log[8]["accuracy_0"]:20,.4f}' in judged.stdout and 'bits_per_byte' not in judged.stdout
    sampled = run('sample.py', trained, 'v3 = A v0 = B v8 = C || Q A', '--max_new_tokens=1', '--dtype=float32')
    assert sampled.returncode == 0 and sampled.stdout.startswith('v3 = A v0 = B v8 = C || Q A '), sampled.stderr
    assert_sentence(run('sample.py', trained, 'v3 = Z', '--max_new_tokens=1'),
                    "'Z' is no symbol of pointer_chasing:hops=2,keys=3,values=10")


@pytest.mark.parametrize('name', ['recall', 'a5', 'countdown', CHASE, STAR, 'manhattan:grid=6,steps=20,window=128'])
def test_an_example_ends_before_an_answer_that_counts(name):
    d = open_data(name)
    prompt, n = d.example(d.T, 100)
    start, targets = len(prompt) - 1, d.val_batch([0], d.T)[1][0].tolist()
    assert n >= 1 and min(targets[start:start + n]) >= 0 and (start + n == d.T or targets[start + n] < 0)
