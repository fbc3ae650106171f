"""The models under test: a line in VARIANTS gives a model all tests of test_models.py."""
import dataclasses
import random

import torch

import train
from lm_architectures.run import models, run_settings
from papers.context_ready.reproduce import ROWS

SMALL = dict(n_layer=3, n_head=2, n_embd=32, vocab_size=64, n_ids=60)
GROUPED = dict(n_head=6, n_kv_head=2, head_size=10, qkv_bias=True, qk_norm=True, rope_scaling=(8, 1, 4, 8))
GPN = dict(d_emb=24, d_k=8, d_v=12, n_ffn=40, segment_len=7)
GDN = dict(d_k=8, d_v=12, n_ffn=40, chunk_len=7)
VARIANTS = {
    'standard': ('standard', dict(eos_id=None)),
    'standard, documents': ('standard', dict(eos_id=59)),
    'standard, window': ('standard', dict(eos_id=59, window=3)),
    'standard, grouped queries': ('standard', GROUPED | dict(eos_id=59, window=5)),
    'sps': ('sps', dict(eos_id=59, window=3)),
    'sps, grouped queries': ('sps', GROUPED | dict(eos_id=59, window=3)),
    'sps, window 0': ('sps', dict(eos_id=59, window=0)),
    'sps, window 1, no documents, untied': ('sps', dict(eos_id=None, window=1, tied_head=False)),
    'sps, beyond the paper': ('sps', dict(eos_id=59, window=3, predict_layers=2, predict_input='token')),
    'sps, fork': ('sps', dict(eos_id=59, window=3, predict_layers=2, predict_input='state')),
    'sps, persistent window': ('sps', dict(eos_id=59, window=2, persistent_window=5)),
    'two_x_memory': ('sps', dict(eos_id=59, method='two_x_memory', window=None)),
    'delayed_state': ('sps', dict(eos_id=59, method='delayed_state', window=3)),
    'reverse_sps': ('sps', dict(eos_id=59, method='reverse_sps', window=3)),
    'reverse_sps, top layer': ('sps', dict(eos_id=None, method='reverse_sps', window=2, predict_layers=1)),
    'context_ready': ('context_ready', dict()),
    'context_ready, documents, window': ('context_ready', dict(eos_id=59, window=5)),
    'context_ready, concat': ('context_ready', dict(eos_id=59, variant='concat', window=0)),
    'context_ready, block head': ('context_ready', dict(eos_id=59, variant='block_head')),
    'context_ready, bptt': ('context_ready', dict(eos_id=59, bptt=True, window=5)),
    'context_ready, llama': ('context_ready', GROUPED | dict(block='llama', eos_id=59, window=5, tied_head=True)),
    'context_ready, llama, bptt': ('context_ready', GROUPED | dict(block='llama', bptt=True, variant='concat')),
    'roformer': ('context_ready', dict(K=1, eos_id=59)),
    'roformer, extra FFN, window': ('context_ready', dict(K=1, variant='extra_ffn', window=4)),
    'nextlat': ('nextlat', dict(eos_id=None)),
    'nextlat, documents, tied': ('nextlat', dict(eos_id=59, horizon=2, tied_head=True)),
    'mtp, documents': ('mtp', dict(eos_id=59, horizon=2)),
    'jtp, documents': ('jtp', dict(eos_id=59, horizon=2)),
    'nextlat, grouped queries': ('nextlat', GROUPED | dict(eos_id=59)),
    'bst': ('bst', dict(eos_id=None)),
    'bst, documents, half of the pairs': ('bst', dict(eos_id=59, pair_share=0.5, min_k=2)),
    'gpn': ('gpn', GPN | dict(eos_id=None)),
    'gpn, loop': ('gpn', GPN | dict(eos_id=None, n_layer=1, scan='loop')),
    'gpn, one layer, documents': ('gpn', GPN | dict(eos_id=59, n_layer=1)),
    'gpn, no memory, documents, decoder bias': ('gpn', GPN | dict(eos_id=59, n_head=0, decoder_bias=True)),
    'gdn': ('gdn', GDN | dict(eos_id=None)),
    'gdn, documents': ('gdn', GDN | dict(eos_id=59)),
    'gdn, documents, loop': ('gdn', GDN | dict(eos_id=59, n_layer=1, conv_size=2, scan='loop')),
}


def make(variant, device='cpu'):
    return make_model(*VARIANTS[variant], device)


def make_model(name, values, device='cpu'):
    """Build a small model whose weights are large enough that attention is far from uniform."""
    torch.manual_seed(0)
    model = small_model(name, values).to(device).eval()
    for weight, p in model.named_parameters():
        if p.dim() >= 2:  # smaller for recurrences, which must not be chaotic
            recurrent = weight.startswith('correction.') or values.get('variant') == 'tied'
            torch.nn.init.normal_(p, std=0.05 if recurrent else 0.1 if name == 'gpn' else 0.15)
    return model


def small_model(name, values):
    """Build a small model of a file, with those settings in SMALL that its Config has."""
    module = models.model_file(name)
    own = {field.name for field in dataclasses.fields(module.Config)}
    return module.Model(module.Config(**{key: value for key, value in SMALL.items() if key in own} | values))


def paper_settings(name):
    """Return the settings of a config file, or of a row of papers/context_ready/rows.csv.

    Without those of a run that the row continues, which must have been trained.
    """
    argv = ROWS[name].split()[2:] if name in ROWS else [f'config/{name}.py']
    new = [arg for arg in argv if not arg.startswith(('--init_from=', '--extend='))]
    s, values, _ = run_settings.read_settings(train.Settings, new)
    return vars(s) | values


def paper_model(name, **of_data):
    """Build the model of `paper_settings` on the meta device."""
    values = paper_settings(name) | of_data
    module = models.model_file(values.get('model', 'standard'))
    names = module.Config.__dataclass_fields__
    with torch.device('meta'):
        return module.Model(module.Config(**{name: x for name, x in values.items() if name in names}))


@torch.no_grad()
def decode_in_pieces(model, idx, max_call, seed=0, tolerance=1e-4):
    """Compare with `logits` and `final_hidden`: ragged rows, random extend calls, rollbacks.

    Half of the calls end in wrong tokens, including eos, like rejected drafts.
    """
    rng, (B, T), device = random.Random(seed), idx.shape, idx.device
    want, hidden = model.logits(idx)[..., :60], model.final_hidden(idx)
    cache, done = model.new_cache(B, T, max_call), [0] * B
    while max(done) < T:  # nothing can be appended to a full row
        longest, is_draft = rng.choice([1, 2, max_call, T // 5, T // 2]), rng.random() < 0.5
        right = [min(rng.randint(1, longest), T - d) for d in done]
        wrong = [min(rng.randint(0, max_call), T - d - n) if is_draft else 0 for d, n in zip(done, right)]
        run = [n + w for n, w in zip(right, wrong)]
        tokens = torch.tensor([rng.choices([59, 3, 8], k=max(run)) for _ in range(B)], device=device)
        for b, n in enumerate(right):
            tokens[b, :n] = idx[b, done[b]:done[b] + n]
        every = is_draft or rng.random() < 0.5
        logits = model.extend(tokens, cache, torch.tensor(run, device=device), all_positions=every)[..., :60]
        for b, n in enumerate(right):
            got, expected = logits[b, :n] if every else logits[b:b + 1], want[b, done[b]:done[b] + n]
            assert (got - expected[-len(got):]).abs().max() < tolerance
            done[b] += n
            kept = min(run[b], max_call) - wrong[b]
            if kept > 0 and hasattr(cache, 'hidden'):
                assert (cache.hidden[b, :kept] - hidden[b, done[b] - kept:done[b]]).abs().max() < tolerance
        # correct tokens can be rolled back, too
        back = [rng.choice([0, 0, min(n, max_call - w)]) for n, w in zip(right, wrong)]
        cache.rollback(torch.tensor([n + w for n, w in zip(back, wrong)], device=device))
        done = [d - n for d, n in zip(done, back)]
        assert cache.lengths.tolist() == done
