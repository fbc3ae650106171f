"""The Belief State Transformer (BST, Hu et al., ICLR 2025), a baseline of NextLat.

One Transformer encodes prefixes left to right, another encodes suffixes right to left. From each
prefix and each later suffix, a text head predicts the token after the prefix and the token before
the suffix, so a prefix's state must describe the whole future and not only the next token. To
generate, the suffix is empty and only the forward encoder runs.

A pair (p, q) is named after the two tokens that it predicts, x_p and x_q, with q = p + k - 2:

    x_0 ... x_{p-1} | x_p ... x_q | x_{q+1} ... x_T
    prefix, f_{p-1}   hidden        suffix, b_{q+1}

    h(p, q) = text_out(GELU(text_f(f_{p-1}) + text_b(b_{q+1})))                      `_text_state`
    loss = mean of -log softmax(head(h(p, q)))[x_p]                                  `forward`
         + mean of -log softmax(previous_head(h(p, q)))[x_q]

The papers count from x_1 and write t for p: x_{t+1} is our x_p, and x_{t+k-1} our x_q.
k = 2 hides one token, p = q. k = 1 hides none, q = p - 1: the suffix has x_p, the prefix has x_q.
The empty prefix and the empty suffix have learned vectors. Pairs stay within a document. For the
four tokens x_0 ... x_3, T = 3, the pairs and their k are

      q  0 1 2 3          q  0 1 2 3
    p                   p
    0    2 3 4 5        0    2 3 . .      left: one document
    1    1 2 3 4        1    1 2 . .      right: x_0 x_1 and x_2 x_3 are two documents
    2    . 1 2 3        2    . . 2 3
    3    . . 1 2        3    . . 1 2

Read `Model.forward` and its steps below it. `extend` decodes: the forward encoder with a cache.

    B  batch size   T  positions          C  width, n_embd               V  vocabulary, padded
    L  layers       H  heads, D = C / H   F  feed-forward width, 8/3 C   N  pairs, as drawn
    f, b      final states of the encoders, h_{1:t} and h_{t+k:T} in the NextLat paper
    t_f, t_b  text_f(f) and text_b(b), the two terms in h(p, q)          n  tokens per `extend` call
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
    may_change = 'checkpoint_blocks',  # settings that only affect speed and memory

    pair_share: float = 1.0  # share of the pairs in a training step; 0.1 in the NextLat paper's timings
    min_k: Literal[1, 2] = 1  # smallest k: 1 (NextLat paper's equation), or 2: every pair hides at least one token
    n_text: int | None = None  # width of the text head's hidden layer; None: n_ffn (from parameter counts)
    n_layer: int = 12  # blocks of each encoder, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd, up to a multiple of 128 (inferred from counts)
    rope_theta: float = 10000.0  # base of the RoPE frequencies
    norm_eps: float = 1e-5  # epsilon of RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: token ids, then padding
    n_ids: int = 50257  # number of token ids; rows from n_ids on are padding
    pad_rows_in_loss: bool = True  # include padding rows in the training softmax, as in the official SPS code
    eos_id: int | None = 50256  # end-of-document id: attention and pairs do not cross it; None: one document

    def __post_init__(self):
        if not 0 < self.pair_share <= 1:
            raise ValueError(f'pair_share = {self.pair_share}: expected more than 0, and at most 1 (all pairs)')
        check_shape(self, n_text=1)  # sets head_size and n_kv_head
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
        """Apply the block. h: (B, T, C) -> (B, T, C); rope: cos, sin; cache: only in decoding."""
        q, k, v = self.qkv(self.attn_norm(h)).unflatten(-1, (3, -1, self.head_size)).unbind(2)
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        h = h + self.attn_out(attention(q, k, v, mask).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Encoder(nn.Module):
    """Blocks for one reading direction, and a final norm."""

    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, h, rope, mask, cache=None):
        """Return final states. h: embeddings (B, T, C) in reading order; the rest as in `Block`."""
        for block in self.blocks:
            h = block(h, rope, mask, cache)
        return self.norm(h)


def document_ends(start):
    """Return the last position of each token's document, given the first one. Both (B, n).

    For tokens a b c | d e, start is 0 0 0 3 3. Last tokens get their position and others n = 5, so
    5 5 2 5 4. The least from each token on is the result, 2 2 2 4 4.
    """
    n = start.shape[1]
    position = torch.arange(n, device=start.device)
    is_last = F.pad(start[:, 1:] == position[1:], (0, 1), value=True)
    return torch.where(is_last, position, n).flip(1).cummin(1).values.flip(1)


class Model(nn.Module):
    """Two encoders and the text head, with the number of parameters in the NextLat paper.

    The paper reports 2.57B at the 1.3B shape, so the encoders share no block (else 1.46B). One
    embedding table, two output matrices of V rows, and a two-layer text head with n_ffn hidden
    units give 2.569B. Inferred: the text head's size and GELU, the learned vectors of the empty
    prefix and suffix, and how pairs are drawn.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.n_embd
        self.embed = nn.Embedding(config.vocab_size, C)
        self.forward_encoder = Encoder(config)
        self.head = nn.Linear(C, config.vocab_size, bias=False)  # predicts the next token
        self.cross_entropy = CrossEntropy(config.vocab_size, None if config.pad_rows_in_loss else config.n_ids)
        self._init_weights(self)  # first, so that the same seed gives the weights of model_nextlat
        self.backward_encoder = Encoder(config)
        self.no_prefix = nn.Parameter(torch.zeros(C))  # f of the empty prefix
        self.no_suffix = nn.Parameter(torch.zeros(C))  # b of the empty suffix
        # The text head's first layer is split in two, to run once per position, not once per pair.
        self.text_f = nn.Linear(C, config.n_text, bias=False)
        self.text_b = nn.Linear(C, config.n_text, bias=False)
        self.text_out = nn.Linear(config.n_text, C, bias=False)
        self.previous_head = nn.Linear(C, config.vocab_size, bias=False)
        for module in (self.backward_encoder, self.text_f, self.text_b, self.text_out, self.previous_head):
            self._init_weights(module)

    def _init_weights(self, module):
        """Initialize every matrix in `module`. Set other values afterwards."""
        for name, p in module.named_parameters():
            if p.dim() >= 2:  # as in model_standard, only the attention output is scaled down with depth
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=self.config.init_std * scale)

    def sees(self, q, k):
        """Return True where query q attends to key k, in either encoder's reading order."""
        return (k.pos <= q.pos) & (k.pos >= q.doc_start)

    def _encode(self, encoder, idx, doc_start):
        """Return f or b (B, T, C). idx, doc_start (or None): (B, T), both in reading order."""
        c, T = self.config, idx.shape[1]
        rope = rope_table(torch.arange(T, device=idx.device), c.head_size, c.rope_theta)
        return encoder(self.embed(idx), rope, make_mask(self, T, idx.device, doc_start))

    def _text_state(self, t_f, t_b):
        """Return the text head's state h(p, q). t_f, t_b: (..., n_text) -> (..., C)."""
        return self.text_out(F.gelu(t_f + t_b))

    def _next_state(self, f):
        """Return the head's input for f (..., C) and the empty suffix: (..., C)."""
        return self._text_state(self.text_f(f), self.text_b(self.no_suffix))

    def trunk(self, idx):
        """Return f, the states that papers/nextlat/probes.py reads. idx: (B, T) -> (B, T, C)."""
        return self._encode(self.forward_encoder, idx, document_starts(idx, self.config.eos_id))

    def final_hidden(self, idx):
        """Return the inputs of the output head. idx: (B, T) -> (B, T, C)."""
        return self._next_state(self.trunk(idx))

    def forward(self, idx, targets):
        """Return {'loss', 'nll', 'pair_next', 'pair_previous'} in nats. idx, targets: (B, T) int64.

        loss = pair_next + pair_previous, each a mean over the pairs whose label counts. The nll is
        the usual next-token loss, with the empty suffix; it is reported and not trained.

        x_0 ... x_T is idx and the last target. Targets of -1 are ignored; x_0 counts if x_1 does.
        With eos_id set, pairs stay within a document, whose first token is predicted from the empty
        prefix: it counts in pairs, but not in the nll.
        """
        x, labels, start = self._sequence(idx, targets)
        f = self.trunk(idx)
        t_f, t_b = self._text_terms(f, x, start)
        losses = self._pair_losses(t_f, t_b, labels, start)
        nll = self._next_token_loss(f, idx, targets)
        return {'loss': losses['loss'], 'nll': nll,
                'pair_next': losses['pair_next'], 'pair_previous': losses['pair_previous']}

    def _sequence(self, idx, targets):
        """Return x_0 ... x_T, labels (-1: ignored) and document starts, (B, T + 1) each.

        If the final target is -1, x_T is only filler: a document of its own, so in no suffix.
        """
        T, eos_id = idx.shape[1], self.config.eos_id
        x = torch.cat([idx, targets[:, -1:].clamp(min=0)], 1)
        labels = torch.cat([idx[:, :1].masked_fill(targets[:, :1] < 0, -1), targets], 1)
        start = torch.zeros_like(x) if eos_id is None else document_starts(x, eos_id)
        start = torch.cat([start[:, :T], start[:, T:].masked_fill(targets[:, -1:] < 0, T)], 1)  # T: its own document
        return x, labels, start

    def _text_terms(self, f, x, start):
        """Return t_f and t_b, (B, T + 1, n_text). f: (B, T, C); x, start: see `_sequence`.

        t_f[:, p] is the term of the prefix before x_p, t_b[:, q] of the suffix after x_q.
        """
        end, T = document_ends(start), f.shape[1]
        # Backward, x_i is at T - i. For a b c | d e, end is 2 2 2 4 4. The documents of e d | c b a
        # start at 0 0 2 2 2.
        backward_start = (T - end).flip(1)
        b = self._encode(self.backward_encoder, x[:, 1:].flip(1), backward_start[:, :T]).flip(1)  # b_1 ... b_T
        position = torch.arange(T + 1, device=x.device)
        has_prefix, has_suffix = (start < position).unsqueeze(-1), (position < end).unsqueeze(-1)
        f_before, b_after = F.pad(f, (0, 0, 1, 0)), F.pad(b, (0, 0, 0, 1))  # f_{p-1} and b_{q+1}; 0 if there is none
        t_f = torch.where(has_prefix, self.text_f(f_before), self.text_f(self.no_prefix))
        t_b = torch.where(has_suffix, self.text_b(b_after), self.text_b(self.no_suffix))
        return t_f, t_b

    @outside_graphs  # the number of pairs depends on the documents
    def _pair_losses(self, t_f, t_b, labels, start):
        """Return {'loss', 'pair_next', 'pair_previous'}, in nats.

        t_f, t_b: (B, T + 1, n_text); labels, start: (B, T + 1). Runs in chunks of pairs, so the
        text head's hidden layer (N, n_text) is never held at once.
        """
        T = labels.shape[1] - 1
        p, q = self._draw_pairs(T, labels.device)  # the same for all rows
        other_document = start[:, p] != start[:, q]  # (B, N), of pairs that do not count
        next_labels = labels[:, p].masked_fill(other_document, -1)
        previous_labels = labels[:, q].masked_fill(other_document, -1)
        n_next, n_previous = ((x >= 0).sum().clamp(min=1) for x in (next_labels, previous_labels))

        row, pair = ((next_labels >= 0) | (previous_labels >= 0)).nonzero().unbind(1)  # the pairs that count
        row_start = row * (T + 1)  # index of a row's x_0 in t_f.flatten(0, 1)
        pairs = (row_start + p[pair], row_start + q[pair], next_labels[row, pair], previous_labels[row, pair])

        def losses(at_p, at_q, next_label, previous_label, t_f_rows, t_b_rows):  # of a chunk of pairs
            h = self._text_state(t_f_rows.index_select(0, at_p), t_b_rows.index_select(0, at_q))
            pair_next = self.cross_entropy(self._logits(h), next_label) / n_next
            pair_previous = self.cross_entropy(self.previous_head(h), previous_label) / n_previous
            return {'loss': pair_next + pair_previous, 'pair_next': pair_next, 'pair_previous': pair_previous}

        width = 2 * self.config.vocab_size + self.config.n_text  # values per pair: two softmaxes, the hidden layer
        return chunked_loss(losses, pairs, self.parameters(), width, shared=(t_f.flatten(0, 1), t_b.flatten(0, 1)))

    def _draw_pairs(self, T, device):
        """Return p, q (N,) for all rows: random in training, evenly spaced in evaluation."""
        pairs = torch.triu_indices(T + 1, T + 1, self.config.min_k - 2, device=device)  # q = p + k - 2, and k >= min_k
        n_all = pairs.shape[1]
        n = max(1, round(self.config.pair_share * n_all))
        if n == n_all:
            return pairs
        if self.training:
            return pairs[:, torch.randperm(n_all, device=device)[:n]]
        return pairs[:, torch.arange(n, device=device) * n_all // n]

    @torch.no_grad()
    def _next_token_loss(self, f, idx, targets):
        """Return the mean next-token loss after prefixes with states f and the empty suffix."""
        targets = counted_targets(idx, targets, self.config.eos_id)
        rows = (self._next_state(f).flatten(0, 1), targets.flatten())
        total = chunked_loss(self._nll, rows, self.parameters(), self.config.vocab_size)
        return total['nll'] / (targets >= 0).sum().clamp(min=1)

    def _nll(self, h, targets):
        """Return the summed negative log-likelihood of a chunk. h: (N, C); targets: (N,)."""
        return {'nll': self.cross_entropy(self._logits(h), targets)}

    def loss_count(self, idx, targets):
        """Return the number of pairs in idx and targets (B, T), before pair_share is applied.

        train.py weights micro-batches by it. Not exact for prompts: their ignored pairs count, too.
        """
        start = self._sequence(idx, targets)[2]
        position = torch.arange(start.shape[1], device=idx.device)
        n_pairs = (position + 1 - start).sum()  # for each q, p from its document's start to q
        if self.config.min_k == 1:
            n_pairs += (start[:, 1:] == start[:, :-1]).sum()  # p = q + 1
        return int(n_pairs)

    def _logits(self, h):
        """Return next-token logits over all V rows, for the loss and decoding."""
        return self.head(h)

    def logits(self, idx):
        """Return next-token logits, -inf for padding ids. idx: (B, T) -> (B, T, V)."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        """Return an empty `KVCache` for batch_size rows of up to max_tokens tokens each."""
        return KVCache(self, batch_size, max_tokens, max_call, device, dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache; return next-token logits as in model_standard.py."""
        f = torch.cat([self.forward_encoder(self.embed(piece.tokens), piece.rope, piece.mask(), cache)
                       for piece in cache.pieces(tokens, lengths)], 1)
        h = self._next_state(f)
        last = cache.end(h)  # for all_positions, too: it finishes the call
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    def flops_per_token(self, T):
        """Return training FLOPs per token at length T: 6 per matrix weight, plus attention.

        The text head's second layer and both output matrices run once per pair, N / T times per
        token. The nll has no backward pass.
        """
        c = self.config
        of_pairs = sum(map(n_matrix_weights, (self.text_out, self.head, self.previous_head)))
        for_nll = sum(map(n_matrix_weights, (self.text_f, self.text_out, self.head)))  # with the empty suffix
        n_pairs = c.pair_share * ((T + 1) * (T + 2) / 2 + (T if c.min_k == 1 else 0))  # ignoring documents
        for_tokens, for_pairs = n_matrix_weights(self) - of_pairs, of_pairs * n_pairs / T
        attention_flops = 12 * 2 * c.n_layer * c.n_embd * mean_keys(self.sees, T)  # 12: 2 products x 2 FLOPs x 3 passes
        return 6 * (for_tokens + for_pairs) + 2 * for_nll + attention_flops
