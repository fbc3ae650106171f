"""Muon and AdamW as one optimizer: which parameters each updates."""
import copy

import pytest
import torch

import model_gdn
import model_nextlat
import train
from common.muon import hidden_matrices


@pytest.fixture
def model():
    torch.manual_seed(0)
    return model_nextlat.Model(model_nextlat.Config(n_layer=2, n_head=2, n_embd=16, n_dynamics=24, vocab_size=64,
                                                    n_ids=60, eos_id=59))


def with_gradients(model):
    idx = torch.arange(40).view(2, 20)
    model.zero_grad()
    model(idx[:, :-1], idx[:, 1:])['loss'].backward()
    return model


def test_muon_updates_hidden_matrices_and_adamw_the_rest(model):
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
