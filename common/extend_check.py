"""Whether a model decodes and trains by what its `logits` say, and decoding without `extend`.

After an edit of one of them `extend` may give other logits than `logits`. Such a model, and one that has neither
`extend` nor `new_cache`, decodes by its `logits`, through `Recomputing`. Where the loss is not that of the logits, a
line on stderr says so.
"""
import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.func import functional_call

from common.files import first_line, say_once

MAX_LOGITS = 2 ** 26  # numbers in the logits of one call, at most


def decodable(model):
    """The model if its `extend` is right; else the same calls by way of its `logits`, which is said once on stderr."""
    return model if isinstance(model, Recomputing) or has_right_extend(model) else Recomputing(model)


def has_right_extend(model) -> bool:
    """Whether the model has an `extend` that equals its `logits`, to rounding. Found once, and said if not.

    A right one is looked at again after `weights_moved`.
    """
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


def weights_moved(model) -> None:
    """Has a right `extend` looked at again: in training, a parameter that was 0 at first may have hidden a fault."""
    if getattr(model, 'extend_fault', None) is None:
        vars(model).pop('extend_fault', None)


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

    With the weights as they are, on random ids: a row of 128 tokens, 20 where each takes a pass, and as many more as
    its cache has in a window, up to eight times that; then two rows, the second one shorter. What differs beyond is not
    seen.
    """
    device = next(model.parameters()).device.type
    if device == 'meta':  # there are no numbers
        return 0.0
    T = 20 if getattr(model, 'sequential', False) or hasattr(model, 'choose_scan') else 128
    with evaluating(model), torch.autocast(device, enabled=False):
        windows = getattr(model.new_cache(1, 1), 'windows', [])
        T += min(8 * T, max((w for w in windows if w is not None), default=0))
        return max(_error_on_rows(model, [T]), _error_on_rows(model, [20, 17]))


def _error_on_rows(model, lengths: list[int]) -> float:
    """`extend_error` on rows of these lengths, the first of which has the ends of two documents and is the longest.

    A prefill, single tokens and a short run, each after another that is forgotten, and a longer run; and a prefill of
    which the last logits alone are asked.
    """
    config, device, T = model.config, next(model.parameters()).device, lengths[0]
    idx = torch.randint(config.n_ids, (len(lengths), T), generator=torch.Generator().manual_seed(0))
    if config.eos_id is not None:
        idx[idx == config.eos_id] = (config.eos_id + 1) % config.n_ids
        idx[0, [T // 16, T // 8]] = config.eos_id  # early, so that many tokens have many before them
    idx, lengths, offsets = idx.to(device), torch.tensor(lengths, device=device), torch.arange(T, device=device)
    rows, is_real = torch.arange(len(idx), device=device)[:, None], offsets < lengths[:, None]

    def centred(logits):
        logits = logits[..., :config.n_ids].float()
        return logits - logits.mean(-1, keepdim=True)

    def error(found, wanted):
        return ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
    wanted, cache = centred(model.logits(idx)), model.new_cache(len(idx), T, max_run=4)
    found, n_read, prefill = torch.empty_like(wanted), torch.zeros_like(lengths), T // 2 - 2
    for n, n_new in (prefill, lengths - T + prefill), (1, None), (4, None), (1, None), (T - prefill - 6, None):
        columns = n_read[:, None] + offsets[:n]
        run = idx[rows, columns]
        if n_new is not None:
            run[offsets[:n] >= n_new[:, None]] = 0  # padding, whose logits are overwritten
        if n <= cache.max_run:
            model.extend((run + 1) % config.n_ids, cache)
            cache.rollback(n)
        found[rows, columns] = centred(model.extend(run, cache, n_new, all_positions=True))
        n_read += n if n_new is None else n_new
    last = centred(model.extend(idx.where(is_real, 0), model.new_cache(len(idx), T), lengths))
    return max(error(found[is_real], wanted[is_real]), error(last, wanted[rows[:, 0], lengths - 1]))


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
                 "after the head, belongs in forward too, and where 'loss' is weighted 'nll' is still the plain mean")


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
