"""Edited models: GPN with one equation changed, and nanoGPT as a variant of Standard."""
import pytest
import torch
import torch.nn.functional as F
from test_gpn import make

from common import models
from common.decoding import generate
from model_gpn import RMSNorm

EDITS = 'gate_at_one', 'prediction_not_carried', 'key_from_this_state', 'no_write_gate', 'no_decay'


def edited(name, **values):
    """Return test_gpn's float64 model with one of the edits, and windows of ids."""
    model, idx = make(**values)
    other = models.model_file(f'gpn_{name}').Model(model.config).double()
    other.load_state_dict(model.state_dict())
    return other, idx


def one_step(m, edit, u, s, g, memory):
    """Apply the paper's equations 4 to 11, one of them edited, to one row, head by head."""
    def norm(x):
        return x / (x.square().mean() + 1e-6).sqrt()

    def unit(x):
        return x / (x.square().sum() + 1e-12).sqrt()

    def through(linear, rms: RMSNorm, x):
        return linear(norm(x) * rms.weight)
    last, carried = g, g if edit == 'prediction_not_carried' else s
    gate = torch.ones(()) if edit == 'gate_at_one' else torch.sigmoid(through(m.ground_gate, m.ground_norm, carried))
    g = gate * carried + u
    w, layer, memory_read = m.write, m.layers[0], []
    keys = through(w.key, w.norm, g if edit == 'key_from_this_state' else last).relu().chunk(2)
    for h, (k, v, q) in enumerate(zip(keys, through(w.value, w.norm, g).chunk(2),
                                      through(layer.query, layer.read_norm, g).relu().chunk(2))):
        beta = 1 if edit == 'no_write_gate' else torch.sigmoid(through(w.beta, w.norm, g)[h])
        rate = 0 if edit == 'no_decay' else w.log_rate[h].exp()
        gamma = -rate * F.softplus(through(w.decay, w.norm, g)[h] + w.dt_bias[h])
        memory[h] = gamma.exp() * memory[h] + beta * torch.outer(unit(k), v - memory[h].T @ unit(k))
        memory_read.append(memory[h].T @ unit(q))
    gate, up = through(layer.gate_up, layer.ffn_norm, g).chunk(2)
    answer = norm(torch.cat(memory_read)) * layer.out_norm.weight
    s = torch.sigmoid(through(layer.gate, layer.gate_norm, g)) * g + layer.ffn_out(F.silu(gate) * up)
    return s + layer.read_out(F.silu(through(layer.read_gate, layer.read_norm, g)) * answer), g, memory


@pytest.mark.parametrize('name', EDITS)
def test_each_edit_changes_one_equation_of_the_paper(name):
    model, idx = edited(name, scan='loop')
    with torch.no_grad():
        states = model.states(idx[:, :6])
        for row, ids in enumerate(idx[:, :6]):
            s, g, memory = torch.zeros(24).double(), torch.zeros(24).double(), torch.zeros(2, 8, 12).double()
            for t, u in enumerate(model.ground_input(ids[None])[0]):
                s, g, memory = one_step(model, name, u, s, g, memory)
                assert torch.allclose(states[row, t], s, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', EDITS)
def test_edited_models_run_step_by_step_and_decode_correctly(name):
    model, idx = edited(name)
    assert not model.fast
    with torch.no_grad():
        cache = model.new_cache(len(idx), idx.shape[1])
        have = torch.stack([model.extend(idx[:, t:t + 1], cache) for t in range(idx.shape[1])], 1)
        assert torch.allclose(have[..., :60], model.logits(idx)[..., :60], rtol=1e-9, atol=1e-9)


def test_the_nanogpt_variant_has_a_tied_head_and_standards_loss():
    torch.manual_seed(0)
    config = dict(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=20, n_ids=20, eos_id=None)
    model = models.model_file('nanogpt').Model(models.make_config('nanogpt', config)).double()
    idx = torch.randint(0, 20, (2, 12))
    assert model.head.weight is model.embed.weight
    eos_id = model.config.eos_id = idx[0, 5].item()
    counted = idx != eos_id
    assert not counted.all()
    nll = F.cross_entropy(model.logits(idx)[counted], idx[counted])
    assert model(idx, idx)['loss'].item() == pytest.approx(nll.item(), abs=1e-12)
    with pytest.raises(ValueError, match='13 tokens, but the model has 12 learned'):
        model(*torch.zeros(2, 1, 13, dtype=torch.int64))
    new, = generate(model, [idx[0, :4].tolist()], 2, temperature=0)
    assert new[0] == model.logits(idx[:1, :4])[0, -1].argmax()
