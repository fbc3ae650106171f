"""The edits of docs/own_model.md: a pattern per layer, and biases of scores, against float64."""
import importlib
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from references import assert_close, assert_near, decode, dense_attention, dense_mask, loss_and_gradients, random_model
from torch.nn.attention import flex_attention

import attn_kernels as K

ALTERNATING, ALIBI = re.findall(r'```diff\n(.*?)```', (ROOT / 'docs/own_model.md').read_text(), re.DOTALL)
SIZES = dict(n_layer=4, n_embd=32, vocab_size=64, n_ids=60)
HEADS = dict(n_head=4), dict(n_head=4, n_kv_head=2)


def apply(diff, source):
    """Return the source with each part of a diff applied, parts separated by @@."""
    for part in diff.split('@@\n'):
        before, after = (''.join(line[1:] + '\n' for line in part.splitlines() if line[:1] in kept) or '' for kept in
                         ((' ', '-', ''), (' ', '+', '')))
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


@pytest.fixture(params=[ALTERNATING, ALIBI], ids=['alternating', 'alibi'])
def edited(request, import_edited):
    """Return a module with an edited copy of model_standard.py."""
    assert sum(line[:1] == '+' and line.strip() != '+' for line in request.param.splitlines()) <= 8
    return import_edited('standard', lambda source: apply(request.param, source))


def masks(file, doc_start, T, config):
    """Return the definition of each layer's mask, (B, T, T), and of the bias, (H, T, T) or 0."""
    q, k = torch.arange(T)[:, None], torch.arange(T)
    seen = (k <= q) & (k >= (torch.zeros(1, T, 1).long() if doc_start is None else doc_start[..., None]))
    if hasattr(file.Model, 'score_bias'):
        slopes = 2.0 ** (-8 * torch.arange(1, config.n_head + 1, dtype=torch.float64) / config.n_head)
        return [seen] * config.n_layer, slopes[:, None, None] * (k - q)
    return [seen & (q - k <= 64) if (i + 1) % 4 else seen for i in range(config.n_layer)], 0.0


def make(file, **config):
    return random_model(file, 2, **SIZES, **config)[0].float()


def results(model, idx):
    return loss_and_gradients(model(idx, idx.roll(-1, 1))['loss'], model)


@pytest.mark.parametrize('heads', HEADS, ids=str)
@pytest.mark.parametrize('eos_id', [None, 59])
def test_edited_attention_equals_float64(edited, heads, eos_id, monkeypatch):
    """Loss and gradients; FlexAttention's forward, uncompiled."""
    T, model = 230, make(edited, **heads, eos_id=eos_id)
    idx = torch.randint(0, 60, (2, T), generator=torch.Generator().manual_seed(1))
    got, doc_start = results(model, idx), K.document_starts(idx, eos_id)
    seen, bias = masks(edited, doc_start, T, model.config)
    patterns = model.sees if isinstance(model.sees, list) else [model.sees] * 4
    q, k, v = (torch.randn(2, T, n, 8) for n in (4, model.config.n_kv_head, model.config.n_kv_head))
    for sees, of_layer in zip(patterns, seen):
        flex = K.Mask('flex', K.flex_mask(sees, getattr(model, 'score_bias', None), T, 'cpu', doc_start, (0,), (0,)))
        with monkeypatch.context() as patch:
            patch.setattr(K, 'compiled', lambda function: function)
            assert_close([K.attention(q, k, v, flex)],
                         [dense_attention(*(x.double() for x in (q, k, v)), of_layer, bias)], 1e-5)
    queue = []
    monkeypatch.setattr(edited, 'make_mask', lambda *_: queue.extend(seen) or seen)
    monkeypatch.setattr(edited, 'attention', lambda q, k, v, _: dense_attention(q, k, v, queue.pop(0), bias))
    want = results(model.double(), idx)
    assert abs(got['loss'] - want['loss']) < 1e-5
    assert_near(got, want, 1e-4)


@pytest.mark.parametrize('heads', HEADS, ids=str)
def test_cached_decoding_equals_full_forward_and_rings_fit_each_layer(edited, heads):
    model = make(edited, **heads, eos_id=59)
    idx = torch.randint(0, 60, (2, 230), generator=torch.Generator().manual_seed(1))
    assert (decode(model, idx, [90, 1, 4, 3, 100, 1, 31]) - model.logits(idx)[..., :60]).abs().max() < 1e-4
    slots = [64 + 4 if isinstance(model.sees, list) and (i + 1) % 4 else 300 for i in range(4)]
    standard = make(importlib.import_module('model_standard'), **heads, eos_id=59)
    cache, whole = (each.new_cache(2, 300, max_call=4) for each in (model, standard))
    assert [keys.shape[2] - 1 for keys in cache.k] == slots
    sizes = [sum(keys.nbytes for keys in each.k) for each in (cache, whole)]
    assert sizes[0] * 301 * 4 == sizes[1] * sum(n + 1 for n in slots)


def test_flops_count_each_layers_pairs(edited):
    model = edited.Model(edited.Config(**SIZES, n_head=4))
    seen, _ = masks(edited, None, 512, model.config)
    assert K.mean_keys(model.sees, 512) == pytest.approx(sum(int(layer.sum()) for layer in seen) / 512 / 4)


def test_blocks_beyond_a_list_of_patterns_cache_what_the_last_one_sees():
    """Those of MTP, which reads its last pattern's mask in them. The layers before see less."""
    file = importlib.import_module('model_mtp')

    class Model(file.Model):
        @property
        def sees(self):
            return [self.near] * 3 + [super().sees]

        def near(self, q, k):
            return (k.pos <= q.pos) & (q.pos - k.pos <= 4) & (k.pos >= q.doc_start)

        def _run_blocks(self, idx, rope, mask, cache=None, n_future=0):
            h = self.embed(idx)
            for block, layer_mask in zip(self.blocks[:-1], mask):
                h = block(h, rope, layer_mask, cache)
            return [self.norm(block(h, rope, mask[-1], cache)) for block in (self.blocks[-1], *self.future[:n_future])]
    model = make(SimpleNamespace(Model=Model, Config=file.Config), n_head=4, horizon=2, eos_id=59)
    idx = torch.randint(0, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    want = torch.stack(model._run_blocks(idx, *model._prepare(idx), n_future=2)[1:], 2)
    cache = model.new_cache(2, 40, max_call=3)
    for tokens in idx.split([20, 3, 7, 2, 1, 7], 1):
        model.extend(tokens, cache)
    assert (cache.future - want[:, -3:]).abs().max() < 1e-4


# ---- a learned bias ----

def with_bias(name, **values):
    """Return a float64 model that learns biases, by stream and distance, and slopes; and tokens."""
    file = importlib.import_module(f'model_{name}')

    class Model(file.Model):
        def __init__(self, config):
            super().__init__(config)
            self.table = torch.nn.Parameter(torch.empty(2, 8, config.n_head))
            self.slopes = torch.nn.Parameter(torch.empty(config.n_head))

        def score_bias(self, q, k, head):
            distance = q.pos - k.pos
            return self.table[k.stream, distance.clamp(0, 7), head] - distance * self.slopes[head].exp()
    model, _ = random_model(SimpleNamespace(Model=Model, Config=file.Config), 2, **SIZES | values)
    return model, torch.randint(0, 60, (2, 150), generator=torch.Generator().manual_seed(1))


def defined_mask(model, sees, T, device, doc_start, keys, queries, recurs):
    """Return dense attention as a mask, with the model's biases as a product with the table."""
    seen = dense_mask(sees, T, doc_start, keys, queries)
    position = torch.arange(T)
    distance = position.repeat(len(queries))[:, None] - position.repeat(len(keys))
    one_hot = F.one_hot(distance.clamp(0, 7), 8).double().split(T, 1)
    bias = torch.cat([torch.einsum('qkd,dh->hqk', x, model.table[stream]) for x, stream in zip(one_hot, keys)], 2)
    return lambda q, k, v: dense_attention(q, k, v, seen, bias - distance * model.slopes.exp()[:, None, None])


def dense(model, sees, T, device, doc_start, keys, queries, recurs):
    return K.dense_mask(model, sees, K.sequence(T, queries, device, doc_start), K.sequence(T, keys, device))


def flex(model, sees, *args):
    return K.Mask('flex', K.flex_mask(sees, model.score_bias, *args[:-1]))


@pytest.mark.parametrize('name, values, kernel', [
    ('standard', dict(eos_id=None), 'tiles'), ('standard', HEADS[1] | dict(eos_id=59, checkpoint_blocks=True), 'tiles'),
    ('standard', dict(eos_id=59), 'tiles, recomputed'), ('standard', HEADS[1] | dict(eos_id=59), 'dense'),
    ('sps', dict(eos_id=59, window=20), 'tiles'), ('sps', dict(eos_id=None, window=20), 'tiles, recomputed'),
    ('standard', HEADS[1] | dict(eos_id=59), 'flex')])
def test_a_learned_bias_gets_the_gradient_of_float64_attention(name, values, kernel, monkeypatch):
    """FlexAttention: uncompiled, on a CPU, where PyTorch's own check allows no gradients."""
    model, idx = with_bias(name, **HEADS[0] | dict(n_layer=2) | values)
    if kernel == 'tiles, recomputed':
        monkeypatch.setattr(K, 'MAX_SAVED_SCORES', 0)
    if kernel == 'dense':
        monkeypatch.setattr(K, '_new_mask', dense)
    if kernel == 'flex':
        monkeypatch.setattr(K, '_new_mask', flex)
        monkeypatch.setattr(K, 'compiled', lambda function: function)
        monkeypatch.setattr(flex_attention, '_validate_device', lambda *_: None)
    got = results(model, idx)
    monkeypatch.setattr(K, '_new_mask', defined_mask)
    assert_near(got, results(model, idx), 1e-9)


@pytest.mark.parametrize('name', ['standard', 'sps'])
def test_logits_and_decoding_follow_a_learned_bias(name):
    """Also without documents, where masks of other patterns are kept."""
    model, idx = with_bias(name, **HEADS[0], eos_id=None)
    model, before = model.float().requires_grad_(False), None
    for change in (model.table.neg_, model.table.data.neg_, model.slopes.zero_):
        change()
        logits = model.logits(idx)[..., :60]
        assert before is None or (logits - before).abs().max() > 0.1
        assert (decode(model, idx, [90, 1, 4, 55]) - logits).abs().max() < 1e-4
        before = logits
