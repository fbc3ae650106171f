"""Shared by tests of models: layers from equations, models with large weights, comparisons."""
import torch
import torch.nn.functional as F

import attn_kernels

# ---- layers, from their equations ----

def rms_norm(x, layer, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * layer.weight


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / 2 ** 0.5))


def rotary(x, position, theta=10000.0):
    """Rotary embedding of x (..., D) in float64, with (x_j, x_{j + D/2}) as a complex number."""
    D = x.shape[-1]
    angle = position * theta ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    y = torch.complex(*x.chunk(2, -1)) * torch.complex(angle.cos(), angle.sin()).to(torch.complex128)
    return torch.cat([y.real, y.imag], -1)


def dense_attention(q, k, v, seen, bias=0.0):
    """Dense masked attention: scores, mask, softmax. Exact in float64.

    q: (B, n_q, H, D); k, v: (B, n_k, HK, D); seen: (..., n_q, n_k), True where a query sees a key;
    bias: (H, n_q, n_k), added to the scores.
    """
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum('bqhd,bkhd->bhqk', q, k) * q.shape[-1] ** -0.5 + bias
    scores = scores.masked_fill(~seen.unsqueeze(-3), float('-inf'))
    return torch.einsum('bhqk,bkhd->bqhd', scores.softmax(-1), v)


def rotary_attention(qkv, position, seen, theta=10000.0):
    """Dense rotary attention. qkv (B, n, 3, H, D), position (n,), seen (B, n, n) -> (B, n, H D)."""
    q, k, v = qkv.unbind(2)
    q, k = (rotary(x.double(), position[:, None, None], theta).to(x.dtype) for x in (q, k))
    return dense_attention(q, k, v, seen).flatten(2)


def transformer_block(h, layer, position, seen, eps=1e-5):
    """Apply the block of model_standard.py to h (B, n, C). position: (n,), seen: (B, n, n)."""
    qkv = (rms_norm(h, layer.attn_norm, eps) @ layer.qkv.weight.T).unflatten(-1, (3, -1, layer.head_size))
    h = h + rotary_attention(qkv, position, seen) @ layer.attn_out.weight.T
    gate, up = (rms_norm(h, layer.ffn_norm, eps) @ layer.gate_up.weight.T).chunk(2, -1)
    return h + (F.silu(gate) * up) @ layer.ffn_out.weight.T


# ---- models, tokens and patterns ----

def random_model(file, n, std=0.2, **config):
    """Return a float64 model with large weights, so that each counts; n windows with eos (59)."""
    torch.manual_seed(0)
    model = file.Model(file.Config(**config)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std if p.dim() == 2 else 0.7)
    idx = torch.randint(0, 60, (n, 23))
    return model, idx.masked_fill(torch.rand(n, 23) < 0.15, 59)


def document_numbers(idx, eos_id):
    """Return how many documents ended before each token of idx (..., T)."""
    return F.pad(idx[..., :-1] == (-1 if eos_id is None else eos_id), (1, 0)).cumsum(-1)


def some_tokens(B, T, seed=0):
    """Return random ids with documents of various lengths, including empty ones."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, 59, (B, T), generator=generator)
    idx[torch.rand(B, T, generator=generator) < 0.1] = 59
    idx[0, 4:6] = 59
    return idx


def dense_mask(sees, T, doc_start, keys, queries):
    """Return the dense boolean mask of a pattern, (1 or B, n_q, n_k)."""
    rows = [[(t, s) for s in streams for t in range(T)] for streams in (queries, keys)]
    q, k = (torch.tensor(tokens).unsqueeze(1 - i).unbind(-1) for i, tokens in enumerate(rows))
    starts = [0] if doc_start is None else [row.repeat(len(queries))[:, None] for row in doc_start]
    return torch.stack([sees(attn_kernels.Tokens(*q, start), attn_kernels.Tokens(*k)) for start in starts])


@torch.no_grad()
def decode(model, idx, sizes, max_call=4):
    """Return the logits (B, T, 60) of cached decoding in calls of `sizes` tokens, in sum T."""
    cache = model.new_cache(*idx.shape, max_call)
    return torch.cat([model.extend(run, cache, all_positions=True) for run in idx.split(sizes, 1)], 1)[..., :60]


# ---- comparing ----

def loss_and_gradients(loss, model, without=()):
    """Return {'loss': loss, name: gradient}. A weight that the loss does not use is an error.

    without: what the names of weights that are left out start with.
    """
    weights = {name: p for name, p in model.named_parameters() if not name.startswith(without)}
    return {'loss': loss.detach(), **dict(zip(weights, torch.autograd.grad(loss, [*weights.values()])))}


def assert_near(got, want, tolerance, all_matter=True):
    """Compare tensors by name relative to their norms, which must be positive if all_matter."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert x.isfinite().all() and (x.any() or not all_matter), name
        assert (got[name] - x).norm() <= tolerance * x.norm(), name


def gradients(function, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]  # keeps the strides
    out = function(*inputs)
    cotangent = torch.cos(torch.arange(out.numel(), dtype=torch.float64, device=out.device)).view(out.shape)
    return out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


def assert_close(got, want, tolerance):
    assert want[0].abs().max() > 0
    for g, w in zip(got, want, strict=True):
        assert w.isfinite().all()
        assert (g.double() - w).abs().max() <= tolerance * (1 + w.abs().max()), (g.double() - w).abs().max()
