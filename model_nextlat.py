"""NextLat: a Transformer trained to predict its own next hidden state.

"Next-Latent Prediction Transformers Learn Compact World Models" (arXiv 2511.05963).

The final hidden state h_t should be a belief state: a summary of all that the past says about the
future. So besides the next-token loss, a small network p_psi learns to predict h_{t+1} from h_t and
the token x_{t+1}; the Transformer itself is unchanged. p_psi also drafts for speculative decoding:
applied to its own output, it proposes any number of tokens without running the Transformer.

    h^_{t+1} = p_psi(h_t, x_{t+1}), h^_{t+2} = p_psi(h^_{t+1}, x_{t+2}), ...   `Dynamics`
    loss = L_next-token + lambda_next-h L_next-h + lambda_KL L_KL              `Model._losses`
    L_next-h = mean over t and i of SmoothL1(sg[h_{t+i}], h^_{t+i})            `Losses`
    L_KL     = mean over t and i of KL(p(.|sg[h_{t+i}]) || p(.|h^_{t+i}))      `Losses`

sg stops gradients, and the head p is frozen in L_KL. Read `Model.forward`, `_losses` and `Losses`,
then `draft`. The baselines MTP, JTP and BST have their own files. All initialize the Transformer
first, so the same seed gives it the same weights.

    B  batch size   T  positions          C  width, n_embd               V  vocabulary, padded
    L  layers       H  heads of size D    F  feed-forward width, 8/3 C   d  horizon: i = 1 ... d
    HK key heads    n  tokens of one `extend` call or draft
    h  final hidden states, the inputs of the head                       h^ p_psi's prediction of h
"""
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

from attn_kernels import (KVCache, at_least_fp32, attention, check_shape, checkpointed, chunked_loss, counted_targets,
                          document_starts, make_mask, mask_padding, mean_keys, n_matrix_weights, rope_table, rotate)


@dataclass
class Config:
    # for train.py and analyses: docs/own_model.md
    may_change = 'checkpoint_blocks',  # settings that only affect speed and memory

    objective: Literal['nextlat', 'ntp'] = 'nextlat'  # ntp: next-token loss only, GPT in the paper's tables
    horizon: int = 1  # d: number of steps ahead that p_psi is trained to predict
    lambda_h: float = 1.0  # lambda_next-h: weight of the loss between h^ and h; 0: off
    state_loss: Literal['smooth_l1', 'mse'] = 'smooth_l1'  # loss between h^ and h; mse: appendix, pretraining quirks
    lambda_kl: float = 1.0  # lambda_KL: weight of the loss that token_loss names; 0: off
    token_loss: Literal['kl', 'ce'] = 'kl'  # kl: KL(p(h) || p(h^)); ce: cross-entropy of h^ (appendix, ablations)
    stop_target: bool = True  # stop the gradient into L_next-h's target h (L_KL's gets none); False: ablations
    stop_head: bool = True  # stop the head's gradient from losses on h^; False: appendix, ablations
    n_dynamics: int | None = None  # width of p_psi's two hidden layers; None: 3 n_embd (paper: 6528 at 2048)
    n_layer: int = 12  # blocks, L
    n_head: int = 12  # attention heads, H
    n_embd: int = 768  # width of the residual stream, C
    n_ffn: int | None = None  # feed-forward width, F; None: 8/3 n_embd, rounded up to a multiple of 128 (inferred)
    rope_theta: float = 10000.0  # base of the RoPE frequencies
    norm_eps: float = 1e-5  # epsilon of RMSNorm
    init_std: float = 0.02  # standard deviation of the initial weights
    tied_head: bool = False  # the output head shares the embedding's weights
    checkpoint_blocks: bool = False  # activation checkpointing: less memory, a third more compute
    vocab_size: int = 50304  # rows of the embedding table, V: token ids, then padding
    n_ids: int = 50257  # number of token ids; rows from n_ids on are padding
    pad_rows_in_loss: bool = True  # include padding rows in the training softmax, as in the official SPS code
    eos_id: int | None = 50256  # end-of-document id: attention and losses do not cross it; None: one document
    # For the weights of pretrained models (docs/pretrained.md):
    n_kv_head: int | None = None  # key and value heads, HK; each serves H / HK query heads; None: n_head
    head_size: int | None = None  # D; None: n_embd / n_head
    qkv_bias: bool = False  # biases on queries, keys and values, as in Qwen2
    qk_norm: bool = False  # RMSNorm on each head's query and key, before RoPE, as in Qwen3
    rope_scaling: tuple[float, ...] | None = None  # Llama 3's RoPE scaling: factor, low, high, tokens (8,1,4,8192)

    def __post_init__(self):
        check_shape(self, horizon=1, n_dynamics=1, lambda_h=0, lambda_kl=0)  # sets head_size and n_kv_head
        self.n_ffn = self.n_ffn or -(-8 * self.n_embd // (3 * 128)) * 128
        self.n_dynamics = self.n_dynamics or 3 * self.n_embd


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
        q, k, v = self.qkv(self.attn_norm(h)).unflatten(-1, (-1, self.head_size)).split(n_heads, 2)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        h = h + self.attn_out(attention(q, k, v, mask).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)


class Dynamics(nn.Module):
    """p_psi: three linear layers with GELU (appendix, "More details"). Inferred: no biases."""

    def __init__(self, config):
        super().__init__()
        C, width = config.n_embd, config.n_dynamics
        self.checkpoints = config.checkpoint_blocks
        self.norm = nn.LayerNorm(2 * C, bias=False)
        self.fc1 = nn.Linear(2 * C, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.fc3 = nn.Linear(width, C, bias=False)

    @checkpointed
    def forward(self, h, e):
        """Return h^ of the next token, given h and that token's embedding e. All (..., C)."""
        x = self.norm(torch.cat([h, e], -1))
        return h + self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class Losses(nn.Module):
    """The parts of the loss, from states and their logits; compiled like `CrossEntropy`."""

    dynamic = True  # one compilation for chunks of all lengths

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, names, targets, token_weights, state_weights, states, logits):
        """Return the nll and other parts of the loss of N positions, averaged over i = 1 ... d.

        names: of the other parts to compute; targets: (N,); weights: (N, d + 1) from
        `Model._weights`; states: h, then h^ for each i, (N, C) each; logits: of these states, or of
        h alone, (N, V) each.
        """
        c, (h, *predicted) = self.config, states
        torch._check(logits[0].shape[-1] == c.vocab_size)  # see `CrossEntropy`
        log_p, *log_q = map(self.log_probs, logits)  # log p(.|h), then log p(.|h^) for each i
        parts = {'nll': weighted_mean([cross_entropy(log_p, targets)], token_weights[:, :1])}
        if 'next_hidden' in names:  # L_next-h
            distance = F.mse_loss if c.state_loss == 'mse' else F.smooth_l1_loss
            goal = h.detach() if c.stop_target else h
            distances = [distance(h_hat, goal, reduction='none').mean(-1) for h_hat in predicted]
            parts['next_hidden'] = weighted_mean(distances, state_weights[:, 1:])
        if 'kl' in names:  # L_KL
            goal = log_p.detach()
            p = goal.exp()
            parts['kl'] = weighted_mean([(p * (goal - q)).sum(-1) for q in log_q], token_weights[:, 1:])
        if 'ce' in names:  # in place of L_KL: the next tokens as targets (appendix, ablations)
            parts['ce'] = weighted_mean([cross_entropy(q, targets) for q in log_q], token_weights[:, 1:])
        return parts

    def log_probs(self, logits):
        """Return fp32 log-probabilities (N, V), or (N, n_ids) without padding. logits: (N, V)."""
        if not self.config.pad_rows_in_loss:
            logits = logits[:, :self.config.n_ids]
        return at_least_fp32(logits).log_softmax(-1)


def cross_entropy(log_q, targets):
    """Return the cross-entropy of targets (N,), -1 ignored, under log_q (N, V): (N,)."""
    return F.nll_loss(log_q, targets, ignore_index=-1, reduction='none')


def weighted_mean(losses, weights):
    """Return the weighted sum over N positions, averaged over d losses (N,). weights: (N, d).

    Columns of weights sum to 1 over all chunks, so the sum of all chunks is a mean.
    """
    return sum((x * weights[:, i]).sum() / len(losses) for i, x in enumerate(losses))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        has_dynamics = config.objective == 'nextlat'
        self.horizon = config.horizon if has_dynamics else 0
        self.longest_draft = inf if has_dynamics else 0  # tokens that `draft` can propose, for speculative decoding
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        self.loss_parts = Losses(config)
        self._init_weights(self)
        if has_dynamics:
            self.dynamics = Dynamics(config)
            self._init_weights(self.dynamics)

    def _init_weights(self, module):
        """Initialize every matrix and bias in `module`. Set other values afterwards."""
        for name, p in module.named_parameters():
            if p.dim() >= 2:  # as in model_standard, only the attention output is scaled down with depth
                scale = (2 * self.config.n_layer) ** -0.5 if name.endswith('attn_out.weight') else 1.0
                nn.init.normal_(p, std=self.config.init_std * scale)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def sees(self, q, k):
        """Return True where query q attends to key k. Used in training and in decoding."""
        return (k.pos <= q.pos) & (k.pos >= q.doc_start)

    def _run_blocks(self, idx, rope, mask, cache=None):
        """Return the final normalized hidden states. idx: (B, T) -> (B, T, C)."""
        h = self.embed(idx)
        for block in self.blocks:
            h = block(h, rope, mask, cache)
        return self.norm(h)

    def p_psi(self, h, token):
        """Return h^_{t+1} from h_t (..., C) and x_{t+1} (...). Used in training and drafting."""
        return self.dynamics(h, self.embed(token))

    def final_hidden(self, idx):
        """Return the inputs of the output head. idx: (B, T) -> (B, T, C)."""
        c, T = self.config, idx.shape[1]
        rope = rope_table(torch.arange(T, device=idx.device), c.head_size, c.rope_theta, c.rope_scaling)
        mask = make_mask(self, T, idx.device, document_starts(idx, c.eos_id))
        return self._run_blocks(idx, rope, mask)

    def forward(self, idx, targets):
        """Return {'loss', 'nll', parts}, mean nats per token. idx, targets: (B, T); -1 is ignored.

        loss = nll + lambda_h next_hidden + lambda_kl kl (or ce). Each part is averaged over i =
        1 ... d and over positions (algorithm 1).
        """
        c = self.config
        targets = counted_targets(idx, targets, c.eos_id)
        # states[0][:, s] is h_s. states[i][:, s] is h^_s after i steps of p_psi from h_{s-i}.
        states = [self.final_hidden(idx)]
        for _ in range(self.horizon):
            predicted = self.p_psi(states[-1][:, :-1], idx[:, 1:])
            states.append(F.pad(predicted, (0, 0, 1, 0)))  # the first i are no predictions: their weight is 0
        rows = [x.flatten(0, 1) for x in (targets, *self._weights(idx, targets), *states)]
        return chunked_loss(self._losses, rows, self.parameters(), (self.horizon + 1) * c.vocab_size)

    def _weights(self, idx, targets):
        """Return the weights of positions in losses on tokens and on states, (B, T, d + 1) each.

        Column i is for the predictions of h_s from h_{s-i}. It sums to 1, or to 0 if none counts.
        One counts if both are in one document. Where the target at s is -1, as on a prompt, only
        the loss between h^ and h counts (appendix, "More details").
        """
        doc_start = 0 if self.config.eos_id is None else document_starts(idx, self.config.eos_id)
        age = torch.arange(idx.shape[1], device=idx.device).expand_as(idx) - doc_start  # positions since its start
        same_document = age.unsqueeze(-1) >= torch.arange(self.horizon + 1, device=idx.device)
        counted = same_document & (targets >= 0).unsqueeze(-1)
        return [x / x.sum((0, 1)).clamp(min=1) for x in (counted, same_document)]

    def _losses(self, targets, token_weights, state_weights, h, *predicted):
        """Return the loss of a chunk of N positions, its nll and its parts, from `Losses`.

        Parts with a weight of 0 are skipped, but evaluation always reports next_hidden and kl.
        """
        c, lambdas = self.config, {}  # ntp has no part but the nll
        if predicted and not self.training:
            lambdas = {'next_hidden': 0.0, 'kl': 0.0}
        if predicted and c.lambda_h:
            lambdas['next_hidden'] = c.lambda_h
        if predicted and c.lambda_kl:
            lambdas[c.token_loss] = c.lambda_kl
        needs_logits = 'kl' in lambdas or 'ce' in lambdas
        predicted_logits = [self._logits(h_hat, c.stop_head) for h_hat in predicted] if needs_logits else []
        logits = [self._logits(h), *predicted_logits]
        parts = self.loss_parts(tuple(lambdas), targets, token_weights, state_weights, (h, *predicted), logits)
        return {'loss': parts['nll'] + sum(x * parts[name] for name, x in lambdas.items())} | parts

    def _logits(self, h, frozen=False):
        """Return logits over all V rows. frozen: without a gradient for the head's weights."""
        if frozen:  # with whatever the head consists of, such as an adapter
            return functional_call(self.head, {name: p.detach() for name, p in self.head.named_parameters()}, h)
        return self.head(h)

    def logits(self, idx):
        """Return next-token logits, -inf for padding ids. idx: (B, T) -> (B, T, V)."""
        return mask_padding(self._logits(self.final_hidden(idx)), self.config.n_ids)

    def adopt(self, tensors):
        """Add p_psi's initial weights to a model_standard run's weights; logits do not change."""
        return {name: p.detach() for name, p in self.named_parameters() if name.startswith('dynamics.')} | tensors

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        """Return an empty `KVCache` for batch_size rows of up to max_tokens tokens each."""
        cache = KVCache(self, batch_size, max_tokens, max_call, device, dtype)
        cache.draft_states = torch.zeros_like(cache.hidden)  # (B, max_call, C): h^ of the drafted tokens
        return cache

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n) to the cache; return next-token logits as in model_standard.py."""
        h = torch.cat([self._run_blocks(piece.tokens, piece.rope, piece.mask(), cache)
                       for piece in cache.pieces(tokens, lengths)], 1)
        last = cache.end(h)  # for all_positions, too: it finishes the call
        return mask_padding(self._logits(h if all_positions else last), self.config.n_ids)

    @torch.no_grad()
    def draft(self, token, cache, n, pick):
        """Draft n tokens after token (B,), which follows the cache. The Transformer does not run.

        pick(logits (B, V)) -> token (B,), probs (B, V) samples a token. Returns tokens (B, n) and
        the probabilities (B, n, V) they were sampled from. Another call with the last drafted token
        continues the draft. Not after a rollback of all tokens of the last `extend`.
        """
        drawn = []
        for i in range(cache.drafted, cache.drafted + n):
            h = cache.draft_states[:, i - 1] if i else cache.hidden[cache.batch_idx[:, 0], cache.last]  # h_t
            h = self.p_psi(h.to(self.embed.weight.dtype), token)
            cache.draft_states[:, i] = h
            token, probs = pick(mask_padding(self._logits(h), self.config.n_ids))
            drawn.append((token, probs))
        cache.drafted += n
        tokens, probs = zip(*drawn)
        return torch.stack(tokens, 1), torch.stack(probs, 1)

    def flops_per_token(self, T):
        """Return training FLOPs per token at length T: 6 per matrix weight, plus attention.

        p_psi runs d times, and so does the head for the KL loss, without weight gradient if frozen.
        """
        c = self.config
        # 12: 2 products x 2 FLOPs x 3 passes
        attention_flops = 12 * c.n_layer * c.n_head * c.head_size * mean_keys(self.sees, T)
        flops = 6 * n_matrix_weights(self) + attention_flops
        if c.objective == 'nextlat':
            flops += 6 * (c.horizon - 1) * n_matrix_weights(self.dynamics)
            if c.lambda_kl:
                flops += (4 if c.stop_head else 6) * c.horizon * self.head.weight.numel()
        return flops
