"""The State-Prediction Separation Transformer and its relatives.

"The State-Prediction Separation Hypothesis", arXiv 2607.01218.

A standard Transformer's vectors both predict the next token and are the memory that later tokens read. Here every token
x_i is followed by a learned <predict> token rho_i at the same position. In SPS itself the stream of x is the memory and
that of rho makes the prediction. The weights are those of model_standard.py; only who sees whom differs (`METHODS`).

    x_1 rho_1  x_2 rho_2  ...  x_T rho_T, every rho_i = <predict>          eq. 3  `_run_blocks`
    loss = mean over i of -log p(x_{i+1} | x_1, rho_1, ..., x_i, rho_i)    eq. 4  `forward`, at rho alone
    x_i   sees x_k for k <= i, and rho_k for i - w <= k < i                eq. 5  `two_stream_visible`
    rho_i sees x_k for k <= i, and rho_k for i - w <= k <= i

Eq. 5 is that of SPS; `METHODS` has the others. To change who sees whom, edit `two_stream_visible` in attn_kernels.py:
it trains and decodes, slower where a fast form does not follow.

Read `METHODS`, `Block.forward`, then `Model._run_blocks`, shared by training, prefill and decoding. `extend` is all of
decoding. The pattern of eq. 5 is drawn at the top of attn_kernels.py; `KVCache` there says how both streams are stored.

    B  batch        T  positions          C  width, n_embd (d in the paper)     V  vocabulary rows, padded
    L  layers       H  heads of size D    F  feed-forward width, 3 C            n  positions of one `extend` call
    HK key and value heads
    S  active streams: x (0, input) and rho (1, predict) are h[:, 0] and h[:, 1] of h (B, S, T, C). The paper
       interleaves them; kept apart they see the same keys with less work
    w  window of the stream that does not persist
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from attn_kernels import (
    KVCache,
    checkpointed,
    document_starts,
    linear_cross_entropy,
    parse_rope_scaling,
    rms_norm,
    rope_table,
    rotate,
    stream_windows,
    two_stream_attention,
)

METHODS = {  # sections 4 and 5: (persistent stream, output stream); a stream that does not persist is windowed
    'sps': ('input', 'predict'),  # state in x, prediction in rho
    'two_x_memory': ('both', 'predict'),  # rho is kept too: twice the memory
    'delayed_state': ('predict', 'predict'),  # rho does both jobs, one step after the input
    'reverse_sps': ('predict', 'input'),  # state in rho, prediction in x
}


@dataclass
class Config:
    method: str = 'sps'  # sps, two_x_memory, delayed_state or reverse_sps
    window: int | None = 64  # w: past positions that a query sees of the windowed stream; None: all, as 2x Memory needs
    predict_layers: int | None = None  # beyond the paper: rho in the top n layers only, x alone below; None: in all
    predict_input: str = 'predict'  # rho_i starts as <predict> (eq. 3); beyond the paper: token, state (`_run_blocks`)
    persistent_window: int | None = None  # omega of section 5's analysis: limits the persistent stream too; None: none
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_kv_head: int | None = None  # key and value heads, HK, each read by H / HK query heads; None: n_head
    head_size: int | None = None  # D; None: n_embd / n_head
    qkv_bias: bool = False  # biases of queries, keys and values, as Qwen2 has them
    qk_norm: bool = False  # an RMSNorm of each head's query and key before they are rotated, as Qwen3 has it
    n_ffn: int | None = None  # feed-forward width, F; None: 3 n_embd (section 4)
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_scaling: str | None = None  # Llama 3's 'factor,low,high,tokens', as '8,1,4,8192'; None: none
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm (official code)
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = True  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # keep only each block's input for the backward: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, <predict>, then padding
    n_ids: int = 50257  # real token ids; row n_ids is <predict>
    pad_rows_in_loss: bool = True  # the padding takes part in training's softmax, as in the official code
    eos_id: int | None = 50256  # the id that ends a document: attention stops there; None: one endless document

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f'method = {self.method!r}: expected one of {", ".join(METHODS)}')
        if self.predict_input not in ('predict', 'token', 'state'):
            raise ValueError(f"predict_input = {self.predict_input!r}: expected 'predict', 'token' or 'state'")
        for name in ('n_layer', 'n_head', 'n_embd', 'n_ids', 'rope_theta', 'norm_eps', 'init_std'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.n_layer > 1000:
            raise ValueError(f'n_layer = {self.n_layer}: expected at most 1000')
        for name in ('window', 'persistent_window'):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected 0 or more positions, or None for all')
        if self.persistent == 'both' and self.window is not None:
            raise ValueError(f'window = {self.window} with method = {self.method}, where both streams persist: '
                             'set window = None')
        if self.predict_layers is not None and not 1 <= self.predict_layers <= self.n_layer:
            raise ValueError(f'predict_layers = {self.predict_layers}: expected 1 to n_layer = {self.n_layer}, '
                             'or None for all')
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
        if self.n_ids >= self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer '
                             'and <predict>')
        if self.eos_id is not None and not 0 <= self.eos_id < self.n_ids:
            raise ValueError(f'eos_id = {self.eos_id}: expected one of the {self.n_ids} ids of the tokenizer, or None')
        self.n_ffn = self.n_ffn or 3 * self.n_embd

    @property
    def persistent(self):
        return METHODS[self.method][0]

    @property
    def output_stream(self):
        return METHODS[self.method][1]

    @property
    def windows(self):
        """[window of the x keys, window of the rho keys], None for all: the limits of eq. 5, of SPS [None, w].

        A query sees its own step and w past ones: in Delayed State too, where the paper counts w entries.
        """
        return stream_windows(self.persistent, self.window, self.persistent_window)

    @property
    def first_predict_layer(self):
        return 0 if self.predict_layers is None else self.n_layer - self.predict_layers


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
    def forward(self, h, rotate, attend, streams, queries):
        """h (B, S, T, C) of `streams`: 'both', 'input' or 'predict' -> the same of `queries`, in the last layer fewer.

        rotate(qk) rotates queries and keys (B, S, T, H + HK, D) by their positions (RoPE). attend(layer, q, k, v,
        streams, queries) is the attention, over the whole sequence in training and over a cache in decoding: k, v
        (B, S, T, HK, D) of `streams`, q and the result (B, S, T, H, D) of `queries`. It takes q and k as they come from
        rotate: on a GPU decoding rotates them in its kernel.
        """
        H, HK = self.n_head, self.n_kv_head
        qkv = self.qkv(self.attn_norm(h)).unflatten(-1, (H + 2 * HK, self.head_size))  # eq. 7
        qk, v = qkv.split([H + HK, HK], -2)
        if self.q_norm is not None:
            q, k = qk.split([H, HK], -2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], -2)
        q, k = rotate(qk).split([H, HK], -2)  # R_i of eq. 8
        if queries != streams:  # the last layer: of the other stream it uses keys and values alone
            asking = slice(0, 1) if queries == 'input' else slice(1, 2)
            h, q = h[:, asking], q[:, asking]
        h = h + self.attn_out(attend(self.layer, q, k, v, streams, queries).flatten(-2))  # eq. 8, 9
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)  # E; row n_ids is <predict>
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        # This sets every matrix and bias: what is to start otherwise is set after it.
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # as the official code: only the attention output is scaled down with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def _run_blocks(self, idx, rotate, attend, streams='both'):
        """idx (B, T) -> the final normalised vectors (B, T, C) of the output stream. rotate, attend as in `Block`.

        With streams 'input' or 'predict' only that stream's: 'input' runs x alone through all layers; 'predict' runs x
        alone through those below first_predict_layer and rho alone from there on, beside x's keys in the cache.
        """
        c = self.config
        x = self.embed(idx)
        h, active = x.unsqueeze(1), 'input'  # rho joins x at first_predict_layer
        for layer, block in enumerate(self.blocks):
            if layer == c.first_predict_layer and streams != 'input':
                rho = self.embed.weight[c.n_ids].expand_as(x)  # eq. 3: <predict> after every x_i
                if c.predict_input != 'predict':
                    rho = rho + (x if c.predict_input == 'token' else h[:, 0])
                h = torch.stack([rho] if streams == 'predict' else [h[:, 0], rho], 1)
                active = streams
            queries = c.output_stream if active == 'both' and layer == c.n_layer - 1 else active
            h = block(h, rotate, attend, active, queries)
        return self.norm(h[:, 0])

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx (B, T) -> (B, T, C)."""
        c = self.config
        doc_start = document_starts(idx, c.eos_id)
        cos, sin = rope_table(torch.arange(idx.shape[1], device=idx.device), c.head_size, c.rope_theta, c.rope_scaling)

        def attend(layer, q, k, v, streams, queries):
            return two_stream_attention(q, k, v, c.windows, doc_start, queries)  # eq. 5
        return self._run_blocks(idx, lambda qk: rotate(qk, cos, sin), attend)

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats per counted token (eq. 4).

        With documents on, positions whose input is eos do not count: what follows them is another document.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        h = self.final_hidden(idx)
        # linear_cross_entropy makes logits in parts: all (B, T, V) would not fit
        weight = self.head.weight if self.config.pad_rows_in_loss else self.head.weight[:self.config.n_ids]
        loss = linear_cross_entropy(h.flatten(0, 1), weight, targets.flatten())
        return {'loss': loss, 'nll': loss.detach()}

    def adopt(self, tensors):
        """Named weights of a model_standard run; where the row of <predict> is empty, it gets a random vector."""
        embed, n_ids = tensors.get('embed.weight'), self.config.n_ids
        if embed is None or len(embed) <= n_ids or embed[n_ids].any():
            return tensors  # if they do not fit, loading them says so
        embed = embed.clone()
        embed[n_ids].normal_(std=embed[:n_ids].std().item())
        return {**tensors, 'embed.weight': embed}

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self.final_hidden(idx))

    def _logits(self, h):
        # Training's loss does not pass here, so that it holds no logits: edit `forward` too.
        logits = self.head(h)  # eq. 10, before the softmax
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache of batch_size rows of up to max_tokens tokens; calls of up to max_run have static shapes.

        The stream that does not persist is in a ring; where both do (2x Memory), it is rho's and as long as the memory.
        Layers without a rho stream leave its slots empty.
        """
        c, weight = self.config, self.embed.weight
        return KVCache(c.n_layer, c.n_kv_head, c.head_size, batch_size, max_tokens, max_run, c.n_embd, c.windows,
                       ring_stream=0 if c.persistent == 'predict' else 1, rope_theta=c.rope_theta,
                       rope_scaling=c.rope_scaling, eos_id=c.eos_id, device=device or weight.device,
                       dtype=dtype or weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a draft are this one call. Calls of n <= cache.max_run have
        static shapes and never wait for the device. Raises ValueError if a row has no room left (`KVCache.begin`).
        """
        c, n, place = self.config, tokens.shape[1], cache.begin(tokens, lengths)
        x_alone = (c.persistent, c.output_stream, c.window) == ('input', 'predict', 0)  # x reads no rho
        if x_alone and n > cache.max_run and not all_positions:
            # The prefill of a standard Transformer, then rho for the last max_run tokens alone: `cache.hidden` keeps
            # theirs, and nothing later reads another rho.
            self._read(tokens, cache, place, 'input')
            tail = cache.batch_idx, place.tail_idx
            h = self._read(tokens[tail], cache, place[tail], 'predict')
        elif n <= cache.piece_len or place.is_prefill:
            h = self._read(tokens, cache, place)
        else:  # the ring has no room for more at a time
            parts = [slice(a, a + cache.piece_len) for a in range(0, n, cache.piece_len)]
            h = torch.cat([self._read(tokens[:, part], cache, place[:, part]) for part in parts], 1)
        last = cache.end(place, h)
        return self._logits(h if all_positions else last)

    def _read(self, tokens, cache, place, streams='both'):
        """The final vectors (B, n, C) of tokens (B, n); the cache takes their keys and values."""
        return self._run_blocks(tokens, place.rotate, lambda *args: cache.attend(place, *args), streams)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in sequences of T: weights (2 forward, 4 backward), and attention."""
        c = self.config

        def keys(window):  # of a stream that a query sees, its own position included: mean over the sequence
            n_keys = T if window is None else min(window + 1, T)
            return n_keys - n_keys * (n_keys - 1) / 2 / T

        def n_weights(module):  # of matrices; an embedding looks up
            return sum(p.numel() for part in module.modules() if not isinstance(part, nn.Embedding)
                       for p in part.parameters(recurse=False) if p.dim() >= 2)

        x_keys, rho_keys = map(keys, c.windows)
        x_pairs, rho_pairs = x_keys + rho_keys - 1, x_keys + rho_keys  # x_i does not see rho_i
        last_pairs = rho_pairs if c.output_stream == 'predict' else x_pairs
        two_streams = c.n_layer - c.first_predict_layer - 1  # layers, besides the last
        used = n_weights(self) + n_weights(self.blocks[c.first_predict_layer:-1])  # these are used by both streams
        # in the last layer, keys and values of the stream that is not the output
        used += 2 * c.n_embd * c.n_kv_head * c.head_size
        total_pairs = c.first_predict_layer * x_keys + two_streams * (x_pairs + rho_pairs) + last_pairs
        return 6 * used + 12 * c.n_head * c.head_size * total_pairs
