"""GPN with one equation edited: each subclass is that edit, the fast form is not taken for it, and their table."""
import math
import statistics
import subprocess
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_sentence, run
from test_gpn import make
from test_sweep import write_run

from analysis import gpn_ablations as ablations
from common import runs
from model_gpn import RMSNorm

EDITS = [model.partition('.')[2] for model in ablations.NAMES.values() if '.' in model]


def edited(name, **values):
    """The float64 model of test_gpn with one of the edits, and windows of ids."""
    model, idx = make(**values)
    other = runs.model_file(f'gpn.{name}').Model(model.config).double()
    other.load_state_dict(model.state_dict())
    return other, idx


def one_step(m, edit, u, s, g, memory):
    """The paper's equations 4 to 11 with one of them edited, one head and one row at a time."""
    def norm(x):
        return x / (x.square().mean() + 1e-6).sqrt()

    def unit(x):
        return x / (x.square().sum() + 1e-12).sqrt()

    def through(linear, rms: RMSNorm, x):
        return linear(norm(x) * rms.weight)
    last, carried = g, g if edit == 'NoGrounding' else s
    gate = torch.ones(()) if edit == 'GateAtOne' else torch.sigmoid(through(m.ground_gate, m.ground_norm, carried))
    g = gate * carried + u
    w, layer, memory_read = m.write, m.layers[0], []
    keys = through(w.key, w.norm, g if edit == 'KeyFromThisState' else last).relu().chunk(2)
    for h, (k, v, q) in enumerate(zip(keys, through(w.value, w.norm, g).chunk(2),
                                      through(layer.query, layer.read_norm, g).relu().chunk(2))):
        beta = 1 if edit == 'NoWriteGate' else torch.sigmoid(through(w.beta, w.norm, g)[h])
        rate = 0 if edit == 'NoDecay' else w.log_rate[h].exp()
        gamma = -rate * F.softplus(through(w.decay, w.norm, g)[h] + w.dt_bias[h])
        memory[h] = gamma.exp() * memory[h] + beta * torch.outer(unit(k), v - memory[h].T @ unit(k))
        memory_read.append(memory[h].T @ unit(q))
    gate, up = through(layer.gate_up, layer.ffn_norm, g).chunk(2)
    answer = norm(torch.cat(memory_read)) * layer.answer_norm.weight
    s = torch.sigmoid(through(layer.gate, layer.gate_norm, g)) * g + layer.ffn_out(F.silu(gate) * up)
    return s + layer.read_out(F.silu(through(layer.read_gate, layer.read_norm, g)) * answer), g, memory


@pytest.mark.parametrize('name', EDITS)
def test_a_subclass_is_the_papers_equations_with_one_edited(name):
    model, idx = edited(name, scan='loop')
    with torch.no_grad():
        states = model.states(idx[:, :6])
        for row, ids in enumerate(idx[:, :6]):
            s, g, memory = torch.zeros(24).double(), torch.zeros(24).double(), torch.zeros(2, 8, 12).double()
            for t, u in enumerate(model.ground_input(ids[None])[0]):
                s, g, memory = one_step(model, name, u, s, g, memory)
                assert torch.allclose(states[row, t], s, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', EDITS)
def test_the_fast_form_notices_each_edit_and_decoding_follows_it(name, capsys):
    model, idx = edited(name)
    assert model.choose_scan()['scan'] == 'loop' and model.scan_report['difference'] > 1e-3
    assert 'The equations run as they read' in capsys.readouterr().err
    with torch.no_grad():
        want = model.logits(idx)
        cache = model.new_cache(len(idx), idx.shape[1])
        have = torch.stack([model.extend(idx[:, t:t + 1], cache) for t in range(idx.shape[1])], 1)
    assert torch.allclose(have[..., :60], want[..., :60], rtol=1e-9, atol=1e-9)


def test_a_name_that_no_subclass_has_is_a_sentence(tmp_path):
    for name, sentence in (('gpn.NoSuch', 'unknown model \'gpn.NoSuch\': analysis/gpn_edits.py has GateAtOne, No'),
                           ('gpn.Write', 'unknown model'), ('gpn.Model', 'unknown model'),
                           ('../gpn.NoDecay', 'unknown model'), ('standard.NoDecay', "unknown model 'standard.NoDe")):
        assert_sentence(run('train.py', f'--model={name}', f'--out_dir={tmp_path}/out'), sentence)
    assert_sentence(run('-m', 'analysis.gpn_ablations', 'out/x'), "what is 'out/x'?")


def test_the_table_has_every_edit_with_its_intervals(tmp_path, monkeypatch):
    trained, small = [], dict(n_layer=1, n_head=2, n_embd=24, d_emb=16, d_k=8, d_v=12)

    def train(command, **kwargs):
        folder, = (arg.partition('=')[2] for arg in command if arg.startswith('--out_dir='))
        model, = (arg.partition('=')[2] for arg in command if arg.startswith('--model='))
        trained.append(model)
        write_run(ablations.Path(folder), model, 100, 1 + (model != 'gpn') + trained.count(model) / 10, **small)
        return SimpleNamespace(stderr='')
    monkeypatch.setattr(subprocess, 'run', train)
    for _ in range(2):  # the second time nothing is left to train
        result = run('-m', 'analysis.gpn_ablations', f'--out_dir={tmp_path}')
        assert result.returncode == 0, result.stderr
    assert sorted(trained) == sorted(3 * list(ablations.NAMES.values()))
    half = 4.302653 * statistics.stdev([0.1, 0.2, 0.3]) / math.sqrt(3)
    line = next(line for line in result.stdout.splitlines() if line.startswith('| no decay'))
    assert f'| 2.2000 | {2.2 - half:.4f} to {2.2 + half:.4f} | +1.0000 |' in line
    rows = (tmp_path / 'gpn_ablations.csv').read_text().splitlines()
    assert len(rows) == 1 + 6
    in_use = {row.split(',')[0]: int(row.split(',')[1]) for row in rows[1:]}
    assert in_use['GPN'] - in_use['gate at 1'] == 24 * 24 + 2 * 24  # the gate's weight and bias, and its norm
