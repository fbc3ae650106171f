"""Attention by a pattern, and what else models share: KV cache, RoPE, loss, checks of sizes.

Say which keys a query sees, then train and decode with it at full speed. A pattern is a function
`sees(q, k)` of `Tokens` in the model file, True where query q attends to key k. The standard one:

    def sees(self, q, k):
        return (k.pos <= q.pos) & (q.pos - k.pos <= self.reach) & (k.pos >= q.doc_start)

All masks and the size of the KV cache are derived from it, so an edit both trains and decodes:

    mask = make_mask(model, T, device, doc_start)   training: once per step, for all layers
    out = attention(q, k, v, mask)                  in each layer: softmax(q k^T / sqrt(D)) v
    cache = KVCache(model, batch_size, max_tokens)  decoding: its docstring has an example

If layers differ, `sees` is a list with a pattern for each layer, and masks are lists, too. A method
`score_bias(q, k, head)` adds to the scores. A model also needs `embed.weight`, and in `config`
n_layer, n_embd, n_head, n_kv_head, head_size, rope_theta and eos_id. Read patterns to attention
first, then any other section.

B batch, T positions, D head size, n tokens of a call, S streams, C width, V vocabulary. With two
streams, x (stream 0) and rho (stream 1), a sequence is [x | rho]: T positions of x, then T of rho.
In grouped-query attention, H query heads share HK key heads, else HK = H. q is (B, n_q, H, D), k
and v are (B, n_k, HK, D), and query head h reads key head h // (H / HK).
"""
import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import checkpoint

TILE_QUERIES, KEY_BLOCK = 128, 64  # CPU tiles: queries, over all streams; keys are loaded in whole blocks
FLEX_BLOCK = 128  # queries and keys of a block of FlexAttention's mask
CPU_CHUNK, GPU_CHUNK = 2 ** 26, 2 ** 28  # logits (or other values) of a chunk of the loss
MAX_SAVED_SCORES = 2 ** 22  # queries x keys up to which tiles save probabilities for the backward pass
EMPTY_SLOT = 2 ** 30  # position of empty cache slots: later than any query

compiled = functools.cache(torch.compile)  # called where it is needed, because it imports the compiler (1 s)


def outside_graphs(function):
    """Make a function run eagerly inside a compiled model (decorator)."""
    disabled = torch._disable_dynamo(function)  # torch.compiler.disable would import the compiler

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)
    # else all decorated functions share one limit of recompilations, and are skipped after it
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return call


# ---- patterns ----

class Tokens(NamedTuple):
    """Queries or keys of a pattern: integer tensors that broadcast against each other."""

    pos: torch.Tensor  # position in the sequence
    stream: torch.Tensor  # 0, or with two streams 0 for x and 1 for rho
    doc_start: torch.Tensor | int = 0  # queries only: position of the first token of the query's document


def document_starts(idx, eos_id):
    """Return where each token's document starts: (B, T) int64, or None if eos_id is None.

    idx: (B, T). An eos belongs to the document that it ends. The first token starts a document.
    """
    if eos_id is None:
        return None
    position = torch.arange(idx.shape[1], device=idx.device).expand_as(idx)
    starts = F.pad(idx[:, :-1] == eos_id, (1, 0))
    return torch.where(starts, position, 0).cummax(1).values


def sequence(T, streams, device, doc_start=None):
    """Return the `Tokens` of positions 0 ... T - 1 of S streams: int32 for speed, (1 or B, S T)."""
    return stream_tokens(torch.arange(T, device=device, dtype=torch.int32).unsqueeze(0), streams, doc_start)


def stream_tokens(pos, streams, doc_start=None):
    """Return the `Tokens` of [x | rho] or of one stream. pos, doc_start: (1 or B, n)."""
    stream = torch.cat([torch.full_like(pos, stream) for stream in streams], 1)
    doc_start = torch.zeros_like(pos) if doc_start is None else doc_start.to(pos.dtype)
    return Tokens(pos.repeat(1, len(streams)), stream, doc_start.repeat(1, len(streams)))


def _seen(sees, q, k):
    """Return the pattern as booleans (1 or B, n_q, n_k), given tokens with fields (1 or B, n)."""
    return sees(Tokens(*(x.unsqueeze(2) for x in q)), Tokens(k.pos.unsqueeze(1), k.stream.unsqueeze(1)))


def each_layer(patterns, make):
    """Return make(pattern); for a list with a pattern for each layer, a list (equal ones share)."""
    if not isinstance(patterns, list):
        return make(patterns)
    made = {pattern: make(pattern) for pattern in dict.fromkeys(patterns)}
    return [made[pattern] for pattern in patterns]


# ---- masks ----

class Mask(NamedTuple):
    """A pattern prepared for `attention`, made by `make_mask` or `Piece.mask`."""

    kind: str  # causal, tiles, flex or dense
    data: Any = None  # tiles: list of `_tiles`; flex: result of `flex_mask`; dense: see `dense_mask`


@outside_graphs
def make_mask(model, T, device, doc_start=None, keys=(0,), queries=None):
    """Prepare the attention of whole sequences by model.sees: once per step, for all layers.

    doc_start: (B, T) int64 from `document_starts`, or None for one document; keys, queries: tuples
    of streams (queries=None: the same as keys). The model keeps a mask for the next step, unless
    there are documents or a score_bias, or `sees` reads a tensor.
    """
    queries, device, trains = queries or keys, torch.device(device), torch.is_grad_enabled()
    compile_for_T = trains or T % FLEX_BLOCK == 0  # such a T recurs, unlike most lengths of prompts
    may_keep = doc_start is None and not hasattr(model, 'score_bias')
    if may_keep:
        kept, key = vars(model).setdefault('kept_masks', NotCopied()), _mask_key(model, T, device)
        kept_key, mask = kept.get((keys, queries), (None, None))
        if kept_key == key:
            return mask
    with torch.inference_mode(False), torch.set_grad_enabled(trains):  # a mask may be kept for other modes
        mask = each_layer(model.sees, lambda f: _new_mask(model, f, T, device, doc_start, keys, queries, compile_for_T))
    if may_keep and not reads_tensors(model.sees, device):
        kept[keys, queries] = key, mask
    return mask


def _new_mask(model, sees, T, device, doc_start, keys, queries, compile_for_T):
    """Return the mask of whole sequences. compile_for_T: FlexAttention may compile kernels."""
    c, score_bias = model.config, getattr(model, 'score_bias', None)
    q, k = sequence(T, queries, device, doc_start), sequence(T, keys, device)
    may_be_causal = keys == queries == (0,) and doc_start is None and score_bias is None  # the triangle
    tiles_are_faster = torch.is_grad_enabled() or torch.is_autocast_enabled('cpu')  # in the backward pass and in bf16
    if may_be_causal and (device.type == 'cuda' or device.type == 'cpu' and not tiles_are_faster):
        seen = _seen(sees, q, k)[0]
        if torch.equal(seen, torch.ones_like(seen).tril()):
            return Mask('causal')
    if device.type == 'cpu':
        return Mask('tiles', list(_tiles(sees, score_bias, c.n_head, T, q, k)))
    if device.type == 'cuda' and 16 <= c.head_size <= 256 and compile_for_T:
        return Mask('flex', flex_mask(sees, score_bias, T, device, doc_start, keys, queries))
    return dense_mask(model, sees, q, k)


def _mask_key(model, T, device):
    """Return all that a kept mask depends on: if it changes, the mask is made again.

    Of what `sees` may read, it has numbers, strings and None of the model and its config, also in
    lists, tuples and dicts. Globals, arrays and attributes of other objects are not noticed.
    """
    values, structure = tree_flatten((vars(model), vars(model.config)))
    plain = [x for x in values if isinstance(x, (int, float, str, type(None)))]
    # not the bound method, which would keep the model alive
    code = each_layer(model.sees, lambda f: (getattr(f, '__func__', f), id(getattr(f, '__self__', None))))
    return T, device, torch.is_grad_enabled(), torch.is_autocast_enabled('cpu'), code, plain, structure


class NotCopied(dict):
    """What a module keeps, such as {(keys, queries): (key, mask)}. Its copies start with none."""

    def __reduce__(self):
        return NotCopied, ()


def reads_tensors(patterns, device):
    """Return True if patterns read tensors besides their arguments. Tries them on one token."""
    token, others = sequence(1, (0,), device), []
    known = [*token]  # the arguments, and what is computed from them

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            others.extend(x for x in read if all(x is not y for y in known))
            result = function(*args, **(kwargs or {}))
            known.extend(tree_leaves(result))
            return result
    with Watch():
        each_layer(patterns, lambda sees: _seen(sees, token, token))
    return bool(others)


# ---- attention ----

def attention(q, k, v, mask):
    """Return softmax(q k^T / sqrt(D)) v under a mask: (B, n_q, H, D).

    q: (B, n_q, H, D); k, v: (B, n_k, HK, D); mask: from `make_mask` or `Piece.mask`, or a function
    of q, k and v, such as a kernel of scans/attention.py.
    """
    if callable(mask):
        return mask(q, k, v)
    if isinstance(mask, list):
        raise ValueError('sees is a list, and so is the mask: for block, layer_mask in zip(self.blocks, mask): ...')
    if mask.kind == 'dense':
        return _dense_sdpa(q, k, v, mask.data)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, n, D)
    if mask.kind == 'flex':
        return _flex_attention(q, k, v, *mask.data).transpose(1, 2)
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if mask.kind == 'tiles':
        return _tiled_attention(q, k, v, mask.data).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# ---- dense masks: decoding, and what no other kernel runs ----

def dense_mask(model, sees, q, k, dtype=None):
    """Return the Mask of tokens q, k with fields (1 or B, n): (1 or B, 1 or HK, G n_q, n_k).

    The G = H / HK query heads of a key head become G n_q rows of one product, see `_dense_sdpa`.
    dtype: of cached keys, to make it additive once; PyTorch would convert booleans in every layer.
    """
    seen, c, score_bias = _seen(sees, q, k).unsqueeze(1), model.config, getattr(model, 'score_bias', None)
    if score_bias is not None or dtype is not None:
        seen = _additive(seen, score_bias, c.n_head, q, k)
    G = c.n_head // c.n_kv_head
    if score_bias is None:
        seen = seen.expand(-1, G, -1, -1)  # from (1 or B, 1, n_q, n_k); with a bias, all H heads are there
    seen = seen.unflatten(1, (-1, G)).flatten(2, 3)
    return Mask('dense', seen if dtype is None else seen.to(dtype))


def _additive(seen, score_bias, n_head, q, k):  # seen: (1 or B, 1, n_q, n_k)
    """Return score_bias (None: 0), and -inf where unseen: (1 or B, 1 or H, n_q, n_k)."""
    if score_bias is None:
        return torch.where(seen, 0.0, float('-inf'))
    q = Tokens(*(x[:, None, :, None] for x in q))
    k = Tokens(*(x[:, None, None, :] for x in (k.pos, k.stream)))
    scores = at_least_fp32(score_bias(q, k, torch.arange(n_head, device=seen.device)[:, None, None]))
    return torch.where(seen, scores, float('-inf')).expand(-1, n_head, -1, -1)


def _dense_sdpa(q, k, v, seen):
    """Run PyTorch's attention with the data of a `dense_mask`, in the dtype of the keys."""
    dtype, n, G = q.dtype, q.shape[1], q.shape[2] // k.shape[2]
    # (B, n, H, D) -> (B, n, HK, G, D) -> (B, HK, G, n, D) -> (B, HK, G n, D)
    q = q.to(k.dtype).unflatten(2, (-1, G)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = seen if seen.dtype == torch.bool else seen.to(k.dtype)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), seen)
    return out.unflatten(2, (G, n)).permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)  # and back


# ---- tiles: on a CPU ----

def _tiles(sees, score_bias, n_head, T, q, k):
    """Yield each tile's queries and keys (lists of slices), and its additive mask.

    Queries are the same positions of all streams. Key blocks that none of them sees are left out.
    """
    starts = range(0, q.pos.shape[1], T)  # of the streams
    step = TILE_QUERIES // len(starts)
    for a in range(0, T, step):
        q_slices = [slice(start + a, start + min(a + step, T)) for start in starts]
        q_tile = Tokens(*(_take(x, q_slices, 1) for x in q))
        seen = _seen(sees, q_tile, k)
        k_slices = _key_ranges(seen.any(0).any(0), T)
        if not k_slices:
            raise ValueError('sees lets some queries attend to no key: every token must see at least one')
        seen, k_tile = _take(seen, k_slices, 2).unsqueeze(1), Tokens(*(_take(x, k_slices, 1) for x in k))
        yield q_slices, k_slices, _additive(seen, score_bias, n_head, q_tile, k_tile)


def _key_ranges(needed, T):
    """Return slices of whole key blocks that cover all needed keys. needed: (S T,) bool."""
    blocks = F.pad(needed.view(-1, T), (0, -T % KEY_BLOCK)).unflatten(1, (-1, KEY_BLOCK)).any(2)
    steps = F.pad(blocks.long(), (1, 1)).diff()  # 1 where a range of blocks starts, -1 where it has ended
    edges = zip((steps == 1).nonzero().tolist(), (steps == -1).nonzero().tolist())
    return [slice(stream * T + start * KEY_BLOCK, stream * T + min(stop * KEY_BLOCK, T))
            for (stream, start), (_, stop) in edges]


@outside_graphs  # the compiler would unroll the tiles of all layers and take minutes
def _tiled_attention(q, k, v, tiles):
    return _TiledAttention.apply(q, k, v, tiles, *(additive for *_, additive in tiles if additive.requires_grad))


class _TiledAttention(torch.autograd.Function):
    """Attention in tiles. q: (B, H, n_q, D); k, v: (B, H, n_k, D); tiles: from `_tiles`."""

    @staticmethod
    def forward(ctx, q, k, v, tiles, *_):  # then masks with learned biases, which get gradients
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (q * q.shape[-1] ** -0.5).contiguous(), k.contiguous(), v.contiguous()  # q stays scaled
            out, saved = torch.empty_like(q), []
            saves = any(ctx.needs_input_grad) and q.shape[2] * k.shape[2] <= MAX_SAVED_SCORES
            for q_slices, k_slices, additive in tiles:
                p = (_take(q, q_slices) @ _take(k, k_slices).mT).add_(additive).softmax(-1)
                _put(out, q_slices, p @ _take(v, k_slices))
                if saves:
                    saved.append(p)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.tiles = tiles
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *saved = ctx.saved_tensors
        learned, wide = [], torch.promote_types(k.dtype, torch.float32)  # wide: for sums over many tiles
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for i, (q_slices, k_slices, additive) in enumerate(ctx.tiles):
            q_tile, k_tile, grad_tile = _take(q, q_slices), _take(k, k_slices), _take(grad, q_slices)
            p = saved[i] if saved else (q_tile @ k_tile.mT).add_(additive).softmax(-1)
            dp = grad_tile @ _take(v, k_slices).mT
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            if additive.requires_grad:
                learned.append(ds.to(additive.dtype).sum_to_size(additive.shape))
            _put(dq, q_slices, ds @ k_tile)
            _put(dk, k_slices, ds.mT @ q_tile, add=True)
            _put(dv, k_slices, p.mT @ grad_tile, add=True)
        return dq * q.shape[-1] ** -0.5, dk.to(k.dtype), dv.to(v.dtype), None, *learned


def _take(x, slices, dim=2):
    """Concatenate slices of x along a dimension, of positions in x (B, H, n, D)."""
    parts = [x.narrow(dim, s.start, s.stop - s.start) for s in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _put(x, slices, part, add=False):
    """Write `part` into the slices of x, or add it to them: the inverse of `_take`."""
    for s, piece in zip(slices, part.split([s.stop - s.start for s in slices], 2)):
        here = x[:, :, s]
        here.add_(piece) if add else here.copy_(piece)


# ---- FlexAttention: on a GPU ----

def flex_mask(sees, score_bias, T, device, doc_start, keys, queries):
    """Make FlexAttention's BlockMask and score_mod (None without a `score_bias`).

    The BlockMask has the 128 x 128 blocks to visit and the masks inside them. It equals PyTorch's
    `create_block_mask`, whose sorts take minutes to compile.
    """
    from torch.nn.attention.flex_attention import BlockMask
    def position_and_stream(index, streams):
        second = (index >= T).int()  # cheaper than % and //, and than a gather
        return index - T * second, streams[0] + second

    def tokens(b, q_idx, k_idx):
        pos, stream = position_and_stream(q_idx, queries)
        start = torch.zeros_like(pos) if doc_start is None else doc_start[b, pos]
        return Tokens(pos, stream, start), Tokens(*position_and_stream(k_idx, keys))

    def mask_mod(b, h, q_idx, k_idx):
        return sees(*tokens(b, q_idx, k_idx))

    def score_mod(score, b, h, q_idx, k_idx):
        return score + score_bias(*tokens(b, q_idx, k_idx), h)

    B, n_q, n_k = 1 if doc_start is None else len(doc_start), len(queries) * T, len(keys) * T
    make_lists = compiled(_block_lists) if torch.device(device).type == 'cuda' else _block_lists
    with torch.no_grad():  # otherwise compiled twice, with and without gradients
        lists = make_lists(mask_mod, B, n_q, n_k, device)
    block_mask = BlockMask((n_q, n_k), *lists, BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK), mask_mod=mask_mod)
    return block_mask, None if score_bias is None else score_mod


def _block_lists(mask_mod, B, n_q, n_k, device):
    """Return a BlockMask's tensors: how many blocks are seen, and which, by row, then by column."""
    q_blocks, k_blocks = (torch.arange(-(-n // FLEX_BLOCK) * FLEX_BLOCK, device=device).view(-1, FLEX_BLOCK)
                          for n in (n_q, n_k))
    b, q, k = torch.arange(B, device=device).view(-1, 1, 1, 1, 1), q_blocks[:, None, :, None], k_blocks[:, None]
    seen = mask_mod(b, 0, q.clamp(max=n_q - 1), k.clamp(max=n_k - 1)) & (q < n_q) & (k < n_k)
    count = seen.expand(B, -1, -1, -1, -1).sum((3, 4)).unsqueeze(1)  # (B, 1, blocks of queries, blocks of keys)
    blocks = torch.stack([(count > 0) & (count < FLEX_BLOCK ** 2), count == FLEX_BLOCK ** 2])  # in part; as a whole
    lists = []
    for x in (blocks, blocks.mT.contiguous()):
        # a stable sort, True first: for a row 0 1 0 1, n_true is 2, rank 2 0 3 1, and order 1 3 0 2
        n_true = x.sum(-1, keepdim=True)
        rank = torch.where(x, x.cumsum(-1) - 1, n_true + (~x).cumsum(-1) - 1)
        order = rank.scatter(-1, rank, torch.arange(x.shape[-1], device=device).expand_as(rank)).int()
        (n_partial, n_full), (partial, full) = n_true.squeeze(-1).int(), order
        lists += [n_partial, partial, n_full, full]
    return lists


def _flex_attention(q, k, v, block_mask, score_mod):
    from torch.nn.attention.flex_attention import flex_attention
    q, k = q.to(v.dtype), k.to(v.dtype)  # from PyTorch 2.12 on, autocast leaves them in fp32 after qk-norm
    run = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
    stages = {} if score_mod is None else {'num_stages': 2}  # with 3, tables exceed the shared memory of an H100
    # not the kernel for fewer than 128 queries: wrong strides in PyTorch 2.11 (issue 175325)
    return run(q, k, v, score_mod, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1],
               kernel_options={'BACKEND': 'TRITON', **stages})


# ---- the KV cache ----

class KVCache:
    """KV cache of up to max_tokens tokens per row. Static shapes, so a step can be a CUDA graph.

        for piece in cache.pieces(tokens, lengths):     usually one, with all new tokens
            mask = piece.mask()                         shared by all layers
            ... in each layer: k, v = cache.append(layer, k, v); attention(q, k, v, mask)
        last = cache.end(h)                         h of each row's last token
        cache.rollback(n)                           forget the last n tokens

    Each slot's position and stream are recorded, and `sees` makes masks of them. If no query sees a
    stream further back than r positions, the stream is a ring of r + piece_len slots, else it has
    max_tokens slots. The positions that the slots hold if r = 2, max_call = 2 and piece_len = 4:

        call             slots 0 to 5        lengths
        a prompt of 5    0  1  2  3  4  -    5
        a draft of 2     6  1  2  3  4  5    7    6 replaces 0, which is out of reach
        rollback(1)      6  1  2  3  4  5    6    6 stays in its slot, where the next 6 goes
        2 more tokens    6  7  2  3  4  5    8    6 and 7 replace the old 6 and 1

    max_call: the most tokens of a call with static shapes and rollback; n_streams: 2 for [x | rho].
    """

    def __init__(self, model, batch_size, max_tokens, max_call=1, device=None, dtype=None, n_streams=1, n_layer=None):
        c, weight = model.config, model.embed.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        self.model, self.max_tokens, self.max_call = model, max_tokens, max_call
        self.n_streams, self.eos_id = n_streams, c.eos_id
        self.piece_len = max(max_call, 4)  # shorter pieces would make long calls slow
        self.slots = each_layer(model.sees, lambda sees: Slots(
            sees, batch_size, max_tokens, self.piece_len, n_streams, device))
        layers = self.slots if isinstance(self.slots, list) else [self.slots]
        self.layers = layers + layers[-1:] * ((n_layer or c.n_layer) - len(layers))  # further blocks: the last pattern
        shapes = [(batch_size, c.n_kv_head, slots.spare + 1, c.head_size) for slots in self.layers]
        self.k, self.v = ([torch.zeros(shape, device=device, dtype=dtype) for shape in shapes] for _ in range(2))
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.int64)  # tokens held by each row
        self.doc_start = self.lengths.new_zeros(batch_size, max_tokens + 2)  # by position; + 2: padding, and after it
        self.hidden = torch.zeros(batch_size, max_call, c.n_embd, device=device, dtype=dtype)  # last h of the last call
        self.last = torch.full((batch_size,), -1, device=device)  # index of each row's last token in `hidden`, or -1
        self.rope = rope_table(torch.arange(max_tokens + 1, device=device), c.head_size, c.rope_theta,
                               getattr(c, 'rope_scaling', None))  # + 1: padding is at position max_tokens at most
        self.batch_idx = torch.arange(batch_size, device=device).unsqueeze(1)
        self.piece, self.drafted = None, 0  # the current piece; tokens drafted since the last call or rollback

    @property
    def nbytes(self):
        """Return the bytes of all tensors."""
        held = tree_leaves([vars(each) for each in (self, *dict.fromkeys(self.layers))])
        return sum(x.nbytes for x in held if isinstance(x, torch.Tensor))

    def pieces(self, tokens, lengths=None, piece_len=None):
        """Yield tokens (B, n) as `Piece`s. lengths: (B,) tokens per right-padded row, each >= 1.

        There is one piece if n <= max_call or the cache is empty. Longer calls on a cache with a
        ring buffer are split into pieces that fit in it. piece_len sets a shorter length. Raises
        ValueError if a row is full; on a GPU only for n > max_call, because it needs a sync.
        """
        n = tokens.shape[1]
        self.n_new = torch.full_like(self.lengths, n) if lengths is None else lengths  # new tokens in this call
        is_long = n > self.max_call
        if is_long or tokens.device.type == 'cpu':
            longest = int((self.lengths + self.n_new).max())
            if longest > self.max_tokens:
                raise ValueError(f'a row of {longest} tokens does not fit a cache of max_tokens = {self.max_tokens}')
        is_prefill = is_long and piece_len is None and not self.lengths.any()
        if piece_len is None:
            has_ring = min(min(slots.sizes) for slots in self.layers) < self.max_tokens
            piece_len = self.piece_len if has_ring and is_long and not is_prefill else n
        for a in range(0, n, piece_len):
            part = tokens[:, a:a + piece_len]
            self.piece = Piece(self, part, (self.n_new - a).clamp(0, part.shape[1]), is_prefill)
            yield self.piece
            self.lengths += self.piece.n_new

    def append(self, layer, k, v):
        """Store a piece's k and v (B, S n, HK, D), S streams, and return all that it attends to.

        These are the piece itself in a prefill, otherwise views of the slots covered by
        `Piece.mask`. Calling it again for the same piece overwrites the piece's entries.
        """
        piece, slots, k_cache, v_cache = self.piece, self.layers[layer], self.k[layer], self.v[layer]
        placed = piece.placed[slots][:, :k.shape[1]]
        k_cache[self.batch_idx, :, placed] = k.to(k_cache.dtype)
        v_cache[self.batch_idx, :, placed] = v.to(v_cache.dtype)
        if piece.is_prefill:
            return k, v
        used = slots.used(k.shape[1] // piece.tokens.shape[1], piece.end)
        return k_cache[:, :, used].transpose(1, 2), v_cache[:, :, used].transpose(1, 2)

    def tail(self, n):
        """Return indices (B, min(n, max_call)) of each row's last tokens among the call's n."""
        offsets = torch.arange(min(n, self.max_call), device=self.lengths.device)
        return (self.n_new[:, None] - self.max_call).clamp(min=0) + offsets

    def end(self, h):
        """Store the last of the head's inputs h (B, n, C); return each row's last one (B, C)."""
        tail_idx = self.tail(h.shape[1])
        tail = h[self.batch_idx, tail_idx]
        self.hidden[:, :tail.shape[1]] = tail
        self.last.copy_(self.n_new - 1 - tail_idx[:, 0])
        self.drafted = 0
        return tail[self.batch_idx[:, 0], self.last]

    def rollback(self, n):
        """Forget the last n <= max_call tokens of the last call. n: int, or (B,) int64 by row."""
        self.lengths -= n
        self.last -= n
        self.drafted = 0


class Slots:
    """What the slots of a `KVCache` hold, for the layers that share a pattern: pos and stream."""

    def __init__(self, sees, batch_size, max_tokens, piece_len, n_streams, device):
        self.sees = sees
        reaches = [_reach(sees, max_tokens, stream, n_streams, device) for stream in range(n_streams)]
        self.sizes = [min(max_tokens, reach + piece_len) for reach in reaches]  # slots of each stream
        # [ rho 2 1 0 | x 0 1 2 ... | padding ]: slots in use are one range, all that a CPU reads
        self.edge, self.spare = sum(self.sizes[1:]), sum(self.sizes)  # x starts at `edge`, rho ends before it
        self.pos = torch.full((batch_size, self.spare + 1), EMPTY_SLOT, device=device)
        self.stream = (torch.arange(self.spare + 1, device=device) < self.edge).long().unsqueeze(0)

    def place(self, positions, end, batch_idx):
        """Return slots (B, S n) of positions: spare for padding and all before the last `size`."""
        placed = []
        for stream, size in enumerate(self.sizes):
            slot = self.edge - 1 - positions % size if stream else self.edge + positions % size
            placed.append(torch.where((positions < end) & (positions >= end - size), slot, self.spare))
        placed, pos = torch.cat(placed, 1), positions.repeat(1, len(self.sizes))
        self.pos[batch_idx, placed] = torch.where(placed < self.spare, pos, EMPTY_SLOT)
        return placed

    def used(self, n_streams, end):
        """Return the slots in use after `end` positions (None: all slots), as a slice."""
        x, *rho = (size if end is None else min(size, end) for size in self.sizes[:n_streams])
        return slice(self.edge - sum(rho), self.edge + x)


def _reach(sees, n, stream, n_streams, device):
    """Return the longest distance from a query to a key of this stream, over n positions."""
    device = 'cpu' if torch.device(device).type == 'meta' else device
    k = sequence(n, [stream], device)
    step, reach = max(1, 2 ** 22 // n), 0
    for b in range(n, 0, -step):  # from the end, where distances are longest
        if reach < b - 1:
            q = stream_tokens(k.pos[:, max(0, b - step):b], range(n_streams))
            seen = _seen(sees, q, k)[0]
            first = torch.where(seen.any(1), seen.byte().argmax(1), q.pos[0])  # first key seen; if none, a reach of 0
            reach = max(reach, int((q.pos[0] - first).max()))
    return reach


class Piece:
    """New tokens of a call and their place in the cache; from `KVCache.pieces`.

    tokens, doc_start: (B, n); positions: (B, n) int64, padding is at the position after the row's
    end; rope: cos and sin of [x | rho]; is_prefill: True for a long call on an empty cache.
    """

    def __init__(self, cache, tokens, n_new, is_prefill):
        self.cache, self.tokens, self.n_new, self.is_prefill = cache, tokens, n_new, is_prefill
        end = (cache.lengths + n_new).unsqueeze(1)
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        self.positions = (cache.lengths[:, None] + offsets).minimum(end)
        self.end = int(end.max()) if tokens.device.type == 'cpu' else None
        self.doc_start = self._document_starts()
        self.placed = {each: each.place(self.positions, end, cache.batch_idx) for each in dict.fromkeys(cache.layers)}
        self.rope = tuple(table[self.positions.repeat(1, cache.n_streams)] for table in cache.rope)

    def _document_starts(self):
        """Return where each token's document starts (B, n), and update the cache's doc_start."""
        cache, positions = self.cache, self.positions
        if cache.eos_id is None:
            return torch.zeros_like(positions)
        is_end = self.tokens == cache.eos_id
        first = cache.doc_start[cache.batch_idx, cache.lengths[:, None]]
        later = torch.where(is_end[:, :-1], positions[:, 1:], 0)
        doc_start = torch.cat([first, later], 1).cummax(1).values
        cache.doc_start[cache.batch_idx, positions + 1] = torch.where(is_end, positions + 1, doc_start)
        return doc_start

    def mask(self, keys=(0,), queries=None):
        """Return the mask of the piece's queries over the keys that `KVCache.append` returns."""
        return each_layer(self.cache.slots, lambda slots: self._mask(slots, keys, queries or keys))

    def _mask(self, slots, keys, queries):
        cache, model = self.cache, self.cache.model
        if self.is_prefill:
            T, doc_start = self.tokens.shape[1], None if cache.eos_id is None else self.doc_start
            return _new_mask(model, slots.sees, T, self.tokens.device, doc_start, keys, queries, compile_for_T=False)
        q = stream_tokens(self.positions, queries, self.doc_start)
        used = slots.used(len(keys), self.end)
        k = Tokens(slots.pos[:, used], slots.stream[:, used])
        return dense_mask(model, slots.sees, q, k, cache.hidden.dtype)


# ---- layers ----

@outside_graphs  # in a compiled graph, every layer would recompute the angles of every element
def rope_table(positions, head_size, theta, scaling=None):
    """Return RoPE's fp32 cos and sin of the angles position * theta^(-2j/D), j < D/2.

    positions: (...). Results: (..., 1, D), [cos | cos] and [-sin | sin], for `rotate`. scaling:
    Llama 3's (factor, low, high, tokens). Frequencies with fewer than `low` turns over `tokens`
    positions are divided by `factor`; those above `high` are kept, those between interpolated.
    """
    j = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    frequency = 1 / theta ** (j / head_size)
    if scaling:
        factor, low, high, tokens = scaling
        turns = tokens * frequency / (2 * math.pi)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (unscaled + (1 - unscaled) / factor)
    angles = positions[..., None, None] * frequency
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x, rope):
    """Apply rotary position embeddings to the pairs (x_j, x_{j + D/2}), as in Hugging Face's Llama.

    x: (..., T, H, D); rope: cos and sin from `rope_table`, which broadcast to (..., T, H, D).
    """
    cos, sin = rope
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def checkpointed(forward):
    """Apply activation checkpointing to a method if self.checkpoints is set (decorator)."""
    @functools.wraps(forward)  # wraps the method and not the module, to keep FSDP's hooks outside
    def call(self, *args, **kwargs):
        if self.checkpoints and self.training:
            return checkpoint(functools.partial(forward, self), *args, use_reentrant=False, **kwargs)
        return forward(self, *args, **kwargs)
    return call


# ---- the loss ----

def at_least_fp32(x):
    """Cast x to fp32, unless it is float64. A log-sum-exp of bf16 logits would be off by 0.06."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def counted_targets(idx, targets, eos_id):
    """Ignore (-1) the targets of eos inputs, which start other documents. idx, targets: (B, T)."""
    return targets if eos_id is None else targets.masked_fill(idx == eos_id, -1)


def mask_padding(logits, n_ids):
    """Set the logits (..., V) of padding ids, from n_ids on, to -inf in place."""
    logits[..., n_ids:] = float('-inf')
    return logits


class CrossEntropy(torch.nn.Module):
    """Negative log-likelihood in nats, in fp32, of targets (N,), -1 ignored, given logits (N, V).

    n_ids: leave out padding ids, from n_ids on. On a GPU, train.py compiles it.
    """

    dynamic = True  # one compilation for chunks of all lengths

    def __init__(self, vocab_size, n_ids=None, reduction='sum'):
        super().__init__()
        self.vocab_size, self.n_ids, self.reduction = vocab_size, n_ids, reduction

    def forward(self, logits, targets):
        torch._check(logits.shape[-1] == self.vocab_size)  # for the compiler: a softmax in one pass needs a fixed V
        logits = at_least_fp32(logits[:, :self.n_ids])
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction=self.reduction)


@outside_graphs  # the compiler would unroll the chunks and keep their logits
def chunked_loss(fn, rows, params, width, shared=()):
    """Sum a loss over the rows of its inputs, holding the logits of one chunk of rows at a time.

    Args:
        fn: fn(*chunk, *shared) -> {name: sum over the chunk's rows}; the first is the loss
        rows: tensors with one entry per position on their first axis: states, targets, weights, ...
        params: all parameters of the model, for the gradients of those that fn uses
        width: values that fn holds per row, such as the vocabulary size; sets the chunk size
        shared: tensors passed whole to every chunk, such as a table that rows index

    Returns the sums over all rows, in fp32, by name. Only the loss has gradients.
    """
    values = CPU_CHUNK if rows[0].device.type == 'cpu' else GPU_CHUNK
    rows_per_chunk = max(1, values // (256 * width)) * 256
    n_chunks = math.ceil(len(rows[0]) / rows_per_chunk) or 1
    params = [p for p in params if p.requires_grad]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*rows, *shared, *params)):
        names, *sums = _ChunkedLoss.apply(fn, n_chunks, len(rows), len(shared), *rows, *shared, *params)
        return dict(zip(names, sums))
    return _sums([fn(*chunk, *shared) for chunk in zip(*(x.tensor_split(n_chunks) for x in rows))])


def _sums(chunks):
    """Add up the results of chunks by name, in fp32."""
    return {name: sum(at_least_fp32(chunk[name]) for chunk in chunks) for name in chunks[0]}


class _ChunkedLoss(torch.autograd.Function):  # forward takes the gradients, one chunk of logits at a time
    @staticmethod
    def forward(ctx, fn, n_chunks, n_rows, n_shared, *tensors):
        def add(a, b):  # gradients; None: fn does not read the parameter
            return a if b is None else b if a is None else a + b

        rows = tensors[:n_rows]
        shared = [x.detach().requires_grad_() for x in tensors[n_rows:n_rows + n_shared]]
        params = [*shared, *tensors[n_rows + n_shared:]]
        row_grads, param_grads, results = [], [None] * len(params), []
        for chunk in zip(*(x.tensor_split(n_chunks) for x in rows)):  # equal parts: 1 row left over would recompile
            chunk = [x.detach().requires_grad_(whole.requires_grad) for x, whole in zip(chunk, rows)]
            with torch.enable_grad():
                result = fn(*chunk, *shared)
            inputs = [x for x in chunk if x.requires_grad]
            grads = torch.autograd.grad(next(iter(result.values())), [*inputs, *params], allow_unused=True)
            of_rows, of_params = grads[:len(inputs)], grads[len(inputs):]
            row_grads.append([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, of_rows)])
            param_grads = [*map(add, param_grads, of_params)]
            results.append({name: x.detach() for name, x in result.items()})
        row_grads = map(torch.cat, zip(*row_grads))
        ctx.save_for_backward(*(next(row_grads) if x.requires_grad else None for x in rows), *param_grads)
        sums = _sums(results)
        total, *parts = sums.values()
        ctx.mark_non_differentiable(*parts)
        return tuple(sums), total, *parts

    @staticmethod
    def backward(ctx, names, grad, *parts):
        return None, None, None, None, *(x if x is None else x * grad for x in ctx.saved_tensors)


# ---- sizes ----

def check_sizes(c, **least):
    """Raise ValueError for a setting of Config c below its least value. None is valid."""
    common = dict(n_layer=1, n_embd=1, n_ffn=1, vocab_size=1, n_ids=1, init_std=0, norm_eps=0)  # of all models
    for name, low in (common | least).items():
        value = getattr(c, name, None)
        if value is not None and value < low:
            raise ValueError(f'{name} = {value}: expected at least {low}')
    if c.n_ids > c.vocab_size:
        raise ValueError(f'vocab_size = {c.vocab_size} has no room for the {c.n_ids} ids of the tokenizer')


def check_shape(c, **least):
    """Check Config c and its heads like `check_sizes`. Set head_size and n_kv_head if not given."""
    check_sizes(c, n_head=1, head_size=2, n_kv_head=1, rope_theta=1, **least)
    c.n_kv_head = getattr(c, 'n_kv_head', None) or c.n_head
    head_size = getattr(c, 'head_size', None) or c.n_embd / c.n_head
    if head_size % 2:
        raise ValueError(f'head_size = {head_size:g}, with n_embd = {c.n_embd} and n_head = {c.n_head}: expected an '
                         'even whole number')
    c.head_size = int(head_size)
    if c.n_head % c.n_kv_head:
        raise ValueError(f'n_kv_head = {c.n_kv_head}: expected a divisor of n_head = {c.n_head}')
    if getattr(c, 'rope_scaling', None) is not None:
        factor, low, high, tokens = c.rope_scaling if len(c.rope_scaling) == 4 else [0] * 4
        if not (factor >= 1 and 0 < low < high and tokens >= 1):
            raise ValueError(f'rope_scaling = {c.rope_scaling}: expected factor, low, high, tokens, such as 8,1,4,8192')


def n_matrix_weights(module):
    """Count matrix weights without embeddings. Of experts, the `active_share` that a token uses."""
    own = 0 if isinstance(module, torch.nn.Embedding) else sum(
        p.numel() for p in module.parameters(recurse=False) if p.dim() >= 2)
    return (own + sum(map(n_matrix_weights, module.children()))) * getattr(module, 'active_share', 1)


def mean_keys(sees, T, keys=(0,), queries=None):
    """Return how many keys the queries of a position attend to, mean over T (sampled if > 2048)."""
    if isinstance(sees, list):
        return sum(mean_keys(pattern, T, keys, queries) for pattern in sees) / len(sees)
    n = min(T, 2 ** 22 // T + 1)
    pos = ((torch.arange(n) + 0.5) * (T / n) - 0.5).round().int().unsqueeze(0)
    return _seen(sees, stream_tokens(pos, queries or keys), sequence(T, keys, 'cpu')).sum().item() / n
