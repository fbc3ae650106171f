"""NextLat, MTP, JTP and BST against their papers in float64; drafts against full forwards."""
import collections
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import saved_bytes
from references import assert_near, document_numbers, gelu, loss_and_gradients, rms_norm, rotary, transformer_block
from variants import small_model

import attn_kernels
from lm_architectures.run import models

EOS = 19


SIZES = dict(n_layer=2, n_embd=16, vocab_size=24, n_ids=20)


def make(name='nextlat', eos_id=EOS, dtype=torch.float64, cap=None, **values):
    """Return a small model with large weights. cap: soft cap of the logits, as in a fork."""
    torch.manual_seed(0)
    own = dict(n_text=24) if name == 'bst' else {}
    model = small_model(name, SIZES | dict(eos_id=eos_id) | own | values).to(dtype)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.dim() >= 2 else torch.nn.init.uniform_(p, 0.5, 1.5)
    if cap:
        plain = model._logits
        model._logits = lambda *args, **kwargs: soft_cap(plain(*args, **kwargs), cap)
    return model


def soft_cap(logits, cap):
    return cap * torch.tanh(logits / cap) if cap else logits


# ---- the paper's equations, one sequence at a time ----

def block(h, layer, documents):
    """Apply a Transformer block with causal attention within documents (T,) to h (T, C)."""
    seen = (documents == documents[:, None]).tril()
    return transformer_block(h[None], layer, torch.arange(len(h)), seen[None])[0]


def dynamics(h, e, layer):
    x = torch.cat([h, e])
    x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() * layer.norm.weight
    for fc in (layer.fc1, layer.fc2):
        x = gelu(fc.weight @ x)
    return h + layer.fc3.weight @ x


def fetch(h, e, layer):
    """JTP's Fetch head: h (C,) and the embeddings e (i, C) of the next tokens -> (C,)."""
    q, k, v = zip(*((layer.qkv.weight @ rms_norm(x, layer.norm)).view(3, 2, -1) for x in (h, *e)))
    q, k = rotary(q[-1], len(e)), torch.stack([rotary(x, j) for j, x in enumerate(k)])
    shares = (torch.einsum('hd,jhd->jh', q, k) * q.shape[-1] ** -0.5).softmax(0)
    mixed = torch.einsum('jh,jhd->hd', shares, torch.stack(v)).flatten()
    return rms_norm(e[-1] + layer.attn_out.weight @ mixed, layer.out_norm)


def state_loss(a, b, kind):
    d = (a - b).abs()
    return d.square().mean() if kind == 'mse' else torch.where(d < 1, 0.5 * d * d, d - 0.5).mean()


def encode(model, x):
    """Return document numbers (T,), the inputs of the last block, and final states (T, C)."""
    documents, trunk = document_numbers(x, model.config.eos_id), model.embed.weight[x]
    for layer in model.blocks[:-1]:
        trunk = block(trunk, layer, documents)
    return documents, trunk, rms_norm(block(trunk, model.blocks[-1], documents), model.norm)


def ahead(name, model, x, t, encoded):
    """Yield the vector that predicts x_{t+1+i} from t and the tokens between, i = 1, 2, ..."""
    (documents, trunk, h), e = encoded, model.embed.weight[x]
    guess = h[t]
    for i in itertools.count(1):
        if name == 'nextlat':
            guess = dynamics(guess, e[t + i], model.dynamics)
        elif name == 'mtp':
            guess = rms_norm(block(trunk, model.future[i - 1], documents), model.norm)[t]
        else:
            guess = fetch(h[t], e[t + 1:t + i + 1], model.fetch)
        yield guess


def paper_losses(name, model, idx, targets, cap=None):
    """Return {'loss', 'nll', parts} from the paper's equations."""
    c, head, terms = model.config, model.head.weight, collections.defaultdict(list)
    log_p = lambda h, weight=head: soft_cap(weight @ h, cap).log_softmax(-1)
    weights, reported = {'further_tokens': getattr(c, 'lambda_mtp', 0)}, ()
    if name == 'nextlat':
        weights = {'next_hidden': c.lambda_h, c.token_loss: c.lambda_kl} if c.objective == 'nextlat' else {}
        reported = ('next_hidden', 'kl') if weights and not model.training else ()
    for x, y in zip(idx, targets):
        encoded = documents, _, h = encode(model, x)
        counts = (y >= 0) & (x != (-1 if c.eos_id is None else c.eos_id))
        terms['nll', 0] += [-log_p(h[t])[y[t]] for t in range(len(x)) if counts[t]]
        for t in range(len(x) if weights else 0):
            in_document = [s for s in range(t + 1, min(t + c.horizon + 1, len(x))) if documents[s] == documents[t]]
            for i, (s, guess) in enumerate(zip(in_document, ahead(name, model, x, t, encoded))):
                if name == 'nextlat':
                    goal = h[s].detach() if c.stop_target else h[s]
                    terms['next_hidden', i].append(state_loss(guess, goal, c.state_loss))
                log_q = log_p(guess, head.detach() if getattr(c, 'stop_head', False) else head)
                if counts[s]:
                    p = log_p(h[s]).detach()
                    terms['kl', i].append((p.exp() * (p - log_q)).sum())
                    terms['ce', i].append(-log_q[y[s]])
    terms |= {('further_tokens', i): terms['ce', i] for i in range(c.horizon)}
    mean = lambda part, i: torch.stack(terms[part, i]).mean() if terms[part, i] else torch.zeros((), dtype=head.dtype)
    parts = {part: sum(mean(part, i) for i in range(c.horizon)) / c.horizon
             for part in {**weights, **dict.fromkeys(reported)} if weights.get(part) or part in reported}
    nll = mean('nll', 0)
    return {'loss': nll + sum(weights.get(part, 0) * x for part, x in parts.items()), 'nll': nll} | parts


SWITCHES = [dict(), dict(token_loss='ce'), dict(stop_target=False), dict(stop_head=False),
            dict(token_loss='ce', stop_head=False), dict(lambda_h=0), dict(lambda_kl=0),
            dict(lambda_h=2.0, lambda_kl=0.1), dict(state_loss='mse'), dict(cap=0.5)]
CASES = [('nextlat', dict(objective='ntp')),
         *((name, dict(horizon=d, lambda_mtp=0.4, cap=cap)) for name in ('mtp', 'jtp') for d in (1, 2, 3)
           for cap in (None, 0.5)),
         *(('nextlat', dict(horizon=d, **more)) for d in (1, 2, 3) for more in SWITCHES)]


@pytest.mark.parametrize('documents, training', [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize('name, case', CASES, ids=lambda x: x if isinstance(x, str) else ' '.join(map(str, x.items())))
def test_losses_and_gradients_equal_the_papers_equations(name, case, documents, training):
    model = make(name, EOS if documents else None, **case).train(training)
    generator = torch.Generator().manual_seed(1)
    idx = torch.randint(0, 19, (2, 9), generator=generator)
    idx[0, [2, 3]] = idx[1, 8] = EOS
    targets = torch.randint(0, 20, (2, 9), generator=generator)
    targets[1, :4] = -1  # a prompt
    want, got = paper_losses(name, model, idx, targets, case.get('cap')), model(idx, targets)
    assert_near(got, want, 1e-6)
    assert_near(*(loss_and_gradients(out['loss'], model) for out in (got, want)), 1e-6)


@pytest.mark.parametrize('name, T', [('nextlat', 200), ('mtp', 200), ('jtp', 200), ('bst', 20)])
def test_losses_and_gradients_do_not_depend_on_chunk_length(name, T, monkeypatch):
    model, idx = make(name), torch.randint(0, 20, (2, T), generator=torch.Generator().manual_seed(0))

    def results(width):  # 2 ** 26 makes chunks of 256 rows
        monkeypatch.setattr(models.model_file(name), 'chunked_loss', lambda fn, rows, params, _, shared=():
                            attn_kernels.chunked_loss(fn, rows, params, width, shared))
        out = model(idx, idx)
        return list(out.values()), torch.autograd.grad(out['loss'], list(model.parameters()))
    torch.testing.assert_close(results(2 ** 26), results(1))


def test_one_seed_gives_all_models_the_same_transformer():
    def trunk(name, **values):
        torch.manual_seed(0)
        tensors = small_model(name, SIZES | dict(eos_id=None) | values).state_dict()
        tensors = {key.removeprefix('forward_encoder.'): p for key, p in tensors.items()}
        return {key: p for key, p in tensors.items() if key.split('.')[0] in ('embed', 'blocks', 'norm', 'head')}
    want = trunk('standard', n_ffn=128, tied_head=False)
    for name, values in (('nextlat', dict(objective='ntp')), ('nextlat', {}), ('mtp', dict(horizon=2)), ('jtp', {}),
                         ('bst', {})):
        got = trunk(name, **values)
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize('name, case', [('nextlat', dict(horizon=1)), ('mtp', dict(horizon=3)),
                                        ('jtp', dict(horizon=3))])
@pytest.mark.parametrize('documents', [True, False])
def test_draft_probabilities_are_those_that_training_scores(name, case, documents):
    """Drafts one token, then two more, after ragged extends and a rollback."""
    model = make(name, EOS if documents else None, cap=2.0, **case).eval()
    idx = torch.randint(0, 19, (3, 12), generator=torch.Generator().manual_seed(2))
    idx[0, 4] = idx[1, 1] = EOS
    cache = model.new_cache(3, 12, max_call=4)
    model.extend(idx[:, :6], cache, torch.tensor([4, 6, 5]))
    run = torch.stack([F.pad(idx[b, n:n + 3], (0, 1)) for b, n in enumerate([4, 6, 5])])
    model.extend(run, cache, torch.tensor([3, 3, 2]))
    undone = model.draft(run[:, 0], cache, 2, lambda logits: (logits.argmax(-1), logits.softmax(-1)))
    assert undone[0].shape == (3, 2)  # the rollback below discards it
    cache.rollback(torch.tensor([1, 0, 1]))
    held = [6, 9, 6]  # tokens kept per row; from here on each row is in one document
    assert cache.lengths.tolist() == held
    token, choices = idx[[0, 1, 2], held], iter([3, 7, 11])
    pick = lambda logits: (torch.full((3,), next(choices)), logits.softmax(-1))
    first = model.draft(token, cache, 1, pick)
    more = model.draft(first[0][:, 0], cache, 2, pick)
    tokens, probs = (torch.cat(pair, 1) for pair in zip(first, more, strict=True))
    assert tokens.tolist() == [[3, 7, 11]] * 3
    for b, n in enumerate(held):
        x = torch.cat([idx[b, :n], token[b:b + 1], tokens[b]])
        for found, guess in zip(probs[b, :, :20], ahead(name, model, x, n - 1, encode(model, x))):
            want = soft_cap(model.head.weight @ guess, 2.0)[:20].softmax(-1)
            assert (found - want).abs().max() < 1e-5


def test_mtp_memory_hardly_grows_with_the_horizon():
    """Further heads are checkpointed, so that autograd does not save their activations."""
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    models = [make('mtp', dtype=torch.float32, horizon=horizon) for horizon in (1, 4)]
    one, four = (saved_bytes(lambda: model(tokens, tokens)) - sum(p.nbytes for p in model.parameters())
                 for model in models)
    assert four < 1.5 * one


# ---- the Belief State Transformer, which predicts pairs of tokens ----

def pair_losses(model, idx, targets, cap):
    """Return {'loss', 'nll', parts}, computed pair by pair from the definition."""
    c, (nll, nexts, previous) = model.config, ([], [], [])

    def states(encoder, x, document):
        h = model.embed.weight[x]
        for layer in encoder.blocks:
            h = block(h, layer, document)
        return rms_norm(h, encoder.norm)

    def nats(f, b, head, label):
        hidden = model.text_f.weight @ f + model.text_b.weight @ b
        logits = head.weight @ (model.text_out.weight @ F.gelu(hidden))
        return F.cross_entropy(soft_cap(logits, cap if head is model.head else None), label)

    for row, y in zip(idx, targets):
        T, x = len(row), torch.cat([row, y[-1:][y[-1:] >= 0]])
        counts, document = [bool(y[0] >= 0), *(y >= 0).tolist()], document_numbers(x, c.eos_id)
        f = states(model.forward_encoder, x, document)
        b = states(model.backward_encoder, x.flip(0), document.flip(0)).flip(0)
        nll += [nats(f[t], model.no_suffix, model.head, y[t]) for t in range(T) if y[t] >= 0 and row[t] != c.eos_id]
        pairs = [(t, k) for t in range(T + 1) for k in range(c.min_k, T + 3 - t) if t + k >= 2]
        n = max(1, round(c.pair_share * len(pairs)))
        for t, k in [pairs[i * len(pairs) // n] for i in range(n)]:
            p, q = t, t + k - 2  # 0-based positions of x_{t+1} and x_{t+k-1}
            if max(p, q) >= len(x) or document[p] != document[q]:
                continue
            prefix = f[p - 1] if p > 0 and document[p - 1] == document[p] else model.no_prefix
            suffix = b[q + 1] if q + 1 < len(x) and document[q + 1] == document[q] else model.no_suffix
            nexts += [nats(prefix, suffix, model.head, x[p])] * counts[p]
            previous += [nats(prefix, suffix, model.previous_head, x[q])] * counts[q]
    nll, nexts, previous = (torch.stack(terms).mean() for terms in (nll, nexts, previous))
    return {'loss': nexts + previous, 'nll': nll, 'pair_next': nexts, 'pair_previous': previous}


@pytest.mark.parametrize('last_counts', [True, False])
@pytest.mark.parametrize('case', [dict(eos_id=EOS), dict(eos_id=None), dict(eos_id=EOS, min_k=2),
                                  dict(eos_id=EOS, pair_share=0.4), dict(eos_id=None, pair_share=0.6, min_k=2)],
                         ids=lambda case: ' '.join(f'{k}={v}' for k, v in case.items()))
@pytest.mark.parametrize('cap', [None, 0.5])
def test_losses_and_gradients_equal_a_loop_over_pairs(case, last_counts, cap):
    """cap: a soft cap on the next-token logits, added in `_logits` as a fork would do."""
    model = make('bst', cap=cap, **case).eval()
    x = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(1))
    x[0, [2, 3]] = x[1, 7] = EOS
    idx, targets = x[:, :-1], x[:, 1:].clone()
    targets[1, :3] = -1  # a prompt
    if not last_counts:
        targets[0, -1] = -1
    want, got = pair_losses(model, idx, targets, cap), model(idx, targets)
    assert_near(got, want, 1e-5)
    assert_near(*(loss_and_gradients(out['loss'], model) for out in (got, want)), 1e-5)


def test_bst_training_resamples_pairs_and_evaluation_does_not():
    model = make('bst', None, pair_share=0.25).train()
    torch.manual_seed(0)
    draws = [[*zip(*model._draw_pairs(30, 'cpu').tolist())] for _ in range(200)]
    every = [(p, q) for p in range(31) for q in range(31) if q >= p - 1]
    assert all(len(set(drawn)) == len(drawn) == round(0.25 * len(every)) for drawn in draws)
    times = collections.Counter(itertools.chain(*draws))
    assert times.keys() == set(every) and 20 < min(times.values()) and max(times.values()) < 85  # 50 are expected
    model.eval()
    assert torch.equal(model._draw_pairs(30, 'cpu'), model._draw_pairs(30, 'cpu'))


def test_bsts_hidden_layer_is_computed_in_chunks_of_pairs(monkeypatch):
    widths, hidden, gelu = [], [], F.gelu

    def in_short_chunks(fn, rows, params, width, shared=()):
        widths.append(width)
        return attn_kernels.chunked_loss(fn, rows, params, 2 ** 26, shared)
    monkeypatch.setattr(models.model_file('bst'), 'chunked_loss', in_short_chunks)
    monkeypatch.setattr(F, 'gelu', lambda x: hidden.append(len(x)) or gelu(x))
    model, tokens = make('bst', None, torch.float32, n_text=64), torch.zeros(1, 100, dtype=torch.int64)
    model(tokens, tokens)['loss'].backward()
    n_pairs = 101 * 102 // 2 + 100
    assert max(hidden) < 0.1 * n_pairs and widths[0] >= 2 * 24 + 64  # two softmaxes and the hidden layer
