"""The State-Prediction Separation Transformer and its relatives ("The State-Prediction Separation Hypothesis", arXiv 2607.01218).

A standard Transformer's vectors both predict the next token and are the memory that later tokens read. Here every token x_i is
followed by a learned <predict> token rho_i at the same position: one stream is the memory, the other makes the prediction. The
weights are those of model_standard.py; only who sees whom differs (`METHODS`).

Read `METHODS`, `Block.forward`, then `Model._hidden`, which training, prefill and decoding share. `Cache` says how both streams
are stored; `extend` is all of decoding. The pattern itself, eq. 5, is drawn at the top of attn_kernels.py.

    B  batch        T  positions          C  width, n_embd (d in the paper)     V  vocabulary rows, padded
    L  layers       H  heads, D = C / H   F  feed-forward width, 3 C            n  positions of one `extend` call
    S  streams that are at work: x (0, input) and rho (1, predict) are h[:, 0] and h[:, 1] of h (B, S, T, C), never interleaved
    w  window of the stream that does not persist                               R  slots of its ring
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import (
    attention,
    decode_attention,
    decodes,
    document_starts,
    linear_cross_entropy,
    rms_norm,
    rope_table,
    rotate,
    slot_attention,
    stream_windows,
    two_stream_attention,
    two_stream_visible,
    visible,
)

METHODS = {  # section 4 and 5: (the stream that persists, the stream that emits the logits); the other stream is windowed
    'sps': ('input', 'predict'),  # state in x, prediction in rho
    'two_x_memory': ('both', 'predict'),  # rho is kept too: twice the memory
    'delayed_state': ('predict', 'predict'),  # rho does both jobs, one step after the input
    'reverse_sps': ('predict', 'input'),  # state in rho, prediction in x
}


@dataclass
class Config:
    method: str = 'sps'  # sps, two_x_memory, delayed_state or reverse_sps
    window: int | None = 64  # w: positions of the past that a query sees of the windowed stream; None: all (2x Memory needs None)
    predict_layers: int | None = None  # beyond the paper: rho runs in the top so many layers only, below x sees x as ever; None: in all
    predict_input: str = 'predict'  # rho_i starts from e_predict; beyond the paper, 'token': from e_predict + e_{x_i}
    persistent_window: int | None = None  # for analysis (section 5): limits the persistent stream too; None: no limit
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 3 n_embd (section 4)
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = True  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # keep only each block's input for the backward: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, <predict>, then padding
    n_ids: int = 50257  # real token ids; row n_ids is <predict>
    eos_id: int | None = 50256  # the id that ends a document: attention stops there; None: one endless document

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f'method = {self.method!r}: expected one of {", ".join(METHODS)}')
        if self.predict_input not in ('predict', 'token'):
            raise ValueError(f"predict_input = {self.predict_input!r}: expected 'predict' or 'token'")
        for name in ('n_layer', 'n_head', 'n_embd', 'rope_theta', 'norm_eps', 'init_std'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        for name in ('window', 'persistent_window'):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected 0 or more positions, or None for all')
        if self.method == 'two_x_memory' and self.window is not None:
            raise ValueError(f'window = {self.window} with method = two_x_memory, where both streams persist: set window = None')
        if self.predict_layers is not None and not 1 <= self.predict_layers <= self.n_layer:
            raise ValueError(f'predict_layers = {self.predict_layers}: expected 1 to n_layer = {self.n_layer}, or None for all')
        if self.n_ffn is not None and self.n_ffn < 1:
            raise ValueError(f'n_ffn = {self.n_ffn}: expected at least 1, or None for 3 n_embd')
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd = {self.n_embd} and n_head = {self.n_head}: n_embd / n_head must be an even whole number')
        if self.n_ids >= self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer and <predict>')
        self.n_ffn = self.n_ffn or 3 * self.n_embd

    @property
    def persistent(self):
        return METHODS[self.method][0]

    @property
    def emits(self):
        return METHODS[self.method][1]

    @property
    def windows(self):
        """[window of the x keys, window of the rho keys], None for all."""
        return stream_windows(self.persistent, self.window, self.persistent_window)

    @property
    def first_predict_layer(self):
        return 0 if self.predict_layers is None else self.n_layer - self.predict_layers


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, n_ffn = config.n_embd, config.n_ffn
        self.n_head = config.n_head
        self.attn_norm = RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.ffn_norm = RMSNorm(C, config.norm_eps)
        self.gate_up = nn.Linear(C, 2 * n_ffn, bias=False)
        self.ffn_out = nn.Linear(n_ffn, C, bias=False)

    def forward(self, h, rope, attend, emit=None):
        """h (B, S, T, C) -> the same shape. attend(q, k, v), each (B, S, T, H, D), is the attention, over this window or over a cache;
        rope None: it rotates too.

        With emit, a slice of one stream, only that stream comes out, (B, 1, T, C): the last layer needs of the other its keys and
        values alone.
        """
        qkv = self.qkv(self.attn_norm(h)).unflatten(-1, (3 * self.n_head, -1))  # eq. 7
        qk, v = qkv.tensor_split([2 * self.n_head], -2)
        q, k = (qk if rope is None else rotate(qk, *rope)).chunk(2, -2)
        if emit is not None:
            h, q = h[:, emit], q[:, emit]
        h = h + self.attn_out(attend(q, k, v).flatten(-2))  # eq. 8, 9
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Cache:
    """Keys and values of both streams for up to max_tokens tokens a row, in static shapes.

    A layer has R + max_tokens + 1 slots. The memory of the persistent stream grows up from slot R: position p in slot R + p. The
    ring of the windowed stream lies before it: position p in slot R - 1 - p % R. So what is filled is one stretch around R. The
    ring has w slots, those of the longest run that is written before it is read (after its rollback, the w before it are still
    there), and one for padding. Where both streams persist, the ring is rho's and as long as the memory. The last slot is spare:
    what lands there is never seen. Layers without a rho stream leave its slots empty.
    """

    def __init__(self, config, batch_size, max_tokens, max_run, device, dtype):
        self.max_tokens, self.max_run = max_tokens, max_run
        self.ring_stream = 0 if config.persistent == 'predict' else 1
        self.longest_run = max(max_run, 4)  # longer runs on a cache that is not empty are cut into such pieces; more would cost memory
        self.ring_slots = max_tokens + 1  # R
        if config.window is not None and config.window + self.longest_run < max_tokens:
            self.ring_slots = config.window + self.longest_run + 1
        else:
            self.longest_run = max_tokens  # the ring holds everything
        head_size = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, config.n_head, self.ring_slots + max_tokens + 1, head_size)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        nothing = 2 ** 62  # later than every query
        self.ring_positions = torch.full((batch_size, self.ring_slots + 1), nothing, device=device)  # what each ring slot holds, and a spare
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)  # tokens held by each row
        self.doc_start = torch.zeros(batch_size, max_tokens + 2, device=device, dtype=torch.int64)  # of the token at each position
        self.hidden = torch.zeros(batch_size, max_run, config.n_embd, device=device, dtype=dtype)  # last run, before the head
        self.rope = rope_table(torch.arange(max_tokens + 1, device=device), head_size, config.rope_theta)

    @property
    def nbytes(self):
        return sum(t.nbytes for t in (self.k, self.v, self.ring_positions, self.lengths, self.doc_start, self.hidden, *self.rope))

    def slots(self, positions):
        """Where the keys of tokens at positions (B, n) go: (B, 2, n), of x and of rho. The ring takes the last R of each row."""
        R = self.ring_slots
        memory, ring = R + positions, R - 1 - positions % R
        ring = torch.where(positions > positions[:, -1:] - R, ring, R + self.max_tokens)
        return torch.stack([ring, memory] if self.ring_stream == 0 else [memory, ring], 1)

    def rollback(self, n):
        """Forgets the last n tokens of the last run: n an int, or (B,) int64 with one count a row."""
        self.lengths -= n


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)  # row n_ids is <predict>
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # as the official code: only the attention output is scaled down with depth
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)

    def _hidden(self, idx, rope, attend, streams='both'):
        """idx (B, T) -> the final normalised vectors (B, T, C) of the stream that emits the logits.

        attend(layer, q, k, v) is the attention of a layer. With streams 'input' or 'predict' only that stream runs and comes out.
        """
        c = self.config
        x = self.embed(idx)
        rho = self.embed.weight[c.n_ids].expand_as(x)  # eq. 3: <predict> after every x_i
        if c.predict_input == 'token':
            rho = rho + x
        h = (rho if streams == 'predict' else x).unsqueeze(1)
        emitted = slice(1, 2) if c.emits == 'predict' else slice(0, 1)
        for layer, block in enumerate(self.blocks):
            if layer < c.first_predict_layer and streams == 'predict':
                continue
            if layer == c.first_predict_layer and streams == 'both':
                h = torch.stack([h[:, 0], rho], 1)
            emit = emitted if layer == c.n_layer - 1 and streams == 'both' else None
            here = lambda q, k, v, layer=layer: attend(layer, q, k, v)
            if c.checkpoint_blocks and self.training:
                h = checkpoint(block, h, rope, here, emit, use_reentrant=False)
            else:
                h = block(h, rope, here, emit)
        return self.norm(h[:, 0])

    def _window(self, idx):
        """The final vectors of whole windows, each attended within itself. idx (B, T) -> (B, T, C)."""
        c = self.config
        doc_start = document_starts(idx, c.eos_id)
        rope = rope_table(torch.arange(idx.shape[1], device=idx.device), c.n_embd // c.n_head, c.rope_theta)
        return self._hidden(idx, rope, lambda layer, q, k, v: self._attention(q, k, v, doc_start))

    def _attention(self, q, k, v, doc_start):
        """q, k, v (B, S, T, H, D) of one window; x alone where there is no rho stream, or both, q perhaps of the emitting stream alone."""
        c = self.config
        if k.shape[1] == 1:
            return attention(q[:, 0], k[:, 0], v[:, 0], doc_start, c.windows[0]).unsqueeze(1)
        queries = 'both' if q.shape[1] == 2 else c.emits
        return two_stream_attention(q, k, v, c.persistent, c.window, doc_start, c.persistent_window, queries)

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll'}: mean nats a counted token (eq. 4).

        With documents on, positions whose input is eos do not count: what follows them is another document.
        """
        if self.config.eos_id is not None:
            targets = targets.masked_fill(idx == self.config.eos_id, -1)
        h = self._window(idx)
        loss = linear_cross_entropy(h.flatten(0, 1), self.head.weight, targets.flatten())
        return {'loss': loss, 'nll': loss.detach()}

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self._window(idx))

    def _logits(self, h):
        logits = self.head(h)  # eq. 10, before the softmax
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows of up to max_tokens tokens; runs of up to max_run tokens have static shapes."""
        weight = self.embed.weight
        return Cache(self.config, batch_size, max_tokens, max_run, device or weight.device, dtype or weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a speculative run are this one call. Runs of n <= cache.max_run have static
        shapes and never wait for the device. Raises ValueError if a row has no room left; in a run of n <= max_run on a GPU,
        where looking would mean waiting, keeping within max_tokens is the caller's part.
        """
        B, n = tokens.shape
        if tokens.device.type == 'cpu' or n > cache.max_run:
            longest = int((cache.lengths + (n if lengths is None else lengths)).max())
            if longest > cache.max_tokens:
                raise ValueError(f'a row of {longest} tokens does not fit a cache of max_tokens = {cache.max_tokens}')
        c, rows = self.config, torch.arange(B, device=tokens.device)[:, None]
        run = torch.full_like(cache.lengths, n) if lengths is None else lengths
        end = cache.lengths + run
        positions = (cache.lengths[:, None] + torch.arange(n, device=tokens.device)).minimum(end[:, None])  # padding is all at `end`
        doc_start = self._extend_documents(tokens, cache, rows, positions) if c.eos_id is not None else None
        kept = (run[:, None] - cache.max_run).clamp(min=0) + torch.arange(min(n, cache.max_run), device=tokens.device)
        last = lambda x: None if x is None else x[rows, kept]  # of each row
        if c.persistent == 'input' and c.window == 0 and n > cache.max_run and not all_positions:
            # x reads no rho: the prefill of a standard Transformer, then rho for the last tokens alone
            self._run(tokens, cache, positions, doc_start, 'input')
            h_last = self._run(last(tokens), cache, last(positions), last(doc_start), 'predict')
        else:
            h = self._run(tokens, cache, positions, doc_start)
            h_last = last(h)
        cache.lengths += run
        cache.hidden[:, :kept.shape[1]] = h_last
        return self._logits(h) if all_positions else self._logits(h_last[rows[:, 0], run - 1 - kept[:, 0]])

    def _run(self, tokens, cache, positions, doc_start, streams='both'):
        """The final vectors (B, n, C) of tokens (B, n) at positions (B, n); their keys and values go to the cache."""
        c, R, n, device = self.config, cache.ring_slots, tokens.shape[1], tokens.device
        first = n > cache.max_run and not cache.lengths.any()  # the cache is empty: these tokens see only each other
        if n > cache.longest_run and not first and streams != 'input':  # x alone needs no ring
            pieces = [x.split(cache.longest_run, 1) for x in (tokens, positions)]
            starts = [None] * len(pieces[0]) if doc_start is None else doc_start.split(cache.longest_run, 1)
            return torch.cat([self._run(t, cache, p, d, streams) for t, p, d in zip(*pieces, starts)], 1)
        rows, slots = torch.arange(len(tokens), device=device)[:, None], cache.slots(positions)
        cache.ring_positions[rows, slots[:, cache.ring_stream].clamp(max=R)] = positions
        fused = n <= cache.max_run and streams == 'both' and decodes(cache.k, 2 * n)
        x_see, see = (None, None) if first or fused else self._seen_slots(cache, positions, doc_start)

        def attend(layer, q, k, v):
            x_alone = k.shape[1] == 1 and streams != 'predict'
            stored = slots[:, :1] if x_alone else slots[:, 1:] if k.shape[1] == 1 else slots
            if fused:
                return decode_attention(
                    q, k, v, cache.k[layer], cache.v[layer], cache.rope, positions, stored, doc_start, c.windows,
                    queries='input' if x_alone else 'both' if q.shape[1] == 2 else c.emits, ring_positions=cache.ring_positions,
                    ring_stream=cache.ring_stream, reads='both' if not x_alone else 'ring' if cache.ring_stream == 0 else 'memory')
            cache.k[layer, rows[..., None], :, stored] = k.to(cache.k.dtype)
            cache.v[layer, rows[..., None], :, stored] = v.to(cache.v.dtype)
            if first:
                return self._attention(q, k, v, doc_start)
            read, mask = x_see if x_alone else see
            if not x_alone and q.shape[1] == 1:  # the stream that emits
                mask = mask[:, n:] if c.emits == 'predict' else mask[:, :n]
            return slot_attention(q.flatten(1, 2), cache.k[layer, :, :, read], cache.v[layer, :, :, read], mask).view_as(q)

        rope = None if fused else tuple(table[positions].unsqueeze(1) for table in cache.rope)
        return self._hidden(tokens, rope, attend, streams)

    def _seen_slots(self, cache, positions, doc_start):
        """Two of (slots to read, mask (B, queries, slots)): for x alone over x's slots, and for x and rho, 2n queries, over both.

        On CPU only filled slots are read; elsewhere all, so that shapes are static and nothing waits for the host.
        """
        windows, R, device = self.config.windows, cache.ring_slots, positions.device
        filled = min(cache.max_tokens, int(positions.max())) + 1 if device.type == 'cpu' else cache.max_tokens + 1
        ring, memory = slice(max(0, R - filled), R), slice(R, R + filled)
        in_ring, in_memory = cache.ring_positions[:, ring], torch.arange(filled, device=device)
        x, rho = (in_ring, in_memory) if cache.ring_stream == 0 else (in_memory, in_ring)
        mask = two_stream_visible(positions, x, rho, windows, doc_start)
        if cache.ring_stream == 1:
            mask = mask.roll(in_ring.shape[1], -1)  # in the order of the slots: the ring, then the memory
        x_slots = ring if cache.ring_stream == 0 else memory
        return (x_slots, visible(positions, x, doc_start, windows[0])), (slice(ring.start, memory.stop), mask)

    def _extend_documents(self, tokens, cache, rows, positions):
        """Where each new token's document starts (B, n); the cache learns it for the slot after each of them."""
        ends = tokens == self.config.eos_id
        first = cache.doc_start[rows, cache.lengths[:, None]]
        later = torch.where(ends[:, :-1], positions[:, 1:], 0)
        doc_start = torch.cat([first, later], 1).cummax(1).values
        cache.doc_start[rows, positions + 1] = torch.where(ends, positions + 1, doc_start)
        return doc_start

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in windows of T: 6 a weight used (2 forward, 4 backward), and attention's pairs."""
        c = self.config

        def keys(window):  # of a stream that a query sees, its own position included: mean over the window's queries
            w = T if window is None else min(window + 1, T)
            return w - w * (w - 1) / 2 / T

        x_keys, rho_keys = map(keys, c.windows)
        pairs = {'x': x_keys + rho_keys - 1, 'rho': x_keys + rho_keys}  # x_i does not see rho_i
        emits = 'rho' if c.emits == 'predict' else 'x'
        two_streams = c.n_layer - c.first_predict_layer - 1  # layers, besides the last
        block = sum(p.numel() for p in self.blocks[0].parameters() if p.dim() >= 2)
        used = block * (c.first_predict_layer + 2 * two_streams + 1) + 2 * c.n_embd ** 2 + self.head.weight.numel()
        pairs = c.first_predict_layer * x_keys + two_streams * sum(pairs.values()) + pairs[emits]
        return 6 * used + 12 * c.n_embd * pairs
