"""Decoding tokens/s of model_standard beside Hugging Face `generate` with its cache, same weights: 8 layers, 512 wide,
vocabulary 50304, prompts of 16 tokens and 128 new ones, greedy.

'float32': both in fp32. 'best': each in the dtype that is fastest for it; ours with packed weights.
Then the time of each two-stream method, which runs a pair of positions per token, over Standard's.
"""
import torch

import model_standard
from bench import FAMILY, alternate, make_model, over_standard, write_results
from common.decoding import generate, pack_weights
from common.llama import to_llama

PROMPT, NEW = 16, 128
DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def make_sides(dtype, batch_size):
    """{side: function that generates}, after checking that every token of ours is the other's likeliest, but for rounding."""
    torch.manual_seed(0)
    model = model_standard.Model(model_standard.Config(n_layer=8, n_head=8, n_embd=512, eos_id=None, n_ids=50304)).to(DEVICE).eval()
    llama = to_llama(model).to(dtype)
    model = pack_weights(model.to(dtype))
    prompts = torch.randint(0, 50257, (batch_size, PROMPT))
    ours = lambda: generate(model, prompts.tolist(), NEW, temperature=0)
    hf = lambda: llama.generate(prompts.to(DEVICE), attention_mask=torch.ones_like(prompts).to(DEVICE), do_sample=False,
                                max_new_tokens=NEW, min_new_tokens=NEW)[:, PROMPT:].tolist()
    if dtype == torch.float32:  # the texts may part where two logits are equal but for rounding: compare what comes before
        new = torch.tensor(ours(), device=DEVICE)
        with torch.no_grad():
            logits = llama(input_ids=torch.cat([prompts.to(DEVICE), new], 1)[:, :-1]).logits[:, PROMPT - 1:]
        assert (logits.amax(-1) - logits.gather(-1, new.unsqueeze(-1)).squeeze(-1)).max() < 1e-4
    return {'ours': ours, 'hf': hf}


def main():
    rows = []
    for batch_size in (1, 16):
        seconds = {dtype: alternate(make_sides(dtype, batch_size), rounds=5, warmup=1) for dtype in (torch.float32, torch.bfloat16)}
        best = {side: min(seconds, key=lambda dtype: seconds[dtype][side]) for side in ('ours', 'hf')}
        for terms, dtypes in (('float32', dict.fromkeys(best, torch.float32)), ('best', best)):
            speed = {side: batch_size * NEW / seconds[dtype][side] for side, dtype in dtypes.items()}
            rows.append({'terms': terms, 'batch': batch_size, 'ours_tokens_per_s': round(speed['ours']), 'hf_tokens_per_s': round(speed['hf']),
                         'ours_dtype': str(dtypes['ours'])[6:], 'hf_dtype': str(dtypes['hf'])[6:],
                         'ratio': round(speed['ours'] / speed['hf'], 3)})
    for batch_size in (1, 16):
        prompts = torch.randint(0, 50256, (batch_size, PROMPT)).tolist()
        for dtype in (torch.float32, torch.bfloat16):
            models = {name: pack_weights(make_model(name, n_layer=8, n_head=8, n_embd=512).eval().to(dtype)) for name in FAMILY}
            sides = {name: lambda model=model: generate(model, prompts, NEW, temperature=0) for name, model in models.items()}
            seconds = alternate(sides, rounds=5, warmup=1)
            rows.append({'terms': 'time over standard', 'batch': batch_size, 'dtype': str(dtype)[6:]} | over_standard(seconds))
    write_results('generate', rows)


if __name__ == '__main__':
    main()
