"""The Triton kernels against float64 references: on a GPU, or in Triton's interpreter, which runs the same code on
CPU."""
import itertools
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, train_tiny
from test_attn_kernels import assert_close, documents, gradients
from test_models import decode_in_pieces, make, some_tokens

import attn_kernels as K
from bench import make_model
from bench.compiled import innermost_loops
from common import kernel_check
from common.runs import read_log

pytestmark = pytest.mark.skipif(K.triton is None, reason='needs Triton')
PATTERNS = {  # of two streams: (persistent stream, streams that ask); None: one stream
    'causal': None, 'sps': ('input', 'both'), 'sps last layer': ('input', 'predict'), 'two_x_memory': ('both', 'both'),
    'delayed_state': ('predict', 'both'), 'reverse_sps last layer': ('predict', 'input')}


def pairwise(*options):
    """Few cases in which every two options of different axes meet."""
    rng, cases = random.Random(0), []
    pairs = lambda case: set(itertools.combinations(enumerate(case), 2))
    missing = set().union(*map(pairs, itertools.product(*options)))
    while missing:
        cases.append(max(([rng.choice(axis) for axis in options] for _ in range(200)),
                         key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(cases[-1])
    return cases


def make_case(pattern, window, kind, T, D, dtype, device, group=1):
    """(fast, reference, [q, k, v]), strided as a projection leaves them; `group` query heads read each key head."""
    torch.manual_seed(0)
    streams, heads = 1 if PATTERNS[pattern] is None else 2, 1 if T > 100 else 2
    heads *= group
    q, k, v = torch.randn(2, streams, T, 3, heads, D, device=device).to(dtype).unbind(3)
    k, v = k[..., ::group, :], v[..., ::group, :]
    doc_start = None if kind is None else K.document_starts(documents(kind, 2, T), 9).to(device)
    if streams == 1:
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
        return (lambda q, k, v: K.attention(q, k, v, doc_start, window),
                lambda q, k, v: K.attention_reference(q, k, v, doc_start, window), [q, k, v])
    persistent, queries = PATTERNS[pattern]
    options = K.stream_windows(persistent, window), doc_start, queries
    return (lambda q, k, v: K.two_stream_attention(q, k, v, *options),
            lambda q, k, v: K.two_stream_attention_reference(q, k, v, *options),
            [q[:, K.STREAMS[queries]], k, v])


@pytest.mark.parametrize('pattern, window, kind, T, D, dtype, group', pairwise(
    list(PATTERNS), [0, 1, 3, 64, None], [None, 'many', 'edges'], [1, 17, 64, 129, 200], [16, 48, 64, 70, 128],
    [torch.float32, torch.float16], [1, 3]))
def test_kernels_equal_the_reference(pattern, window, kind, T, D, dtype, group, kernels_device):
    fast, reference, inputs = make_case(pattern, window, kind, T, D, dtype, kernels_device, group)
    want = gradients(reference, *(x.double() for x in inputs))
    assert_close(gradients(fast, *inputs), want, 1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU: the interpreter multiplies bf16 wrongly')
@pytest.mark.parametrize('pattern', PATTERNS)
@pytest.mark.parametrize('D', [64, 70, 128])
def test_kernels_in_bf16(pattern, D):
    fast, reference, inputs = make_case(pattern, 64, 'edges', 1100, D, torch.bfloat16, 'cuda')
    assert_close(gradients(fast, *inputs), gradients(reference, *(x.double() for x in inputs)), 2e-2)


def counting(function, calls):
    """The function, which notes in calls {its name: how often it is called}."""
    name = function.fn.__name__

    def counted(*args):
        calls[name] = calls.get(name, 0) + 1
        return function(*args)
    return counted


@pytest.mark.skipif(torch.cuda.is_available(), reason='counts calls, which only the interpreter makes one by one')
@pytest.mark.parametrize('pattern, window, kind', [
    ('causal', None, None), ('causal', 64, None), ('causal', 3, 'many'), ('sps', 64, None), ('sps', 0, 'edges'),
    ('sps', 64, 'many'),
    ('sps last layer', 64, 'edges'), ('two_x_memory', None, 'edges'), ('delayed_state', 1, 'many'),
    ('reverse_sps last layer', 64, None)])
def test_kernels_visit_no_tile_in_vain(pattern, window, kind, kernels_device, monkeypatch):
    T, visits = 200, {}
    for name in ('_forward_tile', '_query_gradient_tile', '_key_gradient_tile'):
        monkeypatch.setattr(K, name, counting(getattr(K, name), visits))
    fast, _, inputs = make_case(pattern, window, kind, T, 16, torch.float32, kernels_device)
    gradients(fast, *inputs)

    position = torch.arange(T).expand(2, T)
    doc_start = None if kind is None else K.document_starts(documents(kind, 2, T), 9)
    if PATTERNS[pattern] is None:
        mask = K.visible(position, position, doc_start, window)[:, None, :, None]
    else:
        persistent, queries = PATTERNS[pattern]
        mask = K.two_stream_visible(position, position, position, K.stream_windows(persistent, window), doc_start,
                                    queries)
        mask = mask.unflatten(-1, (2, T)).unflatten(1, (-1, T))  # (B, streams that ask, T, streams of keys, T)
    least = {}
    for kind_of_pass in ('forward', 'query_gradient', 'key_gradient'):
        tile, walked, *_ = K.tiles(torch.device('cpu'), 16, torch.float32, kind_of_pass, mask.shape[1])
        seen = mask.any(1).transpose(1, 2).flatten(0, 1)  # (B streams, T queries, T keys)
        if kind_of_pass == 'key_gradient':
            seen, tile, walked = seen.transpose(1, 2), walked, tile
        lengths = torch.stack([strip.any(1).sum(-1) for strip in seen.split(tile, 1)])
        least[f'_{kind_of_pass}_tile'] = int((lengths / walked).ceil().sum())
    assert visits == least


@pytest.mark.parametrize('variant, max_run, share', [
    ('standard', 4, 256), ('standard, window', 1, 8), ('sps', 1, 256), ('sps', 4, 8), ('sps, window 0', 4, 8),
    ('standard, grouped queries', 4, 8), ('sps, grouped queries', 2, 8), ('two_x_memory', 2, 8),
    ('delayed_state', 4, 8), *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ('standard, grouped queries', 16, 256), ('sps, beyond the paper', 2, 8), ('sps, fork', 2, 8),
        ('delayed_state, beyond the paper', 1, 8), ('reverse_sps', 1, 8)))])
def test_decoding_kernel_equals_full_forward(variant, max_run, share, kernels_device, monkeypatch):
    monkeypatch.setattr(K, 'DECODE_SHARE', share)
    monkeypatch.setattr(K, 'DECODE_KEYS', 16)
    decode_in_pieces(variant, 0, kernels_device, T=18, max_run=max_run)


@pytest.mark.parametrize('variant', ['standard', 'sps'])
def test_layers_without_rotation_decode_as_they_train(variant, kernels_device):
    model, idx = make(variant, kernels_device), some_tokens(1, 6).to(kernels_device)
    for block in model.blocks[::2]:
        block.forward = lambda h, rotate, *rest, forward=block.forward: forward(h, lambda qk: qk, *rest)
    want, cache = model.logits(idx), model.new_cache(1, 6, max_run=2)
    got = [model.extend(idx[:, a:b], cache, all_positions=True) for a, b in ((0, 3), (3, 5), (5, 6))]
    assert (torch.cat(got, 1)[..., :60] - want[..., :60]).abs().max() < 1e-4


def test_operators_keep_pytorchs_rules(kernels_device):
    fast, _, (q, k, v) = make_case('sps', 3, 'edges', 17, 16, torch.float32, kernels_device)
    doc_start = K.document_starts(documents('edges', 2, 17), 9).to(kernels_device)
    args = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(K._attention_op, (*args, doc_start, [17, 3], 0),
                          test_utils=('test_schema', 'test_faketensor', 'test_autograd_registration'))


@pytest.mark.parametrize('variant', ['standard', 'sps'])
def test_the_decoding_operator_keeps_pytorchs_rules(variant, kernels_device, monkeypatch):
    calls, decode_op = [], K._decode_op
    monkeypatch.setattr(K, '_decode_op', lambda *args: (calls.append(args), decode_op(*args))[1])
    model = make(variant, kernels_device)
    model.extend(some_tokens(2, 3).to(kernels_device), model.new_cache(2, 8, max_run=3))
    torch.library.opcheck(decode_op, calls[0], test_utils=('test_schema', 'test_faketensor'))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['standard', 'sps', pytest.param('reverse_sps', marks=pytest.mark.long)])
def test_models_compile_to_one_graph(name, kernels_device, loss_in_the_graph):
    model = make_model(name, n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_ids=60, eos_id=59).to(kernels_device)
    idx = torch.randint(0, 60, (2, 40), device=kernels_device)
    want = model(idx, idx)['loss']
    got = torch.compile(model, backend='aot_eager', fullgraph=True)(idx, idx)['loss']
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, list(model.parameters())),
                    torch.autograd.grad(want, list(model.parameters()))):
        torch.testing.assert_close(a, b)


@pytest.fixture
def small_check(kernels_device, monkeypatch):
    """`check_kernels` on few small tiles, and what it refuses, which is forgotten afterwards."""
    monkeypatch.setattr(K, 'refused', set())
    monkeypatch.setitem(K.TILES, ('cpu', 128, 32), dict.fromkeys(('forward', 'query_gradient', 'key_gradient'),
                                                                 (64, 64, 1, 1)))
    kernel_check.check_kernels.cache_clear()
    yield torch.device(kernels_device)
    kernel_check.check_kernels.cache_clear()


@pytest.mark.parametrize('D, group, persistent', [
    (16, 1, None), *(pytest.param(70, 2, stream, marks=pytest.mark.long) for stream in ('input', 'predict', 'both'))])
def test_right_kernels_are_used(D, group, persistent, small_check, capsys):
    case = small_check, torch.float32, D, group, persistent
    assert kernel_check.check_kernels(*case) == {} and K.refused == set()
    line, = capsys.readouterr().err.splitlines()
    assert 'loss, norm, attention, decoding equal their references' in line and f'heads of {D}' in line, line
    assert kernel_check.check_kernels(*case) == {}
    assert capsys.readouterr().err == ''  # once in a process


def off_by_one(window):
    return lambda q, k, v, doc_start, windows, first: window(q, k, v, doc_start, [w and w + 1 for w in windows], first)


@pytest.mark.parametrize('name, broken, refused', [
    ('_kernel_attention', off_by_one(K._kernel_attention), {'attention'}),
    ('decode_attention', lambda q, *args, **options: torch.zeros_like(q), {'decoding'}),
    ('_launch', lambda *args: 1 / 0, {'attention', 'decoding'})])
def test_wrong_kernels_are_refused(name, broken, refused, small_check, capsys, monkeypatch):
    monkeypatch.setattr(K, name, broken)
    for other in {'attention', 'decoding'} - refused:  # in the interpreter it takes seconds
        monkeypatch.setattr(kernel_check, f'_{other}_differences', lambda *case: {'nothing': 0.0})
    assert set(kernel_check.check_kernels(small_check, torch.float32, 16)) == refused == K.refused
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(refused)
    for line in lines:
        assert 'report this line' in line and torch.__version__ in line and 'KERNEL_CHECK=0' in line, line
        assert 'ZeroDivisionError' in line or 'differs from its reference by' in line, line


def test_a_wrong_loss_is_refused(small_check, monkeypatch):
    right = K._fused_losses
    monkeypatch.setattr(K, '_fused_losses', lambda *args: [1.001 * x for x in right(*args)])
    assert set(kernel_check.check_kernels(small_check, torch.float32)) == {'loss'}
    h, w, targets = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)
    torch.testing.assert_close(K.linear_cross_entropy(h, w, targets), K.linear_cross_entropy_reference(h, w, targets))


@pytest.mark.skipif(torch.cuda.is_available(), reason='the tiny run is on a CPU, whose kernels are interpreted')
def test_training_goes_on_without_a_broken_kernel(small_check, tiny_data, tmp_path, monkeypatch):
    def nll(name):
        result = train_tiny(tiny_data, tmp_path / name, steps=3)
        assert result.returncode == 0, result.stderr
        return result.stderr, [line['nll'] for line in read_log(tmp_path / name)]

    monkeypatch.setattr(K, '_launch', lambda *args: 1 / 0)
    said, got = nll('broken kernels')
    assert 'kernels: attention fails (ZeroDivisionError' in said, said
    monkeypatch.setattr(K, 'KERNELS_ON_CPU', False)
    said, want = nll('no kernels')
    assert 'kernels' not in said and got == pytest.approx(want, abs=1e-6)


def test_reference_can_be_forced(monkeypatch):
    monkeypatch.setattr(K, 'REFERENCE', True)
    monkeypatch.setattr(K, 'attention_reference', lambda *args: 'reference')
    monkeypatch.setattr(K, 'two_stream_attention_reference', lambda *args: 'reference')
    x = torch.zeros(1, 2, 4, 1, 16)
    assert K.attention(x[:, 0], x[:, 0], x[:, 0]) == K.two_stream_attention(x, x, x, [None, 1]) == 'reference'


def test_innermost_loops_are_found_in_machine_code():
    code = ['.L_x_0', 'MOV', '.L_x_1', 'HGMMA', '@P0 BRA `(.L_x_1)', '@P1 BRA `(.L_x_0)', 'BRA `(.L_x_2)', '.L_x_2']
    assert innermost_loops(code) == [['HGMMA', '@P0 BRA `(.L_x_1)']]


@pytest.mark.slow
@pytest.mark.parametrize('args', [['--short'], pytest.param([], marks=pytest.mark.long)], ids=['short', 'all'])
def test_every_variant_compiles_for_sm_90(args):
    """Each kernel at each head size, and with -m long every pattern and dtype: no spills, no more shared memory
    than there is, and attention in 16 bits by HGMMA."""
    command = [sys.executable, '-m', 'bench.compiled', *args]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
