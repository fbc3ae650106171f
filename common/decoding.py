"""Decoding: the distribution that tokens are drawn from, drawing them, and `generate`.

Read `generate` first, then `Decoder`, which it drives. A model decodes by its `new_cache` and `extend`. One that has
neither, or whose `extend` gives other logits than `logits` after an edit of one of them, decodes by its `logits`,
through `Recomputing`.
"""
import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.func import functional_call

from common.files import UserError, first_line, say_once

MAX_LOGITS = 2 ** 26  # numbers in the logits of one call, at most
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
    on_cpu, rows = next(model.parameters()).device.type == 'cpu', MANY_ROWS if len(prompts) >= MANY_ROWS else 1
    dtype = torch.float32 if on_cpu and in_fp32[rows] else None
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


# ---- a model that decodes by its logits ----

def decodable(model):
    """The model if its `extend` is right; else the same calls by way of its `logits`, which is said once on stderr."""
    return model if isinstance(model, Recomputing) or has_right_extend(model) else Recomputing(model)


def has_right_extend(model) -> bool:
    """Whether the model has an `extend` that equals its `logits`, to rounding. Found once, and said if not."""
    if getattr(model, 'extend', None) is None:
        say_once(f'{type(model).__module__} has no extend: decoding recomputes the whole text at every step')
        return False
    if not hasattr(model, 'extend_fault'):
        model.extend_fault = find_extend_fault(model)
    if model.extend_fault:
        say_once(f'{type(model).__module__}: extend, by which it decodes, {model.extend_fault}: decoding recomputes '
                 'the whole text at every step. What is edited for whole windows, as positions or attention in '
                 'final_hidden, belongs in extend and its cache too')
    return model.extend_fault is None


def find_extend_fault(model) -> str | None:
    """What is wrong with the model's `extend`, or None. Weights of 16 bits hide more than fp32, which training has."""
    try:
        error = extend_error(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # an edit that it cannot follow
        return f'fails ({type(fault).__name__}: {first_line(fault)})'
    limit = 0.01 if next(model.parameters()).dtype == torch.float32 else 0.05
    if error > limit:  # not so where weights, and with them the error, are not finite: that is said elsewhere
        return f'differs from logits by {error:.1g} of their size'


@torch.no_grad()
def extend_error(model) -> float:
    """The rms difference of `extend` and `logits`, over the rms of `logits`, each row less its mean.

    With the weights as they are, on random ids with the ends of two documents: a prefill, single tokens and a short
    run, each after another that is forgotten, and a longer run; and a prefill of which the last logits alone are asked.
    Of 128 tokens, 20 where each takes a pass; what differs beyond is not seen.
    """
    config, device = model.config, next(model.parameters()).device
    if device.type == 'meta':  # there are no numbers
        return 0.0
    T = 20 if getattr(model, 'sequential', False) or hasattr(model, 'choose_scan') else 128
    idx = torch.randint(config.n_ids, (1, T), generator=torch.Generator().manual_seed(0))
    if config.eos_id is not None:
        idx[:, [T // 3, 2 * T // 3]] = config.eos_id
    idx, found, cuts = idx.to(device), [], [T // 2 - 2, 1, 4, 1]

    def centred(logits):
        logits = logits[..., :config.n_ids].float()
        return logits - logits.mean(-1, keepdim=True)
    with evaluating(model), torch.autocast(device.type, enabled=False):
        wanted = centred(model.logits(idx))
        cache = model.new_cache(1, T, max_run=4)
        for run in idx.split([*cuts, T - sum(cuts)], 1):
            if run.shape[1] <= cache.max_run:
                model.extend((run + 1) % config.n_ids, cache)
                cache.rollback(run.shape[1])
            found.append(model.extend(run, cache, all_positions=True))
        last = model.extend(idx, model.new_cache(1, T))
    return max(((centred(found) - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
               for found, wanted in ((torch.cat(found, 1), wanted), (last, wanted[:, -1])))


def tell_of_another_loss(model) -> None:
    """Says so, in one line, where a model trains by another loss than that of its `logits`, by which it decodes."""
    try:
        error = loss_error(model)
    except torch.OutOfMemoryError:
        say_once(f'{type(model).__module__}: its loss was not compared with its logits: the device has no memory for '
                 'a second copy of the weights')
        return
    except Exception as fault:  # of logits; what forward raises ends training
        say_once(f'{type(model).__module__}: its loss cannot be compared with its logits ({type(fault).__name__}: '
                 f'{first_line(fault)})')
        return
    if error > 0.001:
        say_once(f'{type(model).__module__}: the loss that it trains by differs from that of its logits, by '
                 f"{error:.1g} of their size: texts and tasks would be another model's. What is edited in logits, "
                 'after the head, belongs in forward too')


@torch.no_grad()
def loss_error(model) -> float:
    """How far apart `forward` and `logits` of a model with fp32 weights are, over the rms of `logits`.

    By how much the nats of some targets exceed those of others, as that does not depend on whether ids that pad the
    vocabulary count. On random ids, a horizon and 20, or `model.exact_len` where that is less, with the end of a
    document. Noise is added to the weights, as a bias starts at 0; a second pass has the head times 100, as a cap does
    nothing to small logits. It takes the memory of the weights once more.
    """
    config, device = model.config, next(model.parameters()).device
    if device.type == 'meta':  # there are no numbers
        return 0.0
    T = 20 + getattr(config, 'horizon', 0)
    T = min(T, getattr(model, 'exact_len', None) or T)
    idx, *targets = torch.randint(config.n_ids, (3, 1, T), generator=torch.Generator().manual_seed(0))
    if config.eos_id is not None:
        if T > 2:
            idx[:, T // 2] = config.eos_id
        targets = [ids.masked_fill(idx == config.eos_id, -1) for ids in targets]
    idx, targets = idx.to(device), [ids.to(device) for ids in targets]
    cuda = [device] if device.type == 'cuda' else []  # whose generator stays as it is, too
    with evaluating(model), torch.autocast(device.type, enabled=False), torch.random.fork_rng(cuda):
        found = [functional_call(_NatsAndLogits(model), _noisy_weights(model, device, head_scale), (idx, targets))
                 for head_scale in (1, 100)]
    errors = []
    for nats, logits in found:
        logits = logits[..., :config.n_ids].float().log_softmax(-1)
        wanted = [F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=-1) for ids in targets]
        size = (logits - logits.mean(-1, keepdim=True)).square().mean().sqrt().clamp(min=0.01)
        errors.append(((nats[0] - nats[1] - wanted[0] + wanted[1]).abs() / size).item())
    return max(errors)


class _NatsAndLogits(torch.nn.Module):
    """Both in one call, as `functional_call` replaces weights in a call alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx, targets):
        return [self.model(idx, ids)['nll'] for ids in targets], self.model.logits(idx)


def _noisy_weights(model, device, head_scale) -> dict:
    """{'model.NAME': the parameter and noise}, of the head times head_scale."""
    generator, head = torch.Generator(device).manual_seed(0), getattr(getattr(model, 'head', None), 'weight', None)
    values = {}
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, device=device, dtype=p.dtype)
        noise.mul_(0.3 if p.dim() < 2 else 0.5 * p.shape[-1] ** -0.5)
        values[f'model.{name}'] = noise.add_(p).mul_(head_scale if p is head else 1)
    return values


@contextlib.contextmanager
def evaluating(model) -> Iterator[None]:
    """The model in eval mode, then each module as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


class Recomputing:
    """Decoding by a model that has only `logits(idx)`: the cache is the text, read anew by every `extend`.

    Calls and shapes are those of a model's own `new_cache` and `extend`. There are no `cache.hidden` and no CUDA graph.
    """

    def __init__(self, model):
        self.model, self.config, self.parameters = model, model.config, model.parameters

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty text for batch_size rows of up to max_tokens tokens; dtype is of no account, ids being integers."""
        return TextCache(batch_size, max_tokens, max_run, device or next(self.parameters()).device)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        """
        (B, n), device = tokens.shape, tokens.device
        n_new = torch.full_like(cache.lengths, n) if lengths is None else lengths
        positions = cache.lengths[:, None] + torch.arange(n, device=device)  # (B, n)
        end = cache.lengths + n_new
        text_len = int(end.max())
        if text_len > cache.max_tokens:
            raise ValueError(f'the cache holds {cache.max_tokens} tokens a row, {text_len} are asked for')
        batch_idx = torch.arange(B, device=device)[:, None]
        is_real = positions < end[:, None]
        cache.tokens[batch_idx.expand(B, n)[is_real], positions[is_real]] = tokens[is_real]
        cache.lengths.copy_(end)
        wanted = positions.clamp(max=text_len - 1) if all_positions else end[:, None] - 1
        n_rows = max(1, MAX_LOGITS // (text_len * self.config.vocab_size))
        found = [self.model.logits(text)[batch_idx[:len(text)], at]
                 for text, at in zip(cache.tokens[:, :text_len].split(n_rows), wanted.split(n_rows))]
        logits = torch.cat(found)
        return logits if all_positions else logits[:, 0]


class TextCache:
    """The text of each row: tokens (B, max_tokens), of which `lengths` (B,) are there."""

    def __init__(self, batch_size, max_tokens, max_run, device):
        self.max_tokens, self.max_run = max_tokens, max_run
        self.tokens = torch.zeros(batch_size, max_tokens, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)

    @property
    def nbytes(self):
        return self.tokens.nbytes + self.lengths.nbytes

    def rollback(self, n):
        """Forgets the last n tokens: n an int, or (B,) int64 with one count a row."""
        self.lengths -= n
