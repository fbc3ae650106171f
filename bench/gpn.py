"""Time and memory of a training step of GPN: the scan beside the loop, and beside a jitted JAX lax.scan.

    python -m bench.gpn           on CPU: batch 8, T 256, width 256, and config/gpn_quick.py
                                  on a GPU: the paper's 129M, with the bandwidth it would take at best
    python -m bench.gpn --jax     JAX too, which it installs (pip install jax) if it is not there
    python -m bench.gpn --toy     everything at a size of seconds, and no results written

It begins with bounds, which need no GPU: the least time of a token at 129M on an H100, for the scan as it is and for
one kernel that stays on the chip over many tokens (`bounds`; docs/gpn.md explains them).

'c' is the scan, with its steps in C (scans/gpn.c), and 'c_bf16' the same with products in bf16, where the CPU has units
for it. 'plain' is autograd through every step; 'loop' is scan = 'loop', which recomputes the steps of a segment in the
backward. 'jax' has the embedding and the head outside the lax.scan, 'jax as the authors' inside it. All sides but
'c_bf16' run in fp32, in one process, with the allocator settings of train.py; JAX takes all cores unless the process is
bound to some (taskset). Memory is measured in one process per side.
"""
import functools
import importlib.util
import itertools
import subprocess
import sys

import torch

import model_gpn
import train
from bench import alternate, apart, options, resident, write_results
from common import machine, settings
from scans import gpn as scan

SHAPE = dict(n_embd=256, d_emb=128, n_head=4, d_k=32, d_v=64, n_ffn=683, vocab_size=1000, n_ids=1000)
TOY = dict(n_embd=32, d_emb=16, n_head=2, d_k=8, d_v=12, n_ffn=40, vocab_size=64, n_ids=64)
BANDWIDTH = {'H100': 3.35e12, 'H200': 4.8e12}  # bytes/s, the vendor's data sheets
TENSOR_FLOPS = 989e12  # of an H100, bf16 without sparsity, the vendor's data sheet
ON_CHIP = 132 * (256 + 227) * 1024  # bytes: registers and shared memory of its multiprocessors
LAUNCH = 1.3e-6  # s of a kernel in a CUDA graph in which nothing is done: Hazy Research, "Look Ma, No Bubbles", H100
BARRIER = 1e-6  # s of a barrier of all multiprocessors, a guess: 0.5 to 2 are reported for barriers of atomics


def make_model(B, T, form='fast', **values):
    """A model in one of its forms and tokens (2, B, T), inputs and targets."""
    torch.manual_seed(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = model_gpn.Model(model_gpn.Config(scan=form, **values)).to(device)
    for p in model.parameters():  # no zeros, so that no gradient is
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.03)
    return model, torch.randint(0, model.config.n_ids, (2, B, T), device=device)


def training_step(model, tokens):
    """Loss and gradients once; the loss."""
    model.zero_grad()
    loss = model(*tokens)['loss']
    loss.backward()
    return loss.item()


class PlainLoop(model_gpn.Model):
    """Autograd through every step: what the loop does without segments that are taken again."""

    def loop(self, u, *others, **kwargs):
        state, states = self.first_state(len(u), u.device), []
        for t in range(u.shape[1]):
            state = self.step(u[:, t], *state)
            states.append(state[0])
        return torch.stack(states, 1), state


def sides_on_cpu(B, T, with_jax, **values):
    """{side: function that takes a training step and returns its loss}."""
    fast, tokens = make_model(B, T, **values)
    loop, plain = (make_model(B, T, 'loop', **values)[0] for _ in range(2))
    plain.__class__ = PlainLoop
    step = functools.partial(training_step, fast, tokens)
    sides = {'plain': functools.partial(training_step, plain, tokens),
             'loop': functools.partial(training_step, loop, tokens), 'c': step}
    if scan.c_dtype(torch.bfloat16) == torch.bfloat16:
        sides['c_bf16'] = torch.autocast('cpu', torch.bfloat16)(step)
    if with_jax:
        sides |= {'jax': jax_step(fast, tokens, False), 'jax as the authors': jax_step(fast, tokens, True)}
    return sides


def on_cpu(with_jax, toy):
    machine.start_processes(train.Settings())
    B, T, shape = (2, 16, TOY) if toy else (8, 256, SHAPE)
    yield memory_of_the_scan(B, 32 if toy else 2048, shape, toy)
    yield loop_as_users_get_it(B, T, toy)
    for n_layer in (1, 2):
        sides = sides_on_cpu(B, T, with_jax and n_layer == 1, n_layer=n_layer, **shape)
        losses = {name: step() for name, step in sides.items()}
        for name, loss in losses.items():
            assert abs(loss - losses['loop']) < (0.02 if name == 'c_bf16' else 1e-4), losses
        seconds = alternate(sides, rounds=1 if toy else 7, warmup=0 if toy else 2)
        ours = [name for name in ('c', 'c_bf16') if name in sides]
        for rival in [name for name in seconds if name not in ours]:
            row = {'what': f'{rival} over the scan', 'n_layer': n_layer, 'loss': round(losses['loop'], 5)}
            row |= {name: round(seconds[rival] / seconds[name], 2) for name in ours}
            yield row | {f'{name}_ms': round(1e3 * seconds[name], 1) for name in (*ours, rival)}


def memory_of_the_scan(B, T, shape, toy):
    """MB that the scan holds for the backward, that a process grows by in a step, and that M at every step would be."""
    model, _ = make_model(B, 1, **shape)
    c, held = model.config, {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        scan.scan_window(model, torch.zeros(B, T, c.n_embd, requires_grad=True))
    args = B, T, 'fast', shape
    return {'what': f'memory at T {T}', 'held_mb': round(sum(held.values()) / 1e6, 1),
            'peak_growth_mb': peak_growth_mb(*args) if toy else apart(peak_growth_mb, *args),
            'memory_at_every_step_mb': round(4 * T * B * c.n_head * c.d_k * c.d_v / 1e6, 1)}


def peak_growth_mb(B, T, form, shape):
    """MB that a fresh process grows by at most in training steps, after one on few tokens."""
    machine.start_processes(train.Settings())
    model, tokens = make_model(B, T, form, **shape)
    training_step(model, tokens[:, :, :8])
    before = resident()['held']
    for _ in range(2):
        training_step(model, tokens)
    return round((resident()['peak'] - before) / 1e6, 1)


def loop_as_users_get_it(B, T, toy):
    """scan = 'loop' over scan = 'fast' at config/gpn_quick.py's shape: time of a step and peak memory."""
    values = settings.read_config_file('config/gpn_quick.py')
    shape = {name: values[name] for name in ('n_layer', 'n_head', 'n_embd', 'd_emb', 'd_k', 'd_v')}
    shape |= dict(vocab_size=320, n_ids=257)  # bytes
    if toy:
        shape = TOY
    else:
        B, T = values['batch_size'], values['block_size']
    models = {form: make_model(B, T, form, **shape) for form in ('loop', 'fast')}
    sides = {form: functools.partial(training_step, *pair) for form, pair in models.items()}
    seconds = alternate(sides, rounds=1 if toy else 7, warmup=0 if toy else 2)
    row = {'what': "scan = 'loop' over 'fast' at config/gpn_quick.py"}
    row['times'] = round(seconds['loop'] / seconds['fast'], 2)
    for form in sides:
        row[f'{form}_ms'] = round(1e3 * seconds[form], 1)
        args = B, T, form, shape
        row[f'{form}_peak_growth_mb'] = peak_growth_mb(*args) if toy else apart(peak_growth_mb, *args)
    return row


def bounds(sizes, B, bandwidth=BANDWIDTH['H100']):
    """[forward, backward]: what one token of B rows takes on an H100 at least, in bf16, M in fp32. sizes: scan.Sizes.

    Now, as CUDA graphs: every kernel is launched, and reads and writes what it needs in the GPU's memory: all weights
    once (they are more than the L2 cache holds), M as often as kernels pass over it. Forward it is read and written;
    backward M is written by the replay and read, its gradient read and written. Persistent, as one kernel: barriers
    for launches, and as much of M (or of its gradient) stays on the chip as there is room for, then of the weights. The
    room is all registers and shared memory but for the sums of the widest product. A kernel also needs buffers there,
    so `gain` is a bound, and gain_half that of half the room. Left out: states and products, which are few bytes, the
    L2 cache, which serves both forms alike, and the weights' gradients, which are products over all tokens and the same
    in both.
    """
    C, F, H, K, D, L = sizes
    columns = [sum(sizes.columns(i)) for i in range(L)]
    n_weights = C * C + sum(C * width + (F + H * D) * C for width in columns)
    weights, memory = 2 * n_weights, 4 * B * H * K * D
    room = max(0, ON_CHIP - 4 * B * max(columns))
    tensor_s = 2 * B * n_weights / TENSOR_FLOPS
    barriers = 1 + L * (3 if H else 2)  # after the ground gate's product; in, memory and out of each layer
    # kernels of a step of scan.KernelSteps
    if H:
        launches = {'forward': 2 + 6 * L, 'backward': 4 + 10 + 9 * (L - 1)}
    else:
        launches = {'forward': 2 + 4 * L, 'backward': 4 + 6 * L}

    def persistent_s(moved, room):
        kept = min(room, memory)  # one read and one write less
        kept_weights = min(room - kept, weights)
        return barriers * BARRIER + max((moved - 2 * kept - kept_weights) / bandwidth, tensor_s)

    rows = []
    for name, passes in (('forward', 2), ('backward', 4)):
        moved = weights + passes * memory
        now, persistent = launches[name] * LAUNCH + max(moved / bandwidth, tensor_s), persistent_s(moved, room)
        rows.append({'what': f'bound of a token, {name}', 'batch': B, 'weights_mb': round(weights / 1e6, 1),
                     'memory_mb': round(memory / 1e6, 1), 'room_mb': round(room / 1e6, 1),
                     'moved_us': round(1e6 * moved / bandwidth, 1), 'tensor_us': round(1e6 * tensor_s, 1),
                     'launches': launches[name], 'barriers': barriers, 'now_us': round(1e6 * now, 1),
                     'persistent_us': round(1e6 * persistent, 1), 'gain': round(now / persistent, 2),
                     'gain_half': round(now / persistent_s(moved, room / 2), 2)})
    return rows


def all_bounds():
    """`bounds` of the paper's 129M at several batches."""
    for B in (1, 4, 16, 32, 128):
        yield from bounds(scan.Sizes.of(model_gpn.Config()), B)


def on_gpu(toy):
    for B, T, with_loop in ((2, 16, True),) if toy else ((4, 256, True), (128, 2048, False)):
        torch.cuda.reset_peak_memory_stats()
        values = TOY if toy else {}
        fast = make_model(B, T, **values)
        with torch.autocast('cuda', torch.bfloat16):
            step = functools.partial(training_step, *fast)
            sides = {'scan': step}
            if with_loop:
                sides['loop'] = functools.partial(training_step, *make_model(B, T, 'loop', **values))
            sides['scan']()
            peak = torch.cuda.max_memory_allocated()  # before the other sides run
            seconds = alternate(sides, rounds=3, warmup=1)
        c, name = fast[0].config, torch.cuda.get_device_name()
        bandwidth = next((x for gpu, x in BANDWIDTH.items() if gpu in name), None)
        least = bandwidth and T * sum(row['moved_us'] for row in bounds(scan.Sizes.of(c), B, bandwidth)) / 1e6
        yield {'batch': B, 'T': T, 'tokens_per_s': round(B * T / seconds['scan']),
               'of_bandwidth_bound': least and round(least / seconds['scan'], 3),
               'loop_over_scan': round(seconds['loop'] / seconds['scan'], 2) if with_loop else None,
               'peak_gb': round(peak / 1e9, 1)}


def jax_step(model, tokens, official):
    """The same loss and gradients by JAX, jitted: lax.scan over the paper's equations, weights as in `model`.

    official: embedding, head and loss in each step of the scan, as the authors have them; else before and after it, for
    all at once.
    """
    if importlib.util.find_spec('jax') is None:
        subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', 'jax'], check=True)
    import jax
    import jax.numpy as jnp
    c, (idx, targets) = model.config, (jnp.asarray(t.T.numpy()) for t in tokens)
    H, silu, sigmoid = c.n_head, jax.nn.silu, jax.nn.sigmoid
    weights = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}

    def loss(w):
        def rms(x, name):
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + c.norm_eps) * w[name + '.weight']

        def linear(x, name):
            return x @ w[name + '.weight'].T + w.get(name + '.bias', 0)

        def unit(x):
            x = jax.nn.relu(x).reshape(-1, H, c.d_k)
            return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-12)

        def embed(idx):
            return linear(rms(w['embed.weight'][idx], 'embed_norm'), 'fuse')

        def nll(s, targets):
            logits = linear(rms(s, 'norm'), 'decode') @ w['embed.weight'].T
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)

        def step(carry, inputs):
            s, last, M = carry
            u = embed(inputs[0]) if official else inputs
            g = sigmoid(linear(rms(s, 'ground_norm'), 'ground_gate')) * s + u
            n = rms(g, 'write.norm')
            k, v = unit(linear(rms(last, 'write.norm'), 'write.key')), linear(n, 'write.value').reshape(-1, H, c.d_v)
            beta = sigmoid(linear(n, 'write.beta'))[..., None, None]
            rate = jax.nn.softplus(linear(n, 'write.decay') + w['write.dt_bias'])
            decay = jnp.exp(-jnp.exp(w['write.log_rate']) * rate)[..., None, None]
            M = decay * M + beta * jnp.einsum('bhk,bhd->bhkd', k, v - jnp.einsum('bhkd,bhk->bhd', M, k))
            s = g
            for i in range(c.n_layer):
                name = f'layers.{i}.'
                gate, up = jnp.split(linear(rms(s, name + 'ffn_norm'), name + 'gate_up'), 2, -1)
                n = rms(s, name + 'read_norm')
                read = jnp.einsum('bhkd,bhk->bhd', M, unit(linear(n, name + 'query'))).reshape(len(s), -1)
                gated_read = silu(linear(n, name + 'read_gate')) * rms(read, name + 'out_norm')
                s = (sigmoid(linear(rms(s, name + 'gate_norm'), name + 'gate')) * s
                     + linear(silu(gate) * up, name + 'ffn_out') + linear(gated_read, name + 'read_out'))
            return (s, g, M), nll(s, inputs[1]) if official else s

        B, inputs = idx.shape[1], (idx, targets) if official else embed(idx)
        zero = jnp.zeros((B, c.n_embd))
        outputs = jax.lax.scan(step, (zero, zero, jnp.zeros((B, H, c.d_k, c.d_v))), inputs)[1]
        return (outputs if official else nll(outputs, targets)).mean()

    run = jax.jit(jax.value_and_grad(loss))
    return lambda: float(jax.block_until_ready(run(weights))[0])


def main(argv=None):
    given = options(argv, '--jax', '--toy')
    toy = '--toy' in given
    rows = on_gpu(toy) if torch.cuda.is_available() else on_cpu('--jax' in given, toy)
    write_results('gpn', itertools.chain(all_bounds(), rows), toy=toy)


if __name__ == '__main__':
    main()
