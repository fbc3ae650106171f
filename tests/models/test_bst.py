"""The Belief State Transformer against a float64 loop that encodes each pair separately."""
import collections
import functools
import itertools

import pytest
import test_nextlat
import torch
import torch.nn.functional as F
from references import assert_near, document_numbers, loss_and_gradients, rms_norm
from test_nextlat import block, soft_cap
from torch.utils.flop_counter import FlopCounterMode

import attn_kernels
from lm_architectures.run import models

EOS = 19
make = functools.partial(test_nextlat.make, 'bst', n_text=24)


def paper_losses(model, idx, targets, cap):
    """Return {'loss', 'nll', parts}, computed pair by pair from the definition."""
    c = model.config

    @functools.cache
    def last_vector(encoder, x, empty):
        """Encode x, a tuple of tokens in reading order, and return the vector of the last one."""
        if not x:
            return empty
        h = model.embed.weight[list(x)]
        for layer in encoder.blocks:
            h = block(h, layer, torch.zeros(len(x)))
        return rms_norm(h, encoder.norm)[-1]

    def nats(f, b, head, label):
        hidden = model.text_f.weight @ f + model.text_b.weight @ b
        logits = head.weight @ (model.text_out.weight @ F.gelu(hidden))
        return F.cross_entropy(soft_cap(logits, cap if head is model.head else None), label)

    nll, nexts, previous = [], [], []
    for row, y in zip(idx, targets):
        T, x = len(row), (*row.tolist(), *y[-1:][y[-1:] >= 0].tolist())
        counts, document = [bool(y[0] >= 0), *(y >= 0).tolist()], document_numbers(torch.tensor(x), c.eos_id)
        read = lambda t, positions: tuple(x[s] for s in positions if document[s] == document[t])  # in t's document
        for t in range(T):
            if y[t] >= 0 and row[t] != c.eos_id:
                f = last_vector(model.forward_encoder, read(t, range(t + 1)), model.no_prefix)
                nll.append(nats(f, model.no_suffix, model.head, y[t]))
        pairs = [(t, k) for t in range(T + 1) for k in range(c.min_k, T + 3 - t) if t + k >= 2]
        n = max(1, round(c.pair_share * len(pairs)))
        for t, k in [pairs[i * len(pairs) // n] for i in range(n)]:
            p, q = t, t + k - 2  # 0-based positions of x_{t+1} and x_{t+k-1}
            if max(p, q) >= len(x) or document[p] != document[q]:
                continue
            f = last_vector(model.forward_encoder, read(p, range(p)), model.no_prefix)
            b = last_vector(model.backward_encoder, read(p, range(len(x) - 1, q, -1)), model.no_suffix)
            if counts[p]:
                nexts.append(nats(f, b, model.head, torch.tensor(x[p])))
            if counts[q]:
                previous.append(nats(f, b, model.previous_head, torch.tensor(x[q])))
    nll, nexts, previous = (torch.stack(terms).mean() for terms in (nll, nexts, previous))
    return {'loss': nexts + previous, 'nll': nll, 'pair_next': nexts, 'pair_previous': previous}


@pytest.mark.parametrize('last_counts', [True, False])
@pytest.mark.parametrize('case', [dict(eos_id=EOS), dict(eos_id=None), dict(eos_id=EOS, min_k=2),
                                  dict(eos_id=EOS, pair_share=0.4), dict(eos_id=None, pair_share=0.6, min_k=2)],
                         ids=lambda case: ' '.join(f'{k}={v}' for k, v in case.items()))
@pytest.mark.parametrize('cap', [None, 0.5])
def test_losses_and_gradients_equal_a_loop_over_pairs(case, last_counts, cap):
    """cap: a soft cap on the next-token logits, added in `_logits` as a fork would do."""
    model = make(cap=cap, **case).eval()
    x = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(1))
    x[0, [2, 3]] = x[1, 7] = EOS
    idx, targets = x[:, :-1], x[:, 1:].clone()
    targets[1, :3] = -1  # a prompt
    if not last_counts:
        targets[0, -1] = -1
    want, got = paper_losses(model, idx, targets, cap), model(idx, targets)
    assert_near(got, want, 1e-5)
    assert_near(*(loss_and_gradients(out['loss'], model) for out in (got, want)), 1e-5)


def test_training_resamples_pairs_and_evaluation_does_not():
    model = make(eos_id=None, pair_share=0.25).train()
    torch.manual_seed(0)
    draws = [[*zip(*model._draw_pairs(30, 'cpu').tolist())] for _ in range(200)]
    every = [(p, q) for p in range(31) for q in range(31) if q >= p - 1]
    assert all(len(set(drawn)) == len(drawn) == round(0.25 * len(every)) for drawn in draws)
    times = collections.Counter(itertools.chain(*draws))
    assert times.keys() == set(every) and 20 < min(times.values()) and max(times.values()) < 85  # 50 are expected
    model.eval()
    assert torch.equal(model._draw_pairs(30, 'cpu'), model._draw_pairs(30, 'cpu'))


def test_hidden_layer_is_computed_in_chunks_of_pairs(monkeypatch):
    widths, hidden, gelu = [], [], F.gelu

    def in_short_chunks(fn, rows, params, width, shared=()):
        widths.append(width)
        return attn_kernels.chunked_loss(fn, rows, params, 2 ** 26, shared)
    monkeypatch.setattr(models.model_file('bst'), 'chunked_loss', in_short_chunks)
    monkeypatch.setattr(F, 'gelu', lambda x: hidden.append(len(x)) or gelu(x))
    model, tokens = make(dtype=torch.float32, eos_id=None, n_text=64), torch.zeros(1, 100, dtype=torch.int64)
    model(tokens, tokens)['loss'].backward()
    n_pairs = 101 * 102 // 2 + 100
    assert max(hidden) < 0.1 * n_pairs and widths[0] >= 2 * 24 + 64  # two softmaxes and the hidden layer


def test_flops_per_token_equal_the_flop_counter():
    """Attention is not counted, but it is small in this model."""
    model = make(dtype=torch.float32, n_embd=64, n_text=16, vocab_size=2048, eos_id=None, pair_share=0.5)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens)['loss'].backward()
    assert counter.get_total_flops() == pytest.approx(32 * model.flops_per_token(32), rel=0.02)
