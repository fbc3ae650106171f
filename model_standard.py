"""The standard Transformer: the baseline of SPS ("The State-Prediction Separation Hypothesis", appendix A) and of GPN.

One stream of vectors, one per token, does two jobs: it predicts the next token, and it is the memory that later tokens
read. Blocks are pre-normalised: rotary causal attention, then a SwiGLU feed-forward net. No biases, a weight-tied head.

Read `Block.forward`, then `Model.final_hidden` for training. `extend` is all of decoding: the same blocks over a cache.

    B  batch        T  positions          C  width, n_embd (d in the paper)     V  vocabulary rows, padded
    L  layers       H  heads of size D    F  feed-forward width, 3 C            n  positions of one `extend` call
    HK key and value heads
    h  a token's vector
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import (
    KVCache,
    attention,
    checkpointed,
    document_starts,
    linear_cross_entropy,
    parse_rope_scaling,
    rms_norm,
    rope_table,
    rotate,
)


@dataclass
class Config:
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_kv_head: int | None = None  # key and value heads, HK, each read by H / HK query heads; None: n_head
    head_size: int | None = None  # D; None: n_embd / n_head
    qkv_bias: bool = False  # biases of queries, keys and values, as Qwen2 has them
    qk_norm: bool = False  # an RMSNorm of each head's query and key before they are rotated, as Qwen3 has it
    n_ffn: int | None = None  # feed-forward width, F; None: 3 n_embd (SPS paper, section 4)
    window: int | None = None  # positions of the past that a query sees besides its own; None: all
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_scaling: str | None = None  # Llama 3's 'factor,low,high,tokens', as '8,1,4,8192'; None: none
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm (official SPS code)
    init_std: float = 0.02  # standard deviation of the initial weights
    init: str = 'normal'  # normal: every matrix, by init_std; torch: the embedding alone, linear layers as nn.Linear
    tied_head: bool = True  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # keep only each block's input for the backward: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 50257  # real token ids; rows from here on are padding
    pad_rows_in_loss: bool = True  # the padding takes part in training's softmax, as in the official code
    eos_id: int | None = 50256  # the id that ends a document: attention stops there; None: one endless document

    def __post_init__(self):
        for name in ('n_layer', 'n_head', 'n_embd', 'n_ids', 'rope_theta', 'norm_eps', 'init_std'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.n_layer > 1000:
            raise ValueError(f'n_layer = {self.n_layer}: expected at most 1000')
        if self.init not in ('normal', 'torch'):
            raise ValueError(f"init = {self.init!r}: expected 'normal' or 'torch'")
        if self.window is not None and self.window < 0:
            raise ValueError(f'window = {self.window}: expected 0 or more positions, or None for all')
        if self.n_ffn is not None and self.n_ffn < 1:
            raise ValueError(f'n_ffn = {self.n_ffn}: expected at least 1, or None for 3 n_embd')
        if self.head_size is None and self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd = {self.n_embd} and n_head = {self.n_head}: '
                             'n_embd / n_head must be an even whole number')
        self.head_size = self.head_size or self.n_embd // self.n_head
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f'head_size = {self.head_size}: expected an even number, or None for n_embd / n_head')
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise ValueError(f'n_kv_head = {self.n_kv_head}: expected a divisor of n_head = {self.n_head}, or None')
        if self.rope_scaling is not None:
            parse_rope_scaling(self.rope_scaling)
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        if self.eos_id is not None and not 0 <= self.eos_id < self.n_ids:
            raise ValueError(f'eos_id = {self.eos_id}: expected one of the {self.n_ids} ids of the tokenizer, or None')
        self.n_ffn = self.n_ffn or 3 * self.n_embd


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C, D, n_ffn = config.n_embd, config.head_size, config.n_ffn
        self.layer, self.n_head, self.n_kv_head, self.head_size = layer, config.n_head, config.n_kv_head, D
        self.checkpoints = config.checkpoint_blocks
        self.attn_norm = RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, (config.n_head + 2 * config.n_kv_head) * D, bias=config.qkv_bias)  # W_Q, W_K, W_V
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.attn_out = nn.Linear(config.n_head * D, C, bias=False)  # W_O
        self.ffn_norm = RMSNorm(C, config.norm_eps)
        self.gate_up = nn.Linear(C, 2 * n_ffn, bias=False)
        self.ffn_out = nn.Linear(n_ffn, C, bias=False)

    @checkpointed
    def forward(self, h, rotate, attend):
        """h (B, T, C) -> (B, T, C).

        rotate(qk) rotates queries and keys (B, T, H + HK, D) by their positions (RoPE). attend(layer, q (B, T, H, D),
        k, v (B, T, HK, D)) -> (B, T, H, D) is the attention, over the whole sequence in training and over a cache in
        decoding. It takes q and k as they come from rotate: on a GPU decoding rotates them in its kernel.
        """
        H, HK = self.n_head, self.n_kv_head
        qkv = self.qkv(self.attn_norm(h)).unflatten(-1, (H + 2 * HK, self.head_size))  # eq. 7
        qk, v = qkv.split([H + HK, HK], 2)
        if self.q_norm is not None:
            q, k = qk.split([H, HK], 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        q, k = rotate(qk).split([H, HK], 2)
        h = h + self.attn_out(attend(self.layer, q, k, v).flatten(2))  # eq. 8, 9
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        # This sets every matrix and bias: what is to start otherwise is set after it.
        for name, p in self.named_parameters():
            if config.init == 'torch' and not name.startswith('embed.'):
                continue  # nn.Linear has initialised it
            if p.dim() >= 2:  # as the official SPS code: only the attention output is scaled down with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def _run_blocks(self, idx, rotate, attend):
        """idx (B, T) -> the final normalised vectors (B, T, C); rotate and attend as in `Block.forward`."""
        h = self.embed(idx)
        for block in self.blocks:
            h = block(h, rotate, attend)
        return self.norm(h)

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx (B, T) -> (B, T, C)."""
        c = self.config
        doc_start = document_starts(idx, c.eos_id)
        cos, sin = rope_table(torch.arange(idx.shape[1], device=idx.device), c.head_size, c.rope_theta, c.rope_scaling)
        return self._run_blocks(idx, lambda qk: rotate(qk, cos, sin),
                                lambda layer, q, k, v: attention(q, k, v, doc_start, c.window))

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats per counted token.

        With documents on, positions whose input is eos do not count: what follows them is another document.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        h = self.final_hidden(idx)
        # linear_cross_entropy makes logits in parts: all (B, T, V) would not fit
        weight = self.head.weight if self.config.pad_rows_in_loss else self.head.weight[:self.config.n_ids]
        loss = linear_cross_entropy(h.flatten(0, 1), weight, targets.flatten())
        return {'loss': loss, 'nll': loss.detach()}

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self.final_hidden(idx))

    def _logits(self, h):
        # Training's loss does not pass here, so that it holds no logits: edit `forward` too.
        logits = self.head(h)  # eq. 10, before the softmax
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache of batch_size rows of up to max_tokens tokens; calls of up to max_run have static shapes."""
        c, weight = self.config, self.embed.weight
        return KVCache(c.n_layer, c.n_kv_head, c.head_size, batch_size, max_tokens, max_run, c.n_embd, [c.window],
                       rope_theta=c.rope_theta, rope_scaling=c.rope_scaling, eos_id=c.eos_id,
                       device=device or weight.device, dtype=dtype or weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a draft are this one call. Calls of n <= cache.max_run have
        static shapes and never wait for the device. Raises ValueError if a row has no room left (`KVCache.begin`).
        """
        place = cache.begin(tokens, lengths)
        h = self._run_blocks(tokens, place.rotate, lambda layer, q, k, v: cache.attend(place, layer, q, k, v))
        last = cache.end(place, h)
        return self._logits(h if all_positions else last)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in sequences of T: weights (2 forward, 4 backward), and attention."""
        c = self.config
        n_keys = T if c.window is None else min(c.window + 1, T)
        keys = n_keys - n_keys * (n_keys - 1) / 2 / T  # that a query sees, mean over the sequence
        # matrices; an embedding looks up
        weights = sum(p.numel() for part in self.modules() if not isinstance(part, nn.Embedding)
                      for p in part.parameters(recurse=False) if p.dim() >= 2)
        return 6 * weights + 12 * c.n_layer * c.n_head * c.head_size * keys
