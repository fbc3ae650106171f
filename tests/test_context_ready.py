"""Context-Ready against its paper: eq. 1 to 5 written out, Lemma 1, backpropagation through time, conversion."""
import copy
import csv
import importlib
import random
import statistics

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_sentence, run, train_tiny
from torch.utils.flop_counter import FlopCounterMode

import analysis.context_ready
import attn_kernels
import model_context_ready
from attn_kernels import visible
from common import checkpoint, files, runs
from config.context_ready import wiki_d6_c446
from data import open_data
from model_context_ready import FFN, Block, Config, Model, fast

needs_scan = pytest.mark.skipif(fast is None, reason='there is no folder scans/')
FORMS = ['loop', pytest.param('fast', marks=needs_scan)]

EOS = 59
SMALL = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_ids=60)
CORRECTIONS = ['add', 'concat', 'token_blind', 'tied', 'block_head']
LAYOUTS = [dict(), dict(eos_id=EOS), dict(window=3), dict(eos_id=EOS, window=0)]


def make(**values):
    torch.manual_seed(0)
    model = Model(Config(**(SMALL | values))).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    return model


def tokens(B=3, T=12):
    idx = torch.randint(0, 59, (B, T), generator=torch.Generator().manual_seed(1))
    idx[1, [2, 6, 7]] = EOS
    idx[2, 0] = EOS
    return idx


# ---- the paper, step by step, in the dtype of the weights ----

def norm(x, layer):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def ffn(x, up, down):
    y = x @ up.weight.T + up.bias
    y = y * 0.5 * (1 + torch.erf(y / 2 ** 0.5))  # GELU
    return y @ down.weight.T + down.bias


def turned(x, t, theta):
    """x (B, H, D) at position t, rotated: pairs (x_j, x_{j + D/2}) as complex numbers."""
    D = x.shape[-1]
    angle = t * theta ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    y = torch.complex(*x.chunk(2, -1)) * torch.complex(angle.cos(), angle.sin()).to(torch.complex128)
    return torch.cat([y.real, y.imag], -1)


def block_output(model, entered, t, row_start, masks):
    """Eq. 3 at position t, given what entered the blocks at positions 0 ... t, each (B, C); returns z_t.

    Everything below t is computed again, so nothing is cached that could be wrong.
    """
    c, B = model.config, len(entered[0])
    H, D = c.n_head, c.n_embd // c.n_head
    h = list(entered)
    for i, block in enumerate(model.blocks):
        qkv = [(norm(x, block.attn.norm) @ block.attn.qkv.weight.T + block.attn.qkv.bias).view(B, 3, H, D) for x in h]
        out = []
        for s in range(t + 1):
            rows = []
            for b in range(B):
                seen = [j for j in range(s + 1) if j >= row_start[b][s] and (c.window is None or j >= s - c.window)]
                q = turned(qkv[s][b:b + 1, 0], s, c.rope_theta)[0]
                k = torch.stack([turned(qkv[j][b:b + 1, 1], j, c.rope_theta)[0] for j in seen])
                p = ((q * k).sum(-1) / D ** 0.5).softmax(0)  # (keys, H)
                rows.append((p.unsqueeze(-1) * torch.stack([qkv[j][b, 2] for j in seen])).sum(0).flatten())
            a = h[s] + masks[1 + 2 * i, s] * (torch.stack(rows) @ block.attn.out.weight.T + block.attn.out.bias)
            out.append(a + masks[2 + 2 * i, s] * ffn(norm(a, block.ffn.norm), block.ffn.up, block.ffn.down))
        h = out
    return h[t]


def correction(model, z, e):
    net, variant = model.correction, model.config.variant
    if variant == 'block_head':
        return norm(z, net)
    up, down = (net.up, net.down) if variant != 'tied' else (model.blocks[-1].ffn.up, model.blocks[-1].ffn.down)
    x = {'concat': torch.cat([z, e], -1), 'token_blind': z}.get(variant, z + e)
    return ffn(norm(x, net.norm), up, down)


def starts(model, idx):
    """For each row and position the first position of its document."""
    documents = model.config.eos_id is not None

    def start(row, t):
        return max([0] + [s + 1 for s in range(t) if documents and row[s] == EOS])
    return [[start(row, t) for t in range(len(row))] for row in idx.tolist()]


def streamed(model, idx, masks=None):
    """Algorithm 1: z (B, T, C)."""
    B, T = idx.shape
    e, row_start, entered, zs = model.embed.weight[idx], starts(model, idx), [], []
    masks = torch.ones(1 + 2 * model.config.n_layer, T, B, model.config.n_embd).to(e) if masks is None else masks
    for t in range(T):
        continues = torch.tensor([[float(row_start[b][t] < t)] for b in range(B)], dtype=e.dtype)
        z = continues * zs[-1] if zs else torch.zeros_like(e[:, 0])
        entered.append(masks[0, t] * (e[:, t] + correction(model, z, e[:, t])))
        zs.append(block_output(model, entered, t, row_start, masks))
    return torch.stack(zs, 1)


def unrolled(model, idx, K, constant=0):
    """Eq. 5: z^(K) (B, T, C). The result of the first `constant` unrolls has no gradient."""
    B, T = idx.shape
    e, row_start = model.embed.weight[idx], starts(model, idx)
    masks = torch.ones(1 + 2 * model.config.n_layer, T, B, model.config.n_embd).to(e)
    corrections = [torch.zeros_like(e[:, 0])] * T
    for k in range(1, K + 1):
        entered = [e[:, t] + corrections[t] for t in range(T)]
        z = [block_output(model, entered, t, row_start, masks) for t in range(T)]
        none = torch.zeros_like(z[0][0])
        before = [torch.stack([z[t - 1][b] if row_start[b][t] < t else none for b in range(B)]) for t in range(T)]
        before = [x.detach() if k <= constant else x for x in before]
        corrections = [correction(model, before[t], e[:, t]) for t in range(T)]
    return torch.stack(z, 1)


def nll(model, z, targets):
    logits = norm(z, model.norm) @ model.head.weight.T
    if model.config.eos_id is not None:
        targets = targets.masked_fill(tokens()[:, :targets.shape[1]] == EOS, -1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(have, want, tolerance):
    for name in want:
        assert (have[name] - want[name]).norm() <= tolerance * want[name].norm(), name


@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
@pytest.mark.parametrize('variant', CORRECTIONS)
def test_unrolls_and_streaming_are_the_papers(variant, layout):
    model, idx = make(variant=variant, K=3, **layout).double(), tokens(T=8)
    targets = torch.roll(idx, -1, 1)
    want = gradients(model, nll(model, unrolled(model, idx, 3), targets))
    assert_same_gradients(gradients(model, model(idx, targets)['loss']), want, 1e-8)
    want = norm(streamed(model, idx), model.norm) @ model.head.weight.T
    assert (model.logits(idx) - want)[..., :60].abs().max() < 1e-4  # where prefill stops


@pytest.mark.parametrize('variant', ['add', 'extra_ffn'])
def test_a_roformer_is_one_unroll_without_a_correction(variant):
    model, idx = make(variant=variant, K=1, eos_id=EOS, window=3).double(), tokens(T=8)
    masks = torch.ones(5, 8, 3, 16).double()
    e, row_start = model.embed.weight[idx], starts(model, idx)
    z = torch.stack([block_output(model, list(e.unbind(1)), t, row_start, masks) for t in range(8)], 1)
    if variant == 'extra_ffn':  # one more residual feed-forward net before the final norm
        z = z + ffn(norm(z, model.extra.norm), model.extra.up, model.extra.down)
    want = norm(z, model.norm) @ model.head.weight.T
    assert (model.logits(idx) - want)[..., :60].abs().max() < 1e-8
    assert abs(model(idx, idx)['loss'] - nll(model, z, idx)) < 1e-8


@pytest.mark.parametrize('scan', FORMS)
@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
@pytest.mark.parametrize('variant', CORRECTIONS)
def test_bptt_is_autograd_through_the_plain_loop(variant, layout, scan):
    model, idx = make(variant=variant, bptt=True, scan=scan, segment_len=3, **layout).double(), tokens(T=8)
    targets = torch.roll(idx, -1, 1)
    want = nll(model, streamed(model, idx), targets)
    have = model(idx, targets)
    assert abs(have['loss'] - want) < 1e-8 * want
    assert_same_gradients(gradients(model, have['loss']), gradients(model, want), 1e-8)


@needs_scan
def test_bptt_with_dropout_is_exact_for_its_masks(monkeypatch):
    model, idx = make(bptt=True, scan='fast', dropout=0.4, window=3).double().train(), tokens(T=8)
    targets, masks, original = torch.roll(idx, -1, 1), [], fast.Scan.apply

    def apply(model, e, doc_start, dropout, *rest):
        masks.append(dropout)
        return original(model, e, doc_start, dropout, *rest)
    monkeypatch.setattr(fast.Scan, 'apply', apply)
    have = gradients(model, model(idx, targets)['loss'])
    assert 0.5 < (masks[0] == 0).double().mean() / 0.4 < 1.5
    assert_same_gradients(have, gradients(model, nll(model, streamed(model, idx, masks[0]), targets)), 1e-8)


def test_the_loops_backward_draws_the_same_dropout_again(monkeypatch):
    model, idx = make(bptt=True, scan='loop', dropout=0.4, window=3, segment_len=3).double().train(), tokens(T=8)
    targets, masks = torch.roll(idx, -1, 1), []

    def dropout(x, p, training):
        masks.append(torch.empty_like(x).bernoulli_(1 - p).div_(1 - p).detach())
        return x * masks[-1]
    monkeypatch.setattr(F, 'dropout', dropout)
    loss = model(idx, targets)['loss']
    drawn = torch.cat(masks, 1).view(3, 8, 5, 16).permute(2, 1, 0, 3)  # 5 at each of 8 positions
    have = gradients(model, loss)
    assert len(masks) > 8 * 5
    assert_same_gradients(have, gradients(model, nll(model, streamed(model, idx, drawn), targets)), 1e-8)


# ---- which form runs ----

def zeros_like_output(ffn, x):
    return torch.zeros(*x.shape[:-1], ffn.down.out_features, dtype=x.dtype)


def edit_class(cls, name, replacement):
    def edit(model, monkeypatch):
        monkeypatch.setattr(cls, name, replacement)
        return model
    return edit


def hook(model, monkeypatch):
    model.blocks[1].register_forward_hook(lambda module, inputs, output: output + inputs[0].roll(1, -1))
    return model


def swap_linear(model, monkeypatch):
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 1.1 * super().forward(x)
    old, model.blocks[0].ffn.up = model.blocks[0].ffn.up, Scaled(16, 64)
    model.blocks[0].ffn.up.load_state_dict(old.state_dict())
    return model


def subclass(model, monkeypatch):
    class Edited(Model):
        def step(self, e, z, is_doc_start, rotate, attend):
            return super().step(e, 0.9 * z, is_doc_start, rotate, attend)
    return with_weights(Edited(model.config), model)


def with_weights(model, source):
    model.load_state_dict(source.state_dict())
    return model


def edited_correction(self, z, e, is_doc_start):
    return self.correction(z - e)


def relu_ffn(self, x):
    return self.down(F.relu(self.up(self.norm(x))))


EDITS = {
    'blocks of zeros': edit_class(Block, 'forward', lambda self, h, rotate, attend: torch.zeros_like(h)),
    'feed-forward nets of zeros': edit_class(FFN, 'forward', zeros_like_output),
    'another activation': edit_class(FFN, 'forward', relu_ffn),
    'another correction': edit_class(Model, 'correct', edited_correction),
    'a hook': hook,
    'a swapped layer': swap_linear,
    'a subclass': subclass,
}


@needs_scan
@pytest.mark.parametrize('edit', EDITS)
def test_an_edit_of_the_equations_has_its_effect_and_says_so(edit, monkeypatch, capsys):
    plain, idx = make(bptt=True, window=6).train(), tokens()
    before = plain(idx, idx)['loss']
    assert plain.scan_report['scan'] == 'fast' and capsys.readouterr().err == ''
    edited = EDITS[edit](with_weights(Model(plain.config), plain), monkeypatch)
    loss = edited(idx, idx)['loss']
    says = capsys.readouterr().err
    assert edited.scan_report['scan'] == 'loop' and says.count('\n') == 1 and 'scan' in says
    assert abs(loss - before) > 1e-5 * before
    if 'zeros' in edit:
        assert any(name.startswith('blocks.0.ffn') for name in edited.scan_report['unused'])
    loss.backward()
    edited(idx, idx)
    assert capsys.readouterr().err == ''  # once


def test_an_edit_of_visible_is_one_of_streaming_too(monkeypatch):
    model, idx = make(bptt=True, eos_id=EOS, window=6).double(), tokens()
    before = model.logits(idx)

    def without_two_before(query_pos, key_pos, *args):
        return visible(query_pos, key_pos, *args) & (key_pos.unsqueeze(-2) != query_pos.unsqueeze(-1) - 2)
    for module in (attn_kernels, model_context_ready):
        monkeypatch.setattr(module, 'visible', without_two_before)
    monkeypatch.setattr(attn_kernels, 'REFERENCE', True)
    model.scan_report = None
    want = with_weights(Model(Config(**SMALL, K=13, eos_id=EOS, window=6)).double().eval(), model).states(idx)
    assert torch.equal(model.logits(idx), before) is False
    assert (model.states(idx) - want).abs().max() < 1e-10


@needs_scan
def test_an_edit_that_does_nothing_at_the_first_weights_is_seen(monkeypatch):
    """Biases start at 0, where their square has neither a value nor a gradient."""
    plain, idx = Model(Config(**SMALL, bptt=True)).train(), tokens()
    before = gradients(plain, plain(idx, idx)['loss'])
    correct = Model.correct
    monkeypatch.setattr(Model, 'correct', lambda self, *args: correct(self, *args) + self.correction.down.bias.square())
    model = with_weights(Model(plain.config).train(), plain)
    assert_same_gradients(gradients(model, model(idx, idx)['loss']), before, 1e-4)
    assert model.scan_report['scan'] == 'loop' and model.scan_report['difference'] > 1e-2


@needs_scan
def test_dropout_and_autocast_do_not_keep_the_fast_form_from_being_chosen(capsys):
    model = make(bptt=True, dropout=0.3, window=8, segment_len=7).train()
    with torch.autocast('cpu', torch.bfloat16):
        assert model(tokens(), tokens())['loss'].isfinite() and model.scan_report['scan'] == 'fast'
    c = model.config
    assert (c.dropout, c.window, c.segment_len) == (0.3, 8, 7) and capsys.readouterr().err == ''


def no_dropout_of_the_ffn(self, h, rotate, attend):
    h = h + F.dropout(self.attn(h, rotate, attend), self.config.dropout, self.training)
    return h + self.ffn(h)


def dropout_before_a_norm(self, h, rotate, attend):
    return block_forward(self, F.dropout(h, self.config.dropout, self.training), rotate, attend)


def less_dropout_of_the_ffn(self, h, rotate, attend):
    h = h + F.dropout(self.attn(h, rotate, attend), self.config.dropout, self.training)
    return h + F.dropout(self.ffn(h), 0.9 * self.config.dropout, self.training)


block_forward = Block.forward


@needs_scan
@pytest.mark.parametrize('edit', [no_dropout_of_the_ffn, dropout_before_a_norm, less_dropout_of_the_ffn])
def test_an_edit_of_dropout_is_seen(edit, monkeypatch, capsys):
    monkeypatch.setattr(Block, 'forward', edit)
    model, dropout = make(bptt=True, dropout=0.3).train(), F.dropout
    model(tokens(), tokens())
    assert model.scan_report['scan'] == 'loop' and 'differs from the equations' in capsys.readouterr().err
    assert F.dropout is dropout


@needs_scan
def test_a_swapped_layer_of_a_living_model_takes_effect_when_asked(monkeypatch):
    model, idx = make(bptt=True), tokens()
    before = model(idx, idx)['loss']
    swap_linear(model, monkeypatch)
    assert model.choose_scan() is model.scan_report and model.scan_report['scan'] == 'loop'
    assert abs(model(idx, idx)['loss'] - before) > 1e-4


@pytest.mark.parametrize('prefill', ['parallel', 'sequential'])
def test_an_edited_step_is_in_everything(prefill):
    """A correction that is halved reaches unrolls, prefill, logits and decoding alike."""
    class Halved(Model):
        def step(self, e, z, is_doc_start, rotate, attend):
            return self._run_blocks(e + 0.5 * self.correct(z, e, is_doc_start), rotate, attend)

    model, idx = make(prefill=prefill), tokens(T=16)
    edited = Halved(model.config).eval()
    edited.load_state_dict(model.state_dict())
    cache = edited.new_cache(3, 16)
    streamed = torch.stack([edited.extend(idx[:, t:t + 1], cache) for t in range(16)], 1)
    assert (edited.logits(idx) - streamed)[..., :60].abs().max() < 1e-4
    assert (edited.logits(idx) - model.logits(idx))[..., :60].abs().max() > 1e-2
    assert not torch.allclose(edited(idx, idx)['nll'], model(idx, idx)['nll'])


def test_an_edit_of_eq_2_is_in_the_first_unroll_too(monkeypatch):
    """With the correction alone, the first unroll and K = 1 know no token from another."""
    monkeypatch.setattr(Model, 'enter', lambda self, e, correction: 2 * correction)
    plain, model = make(K=1), make(K=3).train()
    model.n_unrolls = 1
    for first_unroll in (plain.states, plain.logits, model.states, lambda idx: next(model.iterates(idx))[0]):
        torch.testing.assert_close(first_unroll(tokens()), first_unroll((tokens() + 7) % 59))


def test_a_model_without_bptt_has_nothing_to_choose(monkeypatch, capsys):
    monkeypatch.setattr(model_context_ready.attn_kernels, 'choose_scan', None)
    model = make()
    assert model.choose_scan() is None and model.scan_report['scan'] == 'loop' and capsys.readouterr().err == ''


SHAPES = [dict(n_layer=1, n_head=4, n_embd=64, window=38), dict(variant='concat', eos_id=EOS)]


@pytest.mark.parametrize('values', SHAPES, ids=str)
def test_without_the_folder_of_scans_training_is_the_same(values, monkeypatch):
    """One step in fp32 to 1e-5, twenty in float64 to 1e-9: pointer chasing's shape, and a variant with documents."""
    def train(steps, dtype, **settings):
        model = make(bptt=True, **values, **settings).to(dtype).train()
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for step in range(steps):
            idx = torch.randint(0, 60, (2, 114 if steps == 1 else 45), generator=torch.Generator().manual_seed(step))
            loss = model(idx, idx.roll(-1, 1))['loss']
            losses.append(loss.item())
            grads = gradients(model, loss)
            optimizer.step()
        return losses, grads, model.scan_report['scan']
    if fast is None:
        pytest.skip('there is no folder scans/')
    with_scans = [train(1, torch.float32), train(20, torch.float64)]
    monkeypatch.setattr(model_context_ready, 'fast', None)
    without = [train(1, torch.float32), train(20, torch.float64)]
    assert [form for _, _, form in with_scans + without] == ['fast', 'fast', 'loop', 'loop']
    for have, want, tolerance in zip(without, with_scans, (1e-5, 1e-9)):
        assert max(abs(a - b) / b for a, b in zip(have[0], want[0])) < tolerance
        assert_same_gradients(have[1], want[1], tolerance)


def test_the_fast_form_without_the_folder_of_scans_is_a_sentence(monkeypatch):
    monkeypatch.setattr(model_context_ready, 'fast', None)
    with pytest.raises(ValueError, match='scans/'):
        make(bptt=True, scan='fast')(tokens(), tokens())


def test_the_loops_backward_computes_each_position_again_instead_of_keeping_it():
    model, positions = make(bptt=True, scan='loop', window=3, segment_len=4), []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: positions.append(inputs[0].shape[1]))
    z = model.stream(tokens(T=10))
    assert positions == [1] * 10
    z.sum().backward()
    assert positions == [1] * 20
    with torch.no_grad():
        model.stream(tokens(T=10))
    assert positions == [1] * 30


@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
@pytest.mark.parametrize('variant', CORRECTIONS)
def test_streaming_is_T_plus_1_unrolls_and_k_of_them_are_exact_below_k(variant, layout):
    model, idx = make(variant=variant, **layout), tokens(T=16)
    with torch.no_grad():
        cache, streamed_logits = model.new_cache(3, 16), []
        for t in range(16):
            streamed_logits.append(model.extend(idx[:, t:t + 1], cache))
        want = torch.stack(streamed_logits, 1)[..., :60]
        unrolls = [unroll for _, unroll in zip(range(17), model.iterates(idx))]
        steps = [(model.head(model.head_input(z))[..., :60], correction) for z, correction in unrolls]
    exact = steps[-1][1]
    assert (steps[-1][0] - want).abs().max() < 1e-4
    for k in range(1, 9):
        logits, corrections = steps[k - 1]
        assert (corrections - exact)[:, :k].abs().max() < 1e-5
        assert k == 1 or (logits - want)[:, :k - 1].abs().max() < 1e-5


@pytest.mark.parametrize('prefill', ['parallel', 'sequential'])
def test_prefill_reports_its_unrolls_and_equals_streaming(prefill):
    model, idx = make(prefill=prefill), tokens(T=40)
    cache = model.new_cache(3, 40)
    logits = model.extend(idx, cache, all_positions=True)
    again = model.new_cache(3, 40)
    want = torch.stack([model.extend(idx[:, t:t + 1], again) for t in range(40)], 1)
    assert (logits - want)[..., :60].abs().max() < 1e-4
    assert cache.n_unrolls is None if prefill == 'sequential' else 3 < cache.n_unrolls <= 41
    model.config.prefill_tol = 0.1
    cheap = model.new_cache(3, 40)
    model.extend(idx, cheap)
    assert prefill == 'sequential' or cheap.n_unrolls < cache.n_unrolls


@pytest.mark.parametrize('values, millions', [
    (dict(n_layer=1, n_embd=2048), 215), (dict(n_layer=5, n_embd=1120), 157),
    (dict(n_layer=6, n_embd=1088, K=1), 155), (dict(n_layer=12, n_embd=768, K=1), 134)])
def test_parameters_at_the_papers_shapes(values, millions):
    with torch.device('meta'):
        model = Model(Config(vocab_size=32000, **values))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_checkpointed_unrolls_give_the_same_gradients_with_dropout():
    model, idx = make(dropout=0.3).train(), tokens()
    again = copy.deepcopy(model)
    again.config.checkpoint_unrolls = True
    both = []
    for m in (model, again):
        torch.manual_seed(5)
        both.append(gradients(m, m(idx, idx)['loss']))
    assert_same_gradients(both[1], both[0], 1e-6)


@pytest.mark.parametrize('scan', [None, *FORMS])
def test_dropout_is_fresh_in_every_unroll_and_at_every_position(scan, monkeypatch):
    """On what enters the blocks and on both branches of each: masks of 0 and 1 / (1 - p), no two alike."""
    model, masks, dropout = make(dropout=0.5, bptt=scan is not None, scan=scan or 'auto').train(), [], F.dropout
    if scan == 'fast':
        original = fast.Scan.apply
        monkeypatch.setattr(fast.Scan, 'apply', lambda *args: masks.extend(args[3].flatten(0, 1)) or original(*args))
    else:
        def recorded(x, p, training):
            masks.append(dropout(torch.ones_like(x), p, training))
            return x * masks[-1]
        monkeypatch.setattr(F, 'dropout', recorded)
    with torch.no_grad():
        model(tokens(), tokens())
    assert len(masks) == (5 if scan is None else 12) * (1 + 2 * 2)
    assert all(set(mask.unique().tolist()) == {0.0, 2.0} for mask in masks)
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_last_unrolls_cuts_the_gradient_where_it_says():
    model, idx = make(K=4).double(), tokens(T=8)
    whole = gradients(model, model(idx, idx)['loss'])
    model.config.last_unrolls = 4
    assert_same_gradients(gradients(model, model(idx, idx)['loss']), whole, 1e-12)
    model.config.last_unrolls = 2
    have = gradients(model, model(idx, idx)['loss'])
    assert_same_gradients(have, gradients(model, nll(model, unrolled(model, idx, 4, constant=2), idx)), 1e-8)


def test_a_step_draws_its_unrolls_uniformly_from_k_min_to_K():
    model, drawn = make(K=5, k_min=2), []
    for step in range(400):
        model.begin_step(random.Random(f'1337 {step}'))
        drawn.append(model.n_unrolls)
    assert set(drawn) == {2, 3, 4, 5} and all(70 < drawn.count(k) < 130 for k in range(2, 6))
    model = make(K=5)
    model.begin_step(random.Random(0))
    assert model.n_unrolls == 5


def test_evaluation_unrolls_to_K_whatever_was_drawn_and_without_dropout():
    model, idx = make(K=5, k_min=2, dropout=0.5), tokens()
    model.n_unrolls = 2
    z = [z for _, (z, _) in zip(range(5), model.iterates(idx))][-1]
    assert torch.allclose(model(idx, idx)['nll'], model.nll(z, idx), atol=1e-6)
    dropped = make(bptt=True, dropout=0.5)
    for dropped.config.scan in ('loop', 'auto'):
        dropped.scan_report = None
        assert torch.allclose(dropped.stream(idx), streamed(model.double(), idx).float(), atol=1e-5)


@pytest.mark.parametrize('scan', FORMS)
def test_autocast_does_not_reach_streaming(scan):
    model, idx = make(bptt=True, scan=scan), tokens()
    with torch.autocast('cpu', torch.bfloat16):
        z = model.stream(idx)
        model.stream(idx).sum().backward()
        model.zero_grad()
    want = model.stream(idx)
    assert torch.equal(z, want)
    z.square().sum().backward()
    have = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    want.square().sum().backward()
    assert_same_gradients({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, have, 1e-6)


@needs_scan
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('dropout', [0.0, 0.3])
def test_cuda_graphs_of_the_scan_accumulate_gradients(dropout):
    model, idx = make(bptt=True, dropout=dropout, window=3).cuda().train(), tokens().cuda()

    def accumulated(graphs):
        model.zero_grad()
        for x in (idx, idx.flip(0)):
            torch.manual_seed(3)
            model.nll(fast.stream(model, x, graphs), x).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}
    want = accumulated(graphs=False)
    for _ in range(2):  # the second time by replay alone
        assert_same_gradients(accumulated(graphs=True), want, 1e-4)


@needs_scan
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_cuda_graphs_are_not_recorded_of_weights_that_are_lent():
    model, idx = make(bptt=True, window=3).cuda().train(), tokens().cuda()
    assert model.choose_scan()['scan'] == 'fast'
    before = model(idx, idx)['loss']
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)  # in place: the graph reads the new values
    assert abs(model(idx, idx)['loss'] - before) > 1e-4
    again = with_weights(Model(model.config).cuda().train(), model)
    assert torch.allclose(model(idx, idx)['loss'], again(idx, idx)['loss'])


@pytest.mark.parametrize('prefill', ['parallel', 'sequential'])
def test_what_comes_before_a_forgotten_run_is_still_there(prefill):
    model, idx = make(prefill=prefill), tokens(T=20)
    cache = model.new_cache(3, 20, max_run=4, dtype=torch.bfloat16)
    assert cache.z.dtype == torch.float32  # whatever keys and values are kept in
    cache = model.new_cache(3, 20, max_run=4)
    model.extend(idx[:, :10], cache)
    model.extend(idx[:, 10:19], cache, torch.tensor([2, 9, 4]))
    cache.rollback(torch.tensor([2, 0, 4]))
    got, want = model.extend(idx[:, 10:11], cache)[[0, 2], :60], model.logits(idx)[[0, 2], 10, :60]
    assert (got - want).abs().max() < 1e-4


def test_final_hidden_is_what_the_head_multiplies_and_what_a_cache_keeps():
    model, idx = make(variant='concat', eos_id=EOS), tokens(T=20)
    h = model.final_hidden(idx)
    assert torch.allclose(model.head(h)[..., :60], model.logits(idx)[..., :60], atol=1e-5)
    cache = model.new_cache(3, 20, max_run=4)
    for t in range(0, 20, 4):
        model.extend(idx[:, t:t + 4], cache)
        assert torch.allclose(cache.hidden, h[:, t:t + 4], atol=1e-4)


def test_padding_costs_no_unrolls():
    model, idx = make(), tokens(T=40)
    both = [model.new_cache(3, 40) for _ in range(2)]
    model.extend(idx[:, :3], both[0])
    padded = idx.clone()
    padded[:, 3:] = 7
    model.extend(padded, both[1], torch.tensor([3, 3, 3]))
    assert both[1].n_unrolls == both[0].n_unrolls


def test_prefill_under_autocast_stops_at_its_rounding():
    model, idx = make(), tokens(T=60)
    cache = model.new_cache(3, 60)
    with torch.autocast('cpu', torch.bfloat16):
        model.extend(idx, cache)
    assert cache.n_unrolls < 40


def test_a_step_of_one_unroll_still_has_gradients_of_the_network():
    model, idx = make(K=3, k_min=1).train(), tokens()
    model.n_unrolls = 1
    grads = gradients(model, model(idx, idx)['loss'])
    assert all(grads[name].abs().max() == 0 for name in grads if name.startswith('correction.'))


@pytest.mark.parametrize('variant', ['add', 'concat', 'token_blind'])
def test_a_converted_model_is_its_source(variant):
    source = make(K=1, eos_id=EOS, window=5)
    model = make(variant=variant, eos_id=EOS, window=5)
    weights = dict(source.named_parameters())
    converted = model.adopt(weights)
    assert set(converted) == set(dict(model.named_parameters()))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(converted[name])
    idx = tokens(T=30)
    assert (model.logits(idx) - source.logits(idx))[..., :60].abs().max() < 1e-5
    assert model.adopt(converted) is converted and source.adopt(weights) is weights


def test_a_model_without_a_zero_layer_cannot_be_converted_to():
    with pytest.raises(ValueError, match='cannot be converted'):
        make(variant='block_head').adopt(dict(make(K=1).named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize('checkpointed', [False, True])
def test_one_compiled_unroll_serves_every_depth(checkpointed):
    model, idx = make(K=6, checkpoint_unrolls=checkpointed).train(), tokens()
    want, graphs = {}, []
    for model.n_unrolls in range(2, 7):
        want[model.n_unrolls] = gradients(model, model(idx, idx)['loss'])

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for model.n_unrolls in range(2, 7):
        assert_same_gradients(gradients(model, compiled(idx, idx)['loss']), want[model.n_unrolls], 1e-5)
        if model.n_unrolls == 2:
            first = len(graphs)
    nodes = []
    for graph in graphs:
        nodes.append(sum(len(m.graph.nodes) for m in graph.modules() if isinstance(m, torch.fx.GraphModule)))
    assert len(graphs) == first and sum(n > 150 for n in nodes) == 2  # an unroll with a correction and one without


@pytest.mark.slow
@needs_scan
def test_a_compiler_leaves_the_scan_alone():
    model, idx, graphs = make(bptt=True).train(), tokens(), []
    torch._dynamo.reset()
    torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(idx, idx)
    assert model.scan_report['scan'] == 'fast'
    assert sum(len(graph.graph.nodes) for graph in graphs) < 60


@pytest.mark.slow
def test_a_compiler_compiles_one_step_of_the_loop(monkeypatch):
    """However many positions there are; the loss around it is compiled as ever."""
    model = make(bptt=True, scan='loop', window=3, segment_len=4, eos_id=EOS).train()
    compile_, graphs = torch.compile, []
    want = gradients(model, model(tokens(), tokens())['loss'])

    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    monkeypatch.setattr(torch, 'compile', lambda function: compile_(function, backend=backend))
    for _ in range(2):
        assert_same_gradients(gradients(model, compiled(tokens(), tokens())['loss']), want, 1e-5)
    assert 1 <= sum(n > 100 for n in graphs) <= 2  # without a gradient of what came before, and with it


@pytest.mark.parametrize('values, sentence', [
    (dict(K=0), 'K = 0'), (dict(K=3, k_min=4), 'k_min = 4'), (dict(K=3, last_unrolls=0), 'last_unrolls = 0'),
    (dict(K=3, last_unrolls=4), 'last_unrolls = 4'), (dict(K=1, bptt=True), 'without a correction'),
    (dict(variant='extra_ffn'), 'nothing to unroll'), (dict(variant='sum'), "variant = 'sum'"),
    (dict(prefill='both'), "prefill = 'both'"),
    (dict(scan='quick'), "scan = 'quick': expected one of loop, fast, auto"),
    (dict(bptt=True, last_unrolls=1), 'no unrolls to cut'), (dict(bptt=True, checkpoint_unrolls=True), 'no unrolls'),
    (dict(scan='fast', bptt=False), 'one form only'),
    (dict(segment_len=0), 'segment_len = 0'), (dict(n_embd=18), 'even whole number'), (dict(n_ffn=-4), 'n_ffn = -4'),
    (dict(dropout=1.0), 'dropout = 1.0')])
def test_bad_settings_are_sentences(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config(**(SMALL | values))


@pytest.mark.parametrize('values', [dict(), dict(eos_id=EOS, window=3)])
def test_a_head_wider_than_the_kernels_takes_pytorchs_attention_in_training_and_decoding(values, monkeypatch):
    monkeypatch.setattr(attn_kernels, 'triton', True)  # as on a GPU
    monkeypatch.setattr(attn_kernels, 'KERNELS_ON_CPU', True)
    torch.manual_seed(0)
    c = Config(n_layer=1, n_head=1, n_embd=446, vocab_size=64, n_ids=60, prefill='sequential', **values)
    model, idx = Model(c).eval(), tokens()
    with torch.no_grad():
        found = model.extend(idx, model.new_cache(*idx.shape), all_positions=True)
        want = model.double().logits(idx)
    assert torch.allclose(found.double(), want, atol=1e-4)
    assert model.train().float()(idx, idx)['loss'].isfinite()


def test_K_1_is_the_roformer_whatever_k_min_says():
    model, roformer, idx = make(K=1, k_min=2, last_unrolls=3).train(), make(K=1).train(), tokens()
    for m in (model, roformer):
        m.begin_step(random.Random(0))
    assert torch.equal(model(idx, idx)['loss'], roformer(idx, idx)['loss'])
    assert model.flops_per_token(8) == roformer.flops_per_token(8)
    found = [run('train.py', *args, '--dry_run', '--device=cpu').stdout for args in (
        ['config/context_ready_small.py', '--K=1'], ['config/roformer_small.py'])]
    parameters = [[line for line in text.splitlines() if 'parameters' in line] for text in found]
    assert parameters[0] and parameters[0] == parameters[1]


def test_flops_count_the_unrolls():
    flops = lambda **values: make(**values).flops_per_token(8)
    C, V, pairs = 16, 64, 4.5
    blocks, network, head = 2 * 12 * C * C + 2 * 2 * C * pairs, 8 * C * C, V * C
    assert flops(K=1) == 6 * (blocks + head)
    assert flops(K=4) == 6 * (4 * blocks + 3 * network + head)
    assert flops(K=4, k_min=2) == 6 * (3 * blocks + 2 * network + head)
    # three passes of the blocks forward and one with its backward; of the network two and one
    assert flops(K=4, last_unrolls=1) == 12 * blocks + 10 * network + 6 * head
    want = 6 * head + (12 + 18 + 24 + 26) / 4 * blocks + (6 + 12 + 18 + 24) / 4 * network
    assert flops(K=5, k_min=2, last_unrolls=4) == pytest.approx(want)
    assert flops(bptt=True) == 6 * (blocks + network + head)


def test_the_contraction_estimates_are_those_of_the_formula():
    model, idx = make(K=4), tokens(5, 12)
    moves = [analysis.context_ready.measure(model, part, part)[1] for part in (idx[:2], idx[2:])]
    found = analysis.context_ready.contraction(torch.cat(moves, 1))
    with torch.no_grad():
        second, third, fourth = [c for _, (_, c) in zip(range(4), model.iterates(idx))][1:]
    pooled, single = [], []
    for t in range(2, 12):  # the second unroll's corrections are exact up to position 1
        after = [float((fourth[b, t] - third[b, t]).norm()) for b in range(5)]
        before = [float((third[b, t] - second[b, t]).norm()) for b in range(5)]
        single += [a / b for a, b in zip(after, before)]
        pooled.append(sum(a * a for a in after) ** 0.5 / sum(b * b for b in before) ** 0.5)
    percentiles = statistics.quantiles(single, n=100, method='inclusive')
    want = [max(pooled), max(single), statistics.median(single), percentiles[89], percentiles[98]]
    assert [*found.values()] == pytest.approx(want, abs=6e-4) and len(set(found.values())) == 5
    one_small_token = torch.tensor([[[1e-3], [0]], [[1e-3], [0]], [[1e-3], [1e3]]])  # among all, none moves
    for none in torch.zeros(3, 2, 4), one_small_token:
        assert set(analysis.context_ready.contraction(none).values()) == {''}


@pytest.mark.parametrize('values', [
    dict(), dict(n_ffn=24), dict(K=1), dict(K=1, variant='extra_ffn'), dict(variant='concat'), dict(variant='tied'),
    dict(variant='block_head'), dict(block='llama', n_head=4, n_kv_head=2, head_size=6, n_ffn=24)])
def test_costs_are_the_products_and_the_cache_of_one_token(values):
    model = make(**values)
    c, e = model.config, torch.zeros(1, 1, model.config.n_embd)
    with FlopCounterMode(display=False) as counter:
        z = model.first_unroll(e, lambda qk: qk, lambda layer, q, k, v: q) if c.K == 1 else model.step(
            e, e, torch.zeros(1, 1, dtype=torch.bool), lambda qk: qk, lambda layer, q, k, v: q)
        model.head_input(z) @ model.head.weight[:c.n_ids].T
    cache, found = model.new_cache(1, 8), analysis.context_ready.costs(model)
    assert found['multiply_adds_per_token'] == counter.get_total_flops() / 2
    assert found['cache_bytes_per_token'] == cache.k[:, :, :, 0].nbytes + cache.v[:, :, :, 0].nbytes


# ---- through train.py ----

@pytest.mark.parametrize('name, steps, batch_size, T, warmup', [
    ('pointer_d1', 50_000, 64, 338, 100), ('pointer_wave', 23_000, 64, 338, 100),
    ('pointer_20_hops', 10_000, 64, 658, 100), ('owt_d1_c2048_t512', 200_000, 64, 512, 1000),
    ('owt_n6_c1088_t512', 200_000, 64, 512, 1000), ('owt_d1_c2048_t1024', 200_000, 16, 1024, 1000)])
def test_a_config_has_the_papers_steps(name, steps, batch_size, T, warmup):
    config = importlib.import_module(f'config.context_ready.{name}')
    assert (config.batch_size, config.block_size) == (batch_size, T)
    assert (config.max_tokens, config.warmup_tokens) == (steps * batch_size * T, warmup * batch_size * T)
    if name.startswith('pointer'):
        assert open_data(config.data).n_windows('val', T) == 256  # raises where a row is longer or shorter


def test_six_blocks_of_446_take_the_15_9_million_multiply_adds_of_table_A12():
    assert (wiki_d6_c446.n_embd, wiki_d6_c446.n_head, wiki_d6_c446.n_layer) == (446, 1, 6)
    c = Config(n_layer=6, n_head=1, n_embd=446, vocab_size=64, n_ids=64)
    with torch.device('meta'):
        model = Model(c)
    assert round(sum(p.numel() for p in [*model.blocks.parameters(), *model.correction.parameters()]
                     if p.dim() == 2) / 1e6, 1) == 15.9


CONTEXT_READY = ['--model=context_ready', '--K=4', '--k_min=2', '--dropout=0.1']


@pytest.mark.slow
@pytest.mark.parametrize('more', [[], ['--bptt=True', '--scan=loop', '--segment_len=8']], ids=['unrolls', 'loop'])
def test_losses_do_not_depend_on_micro_batches_and_processes(more, tiny_data, tmp_path):
    losses = []
    args = [a for a in CONTEXT_READY if 'dropout' not in a] + more
    for name, micro, processes in (('one', [], 1), ('two', ['--micro_batch_size=1'], 2)):
        result = train_tiny(tiny_data, tmp_path / name, *args, *micro, steps=6, processes=processes)
        assert result.returncode == 0, result.stderr
        losses.append([r['loss'] for r in runs.read_log(tmp_path / name)])
    assert max(abs(a - b) for other in losses[1:] for a, b in zip(losses[0], other)) < 1e-4


@pytest.mark.slow
def test_a_run_is_converted_resumes_and_generates(tiny_data, tmp_path):
    for resume in ([], ['--resume']):
        result = train_tiny(tiny_data, tmp_path / 'roformer', '--model=context_ready', '--K=1', '--k_min=2', *resume,
                            steps=6)
        assert result.returncode == 0, result.stderr
    finetune = [*CONTEXT_READY, f'--init_from={tmp_path / "roformer"}']
    result = train_tiny(tiny_data, tmp_path / 'converted', *finetune, steps=6)
    assert result.returncode == 0 and 'at step 0' in result.stdout, result.stderr

    before, after = (runs.read_log(tmp_path / name) for name in ('roformer', 'converted'))
    assert after[0]['loss'] < before[0]['loss'] - 0.5
    result = train_tiny(tiny_data, tmp_path / 'converted', '--resume', *finetune, steps=6)
    assert result.returncode == 0, result.stderr
    by_itself = run('train.py', 'config/context_ready_finetune.py', f'--init_from={tmp_path / "roformer"}',
                    f'--data={tiny_data}', '--block_size=32', '--device=cpu', '--dry_run')
    assert by_itself.returncode == 0 and '32 = ' in by_itself.stdout, by_itself.stderr  # shape and documents: the run's
    found = [str(tmp_path / name) for name in ('roformer', 'converted')]
    analysis.context_ready.main([*found, f'--out={tmp_path / "depths"}', '--tokens=640'])
    assert (tmp_path / 'depths.png').exists()
    plain, ready = csv.DictReader(open(tmp_path / 'depths.csv'))
    assert plain['K=1'] == plain['sequential'] and plain['K=2'] == '' and plain['variant'] == 'roformer'
    assert abs(float(ready['K=10']) / float(ready['sequential']) - 1) < 0.01
    assert float(ready['K=1 - K=5']) == pytest.approx(float(ready['K=1']) - float(ready['K=5']))
    assert plain['K=1 - K=5'] == '' and ready['C/N'] == '8'
    assert 0 < float(ready['L_pooled']) < 10 and plain['L_pooled'] == ''
    assert int(ready['multiply_adds_per_token']) - int(plain['multiply_adds_per_token']) == 8 * 16 ** 2  # section 5.1
    result = train_tiny(tiny_data, tmp_path / 'other', *finetune, '--window=3')
    assert_sentence(result, 'cannot become this model', 'window')
    assert not (tmp_path / 'other').exists()
    source = runs.load_run(tmp_path / 'roformer')[0]
    for values, part in ((dict(variant='tied'), 'tied'), (dict(n_embd=32), 'shape')):
        model = make(**(dict(vocab_size=320, n_ids=257, n_embd=16) | values))
        with pytest.raises(files.UserError, match=part):
            checkpoint.load_weights(model, runs.adopted(model, dict(source.named_parameters()), 'out/x'), 'out/x')
