"""Multi-token prediction (MTP), a baseline of NextLat.

"Better & Faster Large Language Models via Multi-token Prediction", Gloeckle et al., 2024.

The first L - 1 blocks are a shared trunk, and the last block predicts the next token from its
output. d future blocks read the same output: block i = 1 ... d predicts x_{t+1+i}. All share the
final norm and the output head. One forward pass therefore also drafts d tokens to verify.

Read `Model._run_blocks`, then `Model.forward`.

    B  batch size   T  positions          C  width, n_embd               V  vocabulary, padded
    L  layers       H  heads, D = C / H   F  feed-forward width, 8/3 C   d  horizon: i = 1 ... d
    n  tokens of one `extend` call or draft                              h  inputs of the head
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import (CrossEntropy, KVCache, attention, check_shape, checkpointed, chunked_loss, counted_targets,
                          document_starts, make_mask, mask_padding, mean_keys, n_matrix_weights, rope_table, rotate)


@dataclass
class Config:
    # for train.py and analyses: docs/own_model.md
    may_change = 'checkpoint_blocks',  # settings that only affect speed and memory

    horizon: int = 1  # d: number of tokens after the next one that are predicted
    lambda_mtp: float = 1.0  # lambda_MTP: weight of these d predictions in the loss
    n_layer: int = 12  # blocks, L, including the next token's but not the d future blocks
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd, up to a multiple of 128 (inferred from counts)
    rope_theta: float = 10000.0  # base of the RoPE frequencies
    norm_eps: float = 1e-5  # epsilon of RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = False  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # activation checkpointing, always in `future`: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: token ids, then padding
    n_ids: int = 50257  # number of token ids; rows from n_ids on are padding
    pad_rows_in_loss: bool = True  # include padding rows in the training softmax, as in the official SPS code
    eos_id: int | None = 50256  # end-of-document id: attention and losses do not cross it; None: one document

    def __post_init__(self):
        check_shape(self, horizon=1, lambda_mtp=0)  # sets head_size and n_kv_head
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
        """Apply the block. h: (B, T, C) -> (B, T, C); rope: cos, sin; cache: only in decoding."""
        q, k, v = self.qkv(self.attn_norm(h)).unflatten(-1, (3, -1, self.head_size)).unbind(2)
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        h = h + self.attn_out(attention(q, k, v, mask).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


def windows(x, n, fill=0):
    """Return x_t ... x_{t+n-1} for each t, with `fill` after the end. x: (B, T) -> (B, T, n)."""
    return F.pad(x, (0, n - 1), value=fill).unfold(1, n, 1)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.longest_draft = config.horizon  # tokens that `draft` can propose, for speculative decoding
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        self.cross_entropy = CrossEntropy(config.vocab_size, None if config.pad_rows_in_loss else config.n_ids, 'none')
        self._init_weights(self)  # first, so that the same seed gives the weights of model_nextlat
        self.future = nn.ModuleList(Block(config, config.n_layer + i) for i in range(config.horizon))
        for block in self.future:
            block.checkpoints = True  # so that memory hardly grows with the horizon
        self._init_weights(self.future)

    def _init_weights(self, module):
        """Initialize every matrix in `module`. Set other values afterwards."""
        for name, p in module.named_parameters():
            if p.dim() >= 2:  # as in model_standard, only the attention output is scaled down with depth
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=self.config.init_std * scale)

    def sees(self, q, k):
        """Return True where query q attends to key k. Used in training and in decoding."""
        return (k.pos <= q.pos) & (k.pos >= q.doc_start)

    def _run_blocks(self, idx, rope, mask, cache=None, n_future=0):
        """Return the head's inputs for predicting x_{t+1}, ..., x_{t+1+n_future} from each t.

        idx: (B, T) -> 1 + n_future tensors (B, T, C).
        """
        trunk = self._run_trunk(idx, rope, mask, cache)
        parallel_blocks = [self.blocks[-1], *self.future[:n_future]]
        return [self.norm(block(trunk, rope, mask, cache)) for block in parallel_blocks]

    def _run_trunk(self, idx, rope, mask, cache=None):
        h = self.embed(idx)
        for block in self.blocks[:-1]:
            h = block(h, rope, mask, cache)
        return h

    def _prepare(self, idx):
        """Return rope and mask for whole sequences. idx: (B, T)."""
        c, T = self.config, idx.shape[1]
        mask = make_mask(self, T, idx.device, document_starts(idx, c.eos_id))
        return rope_table(torch.arange(T, device=idx.device), c.head_size, c.rope_theta), mask

    def trunk(self, idx):
        """Return the trunk's output, for linear probes. idx: (B, T) -> (B, T, C)."""
        return self._run_trunk(idx, *self._prepare(idx))

    def final_hidden(self, idx):
        """Return the inputs of the output head. idx: (B, T) -> (B, T, C)."""
        return self._run_blocks(idx, *self._prepare(idx))[0]

    def forward(self, idx, targets):
        """Return {'loss', 'nll', 'further_tokens'}: mean nats per token. idx, targets: (B, T).

        loss = nll + lambda_mtp further_tokens, averaged over i = 1 ... d and positions. Targets of
        -1 are ignored, and with eos_id set, predictions across a document boundary are, too.
        """
        c, T = self.config, idx.shape[1]
        targets = counted_targets(idx, targets, c.eos_id)
        targets = windows(targets, c.horizon + 1, fill=-1)  # (B, T, d + 1), x_{t+1+i}
        if c.eos_id is not None:
            # Target x_{t+1+i} counts if its input x_{t+i} is in a document that has started by t.
            later_starts = windows(document_starts(idx, c.eos_id), c.horizon + 1)
            targets = targets.masked_fill(later_starts > torch.arange(T, device=idx.device)[:, None], -1)
        counted = targets >= 0
        weights = counted / counted.sum((0, 1)).clamp(min=1)
        states = self._run_blocks(idx, *self._prepare(idx), n_future=c.horizon)
        rows = [x.flatten(0, 1) for x in (targets, weights, torch.stack(states, 2))]
        return chunked_loss(self._losses, rows, self.parameters(), (c.horizon + 1) * c.vocab_size)

    def _losses(self, targets, weights, states):
        """Return the loss and its parts. targets, weights: (N, d + 1); states: (N, d + 1, C)."""
        nats = self.cross_entropy(self._logits(states).flatten(0, 1), targets.flatten()).view_as(targets)
        means = (nats * weights).sum(0)
        nll, further = means[0], means[1:].mean()
        return {'loss': nll + self.config.lambda_mtp * further, 'nll': nll, 'further_tokens': further}

    def _logits(self, h):
        """Return logits over all V rows, for the loss, decoding and drafting."""
        return self.head(h)

    def logits(self, idx):
        """Return next-token logits, -inf for padding ids. idx: (B, T) -> (B, T, V)."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def adopt(self, tensors):
        """Add the future blocks' initial weights to a model_standard run's weights."""
        return {name: p.detach() for name, p in self.named_parameters() if name.startswith('future.')} | tensors

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        """Return an empty `KVCache` for batch_size rows of up to max_tokens tokens each."""
        n_future = self.config.horizon if max_call > 1 else 0  # plain decoding needs no future blocks
        cache = KVCache(self, batch_size, max_tokens, max_call, device, dtype, n_layer=self.config.n_layer + n_future)
        cache.future = cache.hidden.new_zeros(batch_size, max_call, n_future, self.config.n_embd)  # future blocks' h
        return cache

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache; return next-token logits as in model_standard.py."""
        states = [self._run_blocks(piece.tokens, piece.rope, piece.mask(), cache, n_future=cache.future.shape[2])
                  for piece in cache.pieces(tokens, lengths)]
        h, *future = (torch.cat(parts, 1) for parts in zip(*states))
        tail = cache.tail(tokens.shape[1])  # each row's last tokens, whose h `end` stores
        for i, state in enumerate(future):
            cache.future[:, :tail.shape[1], i] = state[cache.batch_idx, tail]
        last = cache.end(h)  # for all_positions, too: it finishes the call
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    @torch.no_grad()
    def draft(self, token, cache, n, pick):
        """Draft n tokens after token (B,), as in model_nextlat.py, without running any block.

        The cache needs max_call > 1: else `extend` does not run the future blocks.
        """
        first, cache.drafted = cache.drafted, cache.drafted + n
        states = cache.future[cache.batch_idx[:, 0], cache.last].to(self.embed.weight.dtype)
        logits = mask_padding(self._logits(states[:, first:first + n]), self.config.n_ids)
        tokens, probs = zip(*map(pick, logits.unbind(1)))
        return torch.stack(tokens, 1), torch.stack(probs, 1)

    def flops_per_token(self, T):
        """Return training FLOPs per token at length T: 6 per matrix weight, plus attention."""
        c = self.config
        weights = n_matrix_weights(self) + c.horizon * self.head.weight.numel()  # further tokens use the head too
        n_blocks = c.n_layer + c.horizon
        attention_flops = 12 * n_blocks * c.n_embd * mean_keys(self.sees, T)  # 12: 2 products x 2 FLOPs x 3 passes
        return 6 * weights + attention_flops
