"""Any optimizer: steps with non-finite gradients change nothing, and training resumes bitwise."""
import copy

import pytest
import torch
from conftest import assert_equal_states

import train
from common import checkpoint
from common.files import UserError


class WithHistory(torch.optim.Optimizer):
    """SGD by the mean of the last gradients, with various things in its state."""

    def __init__(self, params):
        super().__init__(params, {'lr': 0.1})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group['params'] if p.grad is not None):
            state = self.state[p]
            state['n'] = state.get('n', 0) + 1
            state['last'] = [*state.get('last', []), p.grad.clone()][-3:]
            state['other'] = {'name': 'x', 'none': None, 'rate': 0.1 ** state['n'], 'half': p.grad.bfloat16()}
            p.sub_(sum(state['last']) / len(state['last']), alpha=0.1)


OPTIMIZERS = {
    'SGD': torch.optim.SGD, 'SGD, momentum': lambda params: torch.optim.SGD(params, momentum=0.9),
    'AdamW, fused': lambda params: torch.optim.AdamW(params, fused=True), 'AdamW': torch.optim.AdamW,
    'NAdam': torch.optim.NAdam, 'Adafactor': torch.optim.Adafactor, 'its own': WithHistory}


def make(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    if name == 'Muon':
        return model, train.make_optimizer(model, train.Settings(optimizer='muon', learning_rate=0.01))
    return model, OPTIMIZERS[name](model.parameters())


def step(model, optimizer, seed, scale=1.0):
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
    (scale * model(x).square().sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    train.step_if_finite(optimizer, norm, torch.zeros(3))
    optimizer.zero_grad()


@pytest.mark.parametrize('name', [*OPTIMIZERS, 'Muon'])
def test_a_step_that_is_not_finite_changes_nothing_and_training_resumes_bitwise(name, tmp_path):
    model, optimizer = make(name)
    for seed in range(3):
        step(model, optimizer, seed)
    before = copy.deepcopy((model.state_dict(), dict(enumerate(optimizer.state.values()))))
    step(model, optimizer, 3, torch.nan)
    assert_equal_states((model.state_dict(), dict(enumerate(optimizer.state.values()))), before)
    checkpoint.save_training(tmp_path, model, optimizer, 3, 1.5, keep=2)
    again, its_optimizer = make(name)
    assert checkpoint.restore_training(tmp_path, again, its_optimizer) == (3, 1.5)
    for seed in range(4, 6):
        step(model, optimizer, seed)
        step(again, its_optimizer, seed)
    assert_equal_states(again.state_dict(), model.state_dict())
    assert_equal_states(*([state[p] for p in m.parameters() if p in state] for m, state in (
        (again, its_optimizer.state), (model, optimizer.state))))


def test_scalars_of_a_state_stay_on_their_device():
    """Step counts of unfused optimizers are on the CPU, other scalars on the parameter's device."""
    tensors, one = {}, torch.ones((), device='cpu')
    packed = checkpoint.pack([one, one.to('meta')], 'x', 'w', tensors)
    for scalars_too in (False, True):
        got = checkpoint.unpack(packed, tensors, torch.ones(2, device='meta'), scalars_too)
        assert [x.device.type for x in got] == ['meta' if scalars_too else 'cpu', 'meta']


def test_a_state_that_json_cannot_hold_is_a_sentence(tmp_path):
    model, optimizer = make('SGD')
    optimizer.state[model[0].weight]['seen'] = {1, 2}
    with pytest.raises(UserError, match='seen = {1, 2} for 0.weight: a checkpoint holds only'):
        checkpoint.save_training(tmp_path, model, optimizer, 0, 0.0, keep=2)
