"""Any optimizer: a non-finite gradient changes nothing, training resumes bitwise; Muon's share."""
import copy
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import assert_sentence, losses, run, succeeded, train_tiny, trained_run

import model_gdn
import model_nextlat
import train
from lm_architectures.run import checkpoint, folders
from lm_architectures.run.dry_run import meta_model, optimizer_bytes
from lm_architectures.run.models import count_parameters, make_config
from lm_architectures.run.muon import hidden_matrices


class WithHistory(torch.optim.Optimizer):
    """SGD by the mean of all gradients, with various things in its state and its groups."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {'lr': lr, 'n': 0, 'total': torch.zeros(())})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group['n'] += 1
            group['total'] = group['total'] + 1
            for p in (p for p in group['params'] if p.grad is not None):
                state = self.state[p]
                state['sum'] = state.get('sum', 0) + p.grad
                state |= {'name': 'x', 'none': None, 'half': p.grad.bfloat16()}
                state.setdefault('rates', [1.0, 2])[0] *= 0.9
                p.sub_(state['sum'] / group['total'], alpha=group['lr'] * state['rates'][0])


class Broken(WithHistory):
    def step(self):
        raise ValueError('needs data')


OPTIMIZERS = {
    'SGD': torch.optim.SGD, 'SGD, momentum': lambda params: torch.optim.SGD(params, momentum=0.9),
    'AdamW, fused': lambda params: torch.optim.AdamW(params, fused=True), 'AdamW': torch.optim.AdamW,
    'NAdam': torch.optim.NAdam, 'Adafactor': torch.optim.Adafactor, 'its own': WithHistory}


def make(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    model.register_buffer('saved', torch.zeros(3))
    model.register_buffer('scratch', torch.zeros(3), persistent=False)
    if name == 'Muon':
        return model, train.make_optimizer(model, train.Settings(optimizer='muon', learning_rate=0.01))
    return model, OPTIMIZERS[name](model.parameters())


def step(model, optimizer, seed, scale=1.0):
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
    (scale * model(x).square().sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        checkpoint.made_with(group)  # as in `train_step`
    train.step_if_finite(optimizer, norm, torch.zeros(3))
    optimizer.zero_grad()


def assert_equal_states(got, want):
    """Check that models or optimizers have bitwise equal tensors and equal other values."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value, key


@pytest.mark.parametrize('name', [*OPTIMIZERS, 'Muon'])
def test_a_step_that_is_not_finite_changes_nothing_and_training_resumes_bitwise(name, tmp_path):
    model, optimizer = make(name)
    for seed in range(3):
        step(model, optimizer, seed)
    model.saved.add_(1)
    model.scratch.add_(1)
    before = copy.deepcopy([model.state_dict(), *optimizer.state.values()])
    step(model, optimizer, 3, torch.nan)
    for got, want in zip([model.state_dict(), *optimizer.state.values()], before):
        assert_equal_states(got, want)
    train.check_state(optimizer)
    s, gate = train.Settings(out_dir=tmp_path), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(gate.wait)
        checkpoint.save_training(s, model, optimizer, 3, 1.5, thread)
        step(model, optimizer, 4)  # while the checkpoint waits to be written
        gate.set()
    again, its_optimizer = make(name)
    assert folders.restore_training(tmp_path, again, its_optimizer) == (3, 1.5)
    assert again.saved.equal(model.saved) and not again.scratch.any()  # buffers
    step(again, its_optimizer, 4)
    for seed in range(5, 7):
        step(model, optimizer, seed)
        step(again, its_optimizer, seed)
    assert_equal_states(again.state_dict(), model.state_dict())
    for p, its in zip(model.parameters(), again.parameters()):
        assert_equal_states(its_optimizer.state.get(its, {}), optimizer.state.get(p, {}))


@pytest.mark.slow
@pytest.mark.parametrize('seen', [{1, 2}, {'a': 2}, [torch.ones(1)]], ids=repr)
def test_a_state_that_a_checkpoint_cannot_hold_is_a_sentence_before_any_save(tiny_data, tmp_path, monkeypatch, seen):
    def optimizer(model, s):
        found = torch.optim.SGD(model.parameters())
        found.state[next(model.parameters())]['seen'] = seen
        return found
    monkeypatch.setattr(train, 'make_optimizer', optimizer)
    assert_sentence(train_tiny(tiny_data, tmp_path / 'out'), f'seen = {seen}: a checkpoint holds only tensors')
    assert not (tmp_path / 'out').exists()


@pytest.mark.slow
def test_groups_keep_the_ratio_of_their_rates_and_their_numbers_also_resumed(tiny_data, tmp_path, monkeypatch):
    rates, step = [], train.step_if_finite

    def make_optimizer(model, s):
        first, *rest = model.parameters()
        return WithHistory([{'params': [first], 'lr': s.learning_rate / 10}, {'params': rest}], s.learning_rate)

    def step_if_finite(optimizer, *args):
        rates.append([group['lr'] for group in optimizer.param_groups])
        step(optimizer, *args)
    monkeypatch.setattr(train, 'make_optimizer', make_optimizer)
    monkeypatch.setattr(train, 'step_if_finite', step_if_finite)
    out = trained_run(tiny_data, tmp_path / 'run')
    want = losses(out)
    assert [rate for _, rate in rates] == [lr for _, _, lr, _ in want.values()]
    assert [rate for rate, _ in rates] == pytest.approx([rate / 10 for _, rate in rates]) and rates[0] < rates[3]
    shutil.rmtree(out / 'ckpt/step_00000020')
    succeeded(run('train.py', f'--out_dir={out}', '--resume'))
    assert losses(out) == want and rates[-2:] == rates[18:20]


def test_a_dry_run_counts_the_states_that_an_optimizer_has():
    model = meta_model('standard', make_config('standard', dict(n_layer=2, n_head=2, n_embd=64, n_ids=300)))
    n, s = count_parameters(model), train.Settings()
    rows_and_columns = sum(sum(p.shape) if p.dim() > 1 else p.numel() for p in model.parameters())
    n_tensors = len([*model.parameters()])
    for make, want in ((lambda m: train.make_optimizer(m, s), 8 * n + 4 * n_tensors),
                       (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9), 4 * n),
                       (lambda m: torch.optim.Adafactor(m.parameters()), 4 * (rows_and_columns + n_tensors)),
                       (lambda m: torch.optim.SGD(m.parameters()), 0), (lambda m: Broken(m.parameters()), None)):
        assert optimizer_bytes(model, make) == want


# ---- Muon ----

def with_gradients(model):
    idx = torch.arange(40).view(2, 20)
    model.zero_grad()
    model(idx[:, :-1], idx[:, 1:])['loss'].backward()
    return model


def test_muon_updates_hidden_matrices_and_adamw_the_rest():
    torch.manual_seed(0)
    model = model_nextlat.Model(model_nextlat.Config(n_layer=2, n_head=2, n_embd=16, n_dynamics=24, vocab_size=64,
                                                     n_ids=60, eos_id=59))
    other, s = copy.deepcopy(model), train.Settings(optimizer='muon', learning_rate=0.01)
    optimizer = train.make_optimizer(model, s)
    named = dict(model.named_parameters())
    of_muon = {name for name, p in named.items() if p in hidden_matrices(model)}
    assert of_muon == {name for name in named if name.endswith('.weight') and 'norm' not in name} - {
        'embed.weight', 'head.weight'}
    assert sum(len(group['params']) for group in optimizer.param_groups) == len(named)
    with_gradients(model)
    optimizer.step()
    theirs = dict(with_gradients(other).named_parameters())
    torch.optim.Muon([p for name, p in theirs.items() if name in of_muon], lr=0.01, weight_decay=0.1,
                     adjust_lr_fn='match_rms_adamw').step()
    for decay, dims in ((0.1, (2, 3)), (0.0, (1,))):
        torch.optim.AdamW([p for name, p in theirs.items() if name not in of_muon and p.dim() in dims], lr=0.01,
                          betas=(0.9, 0.95), weight_decay=decay, fused=True).step()
    assert all(torch.equal(p, theirs[name]) for name, p in named.items())


def test_muon_leaves_short_convolutions_to_adamw():
    model = model_gdn.Model(model_gdn.Config(n_layer=1, n_head=1, n_embd=64, vocab_size=64, n_ids=60, eos_id=59))
    others = {name for name, p in model.named_parameters() if p.dim() == 2 and p not in hidden_matrices(model)}
    assert others == {'embed.weight', 'head.weight', 'blocks.0.conv'}
