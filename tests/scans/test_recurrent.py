"""scans/recurrent.py: values and gradients of compiled steps equal those of a plain loop."""
import copy
import functools
import importlib
import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import ROOT
from references import assert_near, random_model
from test_gpn import SMALL
from torch.utils.checkpoint import checkpoint

import model_gpn
import scans
from scans import products, recurrent

EDITS = sorted(path.stem for path in (ROOT / 'papers/gpn/edits').glob('gpn_*.py'))


def results(model, states):
    """Return a loss of the states, and its gradients; zeros for a weight that it does not use."""
    model.zero_grad()
    loss = states.square().mean()
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {'loss': loss.detach(), **grads}


@pytest.fixture(params=['cpu', 'gpu'])
def form(request):
    if request.param == 'gpu':
        request.getfixturevalue('gpu_form')


def plain_scan(module, step, x, first, carry_mask=None, bptt_len=None):
    """Compute `recurrent.scan` with autograd through all steps."""
    state, outputs = first, []
    for t in range(x[0].shape[1]):
        if bptt_len and t % bptt_len == 0:
            state = [s.detach() for s in state]
        if carry_mask is not None:
            state = [torch.where(carry_mask[:, t].view(-1, *[1] * (s.dim() - 1)), s, f) for s, f in zip(state, first)]
        state = step(*(a[:, t] for a in x), *state)
        outputs.append(state[0])
    return torch.stack(outputs, 1)


class Mixed(nn.Module):
    """A step that uses parameters in all ways, one of them twice, and one not at all."""

    def __init__(self, n=16, heads=2):
        super().__init__()
        self.both, self.gate, self.update = nn.Linear(n, n), nn.Linear(n, n), nn.Linear(n, n, bias=False)
        self.per_head = nn.Linear(n // heads, n // heads)
        self.plain, self.scale = nn.Parameter(torch.randn(n, n) / n), nn.Parameter(torch.ones(n))
        self.heads, self.unread, self.keyword = heads, nn.Linear(n, n), nn.Linear(n, n)

    def step(self, x, add, h, memory):
        normed = F.rms_norm(h, h.shape[-1:]) * self.scale
        gate = torch.sigmoid(self.gate(normed)) * torch.tanh(self.update(normed)) + self.both(x)
        memory = 0.9 * memory + torch.einsum('bi,bj->bij', gate, self.both(h))
        heads = self.per_head((h @ self.plain).unflatten(-1, (self.heads, -1))).flatten(1)
        more = F.linear(h, weight=self.keyword.weight, bias=2 * self.keyword.bias)
        return torch.tanh(heads + gate + add + memory.sum(-1) + more + self.both(self.scale)), memory

    def other_step(self, x, add, h, memory):
        return torch.tanh(self.gate(h) + self.unread(x)), memory


@pytest.mark.parametrize('values', [dict(), dict(bptt_len=4), dict(documents=True), dict(documents=True, bptt_len=3)],
                         ids=str)
def test_a_step_with_all_kinds_of_parameters(values, form):
    torch.manual_seed(0)
    module = Mixed().double()
    x, add = (torch.randn(3, 11, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    first = [torch.randn(3, 16, dtype=torch.float64), torch.zeros(3, 16, 16, dtype=torch.float64)]
    mask = torch.rand(3, 11) > 0.3 if values.get('documents') else None
    found = []
    for scan in (plain_scan, recurrent.scan):
        module.zero_grad()
        x.grad = add.grad = None
        more = dict(segment_len=4) if scan is recurrent.scan else {}
        out = scan(module, module.step, [x, add], first, mask, bptt_len=values.get('bptt_len'), **more)
        out.square().sum().backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        assert grads.pop('unread.weight') is None and grads.pop('unread.bias') is None
        found.append({'out': out.detach(), 'x': x.grad, 'add': add.grad, **grads})
    assert_near(found[1], found[0], 1e-9)
    arguments = [x, add], first, mask
    assert_near(*({'out': scan(module, module.other_step, *arguments)} for scan in (recurrent.scan, plain_scan)), 1e-9)
    copied = copy.deepcopy(module)
    assert torch.equal(recurrent.scan(copied, copied.step, *arguments), recurrent.scan(module, module.step, *arguments))


def test_replays_overwrite_no_results(gpu_form):
    """Two forward passes, then their backward passes, after one without gradients and an update."""
    torch.manual_seed(0)
    module, found = Mixed().double().to(gpu_form), []
    first = [torch.randn(3, 16).double().to(gpu_form), torch.zeros(3, 16, 16).double().to(gpu_form)]
    x = torch.randn(4, 3, 8, 16).double().to(gpu_form)
    params = [p for name, p in module.named_parameters() if 'unread' not in name]
    with torch.inference_mode():
        recurrent.scan(module, module.step, [*x[:2]], first, segment_len=4)
    with torch.no_grad():
        module.both.weight *= 0.5
    for scan, more in ((plain_scan, {}), (recurrent.scan, dict(segment_len=4))):
        outs = [scan(module, module.step, [*part], first, **more) for part in x.split(2)]
        found.append([*outs, *(torch.autograd.grad(out.square().sum(), params) for out in outs)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_products_of_one_input_are_one_group():
    model, _ = random_model(model_gpn, 3, **SMALL)
    step = products.Step(model.step, model, [torch.randn(3, 24).double(), *model.first_state(3)])
    names = [[w.removesuffix('.weight') for w, _ in group] for group in step.groups]
    assert names == [['ground_gate'], ['write.key'], ['write.value', 'write.beta', 'write.decay'], ['layers.0.gate_up'],
                     ['layers.0.gate'], ['layers.0.ffn_out'], ['layers.0.query', 'layers.0.read_gate'],
                     ['layers.0.read_out']]
    assert all(columns.start % 16 == 0 for _, columns in step.places)  # aligned for a GPU


@pytest.mark.parametrize('name', EDITS)
def test_edited_equations_of_gpn(name, form):
    file = importlib.import_module(f'papers.gpn.edits.{name}')
    model, idx = random_model(file, 3, **SMALL, eos_id=59, bptt_len=7)
    want = results(model, model.states(idx))
    assert_near(results(model, model.states(idx, use_scan=True)), want, 1e-9, all_matter=False)


def own_model():
    """Return the class and settings of the LSTM in docs/recurrent.md."""
    source = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/recurrent.md').read_text(), re.S)[0]
    namespace = {'__name__': 'model_lstm'}
    exec(source, namespace)
    return namespace


def test_the_model_of_the_docs_is_an_lstm():
    file = own_model()
    torch.manual_seed(0)
    model = file['Model'](file['Config'](n_embd=16, eos_id=None)).double()
    lstm = nn.LSTM(16, 16, batch_first=True).double()
    lstm.weight_ih_l0.data, lstm.weight_hh_l0.data = model.input.weight.data, model.recur.weight.data
    lstm.bias_ih_l0.data, lstm.bias_hh_l0.data = model.input.bias.data, torch.zeros(64, dtype=torch.float64)
    idx = torch.randint(0, 256, (3, 11))
    want, weights = lstm(model.embed(idx))[0], [model.embed.weight, model.input.weight, model.recur.weight]
    gradients = torch.autograd.grad(want.square().sum(), [model.embed.weight, lstm.weight_ih_l0, lstm.weight_hh_l0])
    loop = model.loop(model.input(model.embed(idx)), torch.ones_like(idx, dtype=torch.bool))
    for states in (model.states(idx), loop):
        torch.testing.assert_close(states, want, rtol=1e-9, atol=1e-9)
        found = torch.autograd.grad(states.square().sum(), weights)
        torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)


class Cell(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.recur = nn.Linear(n, n)

    def step(self, x, h):
        return torch.tanh(x + self.recur(h)),

    def of_product(self, x, h):
        return torch.tanh(self.recur(x + h)),

    def masked(self, x, keep, h):
        return torch.tanh(x + keep * self.recur(h)),

    def scaled(self, x, h):
        return torch.tanh(x + self.scale * self.recur(h)),

    def of_buffer(self, x, h):
        return torch.tanh(x + h + self.recur(self.scale)),

    def in_place(self, x, h):
        z = self.recur(h)
        z += x
        return F.leaky_relu(z, 0.1, inplace=True),

    def input_in_place(self, x, h):
        y = h + x
        y += self.recur(y)
        return y,

    def delayed(self, x, h, third, second, first):
        return torch.tanh(x + self.recur(h) + third), second, first, h


def check(module, step, x, first, tolerance=1e-9):
    found = [{'out': scan(module, step, [x], [first])} for scan in (recurrent.scan, plain_scan)]
    assert_near(found[0], found[1], tolerance)


@pytest.mark.compiles
@pytest.mark.slow
def test_any_layout_of_the_first_state_and_cells_of_one_class():
    """Graphs are compiled for contiguous tensors, and belong to the method of one object."""
    torch.manual_seed(0)
    cells = nn.ModuleList([Cell(), Cell()]).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    for first in (torch.randn(1, 16).double().expand(3, -1), torch.randn(16, 3).double().T):
        for cell in cells:
            check(cells, cell.step, x, first)
    cells[1].recur = nn.Sequential(cells[1].recur, nn.Linear(16, 16).double())
    check(cells, cells[1].step, x, first)


def test_autocast_bf16_inputs_and_steps_that_return_a_tensor():
    torch.manual_seed(0)
    cell, x, first = Cell(), torch.randn(3, 5, 16), torch.zeros(3, 16)
    with torch.autocast('cpu', torch.bfloat16):
        out = recurrent.scan(cell, cell.step, [x.bfloat16()], [first.bfloat16()])
        out.square().sum().backward()  # traced here
    cell.zero_grad()
    out = recurrent.scan(cell, cell.step, [x], [first])
    out.square().sum().backward()
    want, = torch.autograd.grad(plain_scan(cell, cell.step, [x], [first]).square().sum(), cell.recur.weight)
    torch.testing.assert_close(cell.recur.weight.grad, want)
    with pytest.raises(ValueError, match='must return the new state'):
        recurrent.scan(cell, Wrong().step, [x], [first])


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_module_may_move_to_a_gpu():
    cell, x, first = Cell().double(), torch.randn(3, 5, 16).double(), torch.zeros(3, 16).double()
    out = recurrent.scan(cell, cell.step, [x], [first])
    torch.testing.assert_close(recurrent.scan(cell.cuda(), cell.step, [x.cuda()], [first.cuda()]).cpu(), out)


def test_a_state_may_be_passed_on(form):
    """Here, a segment's first gradients of the state are some of its last ones."""
    torch.manual_seed(0)
    cell, x, first = Cell().double(), torch.randn(3, 6, 16).double(), [*torch.zeros(4, 3, 16).double()]
    outs = (recurrent.scan(cell, cell.delayed, [x], first, segment_len=2), plain_scan(cell, cell.delayed, [x], first))
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), cell.recur.weight) for out in outs))


def test_activation_checkpointing():
    """The first scan, which makes the graphs, saves as many tensors as the second."""
    torch.manual_seed(0)
    cell, x, first = Cell().double(), torch.randn(3, 5, 16).double(), torch.zeros(3, 16).double()
    want = torch.autograd.grad(plain_scan(cell, cell.step, [x], [first]).sum(), cell.recur.weight)
    out = checkpoint(recurrent.scan, cell, cell.step, [x], [first], use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), cell.recur.weight), want)


def test_a_mask_may_be_an_input(form):
    torch.manual_seed(0)
    cell, x, keep, first = Cell(), torch.randn(3, 5, 16), torch.rand(3, 5, 16) > 0.5, torch.zeros(3, 16)
    found, want = (torch.autograd.grad(scan(cell, cell.masked, [x, keep], [first]).square().sum(), cell.recur.weight)
                   for scan in (recurrent.scan, plain_scan))
    torch.testing.assert_close(found, want)


def test_a_state_made_of_narrow_products_is_kept_in_fp32(gpu_form):
    torch.manual_seed(0)
    cell, x, first = Cell(), torch.randn(3, 16), torch.zeros(3, 16)
    recurrence = recurrent.Recurrence(cell, cell.of_product, [x], [first], resets=False, dtype=torch.bfloat16)
    constants = [a for part in recurrence.step.parameters() for a in part]
    state, z = recurrence.forward(recurrence.at_fixed_addresses(constants, object()), [x], [first])
    assert z.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(state, *cell.of_product(x, first), rtol=0, atol=0.03)


def test_a_step_may_change_the_result_of_a_product_in_place_but_not_its_input(form):
    torch.manual_seed(0)
    cell, x, first = Cell().double(), torch.randn(3, 5, 16).double(), torch.zeros(3, 16).double()
    found, want = (torch.autograd.grad(scan(cell, cell.in_place, [x], [first]).square().sum(), cell.recur.weight)
                   for scan in (recurrent.scan, plain_scan))
    torch.testing.assert_close(found, want)
    with pytest.raises(ValueError, match="must not change a product's input in place"):
        recurrent.scan(cell, cell.input_in_place, [x], [first])


@pytest.mark.parametrize('step', [Cell.scaled, Cell.of_buffer])
def test_a_step_that_reads_a_buffer_is_refused(step):
    cell, x, first = Cell(), torch.randn(3, 5, 16), torch.zeros(3, 16)
    cell.register_buffer('scale', torch.ones(16))
    with pytest.raises(ValueError, match=r'a step must not read a buffer, here scale: pass it in x, as \(B, T'):
        recurrent.scan(cell, functools.partial(step, cell), [x], [first])


class Wrong(Cell):
    def step(self, x, h):
        return torch.tanh(x + h)


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled_graphs_equal_the_loop(device):
    model, idx = random_model(model_gpn, 3, **SMALL | dict(n_embd=32, n_ffn=48), eos_id=59, bptt_len=7)
    model, idx = model.to(device), idx.to(device)
    for p in model.parameters():
        p.data *= 0.5 if p.dim() == 2 else 1
    want = results(model, model.states(idx))
    assert_near(results(model, model.states(idx, use_scan=True)), want, 1e-9, all_matter=False)


def test_without_a_compiler_the_loop_runs_and_one_line_is_printed(monkeypatch, capsys):
    monkeypatch.setenv('CXX', 'no-such-compiler')
    scans.warn_once.cache_clear()
    model, idx = random_model(model_gpn, 3, **SMALL)
    for _ in range(2):
        assert torch.equal(model.states(idx, use_scan=True), model.states(idx))
    assert capsys.readouterr().err.count('\n') == 1
