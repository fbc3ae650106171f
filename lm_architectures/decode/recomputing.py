"""Decoding for models without a cache: every step recomputes the whole text."""
import torch

MAX_LOGITS = 2 ** 26  # maximum number of logits in one call


class Recomputing:
    """Adapter that adds `new_cache` and `extend` to a model with `logits(idx)`.

    The cache holds only the text, has no `hidden`, and steps are not captured as CUDA graphs.
    """

    has_graphs = False

    def __init__(self, model):
        self.model, self.config, self.parameters = model, model.config, model.parameters

    def new_cache(self, batch_size, max_tokens, max_call=1, device=None, dtype=None):
        return TextCache(batch_size, max_tokens, device or next(self.parameters()).device)

    @torch.no_grad()
    def extend(self, tokens, cache, lengths=None, all_positions=False):
        """Append tokens (B, n), right-padded to lengths (B,) >= 1 if given, to the cache.

        Returns the last token's logits of each row (B, V), or all (B, n, V) with all_positions.
        """
        n = tokens.shape[1]
        positions = cache.lengths[:, None] + torch.arange(n, device=tokens.device)
        cache.tokens.scatter_(1, positions.clamp(max=cache.max_tokens), tokens)  # padding is overwritten later
        cache.lengths += n if lengths is None else lengths
        text_len = int(cache.lengths.max())
        if text_len > cache.max_tokens:
            raise ValueError(f'the cache has room for {cache.max_tokens} tokens per row, but {text_len} are needed')
        wanted = positions.clamp(max=text_len - 1) if all_positions else cache.lengths[:, None] - 1
        n_rows = max(1, MAX_LOGITS // (text_len * self.config.vocab_size))
        parts = zip(cache.tokens[:, :text_len].split(n_rows), wanted.split(n_rows))
        logits = torch.cat([self.model.logits(text).take_along_dim(at[:, :, None], 1) for text, at in parts])
        return logits if all_positions else logits[:, 0]


class TextCache:
    """The text of each row: tokens (B, max_tokens + 1), filled up to `lengths` (B,)."""

    def __init__(self, batch_size, max_tokens, device):
        self.max_tokens = max_tokens
        self.tokens = torch.zeros(batch_size, max_tokens + 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.nbytes = self.tokens.nbytes + self.lengths.nbytes

    def rollback(self, n):
        """Remove the last n tokens: n is an int, or (B,) int64 with one count per row."""
        self.lengths -= n
