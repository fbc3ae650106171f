"""Context-Ready: exact backpropagation through time beside the plain loop, and generation by the paper's table A13.

'bptt': forward and backward of model_context_ready's scan and of Algorithm 1 under autograd (`stream_reference`), same weights and tokens,
fp32: the pointer-chasing shape of appendix B (C 256, 4 heads, window 38, batch 64, T 317) and smaller ones.

'generation': one sequence, random weights at the table's shapes; eager, on a GPU also as a CUDA graph. Ratios are to the Roformer that
the paper compares with: of speed, and of the weights read per token, which decide on a machine that is bound by memory.
"""
import torch

from bench import alternate, write_results
from common.decoding import generate, pack_weights, roomy_cache
from model_context_ready import Config, Model
from train import Settings, start_processes

GPU = torch.cuda.is_available()
DEVICE = 'cuda' if GPU else 'cpu'
PAIRS = [  # table A13: (Context-Ready, the Roformer beside it)
    ({'n_layer': 1, 'n_embd': 2048}, {'n_layer': 6, 'n_embd': 1088, 'K': 1}),
    ({'n_layer': 5, 'n_embd': 1120}, {'n_layer': 12, 'n_embd': 768, 'K': 1}),
]
PROMPT, NEW = [[7] * 16], 2000 if GPU else 32


def bptt():
    rows = []
    for C, batch_size, T, window in ((256, 64, 317, 38), (128, 64, 317, 38), (64, 64, 65, 22)):
        torch.manual_seed(0)
        model = Model(Config(n_layer=1, n_head=4, n_embd=C, window=window, vocab_size=128, n_ids=100, bptt=True)).to(DEVICE)
        idx = torch.randint(0, 100, (batch_size, T), device=DEVICE)

        def step(stream):
            model.zero_grad()
            model.nll(stream(idx), idx).backward()
        seconds = alternate({'loop': lambda: step(model.stream_reference), 'scan': lambda: step(model.stream)}, rounds=5, warmup=1)
        rows.append({'what': 'bptt', 'C': C, 'batch': batch_size, 'T': T, 'window': window, 'scan_ms': round(seconds['scan'] * 1e3),
                     'loop_over_scan': round(seconds['loop'] / seconds['scan'], 2)})
    return rows


@torch.inference_mode()
def decode_eagerly(model, new):
    """Greedy tokens one by one, every operator launched by Python."""
    cache = roomy_cache(model, PROMPT, new)
    token = model.extend(torch.tensor(PROMPT, device=DEVICE), cache).argmax(-1, keepdim=True)
    for _ in range(new - 1):
        token = model.extend(token, cache).argmax(-1, keepdim=True)
    return token.item()


def generation():
    rows = []
    for pair in PAIRS:
        models = []
        for values in pair:
            torch.manual_seed(0)
            models.append(pack_weights(Model(Config(n_head=16, **values)).eval().to(DEVICE, torch.bfloat16)))
        read = [sum(p.numel() for p in model.parameters()) - model.embed.weight.numel() for model in models]  # of the embedding one row
        modes = {'eager': lambda model: decode_eagerly(model, NEW)}
        if GPU:
            modes['CUDA graph'] = lambda model: generate(model, PROMPT, NEW, temperature=0)
        for mode, decode in modes.items():
            seconds = alternate({i: lambda model=model: decode(model) for i, model in enumerate(models)}, rounds=3, warmup=1)
            for i, (model, values) in enumerate(zip(models, pair)):
                rows.append({'what': 'generation', 'mode': mode, 'D': values['n_layer'], 'C': values['n_embd'], 'correction': i == 0,
                             'million_parameters': round(sum(p.numel() for p in model.parameters()) / 1e6), 'tokens_per_s': round(NEW / seconds[i], 1),
                             'speed_over_roformer': round(seconds[1] / seconds[i], 2), 'weights_read_over_roformer': round(read[i] / read[1], 2),
                             'cache_bytes_per_token': 2 * 2 * values['n_layer'] * values['n_embd']})
    return rows


if __name__ == '__main__':
    start_processes(Settings())
    write_results('context_ready', bptt() + generation())
