"""The decoding cache of recurrent models (model_gdn.py, model_gpn.py). Attention has `KVCache`."""
import torch


class StateCache:
    """What a recurrent model keeps of each row's last tokens: states, or the inputs of a layer.

    windows: {name: initial entries (B, size, ...)}. The entry of position p is in slot p % size, so
    a new token replaces the oldest one, and a rollback only lowers `lengths`. With 4 slots:

        positions  0 1 2 3 4 5      slots  [4] [5] [2] [3]      6 is next, in place of 2

    A model that reads k tokens back needs k + max_call slots: a rollback does not restore what the
    forgotten tokens replaced. A call:

        cache.begin(n, lengths)
            cache.last(name, k)     entries of the k tokens before; at first, initial ones
            cache.push(name, x)     store the new tokens' entries
        cache.end(h)                h of each row's last token

    model_gpn.py begins a call for each token, and raises `lengths` itself instead of `end`.
    """

    def __init__(self, windows, max_call):
        first = next(iter(windows.values()))
        self.windows, self.max_call, self.size = windows, max_call, first.shape[1]
        self.batch_idx = torch.arange(len(first), device=first.device).unsqueeze(1)
        self.arange = torch.arange(self.size, device=first.device)
        self.lengths = torch.zeros(len(first), device=first.device, dtype=torch.int64)  # tokens held by each row

    @property
    def nbytes(self):
        """Return the bytes of all tensors."""
        return sum(x.nbytes for x in (*vars(self).values(), *self.windows.values()) if isinstance(x, torch.Tensor))

    def begin(self, n, lengths=None):
        """Start a call of n tokens. lengths: (B,) tokens per right-padded row, or None: n in each.

        Finds which tokens of the call to store, the last `size` of each row, and in which slots.
        For size 4, rows that hold 6 tokens, and n = 3:

            length   tokens stored   slots
              3        0  1  2       2 3 0
              2        0  1  1       2 3 3    static shapes: the last one again
              0       -1 -1 -1       1 1 1    none: position 5 again, x[:, 0] must be its entry
        """
        if lengths is None:
            self.n_new, tokens = torch.full_like(self.lengths, n), self.arange[:n] + max(n - self.size, 0)
        else:
            self.n_new, last = lengths, lengths[:, None] - 1
            tokens = torch.minimum((last - self.size + 1).clamp(min=0) + self.arange[:n], last)
        self.stored = tokens.clamp(min=0)  # which tokens of a push to store
        self.stored_slots = (self.lengths[:, None] + tokens) % self.size  # where to store them
        self.slots_by_age = (self.lengths[:, None] + self.arange) % self.size  # all slots, the oldest first

    def last(self, name, k):
        """Return the entries (B, k, ...) of the k <= size tokens before the call, oldest first."""
        return self.windows[name][self.batch_idx, self.slots_by_age[:, self.size - k:]]

    def push(self, name, x):
        """Store x (B, n, ...), the entries of the call's tokens: each row's last `size`."""
        window = self.windows[name]
        window[self.batch_idx, self.stored_slots] = x[self.batch_idx, self.stored].to(window.dtype)

    def end(self, h):
        """Finish a call. Returns h (B, C) of each row's last token, given h (B, n, C) of all."""
        self.lengths += self.n_new
        return h[self.batch_idx[:, 0], self.n_new - 1]

    def rollback(self, n):
        """Forget the last n <= max_call tokens of the last call. n: int, or (B,) int64 by row."""
        self.lengths -= n
