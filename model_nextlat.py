"""NextLat ("Next-Latent Prediction Transformers Learn Compact World Models"), with its baselines MTP and JTP.

A Transformer whose final vector h_t is to be a belief state. Besides the next token it is trained so that a small
network p_psi predicts the next vector h_{t+1} from h_t and the token x_{t+1}. The Transformer itself is unchanged.
p_psi can be applied to its own result, so the model drafts tokens for itself without running the Transformer, as many
as one likes.

One `objective` says what is trained beside the next token:

    ntp      nothing: the baseline, GPT in the paper's tables
    nextlat  h_{t+i} and its softmax from h_t and x_{t+1} ... x_{t+i}, by p_psi applied i times
    mtp      x_{t+1+i} from what enters the last block, by a last block of its own for each i (Gloeckle et al. 2024)
    jtp      x_{t+1+i} from h_t and x_{t+1} ... x_{t+i}, by one self-attention over these, Fetch (Ahn et al. 2025)

Read `Model.forward`, which names the losses, then `_next_latent` for NextLat's own, and `draft`. `_run_blocks` is what
training, prefill and decoding share; `extend` is all of decoding.

    B  batch        T  positions          C  width, n_embd               V  vocabulary rows, padded
    L  layers       H  heads of size D    F  feed-forward width, 8/3 C   d  horizon: i = 1 ... d
    HK key and value heads                n  positions of one `extend` call; tokens of a draft
    x  tokens; e their embeddings         h  what the head multiplies: the last block's output after the final norm
    h^ what p_psi predicts of h           t  where a prediction is made; s = t + i is where it is compared
"""
from dataclasses import dataclass
from functools import partial
from math import inf

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
    linear_cross_entropy_kl,
    parse_rope_scaling,
    rms_norm,
    rope_table,
    rotate,
)


@dataclass
class Config:
    objective: str = 'nextlat'  # ntp, nextlat, mtp or jtp
    horizon: int = 1  # d: positions ahead that are trained beside the next token
    lambda_h: float = 1.0  # lambda_next-h: weight of the Smooth L1 loss between h^ and h in nextlat; 0: without it
    lambda_kl: float = 1.0  # lambda_KL: weight of the KL loss, or of what token_loss has in its place; 0: without it
    lambda_mtp: float = 1.0  # lambda_MTP: weight of the further tokens in mtp and jtp
    n_dynamics: int | None = None  # width of p_psi's two hidden layers; None: 3 n_embd (paper: 6528 at 2048)
    token_loss: str = 'kl'  # kl, or ce: cross-entropy of h^'s softmax with the token itself (appendix, ablations)
    stop_target: bool = True  # no gradient into the hidden state that is to be predicted; False: appendix, ablations
    stop_head: bool = True  # no gradient into the head from p_psi's softmax; False: appendix, ablations
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_kv_head: int | None = None  # key and value heads, HK, each read by H / HK query heads; None: n_head
    head_size: int | None = None  # D; None: n_embd / n_head
    qkv_bias: bool = False  # biases of queries, keys and values, as Qwen2 has them
    qk_norm: bool = False  # an RMSNorm of each head's query and key before they are rotated, as Qwen3 has it
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd up to a multiple of 128 (from parameter counts)
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    rope_scaling: str | None = None  # Llama 3's 'factor,low,high,tokens', as '8,1,4,8192'; None: none
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = False  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # keep only each block's input for the backward: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: the real ids, then padding
    n_ids: int = 50257  # real token ids; rows from here on are padding
    pad_rows_in_loss: bool = True  # the padding takes part in training's softmax, as in the official code
    eos_id: int | None = 50256  # the id that ends a document: attention and losses stop there; None: one document

    def __post_init__(self):
        for name, choices in (('objective', ('ntp', 'nextlat', 'mtp', 'jtp')), ('token_loss', ('kl', 'ce'))):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} = {getattr(self, name)!r}: expected {", ".join(choices)}')
        for name in ('n_layer', 'n_head', 'n_embd', 'n_ids', 'rope_theta', 'norm_eps', 'init_std', 'horizon',
                     'lambda_mtp'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} = {getattr(self, name)}: expected more than 0')
        for name in ('n_layer', 'horizon'):
            if getattr(self, name) > 1000:
                raise ValueError(f'{name} = {getattr(self, name)}: expected at most 1000')
        for name in ('n_ffn', 'n_dynamics'):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: expected at least 1, or None')
        if min(self.lambda_h, self.lambda_kl) < 0 or not self.lambda_h + self.lambda_kl > 0:
            raise ValueError(f'lambda_h = {self.lambda_h} and lambda_kl = {self.lambda_kl}: expected 0 or more, '
                             "not both 0; for neither loss use objective = 'ntp'")
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
        self.n_ffn = self.n_ffn or -(-8 * self.n_embd // (3 * 128)) * 128
        self.n_dynamics = self.n_dynamics or 3 * self.n_embd


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
        self.qkv = nn.Linear(C, (config.n_head + 2 * config.n_kv_head) * D, bias=config.qkv_bias)
        self.q_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.norm_eps) if config.qk_norm else None
        self.attn_out = nn.Linear(config.n_head * D, C, bias=False)
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
        qkv = self.qkv(self.attn_norm(h)).unflatten(-1, (H + 2 * HK, self.head_size))
        qk, v = qkv.split([H + HK, HK], 2)
        if self.q_norm is not None:
            q, k = qk.split([H, HK], 2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        q, k = rotate(qk).split([H, HK], 2)
        h = h + self.attn_out(attend(self.layer, q, k, v).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Dynamics(nn.Module):
    """p_psi: h^_{t+1} = h_t + f(LayerNorm([h_t, emb(x_{t+1})])).

    f is three linear layers with GELU between them (appendix, "More details"), here without biases.
    """

    def __init__(self, config):
        super().__init__()
        C, width = config.n_embd, config.n_dynamics
        self.norm = nn.LayerNorm(2 * C, bias=False)
        self.fc1 = nn.Linear(2 * C, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.fc3 = nn.Linear(width, C, bias=False)

    def forward(self, h, e):
        """h (..., C) and the embedding e (..., C) of the token after it -> h^ of that token (..., C)."""
        x = self.norm(torch.cat([h, e], -1))
        return h + self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class Fetch(nn.Module):
    """JTP's head: causal self-attention over h_t, emb(x_{t+1}), ..., emb(x_{t+i}), read at the last of them.

    The paper says no more than that: both norms, the sum with the embedding and the rotation are inferred.
    """

    def __init__(self, config):
        super().__init__()
        C, width = config.n_embd, config.n_head * config.head_size
        self.n_head = config.n_head
        self.norm = RMSNorm(C, config.norm_eps)
        self.qkv = nn.Linear(C, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, C, bias=False)
        self.out_norm = RMSNorm(C, config.norm_eps)

    def project(self, x, rotate):
        """h or embeddings (B, T, C) -> q, k, v (B, T, H, D), q and k rotated: only differences of positions matter."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.n_head, -1)).unbind(2)
        return rotate(q), rotate(k), v

    def forward(self, i, e, q, k, v, k_h, v_h):
        """What the head multiplies to predict x_{t+1+i}, for t = 0 ... T - 1 - i: (B, T - i, C).

        e (B, T, C) is emb(x_t); q, k, v (B, T, H, D) are `project` of e, k_h and v_h of h.
        """
        n = e.shape[1] - i
        keys = [k_h[:, :n], *(k[:, j:j + n] for j in range(1, i + 1))]  # of h_t, x_{t+1}, ..., x_{t+i}
        values = [v_h[:, :n], *(v[:, j:j + n] for j in range(1, i + 1))]
        scores = torch.stack([(q[:, i:] * key).sum(-1) for key in keys], -1) * q.shape[-1] ** -0.5
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
        mixed = sum(weight.unsqueeze(-1) * value for weight, value in zip(weights.unbind(-1), values))
        return self.out_norm(e[:, i:] + self.attn_out(mixed.flatten(2)))


class Cache(KVCache):
    """`KVCache` and what `draft` goes on from.

    MTP's further heads are layers like the others. They are filled, and run, only in a cache for calls of several
    tokens, as plain decoding needs none.
    """

    def __init__(self, config, batch_size, max_tokens, max_run, device, dtype):
        c, D = config, config.head_size
        n_future = c.horizon if c.objective == 'mtp' and max_run > 1 else 0
        super().__init__(c.n_layer + n_future, c.n_kv_head, D, batch_size, max_tokens, max_run, c.n_embd, [None],
                         rope_theta=c.rope_theta, rope_scaling=c.rope_scaling, eos_id=c.eos_id, device=device,
                         dtype=dtype)
        like = dict(device=device, dtype=dtype)
        self.drafted = 0  # tokens drafted since the last call
        self.states = torch.zeros(batch_size, max_run, c.n_embd, **like)  # nextlat: h^ of the drafted tokens
        self.tokens = torch.zeros(batch_size, max_run, device=device, dtype=torch.int64)  # jtp: the drafted tokens
        self.future = torch.zeros(batch_size, max_run, n_future, c.n_embd, **like)  # mtp: `hidden` of each further head

    def rollback(self, n):
        """Forgets the last n tokens of the last call, and all that was drafted: n an int, or (B,) int64, one a row."""
        super().rollback(n)
        self.drafted = 0


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.checkpoints = config, config.checkpoint_blocks  # of p_psi, as of the blocks
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.objective == 'nextlat':
            self.dynamics = Dynamics(config)
        elif config.objective == 'mtp':  # the trunk is all blocks but the last, which is the next token's head
            self.future = nn.ModuleList(Block(config, config.n_layer + i) for i in range(config.horizon))
            for block in self.future:
                block.checkpoints = False  # `_future_heads` has them run again in any case
        elif config.objective == 'jtp':
            self.fetch = Fetch(config)
        if config.tied_head:
            self.head.weight = self.embed.weight
        # This sets every matrix and bias: what is to start otherwise is set after it.
        for name, p in self.named_parameters():
            if p.dim() >= 2:  # as model_standard
                scale = (2 * config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=config.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    @property
    def longest_draft(self):
        """How many tokens `draft` can draft after one; 0: none."""
        return {'ntp': 0, 'nextlat': inf}.get(self.config.objective, self.config.horizon)

    def _run_blocks(self, idx, rotate, attend):
        """idx (B, T) -> the final normalised vectors (B, T, C), and the trunk: what enters the last block.

        rotate and attend as in `Block.forward`.
        """
        h = self.embed(idx)
        for block in self.blocks:
            trunk = h
            h = block(h, rotate, attend)
        return self.norm(h), trunk

    def _rotation(self, T, device):
        """`rotate` of `Block.forward` for positions 0 ... T - 1."""
        c = self.config
        cos, sin = rope_table(torch.arange(T, device=device), c.head_size, c.rope_theta, c.rope_scaling)
        return lambda qk: rotate(qk, cos, sin)

    def _prepare(self, idx):
        """Of whole windows idx (B, T): `rotate` and `attend` as in `Block.forward`, and where their documents start."""
        doc_start = document_starts(idx, self.config.eos_id)
        rotate = self._rotation(idx.shape[1], idx.device)
        return rotate, lambda layer, q, k, v: attention(q, k, v, doc_start), doc_start

    def state(self, idx, which='head'):
        """States of whole windows for analyses. idx (B, T) -> (B, T, C): what the head multiplies, or 'trunk'.

        'trunk' is the last state that the next token's own layers do not touch yet: in mtp what enters the last block,
        from which all heads start; in the others h, in jtp before Fetch. The paper probes the trunk (TinyStories), and
        takes the latent rank of 'head' (Manhattan). Raises ValueError for another word.
        """
        if which not in ('head', 'trunk'):
            raise ValueError(f"which = {which!r}: expected 'head' or 'trunk'")
        rotate, attend, _ = self._prepare(idx)
        h, trunk = self._run_blocks(idx, rotate, attend)
        return trunk if which == 'trunk' and self.config.objective == 'mtp' else h

    def final_hidden(self, idx):
        """What the head multiplies, for whole sequences. idx (B, T) -> (B, T, C)."""
        return self.state(idx)

    def forward(self, idx, targets):
        """idx, targets (B, T) int64, target -1 ignored -> {'loss', 'nll', ...}: nats per counted token.

        The loss is the nll and the other parts times their lambdas: 'next_hidden' and 'kl' (or 'ce') of nextlat,
        'further_tokens' of mtp and jtp. Each part is the mean over i = 1 ... d of a mean over positions. In eval mode
        nextlat has 'next_hidden' and 'kl' even where they have no weight.

        With documents on, positions whose input is eos do not count: what follows them is another document. A
        prediction made at s - i about position s counts where both are in one document. Where the target at s is -1, as
        on a prompt, only its Smooth L1 counts (appendix, "More details"). Raises ValueError for a window that is not
        longer than the horizon.
        """
        c, T = self.config, idx.shape[1]
        self._check_window(T)
        if c.eos_id is not None:
            targets = targets.masked_fill(idx == c.eos_id, -1)
        rotate, attend, doc_start = self._prepare(idx)
        h, trunk = self._run_blocks(idx, rotate, attend)
        # same_document[i - 1][b, s]: is position s - i in the window, and in the document of s
        # future_targets[i - 1][b, s]: the token predicted from s - i; -1 where that is in another document
        position = torch.arange(T, device=idx.device)
        start = torch.zeros_like(idx) if doc_start is None else doc_start
        same_document = torch.stack([start <= position - i for i in range(1, c.horizon + 1)])
        future_targets = [targets.masked_fill(~same, -1) for same in same_document]
        if c.objective == 'nextlat':
            return self._next_latent(idx, targets, h, same_document, future_targets)
        # linear_cross_entropy makes logits in parts: all (B, T, V) would not fit
        nll = linear_cross_entropy(h.flatten(0, 1), self.loss_weight, targets.flatten())
        if c.objective == 'ntp':
            return {'loss': nll, 'nll': nll.detach()}
        if c.objective == 'mtp':
            predictions = self._future_heads(trunk, rotate, attend)
        else:
            predictions = self._fetched(idx, h, rotate)
        shifted = [future[:, i:] for i, future in enumerate(future_targets, 1)]
        further = self._mean_over_horizons(predictions, shifted, self.loss_weight)
        return {'loss': nll + c.lambda_mtp * further, 'nll': nll.detach(), 'further_tokens': further.detach()}

    @property
    def loss_weight(self):
        """The rows of the head that take part in training's softmax."""
        return self.head.weight if self.config.pad_rows_in_loss else self.head.weight[:self.config.n_ids]

    def _check_window(self, T):
        if self.config.objective != 'ntp' and T <= self.config.horizon:
            raise ValueError(f'horizon = {self.config.horizon} does not fit windows of {T} tokens: '
                             'expected a horizon shorter than the window')

    def _mean_over_horizons(self, predictions, targets, weight):
        """Mean over i of the mean nats of targets[i] (B, T_i), -1 ignored, under softmax(predictions[i] weight^T).

        All i go through the loss in one call: each position weighs 1 / (number of i times the counted positions of
        its i).
        """
        row_weights = []
        for target in targets:
            counts = target >= 0
            row_weights.append(counts / (len(targets) * counts.sum().clamp(min=1)))

        def all_rows(parts):
            return torch.cat([part.flatten(0, 1) for part in parts])
        return linear_cross_entropy(all_rows(predictions), weight, all_rows(targets), row_weights=all_rows(row_weights))

    @checkpointed
    def p_psi(self, h, token):
        """h (..., C) and the token (...) after it -> h^ of that token (..., C), in training and in drafting."""
        return self.dynamics(h, self.embed(token))

    def _next_latent(self, idx, targets, h, same_document, future_targets):
        """L_NextLat and its parts, algorithm 1: L_next-token is 'nll', L_next-h 'next_hidden', L_KL 'kl'.

        same_document (d, B, T), future_targets d of (B, T).
        """
        c = self.config
        predicted, predictions = h, []  # predictions[i - 1][:, s] is h^_s, made from h_{s-i}
        for _ in range(c.horizon):  # h^_{t+i} = p_psi(h^_{t+i-1}, x_{t+i}), as in a draft (`_draft_hidden`)
            predicted = self.p_psi(predicted[:, :-1], idx[:, 1:])
            predicted = F.pad(predicted, (0, 0, 1, 0))  # positions before i have no prediction: same_document masks it
            predictions.append(predicted)
        parts = {}  # name: (lambda, loss); validation has Smooth L1 and KL whatever their weights, as the figures do
        evaluates = not self.training
        lambda_kl, lambda_ce = (c.lambda_kl, 0.0) if c.token_loss == 'kl' else (0.0, c.lambda_kl)
        if lambda_kl or evaluates:
            # L_KL is KL(p(.|sg h_s) || p(.|h^_s)), as `linear_cross_entropy_kl_reference` reads: edit it there, and the
            # check before training finds that the fused form differs, so that the definition runs.
            counts = (same_document & (targets >= 0)).flatten(1)
            states = torch.stack([h, *predictions]).flatten(1, 2)
            nll, kl = linear_cross_entropy_kl(states, self.loss_weight, targets.flatten(), counts, c.stop_head)
            parts['kl'] = lambda_kl, kl
        else:
            nll = linear_cross_entropy(h.flatten(0, 1), self.loss_weight, targets.flatten())
        if lambda_ce:
            weight = self.loss_weight.detach() if c.stop_head else self.loss_weight
            parts['ce'] = lambda_ce, self._mean_over_horizons(predictions, future_targets, weight)
        if c.lambda_h or evaluates:
            goal = h.detach() if c.stop_target else h
            means = []
            for predicted, same in zip(predictions, same_document):
                errors = F.smooth_l1_loss(predicted, goal, reduction='none').mean(-1)  # (B, T)
                means.append((errors * same).sum() / same.sum().clamp(min=1))
            parts['next_hidden'] = c.lambda_h, sum(means) / c.horizon
        loss = nll + sum(weight * part for weight, part in parts.values())
        return {'loss': loss, 'nll': nll.detach()} | {name: part.detach() for name, (_, part) in parts.items()}

    def _future_heads(self, trunk, rotate, attend):
        """What mtp gives the head to predict x_{t+1+i} from trunk_t, i = 1 ... d: each (B, T - i, C).

        Each head is recomputed in the backward, so memory hardly grows with d.
        """
        def prediction(i):
            return self._future_state(i, trunk, rotate, attend)[:, :-i]
        return [checkpoint(prediction, i, use_reentrant=False) for i in range(1, self.config.horizon + 1)]

    def _future_state(self, i, trunk, rotate, attend):
        """norm(further head i of the trunk), which the output head multiplies, in training and in drafting.

        trunk (B, T, C) -> (B, T, C).
        """
        return self.norm(self.future[i - 1](trunk, rotate, attend))

    def _fetched(self, idx, h, rotate):
        """What Fetch(h_t, x_{t+1} ... x_{t+i}) gives the head to predict x_{t+1+i}, i = 1 ... d: each (B, T - i, C)."""
        e = self.embed(idx)
        q, k, v = self.fetch.project(e, rotate)
        _, k_h, v_h = self.fetch.project(h, rotate)
        return [checkpoint(self.fetch, i, e, q, k, v, k_h, v_h, use_reentrant=False)
                for i in range(1, self.config.horizon + 1)]

    def adopt(self, tensors):
        """Named weights of a model_standard run, with the parts of this objective new beside them: the same logits."""
        new = {name: p.detach() for name, p in self.named_parameters()
               if name.startswith(('dynamics.', 'future.', 'fetch.')) and name not in tensors}
        return tensors | new

    def logits(self, idx):
        """Next-token logits at every position. idx (B, T) -> (B, T, V); -inf for ids that only pad the vocabulary."""
        return self._logits(self.final_hidden(idx))

    def _logits(self, h):
        # Training's loss does not pass here, so that it holds no logits: edit `forward` and `_next_latent` too.
        logits = self.head(h)
        logits[..., self.config.n_ids:] = float('-inf')
        return logits

    def new_cache(self, batch_size, max_tokens, max_run=1, device=None, dtype=None):
        """An empty cache for batch_size rows of up to max_tokens tokens; calls of up to max_run have static shapes."""
        weight = self.embed.weight
        return Cache(self.config, batch_size, max_tokens, max_run, device or weight.device, dtype or weight.dtype)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Appends tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the rows of the cache.

        Returns the logits of each row's last token (B, V), or of every position (B, n, V) with all_positions.
        Prefill, decoding and the verification of a draft are this one call. Calls of n <= cache.max_run have
        static shapes and never wait for the device. Raises ValueError if a row has no room left (`KVCache.begin`).
        """
        place = cache.begin(tokens, lengths)
        attend = partial(cache.attend, place)
        h, trunk = self._run_blocks(tokens, place.rotate, attend)
        for i in range(1, cache.future.shape[2] + 1):  # mtp's further heads
            future = self._future_state(i, trunk, place.rotate, attend)[cache.batch_idx, place.tail_idx]
            cache.future[:, :future.shape[1], i - 1] = future
        cache.drafted = 0
        last = cache.end(place, h)
        return self._logits(h if all_positions else last)

    @torch.no_grad()
    def draft(self, token, cache, n, pick):
        """Drafts n tokens after token (B,), which comes after those in the cache.

        pick(logits (B, V)) -> token (B,), probs (B, V) draws a token. Returns the tokens (B, n) and the probabilities
        (B, n, V) that they were drawn from. The Transformer does not run and the cache's tokens stay as they are.
        Called again with the last drafted token, it goes on from there, until the next `extend`. Each row must have
        kept a token of the last call. Raises ValueError for more than `longest_draft` or cache.max_run tokens.
        """
        longest = min(self.longest_draft, cache.max_run)
        if cache.drafted + n > longest:
            c = self.config
            raise ValueError(f'a draft of {cache.drafted + n} tokens: objective = {c.objective!r} with horizon = '
                             f'{c.horizon} and max_run = {cache.max_run} drafts up to {longest}')
        tokens, probs = [], []
        for _ in range(n):
            h = self._draft_hidden(token, cache)
            token, prob = pick(self._logits(h))
            cache.drafted += 1
            tokens.append(token)
            probs.append(prob)
        return torch.stack(tokens, 1), torch.stack(probs, 1)

    def _draft_hidden(self, token, cache):
        """What the head multiplies (B, C) to draft x_{t+1+i}: what training gives it for horizon i.

        t is the last token in the cache, x_{t+1} ... x_{t+i-1} are drafted, and token (B,) is x_{t+i}.
        """
        c, i, dtype = self.config, cache.drafted + 1, self.embed.weight.dtype
        batch_idx = cache.batch_idx[:, 0]
        if c.objective == 'mtp':
            if not cache.future.shape[2]:
                raise ValueError('drafting needs a cache with max_run of at least 2')
            return cache.future[batch_idx, cache.last, i - 1].to(dtype)
        h = cache.hidden[batch_idx, cache.last].to(dtype)  # h_t
        if c.objective == 'nextlat':
            h = self.p_psi(h if i == 1 else cache.states[:, i - 2].to(dtype), token)  # h^_{t+i}
            cache.states[:, i - 1] = h
            return h
        cache.tokens[:, i - 1] = token
        x = torch.cat([h.unsqueeze(1), self.embed(cache.tokens[:, :i])], 1)  # jtp: as `_fetched` of a window with one t
        q, k, v = self.fetch.project(x, self._rotation(i + 1, x.device))
        return self.fetch(i, x, q, k, v, k, v).squeeze(1)

    def flops_per_token(self, T):
        """Matmul FLOPs of training one token in windows of T: 6 a weight used (2 forward, 4 backward), and attention.

        A weight that is used for each i counts d times. The KL loss takes 4 a weight of the head, which learns nothing
        from it.
        """
        c = self.config
        self._check_window(T)

        def n_weights(module):  # of matrices; an embedding looks up
            return sum(p.numel() for part in module.modules() if not isinstance(part, nn.Embedding)
                       for p in part.parameters(recurse=False) if p.dim() >= 2)
        n_head, n_layer = self.head.weight.numel(), c.n_layer
        used = n_weights(self)
        kl = 0
        if c.objective == 'nextlat':
            used += (c.horizon - 1) * n_weights(self.dynamics)
            if c.lambda_kl:
                kl = (4 if c.stop_head else 6) * c.horizon * n_head
        elif c.objective == 'mtp':
            used += c.horizon * n_head
            n_layer += c.horizon
        elif c.objective == 'jtp':  # queries of e, keys and values of h and e; for each i the output and the head
            square = c.n_embd * c.n_head * c.head_size
            used += (c.horizon + 1) * square + c.horizon * n_head
        return 6 * used + kl + 12 * n_layer * c.n_head * c.head_size * (T + 1) / 2
