"""Context-Ready against its paper: eq. 1 to 5, Lemma 1, BPTT, and conversion."""
import copy
import csv
import random
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_sentence, run, succeeded, train_tiny
from references import assert_near, decode, document_numbers, gelu, loss_and_gradients, rotary_attention
from test_models import paper_model, paper_settings
from torch.utils.flop_counter import FlopCounterMode

import model_context_ready
import model_standard
import papers.context_ready.unrolls
from lm_architectures.data import open_data
from lm_architectures.run import records
from papers.commands import expanded
from papers.context_ready.reproduce import ROWS, TABLES

EOS = 59
OWN = {*model_context_ready.Config.__dataclass_fields__}
SMALL = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_ids=60)
CORRECTIONS = ['add', 'concat', 'token_blind', 'tied', 'block_head']
LAYOUTS = [dict(), dict(eos_id=EOS), dict(window=3), dict(eos_id=EOS, window=0)]
CASES = [*(('add', layout) for layout in LAYOUTS),
         *((variant, layout) for variant in CORRECTIONS[1:] for layout in (LAYOUTS[1], LAYOUTS[3]))]
cases = pytest.mark.parametrize('variant, layout', CASES, ids=str)


def make(module=model_context_ready, **values):
    torch.manual_seed(0)
    model = module.Model(module.Config(**(SMALL | values))).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    return model


def tokens(B=3, T=12):
    idx = torch.randint(0, 59, (B, T), generator=torch.Generator().manual_seed(1))
    idx[1, [2, 6, 7]] = EOS
    idx[2, 0] = EOS
    return idx


# ---- the equations of the paper, in the dtype of the weights ----

def norm(x, layer):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def ffn(x, up, down):
    return gelu(x @ up.weight.T + up.bias) @ down.weight.T + down.bias


def blocks(model, x, documents, dropout):
    """Return z (eq. 3) from the block inputs x (B, T, C), without a cache.

    dropout: factors of the two branches of each block, (2 n_layer, B, T, C).
    """
    c, position, h = model.config, torch.arange(x.shape[1]), x
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance <= (len(position) if c.window is None else c.window))
    seen = seen & (documents[:, :, None] == documents[:, None])
    for block, (of_attention, of_ffn) in zip(model.blocks, dropout.unflatten(0, (-1, 2)), strict=True):
        qkv = (norm(h, block.attn_norm) @ block.qkv.weight.T + block.qkv.bias).unflatten(-1, (3, c.n_head, -1))
        mixed = rotary_attention(qkv, position, seen, c.rope_theta)
        h = h + of_attention * (mixed @ block.attn_out.weight.T + block.attn_out.bias)
        h = h + of_ffn * ffn(norm(h, block.ffn.norm), block.ffn.up, block.ffn.down)
    return h


def correction(model, z, e):
    net, variant = model.correction, model.config.variant
    if variant == 'block_head':
        return norm(z, net.norm)
    up, down = (net.up, net.down) if variant != 'tied' else (model.blocks[-1].ffn.up, model.blocks[-1].ffn.down)
    x = {'concat': torch.cat([z, e], -1), 'token_blind': z}.get(variant, z + e)
    return ffn(norm(x, net.norm), up, down)


def streamed(model, idx, dropout=None):
    """Algorithm 1: z (B, T, C). dropout: factors (1 + 2 n_layer, B, T, C)."""
    e, documents, entered, zs = model.embed.weight[idx], document_numbers(idx, model.config.eos_id), [], []
    dropout = torch.ones(1 + 2 * model.config.n_layer, *e.shape) if dropout is None else dropout
    z = torch.zeros_like(e[:, 0])
    for t in range(idx.shape[1]):
        z = z * (documents[:, t] == documents[:, t - 1])[:, None]
        entered.append(dropout[0, :, t] * (e[:, t] + correction(model, z, e[:, t])))
        z = blocks(model, torch.stack(entered, 1), documents[:, :t + 1], dropout[1:, :, :t + 1])[:, -1]
        zs.append(z)
    return torch.stack(zs, 1)


def unrolled(model, idx, K):
    """Eq. 5: z^(K) (B, T, C)."""
    e, documents = model.embed.weight[idx], document_numbers(idx, model.config.eos_id)
    no_dropout = torch.ones(2 * model.config.n_layer, *e.shape)
    z = blocks(model, e, documents, no_dropout)
    for _ in range(K - 1):
        before = F.pad(z, (0, 0, 1, 0))[:, :-1] * (documents == documents.roll(1, 1)).unsqueeze(-1)
        z = blocks(model, e + correction(model, before, e), documents, no_dropout)
    return z


def nll(model, z, targets):
    logits = norm(z, model.norm) @ model.head.weight.T
    if model.config.eos_id is not None:
        targets = targets.masked_fill(tokens()[:, :targets.shape[1]] == EOS, -1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


@cases
def test_unrolls_and_streaming_equal_the_papers_equations(variant, layout):
    model, idx = make(variant=variant, K=3, **layout).double(), tokens(T=8)
    z = model.all_unrolls(idx, 3)[-1]
    exact = unrolled(model, idx, 3)
    assert (z - exact).norm() < 1e-8 * exact.norm()
    want = loss_and_gradients(nll(model, exact, idx.roll(-1, 1)), model)
    assert_near(loss_and_gradients(model(idx, idx.roll(-1, 1))['loss'], model), want, 1e-8)
    want = norm(streamed(model, idx), model.norm) @ model.head.weight.T
    assert (model.logits(idx) - want)[..., :60].abs().max() < 1e-4  # the tolerance of prefill


@pytest.mark.parametrize('variant', ['add', 'extra_ffn'])
def test_a_roformer_is_one_unroll_without_a_correction(variant):
    model, idx = make(variant=variant, K=1, eos_id=EOS, window=3).double(), tokens(T=8)
    z = unrolled(model, idx, 1)
    if variant == 'extra_ffn':  # one more residual feed-forward layer before the final norm
        z = z + ffn(norm(z, model.extra.norm), model.extra.up, model.extra.down)
    want = norm(z, model.norm) @ model.head.weight.T
    assert (model.logits(idx) - want)[..., :60].abs().max() < 1e-8
    assert abs(model(idx, idx)['loss'] - nll(model, z, idx)) < 1e-8


@cases
def test_streaming_equals_T_plus_1_unrolls_and_k_unrolls_are_exact_before_position_k(variant, layout):
    model, idx = make(variant=variant, **layout), tokens(T=16)
    with torch.no_grad():
        want = decode(model, idx, [1] * 16, 1)
        e, _, starts, *_ = model.prepare(idx)
        zs = model.all_unrolls(idx, 17)
        logits = [model.head(model.head_input(z))[..., :60] for z in zs]
        corrections = [model.correction(z.roll(1, 1), e, starts) for z in zs]
    assert (logits[-1] - want).abs().max() < 1e-4
    for k in range(1, 9):
        assert (corrections[k - 1] - corrections[-1])[:, :k].abs().max() < 1e-5
        assert k == 1 or (logits[k - 1] - want)[:, :k - 1].abs().max() < 1e-5


# ---- backpropagation through time ----

@cases
def test_bptt_equals_autograd_through_the_plain_loop(variant, layout):
    model, idx = make(variant=variant, bptt=True, segment_len=3, **layout).double(), tokens(T=8)
    want = loss_and_gradients(nll(model, streamed(model, idx), idx.roll(-1, 1)), model)
    assert_near(loss_and_gradients(model(idx, idx.roll(-1, 1))['loss'], model), want, 1e-8)


@pytest.mark.parametrize('bptt', [False, True])
def test_dropout_masks_are_independent_and_bptt_is_exact_with_dropout(bptt, monkeypatch):
    """Dropout is on the block inputs and both residual branches: no two masks are equal."""
    model, idx = make(dropout=0.5, window=3, bptt=bptt, segment_len=3).double().train(), tokens(T=8)
    masks, dropout = [], F.dropout  # all masks in the order drawn

    def recorded(x, p, training=True):
        mask = dropout(torch.ones_like(x), p, training)
        masks.append(mask)
        return x * mask
    monkeypatch.setattr(F, 'dropout', recorded)
    loss = model(idx, idx)['loss']
    n = (8 if bptt else 5) * (1 + 2 * 2)
    assert len(masks) == n and all(set(mask.unique().tolist()) == {0.0, 2.0} for mask in masks)
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    if bptt:
        got = loss_and_gradients(loss, model)
        assert len(masks) == 2 * n  # the backward pass computes each position again
        drawn = torch.stack([mask.view(3, 16) for mask in masks[:n]]).unflatten(0, (8, 5)).permute(1, 2, 0, 3)
        assert_near(got, loss_and_gradients(nll(model, streamed(model, idx, drawn), idx), model), 1e-8)


def test_streaming_ignores_autocast():
    model, idx, found = make(bptt=True), tokens(), []
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            z = model.stream(idx)
        found.append((z, loss_and_gradients(model.nll(z, idx), model)))
    (want, want_gradients), (z, got) = found
    assert torch.equal(z, want)
    assert_near(got, want_gradients, 1e-6)


# ---- unrolls in training ----

def test_the_number_of_unrolls_is_uniform_from_k_min_to_K():
    model, fixed, drawn = make(K=5, k_min=2), make(K=5), []
    for step in range(400):
        model.begin_step(random.Random(f'1337 {step}'))
        drawn.append(model.drawn.n_unrolls)
    assert set(drawn) == {2, 3, 4, 5} and all(70 < drawn.count(k) < 130 for k in range(2, 6))
    fixed.begin_step(random.Random(0))
    assert fixed.drawn.n_unrolls == 5


def test_the_mask_is_kept_when_the_number_of_unrolls_changes():
    model, idx, masks = make(K=5, k_min=2).train(), tokens(), []
    for choice in (min, max):
        model.begin_step(mock.Mock(choice=choice))
        model(idx, idx)
        masks += [mask for _, mask in model.kept_masks.values()]
    assert len(masks) == 2 and masks[0] is masks[1]


def test_one_unroll_gives_the_correction_network_zero_gradients():
    """Without gradients, AdamW would skip the network, and DDP would fail."""
    model, idx = make(K=3, k_min=1).train(), tokens()
    model.drawn.n_unrolls = 1
    grads = loss_and_gradients(model(idx, idx)['loss'], model)
    found = [grads[name].abs().max() for name, _ in model.named_parameters() if name.startswith('correction.')]
    assert found and not any(found)


@pytest.mark.parametrize('values', [dict(), dict(bptt=True)], ids=str)
def test_evaluation_always_uses_K_unrolls_without_dropout(values):
    model, idx = make(K=5, dropout=0.5, **values), tokens()
    model.drawn.n_unrolls = 2
    exact = copy.deepcopy(model).double()
    want = nll(exact, streamed(exact, idx) if model.config.bptt else unrolled(exact, idx, 5), idx)
    assert torch.allclose(model(idx, idx)['nll'].double(), want, atol=1e-5)


# ---- prefill ----

def n_unrolls(model, idx, lengths=None):
    """Return the number of unrolls of a prompt, and the logits at all positions."""
    with mock.patch.object(model, 'unroll', wraps=model.unroll) as unroll:
        logits = model.extend(idx, model.new_cache(*idx.shape), lengths, all_positions=True)
    return unroll.call_count, logits[..., :60]


def test_prompts_are_unrolled_to_convergence_and_padding_is_ignored():
    model, idx = make(), tokens(T=60)
    all_tokens, first = n_unrolls(model, idx)[0], n_unrolls(model, idx[:, :30])[0]
    assert 3 < first < all_tokens <= 61
    assert n_unrolls(model, F.pad(idx[:, :30], (0, 27), value=7), torch.tensor([30, 30, 30]))[0] == first
    with torch.autocast('cpu', torch.bfloat16):  # stops at bf16 precision
        assert n_unrolls(model, idx)[0] < 40
    model.config.prefill_tol = 0.1
    assert n_unrolls(model, idx)[0] < all_tokens


def test_one_slow_unroll_does_not_end_the_unrolls():
    changes = torch.tensor([0.5 ** k * (1.9 if k == 12 else 1.0) for k in range(40)])
    with mock.patch.object(model := make(), 'unroll', side_effect=changes.cumsum(0).expand(1, 60, 40).split(1, 2)):
        assert model.fixed_point(torch.tensor([60]), limit=35)[1] == 20


@pytest.mark.parametrize('case, most', [('diverges', 4), ('many rows', 0), ('few tokens', 0)])
def test_prompts_are_streamed_if_unrolls_would_take_longer(case, most):
    model, idx = make(eos_id=EOS), tokens(T=60)
    if case == 'diverges':  # as many untrained models do
        torch.manual_seed(0)
        model = model_context_ready.Model(model_context_ready.Config(**SMALL | dict(n_embd=48))).eval()
    idx = {'many rows': idx.repeat(20, 1), 'few tokens': idx[:, :9]}.get(case, idx)
    with torch.no_grad():
        k, logits = n_unrolls(model, idx)
        streamed = model.extend(idx, model.new_cache(*idx.shape, max_call=60), all_positions=True)[..., :60]
    assert (k > 0) == (most > 0) and k <= most and torch.equal(logits, streamed)


# ---- conversion ----

@pytest.mark.parametrize('variant', ['add', 'concat', 'token_blind'])
@pytest.mark.parametrize('block', ['gpt', 'llama'])
def test_a_converted_model_has_the_logits_of_its_source(variant, block):
    values = dict(eos_id=EOS, window=5) | (dict(n_kv_head=1, qk_norm=True, tied_head=True) if block == 'llama' else {})
    source = make(model_standard, **values, norm_eps=1e-5) if block == 'llama' else make(K=1, **values)
    model, weights = make(variant=variant, block=block, **values), dict(source.named_parameters())
    converted = model.adopt(weights)
    assert set(converted) == set(dict(model.named_parameters()))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(converted[name])
    idx = tokens(T=30)
    assert (model.logits(idx) - source.logits(idx))[..., :60].abs().max() < 1e-5
    assert model.adopt(converted) is converted
    with pytest.raises(ValueError, match='cannot be converted'):
        make(variant='block_head').adopt(dict(make(K=1).named_parameters()))


# ---- sizes and costs ----

def test_six_blocks_of_446_take_the_15_9_million_multiply_adds_of_table_A12():
    model = paper_model('wiki_d6_c446')
    assert (model.config.n_layer, model.config.n_head, model.config.n_embd) == (6, 1, 446)
    matrices = [p for p in [*model.blocks.parameters(), *model.correction.parameters()] if p.dim() == 2]
    assert round(sum(p.numel() for p in matrices) / 1e6, 1) == 15.9


def test_flops_count_the_unrolls():
    flops = lambda **values: make(**values).flops_per_token(8)
    C, V, pairs = 16, 64, 4.5
    blocks, network, head = 2 * 12 * C * C + 2 * 2 * C * pairs, 8 * C * C, V * C
    assert flops(K=1) == 6 * (blocks + head)
    assert flops(K=4) == 6 * (4 * blocks + 3 * network + head)
    assert flops(K=4, k_min=2) == 6 * (3 * blocks + 2 * network + head)
    assert flops(bptt=True) == 6 * (blocks + network + head)
    assert flops(K=1, variant='extra_ffn') == 6 * (blocks + network + head)


def test_contraction_estimates_equal_the_formula():
    model, idx = make(K=4), tokens(5, 12)
    moves = [papers.context_ready.unrolls.unrolled(model, part, part)[1] for part in (idx[:2], idx[2:])]
    found = papers.context_ready.unrolls.contraction(torch.cat(moves, 1))
    with torch.no_grad():
        e, _, starts, *_ = model.prepare(idx)
        zs = model.all_unrolls(idx, 4)
        second, third, fourth = [model.correction(F.pad(z, (0, 0, 1, 0))[:, :-1], e, starts) for z in zs[1:]]
    # the first two positions are exact
    after, before = ((a - b)[:, 2:].norm(dim=-1) for a, b in ((fourth, third), (third, second)))
    pooled, single = (after.square().sum(0) / before.square().sum(0)).sqrt().max(), (after / before).flatten()
    want = [pooled, single.max(), *single.quantile(torch.tensor([0.5, 0.9, 0.99]))]
    assert [*found.values()] == pytest.approx([*map(float, want)], abs=6e-4) and len(set(found.values())) == 5
    one_small_token = torch.tensor([[[1e-3], [0]], [[1e-3], [0]], [[1e-3], [1e3]]])
    for none in torch.zeros(3, 2, 4), one_small_token:
        assert set(papers.context_ready.unrolls.contraction(none).values()) == {''}


@pytest.mark.parametrize('values', [
    dict(), dict(n_ffn=24), dict(K=1), dict(K=1, variant='extra_ffn'), dict(variant='concat'), dict(variant='tied'),
    dict(variant='block_head'), dict(block='llama', n_head=4, n_kv_head=2, head_size=6, n_ffn=24)])
def test_costs_equal_the_flops_and_the_cache_of_one_token(values, monkeypatch):
    model = make(**values)
    c, e = model.config, torch.zeros(1, 1, model.config.n_embd)
    monkeypatch.setattr(model_context_ready, 'rotate', lambda x, rope: x)
    monkeypatch.setattr(model_context_ready, 'attention', lambda q, k, v, mask: q)
    with FlopCounterMode(display=False) as counter:
        z = model.step(e, None if c.K == 1 else e, torch.zeros(1, 1, dtype=torch.bool), None, None)
        model.head_input(z) @ model.head.weight[:c.n_ids].T
    cache, found = model.new_cache(1, 8), papers.context_ready.unrolls.costs(model)
    assert found['multiply_adds_per_token'] == counter.get_total_flops() / 2
    assert found['cache_bytes_per_token'] == sum(x[:, :, 0].nbytes for x in (*cache.k, *cache.v))


# ---- through train.py ----

@pytest.mark.parametrize('name, steps, batch_size, T, warmup', [
    ('pointer_d1', 50_000, 64, 338, 100), ('pointer_wave', 23_000, 64, 338, 100),
    ('pointer_20_hops', 10_000, 64, 658, 100), ('owt_d1_c2048_t512', 200_000, 64, 512, 1000),
    ('owt_n6_c1088_t512', 200_000, 64, 512, 1000), ('owt_d1_c2048_t1024', 200_000, 32, 1024, 1000)])
def test_rows_have_the_papers_steps_and_batches(name, steps, batch_size, T, warmup):
    config = paper_settings(name)
    assert (config['batch_size'], config['block_size']) == (batch_size, T)
    assert (config['max_tokens'], config['warmup_tokens']) == (steps * batch_size * T, warmup * batch_size * T)
    if name.startswith('pointer'):
        assert open_data(config['data']).n_rows('val', T) == 256  # raises if rows have another length


def test_every_row_of_a_table_trains_after_the_run_it_continues():
    """All settings of a row exist. Commands after training name all runs of the table."""
    seen = set()
    for table in TABLES:
        trained, after = [], []
        for command in [one for line in TABLES[table] if line[0] != '#' for one in expanded(line, ROWS)]:
            if command.startswith('python train.py'):
                row = command.split('--out_dir=out/')[1].split()[0]
                values = paper_settings(row)
                model_context_ready.Config(**{name: values[name] for name in OWN & values.keys()})
                assert {*re.findall(r'--(?:init_from|extend)=(\S+)', command)} <= {*trained}, row
                trained.append(values['out_dir'])
            else:
                after.append(command)
        assert after and all(f'{run} ' in command for run in trained for command in after), table
        seen |= {*trained}
    assert seen == {f'out/{row}' for row in ROWS}


@pytest.mark.slow
def test_a_run_is_converted_and_analysed(tiny_data, tmp_path):
    found = [str(tmp_path / name) for name in ('roformer', 'converted')]
    finetune = ['--model=context_ready', '--K=4', '--k_min=2', '--dropout=0.1', f'--init_from={found[0]}']
    for out, args in zip(found, (['--model=context_ready', '--K=1'], finetune)):
        succeeded(train_tiny(tiny_data, out, *args, steps=6))
    before, after = map(records.read_log, found)
    assert after[0]['loss'] < before[0]['loss'] - 0.5
    by_itself = succeeded(run('train.py', 'config/context_ready/context_ready_finetune.py', finetune[-1],
                              f'--data={tiny_data}', '--block_size=32', '--device=cpu', '--dry_run'))
    assert '32 = ' in by_itself.stdout  # shape and documents come from the run
    assert_sentence(train_tiny(tiny_data, tmp_path / 'other', *finetune, '--window=3'), 'cannot be converted')
    papers.context_ready.unrolls.main([*found, f'--out={tmp_path / "depths"}', '--tokens=640'])
    assert (tmp_path / 'depths.png').exists()
    plain, ready = csv.DictReader(open(tmp_path / 'depths.csv'))
    assert plain['K=1'] == plain['sequential'] and plain['K=2'] == '' and plain['variant'] == 'roformer'
    assert abs(float(ready['K=10']) / float(ready['sequential']) - 1) < 0.01
    assert float(ready['K=1 - K=5']) == pytest.approx(float(ready['K=1']) - float(ready['K=5']))
    assert plain['K=1 - K=5'] == plain['L_pooled'] == '' and ready['C/N'] == '8' and 0 < float(ready['L_pooled']) < 10
    settings = [papers.context_ready.unrolls.Settings(tokens=640, batch_size=n) for n in (3, 20)]
    few, all_at_once = (papers.context_ready.unrolls.measure(found[0], s)[0]['K=1'] for s in settings)
    assert few == pytest.approx(all_at_once, abs=0.002)  # each token counts once
