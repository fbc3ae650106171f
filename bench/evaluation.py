"""Requests/s of eval.py's scorer beside lm-eval's own `hf` model on the same weights: 4-way multiple choice after long contexts.

Same precision and batch size; checks that log-likelihoods and greedy flags agree.
"""
import random

import torch

import model_standard
from bench import alternate, write_results
from common.decoding import pack_weights
from common.llama import to_llama
from eval import Scorer

QUESTIONS, CHOICES, CONTEXT, CHOICE, BATCH = 8, 4, 400, 12, 16


def hf_model(llama):
    """lm-eval's adapter around a model; the tokenizer is not used, requests come as ids."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({'a': 0, '[EOS]': 1}, unk_token='a'))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token='[EOS]', pad_token='[EOS]')
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    return HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=BATCH, device=device, max_length=1024)


def main():
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(50000) for _ in range(n)]
    requests = []
    for _ in range(QUESTIONS):
        context = ids(rng.randint(CONTEXT * 3 // 4, CONTEXT * 5 // 4))
        requests += [(context, ids(rng.randint(CHOICE // 2, CHOICE))) for _ in range(CHOICES)]
    rows = []
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = model_standard.Model(model_standard.Config(n_layer=8, n_head=8, n_embd=512, eos_id=None)).to(device).eval()
        hf = hf_model(to_llama(model).to(dtype))
        scorer = Scorer(pack_weights(model.to(dtype)), 1024, batch_size=BATCH)
        ours = lambda: [(nats, greedy) for nats, greedy, _ in scorer.score(requests)]
        theirs = lambda: hf._loglikelihood_tokens([(('', ''), *request) for request in requests], disable_tqdm=True)
        if dtype == torch.float32:
            worst = max(abs(a[0] - b[0]) for a, b in zip(ours(), theirs()))
            assert worst < 1e-3 and all(a[1] == b[1] for a, b in zip(ours(), theirs())), worst
        seconds = alternate({'ours': ours, 'hf': theirs}, rounds=2, warmup=1)
        rows.append({'dtype': str(dtype)[6:], 'requests': len(requests), 'context': CONTEXT, 'batch': BATCH,
                     'ours_requests_per_s': round(len(requests) / seconds['ours'], 1),
                     'hf_requests_per_s': round(len(requests) / seconds['hf'], 1), 'ratio': round(seconds['hf'] / seconds['ours'], 3)})
    write_results('evaluation', rows)


if __name__ == '__main__':
    main()
