"""Decoding: the distribution that tokens are drawn from, drawing them, and `generate`.

Read `generate` first, then `Decoder`, which it drives. A model decodes through its `new_cache` and `extend`. A model
without them recomputes the whole text for each token (common/recomputing.py).
"""
from math import inf

import torch
from torch.nn.utils.rnn import pad_sequence

from common.files import UserError, say_once

# ---- the distribution ----

def token_probs(logits, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
                min_p: float | None = None) -> torch.Tensor:
    """Return the distribution that tokens are drawn from. logits (..., V) -> probabilities (..., V), fp32.

    The filters top-k, top-p and min-p apply in this order, each to what the one before has kept. Temperature 0 puts all
    probability on the largest logit. Does not synchronize with the GPU.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no softmax overflows
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float('-inf'))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        likelier = ordered.cumsum(-1) - ordered  # total probability of the tokens before this one
        ordered = ordered.masked_fill(likelier >= top_p, 0)
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    if min_p is not None:
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def check_sampling(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
                   min_p: float | None = None) -> None:
    """Raise UserError for a setting of `token_probs` that fp32 cannot represent or that leaves no token."""
    for name, value, low, high, expected in (
            ('temperature', temperature or 1, 1e-6, 1e6, '0 for the likeliest token, or 1e-6 to 1e6'),
            ('top_k', top_k, 1, inf, 'at least 1'), ('top_p', top_p, 1e-9, 1, '1e-9 to 1'),
            ('min_p', min_p, 0, 1, '0 to 1')):
        if value is not None and not low <= value <= high:
            raise UserError(f'{name} is {value}: expected {expected}')


def check_logits(logits) -> None:
    """Raise UserError unless each row of logits (B, V) has a finite maximum. Synchronizes with the GPU."""
    if not logits.amax(-1).isfinite().all():  # ids that only pad the vocabulary have -inf
        raise UserError('the model computes no finite logits for a prompt: its weights are not finite, or too large')


def likeliest(logits) -> torch.Tensor:
    """Return the argmax of each row. (B, V) -> (B,). On a CPU, max is three times as fast as argmax."""
    return logits.max(-1).indices


def draw(probs, noise) -> torch.Tensor:
    """Draw tokens (B,) with probabilities probs (B, V), without synchronizing with the GPU.

    The winner of an exponential race, noise (B, V) ~ Exp(1), is drawn.
    """
    return likeliest(probs / noise.clamp(min=2 ** -24))  # a noise of 0 would let an impossible token win


# ---- generation ----

@torch.inference_mode()
@torch.autocast('cpu', enabled=False)  # decoding on a CPU is in fp32
def generate(model, prompts: list[list[int]], max_new_tokens: int, *, seed=0, eos_id=None, finished=None, cache=None,
             **sampling) -> list[list[int]]:
    """Continue each prompt, of any length >= 1. Returns the new ids of each prompt, up to and including eos_id.

    finished(i, new_ids) -> bool is called for each new token of prompt i but eos_id; True ends the text. On a GPU it is
    called every 16 steps for the tokens since. cache: from `roomy_cache`, to look at afterwards. sampling: temperature,
    top_k, top_p and min_p of `token_probs`. Raises UserError for sampling settings out of range and for prompts whose
    logits are not finite.
    """
    device = checked_device(model, prompts, sampling)
    if cache is None:
        cache = roomy_cache(model, prompts, max_new_tokens)
    decoder = Decoder(decodable(model), cache, sampling, torch.Generator(device).manual_seed(seed))
    texts, unread = NewTexts(len(prompts), max_new_tokens, eos_id, finished), []
    steps_per_read = 16 if device.type == 'cuda' else 1
    for i in range(max_new_tokens):
        unread.append((decoder.next_tokens() if i else decoder.read_prompts(*pad(prompts, device))).clone())
        if len(unread) == steps_per_read or i + 1 == max_new_tokens:
            for b, tokens in enumerate(torch.stack(unread, 1).tolist()):
                texts.add(b, tokens)
            unread = []
            if not any(texts.live):
                break
    return texts.new


class NewTexts:
    """The new ids of each prompt. A text is live until eos_id, until finished(i, new_ids), or at max_new_tokens."""

    def __init__(self, n: int, max_new_tokens: int, eos_id: int | None, finished):
        self.max_new_tokens, self.eos_id, self.finished = max_new_tokens, eos_id, finished
        self.new, self.live = [[] for _ in range(n)], [max_new_tokens > 0] * n

    def add(self, i: int, tokens: list[int]) -> None:
        """Append the tokens of text i up to its end."""
        new = self.new[i]
        for token in tokens:
            if self.live[i]:
                new.append(token)
                is_done = token == self.eos_id or (self.finished is not None and self.finished(i, new))
                self.live[i] = not is_done and len(new) < self.max_new_tokens


class Decoder:
    """Decodes one token per row and step. On a GPU, a step (model and sampling) is one replay of a CUDA graph."""

    def __init__(self, model, cache, filters, generator):
        self.model, self.cache, self.filters, self.generator = model, cache, filters, generator
        self.is_greedy = filters.get('temperature') == 0
        self.graph = None

    def read_prompts(self, tokens, lengths):
        """Read the prompts (B, n), right-padded to lengths. Returns the first new token of each row (B,)."""
        logits = self.model.extend(tokens, self.cache, lengths)
        check_logits(logits)
        self.noise = torch.ones_like(logits, dtype=torch.float32)
        self.refresh_noise()
        self.tokens = self.pick(logits)
        return self.tokens

    def next_tokens(self):
        """Append the last tokens and return the next ones (B,)."""
        self.refresh_noise()
        if not has_graphs(self.model, self.tokens.device):
            self.step()
            return self.tokens
        if self.graph is None:
            before = self.tokens.clone()

            def undo():
                self.cache.rollback(1)
                self.tokens.copy_(before)
            self.graph = record_graph(self.step, undo)
        self.graph.replay()
        return self.tokens

    def step(self):
        self.tokens.copy_(self.pick(self.model.extend(self.tokens[:, None], self.cache)))

    def pick(self, logits):
        """Pick tokens (B,) from logits (B, V)."""
        return likeliest(logits.float()) if self.is_greedy else draw(token_probs(logits, **self.filters), self.noise)

    def refresh_noise(self):
        if not self.is_greedy:
            self.noise.exponential_(generator=self.generator)


def checked_device(model, prompts: list[list[int]], sampling: dict) -> torch.device:
    """Return the model's device, selected if it is a GPU. UserError for an empty prompt or an invalid setting."""
    if not prompts or not all(prompts):
        raise UserError('a prompt is empty: each needs at least one token')
    check_sampling(**sampling)
    device = next(model.parameters()).device
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # CUDA graphs are captured on the selected GPU
    return device


def pad(sequences: list, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad lists of ids on the right. Returns tokens (B, n) and lengths (B,)."""
    tokens = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
    return tokens.to(device), torch.tensor([len(ids) for ids in sequences], device=device)


def roomy_cache(model, prompts: list, max_new_tokens: int, max_run: int = 1):
    """Return an empty cache with room for the prompts and the new tokens."""
    return decodable(model).new_cache(len(prompts), max(map(len, prompts)) + max_new_tokens, max_run)


def has_graphs(model, device) -> bool:
    """Return True if a decoding step can be captured as a CUDA graph."""
    return device.type == 'cuda' and getattr(model, 'has_graphs', True)


def record_graph(step, undo, beside=None):
    """Capture step() as a CUDA graph without running it. undo() takes back one of the two warm-up steps.

    beside: a graph whose memory pool is shared. Graphs that share a pool must not run at the same time, nor read what
    another one left in its memory.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
            undo()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=beside and beside.pool()):
        step()
    return graph


# ---- models without a cache ----

def decodable(model):
    """Return the model if it has `new_cache` and `extend`, else wrap it in `Recomputing` and print one line."""
    if getattr(model, 'new_cache', None) and getattr(model, 'extend', None):
        return model
    say_once(f'{type(model).__module__} has no new_cache and extend: decoding recomputes the whole text for each token')
    from common.recomputing import Recomputing
    return Recomputing(model)
