"""The code as a GPU runs it, without one: every model trains, evaluates and decodes on tensors without values."""
import math
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import GPU, fake_gpu
from test_models import VARIANTS, small_model

import train
from common.decoding import generate
from common.machine import Machine
from common.speculative import speculative_generate

SETTINGS = train.Settings(batch_size=4, micro_batch_size=2, block_size=40, eval_tokens=160)
DATA = SimpleNamespace(train_batch=lambda *_: (torch.zeros(4, 40, dtype=torch.int64),) * 2,
                       val_batch=lambda windows, T, seed=None: (torch.zeros(len(windows), T, dtype=torch.int64),) * 2,
                       n_windows=lambda split, T: 4)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]


@pytest.fixture
def gpu():
    with fake_gpu() as gpu:
        yield gpu
        assert not gpu.faults, '\n'.join(dict.fromkeys(gpu.faults))


def make(variant):
    name, values = VARIANTS[variant]
    with torch.device(GPU):
        model = small_model(name, values)
    if hasattr(model, 'choose_scan'):  # which would compare values
        form = 'loop' if getattr(model.config, 'scan', 'auto') == 'loop' else 'fast'
        model.scan_report = {'scan': form, 'device': 'cuda', 'unused': []}
    return model


def recorder(graphs):
    def compile(module, inputs):
        graphs.append(module)
        return module.forward
    return compile


def step(gpu, model, compiled):
    """Two training steps and an evaluation."""
    machine, optimizer = Machine(0, 1, GPU, torch.bfloat16), train.make_optimizer(model, SETTINGS)
    skips = torch.zeros(3, device=GPU)
    with gpu.no_wait():
        for i in range(2):
            train.train_step(model, compiled, optimizer, DATA, SETTINGS, i, machine, skips, False)


@pytest.mark.parametrize('variant', VARIANTS)
def test_train(variant, gpu):
    model, graphs = make(variant), []
    step(gpu, model, torch.compile(model, backend=recorder(graphs)))
    print('GRAPHS', variant, len(graphs))


@pytest.mark.parametrize('variant', VARIANTS)
def test_decode(variant, gpu):
    model = make(variant).eval()
    with Machine(0, 1, GPU, torch.bfloat16).autocast():
        new = generate(model, PROMPTS, 20)
    print(gpu.captured, set(gpu.launched), new)


@pytest.mark.parametrize('variant', VARIANTS)
def test_speculative(variant, gpu):
    model = make(variant).eval()
    draft = make('standard').eval()
    with Machine(0, 1, GPU, torch.bfloat16).autocast():
        speculative_generate(model, PROMPTS, 20, draft=draft)
        if getattr(model, 'longest_draft', 0):
            speculative_generate(model, PROMPTS, 20)
            speculative_generate(model, PROMPTS, 20, draft_len=1)
    print(gpu.captured, set(gpu.launched))
