"""GPN: the equations against the paper, the compiled step against the equations, decoding."""
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from conftest import saved_bytes
from references import assert_near, loss_and_gradients, random_model
from test_models import decode_in_pieces

import model_gpn as G
import scans

SMALL = dict(n_layer=1, n_head=2, n_embd=24, d_emb=16, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=60, segment_len=5)
needs_triton = pytest.mark.skipif(scans.triton is None, reason='needs Triton')


def make(**values):
    return random_model(G, 3, **SMALL | values)


# How scans/recurrent.py is compiled, and with which models it works, is tested in tests/scans.
forms = pytest.mark.parametrize('form', ['loop', 'auto'])


def test_initial_weights_match_the_official_code():
    torch.manual_seed(0)
    model = G.Model(G.Config(n_head=2, n_embd=256, d_emb=128, d_k=32, d_v=64, n_ffn=384, decoder_bias=True))
    for name, p in model.named_parameters():
        if name.endswith('.bias') or name in ('ground_gate.weight', 'layers.0.gate.weight', 'layers.0.ffn_out.weight'):
            assert not p.any()
        elif p.dim() == 2:
            is_normal = name in ('embed.weight', 'layers.0.read_out.weight')
            std = 0.02 if is_normal else p.shape[1] ** -0.5
            largest = p.abs().max() * 0.87962566 / (2 * std)  # 1 for a normal truncated at 2 standard deviations
            assert abs(p.std() / std - 1) <= 5 * (2 * p.numel()) ** -0.5
            assert largest > 1.1 if is_normal else 0.97 < largest <= 1 + 1e-6


def test_flops_per_token_equal_a_hand_count():
    model, _ = make(n_layer=3)
    H, K, D, C, E, width = 2, 8, 12, 24, 16, 40
    write, layer = C * H * (K + D + 2), C * C + 3 * C * width + C * H * (K + 2 * D)
    weights = E * C + C * C + write + 3 * layer + C * E + E * 64  # fuse, ground gate, ..., decoder, head
    memory = H * K * D * (1 + 1 + 3)  # read with the key, write, a read per layer
    assert model.flops_per_token(23) == 3 * 2 * (weights + memory)


def paper_states(model, idx, edit=''):
    """Compute the states of one window (T, C) from the equations, head by head.

    edit: the model in papers/gpn/edits/ whose changed equation replaces the paper's.
    """
    w, c = dict(model.named_parameters()), model.config

    def rms(x, name):
        return x / (x.square().mean() + c.norm_eps).sqrt() * w[name + '.weight']

    def linear(x, name):
        return w[name + '.weight'] @ x + w.get(name + '.bias', 0)

    def unit(x):
        return x / (x.square().sum() + 1e-12).sqrt()

    heads = range(c.n_head)
    s = g = torch.zeros(c.n_embd, dtype=torch.float64)
    memory, states = [torch.zeros(c.d_v, c.d_k, dtype=torch.float64) for _ in heads], []
    for x in idx:
        last, carried = g, g if edit == 'prediction_not_carried' else s
        u = linear(rms(w['embed.weight'][x], 'embed_norm'), 'fuse')
        gate = torch.sigmoid(linear(rms(carried, 'ground_norm'), 'ground_gate'))
        g = (1 if edit == 'gate_at_one' else gate) * carried + u  # eq. 4
        if c.n_head:
            now = rms(g, 'write.norm')
            key = linear(now if edit == 'key_from_this_state' else rms(last, 'write.norm'), 'write.key')
            values, beta = linear(now, 'write.value'), torch.sigmoid(linear(now, 'write.beta'))
            gamma = -w['write.log_rate'].exp() * F.softplus(linear(now, 'write.decay') + w['write.dt_bias'])  # eq. 9
            if edit == 'no_write_gate':
                beta = torch.ones_like(beta)
            if edit == 'no_decay':
                gamma = torch.zeros_like(gamma)
            for h in heads:
                k, v = unit(key[h * c.d_k:(h + 1) * c.d_k].relu()), values[h * c.d_v:(h + 1) * c.d_v]  # eq. 8
                memory[h] = gamma[h].exp() * memory[h] + beta[h] * torch.outer(v - memory[h] @ k, k)  # eq. 10
        s = g
        for i in range(c.n_layer):
            n = f'layers.{i}.'
            gate, up = linear(rms(s, n + 'ffn_norm'), n + 'gate_up').split(c.n_ffn)
            new = torch.sigmoid(linear(rms(s, n + 'gate_norm'), n + 'gate')) * s
            new = new + linear(F.silu(gate) * up, n + 'ffn_out')  # eq. 5
            if c.n_head:
                query = linear(rms(s, n + 'read_norm'), n + 'query')
                read = torch.cat([memory[h] @ unit(query[h * c.d_k:(h + 1) * c.d_k].relu()) for h in heads])
                gated = F.silu(linear(rms(s, n + 'read_norm'), n + 'read_gate')) * rms(read, n + 'out_norm')
                new = new + linear(gated, n + 'read_out')  # eq. 11
            s = new
        states.append(s)
    return torch.stack(states)


def plain_states(model, idx):
    """Compute the states of windows with `Model.step` and plain autograd, as a reference."""
    c, (B, T) = model.config, idx.shape
    u, state, states = model.ground_input(idx), model.first_state(B), []
    for t in range(T):
        if c.bptt_len and t % c.bptt_len == 0:
            state = [x.detach() for x in state]
        if c.eos_id is not None and t:
            continues = (idx[:, t - 1] != c.eos_id).to(u.dtype)
            state = [x * continues.view(-1, *[1] * (x.dim() - 1)) for x in state]
        state = model.step(u[:, t], *state)
        states.append(state[0])
    return torch.stack(states, 1)


def scale_keys(model, factor):
    for name, p in model.named_parameters():
        if '.key.' in name or '.query.' in name:
            p.data *= factor


def results(model, states, idx):
    """Return the loss of predicting the next token from states, and its gradients."""
    logits = model.head(model.head_input(states))
    return loss_and_gradients(F.cross_entropy(logits.flatten(0, 1), idx.roll(-1, 1).flatten()), model)


@pytest.mark.parametrize('n_layer, n_head', [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_the_loop_equals_the_papers_equations(n_layer, n_head):
    model, idx = make(n_layer=n_layer, n_head=n_head, scan='loop')
    with torch.no_grad():
        want, got = paper_states(model, idx[0]), model.states(idx)[0]
    assert (got - want).norm() < 1e-10 * want.norm()


@forms
@hypothesis.settings(max_examples=12, derandomize=True, deadline=None)
@hypothesis.given(shape=st.sampled_from([(1, 0), (1, 2), (2, 0), (2, 2), (3, 1)]), eos_id=st.sampled_from([None, 59]),
                  bptt_len=st.sampled_from([None, 1, 5, 7]), segment_len=st.sampled_from([1, 5, 100]),
                  T=st.sampled_from([1, 2, 7, 23]), key_scale=st.sampled_from([1.0, 1e-6]))
def test_values_and_gradients_equal_repeated_steps(form, shape, eos_id, bptt_len, segment_len, T, key_scale):
    """Also for lengths that segments and truncated BPTT do not divide.

    Tiny keys (1e-6) show the epsilon in their normalization.
    """
    n_layer, n_head = shape
    model, idx = make(n_layer=n_layer, n_head=n_head, bptt_len=bptt_len, eos_id=eos_id, segment_len=segment_len,
                      scan=form)
    idx = idx[:, :T]
    scale_keys(model, key_scale)
    want = results(model, plain_states(model, idx), idx)
    states = model.states(idx, use_scan=True)
    assert_near(results(model, states, idx), want, 1e-8, all_matter=T == 23)
    with torch.no_grad():
        assert (model.states(idx, use_scan=True) - states).norm() < 1e-8 * states.norm()


def test_the_loop_saves_its_state_once_per_segment():
    """The backward needs the output and three tensors at the start of each segment."""
    model, idx = make(n_layer=2, segment_len=8, scan='loop')
    c = model.config
    u = model.ground_input(idx[:, :16]).detach().requires_grad_()
    state = 2 * c.n_embd + c.n_head * c.d_k * c.d_v
    weights = sum(p.nbytes for p in model.parameters())
    assert saved_bytes(lambda: model.loop(u)) <= weights + 8 * 3 * (2 * state + 2 * 16 * c.n_embd)


# ---- decoding ----

@pytest.mark.parametrize('n_head', [0, 2])
def test_decoding_equals_the_full_forward_in_float64(n_head):
    model, idx = make(n_layer=2, n_head=n_head, eos_id=59)
    for p in model.parameters():
        p.data *= 0.5 if p.dim() == 2 else 1
    decode_in_pieces(model, idx, max_call=4, tolerance=1e-8)


@forms
def test_a_nan_weight_gives_nan_states(form):
    model, idx = make(scan=form)
    model.layers[0].query.bias.data[0] = float('nan')
    assert model.states(idx, use_scan=True).isnan().any()


def test_gates_and_decays_near_1_are_not_rounded_to_1_by_bf16_weights():
    """Checks gates of 0.999 and a decay of e^-0.001."""
    model, _ = make()
    layer, write = model.float().layers[0], model.write
    zero = [layer.ffn_out.weight, layer.read_out.weight, write.decay.weight, write.dt_bias]
    for linear in (model.ground_gate, layer.gate):
        zero.append(linear.weight)
        torch.nn.init.constant_(linear.bias, 6.9)
    for p in zero:
        torch.nn.init.zeros_(p)
    torch.nn.init.constant_(write.log_rate, math.log(1e-3 / math.log(2)))
    s, _, memory = model.to(torch.bfloat16).first_state(2)
    decay = write.log_decay(write.norm(s + 1)).exp()
    faded = [model.ground(torch.zeros_like(s), s + 1), layer(s + 1, memory)[0], decay]
    for x in faded:
        assert ((x.double() - 0.999).abs() < 1e-4).all()


@forms
@pytest.mark.parametrize('narrow', ['autocast', 'weights'])
def test_state_and_memory_are_in_fp32(narrow, form):
    """Also with bf16 weights, or under autocast, which does not narrow products on a CPU."""
    model, idx = make(n_layer=2, scan=form)
    for p in model.float().parameters():
        torch.nn.init.normal_(p, std=0.2)
    want = model.states(idx, use_scan=True)
    if narrow == 'weights':
        model = model.to(torch.bfloat16)
        assert model.new_cache(3, 23).windows['state'].dtype == torch.float32
    with torch.autocast('cpu', torch.bfloat16, enabled=narrow == 'autocast'):
        got = model.states(idx, use_scan=True)
    assert got.dtype == torch.float32 and (got - want).norm() < 0.03 * want.norm()
