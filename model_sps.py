"""The State-Prediction Separation Transformer (SPS) and the paper's other two-stream models.

"The State-Prediction Separation Hypothesis", arXiv 2607.01218.

In a standard Transformer, each hidden state both predicts the next token and serves as memory for
later tokens. SPS gives each job its own stream: after every token x_i comes a learned <predict>
token rho_i at the same position, the x stream is the memory, and the rho stream predicts. Weights
are those of model_standard.py; the methods differ only in their attention pattern (`METHODS`).

    x_1 rho_1  x_2 rho_2  ...  x_T rho_T, every rho_i = <predict>         eq. 3  `Model._run_blocks`
    loss = mean over i of -log p(x_{i+1} | x_1, rho_1, ..., x_i, rho_i)   eq. 4  `Model.forward`
    x_i   sees x_k for k <= i, and rho_k for i - w <= k < i               eq. 5  `Model.sees`
    rho_i sees x_k for k <= i, and rho_k for i - w <= k <= i

          k  x: 0 1 2 3 4 5   rho: 0 1 2 3 4 5
        i 0     #                  o                 '#' seen by both x_i and rho_i
          1     # #                # o               'o' seen by rho_i only
          2     # # #              # # o             w = 2
          3     # # # #            . # # o
          4     # # # # #          . . # # o
          5     # # # # # #        . . . # # o

Read `METHODS`, `Model.sees`, `Model._run_blocks` and `Block.forward`; for decoding, `extend`.

    B  batch size   T  positions          C  width, n_embd (d in the paper)   V  vocabulary, padded
    L  layers       H  heads of size D    F  feed-forward width, 3 C          n  tokens per `extend`
    HK key and value heads                w  window of the stream that is not persistent
    h  hidden states of both streams as one sequence [x | rho]: (B, 2 T, C), x is stream 0 and rho 1
       (the paper interleaves them; in this order, the same attention takes less work)
"""
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import (CrossEntropy, KVCache, attention, check_shape, checkpointed, chunked_loss, counted_targets,
                          document_starts, make_mask, mask_padding, mean_keys, n_matrix_weights, outside_graphs,
                          rope_table, rotate)

X, RHO, BOTH = (0,), (1,), (0, 1)  # streams
METHODS = {  # sections 4 and 5: (persistent streams, output stream); the other stream is windowed
    'sps': (X, RHO),  # x is the memory; rho predicts, and is seen only w back
    'two_x_memory': (BOTH, RHO),  # both are the memory, twice the size; rho predicts
    'delayed_state': (RHO, RHO),  # rho is the memory and predicts, one step after x; x is seen only w back
    'reverse_sps': (RHO, X),  # rho is the memory; x predicts, and is seen only w back
}


@dataclass
class Config:
    # for train.py and analyses: docs/own_model.md
    may_change = 'attention', 'checkpoint_blocks'  # settings that only affect speed and memory
    own = 'window',  # means the windowed stream here: --init_from copies it only between models that list it in `own`
    state_window = 'persistent_window'  # setting that limits how much of the state is seen, for analyses

    method: Literal['sps', 'two_x_memory', 'delayed_state', 'reverse_sps'] = 'sps'  # method of the paper, see `METHODS`
    window: int | None = 64  # w: past positions of the windowed stream that a query sees; None: all (2x Memory)
    predict_layers: int | None = None  # beyond the paper: run rho in the top n layers only; None: in all layers
    predict_input: Literal['predict', 'token', 'state'] = 'predict'  # first rho: <predict>; token: + x; state: + h
    persistent_window: int | None = None  # omega in section 5: a window on the persistent streams, too; None: off
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 3 n_embd (SPS paper, section 4)
    attention: Literal['auto', 'flex', 'triton'] = 'auto'  # on a GPU. auto: the fastest that implements `sees`
    rope_theta: float = 10000.0  # base of the RoPE frequencies
    norm_eps: float = 1e-6  # epsilon of RMSNorm (official SPS code)
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = True  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: token ids, <predict>, then padding
    n_ids: int = 50257  # number of token ids; row n_ids is <predict>
    pad_rows_in_loss: bool = True  # include padding rows in the training softmax, as in the official code
    eos_id: int | None = 50256  # end-of-document id: attention does not cross it; None: one document
    # For the weights of pretrained models (docs/pretrained.md):
    n_kv_head: int | None = None  # key and value heads, HK; each serves H / HK query heads; None: n_head
    head_size: int | None = None  # D; None: n_embd / n_head
    qkv_bias: bool = False  # biases on queries, keys and values, as in Qwen2
    qk_norm: bool = False  # RMSNorm on each head's query and key, before RoPE, as in Qwen3
    rope_scaling: tuple[float, ...] | None = None  # Llama 3's RoPE scaling: factor, low, high, tokens (8,1,4,8192)

    def __post_init__(self):
        check_shape(self, window=0, persistent_window=0, predict_layers=1)  # sets head_size and n_kv_head
        self.n_ffn = self.n_ffn or 3 * self.n_embd
        if self.n_ids >= self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for {self.n_ids} token ids and <predict>')
        if METHODS[self.method][0] == BOTH and self.window is not None:
            raise ValueError(f'window = {self.window}: {self.method} has no windowed stream, so set window = None')
        if (self.predict_layers or 1) > self.n_layer:
            raise ValueError(f'predict_layers = {self.predict_layers}: expected 1 to n_layer = {self.n_layer}, or None')


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
    def forward(self, h, rope, mask, queries, cache=None):
        """Apply the block. h: (B, S T, C), S streams -> h[:, queries]: (B, n_q, C).

        queries: slice of positions to compute, one stream in the last layer; rope: cos, sin; mask:
        this layer's attention mask; cache: only in decoding.
        """
        n_heads = [self.n_head, self.n_kv_head, self.n_kv_head]
        q, k, v = self.qkv(self.attn_norm(h)).unflatten(-1, (-1, self.head_size)).split(n_heads, 2)  # eq. 7
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)  # R_i of eq. 8
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        h = h[:, queries] + self.attn_out(attention(q[:, queries], k, v, mask).flatten(2))  # eq. 8, 9
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
        persistent, self.output = METHODS[config.method]
        windows = [config.persistent_window if stream in persistent else config.window for stream in BOTH]
        self.w_x, self.w_rho = (2 ** 30 if w is None else w for w in windows)  # how far back queries see each stream
        if config.attention == 'triton':
            attention_mask(self, 1, torch.device('meta'))  # raises if the kernels do not implement `sees`
        self.n_x_layers = config.n_layer - (config.predict_layers or config.n_layer)  # bottom layers with x alone
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)  # E; row n_ids is <predict>
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        self.cross_entropy = CrossEntropy(config.vocab_size, None if config.pad_rows_in_loss else config.n_ids)
        # Initializes every matrix and bias: set other initial values after this loop.
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # official SPS code: only the attention output is scaled down with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def sees(self, q, k):
        """Return True where query q attends to key k (eq. 5). Used in training and in decoding.

        At the same position, x_i comes before rho_i. A query sees its own position and w past ones.
        In Delayed State, the paper's w may include the own position: then it is `window` + 1.
        """
        earlier = (k.pos < q.pos) | ((k.pos == q.pos) & (k.stream <= q.stream))
        reach = torch.where(k.stream == 0, self.w_x, self.w_rho)
        return earlier & (q.pos - k.pos <= reach) & (k.pos >= q.doc_start)

    def stream_pair(self, layer):
        """Return a layer's (key streams, query streams). The last layer queries the output only."""
        keys = X if layer < self.n_x_layers else BOTH
        queries = self.output if layer == self.config.n_layer - 1 else keys
        return keys, queries

    def stream_pairs(self):  # of all layers, an ordered set: each pair needs a mask
        return dict.fromkeys(map(self.stream_pair, range(self.config.n_layer)))

    def _run_blocks(self, idx, rope, masks, cache=None):
        """Return the final normalized hidden states of the output stream. idx: (B, T) -> (B, T, C).

        rope: cos, sin for the positions of [x | rho]; masks: {stream pair of a layer: mask}.
        """
        T, x = idx.shape[1], self.embed(idx)
        h = x
        for layer, block in enumerate(self.blocks):
            if layer == self.n_x_layers:
                h = torch.cat([h, self._first_rho(x, h)], 1)
            keys, queries = self.stream_pair(layer)
            positions = slice(T * queries[0], T * (queries[-1] + 1))  # of the query streams in [x | rho]
            layer_rope = [table[..., :len(keys) * T, :, :] for table in rope]  # x's part if rho does not run yet
            h = block(h, layer_rope, masks[keys, queries], positions, cache)
        return self.norm(h)

    def _first_rho(self, x, h):
        """Return the first rho (B, T, C): <predict> (eq. 3); beyond the paper, + x or + h below."""
        rho = self.embed(torch.full((1, 1), self.config.n_ids, device=x.device)).expand_as(x)
        return rho + {'predict': 0, 'token': x, 'state': h}[self.config.predict_input]

    def final_hidden(self, idx):
        """Return the inputs of the output head. idx: (B, T) -> (B, T, C)."""
        c, T = self.config, idx.shape[1]
        rope = rope_table(torch.arange(T, device=idx.device).repeat(2), c.head_size, c.rope_theta, c.rope_scaling)
        doc_start = document_starts(idx, c.eos_id)
        masks = {pair: attention_mask(self, T, idx.device, doc_start, *pair) for pair in self.stream_pairs()}
        return self._run_blocks(idx, rope, masks)

    def forward(self, idx, targets):
        """Return {'loss', 'nll'}, nats per token (eq. 4). idx, targets: (B, T); -1 is ignored."""
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

    def adopt(self, tensors):
        """Return a model_standard run's weights for this model; a zero <predict> row is redrawn."""
        embed, n_ids = tensors['embed.weight'].clone(), self.config.n_ids
        if not embed[n_ids:n_ids + 1].any():  # imported from Hugging Face: rows after the ids are filled with 0
            embed[n_ids:n_ids + 1].normal_(std=embed[:n_ids].std().item())
        return tensors | {'embed.weight': embed}

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        """Return an empty `KVCache` for batch_size rows of up to max_tokens tokens each."""
        return KVCache(self, batch_size, max_tokens, max_call, device, dtype, n_streams=2)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache: a prompt, one token, or a draft to verify.

        lengths: (B,) tokens per right-padded row, each >= 1. Returns the logits of each row's last
        token (B, V), or of all tokens (B, n, V). Static shapes and no host sync if n <= max_call.
        """
        h = torch.cat([self._run_blocks(piece.tokens, piece.rope,
                                        {pair: piece.mask(*pair) for pair in self.stream_pairs()}, cache)
                       for piece in cache.pieces(tokens, lengths)], 1)
        last = cache.end(h)  # for all_positions, too: it finishes the call
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    def flops_per_token(self, T):
        """Return training FLOPs per token at length T: 6 per matrix weight, plus attention."""
        c = self.config
        patterns = self.sees if isinstance(self.sees, list) else [self.sees] * c.n_layer  # a list: one for each layer
        layers = Counter(zip(patterns, map(self.stream_pair, range(c.n_layer))))
        keys = sum(n * mean_keys(sees, T, *pair) for (sees, pair), n in layers.items())
        used = n_matrix_weights(self) + n_matrix_weights(self.blocks[self.n_x_layers:-1])  # again, for the 2nd stream
        used += 2 * c.n_embd * c.n_kv_head * c.head_size  # keys and values of the other stream in the last layer
        return 6 * used + 12 * c.n_head * c.head_size * keys  # 12: 2 products x 2 FLOPs x 3 passes
