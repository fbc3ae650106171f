"""The standard Transformer: the baseline of SPS (arXiv 2607.01218, appendix A) and of GPN.

Each token's hidden state does two jobs: it predicts the next token, and later tokens attend to it
as memory. A block is RMSNorm and causal attention with rotary embeddings, then RMSNorm and a SwiGLU
feed-forward net. There are no biases, and the output head shares the embedding's weights.

Read `Model.sees`, `Block.forward`, `Model.forward`. `extend` decodes: the same blocks with a cache.

    B  batch size   T  positions          C  width, n_embd (d in the paper)   V  vocabulary, padded
    L  layers       H  heads of size D    F  feed-forward width, 3 C          n  tokens per `extend`
    h  hidden states                      HK key and value heads
"""
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import (CrossEntropy, KVCache, attention, check_shape, checkpointed, chunked_loss, counted_targets,
                          document_starts, make_mask, mask_padding, mean_keys, n_matrix_weights, outside_graphs,
                          rope_table, rotate)


@dataclass
class Config:
    # for train.py and analyses: docs/own_model.md
    may_change = 'attention', 'checkpoint_blocks'  # settings that only affect speed and memory
    defining = 'window',  # decides what the weights compute: --init_from refuses a model without it, unless it is None
    state_window = 'window'  # setting that limits how much of the state is seen, for analyses

    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 3 n_embd (SPS paper, section 4)
    window: int | None = None  # past positions that a query sees besides its own; None: all
    attention: Literal['auto', 'flex', 'triton'] = 'auto'  # on a GPU. auto: the fastest that implements `sees`
    rope_theta: float = 10000.0  # base of the RoPE frequencies
    norm_eps: float = 1e-6  # epsilon of RMSNorm (official SPS code)
    init_std: float = 0.02  # standard deviation of the initial weights
    init: Literal['normal', 'torch'] = 'normal'  # of matrices. normal: by init_std; torch: nn.Linear's default
    tied_head: bool = True  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: token ids, then padding
    n_ids: int = 50257  # number of token ids; rows from n_ids on are padding
    pad_rows_in_loss: bool = True  # include padding rows in the training softmax, as in the official code
    eos_id: int | None = 50256  # end-of-document id: attention does not cross it; None: one document
    # For the weights of pretrained models (docs/pretrained.md):
    n_kv_head: int | None = None  # key and value heads, HK; each serves H / HK query heads; None: n_head
    head_size: int | None = None  # D; None: n_embd / n_head
    qkv_bias: bool = False  # biases on queries, keys and values, as in Qwen2
    qk_norm: bool = False  # RMSNorm on each head's query and key, before RoPE, as in Qwen3
    rope_scaling: tuple[float, ...] | None = None  # Llama 3's RoPE scaling: factor, low, high, tokens (8,1,4,8192)

    def __post_init__(self):
        check_shape(self, window=0)  # sets head_size and n_kv_head
        self.n_ffn = self.n_ffn or 3 * self.n_embd


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C, D, n_ffn = config.n_embd, config.head_size, config.n_ffn
        self.layer, self.n_head, self.n_kv_head, self.head_size = layer, config.n_head, config.n_kv_head, D
        self.checkpoints = config.checkpoint_blocks
        self.attn_norm = nn.RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, (config.n_head + 2 * config.n_kv_head) * D, bias=config.qkv_bias)  # W_Q, W_K, W_V
        self.q_norm = nn.RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.attn_out = nn.Linear(config.n_head * D, C, bias=False)  # W_O
        self.ffn_norm = nn.RMSNorm(C, config.norm_eps)
        self.gate_up = nn.Linear(C, 2 * n_ffn, bias=False)
        self.ffn_out = nn.Linear(n_ffn, C, bias=False)

    @checkpointed
    def forward(self, h, rope, mask, cache=None):
        """Apply the block. h: (B, T, C) -> (B, T, C); rope: cos, sin; cache: only in decoding."""
        n_heads = [self.n_head, self.n_kv_head, self.n_kv_head]
        q, k, v = self.qkv(self.attn_norm(h)).unflatten(-1, (-1, self.head_size)).split(n_heads, 2)  # eq. 7
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        h = h + self.attn_out(attention(q, k, v, mask).flatten(2))  # eq. 8, 9
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


@outside_graphs
def attention_mask(model, T, device, *args):
    """Return a mask for the Triton kernels, or the mask of `make_mask`: see Config.attention."""
    choice, mask = model.config.attention, None
    if choice == 'triton' or choice == 'auto' and device.type == 'cuda':
        try:
            from scans import attention as triton_kernels  # loaded where they may run
        except ImportError:
            if choice == 'triton':
                raise ValueError("attention = 'triton' needs the folder scans/, which is missing: use 'auto'")
        else:
            mask = triton_kernels.make_mask(model, T, device, *args)  # None if they are not chosen
    return make_mask(model, T, device, *args) if mask is None else mask


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.reach = 2 ** 30 if config.window is None else config.window  # past positions a query sees; 2 ** 30: all
        if config.attention == 'triton':
            attention_mask(self, 1, torch.device('meta'))  # raises if the kernels do not implement `sees`
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        self.cross_entropy = CrossEntropy(config.vocab_size, None if config.pad_rows_in_loss else config.n_ids)
        # Initializes every matrix and bias: set other initial values after this loop.
        for name, p in self.named_parameters():
            if config.init == 'torch' and not name.startswith('embed.'):
                continue  # keeps nn.Linear's initialization
            if p.dim() >= 2:  # official SPS code: only the attention output is scaled down with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def sees(self, q, k):
        """Return True where query q attends to key k. Used in training and in decoding."""
        return (k.pos <= q.pos) & (q.pos - k.pos <= self.reach) & (k.pos >= q.doc_start)

    def _run_blocks(self, idx, rope, mask, cache=None):
        """Return the final normalized hidden states. idx: (B, T) -> (B, T, C)."""
        h = self.embed(idx)
        for block in self.blocks:
            h = block(h, rope, mask, cache)
        return self.norm(h)

    def final_hidden(self, idx):
        """Return the inputs of the output head. idx: (B, T) -> (B, T, C)."""
        c, T = self.config, idx.shape[1]
        rope = rope_table(torch.arange(T, device=idx.device), c.head_size, c.rope_theta, c.rope_scaling)
        mask = attention_mask(self, T, idx.device, document_starts(idx, c.eos_id))
        return self._run_blocks(idx, rope, mask)

    def forward(self, idx, targets):
        """Return {'loss', 'nll'}, mean nats per token. idx, targets: (B, T); -1 is ignored."""
        targets = counted_targets(idx, targets, self.config.eos_id)
        rows = (self.final_hidden(idx).flatten(0, 1), targets.flatten())
        total = chunked_loss(self._nll, rows, self.parameters(), self.config.vocab_size)
        loss = total['nll'] / (targets >= 0).sum().clamp(min=1)
        return {'loss': loss, 'nll': loss.detach()}

    def _nll(self, h, targets):
        """Return the summed negative log-likelihood of a chunk. h: (N, C); targets: (N,)."""
        return {'nll': self.cross_entropy(self._logits(h), targets)}

    def _logits(self, h):
        """Return logits over all V rows (eq. 10 before the softmax), for the loss and decoding."""
        return self.head(h)

    def logits(self, idx):
        """Return next-token logits, -inf for padding ids. idx: (B, T) -> (B, T, V)."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        """Return an empty `KVCache` for batch_size rows of up to max_tokens tokens each."""
        return KVCache(self, batch_size, max_tokens, max_call, device, dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache: a prompt, one token, or a draft to verify.

        lengths: (B,) tokens per right-padded row, each >= 1. Returns the logits of each row's last
        token (B, V), or of all tokens (B, n, V). Static shapes and no host sync if n <= max_call.
        """
        h = torch.cat([self._run_blocks(piece.tokens, piece.rope, piece.mask(), cache)
                       for piece in cache.pieces(tokens, lengths)], 1)
        last = cache.end(h)  # for all_positions, too: it finishes the call
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    def flops_per_token(self, T):
        """Return training FLOPs per token at length T: 6 per matrix weight, plus attention."""
        c = self.config
        # 12: 2 products x 2 FLOPs x 3 passes
        attention_flops = 12 * c.n_layer * c.n_head * c.head_size * mean_keys(self.sees, T)
        return 6 * n_matrix_weights(self) + attention_flops
