"""The contract that every model file keeps, and what each one must equal."""
import contextlib
import copy
import dataclasses
import functools
import random

import pytest
import torch
import torch.nn.functional as F

import model_standard
import train
from common import runs, settings
from common.export import to_llama

SMALL = dict(n_layer=3, n_head=2, n_embd=32, vocab_size=64, n_ids=60)
GROUPED = dict(n_head=6, n_kv_head=2, head_size=10, qkv_bias=True, qk_norm=True, rope_scaling='8,1,4,8')
GPN = dict(d_emb=24, d_k=8, d_v=12, n_ffn=40, segment_len=7)
GDN = dict(d_k=8, d_v=12, n_ffn=40, chunk_len=7)
VARIANTS = {
    'standard': ('standard', dict(eos_id=None)),
    'standard, documents': ('standard', dict(eos_id=59)),
    'standard, window': ('standard', dict(eos_id=59, window=3)),
    'standard, window 0, untied': ('standard', dict(eos_id=None, window=0, tied_head=False)),
    'standard, grouped queries': ('standard', GROUPED | dict(eos_id=59, window=5)),
    'sps': ('sps', dict(eos_id=59, window=3)),
    'sps, grouped queries': ('sps', GROUPED | dict(eos_id=59, window=3)),
    'sps, window 0': ('sps', dict(eos_id=59, window=0)),
    'sps, window 1, no documents, untied': ('sps', dict(eos_id=None, window=1, tied_head=False)),
    'sps, window 16': ('sps', dict(eos_id=59, window=16)),
    'sps, all': ('sps', dict(eos_id=59, window=None)),
    'sps, beyond the paper': ('sps', dict(eos_id=59, window=3, predict_layers=2, predict_input='token')),
    'sps, window 0, top layer': ('sps', dict(eos_id=None, window=0, predict_layers=1)),
    'sps, fork': ('sps', dict(eos_id=59, window=3, predict_layers=2, predict_input='state')),
    'sps, fork, window 0': ('sps', dict(eos_id=59, window=0, predict_layers=1, predict_input='state')),
    'sps, fork, all': ('sps', dict(eos_id=None, window=None, predict_layers=1, predict_input='state')),
    'sps, persistent window': ('sps', dict(eos_id=59, window=2, persistent_window=5)),
    'two_x_memory': ('sps', dict(eos_id=59, method='two_x_memory', window=None)),
    'two_x_memory, no documents, top layer': ('sps', dict(eos_id=None, method='two_x_memory', window=None,
                                                          predict_layers=1)),
    'delayed_state': ('sps', dict(eos_id=59, method='delayed_state', window=3)),
    'delayed_state, window 0, no documents': ('sps', dict(eos_id=None, method='delayed_state', window=0)),
    'delayed_state, beyond the paper': ('sps', dict(eos_id=59, method='delayed_state', window=3, predict_layers=2,
                                                    predict_input='token')),
    'delayed_state, fork': ('sps', dict(eos_id=59, method='delayed_state', window=3, predict_layers=2,
                                        predict_input='state')),
    'reverse_sps': ('sps', dict(eos_id=59, method='reverse_sps', window=3)),
    'reverse_sps, window 0': ('sps', dict(eos_id=59, method='reverse_sps', window=0)),
    'reverse_sps, all': ('sps', dict(eos_id=59, method='reverse_sps', window=None)),
    'reverse_sps, top layer': ('sps', dict(eos_id=None, method='reverse_sps', window=2, predict_layers=1)),
    'context_ready': ('context_ready', dict()),
    'context_ready, documents, window': ('context_ready', dict(eos_id=59, window=5)),
    'context_ready, sequential': ('context_ready', dict(eos_id=59, prefill='sequential')),
    'context_ready, concat': ('context_ready', dict(eos_id=59, variant='concat', window=0)),
    'context_ready, token-blind': ('context_ready', dict(eos_id=59, variant='token_blind')),
    'context_ready, tied': ('context_ready', dict(variant='tied', window=3)),
    'context_ready, block head': ('context_ready', dict(eos_id=59, variant='block_head')),
    'context_ready, bptt': ('context_ready', dict(eos_id=59, bptt=True, window=5, prefill='sequential')),
    'context_ready, llama': ('context_ready', GROUPED | dict(block='llama', eos_id=59, window=5, tied_head=True)),
    'context_ready, llama, bptt': ('context_ready', GROUPED | dict(block='llama', bptt=True, variant='concat',
                                                                   prefill='sequential')),
    'roformer': ('context_ready', dict(K=1, eos_id=59)),
    'roformer, extra FFN, window': ('context_ready', dict(K=1, variant='extra_ffn', window=4)),
    'ntp, documents': ('nextlat', dict(eos_id=59, objective='ntp')),
    'nextlat': ('nextlat', dict(eos_id=None)),
    'nextlat, documents, tied': ('nextlat', dict(eos_id=59, horizon=2, tied_head=True)),
    'nextlat, ablations': ('nextlat', dict(eos_id=59, horizon=2, token_loss='ce', stop_target=False, stop_head=False)),
    'mtp, documents': ('mtp', dict(eos_id=59, horizon=2)),
    'jtp, documents': ('jtp', dict(eos_id=59, horizon=2)),
    'nextlat, grouped queries': ('nextlat', GROUPED | dict(eos_id=59)),
    'mtp, tied': ('mtp', dict(eos_id=None, tied_head=True)),
    'bst': ('bst', dict(eos_id=None)),
    'bst, documents, half of the pairs': ('bst', dict(eos_id=59, pair_share=0.5, min_k=2)),
    'gpn': ('gpn', GPN | dict(eos_id=None)),
    'gpn, one layer, documents': ('gpn', GPN | dict(eos_id=59, n_layer=1)),
    'gpn, no memory': ('gpn', GPN | dict(eos_id=None, n_head=0, n_layer=1)),
    'gpn, no memory, documents, decoder bias': ('gpn', GPN | dict(eos_id=59, n_head=0, decoder_bias=True)),
    'gdn': ('gdn', GDN | dict(eos_id=None)),
    'gdn, documents': ('gdn', GDN | dict(eos_id=59)),
    'gdn, documents, loop': ('gdn', GDN | dict(eos_id=59, n_layer=1, conv_size=2, scan='loop')),
}


@pytest.mark.parametrize('tied_head', [True, False])
def test_init_torch_leaves_linear_layers_as_torch_makes_them(tied_head):
    torch.manual_seed(0)
    values = dict(n_layer=1, n_head=2, n_embd=128, vocab_size=512, n_ids=512, eos_id=None, qkv_bias=True)
    model = model_standard.Model(model_standard.Config(init='torch', tied_head=tied_head, **values))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not (name == 'head' and tied_head):
            bound = module.in_features ** -0.5  # nn.Linear's default is uniform between these
            for p in module.parameters():
                assert 0.95 * bound < p.abs().max() <= bound and abs(p.std() * 3 ** 0.5 / bound - 1) < 0.05
    embed = model.embed.weight
    assert abs(embed.std() / 0.02 - 1) < 0.02 and embed.abs().max() > 0.07  # normal
    assert (model.head.weight is embed) == tied_head


def make(variant, device='cpu'):
    name, values = VARIANTS[variant]
    torch.manual_seed(0)
    model = small_model(name, values).to(device).eval()
    # larger than at the start of training, so that attention is far from uniform
    for weight, p in model.named_parameters():
        if p.dim() >= 2:  # but a recurrence must not be chaotic: fp32 would tell nothing
            recurrent = weight.startswith('correction.') or values.get('variant') == 'tied'
            torch.nn.init.normal_(p, std=0.05 if recurrent else 0.1 if name == 'gpn' else 0.15)
    return model


def small_model(name, values):
    """A model of a file, as small as its Config has settings for."""
    module = runs.model_file(name)
    own = {field.name for field in dataclasses.fields(module.Config)}
    return module.Model(module.Config(**{key: value for key, value in SMALL.items() if key in own} | values))


def needs(variant, *attributes):
    """Skips a test where the variant's model has not what it is about: README lists what is optional."""
    model = runs.model_file(VARIANTS[variant][0]).Model
    for name in attributes:
        if not hasattr(model, name):
            pytest.skip(f'{variant} has no {name}')


def some_tokens(B, T, seed=0):
    """Random ids with documents of various lengths, empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, 59, (B, T), generator=generator)
    idx[torch.rand(B, T, generator=generator) < 0.1] = 59
    idx[0, 4:6] = 59
    return idx


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('seed', range(3))
def test_cached_decoding_equals_full_forward(variant, seed, device):
    needs(variant, 'extend')
    decode_in_pieces(variant, seed, device, T=90, max_run=(1, 4, 18)[seed])


def decode_in_pieces(variant, seed, device, T, max_run):
    """Compares with `logits`: ragged rows, random cuts into extend calls, and rollbacks in between."""
    rng = random.Random(seed)
    model, idx = make(variant, device), some_tokens(3, T, seed).to(device)
    want = model.logits(idx)
    cache = model.new_cache(3, T, max_run)
    assert cache.nbytes > 0
    done = [0, 0, 0]
    while min(done) < T:
        longest = rng.choice([1, 2, max_run, 17, 45])
        run = [min(rng.randint(1, longest), T - d) for d in done]
        if min(run) == 0:  # a full row: nothing can be appended to it
            break
        tokens = torch.full((3, max(run)), 7, device=device)
        for b, n in enumerate(run):
            tokens[b, :n] = idx[b, done[b]:done[b] + n]
        lengths = torch.tensor(run, device=device)
        every = rng.random() < 0.5
        logits = model.extend(tokens, cache, lengths, all_positions=every)
        for b, n in enumerate(run):
            got = logits[b, :n] if every else logits[b:b + 1]
            expected = want[b, done[b]:done[b] + n] if every else want[b, done[b] + n - 1:done[b] + n]
            assert (got[:, :60] - expected[:, :60]).abs().max() < 1e-4
            done[b] += n
        if rng.random() < 0.3:  # the end of any run can be forgotten
            back = [rng.choice([0, min(n, max_run)]) for n in run]
            cache.rollback(torch.tensor(back, device=device))
            done = [d - n for d, n in zip(done, back)]
        # a draft that is refused: wrong tokens, ends of documents among them
        if max(done) + max_run <= T and rng.random() < 0.5:
            wrong = torch.tensor([[rng.choice([59, 3, 8]) for _ in range(max_run)] for _ in range(3)], device=device)
            drafted = [rng.randint(1, max_run) for _ in range(3)]
            keep = [rng.choice([0, n, rng.randint(0, n)]) for n in drafted]
            for b, n in enumerate(keep):
                wrong[b, :n] = idx[b, done[b]:done[b] + n]
            drafted = torch.tensor(drafted, device=device)
            model.extend(wrong, cache, drafted)
            cache.rollback(drafted - torch.tensor(keep, device=device))
            done = [d + n for d, n in zip(done, keep)]
        assert cache.lengths.tolist() == done


@pytest.mark.parametrize('variant', VARIANTS)
def test_final_hidden_is_what_the_head_multiplies_in_the_cache_too(variant):
    needs(variant, 'final_hidden', 'extend')
    model, idx = make(variant), some_tokens(2, 12)
    hidden, cache = model.final_hidden(idx), model.new_cache(2, 12, max_run=3)
    assert torch.allclose(model.head(hidden)[..., :60], model.logits(idx)[..., :60], atol=1e-5)
    for a, b in ((0, 7), (7, 9), (9, 12)):
        model.extend(idx[:, a:b], cache)
        kept = min(b - a, 3)
        assert torch.allclose(cache.hidden[:, :kept], hidden[:, b - kept:b], atol=1e-4)


@pytest.mark.parametrize('variant, head_of_trunk', [
    ('mtp, documents', lambda model, idx, trunk: model.norm(model.blocks[-1](trunk, *model._prepare(idx)))),
    ('bst, documents, half of the pairs', lambda model, idx, trunk: model._next_state(trunk))])
def test_trunk_is_the_state_below_what_the_head_multiplies(variant, head_of_trunk):
    model, idx = make(variant), some_tokens(2, 12)
    assert torch.allclose(head_of_trunk(model, idx, model.trunk(idx)), model.final_hidden(idx), atol=1e-5)


@pytest.mark.parametrize('variant', VARIANTS)
def test_loss_is_the_mean_nll_of_the_counted_targets(variant):
    model, idx = make(variant), some_tokens(2, 30)
    targets = torch.roll(idx, -1, 1)
    targets[1, 3:9] = -1
    if VARIANTS[variant][0] == 'context_ready' and model.config.K > 1:
        model.config.K = model.n_unrolls = 31  # T + 1 unrolls are streaming, whose states `final_hidden` gives
    out = model(idx, targets)
    if model.config.eos_id is not None:
        targets = targets.masked_fill(idx == 59, -1)
    nll_of = lambda logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    if hasattr(model, 'final_hidden'):  # padding ids may take part in the training softmax, which costs a little
        assert torch.allclose(out['nll'], nll_of(model.head(model.final_hidden(idx))), atol=1e-5)
    assert -1e-5 < out['nll'] - nll_of(model.logits(idx)) < 1
    out['loss'].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert (model.logits(idx)[..., 60:] == float('-inf')).all()


ONE_OF_EACH = ['standard, documents', 'sps', 'sps, window 0', 'two_x_memory', 'delayed_state', 'reverse_sps',
               'nextlat, documents, tied', 'mtp, documents', 'jtp, documents', 'bst', 'gdn, documents']


@pytest.mark.parametrize('variant', [*ONE_OF_EACH, 'context_ready, documents, window', 'roformer',
                                     'gpn, one layer, documents'])
def test_bf16_weights_and_autocast_stay_close_to_fp32(variant, device):
    model, idx = make(variant, device), some_tokens(2, 30).to(device)
    want, loss = model.logits(idx)[..., :60], model(idx, idx)['loss']
    with torch.autocast(device, torch.bfloat16):
        half = model(idx, idx)['loss']
        half.backward()
    assert abs(half - loss) < 0.05 and all(p.grad.isfinite().all() for p in model.parameters())
    half = copy.deepcopy(model).to(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        cache = half.new_cache(2, 30, dtype=dtype)
        got = torch.cat([half.extend(idx[:, :20], cache, all_positions=True),
                         half.extend(idx[:, 20:], cache, all_positions=True)], 1)
        assert (got[..., :60].float() - want).abs().mean() < 0.05 * want.abs().mean()


def test_documents_do_not_see_each_other():
    model, idx = make('standard, documents'), some_tokens(1, 20)
    idx[0, 9] = 59
    other = idx.clone()
    other[0, :9] = 1
    assert torch.equal(model.logits(idx)[0, 10:], model.logits(other)[0, 10:])


def test_a_full_cache_is_a_sentence():
    model = make('standard')
    cache = model.new_cache(1, 3)
    with pytest.raises(ValueError, match='a row of 4 tokens does not fit a cache of max_tokens = 3'):
        model.extend(torch.zeros(1, 4, dtype=torch.int64), cache)


@pytest.mark.parametrize('variant', ONE_OF_EACH)
def test_checkpointed_blocks_run_twice_and_give_the_same_gradients(variant):
    model, (name, values) = make(variant).train(), VARIANTS[variant]
    again = small_model(name, {**values, 'checkpoint_blocks': True}).train()
    again.load_state_dict(model.state_dict())
    idx = some_tokens(2, 20)
    again(idx, idx)  # a scan is compared, once
    runs_of = {block: [] for block in again.modules() if type(block).__name__ == 'Block'}
    for block, calls in runs_of.items():
        block.gate_up.register_forward_hook(lambda *_, calls=calls: calls.append(1))
    for m in (model, again):
        m(idx, idx)['loss'].backward()
    assert [len(calls) for calls in runs_of.values()] == [2] * len(runs_of) and runs_of
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize('variant', VARIANTS)
def test_short_runs_never_wait_for_a_device(variant, monkeypatch):
    """Tensors of the meta device have no values: whatever would wait for one on a GPU fails here."""
    needs(variant, 'extend')
    monkeypatch.setattr(torch, 'autocast', lambda *_, **__: contextlib.nullcontext())  # not available on meta
    name, values = VARIANTS[variant]
    with torch.device('meta'):
        model = small_model(name, values).eval()
        cache = model.new_cache(2, 90, max_run=4)
        for n in (1, 4):
            for lengths in (None, torch.ones(2, dtype=torch.int64)):
                assert model.extend(torch.zeros(2, n, dtype=torch.int64), cache, lengths).shape == (2, 64)
        cache.rollback(1)


@pytest.mark.parametrize('variant', [
    'standard', 'standard, documents', 'standard, grouped queries', 'sps', 'reverse_sps, top layer',
    'context_ready, documents, window', 'context_ready, bptt', 'nextlat, documents, tied', 'mtp, documents',
    'jtp, documents', 'bst', 'gpn', 'gpn, one layer, documents', 'gdn, documents'])
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_compiled_cuda_training_equals_eager_and_is_compiled_once(variant):
    from torch._dynamo.utils import counters
    torch.compiler.reset()  # what another test has compiled
    counters.clear()
    model = make(variant, 'cuda').train()
    compiled, graphs = train.compile_model(model), []
    for seed in range(3):
        idx = some_tokens(2, 64, seed).cuda()
        model(idx, idx)['loss'].backward()
        want = [p.grad.clone() for p in model.parameters()]
        assert all(w.isfinite().all() for w in want) and any(w.any() for w in want)
        model.zero_grad()
        compiled(idx, idx)['loss'].backward()
        assert all((p.grad - w).abs().max() < 1e-4 * (1 + w.abs().max()) for p, w in zip(model.parameters(), want))
        model.zero_grad()
        graphs.append(counters['stats']['unique_graphs'])
    assert graphs[1] == graphs[2]


class InFp32(torch.nn.Linear):
    def forward(self, x):
        with torch.autocast('cpu', enabled=False):
            return super().forward(x)


def test_a_compiled_backward_has_the_dtypes_of_an_eager_one(monkeypatch):
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='aot_eager'))
    torch.manual_seed(0)
    layer, x = InFp32(32, 32), torch.randn(64, 32)
    gradients = []
    torch.compiler.reset()  # what another test has compiled
    for called in (layer, train.compile_model(layer)):
        layer.zero_grad()
        with torch.autocast('cpu', torch.bfloat16):
            y = called(x)
        y.backward(x)
        gradients.append(layer.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', ['standard', 'sps'])
def test_compiled_blocks_share_their_graphs_on_a_cpu(name, monkeypatch):
    graphs, counts = [], []
    backend = lambda graph, _: graphs.append(graph) or graph.forward
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend=backend))
    for n_layer in (4, 10):
        graphs.clear()
        model, idx = small_model(name, dict(n_layer=n_layer, eos_id=None)), some_tokens(2, 64)
        with torch.autocast('cpu', torch.bfloat16):  # in which attention is outside of the graphs
            torch.compiler.reset()
            loss = train.compile_model(model)(idx, idx)['loss']
            torch.compiler.reset()
            torch.testing.assert_close(loss, model(idx, idx)['loss'])
        counts.append(len(graphs))
    assert counts[0] == counts[1]


@pytest.mark.parametrize('window', [None, 0, 3, 100])
def test_flops_count_the_pairs_of_the_pattern(window):
    model = model_standard.Model(model_standard.Config(**SMALL, window=window, eos_id=None))
    T, C, L = 10, 32, 3
    pairs = sum(min(t, T if window is None else window) + 1 for t in range(T))
    weights = L * (4 * C * C + 3 * C * 3 * C) + 64 * C
    assert model.flops_per_token(T) == pytest.approx(6 * weights + 12 * L * C * pairs / T)


@pytest.mark.parametrize('variant', ['standard', 'standard, window 0, untied', 'sps', 'nextlat', 'bst'])
def test_flops_count_the_matrices_of_an_edit_and_no_tables(variant):
    model = make(variant)
    before = model.flops_per_token(12)
    model.gate, model.table = torch.nn.Linear(32, 8), torch.nn.Embedding(7, 32)
    model.mix = torch.nn.Parameter(torch.zeros(3, 5))
    assert model.flops_per_token(12) - before == 6 * (32 * 8 + 3 * 5)


@pytest.mark.parametrize('variant', ['gpn', 'gdn'])
def test_flops_count_the_linear_layers_of_an_edit(variant):
    model = make(variant)
    before = model.flops_per_token(12)
    model.gate = torch.nn.Linear(32, 8)
    assert model.flops_per_token(12) - before == 6 * 32 * 8


@pytest.mark.parametrize('scale, millions', [('xs', 53), ('s', 131), ('m', 379), ('l', 831), ('xl', 1678)])
def test_parameters_at_the_five_scales(scale, millions):
    values = settings.read_config_file(f'config/standard_{scale}.py')
    names = model_standard.Config.__dataclass_fields__
    with torch.device('meta'):
        model = model_standard.Model(model_standard.Config(**{k: v for k, v in values.items() if k in names}))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize('tied', [True, False])
def test_logits_equal_hugging_face_llama(tied):
    torch.manual_seed(0)
    model = model_standard.Model(model_standard.Config(**SMALL, eos_id=None, tied_head=tied)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    idx = torch.randint(0, 60, (2, 50))
    with torch.no_grad():
        assert (model.logits(idx)[..., :60] - to_llama(model)(input_ids=idx).logits).abs().max() < 1e-4
