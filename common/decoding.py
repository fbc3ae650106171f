"""Decoding: the distribution that tokens are drawn from, drawing them, and `generate`.

Read `generate` first, then `Decoder`, which it drives. A model decodes by its `new_cache` and `extend`; where it has
none, or they give other logits than `logits`, by its `logits` (`decodable` in common/extend_check.py).
"""
import torch

from common.extend_check import Recomputing, decodable
from common.files import UserError

MANY_ROWS = 16  # from here on a cache may have another dtype than for fewer

# ---- the distribution ----


def token_probs(logits, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
                min_p: float | None = None) -> torch.Tensor:
    """The distribution that tokens are drawn from. logits (..., V) -> probabilities (..., V), fp32.

    Filters apply one after the other, each to what the one before left: top-k, top-p, min-p. Temperature 0 puts all on
    the largest logit. Without a wait for the device.
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
        likelier = ordered.cumsum(-1) - ordered  # the probability of all tokens before this one
        ordered = ordered.masked_fill(likelier >= top_p, 0)
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    if min_p is not None:
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def check_sampling(temperature: float, top_k: int | None = None, top_p: float | None = None,
                   min_p: float | None = None) -> None:
    """Raises UserError for a setting of `token_probs` that fp32 cannot compute with, or that leaves no token."""
    if temperature != 0 and not 1e-6 <= temperature <= 1e6:
        raise UserError(f'temperature is {temperature}: expected 0 for the likeliest token, or 1e-6 to 1e6')
    if top_k is not None and not top_k >= 1:
        raise UserError(f'top_k is {top_k}: expected at least 1')
    if top_p is not None and not 1e-9 <= top_p <= 1:
        raise UserError(f'top_p is {top_p}: expected 1e-09 to 1')
    if min_p is not None and not 0 <= min_p <= 1:
        raise UserError(f'min_p is {min_p}: expected 0 to 1')


def check_logits(logits) -> None:
    """Raises UserError unless each row of logits (B, V) has a likeliest token. Waits for the device."""
    if not logits.amax(-1).isfinite().all():  # an id that only pads the vocabulary has -inf
        raise UserError('the model computes no finite logits for a prompt: its weights are not finite, or too large')


def likeliest(logits) -> torch.Tensor:
    """The index of the largest of each row. (B, V) -> (B,). On a CPU max is three times as fast as argmax."""
    return logits.max(-1).indices


def draw(probs, noise) -> torch.Tensor:
    """Tokens (B,) with probability probs (B, V), without a wait for the device.

    The token drawn is the winner of an exponential race, noise (B, V) ~ Exp(1).
    """
    return likeliest(probs / noise.clamp(min=2 ** -24))  # noise rounded to 0 would let an impossible token win


# ---- generation ----

@torch.inference_mode()
def generate(model, prompts: list[list[int]], max_new_tokens: int, *, temperature=1.0, top_k=None, top_p=None,
             min_p=None, seed=0, eos_id=None, finished=None, on_tokens=None, cache=None) -> list[list[int]]:
    """Continues each prompt, of any length >= 1. Returns the new ids of each, up to and with eos_id.

    finished(i, new_ids) -> bool ends the text of prompt i early; on_tokens(the new ids of each prompt so far) is called
    as tokens arrive. Ids reach the host every step on CPU, every 16 on a GPU. Pass a cache from `roomy_cache` to look
    at it afterwards. Raises ValueError for settings out of range, and where the logits of a prompt are not finite.
    """
    check_prompts(prompts)
    check_sampling(temperature, top_k, top_p, min_p)
    if cache is not None and cache.max_tokens < max(map(len, prompts)) + max_new_tokens:
        raise ValueError(f'the cache holds {cache.max_tokens} tokens a row: the longest prompt and {max_new_tokens} '
                         'new ones do not fit')
    if max_new_tokens < 1:
        return [[] for _ in prompts]
    device = next(model.parameters()).device
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # where the graph is captured
    if cache is None:
        cache = roomy_cache(model, prompts, max_new_tokens)
    generator = torch.Generator(device).manual_seed(seed)
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    decoder = Decoder(decodable(model), cache, filters, generator)
    tokens, lengths = pad(prompts, device)
    drawn = torch.empty(len(prompts), max_new_tokens, dtype=torch.int64, device=device)
    new, done, n_read = [[] for _ in prompts], [False] * len(prompts), 0
    steps_per_read = 16 if device.type == 'cuda' else 1
    for i in range(max_new_tokens):
        drawn[:, i] = decoder.read_prompts(tokens, lengths) if i == 0 else decoder.next_tokens()
        if (i + 1) % steps_per_read and i + 1 < max_new_tokens:
            continue
        for b, ids in enumerate(drawn[:, n_read:i + 1].tolist()):
            for token in ids:
                if not done[b]:
                    new[b].append(token)
                    done[b] = token == eos_id or (finished is not None and finished(b, new[b]))
        n_read = i + 1
        if on_tokens:
            on_tokens(new)
        if all(done):
            break
    return new


class Decoder:
    """Decodes one token a row and step. On a GPU the step, model and sampling together, is one CUDA graph replay."""

    def __init__(self, model, cache, filters, generator):
        self.model, self.cache, self.filters, self.generator = model, cache, filters, generator
        self.is_greedy = filters['temperature'] == 0
        self.graph = None

    def read_prompts(self, tokens, lengths):
        """Reads the prompts (B, n), right-padded to lengths; returns the first new token of each row (B,)."""
        logits = self.model.extend(tokens, self.cache, lengths)
        check_logits(logits)
        self.noise = torch.empty_like(logits, dtype=torch.float32)
        self.tokens = torch.empty(len(tokens), dtype=torch.int64, device=tokens.device)
        self.refresh_noise()
        self.tokens.copy_(self.pick(logits))
        return self.tokens

    def next_tokens(self):
        """Appends the last tokens and returns the ones after them (B,)."""
        self.refresh_noise()
        if has_graphs(self.model, self.tokens.device):
            self.graph = self.graph or self.capture()
            self.graph.replay()
        else:
            self.step()
        return self.tokens

    def pick(self, logits):
        """A token (B,) for logits (B, V)."""
        return likeliest(logits.float()) if self.is_greedy else draw(token_probs(logits, **self.filters), self.noise)

    def refresh_noise(self):
        if not self.is_greedy:
            self.noise.exponential_(generator=self.generator)

    def step(self):
        self.tokens.copy_(self.pick(self.model.extend(self.tokens[:, None], self.cache)))

    def capture(self):
        """One step as a CUDA graph."""
        tokens = self.tokens.clone()

        def undo():
            self.cache.rollback(1)
            self.tokens.copy_(tokens)
        return record_graph(self.step, undo)


def check_prompts(prompts: list[list[int]]) -> None:
    """Raises UserError unless there are prompts, each with at least one token."""
    if not prompts or not all(prompts):
        raise UserError('a prompt is empty: each needs at least one token')


def pad(sequences: list, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of ids -> (B, n), right-padded, and their lengths (B,)."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    tokens = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
    for row, ids in zip(tokens, sequences):
        row[:len(ids)] = torch.tensor(ids)
    return tokens.to(device), lengths.to(device)


def roomy_cache(model, prompts: list, max_new_tokens: int, max_run: int = 1):
    """A cache with room for prompts and new tokens.

    On a CPU that of a bf16 model is fp32 where this is faster: for a few rows, or as `choose_cache` found.
    """
    in_fp32 = getattr(model, 'cache_in_fp32', {1: True, MANY_ROWS: False})
    weight, rows = next(model.parameters()), MANY_ROWS if len(prompts) >= MANY_ROWS else 1
    is_short = weight.device.type == 'cpu' and weight.element_size() == 2
    dtype = torch.float32 if is_short and in_fp32[rows] else None
    return decodable(model).new_cache(len(prompts), max(map(len, prompts)) + max_new_tokens, max_run, dtype=dtype)


def has_graphs(model, device) -> bool:
    """Whether a step can be recorded as a CUDA graph: on a GPU, where the shapes of `extend` are static."""
    return device.type == 'cuda' and not isinstance(model, Recomputing)


def record_graph(step, undo, beside=None):
    """step() as a CUDA graph, not run yet. undo() takes back one of the steps that warm up.

    beside: a graph whose memory it shares: neither may be replayed while the other is, nor read what the other left.
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
