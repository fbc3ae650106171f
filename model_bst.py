"""The Belief State Transformer ("The Belief State Transformer", Hu et al., ICLR 2025), as NextLat's baseline.

Two Transformers read a sequence from its two ends. Of each prefix and each later suffix, a text head predicts both the
token that follows the prefix and the token that precedes the suffix. So the prefix's vector must tell of the whole
future, not only of the next token. To generate, the suffix is empty: the backward encoder does not run.

A pair of them is named (p, q) after the two tokens that it predicts, x_p and x_q:

    x_0 ... x_{p-1} | x_p ... x_q | x_{q+1} ... x_T         p = t and q = t + k - 2, as papers count from x_1
    prefix, f_{p-1}   hidden        suffix, b_{q+1}

    h(p, q) = text_out(GELU(text_f(f_{p-1}) + text_b(b_{q+1})))                                     `_text_state`
    loss = mean of -log softmax(head(h(p, q)))[x_p]  +  mean of -log softmax(previous_head(h(p, q)))[x_q]   `forward`

k = 2 hides one token, p = q, and it is predicted from both sides. k = 1 hides none, q = p - 1: the suffix has x_p and
the prefix has x_q. An empty prefix and an empty suffix have vectors of their own. Pairs stay within a document.

Read `Model.forward`, then `_pair_states`. `extend` is all of decoding: the forward encoder over a cache.

The NextLat paper's 2.57B parameters at the 1.3B shape say that the encoders share no block (else 1.46B). With one table
of embeddings, two matrices of V rows for the two tokens, and a text head of two layers with n_ffn units between them it
is 2.569B. The text head's sizes are inferred. So are its GELU, the learned vectors of an empty prefix and suffix, and
how pairs are drawn.

    B  batch        T  positions          C  width, n_embd               V  vocabulary rows, padded
    L  layers       H  heads, D = C / H   F  feed-forward width, 8/3 C   N  pairs of a window
    f, b  h_{1:t} and h_{t+k:T} of the NextLat paper: the final normalised vectors of the two encoders
    t_f, t_b  what each adds to the text head's hidden layer, (n_text,)     n  positions of one `extend` call
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attn_kernels import (
    KVCache,
    attention,
    checkpointed,
    document_starts,
    linear_cross_entropy,
    rms_norm,
    rope_table,
    rotate,
)

PAIRS_AT_ONCE = 2 ** 16  # pairs whose hidden layer in the text head exists at a time; the backward makes it again


@dataclass
class Config:
    pair_share: float = 1.0  # share of the pairs that a training step draws; the NextLat paper's timing: 0.1
    min_k: int = 1  # k of the nearest pairs: 1, the NextLat paper's equation, or 2: every pair hides a token
    n_text: int | None = None  # width of the text head's hidden layer; None: n_ffn (from parameter counts)
    n_layer: int = 12  # blocks of each encoder, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd up to a multiple of 128 (from parameter counts)
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    checkpoint_blocks: bool = False  # keep only each block's input for the backward: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 50257  # real token ids; rows from here on are padding
    pad_rows_in_loss: bool = True  # the padding takes part in training's softmax, as in the official code of SPS
    eos_id: int | None = 50256  # the id that ends a document: attention and pairs stop there; None: one document

    def __post_init__(self):
        for name in ('n_layer', 'n_head', 'n_embd', 'n_ids', 'rope_theta', 'norm_eps', 'init_std'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        if self.n_layer > 1000:
            raise ValueError(f'n_layer = {self.n_layer}: expected at most 1000')
        if not 0 < self.pair_share <= 1:
            raise ValueError(f'pair_share = {self.pair_share}: expected more than 0, and at most 1 for all pairs')
        if self.min_k not in (1, 2):
            raise ValueError(f'min_k = {self.min_k}: expected 1 or 2')
        for name in ('n_ffn', 'n_text'):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: expected at least 1, or None')
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f'n_embd = {self.n_embd} and n_head = {self.n_head}: '
                             'n_embd / n_head must be an even whole number')
        if self.n_ids > self.vocab_size:
            raise ValueError(f'vocab_size = {self.vocab_size} has no room for the {self.n_ids} ids of the tokenizer')
        if self.eos_id is not None and not 0 <= self.eos_id < self.n_ids:
            raise ValueError(f'eos_id = {self.eos_id}: expected one of the {self.n_ids} ids of the tokenizer, or None')
        self.n_ffn = self.n_ffn or -(-8 * self.n_embd // (3 * 128)) * 128
        self.n_text = self.n_text or self.n_ffn

    @property
    def head_size(self):
        return self.n_embd // self.n_head


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.layer, self.n_head = layer, config.n_head
        self.checkpoints = config.checkpoint_blocks
        self.attn_norm = RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.ffn_norm = RMSNorm(C, config.norm_eps)
        self.gate_up = nn.Linear(C, 2 * config.n_ffn, bias=False)
        self.ffn_out = nn.Linear(config.n_ffn, C, bias=False)

    @checkpointed
    def forward(self, h, rotate, attend):
        """h (B, T, C) -> (B, T, C).

        rotate(qk) rotates queries and keys (B, T, 2 H, D) by their positions (RoPE). attend(layer, q, k, v), of
        (B, T, H, D) each, -> (B, T, H, D) is the attention, over the whole sequence in training and over a cache in
        decoding. It takes q and k as they come from rotate: on a GPU decoding rotates them in its kernel.
        """
        H = self.n_head
        qk, v = self.qkv(self.attn_norm(h)).unflatten(-1, (3 * H, -1)).split([2 * H, H], 2)
        q, k = rotate(qk).split([H, H], 2)
        h = h + self.attn_out(attend(self.layer, q, k, v).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Encoder(nn.Module):
    """The blocks of one direction, and the norm after them."""

    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, h, rotate, attend):
        """Embeddings (B, T, C), in the order of reading -> normalised vectors (B, T, C); the rest as in `Block`."""
        for block in self.blocks:
            h = block(h, rotate, attend)
        return self.norm(h)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.n_embd
        self.embed = nn.Embedding(config.vocab_size, C)
        self.forward_encoder = Encoder(config)
        self.backward_encoder = Encoder(config)
        self.no_prefix = nn.Parameter(torch.zeros(C))  # f of the empty prefix
        self.no_suffix = nn.Parameter(torch.zeros(C))  # b of the empty suffix
        # The text head, of [f, b]: its first layer is a matrix for each of the two, so each is multiplied once a
        # position and not once a pair.
        self.text_f = nn.Linear(C, config.n_text, bias=False)
        self.text_b = nn.Linear(C, config.n_text, bias=False)
        self.text_out = nn.Linear(config.n_text, C, bias=False)
        self.head = nn.Linear(C, config.vocab_size, bias=False)  # of the next token
        self.previous_head = nn.Linear(C, config.vocab_size, bias=False)
        # This sets every matrix: what is to start otherwise is set after it.
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # as model_standard
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)

    def _encode(self, encoder, idx, doc_start):
        """idx (B, T) and where their documents start, both in the order of reading -> f or b (B, T, C)."""
        c = self.config
        cos, sin = rope_table(torch.arange(idx.shape[1], device=idx.device), c.head_size, c.rope_theta)
        return encoder(self.embed(idx), lambda qk: rotate(qk, cos, sin),
                       lambda layer, q, k, v: attention(q, k, v, doc_start))

    def _text_state(self, t_f, t_b):
        """The text head before its two output matrices. t_f, t_b (..., n_text) -> (..., C)."""
        return self.text_out(F.gelu(t_f + t_b))

    def _from_prefix(self, f):
        """t_f (..., n_text) of the vectors f (..., C) of prefixes."""
        return self.text_f(f)

    def _from_suffix(self, b):
        """t_b (..., n_text) of the vectors b (..., C) of suffixes."""
        return self.text_b(b)

    def _next_state(self, f):
        """f (..., C) -> what the head multiplies (..., C): the text head with the empty suffix."""
        return self._text_state(self._from_prefix(f), self._from_suffix(self.no_suffix))

    def state(self, idx, which='head'):
        """States of whole windows for analyses. idx (B, T) -> (B, T, C): what the head multiplies, or 'trunk', f.

        Raises ValueError for another word.
        """
        if which not in ('head', 'trunk'):
            raise ValueError(f"which = {which!r}: expected 'head' or 'trunk'")
        f = self._encode(self.forward_encoder, idx, document_starts(idx, self.config.eos_id))
        return f if which == 'trunk' else self._next_state(f)

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx (B, T) -> (B, T, C)."""
        return self.state(idx)

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll', 'pair_next', 'pair_previous'}.

        The loss is the sum of two means of nats, over the pairs whose next and whose previous token counts. The nll is
        of the next token with the empty suffix, at every position, as in all models; nothing is learned from it.

        The sequence is x_0 ... x_T, the inputs and the last target. x_s counts if it is a target; x_0 counts where x_1
        does. With documents on, pairs stay within a document. Its first token is predicted from the empty prefix, so it
        counts in pairs, though not in the nll.
        """
        c, T = self.config, idx.shape[1]
        x, labels, start = self._sequence(idx, targets)
        position = torch.arange(T + 1, device=idx.device)
        joined = start[:, 1:] < position[1:]  # (B, T): is x_s in the document of x_{s+1}?

        f = self._encode(self.forward_encoder, idx, document_starts(idx, c.eos_id))
        ends = F.pad(~joined, (0, 1), value=True).flip(1)  # read from the end, a document starts with its last token
        flipped_start = torch.where(ends, position, 0).cummax(1).values
        b = self._encode(self.backward_encoder, x[:, 1:].flip(1), flipped_start[:, :T]).flip(1)

        p, q = self._draw_pairs(T, idx.device)
        counts = (start[:, p] == start[:, q]) & ((labels[:, p] >= 0) | (labels[:, q] >= 0))
        # Pairs that count in no window are left out. A compiled graph, and the dry run's fake tensors, cannot.
        if not torch.compiler.is_compiling() and not hasattr(idx, 'fake_mode'):
            some = counts.any(0)
            some[0] = True  # a loss of no rows has no gradient
            p, q, counts = p[some], q[some], counts[:, some]
        states = self._pair_states(f, b, joined, p, q).flatten(0, 1)
        parts = {}
        for name, predicted, head in (('pair_next', p, self.head), ('pair_previous', q, self.previous_head)):
            pair_labels = labels[:, predicted].masked_fill(~counts, -1)
            parts[name] = linear_cross_entropy(states, self._loss_weight(head), pair_labels.flatten())
        loss = parts['pair_next'] + parts['pair_previous']
        with torch.no_grad():
            if c.eos_id is not None:
                targets = targets.masked_fill(idx == c.eos_id, -1)
            # by the pairs' code, p = t and q = T: an edit of it that generation does not have then shows in the nll
            to_the_end = self._pair_states(f, b, joined, position[1:], torch.full_like(position[1:], T))
            nll = linear_cross_entropy(to_the_end.flatten(0, 1), self._loss_weight(self.head), targets.flatten())
        return {'loss': loss, 'nll': nll} | {name: part.detach() for name, part in parts.items()}

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

    def _loss_weight(self, head):
        """The rows of an output matrix that take part in training's softmax."""
        return head.weight if self.config.pad_rows_in_loss else head.weight[:self.config.n_ids]

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

    def _pair_states(self, f, b, joined, p, q):
        """The text head's state of each pair. f, b (B, T, C), joined (B, T), p and q (N,) -> (B, N, C).

        f holds the vectors of x_0 ... x_{T-1}, b those of x_1 ... x_T. The hidden layer is recomputed in the backward,
        some pairs at a time: all of it would be N n_text numbers a window.
        """
        joined = joined.unsqueeze(-1)
        t_empty = self._from_prefix(self.no_prefix).expand(len(f), 1, -1)
        t_f = torch.cat([t_empty, torch.where(joined, self._from_prefix(f), t_empty)], 1)  # [:, p]: prefix before x_p
        t_empty = self._from_suffix(self.no_suffix).expand(len(f), 1, -1)
        t_b = torch.cat([torch.where(joined, self._from_suffix(b), t_empty), t_empty], 1)  # [:, q]: suffix after x_q

        def some_states(p, q):
            return self._text_state(t_f[:, p], t_b[:, q])
        size = max(1, PAIRS_AT_ONCE // len(f))
        return torch.cat([checkpoint(some_states, *some, use_reentrant=False)
                          for some in zip(p.split(size), q.split(size))], 1)

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self.final_hidden(idx))

    def _logits(self, h):
        # Training's loss does not pass here, so that it holds no logits: edit `forward` too.
        logits = self.head(h)
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache of batch_size rows of up to max_tokens tokens; calls of up to max_run have static shapes."""
        c, weight = self.config, self.embed.weight
        return KVCache(c.n_layer, c.n_head, c.head_size, batch_size, max_tokens, max_run, c.n_embd, [None],
                       rope_theta=c.rope_theta, eos_id=c.eos_id, device=device or weight.device,
                       dtype=dtype or weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a draft are this one call. Calls of n <= cache.max_run have
        static shapes and never wait for the device. Raises ValueError if a row has no room left (`KVCache.begin`).
        """
        place = cache.begin(tokens, lengths)
        f = self.forward_encoder(self.embed(tokens), place.rotate,
                                 lambda layer, q, k, v: cache.attend(place, layer, q, k, v))
        h = self._next_state(f)
        last = cache.end(place, h)
        return self._logits(h if all_positions else last)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in windows of T: weights (2 forward, 4 backward), and attention.

        The text head's second layer and the two output matrices run once a pair, so they count N / T times a token. The
        nll is a forward alone.
        """
        c = self.config

        def n_weights(module):  # of matrices; an embedding looks up
            return sum(p.numel() for part in module.modules() if not isinstance(part, nn.Embedding)
                       for p in part.parameters(recurse=False) if p.dim() >= 2)
        for_nll = n_weights(self.text_out) + n_weights(self.head)
        of_pairs = for_nll + n_weights(self.previous_head)
        n_pairs = c.pair_share * ((T + 1) * (T + 2) / 2 + (T if c.min_k == 1 else 0))  # documents aside
        for_tokens, for_pairs = n_weights(self) - of_pairs, of_pairs * n_pairs / T
        return 6 * (for_tokens + for_pairs) + 2 * for_nll + 12 * 2 * c.n_layer * c.n_embd * (T + 1) / 2
