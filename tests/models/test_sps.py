"""The SPS family against its definition: the interleaved sequence of eq. 3, dense mask."""
import copy

import pytest
import torch
import torch.nn.functional as F
from references import assert_near, document_numbers, loss_and_gradients, rms_norm, some_tokens, transformer_block
from variants import make_model, paper_model

EOS = 59


def make(name='sps', **values):
    return make_model(name, values)


def layouts():
    """Return rows with eos (also twice in succession), without eos, and with eos first."""
    idx = some_tokens(4, 22)
    idx[1].clamp_(max=EOS - 1)
    idx[3, 0] = EOS
    return idx


def sees(config, query, key, document):
    """Return whether a query (step, stream) sees a key, by sections 3 and 4 of the paper."""
    (i, asks), (k, read) = query, key
    if k > i or document[k] != document[i]:
        return False
    if k == i and asks == 'x' and read == 'rho':  # x_i comes before rho_i
        return False
    persistent = {'sps': 'x', 'two_x_memory': 'x rho', 'delayed_state': 'rho',
                  'reverse_sps': 'rho'}[config.method].split()
    limit = config.persistent_window if read in persistent else config.window
    return limit is None or k >= i - limit


def pairwise_mask(config, row):
    """Return the mask (2T, 2T) over x_0, rho_0, x_1, rho_1, ..."""
    document = document_numbers(row, config.eos_id).tolist()
    steps = [(i, stream) for i in range(len(row)) for stream in ('x', 'rho')]
    return torch.tensor([[sees(config, q, k, document) for k in steps] for q in steps])


def interleaved_logits(model, idx):
    """Appendix A on the interleaved sequence of eq. 3, with all layers. idx (B, T) -> (B, T, V).

    Below the top predict_layers layers, rho is neither seen nor changed.
    """
    c, B, T = model.config, *idx.shape
    x = model.embed.weight[idx]
    rho = model.embed.weight[c.n_ids] + (x if c.predict_input == 'token' else torch.zeros_like(x))
    h = torch.stack([x, rho.expand_as(x)], 2).view(B, 2 * T, c.n_embd)
    masks = torch.stack([pairwise_mask(c, row) for row in idx])
    is_rho = torch.arange(2 * T) % 2 == 1
    position = torch.arange(T).repeat_interleave(2)
    for layer, block in enumerate(model.blocks):
        fork = c.n_layer - (c.predict_layers or c.n_layer)
        below = layer < fork
        if layer == fork and c.predict_input == 'state':
            h = torch.stack([h[:, 0::2], h[:, 0::2] + model.embed.weight[c.n_ids]], 2).flatten(1, 2)
        after = transformer_block(h, block, position, masks & ~(is_rho & below), 1e-6)
        h = torch.where((is_rho & below)[:, None], h, after)
    emitted = h[:, 0::2] if c.method == 'reverse_sps' else h[:, 1::2]
    return rms_norm(emitted, model.norm, 1e-6) @ model.head.weight.T


@pytest.mark.parametrize('documents, beyond', [(False, {}), *((True, more) for more in (
    dict(), dict(predict_input='token', predict_layers=2), dict(persistent_window=5),
    dict(predict_layers=1, persistent_window=0), dict(predict_input='state', predict_layers=2)))], ids=str)
@pytest.mark.parametrize('method, window', [
    *((method, window) for method in ('sps', 'delayed_state', 'reverse_sps') for window in (0, 1, 3, 16, None)),
    ('two_x_memory', None)])
def test_logits_and_gradients_equal_the_interleaved_definition(method, window, documents, beyond):
    model, idx = make(method=method, window=window, eos_id=EOS if documents else None, **beyond), layouts()
    exact = copy.deepcopy(model).double()
    targets, counted = idx.roll(-1, 1), idx != EOS if documents else torch.ones_like(idx, dtype=torch.bool)
    logits = interleaved_logits(exact, idx)
    want = loss_and_gradients(F.cross_entropy(logits[counted], targets[counted]), exact)
    got = loss_and_gradients(model(idx, targets)['loss'], model)
    assert_near(got | {'logits': model.logits(idx)[..., :60]}, want | {'logits': logits[..., :60]}, 1e-5)


@pytest.mark.parametrize('scale', ['xs', 's', 'm', 'l', 'xl'])
def test_every_method_has_exactly_the_parameters_of_standard(scale):
    paths = [f'standard_{scale}', f'sps_{scale}', *(f'sps/{name}_{scale}' for name in (
        'two_x_memory', 'delayed_state', 'reverse_sps'))]
    models = {path: paper_model(path) for path in paths}
    want, *shapes = ({name: p.shape for name, p in model.named_parameters()} for model in models.values())
    assert all(shape == want for shape in shapes)
    assert all(model.config.method in path for path, model in models.items() if path != paths[0])
