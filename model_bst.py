"""The Belief State Transformer ("The Belief State Transformer", Hu et al., ICLR 2025), a baseline of NextLat.

Two Transformers read a sequence from its two ends. From each prefix and each later suffix, a text head predicts the
token that follows the prefix and the token that precedes the suffix. So the prefix's vector must tell of the whole
future, not only of the next token. To generate, the suffix is empty: the backward encoder does not run.

A pair is named (p, q) after the two tokens that it predicts, x_p and x_q:

    x_0 ... x_{p-1} | x_p ... x_q | x_{q+1} ... x_T         p = t and q = t + k - 2, as papers count from x_1
    prefix, f_{p-1}   hidden        suffix, b_{q+1}

    h(p, q) = text_out(GELU(text_f(f_{p-1}) + text_b(b_{q+1})))                                     `_text_state`
    loss = mean of -log softmax(head(h(p, q)))[x_p]  +  mean of -log softmax(previous_head(h(p, q)))[x_q]   `forward`

k = 2 hides one token, p = q, predicted from both sides. k = 1 hides none, q = p - 1: the suffix has x_p and the
prefix has x_q. An empty prefix and an empty suffix have vectors of their own. Pairs stay within a document.

Read `Model.forward`, then `_pair_losses`. `extend` is all of decoding: the forward encoder over a cache.

The NextLat paper gives 2.57B parameters at the 1.3B shape, so the encoders share no block (else 1.46B). With one table
of embeddings, two matrices of V rows for the two tokens, and a text head of two layers with n_ffn units between them it
is 2.569B. The sizes of the text head are inferred, and so are its GELU, the learned vectors of an empty prefix and
suffix, and how pairs are drawn.

    B  batch        T  positions          C  width, n_embd               V  vocabulary rows, padded
    L  layers       H  heads, D = C / H   F  feed-forward width, 8/3 C   N  pairs of a window
    f, b  h_{1:t} and h_{t+k:T} of the NextLat paper: the final normalised vectors of the two encoders
    t_f, t_b  what each adds to the text head's hidden layer, (n_text,)     n  positions of one `extend` call
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
    outside_graphs,
    rope_table,
    rotate,
)


@dataclass
class Config:
    pair_share: float = 1.0  # share of the pairs that a training step draws; the NextLat paper's timing: 0.1
    min_k: Literal[1, 2] = 1  # k of the nearest pairs: 1, the NextLat paper's equation, or 2: every pair hides a token
    n_text: int | None = None  # width of the text head's hidden layer; None: n_ffn (from parameter counts)
    n_layer: int = 12  # blocks of each encoder, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd up to a multiple of 128 (from parameter counts)
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 50257  # real token ids; rows from here on are padding
    pad_rows_in_loss: bool = True  # the padding takes part in the training softmax, as in the official SPS code
    eos_id: int | None = 50256  # the id that ends a document: attention and pairs stop there; None: one document
    head_size = n_kv_head = rope_scaling = None  # not settings of this model: `check_shape` fills in the sizes

    def __post_init__(self):
        if not 0 < self.pair_share <= 1:
            raise ValueError(f'pair_share = {self.pair_share}: expected more than 0, and at most 1 for all pairs')
        check_shape(self)
        self.n_ffn = self.n_ffn or -(-8 * self.n_embd // (3 * 128)) * 128
        self.n_text = self.n_text or self.n_ffn


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


class Encoder(nn.Module):
    """The blocks of one direction and the norm after them."""

    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, h, rope, mask, cache=None):
        """Embeddings (B, T, C), in reading order -> normalised vectors (B, T, C); the rest as in `Block`."""
        for block in self.blocks:
            h = block(h, rope, mask, cache)
        return self.norm(h)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.n_embd
        self.embed = nn.Embedding(config.vocab_size, C)
        self.forward_encoder = Encoder(config)
        self.head = nn.Linear(C, config.vocab_size, bias=False)  # of the next token
        self._init_weights(self)  # as in model_nextlat: with the same seed, the same weights
        self.backward_encoder = Encoder(config)
        self.no_prefix = nn.Parameter(torch.zeros(C))  # f of the empty prefix
        self.no_suffix = nn.Parameter(torch.zeros(C))  # b of the empty suffix
        # The text head's first layer has a matrix for f and one for b, so that each runs once a position, not once a
        # pair.
        self.text_f = nn.Linear(C, config.n_text, bias=False)
        self.text_b = nn.Linear(C, config.n_text, bias=False)
        self.text_out = nn.Linear(config.n_text, C, bias=False)
        self.previous_head = nn.Linear(C, config.vocab_size, bias=False)
        for module in (self.backward_encoder, self.text_f, self.text_b, self.text_out, self.previous_head):
            self._init_weights(module)

    def _init_weights(self, module):
        """Set every matrix: initialise anything that should start differently after it."""
        for name, p in module.named_parameters():
            if p.dim() >= 2:  # as in model_standard, only the attention output is scaled down with depth
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=self.config.init_std * scale)

    def sees(self, q, k):
        """The attention pattern of both encoders, with positions in reading order: does the query q see the key k?"""
        return (k.pos <= q.pos) & (k.pos >= q.doc_start)

    def _encode(self, encoder, idx, doc_start):
        """idx: (B, T) and where documents start (or None), both in reading order -> f or b (B, T, C)."""
        c, T = self.config, idx.shape[1]
        rope = rope_table(torch.arange(T, device=idx.device), c.head_size, c.rope_theta)
        return encoder(self.embed(idx), rope, make_mask(self.sees, T, c.head_size, idx.device, doc_start))

    def _text_state(self, t_f, t_b):
        """The text head before its two output matrices. t_f, t_b: (..., n_text) -> (..., C)."""
        return self.text_out(F.gelu(t_f + t_b))

    def _next_state(self, f):
        """f: (..., C) -> what the head multiplies (..., C): the text head with the empty suffix."""
        return self._text_state(self.text_f(f), self.text_b(self.no_suffix))

    def trunk(self, idx):
        """f of whole sequences: the state that analysis/probes.py reads. idx: (B, T) -> (B, T, C)."""
        return self._encode(self.forward_encoder, idx, document_starts(idx, self.config.eos_id))

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx: (B, T) -> (B, T, C)."""
        return self._next_state(self.trunk(idx))

    def forward(self, idx, targets):
        """idx, targets: (B, T) int64, target -1 ignored -> {'loss', 'nll', 'pair_next', 'pair_previous'}.

        The loss is the sum of two means in nats, over the pairs whose next and whose previous token counts. The nll is
        that of the next token with the empty suffix, at every position, as in all models; nothing is learned from it.

        The sequence is x_0 ... x_T, the inputs and the last target. x_s counts if it is a target; x_0 counts where x_1
        does. With documents on, pairs stay within a document. Its first token is predicted from the empty prefix, so it
        counts in pairs, though not in the nll.
        """
        c, T = self.config, idx.shape[1]
        x, labels, start = self._sequence(idx, targets)
        position = torch.arange(T + 1, device=idx.device)
        joined = start[:, 1:] < position[1:]  # (B, T): is x_s in the document of x_{s+1}?

        f = self.trunk(idx)
        is_last = F.pad(~joined, (0, 1), value=True).flip(1)  # read from the end, a document starts with its last token
        flipped_start = torch.where(is_last, position, 0).cummax(1).values
        b = self._encode(self.backward_encoder, x[:, 1:].flip(1), flipped_start[:, :T]).flip(1)
        # t_f[:, p] is of the prefix before x_p, and t_b[:, q] of the suffix after x_q, empty at the ends of a document
        joined = F.pad(joined, (1, 1)).unsqueeze(-1)
        t_f = torch.where(joined[:, :-1], self.text_f(F.pad(f, (0, 0, 1, 0))), self.text_f(self.no_prefix))
        t_b = torch.where(joined[:, 1:], self.text_b(F.pad(b, (0, 0, 0, 1))), self.text_b(self.no_suffix))
        loss, pair_next, pair_previous = self._pair_losses(t_f.flatten(0, 1), t_b.flatten(0, 1), labels, start)
        with torch.no_grad():
            if c.eos_id is not None:
                targets = targets.masked_fill(idx == c.eos_id, -1)
            rows = self._next_state(f).flatten(0, 1), targets.flatten()
            total, = chunked_loss(self._nll, rows, self.parameters(), c.vocab_size)
            nll = total / (targets >= 0).sum().clamp(min=1)
        return {'loss': loss, 'nll': nll, 'pair_next': pair_next.detach(), 'pair_previous': pair_previous.detach()}

    def _nll(self, h, targets):
        """Summed negative log-likelihood of the next token. h: (N, C), targets: (N,)."""
        return self._nats(self._logits(h), targets),

    def _nats(self, logits, targets):
        """Summed cross-entropy, in fp32. logits: (N, V), targets: (N,), -1 ignored."""
        logits = at_least_fp32(logits)
        if not self.config.pad_rows_in_loss:
            mask_padding(logits, self.config.n_ids)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')

    @outside_graphs  # how many pairs count depends on the documents
    def _pair_losses(self, t_f, t_b, labels, start):
        """The loss of the pairs and its two parts. t_f, t_b: (B (T + 1), n_text); labels, start: (B, T + 1).

        The hidden layer exists for the pairs of a chunk alone: for all of them it would be N n_text numbers a window.
        """
        T = labels.shape[1] - 1
        p, q = self._draw_pairs(T, labels.device)
        within = start[:, p] == start[:, q]
        next_labels, previous_labels = (labels[:, s].masked_fill(~within, -1) for s in (p, q))
        row, pair = ((next_labels >= 0) | (previous_labels >= 0)).nonzero().unbind(1)  # the pairs that count
        n_next, n_previous = ((x >= 0).sum().clamp(min=1) for x in (next_labels, previous_labels))

        def losses(at_p, at_q, next_label, previous_label, t_f, t_b):
            h = self._text_state(t_f.index_select(0, at_p), t_b.index_select(0, at_q))
            pair_next = self._nats(self._logits(h), next_label) / n_next
            pair_previous = self._nats(self.previous_head(h), previous_label) / n_previous
            return pair_next + pair_previous, pair_next, pair_previous

        first = row * (T + 1)
        rows = first + p[pair], first + q[pair], next_labels[row, pair], previous_labels[row, pair]
        width = 2 * self.config.vocab_size + self.config.n_text
        return chunked_loss(losses, rows, self.parameters(), width, shared=(t_f, t_b))

    def _sequence(self, idx, targets):
        """x_0 ... x_T, its labels (-1 where a token does not count), and where documents start: (B, T + 1) each.

        A last target of -1 is no token: it is set apart, as a document of its own.
        """
        T, eos_id = idx.shape[1], self.config.eos_id
        x = torch.cat([idx, targets[:, -1:].clamp(min=0)], 1)
        labels = torch.cat([idx[:, :1].masked_fill(targets[:, :1] < 0, -1), targets], 1)
        start = torch.zeros_like(x) if eos_id is None else document_starts(x, eos_id)
        start = torch.cat([start[:, :T], start[:, T:].masked_fill(targets[:, -1:] < 0, T)], 1)
        return x, labels, start

    def loss_count(self, idx, targets):
        """How many pairs the loss of idx and targets (B, T) is a mean over, before a share of them is drawn.

        train.py weighs micro-batches by it. Exact where all targets count, as in texts: a prompt's pairs are counted,
        too.
        """
        start = self._sequence(idx, targets)[2]
        position = torch.arange(start.shape[1], device=idx.device)
        n_pairs = (position + 1 - start).sum()  # p from the start of q's document to q
        if self.config.min_k == 1:
            n_pairs += (start[:, 1:] == start[:, :-1]).sum()  # p = q + 1
        return int(n_pairs)

    def _draw_pairs(self, T, device):
        """p and q (N,) of the pairs: the same for all windows. At random in training, evenly spaced in evaluation."""
        pairs = torch.triu_indices(T + 1, T + 1, self.config.min_k - 2, device=device)  # q = p + k - 2, and k >= min_k
        n_all = pairs.shape[1]
        n = max(1, round(self.config.pair_share * n_all))
        if n == n_all:
            return pairs
        if self.training:
            return pairs[:, torch.randperm(n_all, device=device)[:n]]
        return pairs[:, torch.arange(n, device=device) * n_all // n]

    def _logits(self, h):
        """Next-token logits of all V rows. An edit here changes the loss and decoding alike."""
        return self.head(h)

    def logits(self, idx):
        """Next-token logits at every position. idx: (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache of batch_size rows of up to max_tokens tokens; calls of up to max_run have static shapes."""
        return KVCache(self, batch_size, max_tokens, max_run, device, dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache and return their next-token logits, as in model_standard.py."""
        f = torch.cat([self.forward_encoder(self.embed(run.tokens), run.rope, run.mask(), cache)
                       for run in cache.runs(tokens, lengths)], 1)
        h = self._next_state(f)
        last = cache.end(h)
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in windows of T: weights (2 forward, 4 backward), and attention.

        The text head's second layer and the two output matrices run once a pair, so they count N / T times a token. The
        nll is a forward alone.
        """
        c = self.config
        for_nll = n_matrix_weights(self.text_out) + n_matrix_weights(self.head)
        of_pairs = for_nll + n_matrix_weights(self.previous_head)
        n_pairs = c.pair_share * ((T + 1) * (T + 2) / 2 + (T if c.min_k == 1 else 0))  # documents aside
        for_tokens, for_pairs = n_matrix_weights(self) - of_pairs, of_pairs * n_pairs / T
        return 6 * (for_tokens + for_pairs) + 2 * for_nll + 12 * 2 * c.n_layer * c.n_embd * (T + 1) / 2
