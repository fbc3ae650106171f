"""Scores of models that learned walks through a city (NextLat paper, world models).

    python -m papers.nextlat.manhattan RUN RUN ... --out=NAME      runs trained on `manhattan`

Prints and writes to NAME.csv, for each run:

    detours       fraction of valid paths between held-out pairs if, with probability 75%, a step is
                  not the model's choice but another random street that still allows arrival in time
    compression   for pairs of prefixes with the same length, end and destination (a held-out pair):
                  fraction of pairs where every token of 30 continuations sampled after one prefix
                  has a probability above 0.01 after the other (Vafa et al., compression_test.py)
    same_way      fraction of these pairs with the same greedy continuation
    rank          effective rank of states on held-out rows: exp of the entropy of their singular
                  values, normalized to sum 1
"""
from dataclasses import dataclass
from math import exp, log

import numpy as np
import pandas as pd
import torch

from analysis import figures
from analysis.runs import named
from lm_architectures.data.generated import greedy_answers
from lm_architectures.decode.generation import allocate_cache, decodable, pad
from lm_architectures.files import UserError
from lm_architectures.score.scoring import target_log_probs
from lm_architectures.settings import check_ranges
from papers import models

N_CONTINUATIONS, EPSILON = 30, 0.01  # for `compression` (Vafa et al.)


@dataclass
class Settings(models.ModelSettings):
    detours: float = 0.75  # probability of a detour at each step
    n_prefixes: int = 1000  # pairs of prefixes for `compression`
    batch_size: int = 256  # rows processed at a time

    def __post_init__(self):
        super().__post_init__()
        check_ranges(self, detours=(0, 1))


# ---- paths with detours ----

@torch.inference_mode()
def paths_with_detours(model, task, pairs, share: float, rng) -> list[list[int]]:
    """Decode a path for each pair (start, goal), greedily except for detours. Returns token ids."""
    model, device = decodable(model), next(model.parameters()).device
    cache = model.new_cache(len(pairs), task.steps + 3, device=device)
    tokens = torch.tensor(pairs, device=device) + task.first_node
    (nodes, goals), paths = map(list, zip(*pairs)), [[] for _ in pairs]
    distance = task.distances_to(goals)
    for step in range(task.steps + 1):
        tokens = model.extend(tokens, cache).argmax(-1, keepdim=True)
        for b, (path, node, goal, token) in enumerate(zip(paths, nodes, goals, tokens.flatten().tolist())):
            if path and (path[-1] >= task.first_node or node < 0):
                continue  # ended, or left the streets
            if node != goal and rng.random() < share:
                turns = [turn for turn, after in task.exits[node] if distance[b, after] < task.steps - step]
                turns = [turn for turn in turns if turn != token] or turns
                token = int(rng.choice(turns)) if turns else token
            path.append(token)
            nodes[b] = int(task.neighbor[node, token]) if token < task.first_node else node
            tokens[b] = token
    return paths


# ---- compression ----

def prefixes_to(task, node: int, goal: int, n_steps: int, rng) -> list[int] | None:
    """Return the ids of a random walk of n_steps that ends at a node on the way to goal.

    Draws the walk backwards. None if it meets a place that no street leads to.
    """
    turns = []
    for _ in range(n_steps):
        before, turn = (task.neighbor == node).nonzero()
        if not len(before):
            return None
        i = rng.integers(len(before))
        node = int(before[i])
        turns.append(int(turn[i]))
    return [task.first_node + node, task.first_node + goal, *reversed(turns)]


def pairs_of_walks(task, n: int, rng) -> list[list[int]]:
    """Return 2 n prefixes (ids): pairs of walks with the same length, end and destination."""
    prefixes = []
    while len(prefixes) < 2 * n:
        node, goal = task.held_out_pairs[rng.integers(len(task.held_out_pairs))]
        longest = task.steps - int(task.distances_to([goal])[0, node])
        if longest >= 1:
            n_steps = rng.integers(1, longest + 1)
            two = [prefixes_to(task, node, goal, n_steps, rng) for _ in range(2)]
            if None not in two and two[0] != two[1]:
                prefixes += two
    return prefixes


def same_paths(model, task, prefixes, batch_size: int) -> float:
    """Return the fraction of prefix pairs with the same greedy continuation."""
    paths = greedy_answers(model, prefixes, task.steps + 1, batch_size, eos_id=task.end)
    return float(np.mean([a == b for a, b in zip(paths[::2], paths[1::2])]))


def compression(model, task, prefixes, batch_size: int) -> float:
    """Return the fraction of pairs where what follows the first is possible after the second."""
    generator, n_pairs = torch.Generator().manual_seed(0), max(1, batch_size // N_CONTINUATIONS)
    found = []
    for i in range(0, len(prefixes), 2 * n_pairs):
        part = prefixes[i:i + 2 * n_pairs]
        first, second = ([prefix for prefix in part[k::2] for _ in range(N_CONTINUATIONS)] for k in (0, 1))
        texts = continuations(model, first, task.steps + 1, task.end, generator)
        found.append(possible(model, second, texts).view(-1, N_CONTINUATIONS).all(1))
    return torch.cat(found).double().mean().item()


@torch.inference_mode()
def continuations(model, prefixes, n: int, end: int, generator) -> list[list[int]]:
    """Sample up to n ids with probabilities above EPSILON after each prefix, until `end`."""
    model, (idx, lengths) = decodable(model), pad(prefixes, next(model.parameters()).device)
    cache = allocate_cache(model, prefixes, n)
    logits, tokens = model.extend(idx, cache, lengths), []
    for _ in range(n):
        probs = logits.float().softmax(-1)
        likely = (probs > EPSILON).scatter(-1, probs.argmax(-1, keepdim=True), True)  # at least one
        tokens.append(probs.masked_fill(~likely, 0).cpu().multinomial(1, generator=generator))
        logits = model.extend(tokens[-1].to(idx.device), cache)
    rows = torch.cat(tokens, 1).tolist()
    return [row[:row.index(end) + 1] if end in row else row for row in rows]


@torch.inference_mode()
def possible(model, prefixes, texts):
    """Return True (N,) if all ids of a text have probabilities above EPSILON after its prefix."""
    device = next(model.parameters()).device
    idx, lengths = pad([prefix + text for prefix, text in zip(prefixes, texts)], device)
    starts, place = torch.tensor([len(prefix) for prefix in prefixes], device=device), torch.arange(1, idx.shape[1])
    in_text = (place.to(device) >= starts[:, None]) & (place.to(device) < lengths[:, None])
    log_probs, _ = target_log_probs(model.logits(idx[:, :-1]), idx[:, 1:])
    return ((log_probs > log(EPSILON)) | ~in_text).all(1).cpu()


# ---- effective rank ----

def effective_rank(states) -> float:
    """Return exp of the entropy of the normalized singular values of states (N, C)."""
    from scipy.stats import entropy
    values = torch.linalg.svdvals(states.double())
    return exp(entropy(values[values >= 1e-12]))


# ---- the command line ----

@torch.inference_mode()
def measure(folder: str, s: Settings) -> list[dict]:
    """Return a run's scores."""
    model, data, _ = models.load(folder, s)
    task = data.task if data.T else None
    if not hasattr(task, 'held_out_pairs'):
        raise UserError(f'{folder} was trained on {data.folder}: expected a run on the data manhattan')
    pairs = task.held_out_pairs
    for_paths, _, for_prefixes = np.random.default_rng(0).spawn(3)  # the same for all models
    paths = [path for i in range(0, len(pairs), s.batch_size)
             for path in paths_with_detours(model, task, pairs[i:i + s.batch_size], s.detours, for_paths)]
    valid = [task.is_valid(start, goal, path) for (start, goal), path in zip(pairs, paths)]
    prefixes = pairs_of_walks(task, s.n_prefixes, for_prefixes)
    windows = models.val_windows(data, data.T, task.val_rows * data.T, s.batch_size, next(model.parameters()).device)
    states = torch.cat([model.final_hidden(idx).flatten(0, 1).cpu() for idx, _ in windows])
    return [{'detours': float(np.mean(valid)), 'compression': compression(model, task, prefixes, s.batch_size),
             'same_way': same_paths(model, task, prefixes, s.batch_size),
             'rank': effective_rank(states), 'pairs': len(pairs)}]


@figures.script(Settings)
def main(runs: pd.DataFrame, s: Settings) -> dict:
    rows = models.measured(named(runs, s.labels), measure, s).drop(columns='label')
    figures.show(rows)
    return {'.csv': rows}


if __name__ == '__main__':
    main()
