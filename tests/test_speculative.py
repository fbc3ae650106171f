"""Speculative decoding: texts have the distribution of plain decoding, whatever drafts, however long the drafts are."""
import copy
import itertools

import pytest
import torch
from conftest import assert_sentence, run, train_tiny

import model_jtp
import model_mtp
import model_nextlat
import model_sps
import model_standard
from common import speculative
from common.decoding import generate, token_probs
from common.runs import read_log
from common.speculative import AutoLength, speculative_generate
from eval import draft_lengths

SHAPES = {'standard': (model_standard, {}), 'sps': (model_sps, dict(window=2)), 'nextlat': (model_nextlat, dict()),
          'mtp': (model_mtp, dict(horizon=2)), 'jtp': (model_jtp, dict(horizon=3))}


def make(name, seed=0, spread=0.3, **values):
    module, own = SHAPES[name]
    torch.manual_seed(seed)
    shape = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_ids=60, eos_id=None)
    model = module.Model(module.Config(**{**shape, **own, **values}))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=spread)
    return model.eval()


def near(model, noise=0.1):
    """A model that drafts well: the same weights, disturbed."""
    other = make(next(name for name, (module, _) in SHAPES.items() if isinstance(model, module.Model)))
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters()):
            p.copy_(q + noise * q.std() * torch.randn_like(q))
    return other


TINY = dict(n_layer=1, n_embd=8, n_ids=3, vocab_size=4)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
COST = 0.07


@pytest.mark.parametrize('name, drafts', [('nextlat', None), ('mtp', None), ('jtp', None), ('standard', 'standard'),
                                          ('standard', 'sps'), ('sps', 'standard'),
                                          ('nextlat', 'nextlat')])
@pytest.mark.parametrize('draft_len', [1, 2, 'auto'])
def test_greedy_texts_are_those_of_plain_decoding(name, drafts, draft_len):
    """100 prompts of different lengths; new texts of 30 tokens; models that end documents."""
    model = make(name, eos_id=59)
    draft = None if drafts is None else near(model) if drafts == name else make(drafts, seed=1, eos_id=59)
    prompts = [torch.randint(0, 60, (1 + i % 9,), generator=torch.Generator().manual_seed(i)).tolist()
               for i in range(100)]
    got, statistics = speculative_generate(model, prompts, 30, draft=draft, draft_len=draft_len, temperature=0,
                                           auto=AutoLength(COST))
    assert got == generate(model, prompts, 30, temperature=0)
    assert statistics.rounds + sum(statistics.accepted) >= 100 * 29  # a token of its own for each round
    assert all(0 <= share <= 1 for share in statistics.by_position)
    if drafts == name:
        assert statistics.accepted_per_step > 0.3  # the drafts are of use


@pytest.mark.parametrize('name', ['standard', 'sps'])
def test_a_draft_by_the_same_weights_is_always_accepted(name):
    model = make(name)
    _, statistics = speculative_generate(model, PROMPTS, 30, draft=near(model, 0.0), draft_len=3, temperature=0)
    # 1 token of the prefill, 4 in each of 7 rounds, 1
    assert statistics.by_position == [1, 1, 1] and statistics.rounds == 3 * 8


def test_rows_end_at_eos_and_at_finished():
    model = make('nextlat')
    free = generate(model, PROMPTS, 20, temperature=0)
    end = free[0][4]
    for options in (dict(eos_id=end), dict(finished=lambda row, ids: row == 1 and len(ids) == 3)):
        drafted, _ = speculative_generate(model, PROMPTS, 20, temperature=0, draft_len=3, **options)
        assert drafted == generate(model, PROMPTS, 20, temperature=0, **options)


# ---- the distribution, by enumeration ----

class Choices:
    """Makes every decision of one run by a script; beyond its end takes the first option. Remembers the options and the
    probability."""

    def __init__(self, script, row):
        self.script, self.row, self.options, self.probability = script, row, [], 1.0

    def choose(self, probabilities):
        """probabilities of options 0, 1, ...: the scripted option, of those that can be."""
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        n_made = len(self.options)
        chosen = possible[self.script[n_made] if n_made < len(self.script) else 0]
        self.options.append(len(possible))
        self.probability *= probabilities[chosen]
        return chosen

    def draw(self, probs, noise):
        shares = (probs.double() / probs.double().sum(-1, keepdim=True)).tolist()
        others = [row.index(max(row)) for row in shares]  # the other rows' choices are theirs to make
        others[self.row] = self.choose(shares[self.row])
        return torch.tensor(others)

    def accepts(self, p, q, uniform):
        decided, going = torch.zeros_like(p, dtype=torch.bool), True  # the other rows refuse: they fall behind
        for i, (a, b) in enumerate(zip(p[self.row].double().tolist(), q[self.row].double().tolist())):
            if going:
                share = min(1.0, a / b)
                going = self.choose([share, 1 - share]) == 0
            decided[self.row, i] = going
        return decided


def distribution_of(generate_row, row, monkeypatch):
    """{text: probability} of a row over every way its random decisions can turn out."""
    distribution, script = {}, []
    while script is not None:
        choices = Choices(script, row)
        monkeypatch.setattr(speculative, 'draw', choices.draw)
        monkeypatch.setattr(speculative, 'accepts', choices.accepts)
        text = tuple(generate_row())
        distribution[text] = distribution.get(text, 0) + choices.probability
        taken = (script + [0] * len(choices.options))[:len(choices.options)]
        while taken and taken[-1] + 1 == choices.options[len(taken) - 1]:
            taken.pop()
        script = taken[:-1] + [taken[-1] + 1] if taken else None
    return distribution


def plain_distribution(model, prompt, n, **filters):
    """The same by full forwards, one token after the other."""
    distribution = {}
    for text in itertools.product(range(model.config.n_ids), repeat=n):
        probability = 1.0
        for i, token in enumerate(text):
            if probability:
                logits = model.logits(torch.tensor([prompt + list(text[:i])]))[0, -1]
                probability *= float(token_probs(logits, **filters)[token])
        if probability:
            distribution[text] = probability
    return distribution


FILTERS = [dict(), dict(temperature=0.7), dict(top_k=2), dict(top_p=0.8), dict(min_p=0.3),
           dict(temperature=1.5, top_k=2, top_p=0.9, min_p=0.1), dict(temperature=0)]


@pytest.mark.parametrize('draft_len', [1, 2, 'auto'])
@pytest.mark.parametrize('filters', FILTERS, ids=str)
@pytest.mark.parametrize('name, drafts', [('nextlat', None), ('standard', 'sps')])
def test_every_text_has_the_probability_of_plain_sampling(name, drafts, filters, draft_len, monkeypatch):
    check_distribution(monkeypatch, name, drafts, 3, draft_len, filters)


@pytest.mark.parametrize('draft_len', [2, 'auto'])
@pytest.mark.parametrize('name, drafts', [('nextlat', None), ('standard', 'sps')])
@pytest.mark.parametrize('n_ids, filters', [(2, {}), (2, dict(temperature=0.7)),
                                            pytest.param(3, {}, marks=pytest.mark.long)])
def test_texts_of_two_drafted_tokens_have_it_too(name, drafts, n_ids, filters, draft_len, monkeypatch):
    """Of four tokens, a prefill gives the first and a round drafts two. Three ids, as above, take minutes."""
    check_distribution(monkeypatch, name, drafts, 4, draft_len, filters, n_ids=n_ids)


@pytest.mark.parametrize('draft_len, filters', [(2, dict(top_k=2)), (2, dict(top_p=0.6)), (2, dict(min_p=0.4)),
                                                (3, dict(temperature=0.7, top_k=2, top_p=0.9, min_p=0.6))])
def test_filters_hold_for_every_drafted_token(draft_len, filters, monkeypatch):
    """The filters leave some texts and not all, of a prefill's token, the draft's, and the one after it."""
    n = draft_len + 2
    want = check_distribution(monkeypatch, 'nextlat', None, n, draft_len, filters)
    assert 4 < len(want) < 3 ** n


def check_distribution(monkeypatch, name, drafts, n, draft_len, filters, **values):
    values = dict(TINY, spread=0.4) | values
    model, draft = make(name, **values), drafts and make(drafts, seed=1, **values)
    prompts, row = [[1, 0, 1], [1], [0, 0]], 1

    def one():
        return speculative_generate(model, prompts, n, draft=draft, draft_len=draft_len, auto=AutoLength(0.4),
                                    **filters)[0][row]
    with torch.inference_mode():
        got, want = distribution_of(one, row, monkeypatch), plain_distribution(model, prompts[row], n, **filters)
    assert abs(sum(got.values()) - 1) < 1e-6
    assert all(abs(got.get(text, 0) - want.get(text, 0)) < 1e-6 for text in got.keys() | want.keys())
    return want


@pytest.mark.slow
def test_drawn_texts_follow_the_distribution():
    """A seeded draw of 200,000 texts, with the random numbers that users get."""
    model = make('nextlat', spread=0.4, **TINY)
    rows, n = 200_000, 4
    got = [text for seed in range(20) for text in speculative_generate(model, [[1, 0]] * (rows // 20), n, draft_len=2,
                                                                       temperature=0.8, seed=seed)[0]]
    with torch.inference_mode():
        distribution = plain_distribution(model, [1, 0], n, temperature=0.8)
    counts = dict.fromkeys(distribution, 0)
    for text in got:
        counts[tuple(text)] += 1
    chi2 = torch.tensor(sum((counts[text] - rows * p) ** 2 / (rows * p) for text, p in distribution.items()))
    p_value = torch.special.gammaincc(torch.tensor((len(distribution) - 1) / 2), chi2 / 2)
    assert p_value > 1e-4


# ---- the length of a draft ----

def test_auto_drafts_long_where_drafts_are_good_and_short_where_not():
    model = make('nextlat')
    strangers = speculative_generate(model, PROMPTS, 60, auto=AutoLength(COST), draft=make('standard', seed=5))[1]
    twins = speculative_generate(model, PROMPTS, 60, auto=AutoLength(COST), draft=near(model, 0.0))[1]
    assert twins.accepted_per_step > 8 and sum(strangers.tried) / strangers.rounds < 3


def test_auto_weighs_gain_against_cost():
    auto = AutoLength(0.15)
    for _ in range(50):  # sure tokens are accepted, others are not
        auto.begin(1)
        auto.more([0.95]), auto.more([0.15])
        auto.learn([(2, 1)])
    for drafted, another in (([0.95], True), ([0.15], False), ([0.95, 0.15], False)):
        auto.begin(1)
        assert [auto.more([confidence]) for confidence in drafted][-1] == another
    dear = AutoLength(2.5)
    dear.begin(1)
    assert not dear.more([0.95])


@pytest.mark.parametrize('name', ['nextlat', 'standard'])
def test_auto_repeats_itself_for_a_seed(name):
    """No clock decides: texts, lengths and what was accepted are the same."""
    model = make(name)
    draft = near(model)
    (texts, one), (again, two), (other, _) = (
        speculative_generate(model, PROMPTS, 60, draft=draft, auto=AutoLength(COST), seed=seed) for seed in (3, 3, 4))
    assert texts == again != other and len(one.tried) > 3
    assert (one.tried, one.accepted, one.rounds) == (two.tried, two.accepted, two.rounds)


def test_the_cost_of_a_draft_is_the_bytes_it_reads_over_those_of_a_verification():
    auto, model = AutoLength(), make('nextlat')
    speculative_generate(model, PROMPTS, 5, auto=auto)
    drafting = speculative.weight_bytes([*model.dynamics.modules(), model.head])
    cache = model.new_cache(3, 7 + 5 + 16 + 2, 17)
    assert auto.cost == drafting / (speculative.weight_bytes(model.modules()) + cache.nbytes) + 0.08
    assert speculative.weight_bytes(model.modules()) == 4 * (sum(p.numel() for p in model.parameters()) - 64 * 32)
    auto, small = AutoLength(), make('sps', seed=1)
    speculative_generate(make('standard'), PROMPTS, 5, draft=small, auto=auto)
    assert 0.5 < auto.cost < 2  # as many layers; their caches differ


# ---- the command line ----

@pytest.fixture(scope='module')
def runs(tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    for name, options in (('nextlat', ['--model=nextlat', '--acceptance_prompts=2']),
                          ('ntp', ['--model=nextlat', '--objective=ntp']), ('standard', [])):
        assert train_tiny(tiny_data, folder / name, '--block_size=64', *options, steps=5).returncode == 0
    return folder


@pytest.mark.slow
def test_training_logs_the_acceptance(runs, tiny_data, tmp_path):
    assert 0 <= read_log(runs / 'nextlat')[-1]['acceptance'] <= 1
    assert_sentence(train_tiny(tiny_data, tmp_path / 'run', '--acceptance_prompts=2'), 'cannot draft for itself')
    task = ['--model=nextlat', '--data=path_star:degree=2,length=5,nodes=20', '--block_size=31', '--documents=False']
    assert_sentence(train_tiny(tiny_data, tmp_path / 'run', '--acceptance_prompts=2', *task), 'is a task: use 0')


def test_a_perfect_draft_is_accepted_whole_however_short_its_last_round():
    model = make('standard')
    _, found = speculative_generate(model, PROMPTS, 12, draft=copy.deepcopy(model), draft_len=5)
    assert found.drafted == sum(found.accepted) < 5 * found.rounds


@pytest.mark.slow
def test_table_of_draft_lengths(runs):
    small = ['--n_prompts=3', '--prompt_tokens=8', '--new_tokens=10', '--draft_lens=1,3,auto']
    result = run('eval.py', runs / 'nextlat', '--speculative', *small)
    assert result.returncode == 0, result.stderr
    assert 'speculative speedup auto' in result.stdout and 'speculative accepted 3' in result.stdout
    rows = [line.split(',') for line in (runs / 'nextlat/speculative.csv').read_text().splitlines()]
    assert rows[0][:5] == ['draft_len', 'speedup', 'accepted', 'tokens_per_s', 'cumulative_1']
    assert [row[0] for row in rows[1:]] == ['1', '3', 'auto']
    shares = [float(share) for share in rows[2][4:7]]
    assert sorted(shares, reverse=True) == shares and 0 <= shares[-1] and shares[0] <= 1
    assert (runs / 'nextlat/speculative.png').stat().st_size > 10_000
    assert_sentence(run('eval.py', runs / 'ntp', '--speculative', *small), 'cannot draft for itself')
    assert_sentence(run('eval.py', runs / 'nextlat', '--speculative'), 'do not fit the context of 64 tokens',
                    'lower prompt_tokens')
    assert_sentence(run('eval.py', runs / 'nextlat', '--speculative', *small, '--new_tokens=1'), 'new_tokens is 1')
    shortest = run('eval.py', runs / 'nextlat', '--speculative', *small, '--new_tokens=2', '--draft_lens=1')
    assert shortest.returncode == 0 and 'accepted 1' in shortest.stdout, shortest.stderr


@pytest.mark.slow
def test_command_line(runs):
    for options in (['--draft_len=auto'], ['--draft_len=3'], ['--draft', runs / 'standard', '--draft_len=2'],
                    ['--draft', runs / 'ntp']):
        options = [f'--draft={options[1]}', *options[2:]] if options[0] == '--draft' else options
        one = run('sample.py', runs / 'nextlat', 'ab cd', '--max_new_tokens=20', '--ignore_eos', *options)
        assert one.returncode == 0 and one.stdout.startswith('ab cd'), one.stderr
        assert '20 tokens in' in one.stderr and 'accepted' in one.stderr and 'with drafts' not in one.stderr
    both = run('sample.py', runs / 'nextlat', 'ab cd', '--max_new_tokens=20', '--draft_len=3', '--compare')
    assert both.returncode == 0 and 'with drafts' in both.stderr
    assert_sentence(run('sample.py', runs / 'nextlat', 'ab', '--compare'), 'also give --draft_len or --draft')


@pytest.mark.slow
def test_bad_input_is_a_sentence(runs, tmp_path):
    ask = lambda run_name, *options: run('sample.py', runs / run_name, 'ab', '--max_new_tokens=5', *options)
    assert_sentence(ask('nextlat', '--draft_len=0'), "draft_len is 0: expected 'auto' or a number of tokens from 1")
    assert_sentence(ask('nextlat', '--draft_len=long'), "draft_len is 'long': expected")
    assert_sentence(ask('nextlat', '--draft_len='), "setting 'draft_len' on the command line is empty")
    assert_sentence(ask('nextlat', '--draft='), "setting 'draft' on the command line is empty")
    for options in ([], [f'--draft={runs}/ntp']):
        assert_sentence(ask('nextlat', f'--draft_len={"1" * 31}', *options), 'a number of tokens from 1 to 1000')
    assert_sentence(ask('ntp', '--draft_len=2'), 'cannot draft for itself')
    assert_sentence(ask('standard', '--draft_len=2'), 'cannot draft for itself')
    assert_sentence(ask('nextlat', f'--draft={tmp_path}/none'), 'is not a run folder')


@pytest.mark.parametrize('options', [dict(temperature=1e-46), dict(top_p=0), dict(top_k=0), dict(min_p=2)], ids=str)
def test_sampling_settings_out_of_range_are_a_sentence(options):
    with pytest.raises(ValueError, match='expected'):
        speculative_generate(make('nextlat'), PROMPTS, 5, **options)


def test_logits_that_are_not_finite_are_a_sentence():
    model = make('nextlat')
    with torch.no_grad():
        model.head.weight.mul_(float('nan'))
    with pytest.raises(ValueError, match='computes no finite logits'):
        speculative_generate(model, PROMPTS, 5)


@pytest.mark.parametrize('text, lengths', [('1,3,auto', [1, 3, 'auto']), (' 2 ,2,2', [2]), ('3,1000', [3, 1000])])
def test_draft_lengths_to_compare_are_read_once_each(text, lengths):
    assert draft_lengths(text, make('nextlat'), None) == lengths
    fits = [n for n in lengths if n == 'auto' or n <= 2]
    if fits:
        assert draft_lengths(text, make('mtp'), None) == fits  # it drafts 2 tokens


@pytest.mark.parametrize('text', ['', 'a', '0', '-1', '1,,2', '2.5', '1' * 31, '9' * 5000, '1001', '\0'])
def test_what_is_no_draft_length_is_a_sentence(text):
    with pytest.raises(ValueError, match='a number of tokens from 1 to 1000'):
        draft_lengths(text, make('nextlat'), None)
    with pytest.raises(ValueError, match='this model drafts up to 2 tokens'):
        draft_lengths('3,4', make('mtp'), None)


def test_a_draft_of_another_vocabulary_is_a_sentence():
    with pytest.raises(ValueError, match='the draft model has 3 ids in 4 rows, the model 60 in 64'):
        speculative_generate(make('standard'), PROMPTS, 5, draft=make('standard', **TINY))
    with pytest.raises(ValueError, match='draft_len is 3: this model drafts up to 2 tokens'):
        speculative_generate(make('mtp'), PROMPTS, 5, draft_len=3)
