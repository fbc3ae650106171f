"""The fast forms in scans/ against the equations they stand for, and the choice between the two."""
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from conftest import ROOT
from test_attn_kernels import assert_close
from test_gpn import SMALL, decoding_is_the_step_repeated, loss_and_gradients, make, plain_states, set_form
from torch.utils._pytree import tree_leaves

import attn_kernels
import model_gpn as G
from attn_kernels import choose_scan, import_scan
from common.cpu_forms import pack_weights

scan, delta_rule = import_scan('gpn'), import_scan('delta_rule')
if scan is None:
    pytest.skip('scans/ is not here', allow_module_level=True)
needs_triton = pytest.mark.skipif(attn_kernels.triton is None, reason='needs Triton')


# ---- an edit of the equations has an effect ----

class Scaled(torch.nn.Module):
    """A module in the place of another."""

    def __init__(self, module, scale):
        super().__init__()
        self.module, self.scale = module, scale

    def forward(self, *inputs):
        return self.scale * self.module(*inputs)


class Doubled(torch.nn.Module):
    """A parametrization: the same numbers by another way."""

    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def zero_layer(model, monkeypatch):
    monkeypatch.setattr(G.Layer, 'forward', lambda self, x, memory: torch.zeros_like(x))


def zero_write(model, monkeypatch):
    monkeypatch.setattr(G.Write, 'forward', lambda self, last, g, memory: torch.zeros_like(memory))


def another_step(model, monkeypatch):
    class Forgetful(G.Model):
        def step(self, u, s, g, memory):
            return super().step(u, 0.9 * s, g, memory)

    model.__class__ = Forgetful


def a_hook(model, monkeypatch):
    model.layers[0].query.register_forward_hook(lambda module, inputs, output: output + 0.1)


def a_gradient_hook(model, monkeypatch):
    model.layers[0].ffn_norm.register_full_backward_hook(lambda module, grads, _: (1.01 * grads[0],))


def a_hook_that_only_looks(model, monkeypatch):
    model.seen = []
    model.layers[0].query.register_forward_hook(lambda module, inputs, output: model.seen.append(output.shape))


def a_scaled_module(model, monkeypatch):
    model.layers[0].read_gate = Scaled(model.layers[0].read_gate, 1.001)


def a_norm_of_another_kind(model, monkeypatch):
    model.ground_norm = torch.nn.LayerNorm(model.config.n_embd, dtype=torch.float64)


def a_hidden_activation(model, monkeypatch, silu=F.gelu):
    monkeypatch.setattr(G, 'F', SimpleNamespace(**vars(F) | {'silu': silu}))


def another_layer(model, monkeypatch):
    class Wider(G.Layer):
        def forward(self, x, memory):
            return super().forward(x, memory) + self.extra(x)

    extra = torch.nn.Linear(model.config.n_embd, model.config.n_embd).double()
    model.layers[0].__class__, model.layers[0].extra = Wider, extra


def a_wrong_kernel(model, monkeypatch):
    right = scan.gated_add_norm_backward
    monkeypatch.setattr(scan, 'USE_C', False)
    monkeypatch.setattr(scan, 'gated_add_norm_backward', lambda *inputs: 1.001 * right(*inputs))


def a_kernel_that_raises(model, monkeypatch):
    monkeypatch.setattr(scan, 'scan_window', lambda model, u, carry_mask: 1 / 0)


def an_edit_of_evaluation(model, monkeypatch):
    forward = G.Layer.forward
    edited = lambda self, x, memory: forward(self, x, memory) if self.training else x
    monkeypatch.setattr(G.Layer, 'forward', edited)


def a_wrong_decoder(model, monkeypatch):
    right = scan.Decoder.steps

    def wrong(self, *inputs):
        states, state = right(self, *inputs)
        return 1.01 * states, state
    monkeypatch.setattr(scan.Decoder, 'steps', wrong)


def a_decoder_that_forgets(model, monkeypatch):
    """Between calls."""
    right = scan.Decoder.steps

    def wrong(self, *inputs):
        states, (s, k, memory) = right(self, *inputs)
        return states, (0.9 * s, k, memory)
    monkeypatch.setattr(scan.Decoder, 'steps', wrong)


EDITS = {  # edit: whether training's loss changes at once, at initial weights
    zero_layer: True, zero_write: True, another_step: True, a_hook: True, a_gradient_hook: False,
    a_hook_that_only_looks: False, a_scaled_module: True, a_norm_of_another_kind: False, a_hidden_activation: True,
    another_layer: True, a_wrong_kernel: False, a_kernel_that_raises: False, a_wrong_decoder: False,
    a_decoder_that_forgets: False}


def initial(**values):
    """A model as training starts it, in float64, with windows of tokens."""
    torch.manual_seed(0)
    model = G.Model(G.Config(**SMALL | dict(n_layer=2, eos_id=59, bptt_len=7) | values)).double()
    return model, torch.randint(0, 60, (2, 23))


@pytest.mark.parametrize('edit', EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_has_an_effect(edit, monkeypatch, capsys):
    """The model trains by what its equations say now, and a line says that it does, and why."""
    model, idx = initial()
    before = model(idx, idx)['loss'].item()
    assert model.scan_report['scan'] == 'fast' and capsys.readouterr().err == ''

    model, idx = initial()
    edit(model, monkeypatch)
    loss = model(idx, idx)['loss']
    assert model.scan_report['scan'] == 'loop'
    line = capsys.readouterr().err
    assert line.count('\n') == 1 and 'model_gpn' in line or 'test_scans' in line
    assert model.scan_report['where'] in line and '--scan=loop' in line
    assert (loss.item() != before) == EDITS[edit]
    targets = idx.masked_fill(idx == 59, -1)
    hidden = model.head_input(plain_states(model, idx))
    want = F.cross_entropy(model.head(hidden).flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    cache = model.new_cache(2, 23)
    torch.testing.assert_close(model.extend(idx, cache, all_positions=True)[..., :60], model.head(hidden)[..., :60])


def test_an_edit_behind_weights_that_start_at_zero_is_seen(monkeypatch, capsys):
    """The feed-forward net's output weights are zero at first: its SiLU changes no number yet."""
    model, idx = initial(n_head=0)
    loss = model(idx, idx)['loss'].item()
    a_hidden_activation(model, monkeypatch)
    by_the_loop = set_form(model, 'loop')(idx, idx)['loss'].item()
    assert model(idx, idx)['loss'].item() == by_the_loop == pytest.approx(loss, rel=1e-12)
    set_form(model, 'auto')
    assert model.scan_report['scan'] == 'loop' and model.scan_report['difference'] > 0.01
    assert 'the equations' in capsys.readouterr().err


def test_an_edit_of_gradients_that_are_zero_at_first_is_seen(monkeypatch):
    """While the output weights are zero, no gradient reaches the SiLU: without noise on the weights both forms
    agree."""
    model, _ = initial(n_head=0)
    a_hidden_activation(model, monkeypatch, lambda x: F.silu(x).detach())
    model.choose_scan()
    assert model.scan_report['scan'] == 'loop' and 'gradient' in model.scan_report['where']


class DropsItsOutput(G.Layer):
    def forward(self, x, memory):
        return F.dropout(super().forward(x, memory), 0.1, self.training)


class DropsBeforeANorm(G.Layer):
    def forward(self, x, memory):
        gate, up = self.gate_up(self.ffn_norm(F.dropout(x, 0.1, self.training))).chunk(2, -1)
        plain, plain_up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return super().forward(x, memory) + self.ffn_out(F.silu(gate) * up - F.silu(plain) * plain_up)


@pytest.mark.parametrize('layer', [DropsItsOutput, DropsBeforeANorm])
def test_an_edit_for_training_alone_is_seen_by_a_model_that_evaluates(layer):
    model = initial()[0].float()
    model.layers[0].__class__ = layer
    model.eval().choose_scan()
    assert model.scan_report['scan'] == 'loop' and not model.layers[0].training


def test_an_edit_for_evaluation_alone_is_seen_by_a_model_that_trains(monkeypatch):
    model, idx = initial()
    an_edit_of_evaluation(model, monkeypatch)
    model.train()(idx, idx)
    assert model.scan_report['scan'] == 'loop'


def test_a_frozen_or_packed_model_can_be_checked():
    model, idx = initial()
    model = model.float().requires_grad_(False)
    assert model(idx, idx)['loss'] > 0 and model.scan_report['scan'] == 'fast' and model.scan_report['unused'] == []
    model, idx = initial()
    with torch.no_grad():
        assert pack_weights(model.float()).logits(idx).isfinite()[..., :60].all()
    assert model.scan_report['scan'] == 'fast'


def test_edits_of_one_part_in_a_thousand_are_seen_in_fp32():
    for name in ('ground_gate', 'write.beta', 'write.decay', 'layers.0.gate', 'layers.1.ffn_out', 'layers.1.read_out'):
        model = initial()[0].float()
        parent, _, child = name.rpartition('.')
        setattr(model.get_submodule(parent), child, ScaledLinear(model.get_submodule(name)))
        model.choose_scan()
        assert model.scan_report['scan'] == 'loop', name


class ScaledLinear(Scaled):
    """With all that the fast form reads."""

    def __init__(self, linear):
        super().__init__(linear, 1.001)
        self.weight, self.bias, self.out_features = linear.weight, linear.bias, linear.out_features


def test_a_parametrized_module_gives_the_numbers_of_the_loop():
    model, idx = initial()
    parametrize.register_parametrization(model.layers[0].gate_up, 'weight', Doubled())
    for form in ('auto', 'loop'):
        states = set_form(model, form).states(idx)
        torch.testing.assert_close(states, plain_states(model, idx))
        grad = torch.autograd.grad(states.sum(), model.layers[0].gate_up.parametrizations.weight.original)[0]
        assert grad.abs().max() > 0 or model.layers[0].ffn_out.weight.abs().max() == 0


# ---- the choice itself ----

@pytest.mark.parametrize('values', [dict(), dict(n_head=0, n_layer=1), dict(n_layer=3, bptt_len=1),
                                    dict(eos_id=None, bptt_len=None, segment_len=1)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize('trained', [False, True])
def test_an_unedited_model_is_fast_and_says_nothing(values, dtype, trained, capsys):
    for seed in range(3):
        model, idx = initial(**values)
        torch.manual_seed(seed)
        if trained:
            model, optimizer = model.float(), torch.optim.AdamW(model.parameters(), 1e-2)
            for _ in range(5):
                optimizer.zero_grad()
                model(idx, idx)['loss'].backward()
                optimizer.step()
        model = model.to(dtype)
        model.choose_scan()
        assert model.scan_report['scan'] == 'fast' and model.scan_report['unused'] == [], model.scan_report
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('autocast', [False, True])
def test_weights_that_amplify_rounding_are_no_edit(autocast):
    """A chaotic recurrence, where fp32 is 1e-3 off by itself."""
    apart = []
    for seed in range(4):
        torch.manual_seed(seed)
        model = G.Model(G.Config(**SMALL | dict(n_layer=2, n_embd=64, n_head=4, d_k=16, d_v=32, n_ffn=128)))
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.2 if p.dim() == 2 else 0.7)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            model.choose_scan()
        assert model.scan_report['scan'] == 'fast', model.scan_report
        apart.append(model.scan_report['difference'])
    assert max(apart) > 10 * attn_kernels.TOLERANCE[torch.float32]


def test_the_check_leaves_no_trace():
    """Weights, gradients, random numbers, settings, modes and buffers are as before."""
    model, idx = initial()
    model.eval()
    model.layers[0].train()
    weights, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    settings = dict(vars(model.config))
    model.choose_scan()
    assert torch.equal(torch.get_rng_state(), state) and vars(model.config) == settings
    assert all(torch.equal(p, w) and p.grad is None for p, w in zip(model.parameters(), weights))
    assert not model.training and not model.layers[1].training
    assert model.layers[0].training and model.layers[0].gate.training


def test_the_choice_is_made_once_and_anew_elsewhere(monkeypatch):
    model, idx = initial()
    calls = []
    monkeypatch.setattr(G, 'choose_scan', lambda *args, **kwargs: calls.append(kwargs) or choose_scan(*args, **kwargs))
    with torch.inference_mode():
        model.new_cache(1, 4)
    model(idx, idx), model.logits(idx), model.new_cache(1, 4)
    assert calls == [dict(segment_len=4, bptt_len=5)]
    model.scan_report['device'] = 'cuda'
    model.states(idx)
    assert len(calls) == 2


def test_settings_decide(monkeypatch, capsys):
    model, idx = initial()
    monkeypatch.setattr(attn_kernels, 'REFERENCE', True)
    for setting, form in (('auto', 'loop'), ('loop', 'loop'), ('fast', 'fast')):
        assert set_form(model, setting).scan_report['scan'] == form and model.scan_report['difference'] is None
    monkeypatch.setattr(attn_kernels, 'REFERENCE', False)
    zero_layer(model, monkeypatch)
    assert set_form(model, 'fast').scan_report['scan'] == 'fast'  # whoever says so
    assert capsys.readouterr().err == ''
    monkeypatch.setattr(G, 'fast', None)
    assert set_form(model, 'auto').scan_report['scan'] == 'loop'
    with pytest.raises(ValueError, match="there is no folder scans/ here: use scan = 'loop' or 'auto'"):
        set_form(model, 'fast')


def test_unused_parameters_are_named(monkeypatch, capsys):
    model, idx = initial()
    zero_write(model, monkeypatch)
    model(idx, idx)
    assert model.scan_report['unused'][0].startswith('write.')
    assert {name.split('.')[0] for name in model.scan_report['unused']} == {'write'}
    assert 'The equations make no use of write.log_rate' in capsys.readouterr().err


def test_a_scan_that_is_absent_is_none_and_a_broken_one_raises(tmp_path, monkeypatch):
    import scans
    (tmp_path / 'broken.py').write_text('import there_is_no_such_module')
    monkeypatch.setattr(scans, '__path__', [str(tmp_path)])
    assert import_scan('absent') is None
    with pytest.raises(ModuleNotFoundError, match='there_is_no_such_module'):
        import_scan('broken')


# ---- without the folder ----

WITHOUT_SCANS = '''
import sys, torch
import model_gpn as G
assert G.fast is None

def train(values, dtype, steps):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = G.Model(G.Config(**values))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        idx = torch.randint(0, model.config.n_ids, (2, 30))
        optimizer.zero_grad()
        loss = model(idx, idx.roll(-1, 1))['loss']
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    with torch.no_grad():
        logits = model.eval().extend(idx, model.new_cache(2, 30, 3), all_positions=True)
    return losses, gradients, logits, model.scan_report['scan']
'''
# config/gpn_quick.py
QUICK = dict(n_layer=1, n_head=4, n_embd=256, d_emb=128, d_k=32, d_v=64, vocab_size=320, n_ids=257)
RUNS = [(QUICK, torch.float32, 1), (QUICK | dict(n_layer=2, n_embd=176, eos_id=9, bptt_len=20), torch.float32, 1),
        (SMALL | dict(n_layer=2), torch.float64, 20)]


@pytest.mark.slow
def test_the_folder_can_be_deleted(tmp_path, monkeypatch):
    """A copy of the repository without scans/ trains, evaluates and decodes to the same numbers."""
    for name in ('model_gpn.py', 'attn_kernels.py'):
        shutil.copy(ROOT / name, tmp_path)
    script = WITHOUT_SCANS + f'torch.save([train(*run) for run in {RUNS}], sys.argv[1])'
    (tmp_path / 'script.py').write_text(script)
    result = subprocess.run([sys.executable, 'script.py', 'out.pt'], cwd=tmp_path, capture_output=True, text=True,
                            timeout=300)
    assert result.returncode == 0 and result.stderr == '', result.stderr
    names = {}
    exec(WITHOUT_SCANS.replace('assert G.fast is None', ''), names)
    for run, (losses, gradients, logits, form) in zip(RUNS, torch.load(tmp_path / 'out.pt')):
        default = torch.get_default_dtype()
        want = names['train'](*run)
        torch.set_default_dtype(default)
        tolerance = 1e-5 if run[1] == torch.float32 else 1e-9
        assert form == 'loop' and want[3] == 'fast'
        assert losses == pytest.approx(want[0], rel=tolerance)
        for got, expected in zip(gradients, want[1]):
            assert (got - expected).norm() <= tolerance * max(expected.norm(), 1e-2)
        assert (logits - want[2])[..., :run[0]['n_ids']].abs().max() < 10 * tolerance


# ---- several processes ----

TWO_PROCESSES = '''
import sys, torch, torch.distributed as dist
import model_gpn as G
dist.init_process_group('gloo')
rank = dist.get_rank()
if sys.argv[1] == 'edited':
    G.Write.forward = lambda self, last, g, memory: torch.zeros_like(memory)
elif sys.argv[1] == 'edited on one' and rank == 1:
    G.fast = None  # the first process decides
torch.manual_seed(0)
model = G.Model(G.Config(n_layer=1, n_head=2, n_embd=24, d_emb=16, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=60,
                         segment_len=5,
                         scan=sys.argv[2]))
torch.manual_seed(1)
idx = torch.randint(0, 60, (4, 17))
try:
    model.choose_scan()
    report = model.scan_report
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=bool(report['unused']))
    for step in range(2):
        loss = ddp(idx[rank::2], idx[rank::2])['loss']
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    torch.save((report, grads), f'{sys.argv[3]}_{rank}.pt')
finally:
    dist.destroy_process_group()
'''


@pytest.mark.slow
@pytest.mark.parametrize('edit, setting, form', [pytest.param('none', 'loop', 'loop', marks=pytest.mark.long),
                                                 ('edited', 'auto', 'loop'), ('none', 'auto', 'fast')])
def test_two_processes_train_in_one_form(edit, setting, form, tmp_path):
    (tmp_path / 'script.py').write_text(TWO_PROCESSES)
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
               tmp_path / 'script.py']
    result = subprocess.run([*command, edit, setting, tmp_path / 'out'], capture_output=True, text=True, timeout=300,
                            env={'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PATH': '/usr/bin:/bin'})
    assert result.returncode == 0, result.stderr[-3000:]
    (report, grads), (other_report, other_grads) = (torch.load(tmp_path / f'out_{rank}.pt') for rank in range(2))
    assert report == other_report and report['scan'] == form
    assert bool(report['unused']) == (edit == 'edited')
    assert result.stderr.count('step by step') == (edit == 'edited')  # one line, from one process
    torch.manual_seed(0)
    model = G.Model(G.Config(**SMALL, scan='loop'))
    torch.manual_seed(1)
    idx = torch.randint(0, 60, (4, 17))
    model(idx, idx)['loss'].backward()
    for name, p in model.named_parameters():
        if grads[name] is None:
            assert name in report['unused']
            continue
        torch.testing.assert_close(grads[name], other_grads[name])
        if edit == 'none':
            torch.testing.assert_close(grads[name], 2 * p.grad, rtol=1e-4, atol=1e-6)


# ---- GPN's fast form ----

@pytest.fixture(params=['in C', 'in operators'])
def steps_form(request, monkeypatch):
    monkeypatch.setattr(scan, 'USE_C', request.param == 'in C')
    if request.param == 'in C' and not scan.StepsInC.serves(torch.device('cpu'), torch.float64):
        pytest.skip('no C compiler here')


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """How often gpn.c was built: a function. The compiler is one that does not optimize; it has a folder of its own."""
    if shutil.which('cc') is None:
        pytest.skip('no C compiler here')
    compiler, log = tmp_path / 'compiler', tmp_path / 'log'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *gpn.so*) echo >> {log};; esac\nexec cc "$@" -O0 $OPTION\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('CC', str(compiler))
    monkeypatch.setattr(scan, 'KEPT', tmp_path / 'kept')
    return lambda: len(log.read_text()) if log.exists() else 0


def build():
    """As a process of its own does."""
    return scan._build.__wrapped__(torch.float32)


def test_the_steps_in_c_are_built_once_for_a_compiler_and_its_flags(builds, monkeypatch, tmp_path):
    assert build().steps and builds() == 1
    assert build().steps and builds() == 1
    kept, = (tmp_path / 'kept').iterdir()
    monkeypatch.setattr(scan, 'KEPT', tmp_path / 'other')
    cut_short = tmp_path / 'other' / kept.name
    cut_short.parent.mkdir()
    cut_short.write_bytes(kept.read_bytes()[:100])
    assert build().steps and builds() == 2 and len(cut_short.read_bytes()) > 1000
    monkeypatch.setenv('OPTION', '-mno-avx' if platform.machine() == 'x86_64' else '-DANOTHER')  # another CPU
    assert build().steps and builds() == 3 and len([*cut_short.parent.iterdir()]) == 2


def test_where_nothing_can_be_kept_the_steps_are_built_anew(builds, tmp_path):
    (tmp_path / 'kept').write_text('a file, no folder')
    assert build().steps and build().steps and builds() == 2


def test_a_compiler_that_fails_leaves_nothing(builds, monkeypatch, tmp_path):
    monkeypatch.setenv('OPTION', '-no-such-option')
    assert build() is None and builds() == 2 and not (tmp_path / 'kept').exists()  # with threads and without
    monkeypatch.setenv('CC', str(tmp_path / 'absent'))
    assert build() is None


def test_both_forms_add_the_same_to_the_length_of_a_key(steps_form, monkeypatch):
    """An edit of it that only short keys show, to which noise on the weights leads no check."""
    results = []
    for eps in (1e-6, 1e-3):
        monkeypatch.setattr(G, 'KEY_EPS', eps)
        for form in ('loop', 'fast'):
            model, idx = make(n_layer=2, eos_id=59, scan=form)
            for p in (*model.write.key.parameters(), *model.layers[1].query.parameters()):
                p.data *= 1e-3
            with torch.no_grad():
                decoded = model.extend(idx, model.new_cache(*idx.shape, max_run=3), all_positions=True)[..., :60]
            results.append([*loss_and_gradients(model, model.states(idx), idx), decoded])
    loop, fast, edited_loop, edited_fast = results
    for want, got in ((loop, fast), (edited_loop, edited_fast)):
        for x, y in zip(want, got):
            assert (x - y).norm() <= 1e-8 * x.norm()
    assert (loop[-1] - edited_loop[-1]).norm() > 1e-4 * loop[-1].norm()


needs_bf16_units = pytest.mark.skipif(not scan.StepsInC.serves(torch.device('cpu'), torch.bfloat16),
                                      reason='no C compiler or no bf16 units here')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('rows', [1, 3, 8, 21])
def test_steps_in_c_are_those_in_operators(rows, dtype, monkeypatch):
    """At a size that all threads share, of rows that fill no tile, one, or some: states and gradients."""
    if not scan.StepsInC.serves(torch.device('cpu'), dtype):
        pytest.skip('no C compiler here')
    shape = dict(n_layer=2, n_head=3, n_embd=255, n_ffn=150, d_k=33, d_v=70, eos_id=59, bptt_len=6, vocab_size=70)
    model = make(**shape, scan='fast')[0].to(dtype)
    for p in model.parameters():
        p.data *= 0.1 if p.dim() == 2 else 1
    idx, results = torch.randint(50, 60, (rows, 9)), []
    for use_c in (False, True):
        monkeypatch.setattr(scan, 'USE_C', use_c)
        results.append(loss_and_gradients(model, model.states(idx), idx))
    for want, got in zip(*results):
        assert (got - want).norm() < (1e-9 if dtype == torch.float64 else 1e-4) * want.norm()


@needs_bf16_units
@pytest.mark.parametrize('rows', [1, 3, 8, 21])
def test_bf16_products_in_c_are_as_close_to_fp32_as_those_in_operators(rows, monkeypatch):
    """In C as train.py trains, under autocast; odd widths, whose last pair is half empty; states and gradients."""
    torch.manual_seed(0)
    model = make(n_layer=2, n_head=3, n_embd=255, n_ffn=151, d_k=33, d_v=70, eos_id=59, bptt_len=6, vocab_size=70,
                 scan='fast')[0].float()
    for p in model.parameters():
        p.data *= 0.1 if p.dim() == 2 else 1
    idx = torch.randint(50, 60, (rows, 9))
    exact = loss_and_gradients(model, model.states(idx), idx)
    with torch.autocast('cpu', torch.bfloat16):
        states = model.states(idx)
    in_c, plain_scan = loss_and_gradients(model, states, idx), scan.scan
    monkeypatch.setattr(scan, 'USE_C', False)
    monkeypatch.setattr(scan, 'scan', lambda *args: plain_scan(*args[:5], torch.bfloat16, *args[6:]))
    for want, got, other in zip(exact, in_c, loss_and_gradients(model, model.states(idx), idx)):
        assert (got - want).norm() <= 2 * (other - want).norm() + 0.01 * want.norm()


@needs_bf16_units
@torch.no_grad()
def test_a_model_in_bf16_decodes_in_c(monkeypatch):
    """Its states are within bf16's rounding of the fp32 model's, and of those in operators."""
    model, idx = make(n_layer=2)
    model, results = model.float(), []
    for dtype, use_c in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        monkeypatch.setattr(scan, 'USE_C', use_c)
        decoder = scan.Decoder(model.to(dtype), torch.device('cpu'))
        assert (decoder.weights.in_c is not None) == use_c
        u = model.ground_input(idx).float()
        everywhere = torch.ones(*idx.shape, 1)
        results.append(decoder.steps(decoder.first_state(len(idx)), u, everywhere, everywhere[..., 0] > 0)[0])
    exact, *others = results
    for got in others:
        assert 0 < (got - exact).norm() < 0.03 * exact.norm()


@torch.no_grad()
def test_autocast_does_not_reach_the_steps_of_decoding(steps_form):
    """As train.py decodes a sample: the memory is read and written in fp32."""
    model, idx = make(n_layer=2)
    decoder, results = scan.Decoder(model.float(), torch.device('cpu')), []
    u, everywhere = model.ground_input(idx).float(), torch.ones(*idx.shape, 1)
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            results.append(decoder.steps(decoder.first_state(len(idx)), u, everywhere, everywhere[..., 0] > 0)[0])
    assert torch.equal(*results)


def test_a_float64_model_is_left_alone_by_autocast(steps_form):
    model, idx = make(n_layer=2, scan='fast')
    with torch.autocast('cpu', torch.bfloat16):
        states = model.states(idx)
    torch.testing.assert_close(states, model.states(idx))


def test_memory_is_not_held_at_every_step():
    """What the scan holds for the backward, in bytes, is the formula in scans/gpn.py."""
    T, B, c = 64, 2, G.Config(**SMALL | dict(segment_len=8))
    u, held = torch.zeros(B, T, c.n_embd, requires_grad=True), {}
    folded = [w.detach() for w in scan.fold(G.Model(c))]

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        scan.scan(u.transpose(0, 1), None, folded, scan.Sizes.of(c), [c.norm_eps, 1e-6], torch.float32, 8, T)
    products = 2 * c.n_embd + 2 * c.n_ffn + c.n_head * (3 * c.d_v + 2 * c.d_k + 2)
    states, memories = T * B * c.n_embd, T // 8 * B * c.n_head * c.d_k * c.d_v
    # u, too
    assert sum(held.values()) == 4 * (2 * states + T * B * products + memories + sum(w.numel() for w in folded))


def test_products_in_bf16_stay_close():
    """The dtypes of training on a GPU, on whatever there is: state and memory in fp32, products and what is saved of
    them in bf16."""
    model, idx = make(n_layer=2)
    model = model.float()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    u, results = model.ground_input(idx).transpose(0, 1).detach(), []
    folded = [w.detach().requires_grad_() for w in scan.fold(model)]
    for dtype in (torch.float32, torch.bfloat16):
        states = scan.scan(u, None, folded, scan.Sizes.of(model.config), model.all_eps, dtype, 5, 23)
        results.append([states, *torch.autograd.grad(states.square().sum(), folded)])
        assert states.dtype == torch.float32
    for want, got in zip(*results):
        assert (got - want).norm() < 0.05 * want.norm()


class Rerun:
    """Stands for a CUDA graph: the same tensors go in and come out each time."""

    def __init__(self, function, inputs):
        self.function, self.inputs = function, [x if x is None else x.clone() for x in inputs]
        self.results = function(*self.inputs)

    def replay(self, inputs):
        for own, x in zip(self.inputs, inputs):
            if own is not None:
                own.copy_(x)
        results = self.function(*self.inputs)
        for own, x in zip(*map(tree_leaves, (self.results, results))):
            if own is not None:
                own.copy_(x)
        return self.results


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda',
                                                        marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                                                 reason='needs a GPU'))])
@pytest.mark.parametrize('values', [dict(n_head=0), dict(n_layer=2, eos_id=59, bptt_len=10)], ids=str)
def test_graphs_of_segments_give_what_the_steps_do(values, device, monkeypatch):
    """Two models of one shape share the graphs, the forward of one between forward and backward of the other."""
    models = [make(**values, scan='fast')[0].float().to(device) for _ in range(2)]
    for p in models[1].parameters():
        p.data *= 0.8
    idx = make()[1].to(device)

    def run(model):
        loss = model.states(idx).square().sum()
        weights = {name: p for name, p in model.named_parameters() if not name.startswith(('norm', 'decode'))}
        return dict(zip(['loss', *weights], [loss, *torch.autograd.grad(loss, list(weights.values()))]))

    monkeypatch.setattr(scan, 'USE_GRAPHS', False)
    monkeypatch.setattr(scan, 'USE_C', False)
    want = [run(model) for model in models]
    if device == 'cpu':
        monkeypatch.setattr(scan, 'Graph', Rerun)
        monkeypatch.setattr(scan, 'uses_graphs', lambda x: True)
    monkeypatch.setattr(scan, 'USE_GRAPHS', True)
    for name in ('_graphs', '_graph_weights'):
        monkeypatch.setattr(scan, name, {})
    with torch.inference_mode():
        models[0].states(idx)
    assert not scan._graphs  # whose shapes are many
    before = models[0].states(idx).square().sum()
    for _ in range(2):
        for model, expected in zip(models, want):
            for name, got in run(model).items():
                size = expected[name].abs().max().item()
                torch.testing.assert_close(got, expected[name], rtol=1e-4, atol=1e-5 * size)
    assert not any(x.requires_grad for w in scan._graph_weights.values() for x in w.tensors())
    before.backward()
    torch.testing.assert_close(models[0].fuse.weight.grad, want[0]['fuse.weight'], rtol=1e-4, atol=1e-4)


# ---- the pieces of a step, in operators and in Triton ----

def delta_rule_equals_its_reference(S, B, H, K, D, with_documents, device):
    """Writes and reads of S steps, and their gradients, beside autograd through the definition in float64."""
    torch.manual_seed(0)
    k, q = (F.normalize(torch.randn(S, B, H, K, device=device).relu(), dim=-1) for _ in range(2))
    v, to_read = torch.randn(2, S, B, H, D, device=device)
    log_decay, beta = -torch.rand(S, B, H, device=device), torch.rand(S, B, H, device=device)
    memory, to_memory = torch.randn(2, B, H, K, D, device=device)
    carry_mask = (torch.rand(S, B, 1, device=device) > 0.3).float() if with_documents else None
    carries = [None] * S if carry_mask is None else carry_mask

    exact = [x.double().requires_grad_() for x in (q, k, v, beta, log_decay, memory)]
    q64, k64, v64, beta64, log64, m = exact
    reads = []
    for t in range(S):
        carry = None if carries[t] is None else carries[t].double()
        m, read = delta_rule.delta_step_reference(m, k64[t], v64[t], log64[t].exp(), beta64[t], q64[t], carry)
        reads.append(read)
    (torch.stack(reads) * to_read).sum().add((m * to_memory).sum()).backward()

    decay, now = log_decay.exp(), memory.clone()
    got = [delta_rule.delta_step(now, k[t], v[t], decay[t], beta[t], q[t], carries[t]) for t in range(S)]
    memories = delta_rule.delta_replay(memory, k, v, decay, beta, carry_mask)
    assert_close([torch.stack(got), now, memories[-1]], [torch.stack(reads), m, m], 1e-5)
    grad, grads = to_memory.clone(), []
    for t in reversed(range(S)):
        inputs = memories[t], k[t], v[t], decay[t], beta[t], q[t], to_read[t], carries[t]
        grads.append(delta_rule.delta_step_backward(grad, *inputs))
    assert_close([torch.stack(x[::-1]) for x in zip(*grads)] + [grad], [x.grad for x in exact], 1e-5)


@pytest.mark.parametrize('shape', [(5, 2, 3, 8, 12), (3, 1, 1, 1, 1)])
@pytest.mark.parametrize('with_documents', [False, True])
def test_delta_rule_equals_its_reference(shape, with_documents):
    delta_rule_equals_its_reference(*shape, with_documents, 'cpu')


@needs_triton
@pytest.mark.parametrize('shape', [(3, 2, 2, 8, 12), (2, 1, 1, 1, 1), (3, 1, 2, 33, 70)])
@pytest.mark.parametrize('with_documents', [False, True])
def test_delta_kernels_equal_the_reference(shape, with_documents, kernels_device):
    delta_rule_equals_its_reference(*shape, with_documents, kernels_device)


def pieces_equal_their_definitions(reads, N, C, H, K, D, dtype, device, tolerance):
    """The pieces of a step with their gradients, beside definitions in float64 and autograd; z are columns of a wider
    tensor."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)

    def random(*shape):
        return torch.randn(shape, device=device, dtype=torch.float64).to(dtype)

    def columns(width):
        return random(N, width + 7)[:, 3:width + 3]

    def unit(x, eps):
        return x / (x.square().sum(-1, keepdim=True) + eps ** 2).sqrt()

    def expect(definition, inputs, cotangents):
        inputs = [x.double().clone().requires_grad_() for x in inputs]
        outputs = definition(*inputs)
        return outputs, torch.autograd.grad(outputs, inputs, [x.double() for x in cotangents])

    z, x, add, d, dn = columns(C), random(N, C).to(wide), columns(C), random(N, C).to(wide), random(N, C)
    want = expect(lambda z, x, add: [y := torch.sigmoid(z) * x + add, unit(y, 0.3)], [z, x, add], [d, d])[0]
    assert_close(scan.gated_add_norm(z, x, add, 0.3, dtype), want, tolerance)
    gate_value, (n, length) = torch.sigmoid(z.to(wide)), scan.l2_normalize(x, 0.3)
    want = expect(lambda x: [unit(x, 0.3), gate_value.double() * x], [x], [dn, d])[1]
    assert_close([scan.gated_add_norm_backward(dn, n, 1 / length, d, gate_value)], want, tolerance)

    n = H * D if reads else 0
    z, out, read = columns(2 * C + n), columns(2 * C + n), random(N, n) if reads else None
    dy, y = random(N, C + n), random(N, C + n)
    both = expect(lambda z, *a: [F.silu(z[:, :C + n]) * torch.cat([z[:, C + n:], *(unit(x, 0.3) for x in a)], 1)],
                  [z] + [read] * reads, [dy])
    assert_close([scan.glu(z, read, 0.3, dtype)], both[0], tolerance)
    grads = [out, scan.glu_backward(dy, z, read, 0.3, out, y)]
    assert_close([y, *grads[:1 + reads]], [*both[0], *both[1]], tolerance)

    rate, z, out = random(H).to(wide).exp(), columns(H * (2 * K + D + 2)), columns(H * (2 * K + D + 2))
    cotangents = [random(N, H, *shape).to(wide) for shape in ((K,), (K,), (D,), (), ())]

    def definition(z, rate):
        q, k, v, beta, decay = z.split([H * K, H * K, H * D, H, H], 1)
        q, k = (unit(x.relu().unflatten(1, (H, K)), 0.3) for x in (q, k))
        return [q, k, v.unflatten(1, (H, D)), -rate * F.softplus(decay), torch.sigmoid(beta)]

    (q, k, v, log, beta), (dz, drate) = expect(definition, [z, rate], cotangents)
    assert_close(scan.memory_inputs(z, rate, H, K, 0.3), [q, k, v, log.exp(), beta], tolerance)
    dq, dk, dv, dlog, dbeta = cotangents
    got = scan.memory_inputs_backward(z, rate, 0.3, out, dq, dk, dv, dbeta, dlog)
    assert_close([got.sum(0), out], [drate, dz], tolerance)
    z, out = z[:, :H * K], out[:, :H * K]
    assert_close(scan.memory_inputs(z, None, H, K, 0.3)[:1], [q], tolerance)
    scan.memory_inputs_backward(z, None, 0.3, out, dq)
    assert_close([out], [dz[:, :H * K]], tolerance)


PIECES = [(True, 3, 20, 2, 8, 12), (False, 1, 1, 1, 1, 1), (True, 5, 70, 3, 33, 130)]


@pytest.mark.parametrize('shape', PIECES)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_pieces_equal_their_definitions(shape, dtype, tolerance):
    pieces_equal_their_definitions(*shape, dtype, 'cpu', tolerance)


@needs_triton
@pytest.mark.parametrize('shape', PIECES)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_pieces_on_kernels(shape, dtype, tolerance, kernels_device):
    pieces_equal_their_definitions(*shape, dtype, kernels_device, tolerance)


@needs_triton
@pytest.mark.parametrize('values', [pytest.param(dict(n_layer=3), marks=pytest.mark.long), dict(eos_id=59),
                                    dict(n_head=0)], ids=str)
def test_the_scan_on_kernels_equals_the_loop(values, kernels_device):
    model, idx = make(**values)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1) if p.dim() == 2 else torch.nn.init.ones_(p)
    idx = idx[:2, :9]
    want = loss_and_gradients(model, plain_states(model, idx), idx)
    model, idx = set_form(model.float().to(kernels_device), 'fast'), idx.to(kernels_device)
    assert_close(loss_and_gradients(model, model.states(idx), idx), [x.to(kernels_device) for x in want], 1e-4)
    assert set_form(model, 'auto').scan_report['scan'] == 'fast'  # the kernels pass the check


@needs_triton
def test_decoding_on_kernels(kernels_device):
    decoding_is_the_step_repeated('fast', kernels_device, torch.float32, 1e-3)


@needs_triton
@pytest.mark.slow
def test_the_model_compiles_to_one_graph(kernels_device, loss_in_the_graph):
    model, idx = make(eos_id=59, scan='fast')
    model, idx = model.float().to(kernels_device), idx[:, :9].to(kernels_device)
    want = model(idx, idx)['loss']
    got = torch.compile(model, backend='aot_eager', fullgraph=True)(idx, idx)['loss']
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, list(model.parameters())),
                    torch.autograd.grad(want, list(model.parameters()))):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_a_compiled_model_trains_by_the_loop_to_the_same_numbers():
    """torch.compile meets one call of the loop; inside it `step` alone is compiled, once for each kind of inputs."""
    model, idx = make(eos_id=59, bptt_len=7, scan='loop')
    model.choose_scan()
    idx = idx[:, :12]
    want = model(idx, idx)['loss']
    want = torch.autograd.grad(want, list(model.parameters()))
    torch._dynamo.reset()
    counters, graphs, compiled = torch._dynamo.utils.counters, [], torch.compile(model, backend='aot_eager')
    counters.clear()
    for _ in range(2):
        got = compiled(idx, idx)['loss']
        for a, b in zip(torch.autograd.grad(got, list(model.parameters())), want):
            assert (a - b).norm() <= 1e-10 * b.norm()
        graphs.append(counters['stats']['unique_graphs'])
    assert 0 < graphs[0] <= 8 and graphs[1] == graphs[0]


@pytest.mark.slow
def test_the_bench_runs_at_toy_size(capsys):
    from bench import gpn
    gpn.main(['--toy'])
    said = capsys.readouterr().out
    assert all(name in said for name in (['tokens_per_s']
                                         if torch.cuda.is_available() else ['loop_peak_growth_mb', 'plain over']))
    with pytest.raises(SystemExit):
        gpn.main(['--teapot'])
