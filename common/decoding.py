"""Decoding: the distribution that tokens are drawn from, drawing them, and `generate`."""
import torch
import torch.nn as nn


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


def record_graph(step, undo):
    """step() as a CUDA graph, not run yet. undo() takes back one of the steps that warm up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
            undo()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


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
            self.graph = self.graph or self.capture()
            self.graph.replay()
        else:
            self.step(noise)
        return self.tokens

    def step(self, noise):
        self.tokens.copy_(self.pick(self.model.extend(self.tokens[:, None], self.cache), noise))

    def capture(self):
        """One step as a CUDA graph."""
        tokens = self.tokens.clone()

        def undo():
            self.cache.rollback(1)
            self.tokens.copy_(tokens)
        return record_graph(lambda: self.step(self.noise), undo)


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
    tokens, lengths = pad(prompts, device)
    if cache is None:
        cache = roomy_cache(model, prompts, max_new_tokens)
    generator = torch.Generator(device).manual_seed(seed)
    decoder = Decoder(model, cache, dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), generator)
    drawn = torch.empty(len(prompts), max_new_tokens, dtype=torch.int64, device=device)
    new, done, seen = [[] for _ in prompts], [False] * len(prompts), 0
    every = 16 if device.type == 'cuda' else 1
    for i in range(max_new_tokens):
        drawn[:, i] = decoder.first(tokens, lengths) if i == 0 else decoder.next()
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


def pad(prompts, device):
    """Lists of ids -> (B, n), right-padded, and their lengths (B,)."""
    lengths = torch.tensor([len(p) for p in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts):
        row[:len(prompt)] = torch.tensor(prompt)
    return tokens.to(device), lengths.to(device)


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
