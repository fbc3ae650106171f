"""The State-Prediction Separation Transformer and its relatives.

"The State-Prediction Separation Hypothesis", arXiv 2607.01218.

A standard Transformer's vectors both predict the next token and are the memory that later tokens read. Here every token
x_i is followed by a learned <predict> token rho_i at the same position. In SPS itself the stream of x is the memory and
that of rho makes the prediction. The weights are those of model_standard.py; only who sees whom differs (`METHODS`).

    x_1 rho_1  x_2 rho_2  ...  x_T rho_T, every rho_i = <predict>          eq. 3  `Model._run_blocks`
    loss = mean over i of -log p(x_{i+1} | x_1, rho_1, ..., x_i, rho_i)    eq. 4  `Model.forward`, at rho alone
    x_i   sees x_k for k <= i, and rho_k for i - w <= k < i                eq. 5  `Model.sees`
    rho_i sees x_k for k <= i, and rho_k for i - w <= k <= i

          k  x: 0 1 2 3 4 5   rho: 0 1 2 3 4 5
        i 0     #                  o                 '#' both x_i and rho_i see it
          1     # #                # o               'o' rho_i alone
          2     # # #              # # o             w = 2
          3     # # # #            . # # o
          4     # # # # #          . . # # o
          5     # # # # # #        . . . # # o

Read `METHODS`, `Model.sees`, `Model._run_blocks` and `Block.forward`. `extend` is all of decoding: the same blocks over
a cache.

    B  batch        T  positions          C  width, n_embd (d in the paper)     V  vocabulary rows, padded
    L  layers       H  heads of size D    F  feed-forward width, 3 C            n  positions of one `extend` call
    HK key and value heads
    h  vectors of both streams as one sequence [x | rho] (B, 2 T, C), x (stream 0) before rho (stream 1). The paper
       interleaves them; kept apart, the same attention takes less work
    w  window of the stream that does not persist
"""
from dataclasses import dataclass
from typing import Literal

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

X, RHO, BOTH = (0,), (1,), (0, 1)  # streams
METHODS = {  # sections 4 and 5: (persistent streams, output stream); a stream that does not persist is windowed
    'sps': (X, RHO),  # state in x, prediction in rho
    'two_x_memory': (BOTH, RHO),  # rho is kept too: twice the memory
    'delayed_state': (RHO, RHO),  # rho does both jobs, one step after the input
    'reverse_sps': (RHO, X),  # state in rho, prediction in x
}


@dataclass
class Config:
    method: Literal['sps', 'two_x_memory', 'delayed_state', 'reverse_sps'] = 'sps'  # who sees whom: `METHODS`
    window: int | None = 64  # w: past positions that a query sees of the windowed stream; None: all, as 2x Memory needs
    predict_layers: int | None = None  # beyond the paper: rho in the top n layers only, x alone below; None: in all
    predict_input: Literal['predict', 'token', 'state'] = 'predict'  # how rho_i starts: `_first_rho`
    persistent_window: int | None = None  # omega of section 5's analysis: limits the persistent streams too; None: none
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_kv_head: int | None = None  # key and value heads, HK, each read by H / HK query heads; None: n_head
    head_size: int | None = None  # D; None: n_embd / n_head
    qkv_bias: bool = False  # biases of queries, keys and values, as in Qwen2
    qk_norm: bool = False  # an RMSNorm of each head's query and key before the rotation, as in Qwen3
    n_ffn: int | None = None  # feed-forward width, F; None: 3 n_embd (SPS paper, section 4)
    attention: Literal['auto', 'triton'] = 'auto'  # triton: the hand-written kernels, on a GPU
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_scaling: str | None = None  # Llama 3's 'factor,low,high,tokens', such as '8,1,4,8192'; None: none
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm (official SPS code)
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = True  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, <predict>, then padding
    n_ids: int = 50257  # real token ids; row n_ids is <predict>
    pad_rows_in_loss: bool = True  # the padding takes part in the training softmax, as in the official code
    eos_id: int | None = 50256  # the id that ends a document, at which attention stops; None: one endless document

    def __post_init__(self):
        check_shape(self)
        self.n_ffn = self.n_ffn or 3 * self.n_embd
        if self.n_ids >= self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer '
                             'and <predict>')
        if METHODS[self.method][0] == BOTH and self.window is not None:
            raise ValueError(f'window = {self.window} with method = {self.method}, in which both streams persist: '
                             'set window = None')
        if not 1 <= (self.predict_layers or self.n_layer) <= self.n_layer:
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
        """h: (B, S T, C) of S streams -> (B, n_q, C), its part `queries`, a slice: in the last layer, one stream.

        rope: cos and sin of the positions; mask: who sees whom, of this layer; cache: that of a decoding step.
        """
        heads = [self.n_head, self.n_kv_head, self.n_kv_head]
        q, k, v = self.qkv(self.attn_norm(h)).unflatten(-1, (-1, self.head_size)).split(heads, 2)  # eq. 7
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)  # R_i of eq. 8
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        h = h[:, queries] + self.attn_out(attention(q[:, queries], k, v, mask).flatten(2))  # eq. 8, 9
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        persistent, self.output = METHODS[config.method]
        windows = [config.persistent_window if stream in persistent else config.window for stream in BOTH]
        self.w_x, self.w_rho = (2 ** 30 if w is None else w for w in windows)  # how far back each stream is seen
        self.n_x_layers = config.n_layer - (config.predict_layers or config.n_layer)  # bottom layers with x alone
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)  # E; row n_ids is <predict>
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        # This sets every matrix and bias: initialise anything that should start differently after it.
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # official SPS code: only the attention output is scaled down with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def sees(self, q, k):
        """Eq. 5: does the query q see the key k? Edit it, and the edit trains and decodes.

        Within a step x_i comes before rho_i. A query sees its own step and w past ones; in Delayed State too, where the
        paper counts w entries.
        """
        earlier = (k.pos < q.pos) | ((k.pos == q.pos) & (k.stream <= q.stream))
        reach = torch.where(k.stream == 0, self.w_x, self.w_rho)
        return earlier & (q.pos - k.pos <= reach) & (k.pos >= q.doc_start)

    def streams(self, layer):
        """The (key streams, query streams) of a layer: x alone at the bottom, the output's queries alone at the top."""
        keys = X if layer < self.n_x_layers else BOTH
        return keys, self.output if layer == self.config.n_layer - 1 else keys

    def _run_blocks(self, idx, rope, masks, cache=None):
        """idx: (B, T) -> the final normalised vectors (B, T, C) of the output stream.

        rope: cos and sin of both streams, one after the other; masks: {streams of a layer: mask}.
        """
        T, x = idx.shape[1], self.embed(idx)
        h = x
        for layer, block in enumerate(self.blocks):
            if layer == self.n_x_layers:
                h = torch.cat([h, self._first_rho(x, h)], 1)
            keys, queries = self.streams(layer)
            asking = slice(T * queries[0], T * (queries[-1] + 1))
            h = block(h, [table[..., :len(keys) * T, :, :] for table in rope], masks[keys, queries], asking, cache)
        return self.norm(h)

    def _first_rho(self, x, h):
        """How the rho stream starts (B, T, C): as <predict> (eq. 3); beyond the paper, plus x or what x has become."""
        rho = self.embed.weight[self.config.n_ids].expand_as(x)
        return {'predict': rho, 'token': rho + x, 'state': rho + h}[self.config.predict_input]

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx: (B, T) -> (B, T, C)."""
        c, T = self.config, idx.shape[1]
        rope = rope_table(torch.arange(T, device=idx.device).repeat(2), c.head_size, c.rope_theta, c.rope_scaling)
        doc_start = document_starts(idx, c.eos_id)
        masks = {}
        for keys, queries in dict.fromkeys(map(self.streams, range(c.n_layer))):
            reaches = [self.w_x, self.w_rho] if c.attention == 'triton' else None
            masks[keys, queries] = make_mask(self.sees, T, c.head_size, idx.device, doc_start, keys, queries, reaches)
        return self._run_blocks(idx, rope, masks)

    def forward(self, idx, targets):
        """idx, targets: (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats per counted token (eq. 4).

        With documents on, positions whose input is eos do not count: the token after them starts another document.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        rows = self.final_hidden(idx).flatten(0, 1), targets.flatten()
        total, = chunked_loss(self._nll, rows, self.parameters(), self.config.vocab_size)
        loss = total / (targets >= 0).sum().clamp(min=1)
        return {'loss': loss, 'nll': loss.detach()}

    def _nll(self, h, targets):
        """Summed negative log-likelihood, without holding the logits of all positions. h: (N, C), targets: (N,)."""
        logits = at_least_fp32(self._logits(h))
        if not self.config.pad_rows_in_loss:
            mask_padding(logits, self.config.n_ids)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum'),

    def _logits(self, h):
        """Logits of all V rows (eq. 10, before the softmax). An edit here changes the loss and decoding alike."""
        return self.head(h)

    def logits(self, idx):
        """Next-token logits at every position. idx: (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def adopt(self, tensors):
        """Named weights of a model_standard run. An empty row of <predict> gets a random vector."""
        embed, n_ids = tensors['embed.weight'].clone(), self.config.n_ids
        if not embed[n_ids:n_ids + 1].any():
            embed[n_ids:n_ids + 1].normal_(std=embed[:n_ids].std().item())
        return tensors | {'embed.weight': embed}

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache of batch_size rows of up to max_tokens tokens; calls of up to max_run have static shapes."""
        return KVCache(self, batch_size, max_tokens, max_run, device, dtype, n_streams=2)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n), right-padded to lengths (B,) >= 1 if given: a prompt, a token, or a draft to verify.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions. Calls of
        n <= cache.max_run have static shapes and never wait for the device.
        """
        pairs = dict.fromkeys(map(self.streams, range(self.config.n_layer)))
        h = torch.cat([self._run_blocks(run.tokens, run.rope, {pair: run.mask(*pair) for pair in pairs}, cache)
                       for run in cache.runs(tokens, lengths)], 1)
        last = cache.end(h)
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in sequences of T: weights (2 forward, 4 backward), and attention."""
        c, C = self.config, self.config.n_embd

        def mean_keys(reach):  # that a query sees of a stream, its own position included
            n_keys = min(reach + 1, T)
            return n_keys - n_keys * (n_keys - 1) / 2 / T

        x_keys, rho_keys = mean_keys(self.w_x), mean_keys(self.w_rho)
        pairs = {X: x_keys + rho_keys - 1, RHO: x_keys + rho_keys}  # x_i does not see rho_i
        n_both = c.n_layer - self.n_x_layers - 1  # layers with queries of both streams: all but the last
        total_pairs = self.n_x_layers * x_keys + n_both * (pairs[X] + pairs[RHO]) + pairs[self.output]
        used = n_matrix_weights(self) + n_matrix_weights(self.blocks[self.n_x_layers:-1])  # these serve both streams
        used += 2 * C * c.n_kv_head * c.head_size  # keys and values of the other stream in the last layer
        return 6 * used + 12 * c.n_head * c.head_size * total_pairs
