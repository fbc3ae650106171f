"""Decoding: token distributions, sampling, and `generate`.

Read `generation_steps` first, then `Decoder`, which it uses. Models decode through `new_cache` and
`extend`; a model without them recomputes the whole text for each token (recomputing.py).
"""
from collections import Counter
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

from lm_architectures.files import UserError, warn_once
from lm_architectures.settings import check_ranges

# ---- the distribution ----

SAMPLING = dict(temperature=(0, 1e6), top_k=(1, inf), top_p=(1e-9, 1), min_p=(0, 1))  # options of `token_probs`


def token_probs(logits, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
                min_p: float | None = None) -> torch.Tensor:
    """Return the distribution to sample from. logits (..., V) -> probabilities (..., V), fp32.

    Top-k, top-p and min-p apply in this order, each to what the previous filter kept. A temperature
    below 1e-6 is greedy: all probability on the largest logit. Does not synchronize with the GPU.
    """
    logits = logits.float()
    if temperature < 1e-6:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0, so softmax cannot overflow
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float('-inf'))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        likelier = ordered.cumsum(-1) - ordered  # total probability of more likely tokens
        ordered = ordered.masked_fill(likelier >= top_p, 0)
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    if min_p is not None:
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def check_logits(logits) -> None:
    """Raise UserError unless each row (B, V) has a finite maximum. Synchronizes with the GPU."""
    if not logits.amax(-1).isfinite().all():  # padding ids of the vocabulary have -inf
        raise UserError('the logits of a prompt are not finite: the weights contain NaN or infinity, or are too large')


def draw(probs, noise) -> torch.Tensor:
    """Sample tokens (B,) from probs (B, V) without synchronizing with the GPU.

    Uses an exponential race: noise (B, V) ~ Exp(1), the largest probs / noise wins.
    """
    return (probs / noise.clamp(min=2 ** -24)).argmax(-1)  # avoids 0 / 0 = NaN, which argmax would return


# ---- generation ----

@torch.autocast('cpu', enabled=False)  # on CPUs, in the dtype of the weights
def generate(model, prompts: list[list[int]], max_new_tokens: int, *, cache=None, **options) -> list[list[int]]:
    """Continue each prompt, of any length >= 1. Returns the new ids of each, incl. a final eos_id.

    cache: from `allocate_cache`, to inspect later. options: see `generation_steps`.
    """
    cache = allocate_cache(model, prompts, max_new_tokens) if cache is None else cache
    *_, new = generation_steps(model, prompts, max_new_tokens, cache, **options)
    return new


@torch.inference_mode()
def generation_steps(model, prompts: list[list[int]], max_new_tokens: int, cache, *, seed=0, eos_id=None,
                     finished=None, **sampling) -> Iterator[list[list[int]]]:
    """Generate as `generate`. Yields the new ids so far: one list, which grows, at first empty.

    Tokens are read after each step, on a GPU after every 16. eos_id: one or several ids that end a
    text. finished(i, new_ids) -> bool is called for each new token of prompt i except eos_id, when
    it is read; True ends the text. sampling: options of `token_probs`. Raises UserError for options
    out of range and for prompts whose logits are not finite.
    """
    decoder = Decoder(model, prompts, cache, seed, sampling)
    texts, unread = GeneratedTexts(len(prompts), max_new_tokens, eos_id, finished), []
    steps_per_read = 16 if decoder.tokens.device.type == 'cuda' else 1
    yield texts.new
    for i in range(max_new_tokens):
        unread.append((decoder.next_tokens() if i else decoder.tokens).clone())
        if len(unread) == steps_per_read or i + 1 == max_new_tokens:
            for b, tokens in enumerate(torch.stack(unread, 1).tolist()):
                texts.add(b, tokens)
            unread = []
            yield texts.new
            if not any(texts.live):
                break


class GeneratedTexts:
    """The new ids of each prompt. A text ends at eos_id, finished(i, new_ids) or max_new_tokens."""

    def __init__(self, n: int, max_new_tokens: int, eos_id: int | tuple | None, finished):
        self.ends = set(eos_id) if isinstance(eos_id, (tuple, list)) else {eos_id}
        self.max_new_tokens, self.finished = max_new_tokens, finished
        self.new, self.live = [[] for _ in range(n)], [max_new_tokens > 0] * n

    def add(self, i: int, tokens: list[int]) -> None:
        """Append tokens to text i until it ends."""
        new = self.new[i]
        for token in tokens:
            if self.live[i]:
                new.append(token)
                is_done = token in self.ends or (self.finished is not None and self.finished(i, new))
                self.live[i] = not is_done and len(new) < self.max_new_tokens


class Decoder:
    """Decode one token per row and step. On a GPU, a step (model, sampling) is one CUDA graph."""

    def __init__(self, model, prompts: list[list[int]], cache, seed: int, filters: dict):
        """Prefill the prompts. `tokens` (B,) are the first new ones. filters: see `token_probs`."""
        if not all(prompts):
            raise UserError('a prompt is empty: give at least one token')
        check_ranges(SimpleNamespace(**filters), **{name: SAMPLING[name] for name in filters})
        device = next(model.parameters()).device
        if device.type == 'cuda':
            torch.cuda.set_device(device)  # CUDA graphs are captured on the selected GPU
        self.model, self.cache, self.filters = decodable(model), cache, filters
        self.models = [self.model]  # all models that a step runs
        self.uses, self.graphs, self.pool = Counter(), {}, None
        self.generator = torch.Generator(device).manual_seed(seed)
        self.is_greedy = filters.get('temperature', 1) < 1e-6
        tokens, lengths = pad(prompts, device)
        logits = self.model.extend(tokens, cache, lengths)
        check_logits(logits)
        self.noise = torch.ones_like(logits, dtype=torch.float32)
        self.refresh_noise()
        self.tokens = draw(token_probs(logits, **filters), self.noise)

    def next_tokens(self):
        """Feed the last tokens to the model and return the next ones (B,)."""
        def step():
            logits = self.model.extend(self.tokens[:, None], self.cache)
            self.tokens.copy_(draw(token_probs(logits, **self.filters), self.noise))
        self.refresh_noise()
        self.run('step', step)
        return self.tokens

    def run(self, name, step):
        """Run step(). On a GPU, its third use records a CUDA graph.

        The first two compile kernels and load libraries, which a recording cannot.
        """
        self.uses[name] += 1
        has_graphs = all(getattr(model, 'has_graphs', True) for model in self.models)
        if self.tokens.device.type != 'cuda' or not has_graphs or self.uses[name] < 3:
            return step()
        if name not in self.graphs:
            graph = self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):  # records step() without running it
                step()
            self.pool = graph.pool()  # shared, because no two graphs run at the same time
        self.graphs[name].replay()

    def refresh_noise(self):
        if not self.is_greedy:
            self.noise.exponential_(generator=self.generator)


def pad(sequences: list, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad lists of ids. Returns tokens (B, n) and lengths (B,)."""
    tokens = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
    return tokens.to(device), torch.tensor([len(ids) for ids in sequences], device=device)


def decodable(model):
    """Return the model, wrapped in `Recomputing` (with a warning) if it has no cache."""
    if getattr(model, 'new_cache', None) and getattr(model, 'extend', None):
        return model
    name = type(model).__module__.rpartition('.')[2]
    warn_once(f'{name} has no new_cache and extend: decoding recomputes the text for each token')
    from lm_architectures.decode.recomputing import Recomputing
    return Recomputing(model)


def allocate_cache(model, prompts: list, max_new_tokens: int, max_call: int = 1):
    """Return an empty cache with room for the prompts and the new tokens."""
    return decodable(model).new_cache(len(prompts), max(map(len, prompts)) + max_new_tokens, max_call)
