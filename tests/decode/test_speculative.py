"""Speculative decoding has the distribution of plain decoding, for any draft and length."""
import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_sentence, run, succeeded, train_tiny
from test_models import small_model

from lm_architectures.decode import generation, speculation
from lm_architectures.decode.generation import generate, token_probs
from lm_architectures.decode.speculation import draft_tokens, speculative_generate
from lm_architectures.run.records import read_log

OWN = {'sps': dict(window=2), 'mtp': dict(horizon=2), 'jtp': dict(horizon=3)}


def make(name, seed=0, spread=0.3, **values):
    torch.manual_seed(seed)
    model = small_model(name, dict(n_layer=2, eos_id=None) | OWN.get(name, {}) | values)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=spread)
    return model.eval()


def perturbed(model):
    """Return a good draft model: the same weights with noise."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.1 * p.std() * torch.randn_like(p)
    return other


TINY = dict(n_layer=1, n_embd=8, n_ids=3, vocab_size=4)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize('name, drafts', [('nextlat', None), ('mtp', None), ('jtp', None), ('standard', 'standard'),
                                          ('standard', 'sps'), ('sps', 'standard'), ('nextlat', 'nextlat')])
@pytest.mark.parametrize('draft_len', [1, 2, 'auto'])
def test_greedy_texts_equal_plain_decoding(name, drafts, draft_len):
    """100 prompts of different lengths, 30 new tokens, models with eos."""
    model = make(name, eos_id=59)
    draft = None if drafts is None else perturbed(model) if drafts == name else make(drafts, seed=1, eos_id=59)
    prompts = [torch.randint(0, 60, (1 + i % 9,), generator=torch.Generator().manual_seed(i)).tolist()
               for i in range(100)]
    got, rounds = speculative_generate(model, prompts, 30, draft=draft, draft_len=draft_len, temperature=0)
    assert got == generate(model, prompts, 30, temperature=0)
    n_accepted = sum(accepted for _, accepted in rounds)
    assert len(rounds) + n_accepted >= 100 * 29  # each round adds a token
    assert all(accepted <= drafted for drafted, accepted in rounds)
    assert drafts != name or n_accepted > 0.3 * len(rounds)  # the drafts are useful


@pytest.mark.parametrize('name', ['standard', 'sps'])
def test_drafts_from_the_same_weights_are_always_accepted(name):
    model = make(name)
    _, rounds = speculative_generate(model, PROMPTS, 30, draft=copy.deepcopy(model), draft_len=3, temperature=0)
    assert rounds == 3 * 7 * [(3, 3)] + 3 * [(0, 0)]  # 1 token from the prefill, 4 in each of 7 rounds, then 1


# ---- the distribution, by enumeration ----

class Choices:
    """Replays scripted random choices, then takes first options. Records options, probability."""

    def __init__(self, script, row):
        self.script, self.row, self.options, self.probability = script, row, [], 1.0

    def choose(self, probabilities):
        """Return the scripted option among those with a positive probability."""
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        n_made = len(self.options)
        chosen = possible[self.script[n_made] if n_made < len(self.script) else 0]
        self.options.append(len(possible))
        self.probability *= probabilities[chosen]
        return chosen

    def draw(self, probs, noise):
        shares = (probs.double() / probs.double().sum(-1, keepdim=True)).tolist()
        others = [row.index(max(row)) for row in shares]  # other rows take their likeliest token
        others[self.row] = self.choose(shares[self.row])
        return torch.tensor(others)

    def accepts(self, p, q, uniform):
        decided, going = torch.zeros_like(p, dtype=torch.bool), True  # other rows reject, and fall behind
        for i, (a, b) in enumerate(zip(p[self.row].double().tolist(), q[self.row].double().tolist())):
            if going:
                share = min(1.0, a / b)
                going = self.choose([share, 1 - share]) == 0
            decided[self.row, i] = going
        return decided


def distribution_of(generate_row, row, monkeypatch):
    """Return {text: probability} of a row by enumerating its random choices."""
    distribution, script = Counter(), []
    while script is not None:
        choices = Choices(script, row)
        monkeypatch.setattr(generation, 'draw', choices.draw)
        monkeypatch.setattr(speculation, 'accepts', choices.accepts)
        distribution[tuple(generate_row())] += choices.probability
        taken = (script + [0] * len(choices.options))[:len(choices.options)]
        while taken and taken[-1] + 1 == choices.options[len(taken) - 1]:
            taken.pop()
        script = taken[:-1] + [taken[-1] + 1] if taken else None
    return distribution


def plain_distribution(model, prompt, n, **filters):
    """Return {text: probability} from full forward passes, token by token."""
    distribution = {(): 1.0}
    for _ in range(n):
        texts, logits = [*distribution], model.logits(torch.tensor([[*prompt, *text] for text in distribution]))[:, -1]
        distribution = {(*text, token): distribution[text] * p
                        for text, probs in zip(texts, token_probs(logits, **filters).tolist())
                        for token, p in enumerate(probs[:model.config.n_ids]) if p}
    return distribution


FILTERS = [dict(), dict(temperature=0.7), dict(top_k=2), dict(top_p=0.8), dict(min_p=0.3),
           dict(temperature=1.5, top_k=2, top_p=0.9, min_p=0.1), dict(temperature=0)]


@pytest.mark.parametrize('name, drafts, n_ids, draft_len, filters', [
    *[(*names, 3, 1, filters) for names in (('nextlat', None), ('standard', 'sps')) for filters in FILTERS],
    *[(*names, 2, n, {'temperature': t}) for names in (('nextlat', None), ('standard', 'sps')) for n in (2, 'auto')
      for t in (1.0, 0.7)],
    *[('nextlat', None, 3, 2, filters) for filters in (dict(top_k=2), dict(top_p=0.6), dict(min_p=0.4))],
    ('nextlat', None, 3, 3, dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.6)),
    pytest.param('standard', 'sps', 3, 2, {}, marks=pytest.mark.long)], ids=str)  # the last one takes minutes
def test_every_text_has_the_probability_of_plain_sampling(name, drafts, n_ids, draft_len, filters, monkeypatch):
    """The prefill gives the first token, a round drafts some, and one more follows."""
    values = dict(TINY, spread=0.4, n_ids=n_ids)
    model, draft = make(name, **values), drafts and make(drafts, seed=1, **values)
    prompts, row, n = [[1, 0, 1], [1], [0, 0]], 1, 4 if draft_len == 'auto' else draft_len + 2
    monkeypatch.setattr(speculation, 'AUTO_CONFIDENCE', 0.745)  # ends some drafts of `auto` early

    def one():
        return speculative_generate(model, prompts, n, draft=draft, draft_len=draft_len, **filters)[0][row]
    with torch.inference_mode():
        got, want = distribution_of(one, row, monkeypatch), plain_distribution(model, prompts[row], n, **filters)
    assert abs(sum(got.values()) - 1) < 1e-6 and (draft_len == 1 or len(want) > 4)
    assert all(abs(got[text] - want.get(text, 0)) < 1e-6 for text in got.keys() | want.keys())


@pytest.mark.slow
@pytest.mark.parametrize('draft_len', [None, 2])
def test_sampled_texts_follow_the_distribution(draft_len, device):
    """Chi-squared test on 50,000 texts, sampled with the real random numbers."""
    model = make('nextlat', spread=0.4, **TINY)
    rows, n = 50_000, 4
    with torch.inference_mode():
        distribution = plain_distribution(model, [1, 0], n, temperature=0.8)
    model.to(device)
    counts, options = Counter(), dict(max_new_tokens=n, temperature=0.8)
    for seed in range(5):
        prompts = [[1, 0]] * (rows // 5)
        counts.update(map(tuple, generate(model, prompts, seed=seed, **options) if draft_len is None else
                          speculative_generate(model, prompts, draft_len=draft_len, seed=seed, **options)[0]))
    assert counts.keys() <= distribution.keys()
    chi2 = torch.tensor(sum((counts[text] - rows * p) ** 2 / (rows * p) for text, p in distribution.items()))
    p_value = torch.special.gammaincc(torch.tensor((len(distribution) - 1) / 2), chi2 / 2)
    assert p_value > 1e-4


# ---- the length of a draft ----

@pytest.mark.parametrize('confidences, want', [
    ([[1.0] * 8], 8), ([[0.7] * 8], 4), ([[0.2] + [1.0] * 7], 1), ([[1.0] * 8, [0.1] * 8], 8),
    ([[0.4] * 8, [0.6] * 8], 3)])
def test_auto_stops_when_the_product_of_confidences_is_small(confidences, want):
    """The product is averaged over live rows: here all but the last."""
    rows = torch.tensor([*confidences, [0.0] * 8])
    drafted = []
    decoder = SimpleNamespace(confidences=rows, draft=drafted.append)
    live = torch.arange(len(rows)) < len(confidences)
    assert draft_tokens(decoder, 8, live, 0.25) == want == len(drafted)
    assert draft_tokens(decoder, 8, live, 0) == 8


def test_auto_drafts_at_most_16_tokens_and_few_when_the_draft_is_unsure():
    """Confidence is measured before filters: after them, greedy drafts have probability 1."""
    certain, unsure = make('standard', spread=1.5), make('standard', seed=5, spread=0.01)
    _, rounds = speculative_generate(certain, PROMPTS, 60, draft=certain, temperature=0)
    assert 4 < max(drafted for drafted, _ in rounds) <= 16
    for temperature in (0, 1):
        _, rounds = speculative_generate(certain, PROMPTS, 60, draft=unsure, temperature=temperature)
        assert max(drafted for drafted, _ in rounds) == 1


# ---- the command line ----

@pytest.fixture(scope='module')
def runs(tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    for name, options in (('nextlat', ['--model=nextlat', '--acceptance_prompts=2']), ('standard', [])):
        succeeded(train_tiny(tiny_data, folder / name, '--block_size=64', *options, steps=5))
    return folder


@pytest.mark.slow
def test_training_logs_the_acceptance(runs, tiny_data, tmp_path):
    assert 0 <= read_log(runs / 'nextlat')[-1]['acceptance'] <= 1
    task = ['--model=nextlat', '--data=path_star:degree=2,length=5,nodes=20', '--block_size=31',
            '--mask_documents=False']
    assert_sentence(train_tiny(tiny_data, tmp_path / 'run', '--acceptance_prompts=2', *task), 'is a task: use 0')


@pytest.mark.slow
@pytest.mark.parametrize('options', [['--draft_len=auto'], ['--draft_len=3'], ['--draft=standard']])
def test_sampling_with_drafts(runs, options):
    options = [option.replace('=standard', f'={runs}/standard') for option in options]
    result = succeeded(run('sample.py', runs / 'nextlat', 'ab cd', '--max_new_tokens=20', '--ignore_eos', *options))
    assert result.stdout.startswith('ab cd') and '20 tokens in' in result.stderr and 'accepted' in result.stderr


def test_impossible_drafts_give_a_clear_error():
    for options, part in ((dict(draft_len=3), 'draft_len is 3: this model can draft at most 2 tokens'),
                          (dict(draft_len=0), "draft_len is 0: expected 'auto' or 1"),
                          (dict(draft=make('standard', **TINY)), 'the draft model has vocab_size 4')):
        with pytest.raises(ValueError, match=part):
            speculative_generate(make('mtp'), PROMPTS, 5, **options)
