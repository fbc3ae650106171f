"""What is edited for whole windows alone is noticed before decoding: texts and scores are those of the edited model."""
import copy

import pytest
import torch
from test_models import VARIANTS, make, some_tokens

import model_context_ready
import model_standard
from attn_kernels import KVCache, attention, document_starts, rope_table, rotate
from common import extend_check
from common.decoding import generate
from common.extend_check import extend_error
from common.files import say_once
from common.int8 import quantize
from common.scoring import Scorer
from common.speculative import speculative_generate

QUICK = ('standard, documents', 'sps', 'reverse_sps', 'context_ready', 'nextlat', 'bst', 'gdn, documents, loop')


class WindowInEachSecond(model_standard.Model):
    """An edit of `final_hidden`: every second layer sees 8 tokens back. The cache knows nothing of it."""
    short = 8

    def final_hidden(self, idx):
        c = self.config
        starts = document_starts(idx, c.eos_id)
        table = rope_table(torch.arange(idx.shape[1]), c.head_size, c.rope_theta)
        return self._run_blocks(idx, lambda qk: rotate(qk, *table),
                                lambda layer, q, k, v: attention(q, k, v, starts, self.short if layer % 2 else None))


@pytest.fixture
def model():
    plain = make('standard, documents')
    edited = WindowInEachSecond(plain.config).eval()
    edited.load_state_dict(plain.state_dict())
    say_once.cache_clear()
    return edited


def test_an_edit_of_whole_windows_alone_is_decoded_and_scored_as_edited(model, capsys):
    prompts = some_tokens(2, 20, 1).tolist()
    for prompt, new in zip(prompts, generate(model, prompts, 6, temperature=0)):
        for token in new:
            assert token == model.logits(torch.tensor([prompt]))[0, -1].argmax()
            prompt.append(token)
    (context, continuation), = requests = [(prompts[0][:18], prompts[0][18:])]
    (nats, _, _), = Scorer(model, 64).score(requests)
    logits = model.logits(torch.tensor([context + continuation[:-1]]))[0, len(context) - 1:].log_softmax(-1)
    assert nats == pytest.approx(logits.gather(1, torch.tensor(continuation)[:, None]).sum().item(), abs=1e-4)
    err = capsys.readouterr().err
    assert err.count('extend, by which it decodes, differs from logits by') == 1, err


def test_an_edit_is_seen_that_needs_a_long_document(model):
    model.short = 100
    assert extend_error(model) > 0.01


def test_a_longer_window_is_read_to_its_end(monkeypatch):
    model, begin = make('standard, window'), KVCache.begin
    model.config.window = 200
    assert extend_error(model) < 1e-5

    def with_a_shorter_window(cache, tokens, lengths=None):
        cache.windows = [150]
        return begin(cache, tokens, lengths)
    monkeypatch.setattr(KVCache, 'begin', with_a_shorter_window)
    assert extend_error(model) > 0.01


def test_an_extend_that_takes_padding_for_a_row_s_last_token_is_noticed(monkeypatch):
    model = make('standard, documents')
    monkeypatch.setattr(KVCache, 'end', lambda self, place, h, end=KVCache.end: (end(self, place, h), h[:, -1])[1])
    assert extend_error(model) > 0.01


def test_a_fault_that_the_first_weights_hide_is_found_as_they_have_moved(model):
    model.position = torch.nn.Parameter(torch.zeros(model.config.n_embd))
    model.short, final_hidden = None, model.final_hidden
    model.final_hidden = lambda idx: final_hidden(idx) + model.position
    assert extend_check.has_right_extend(model)
    model.position.data[0] = 1.0
    extend_check.weights_moved(model)
    assert not extend_check.has_right_extend(model)


def test_an_edit_by_which_x_reads_rho_is_noticed_where_a_prefill_runs_x_alone():
    model = make('sps, window 0')
    assert extend_error(model) < 1e-5
    for block in model.blocks:  # a mean over the streams
        block.attn_norm.register_forward_pre_hook(lambda _, args: (args[0] + 0.5 * args[0].mean(1, keepdim=True),))
    assert extend_error(model) > 0.01


@pytest.mark.parametrize('variant', ['standard, documents', 'sps', 'context_ready', 'nextlat', 'bst', 'gpn', 'gdn'])
def test_an_edit_of_the_logits_alone_is_said_to_be_no_part_of_the_loss(variant, capsys, monkeypatch):
    model = make(variant).train()
    say_once.cache_clear()
    before = torch.random.get_rng_state()
    extend_check.tell_of_another_loss(model)
    assert capsys.readouterr().err == '' and model.training and (torch.random.get_rng_state() == before).all()
    for p in model.parameters():  # as training starts: logits are so small that a cap does nothing to them
        p.data.mul_(0.1 if p.dim() > 1 else 1)
    logits = model.logits
    monkeypatch.setattr(model, 'logits', lambda idx: 30 * torch.tanh(logits(idx) / 30))
    extend_check.tell_of_another_loss(model)
    assert 'the loss that it trains by differs from that of its logits, by' in capsys.readouterr().err
    monkeypatch.setattr(model, 'logits', lambda: None)
    extend_check.tell_of_another_loss(model)
    assert 'its loss cannot be compared with its logits (TypeError: ' in capsys.readouterr().err


@pytest.mark.parametrize('variant', ['standard', 'nextlat', 'bst'])
def test_a_bias_of_the_head_is_said_to_be_no_part_of_the_loss(variant):
    model = make(variant)
    model.head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    assert extend_check.loss_error(model) > 0.001


@pytest.mark.parametrize('variant', ['bst', 'bst, documents, half of the pairs'])
@pytest.mark.parametrize('edited', ['_next_state', '_pair_states'])
def test_an_edit_of_bsts_prefixes_in_training_or_in_generation_alone_is_said(variant, edited, monkeypatch):
    model = make(variant)
    share, plain = model._from_prefix, getattr(model, edited)

    def with_another_share(*args):
        with monkeypatch.context() as patch:
            patch.setattr(model, '_from_prefix', lambda f: share(f).relu())
            return plain(*args)
    monkeypatch.setattr(model, edited, with_another_share)
    assert extend_check.loss_error(model) > 0.001
    monkeypatch.setattr(model, edited, plain)
    monkeypatch.setattr(model, '_from_prefix', lambda f: share(f).relu())
    assert extend_check.loss_error(model) < 1e-5


@pytest.mark.parametrize('variant', VARIANTS)
def test_no_model_is_taken_for_one_of_another_loss(variant):
    assert extend_check.loss_error(make(variant)) < 1e-5


@pytest.mark.parametrize('variant', ['roformer', 'context_ready, documents, window', 'context_ready, bptt'])
def test_an_edit_of_context_readys_windows_reaches_its_logits_and_is_decoded(variant, capsys, monkeypatch):
    model, idx = make(variant), some_tokens(1, 20, 1)
    say_once.cache_clear()
    plain, table = model.logits(idx), model_context_ready.rope_table
    # positions of whole windows alone: the cache makes its own table
    monkeypatch.setattr(model_context_ready, 'rope_table', lambda position, D, theta, scaling: table(
        3 * position, D, theta, scaling))
    model.scan_report = {'scan': 'loop', 'device': 'cpu', 'unused': []}
    edited = model.logits(idx)
    assert (edited - plain)[..., :59].abs().max() > 1e-3
    new, = generate(model, idx.tolist(), 1, temperature=0)
    assert new == [edited[0, -1].argmax()] and 'differs from logits' in capsys.readouterr().err


def test_an_extend_that_fails_is_said_and_done_without(model, capsys, monkeypatch):
    monkeypatch.setattr(WindowInEachSecond, 'extend', lambda *args, **options: torch.zeros(2) + torch.zeros(3))
    prompts = some_tokens(1, 20, 1).tolist()
    assert len(generate(model, prompts, 3)[0]) == 3
    assert 'extend, by which it decodes, fails (RuntimeError: The size of' in capsys.readouterr().err


def test_a_model_whose_extend_is_wrong_does_not_draft_for_itself(model):
    prompts = some_tokens(1, 20, 1).tolist()
    model.longest_draft = 2
    with pytest.raises(ValueError, match='its extend differs from its logits'):
        speculative_generate(model, prompts, 4)
    new, _ = speculative_generate(model, prompts, 4, draft=make('standard, documents'), draft_len=2, temperature=0)
    assert new == generate(model, prompts, 4, temperature=0)


@pytest.mark.parametrize('variant', [pytest.param(v, marks=() if v in QUICK else pytest.mark.long) for v in VARIANTS])
def test_no_model_is_taken_for_an_edited_one(variant):
    model = make(variant)
    if not hasattr(model, 'extend'):
        pytest.skip(f'{variant} has no extend')
    model.train()
    model.embed.eval()
    assert extend_error(model) < 1e-5 and model.training and not model.embed.training
    assert extend_error(copy.deepcopy(model).bfloat16()) < 0.04
    if hasattr(model, 'choose_scan'):
        model.choose_scan()
    if not getattr(model, 'reads_weights', False):
        quantize(model.double())  # in fp32 the two forms round apart, and 8-bit numbers by a whole step
        assert model.extend_fault is None and extend_error(model) < 1e-5


def test_of_several_processes_one_says_a_line(capsys, monkeypatch):
    for rank, said in (('1', ''), ('0', 'a line of its own\n')):
        say_once.cache_clear()
        monkeypatch.setenv('RANK', rank)
        say_once('a line of its own')
        assert capsys.readouterr().err == said
