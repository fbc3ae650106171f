"""Joint multi-token prediction (JTP, Ahn et al., 2025), a baseline of NextLat.

A Transformer whose final vector h_t, besides predicting the next token, must tell enough of the future to predict
x_{t+1+i} once x_{t+1} ... x_{t+i} are given, for i = 1 ... d. These predictions come from a small head, Fetch: one
self-attention over h_t and the embeddings of the given tokens; it sees the past through h_t alone. Fetch also drafts.

Read `Fetch.forward`, then `Model.forward`.

    B  batch        T  positions          C  width, n_embd               V  vocabulary rows, padded
    L  layers       H  heads, D = C / H   F  feed-forward width, 8/3 C   d  horizon: i = 1 ... d
    N  positions of a chunk of the loss   n  positions of one `extend` call; tokens of a draft
    h  what the head multiplies           e  embeddings of the tokens that Fetch is given
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import (
    KVCache,
    at_least_fp32,
    attention,
    check_shape,
    checkpointed,
    chunked_loss,
    document_starts,
    make_mask,
    mask_padding,
    n_matrix_weights,
    rope_table,
    rotate,
)


@dataclass
class Config:
    horizon: int = 1  # d: tokens ahead that are trained besides the next one
    lambda_mtp: float = 1.0  # lambda_MTP: weight of the further tokens in the loss
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd up to a multiple of 128 (from parameter counts)
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = False  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 50257  # real token ids; rows from here on are padding
    pad_rows_in_loss: bool = True  # the padding takes part in the training softmax, as in the official SPS code
    eos_id: int | None = 50256  # the id that ends a document: attention and losses stop there; None: one document
    head_size = n_kv_head = rope_scaling = None  # not settings of this model: `check_shape` fills in the sizes

    def __post_init__(self):
        if self.horizon < 1:
            raise ValueError(f'horizon = {self.horizon}: expected at least 1')
        check_shape(self)
        self.n_ffn = self.n_ffn or -(-8 * self.n_embd // (3 * 128)) * 128


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.layer, self.head_size = layer, config.head_size
        self.checkpoints = config.checkpoint_blocks
        self.attn_norm = nn.RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.ffn_norm = nn.RMSNorm(C, config.norm_eps)
        self.gate_up = nn.Linear(C, 2 * config.n_ffn, bias=False)
        self.ffn_out = nn.Linear(config.n_ffn, C, bias=False)

    @checkpointed
    def forward(self, h, rope, mask, cache=None):
        """h: (B, T, C) -> (B, T, C). rope: cos and sin of the positions; cache: that of a decoding step."""
        q, k, v = self.qkv(self.attn_norm(h)).unflatten(-1, (3, -1, self.head_size)).unbind(2)
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        h = h + self.attn_out(attention(q, k, v, mask).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Fetch(nn.Module):
    """JTP's head: causal self-attention over h_t and the embeddings of the tokens after it.

    The paper says no more than that. Parameter counts exclude a feed-forward net; both norms, the sum with the
    embedding and the rotation are inferred.
    """

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.head_size, self.rope_theta = config.head_size, config.rope_theta
        self.norm = nn.RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.out_norm = nn.RMSNorm(C, config.norm_eps)

    def forward(self, h, e):
        """h: (N, C), h_t; e: (N, d, C), emb(x_{t+1}) ... emb(x_{t+d}) -> (N, d, C).

        The i-th of d results is what the head multiplies to predict x_{t+1+i}.
        """
        x = torch.cat([h.unsqueeze(1), e], 1)
        rope = rope_table(torch.arange(x.shape[1], device=x.device), self.head_size, self.rope_theta)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, self.head_size)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (rotate(q, rope), rotate(k, rope), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)[:, 1:]
        return self.out_norm(e + self.attn_out(y.flatten(2)))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.longest_draft = config, config.horizon
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        self._init_weights(self)  # as in model_nextlat: with the same seed, the same weights
        self.fetch = Fetch(config)
        self._init_weights(self.fetch)

    def _init_weights(self, module):
        """Set every matrix: initialise anything that should start differently after it."""
        for name, p in module.named_parameters():
            if p.dim() >= 2:  # as in model_standard, only the attention output is scaled down with depth
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=self.config.init_std * scale)

    def sees(self, q, k):
        """The attention pattern: does the query q see the key k? Edit it, and the edit trains and decodes."""
        return (k.pos <= q.pos) & (k.pos >= q.doc_start)

    def _run_blocks(self, idx, rope, mask, cache=None):
        """idx: (B, T) -> the final normalised vectors (B, T, C)."""
        h = self.embed(idx)
        for block in self.blocks:
            h = block(h, rope, mask, cache)
        return self.norm(h)

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx: (B, T) -> (B, T, C)."""
        c, T = self.config, idx.shape[1]
        rope = rope_table(torch.arange(T, device=idx.device), c.head_size, c.rope_theta)
        mask = make_mask(self.sees, T, c.head_size, idx.device, document_starts(idx, c.eos_id))
        return self._run_blocks(idx, rope, mask)

    def forward(self, idx, targets):
        """idx, targets: (B, T) int64, target -1 ignored -> {'loss', 'nll', 'further_tokens'}: mean nats per token.

        The loss is nll + lambda_mtp further_tokens, the mean over i = 1 ... d of a mean over positions. With documents
        on, a prediction counts if the token and all inputs up to the one before it are in one document.
        """
        c, T = self.config, idx.shape[1]
        if c.eos_id is not None:
            targets = targets.masked_fill(idx == c.eos_id, -1)
        targets = F.pad(targets, (0, c.horizon), value=-1).unfold(1, c.horizon + 1, 1)  # (B, T, d + 1): t, ..., t + d
        if c.eos_id is not None:
            later_starts = F.pad(document_starts(idx, c.eos_id), (0, c.horizon)).unfold(1, c.horizon + 1, 1)
            targets = targets.masked_fill(later_starts > torch.arange(T, device=idx.device)[:, None], -1)
        counted = targets >= 0
        weights = counted / counted.sum((0, 1)).clamp(min=1)
        given = F.pad(idx, (0, c.horizon)).unfold(1, c.horizon + 1, 1)[..., 1:]  # (B, T, d): x_{t+1} ... x_{t+d}
        rows = [x.flatten(0, 1) for x in (targets, weights, self.final_hidden(idx), self.embed(given))]
        loss, nll, further = chunked_loss(self._losses, rows, self.parameters(), (c.horizon + 1) * c.vocab_size)
        return {'loss': loss, 'nll': nll.detach(), 'further_tokens': further.detach()}

    def _losses(self, targets, weights, h, e):
        """The loss of a chunk and its two parts. targets, weights: (N, d + 1); h: (N, C); e: (N, d, C)."""
        states = torch.cat([h.unsqueeze(1), self.fetch(h, e)], 1)  # (N, d + 1, C)
        logits = at_least_fp32(self._logits(states)).flatten(0, 1)
        if not self.config.pad_rows_in_loss:
            mask_padding(logits, self.config.n_ids)
        nats = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction='none').view_as(targets)
        means = (nats * weights).sum(0)
        nll, further = means[0], means[1:].mean()
        return nll + self.config.lambda_mtp * further, nll, further

    def _logits(self, h):
        """Logits of all V rows. An edit here changes the loss, decoding and drafts alike."""
        return self.head(h)

    def logits(self, idx):
        """Next-token logits at every position. idx: (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def adopt(self, tensors):
        """Named weights of a model_standard run. Fetch keeps its own; the logits are the same."""
        return {name: p.detach() for name, p in self.named_parameters() if name.startswith('fetch.')} | tensors

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache of batch_size rows of up to max_tokens tokens; calls of up to max_run have static shapes."""
        cache = KVCache(self, batch_size, max_tokens, max_run, device, dtype)
        cache.given = torch.zeros_like(cache.hidden[..., 0], dtype=torch.int64)  # (B, max_run): what Fetch is given
        return cache

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache and return their next-token logits, as in model_standard.py."""
        h = torch.cat([self._run_blocks(run.tokens, run.rope, run.mask(), cache)
                       for run in cache.runs(tokens, lengths)], 1)
        last = cache.end(h)
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    @torch.no_grad()
    def draft(self, token, cache, n, pick):
        """Draft n tokens after token (B,), as in model_nextlat.py. The Transformer does not run."""
        h = cache.hidden[cache.batch_idx[:, 0], cache.last].to(self.embed.weight.dtype)
        drawn = []
        for i in range(cache.drafted, cache.drafted + n):
            cache.given[:, i] = token
            state = self.fetch(h, self.embed(cache.given[:, :i + 1]))[:, -1]
            token, probs = pick(mask_padding(self._logits(state), self.config.n_ids))
            drawn.append((token, probs))
        cache.drafted += n
        tokens, probs = zip(*drawn)
        return torch.stack(tokens, 1), torch.stack(probs, 1)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in sequences of T: weights (2 forward, 4 backward), and attention.

        Fetch reads d + 1 vectors for each token and gives d results.
        """
        c = self.config
        weights = n_matrix_weights(self) + c.horizon * self.head.weight.numel()  # the head runs for each i
        weights += c.horizon * self.fetch.qkv.weight.numel() + (c.horizon - 1) * self.fetch.attn_out.weight.numel()
        return 6 * weights + 12 * c.n_layer * c.n_embd * (T + 1) / 2
