"""The code as a GPU runs it, without one: each model trains, evaluates and decodes on tensors without values.

`fake_gpu.py` says what is a fault. What only a GPU can show stands in bench/results/README.md.
"""
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import GPU, fake_gpu
from test_models import VARIANTS, needs, small_model
from torch._subclasses.fake_tensor import FakeTensor

import attn_kernels
import train
from common import int8
from common.decoding import generate
from common.machine import Machine
from common.speculative import speculative_generate

pytestmark = pytest.mark.skipif(not hasattr(FakeTensor, '_normalize_fake_device'), reason='needs PyTorch 2.13')
SETTINGS = train.Settings(batch_size=4, micro_batch_size=2, block_size=40, eval_tokens=160)
# Training windows have gaps in memory, as inputs and targets share them.
DATA = SimpleNamespace(train_batch=lambda *_: (torch.zeros(4, 41, dtype=torch.int64)[:, :-1],) * 2,
                       val_batch=lambda windows, T, seed: (torch.zeros(len(windows), T, dtype=torch.int64),) * 2,
                       n_windows=lambda split, T: 4)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]
FILTERS = dict(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01)
# Graphs that torch.compile makes of a training step's forward. Others have one, without a break; these compile a part
# at a time, as an unroll.
GRAPHS = {
    'context_ready': 4, 'context_ready, documents, window': 5, 'context_ready, sequential': 5,
    'context_ready, concat': 5, 'context_ready, token-blind': 5, 'context_ready, tied': 4,
    'context_ready, block head': 5, 'context_ready, bptt': 2, 'context_ready, llama': 5, 'roformer': 4,
    'roformer, extra FFN, window': 3, 'gdn, documents, loop': 6}
SHORT = ['sps']  # what runs without -m long


def variants(short):
    return pytest.mark.parametrize('variant', [
        variant if variant in short else pytest.param(variant, marks=pytest.mark.long) for variant in VARIANTS])


@pytest.fixture
def gpu():
    with fake_gpu() as gpu:
        yield gpu


def assert_no_fault(gpu):
    assert not gpu.faults, '\n'.join(dict.fromkeys(gpu.faults))


def make(variant):
    if variant in ('jtp, grouped queries', 'context_ready, llama, bptt'):
        pytest.skip('its queries are normed, so in bf16; its values stay in fp32, as autocast casts nothing here')
    name, values = VARIANTS[variant]
    with torch.device(GPU):
        model = small_model(name, values)
    if hasattr(model, 'choose_scan'):  # which would compare values
        form = 'loop' if getattr(model.config, 'scan', 'auto') == 'loop' else 'fast'
        model.scan_report = {'scan': form, 'device': 'cuda', 'unused': []}
    return model


def train_and_evaluate(gpu, model):
    """Two training steps as train.py does them, and an evaluation. Returns the graphs of the compiled forward."""
    graphs = []

    def record(module, inputs):
        graphs.append(module)
        return module.forward

    compiled, machine = torch.compile(model, backend=record), Machine(0, 1, GPU, torch.bfloat16)
    optimizer, skips = train.make_optimizer(model, SETTINGS), torch.zeros(3, device=GPU)
    with gpu.no_wait():
        for step in range(2):
            parts, norm, _ = train.train_step(model, compiled, optimizer, DATA, SETTINGS, step, machine, skips, False)
    train.read_numbers(parts, norm, machine)
    n_graphs = len(graphs)
    train.evaluate(compiled, DATA, SETTINGS, machine)
    return n_graphs


@variants(SHORT)
def test_training_waits_for_nothing_and_is_as_few_graphs_as_stated(variant, gpu):
    n_graphs = train_and_evaluate(gpu, make(variant))
    assert_no_fault(gpu)
    assert n_graphs == GRAPHS.get(variant, 1)


def test_a_loss_of_many_parts_is_outside_of_the_graph(gpu, monkeypatch):
    monkeypatch.setattr(attn_kernels, 'MOST_PARTS_OF_A_GRAPH', 0)
    assert train_and_evaluate(gpu, make('standard')) > 1
    assert_no_fault(gpu)


@variants(SHORT)
def test_runs_up_to_max_run_wait_for_nothing(variant, gpu):
    needs(variant, 'extend')
    model = make(variant).eval()
    read_runs(gpu, model)
    assert_no_fault(gpu)


def read_runs(gpu, model):
    """A prefill, which may wait, then runs of all kinds that `extend` has, which may not."""
    cache, tokens = model.new_cache(2, 60, max_run=4), torch.zeros(2, 20, dtype=torch.int64, device=GPU)
    lengths = torch.ones(2, dtype=torch.int64, device=GPU)
    model.extend(tokens, cache)
    with gpu.no_wait():
        for n in (1, 3, 4):
            model.extend(tokens[:, :n], cache)
            cache.rollback(1)
            model.extend(tokens[:, :n], cache, lengths, all_positions=True)
            cache.rollback(lengths)


@variants(SHORT)
def test_decoding_is_one_graph_that_can_be_captured(variant, gpu):
    needs(variant, 'extend')
    model = make(variant).eval()
    with Machine(0, 1, GPU, torch.bfloat16).autocast():
        new = generate(model, PROMPTS, 20, **FILTERS)
    assert [len(ids) for ids in new] == [20, 20] and gpu.captured == 1
    assert_no_fault(gpu)


def test_decoding_with_8_bit_weights_is_captured_too(gpu, monkeypatch):
    monkeypatch.setattr(int8, 'has_gpu_product', lambda device: True)
    model = int8.quantize(make('standard, documents').eval())
    with Machine(0, 1, GPU, torch.bfloat16).autocast():
        generate(model, PROMPTS, 20, **FILTERS)
    assert gpu.captured == 1 and '_int8_product_kernel' in gpu.launched
    assert_no_fault(gpu)


@variants(['gpn'])
def test_speculative_decoding_is_graphs_that_can_be_captured(variant, gpu):
    needs(variant, 'extend')
    model, draft = make(variant).eval(), make('standard').eval()
    with Machine(0, 1, GPU, torch.bfloat16).autocast():
        speculative_generate(model, PROMPTS, 12, draft=draft, draft_len=3, **FILTERS)
        assert gpu.captured == 4  # each token of a draft, and the verification
        if getattr(model, 'longest_draft', 0):
            speculative_generate(model, PROMPTS, 12)
            assert gpu.captured > 4
    assert_no_fault(gpu)


# ---- what the rehearsal would not miss ----

def break_forward(model, extra):
    """Runs extra(hidden) inside the model's forward and extend."""
    model.norm.register_forward_hook(lambda module, inputs, output: extra(output))


BREAKAGES = {  # what an edit might put into a model, and what the rehearsal says
    'item': (lambda h: None if h.sum().item() > 2 else None, 'a value that the host reads'),
    'nonzero': (lambda h: (h[h > 0], None)[1], 'an index of booleans'),
    'blocking copy': (lambda h: (torch.ones(3).to(GPU), None)[1], 'a blocking copy from the host'),
    'copy to the host': (lambda h: (h.cpu(), None)[1], 'a copy to the host'),
    'tensor of the host': (lambda h: h + torch.ones((), dtype=h.dtype), 'a tensor of the host'),
}


@pytest.mark.parametrize('breakage', [
    'tensor of the host', *(pytest.param(name, marks=pytest.mark.long) for name in list(BREAKAGES)[:-1])])
def test_a_breakage_is_a_fault_in_training_decoding_and_a_captured_graph(breakage, gpu):
    extra, sentence = BREAKAGES[breakage]
    model = make('standard')
    break_forward(model, extra)
    train_and_evaluate(gpu, model)
    assert any(sentence in fault for fault in gpu.faults), gpu.faults
    gpu.faults.clear()
    read_runs(gpu, model.eval())
    assert any(sentence in fault and 'tests/test_rehearsal.py:' in fault for fault in gpu.faults), gpu.faults
    gpu.faults.clear()
    generate(model, PROMPTS, 4)
    assert any('in a captured graph' in fault for fault in gpu.faults), gpu.faults
    gpu.faults.clear()
    speculative_generate(model, PROMPTS, 4, draft=make('standard').eval(), draft_len=2)
    assert any('in a captured graph' in fault for fault in gpu.faults), gpu.faults


@pytest.mark.long
@pytest.mark.parametrize('variant', ['sps', 'context_ready', 'nextlat, documents, tied', 'bst', 'gpn', 'gdn'])
def test_a_wait_in_any_model_is_a_fault_in_training_decoding_and_a_captured_graph(variant, gpu):
    model = make(variant)
    model.embed.register_forward_hook(lambda module, inputs, output: BREAKAGES['item'][0](output))
    for run in (lambda: train_and_evaluate(gpu, model), lambda: read_runs(gpu, model.eval()),
                lambda: generate(model, PROMPTS, 4)):
        run()
        assert any('a value that the host reads' in fault for fault in gpu.faults), gpu.faults
        gpu.faults.clear()


@pytest.mark.long
def test_a_graph_break_is_more_graphs(gpu):
    model = make('standard')
    break_forward(model, BREAKAGES['item'][0])
    assert train_and_evaluate(gpu, model) > 1

# ---- what operators without values say of themselves ----

def test_gpns_operators_return_what_their_fake_forms_say(monkeypatch):
    gpn, calls = attn_kernels.import_scan('gpn'), []
    for name in ('_scan_op', '_scan_backward_op'):
        operator = getattr(gpn, name)
        monkeypatch.setattr(gpn, name, lambda *args, op=operator: (calls.append((op, args)), op(*args))[1])
    model, idx = small_model(*VARIANTS['gpn']), torch.zeros(2, 10, dtype=torch.int64)
    model.scan_report = {'scan': 'fast', 'device': 'cpu', 'unused': []}
    model(idx, idx)['loss'].backward()
    assert len(calls) == 2
    for operator, args in calls:
        torch.library.opcheck(operator, args, test_utils=('test_schema', 'test_faketensor'))
