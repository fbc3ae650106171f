"""A training step of GPN, forward and backward: the scan beside the plain loop with autograd, and beside a jitted JAX lax.scan.

    python -m bench.gpn           on CPU: batch 8, T 256, width 256; on a GPU: the paper's 129M, with the bandwidth it would take at best
    python -m bench.gpn --jax     JAX too, which it installs (pip install jax) if it is not there

'eager' is the scan in PyTorch's operators, 'compiled' with its steps in C (scans/gpn.c). 'jax' has the embedding and the head outside
the lax.scan, 'jax as the authors' in it. All sides in fp32, in one process, with train.py's allocator settings; JAX takes all cores unless
the process is bound to some (taskset).
"""
import importlib.util
import resource
import subprocess
import sys

import torch

import attn_kernels
import model_gpn
import train
from bench import alternate, write_results
from common import machine
from scans import gpn as scan

SHAPE = dict(n_embd=256, d_emb=128, n_head=4, d_k=32, d_v=64, n_ffn=683, vocab_size=1000, n_ids=1000)
BANDWIDTH = {'H100': 3.35e12, 'H200': 4.8e12}  # bytes/s, the vendor's data sheets


def make_step(model, states, tokens):
    """A function that takes loss and gradients once, by `states(idx)` -> (B, T, C), and returns the loss."""
    def step():
        model.zero_grad()
        h = model._decoded(states(tokens[0]))
        loss = attn_kernels.linear_cross_entropy(h.flatten(0, 1), model.head.weight, tokens[1].flatten())
        loss.backward()
        return loss.item()
    return step


def compiled(states, on):
    def run(idx):
        scan.COMPILE = on
        return states(idx)
    return run


def without_graphs(step):
    def run():
        scan.GRAPHS = False
        loss = step()
        scan.GRAPHS = True
        return loss
    return run


def make_model(B, T, **values):
    torch.manual_seed(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = model_gpn.Model(model_gpn.Config(**values)).to(device)
    for p in model.parameters():  # no zeros, so that no gradient is
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.03)
    return model, torch.randint(0, model.config.n_ids, (2, B, T), device=device)


def on_cpu(with_jax):
    if not scan.GPNInC.serves(torch.device('cpu'), torch.float32):
        sys.exit('bench.gpn: no C compiler (cc, or CC in the environment) to build the steps with: install one')
    machine.start_processes(train.Settings())
    rows = [{'what': 'memory at T 2048', **memory(T=2048)}]
    for n_layer in (1, 2):
        model, tokens = make_model(8, 256, n_layer=n_layer, **SHAPE)
        sides = {'loop': model.loop, 'eager': compiled(model.states, False), 'compiled': compiled(model.states, True)}
        steps = {name: make_step(model, states, tokens) for name, states in sides.items()}
        if with_jax and n_layer == 1:
            steps |= {'jax': jax_step(model, tokens, False), 'jax as the authors': jax_step(model, tokens, True)}
        losses = [step() for step in steps.values()]
        assert max(losses) - min(losses) < 1e-4, losses
        seconds = alternate(steps, rounds=7)
        for rival in [name for name in seconds if name not in ('eager', 'compiled')]:
            rows.append({'what': f'{rival} over the scan', 'n_layer': n_layer, 'loss': round(losses[0], 5)}
                        | {name: round(seconds[rival] / seconds[name], 2) for name in ('eager', 'compiled')}
                        | {f'{name}_ms': round(1e3 * seconds[name], 1) for name in ('eager', 'compiled', rival)})
    write_results('gpn', rows)


def memory(T):
    """MB that the scan keeps for the backward, that the process grew by in a step, and that M at every step would be."""
    model, tokens = make_model(8, T, **SHAPE)
    c, step = model.config, make_step(model, model.states, tokens)
    make_step(model, model.states, tokens[:, :, :64])()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    kept = scan._scan_outputs(torch.empty(T, 8, c.n_embd, device='meta'), scan.Sizes.of(c), torch.float32, c.segment_len, T, True)
    return {'kept_mb': round(sum(x.nbytes for x in kept) / 1e6, 1),
            'peak_growth_mb': round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3, 1),
            'memory_at_every_step_mb': round(4 * T * 8 * c.n_head * c.d_k * c.d_v / 1e6, 1)}


def on_gpu():
    rows = []
    for B, T, with_loop in ((4, 256, True), (128, 2048, False)):
        torch.cuda.reset_peak_memory_stats()
        model, tokens = make_model(B, T)
        with torch.autocast('cuda', torch.bfloat16):
            steps = {'scan': make_step(model, model.states, tokens)}
            steps['without graphs'] = without_graphs(steps['scan'])
            if with_loop:
                steps['loop'] = make_step(model, model.loop, tokens)
            steps['scan']()
            peak = torch.cuda.max_memory_allocated()  # before the other sides run
            seconds = alternate(steps, rounds=3, warmup=1)
        c, bandwidth = model.config, next((x for name, x in BANDWIDTH.items() if name in torch.cuda.get_device_name()), 3.35e12)
        moved = 2 * sum(w.numel() for w in model._folded()) + 4 * B * c.n_head * c.d_k * c.d_v  # weights and M, once
        rows.append({'batch': B, 'T': T, 'tokens_per_s': round(B * T / seconds['scan']),
                     'of_bandwidth_bound': round(2 * T * moved / bandwidth / seconds['scan'], 3),
                     'without_graphs_over_scan': round(seconds['without graphs'] / seconds['scan'], 2),
                     'loop_over_scan': round(seconds['loop'] / seconds['scan'], 2) if with_loop else None,
                     'peak_gb': round(peak / 1e9, 1)})
    write_results('gpn', rows)


def jax_step(model, tokens, official):
    """The same loss and gradients by JAX, jitted: lax.scan over the paper's equations, weights as in `model`.

    official: embedding, head and loss in each step of the scan, as the authors have them; else before and after it, for all at once.
    """
    if importlib.util.find_spec('jax') is None:
        subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', 'jax'], check=True)
    import jax
    import jax.numpy as jnp
    c, (idx, targets) = model.config, (jnp.asarray(t.T.numpy()) for t in tokens)
    H, silu, sigmoid = c.n_head, jax.nn.silu, jax.nn.sigmoid
    weights = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}

    def loss(w):
        rms = lambda x, name: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + c.norm_eps) * w[name + '.weight']
        linear = lambda x, name: x @ w[name + '.weight'].T + w.get(name + '.bias', 0)
        unit = lambda x: (x := jax.nn.relu(x).reshape(-1, H, c.d_k)) * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-12)

        embed = lambda idx: linear(rms(w['embed.weight'][idx], 'embed_norm'), 'fuse')

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
            decay = jnp.exp(-jnp.exp(w['write.log_rate']) * jax.nn.softplus(linear(n, 'write.decay') + w['write.dt_bias']))[..., None, None]
            M = decay * M + beta * jnp.einsum('bhk,bhd->bhkd', k, v - jnp.einsum('bhkd,bhk->bhd', M, k))
            s = g
            for i in range(c.n_layer):
                name = f'layers.{i}.'
                gate, up = jnp.split(linear(rms(s, name + 'ffn_norm'), name + 'gate_up'), 2, -1)
                n = rms(s, name + 'read_norm')
                answer = jnp.einsum('bhkd,bhk->bhd', M, unit(linear(n, name + 'query'))).reshape(len(s), -1)
                s = (sigmoid(linear(rms(s, name + 'gate_norm'), name + 'gate')) * s + linear(silu(gate) * up, name + 'ffn_out')
                     + linear(silu(linear(n, name + 'read_gate')) * rms(answer, name + 'answer_norm'), name + 'read_out'))
            return (s, g, M), nll(s, inputs[1]) if official else s

        B, inputs = idx.shape[1], (idx, targets) if official else embed(idx)
        zero = jnp.zeros((B, c.n_embd))
        outputs = jax.lax.scan(step, (zero, zero, jnp.zeros((B, H, c.d_k, c.d_v))), inputs)[1]
        return (outputs if official else nll(outputs, targets)).mean()

    run = jax.jit(jax.value_and_grad(loss))
    return lambda: float(jax.block_until_ready(run(weights))[0])


if __name__ == '__main__':
    if sys.argv[1:] not in ([], ['--jax']):
        sys.exit('python -m bench.gpn [--jax]')
    on_gpu() if torch.cuda.is_available() else on_cpu('--jax' in sys.argv)
