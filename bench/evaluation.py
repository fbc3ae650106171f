"""Requests/s of our scorer beside lm-eval's own `hf` model on the same weights: 4-way choices after long contexts.

    python -m bench.evaluation [--toy]

Same precision and batch size; checks that log-likelihoods and greedy flags agree.
"""
import random
from collections.abc import Iterator

import torch

import model_standard
from bench import alternate, options, write_results
from common.export import to_llama
from common.scoring import Scorer

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
SHAPE, TOY_SHAPE = dict(n_layer=8, n_head=8, n_embd=512), dict(n_layer=1, n_head=2, n_embd=32)
CHOICES, CHOICE, BATCH = 4, 12, 16  # choices of a question, tokens of the longest, rows of a batch


def hf_model(llama):
    """lm-eval's adapter around a model; the tokenizer is not used, requests come as ids."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({'a': 0, '[EOS]': 1}, unk_token='a'))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token='[EOS]', pad_token='[EOS]')
    return HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=BATCH, device=DEVICE, max_length=1024)


def make_requests(n_questions: int, context_len: int) -> list[tuple]:
    """(context ids, continuation ids) of multiple-choice questions."""
    rng = random.Random(0)
    requests = []

    def ids(n):
        return [rng.randrange(50000) for _ in range(n)]
    for _ in range(n_questions):
        context = ids(rng.randint(context_len * 3 // 4, context_len * 5 // 4))
        requests += [(context, ids(rng.randint(CHOICE // 2, CHOICE))) for _ in range(CHOICES)]
    return requests


def compare(shape: dict, n_questions: int, context_len: int, rounds: int) -> Iterator[dict]:
    requests = make_requests(n_questions, context_len)
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = model_standard.Model(model_standard.Config(eos_id=None, **shape)).to(DEVICE).eval()
        hf = hf_model(to_llama(model).to(dtype))
        scorer = Scorer(model.to(dtype), 1024, batch_size=BATCH)

        def ours(scorer=scorer):
            return [(nats, is_greedy) for nats, is_greedy, _ in scorer.score(requests)]

        def theirs(hf=hf):
            return hf._loglikelihood_tokens([(('', ''), *request) for request in requests], disable_tqdm=True)
        if dtype == torch.float32:
            for (nats, is_greedy), (hf_nats, hf_is_greedy) in zip(ours(), theirs()):
                assert abs(nats - hf_nats) < 1e-3 and is_greedy == hf_is_greedy, (nats, hf_nats)
        seconds = alternate({'ours': ours, 'hf': theirs}, rounds, warmup=1)
        yield {'dtype': str(dtype)[6:], 'requests': len(requests), 'context': context_len, 'batch': BATCH,
               'ours_requests_per_s': round(len(requests) / seconds['ours'], 1),
               'hf_requests_per_s': round(len(requests) / seconds['hf'], 1),
               'ratio': round(seconds['hf'] / seconds['ours'], 3)}


def main(argv: list[str] | None = None) -> None:
    toy = '--toy' in options(argv, '--toy')
    rows = compare(TOY_SHAPE, 2, 20, rounds=1) if toy else compare(SHAPE, 8, 400, rounds=2)
    write_results('evaluation', rows, toy=toy)


if __name__ == '__main__':
    main()
