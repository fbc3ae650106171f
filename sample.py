"""Generates text from a trained run.

    python sample.py out/quickstart "Return the" "Raised when" --max_new_tokens=100
    python sample.py out/quickstart --file=prompts.txt --temperature=0        one prompt a line, greedy
    echo -n "Return the" | python sample.py out/quickstart                    a prompt from standard input

`generate` is the function to import: prompts of different lengths in one batch, no wait for the device between tokens.
"""
import codecs
import os
import sys
import time
from dataclasses import dataclass
from math import inf

os.environ.setdefault('GOMP_SPINCOUNT', '1000')  # before torch: threads that wait longer leave the core to other programs

import torch
import torch.nn as nn

from config import UserError, check_ranges, load_run, load_settings, pick_device, pick_dtype, sentences
from data import load_tokenizer


@dataclass
class Settings:
    max_new_tokens: int = 200  # tokens to generate for each prompt
    temperature: float = 1.0  # logits are divided by it; 0: always the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens that together reach this probability
    min_p: float | None = None  # keep tokens at least this fraction as likely as the likeliest
    seed: int = 0  # of the random numbers
    stop: str | None = None  # end a text where this string appears; \n means a line end
    file: str | None = None  # read prompts from this file, one a line
    truncate: bool = False  # keep the end of a prompt that is too long, instead of an error
    ignore_eos: bool = False  # go on after the end of a document
    device: str = 'auto'  # auto (cuda where there is one), cuda or cpu
    dtype: str = 'auto'  # float32, bfloat16; auto: bfloat16 on GPUs and on CPUs with bf16 units


# ---- sampling ----

def token_probs(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The distribution that tokens are drawn from. logits (..., V) -> probabilities (..., V), fp32.

    Filters apply one after the other, each to what the one before left: top-k, top-p, min-p. Temperature 0 puts all on the
    largest logit. Without a wait for the device.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # so that no temperature overflows
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float('-inf'))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)  # what came before reaches top_p already
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
    if min_p is not None:
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0)
    return probs / probs.sum(-1, keepdim=True)


def draw(probs, noise):
    """Tokens (B,) with probability probs (B, V): the winner of an exponential race, noise (B, V) ~ Exp(1). No host sync."""
    return (probs / noise.clamp(min=2 ** -24)).argmax(-1)  # noise rounded to 0 would let an impossible token win


class Decoder:
    """Decodes one token a row and step. On a GPU the step, model and sampling together, is one CUDA graph replay."""

    def __init__(self, model, cache, filters, generator):
        self.model, self.cache, self.filters, self.generator = model, cache, filters, generator
        self.greedy = filters['temperature'] == 0
        self.graph = None

    def pick(self, logits, noise):
        return logits.float().argmax(-1) if self.greedy else draw(token_probs(logits, **self.filters), noise)

    def first(self, tokens, lengths):
        """Reads the prompts (B, n), right-padded to lengths; returns the first new token of each row (B,)."""
        logits = self.model.extend(tokens, self.cache, lengths)
        self.noise = torch.empty_like(logits, dtype=torch.float32)
        self.tokens = torch.empty(len(tokens), dtype=torch.int64, device=tokens.device)
        self.tokens.copy_(self.pick(logits, self.fresh_noise()))
        return self.tokens

    def fresh_noise(self):
        return None if self.greedy else self.noise.exponential_(generator=self.generator)

    def next(self):
        """Appends the last tokens and returns the ones after them (B,)."""
        noise = self.fresh_noise()
        if self.tokens.device.type == 'cuda':
            if self.graph is None:
                self.capture()
            self.graph.replay()
        else:
            self.step(noise)
        return self.tokens

    def step(self, noise):
        self.tokens.copy_(self.pick(self.model.extend(self.tokens[:, None], self.cache), noise))

    def capture(self):
        """Records one step. The steps that warm up are rolled back, so the cache is as before."""
        tokens = self.tokens.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(self.noise)
                self.cache.rollback(1)
        torch.cuda.current_stream().wait_stream(side)
        self.tokens.copy_(tokens)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(self.noise)


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, min_p=None, seed=0, eos_id=None,
             finished=None, on_tokens=None, cache=None):
    """Continues each prompt. prompts: lists of token ids, of any lengths >= 1. Returns the new ids of each, up to and with eos_id.

    finished(row, new_ids) -> bool ends a row early; on_tokens(rows of new ids so far) is called as tokens arrive. Ids reach the
    host every step on CPU, every 16 on a GPU. Pass a cache from roomy_cache to look at it afterwards.
    """
    if not prompts or not all(prompts):
        raise ValueError('a prompt is empty: each needs at least one token')
    if cache is not None and cache.max_tokens < max(map(len, prompts)) + max_new_tokens:
        raise ValueError(f'the cache holds {cache.max_tokens} tokens a row: the longest prompt and {max_new_tokens} new ones do not fit')
    if max_new_tokens < 1:
        return [[] for _ in prompts]
    device = next(model.parameters()).device
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # where the graph is captured
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts):
        row[:len(prompt)] = torch.tensor(prompt)
    if cache is None:
        cache = roomy_cache(model, prompts, max_new_tokens)
    generator = torch.Generator(device).manual_seed(seed)
    decoder = Decoder(model, cache, dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), generator)
    drawn = torch.empty(len(prompts), max_new_tokens, dtype=torch.int64, device=device)
    new, done, seen = [[] for _ in prompts], [False] * len(prompts), 0
    every = 16 if device.type == 'cuda' else 1
    for i in range(max_new_tokens):
        drawn[:, i] = decoder.first(tokens.to(device), lengths.to(device)) if i == 0 else decoder.next()
        if (i + 1) % every and i + 1 < max_new_tokens:
            continue
        for row, ids in enumerate(drawn[:, seen:i + 1].tolist()):
            for token in ids:
                if not done[row]:
                    new[row].append(token)
                    done[row] = token == eos_id or (finished is not None and finished(row, new[row]))
        seen = i + 1
        if on_tokens:
            on_tokens(new)
        if all(done):
            break
    return new


def roomy_cache(model, prompts, max_new_tokens, max_run=1):
    """A cache with room for prompts and new tokens. On CPU it is fp32 for a few rows, where that is faster (bench/attention_cpu.py)."""
    few = next(model.parameters()).device.type == 'cpu' and len(prompts) < 16
    longest = max(map(len, prompts)) + max_new_tokens
    return model.new_cache(len(prompts), longest, max_run, dtype=torch.float32 if few else None)


# ---- a model made ready for decoding on CPU ----

def pack_weights(model):
    """Stores every linear layer's weight in the layout of the CPU's matrix units, where this PyTorch can (private operators).

    For inference only, in place; the plain weights stay beside the packed ones. Decoding is bound by reading weights, and this
    reads them in order.
    """
    reorder = getattr(torch.ops.mkldnn, '_reorder_linear_weight', None)
    if reorder is None or not torch.backends.mkldnn.is_available():
        return model
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == 'cpu':
            try:
                packed = reorder(module.weight.detach())
                apply = lambda x, w=packed, b=module.bias: torch.ops.mkldnn._linear_pointwise(x, w, b, 'none', [], '')
                apply(torch.zeros(1, module.in_features, dtype=module.weight.dtype))
            except RuntimeError:  # this dtype has no such operator here
                return model
            module.forward = apply
    return model


# ---- the command line ----

def read_prompts(s, texts):
    if s.file:
        if not os.path.isfile(s.file):
            raise UserError(f'there is no prompt file {s.file}')
        with open(s.file, encoding='utf-8', errors='replace') as file:
            texts = texts + [line.rstrip('\n') for line in file if line.strip()]
    elif not texts and not sys.stdin.isatty():
        texts = [sys.stdin.buffer.read().decode(errors='replace')]
    if not texts or not all(texts):
        raise UserError('a prompt is empty: give text after the run folder, with --file or on standard input')
    return [text.encode(errors='replace').decode() for text in texts]


def fit(ids, s, block_size):
    """The prompt's ids if prompt and new tokens fit the context, its end with --truncate, else a UserError."""
    room = block_size - s.max_new_tokens
    if room < 1:
        raise UserError(f'max_new_tokens = {s.max_new_tokens} leaves no room for a prompt in the context of {block_size} tokens: lower it')
    if len(ids) > room and not s.truncate:
        raise UserError(f'a prompt of {len(ids)} tokens and {s.max_new_tokens} new ones do not fit the context of {block_size}: '
                        'lower max_new_tokens, or use --truncate to keep the end of the prompt')
    return ids[-room:]


def write_texts(s, model, tokenizer, record, texts, prompts):
    """Generates and prints: one prompt as its tokens arrive, several one after the other."""
    pack_weights(model)
    cache = roomy_cache(model, prompts, s.max_new_tokens)
    stop = s.stop and s.stop.replace('\\n', '\n').encode()
    ends = [None] * len(prompts)  # where the stop string starts, in bytes

    def finished(row, ids):
        at = tokenizer.decode(ids).find(stop) if stop else -1
        ends[row] = at if at >= 0 else None
        return at >= 0

    def text_of(row, ids):
        return tokenizer.decode(ids)[:ends[row]]

    utf8 = codecs.getincrementaldecoder('utf-8')('replace')
    shown = 0

    def stream(rows):
        nonlocal shown
        safe = text_of(0, rows[0])
        if stop and ends[0] is None:  # the stop string may have begun
            safe = safe[:max(shown, len(safe) - len(stop) + 1)]
        print(utf8.decode(safe[shown:]), end='', flush=True)
        shown = max(shown, len(safe))

    one = len(prompts) == 1
    if one:
        print(texts[0], end='', flush=True)
    start = time.perf_counter()
    new = generate(model, prompts, s.max_new_tokens, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p,
                   seed=s.seed, eos_id=None if s.ignore_eos else record['data']['eos_id'], finished=finished if stop else None,
                   on_tokens=stream if one else None, cache=cache)
    seconds = time.perf_counter() - start
    if one:
        print(utf8.decode(text_of(0, new[0])[shown:], final=True))
    else:
        for row, text in enumerate(texts):
            print(f'--- {row + 1}\n{text}{text_of(row, new[row]).decode(errors="replace")}')
    count = sum(map(len, new))
    print(f'{count} tokens in {seconds:.2f} s, {count / seconds:,.1f} tokens/s; cache {cache.nbytes / 2**20:.1f} MiB', file=sys.stderr)


def main():
    with sentences():
        s, positional, _ = load_settings(Settings, sys.argv[1:])
        if not positional:
            raise UserError('which run? python sample.py RUN_FOLDER "a prompt" --max_new_tokens=100')
        check_ranges(s, seed=(0, 2 ** 63), temperature=(0, inf), max_new_tokens=(1, inf), top_k=(1, inf), top_p=(1e-9, 1), min_p=(0, 1))
        texts = read_prompts(s, positional[1:])
        device = pick_device(s.device)
        model, record = load_run(positional[0], device, pick_dtype(s.dtype, device))
        tokenizer = load_tokenizer(record['data']['tokenizer'])
        prompts = [fit(tokenizer.encode(text), s, record['settings']['block_size']) for text in texts]
        write_texts(s, model, tokenizer, record, texts, prompts)


if __name__ == '__main__':
    main()
