"""Training tokens/s of model_standard beside Hugging Face Llama of the same shape: 8 layers, 512 wide, T 256, batch 8.

'same terms': one process, both sides in the same precision, with the same optimizer, clipping and allocator.
'as a user runs it': processes of their own, in turn: ours with its defaults; Hugging Face in eager fp32 with torch's AdamW.

`python -m bench.train_step scales`, on a GPU: the papers' scales S and L, and the share of the GPU's arithmetic that they use.

And the time of a step of each two-stream method over Standard's, in one process: 6 layers, 384 wide, the same tokens.

`python -m bench.train_step objectives`: the NextLat paper's table of training costs (ntp, nextlat, mtp and jtp at horizons 1, 2, 8):
parameters, steps/s beside ntp's in turn, and peak memory, each in a process of its own. 1.3B on a GPU, 8 x 1024 tokens; on CPU
12 layers, 384 wide, 8 x 256 tokens: times at the vocabulary of bytes, as a small model's time is its head's otherwise, memory at 50304.
"""
import contextlib
import json
import os
import statistics
import subprocess
import sys

import torch

import model_nextlat
import model_standard
import train
from bench import FAMILY, alternate, make_model, over_standard, resident, write_results
from common import llama, machine

T, BATCH, VOCABULARY = 256, 8, 50304
DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def make_step(side, dtype, fused=True, compile=False):
    """A function that does one optimizer step and returns its loss. side 'ours' or 'hf'."""
    torch.manual_seed(0)
    model = model_standard.Model(model_standard.Config(n_layer=8, n_head=8, n_embd=512, eos_id=None, n_ids=50304)).to(DEVICE)
    called = torch.compile(model) if compile else model
    forward = lambda x, y: called(x, y)['loss']
    if side == 'hf':
        model = llama.to_llama(model).train()
        forward = lambda x, y: model(input_ids=x, labels=x, shift_labels=y).loss
    optimizer = train.make_optimizer(model, train.Settings()) if fused else torch.optim.AdamW(model.parameters(), lr=6e-4)
    return optimizer_step(model, forward, optimizer, torch.randint(0, 50257, (2, BATCH, T), device=DEVICE), dtype)


def optimizer_step(model, forward, optimizer, tokens, dtype):
    """A function that does one step on tokens (2, B, T), inputs and targets, and returns its loss."""
    autocast = contextlib.nullcontext if dtype == torch.float32 else lambda: torch.autocast(DEVICE.type, dtype)

    def step():
        with autocast():
            loss = forward(*tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    return step


def two_streams():
    """The time of each method's step over Standard's; prints the rows."""
    rows = []
    machine.start_processes(train.Settings())
    shapes = ((1024, 2), (256, 8)) if DEVICE.type == 'cpu' else ((4096, 8),)
    for block_size, batch_size in shapes:
        tokens = torch.randint(0, 50256, (2, batch_size, block_size), device=DEVICE)
        tokens[torch.rand(tokens.shape, device=DEVICE) < 1 / 200] = 50256
        for dtype in (torch.bfloat16, torch.float32):
            steps = {}
            for name in FAMILY:
                model = make_model(name, n_layer=6, n_head=6, n_embd=384)
                called = torch.compile(model) if DEVICE.type == 'cuda' else model
                forward = lambda x, y, called=called: called(x, y)['loss']
                steps[name] = optimizer_step(model, forward, train.make_optimizer(model, train.Settings()), tokens, dtype)
            rows.append({'terms': 'time over standard', 'dtype': str(dtype)[6:], 'T': block_size, 'batch': batch_size, 'documents': True}
                        | over_standard(alternate(steps, rounds=7)))
    print(json.dumps(rows))


def scales():
    """The papers' scales on a GPU, compiled, bf16, T = 4096 with documents: SPS-S over Standard-S, and useful FLOPs over an H100's 989 TFLOP/s."""
    rows, block_size = [], 4096
    for name, batch_size, n_layer, n_head, n_embd in (('s', 8, 12, 12, 768), ('l', 4, 36, 20, 1280)):
        tokens = torch.randint(0, 50256, (2, batch_size, block_size), device=DEVICE)
        tokens[torch.rand(tokens.shape, device=DEVICE) < 1 / 1000] = 50256
        steps, flops = {}, {}
        for method in ('standard', 'sps')[:1 + (name == 's')]:
            model = make_model(method, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
            called = torch.compile(model)
            steps[method] = optimizer_step(model, lambda x, y, called=called: called(x, y)['loss'], train.make_optimizer(model, train.Settings()),
                                           tokens, torch.bfloat16)
            flops[method] = model.flops_per_token(block_size) * tokens[0].numel()
        seconds = alternate(steps, rounds=10, warmup=3)
        rows += [{'scale': name, 'method': method, 'T': block_size, 'batch': batch_size, 'tokens_per_s': round(tokens[0].numel() / s),
                  'time_over_standard': round(s / seconds['standard'], 3), 'mfu': round(flops[method] / s / 989e12, 3)}
                 for method, s in seconds.items()]
    write_results('scales', rows)


OBJECTIVES = [('ntp', 1), *((objective, d) for d in (1, 2, 8) for objective in ('nextlat', 'mtp', 'jtp'))]


def objective_step(objective, horizon, vocabulary=VOCABULARY):
    """A training step of model_nextlat as `train.py` does it by default, and the model. The width of p_psi is the paper's share of n_embd."""
    shape = dict(n_layer=22, n_head=16, n_embd=2048, n_dynamics=6528)
    if DEVICE.type == 'cpu':
        shape = dict(n_layer=12, n_head=6, n_embd=384, n_dynamics=1224)
    torch.manual_seed(0)
    values = model_nextlat.Config(objective=objective, horizon=horizon, vocab_size=vocabulary, n_ids=vocabulary, eos_id=None, **shape)
    model = model_nextlat.Model(values).to(DEVICE)
    called = torch.compile(model) if DEVICE.type == 'cuda' else model
    tokens = torch.randint(0, vocabulary, (2, BATCH, T if DEVICE.type == 'cpu' else 1024), device=DEVICE)
    return optimizer_step(model, lambda x, y: called(x, y)['loss'], train.make_optimizer(model, train.Settings()), tokens,
                          machine.pick_dtype('auto', DEVICE.type)), model


def peak_memory(objective, horizon):
    """Bytes at the peak of three steps over those before there was a model; to be called in a fresh process."""
    machine.start_processes(train.Settings())
    torch.zeros(1, device=DEVICE)
    before = resident()['held']
    step, _ = objective_step(objective, int(horizon))
    for _ in range(3):
        step()
    print(json.dumps(resident()['peak'] - before))


def objectives():
    """The table of training costs."""
    machine.start_processes(train.Settings())
    rows, memory = [], {side: in_a_process('peak_memory', *map(str, side)) for side in OBJECTIVES}
    for side in OBJECTIVES:
        vocabulary = 320 if DEVICE.type == 'cpu' else VOCABULARY
        steps = {name: objective_step(*name, vocabulary) for name in dict.fromkeys([OBJECTIVES[0], side])}
        seconds = alternate({name: step for name, (step, _) in steps.items()}, rounds=7)
        rows.append({'objective': side[0], 'horizon': side[1], 'parameters': sum(p.numel() for p in steps[side][1].parameters()),
                     'steps_per_s': round(1 / seconds[side], 3), 'time_over_ntp': round(seconds[side] / seconds[OBJECTIVES[0]], 3),
                     'peak_memory_over_ntp': round(memory[side] / memory[OBJECTIVES[0]], 3)})
    write_results('objectives', rows, markdown=True)


def worker(side):
    """One side as its user runs it; prints seconds per step."""
    if side == 'ours':
        machine.start_processes(train.Settings())
        step = make_step('ours', machine.pick_dtype('auto', DEVICE.type), compile=DEVICE.type == 'cuda')
    else:
        step = make_step('hf', torch.float32, fused=False)
    print(json.dumps(alternate({'step': step}, rounds=6)['step']))


def same_terms():
    """Both sides in this process; prints the rows."""
    rows = []
    machine.start_processes(train.Settings())  # the allocator and threads of train.py, for both sides
    for dtype in (torch.bfloat16, torch.float32):
        steps = {side: make_step(side, dtype) for side in ('ours', 'hf')}
        losses = {side: step() for side, step in steps.items()}
        assert abs(losses['ours'] - losses['hf']) < 0.02, losses
        seconds = alternate(steps, rounds=12)
        rows.append({'terms': 'same', 'dtype': str(dtype)[6:], 'ours_tokens_per_s': round(BATCH * T / seconds['ours']),
                     'hf_tokens_per_s': round(BATCH * T / seconds['hf']), 'ratio': round(seconds['hf'] / seconds['ours'], 3)})
    print(json.dumps(rows))


def in_a_process(what, *args):
    """What `python -m bench.train_step WHAT` prints last; all but 'hf' with train.py's environment."""
    env = os.environ | ({} if what == 'hf' else {'GOMP_SPINCOUNT': '1000'})
    out = subprocess.run([sys.executable, '-m', 'bench.train_step', what, *args], stdout=subprocess.PIPE, text=True, check=True, env=env).stdout
    return json.loads(out.splitlines()[-1])


def main():
    rows, seconds = in_a_process('same'), {'ours': [], 'hf': []}
    for _ in range(3):
        for side, times in seconds.items():
            times.append(in_a_process(side))
    ours, hf = (statistics.median(times) for times in seconds.values())
    rows.append({'terms': 'as a user runs it', 'dtype': 'ours default, hf float32', 'ours_tokens_per_s': round(BATCH * T / ours),
                 'hf_tokens_per_s': round(BATCH * T / hf), 'ratio': round(hf / ours, 3)})
    write_results('train_step', rows + in_a_process('two_streams'))


if __name__ == '__main__':
    what, *args = sys.argv[1:] or ['']
    {'same': same_terms, 'two_streams': two_streams, 'scales': scales, 'objectives': objectives, 'peak_memory': peak_memory,
     'ours': lambda: worker('ours'), 'hf': lambda: worker('hf'), '': main}[what](*args)
