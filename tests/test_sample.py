"""Generation: the tokens are those of the full forward, drawn from the distribution that was asked for."""
import copy
import io
import os
import signal
import sys

import pytest
import torch
from conftest import ROOT, assert_sentence, run, train_tiny

import attn_kernels
import model_sps
import model_standard
import sample
from common import cpu_forms, start
from common.cpu_forms import KEPT, Choices, choose_cache, pack_weights, use_attention
from common.decoding import generate, roomy_cache, token_probs
from common.files import UserError
from common.int8 import prepare_weights
from common.machine import is_faster
from common.start import quiet_start
from data.tokenizers import load_tokenizer


def make(device='cpu', eos_id=None, module=model_standard, **own):
    torch.manual_seed(0)
    values = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_ids=60, eos_id=eos_id)
    model = module.Model(module.Config(**values, **own))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model.to(device).eval()


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize('eos_id, module', [(None, model_standard), (59, model_standard), (59, model_sps)])
def test_greedy_generation_equals_full_forwards(eos_id, module, device):
    model = make(device, eos_id, module)
    got = generate(model, PROMPTS, 20, temperature=0)
    for prompt, new in zip(PROMPTS, got):
        ids = list(prompt)
        for _ in range(20):
            ids.append(int(model.logits(torch.tensor([ids], device=device))[0, -1].argmax()))
        assert new == ids[len(prompt):]


has_packing = hasattr(torch.ops.mkldnn, '_reorder_linear_weight') and torch.backends.mkldnn.is_available()


@pytest.mark.parametrize('few', [0, 4, 100])
def test_packed_weights_generate_the_same(device, monkeypatch, few):
    monkeypatch.setattr(cpu_forms, 'is_faster', lambda plain, packed, x, **_: len(x) < few)
    model = make(device)
    want = generate(model, PROMPTS, 20, temperature=0)
    packed = pack_weights(copy.deepcopy(model))
    assert generate(packed, PROMPTS, 20, temperature=0) == want
    if device == 'cpu' and has_packing:
        assert ('forward' in packed.head.__dict__) == (few < 100)  # it did pack


@pytest.mark.skipif(not has_packing, reason='this PyTorch has no packed weights')
def test_packed_weights_serve_the_counts_of_vectors_for_which_they_are_not_slower(monkeypatch):
    monkeypatch.setattr(cpu_forms, 'is_faster', lambda plain, packed, x, **_: len(x) < 4)
    head = pack_weights(make()).head
    head.weight.data.zero_()  # of the plain weight alone
    uses_packed = [bool(head(torch.ones(*shape, 32)).any()) for shape in ((1, 1), (3, 1), (4, 1), (1, 4), (2, 9))]
    assert uses_packed == [False, False, True, True, True]


@pytest.mark.skipif(not has_packing, reason='this PyTorch has no packed weights')
def test_the_first_process_chooses_where_weights_are_packed(monkeypatch):
    plain_is_faster = lambda found: found if isinstance(found, tuple) else True
    monkeypatch.setattr(cpu_forms, 'first_of_all', plain_is_faster)
    assert 'forward' not in pack_weights(make()).head.__dict__


TWO_PROCESSES = '''
import os, torch, torch.distributed as dist
from common import cpu_forms
dist.init_process_group('gloo')
cpu_forms.is_faster = lambda plain, packed, x, **_: dist.get_rank() == 1
layer = cpu_forms.pack_weights(torch.nn.Sequential(torch.nn.Linear(8, 8)))[0]
os.write(1, f'packed {"forward" in layer.__dict__}\\n'.encode())  # in one write, so that lines stay whole
dist.destroy_process_group()
'''


@pytest.mark.long
@pytest.mark.skipif(not has_packing, reason='this PyTorch has no packed weights')
def test_two_processes_pack_the_same_weights(tmp_path):
    (tmp_path / 'script.py').write_text(TWO_PROCESSES)
    result = run(tmp_path / 'script.py', processes=2, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert result.stdout.splitlines() == ['packed True'] * 2, result.stderr


def test_what_is_chosen_is_faster_by_more_than_a_tenth_in_its_quietest_round():
    now, seconds = [0.0], {}

    def side(name):
        def call(x):
            now[0] += seconds[name].pop()
        return call
    for quietest, expected in ((0.8, True), (0.95, False), (1.2, False)):
        seconds.update(f=[5.0, quietest, 5.0], g=[1.0, 1.0, 1.0])
        assert is_faster(side('f'), side('g'), None, clock=lambda: now[0]) == expected


class Answers(Choices):
    """Choices that answer each question as `answer` does, and note it."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.asked = answer, []

    def is_faster(self, question, f, g, x):
        f(x), g(x)
        self.asked.append(question)
        return self.answer(question)


@pytest.mark.parametrize('fused', [False, True])
def test_the_cache_of_a_bf16_model_is_kept_and_read_as_is_faster(monkeypatch, fused):
    read = []
    model = make(n_kv_head=1).bfloat16()
    choices = Answers(lambda question: fused if 'fused' in question else question.startswith('1 ') and not fused)
    with monkeypatch.context() as patched:
        patched.setattr(attn_kernels, 'slot_attention', lambda q, k, v, seen: read.append(
            (attn_kernels.products_over_slots, k.dtype, *k.shape[:2])))
        choose_cache(model, choices)
    assert len(choices.asked) == 3 and attn_kernels.products_over_slots == (not fused)
    assert model.cache_in_fp32 == {1: not fused, 16: False}
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [pair[:2] for pair in read[:2]] == [(False, bf16), (True, bf16)]
    assert [(dtype, rows, heads) for _, dtype, rows, heads in read[2:]] == [
        (fp32, 1, 1), (bf16, 1, 1), (fp32, 16, 1), (bf16, 16, 1)]
    assert all(by_products == (not fused) for by_products, *_ in read[2:])
    for rows, dtype in (1, bf16 if fused else fp32), (16, bf16):
        assert roomy_cache(model, [[1]] * rows, 4).k.dtype == dtype
    for other in make(), torch.nn.Linear(2, 2).bfloat16():  # fp32, and no attention
        unasked = Answers(None)
        choose_cache(other, unasked)
        assert not unasked.asked


@pytest.mark.parametrize('rows', [1, 3])
def test_both_forms_of_reading_a_bf16_cache_are_the_attention(monkeypatch, rows):
    torch.manual_seed(0)
    q, k, v = torch.randn(rows, 2, 4, 16), *torch.randn(2, rows, 2, 9, 16)
    seen = torch.rand(rows, 2, 9) < 0.7
    seen[..., 0] = True
    want = attn_kernels._dense_attention(q, k.transpose(1, 2), v.transpose(1, 2), seen)
    for by_products in True, False:
        monkeypatch.setattr(attn_kernels, 'products_over_slots', by_products)
        got = attn_kernels.slot_attention(*(x.bfloat16() for x in (q, k, v)), seen)
        assert got.dtype == torch.bfloat16 and (got - want).abs().max() < 0.03


def test_what_was_faster_is_kept_with_the_run_and_not_measured_again(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_forms, 'is_faster', lambda f, g, x, **_: True)
    first = Choices(tmp_path)
    assert first.is_faster('plain before packed', None, None, None)
    first.keep()
    monkeypatch.setattr(cpu_forms, 'is_faster', None)  # it is not called
    again = Choices(tmp_path)
    assert again.is_faster('plain before packed', None, None, None)
    before = (tmp_path / KEPT).read_bytes()
    (tmp_path / KEPT).unlink()
    again.keep()  # nothing is new
    assert not (tmp_path / KEPT).exists()
    (tmp_path / KEPT).write_bytes(before)
    monkeypatch.setattr(cpu_forms, 'is_faster', lambda f, g, x, **_: False)
    monkeypatch.setattr(cpu_forms, 'this_machine', lambda: 'another one')
    assert not Choices(tmp_path).is_faster('plain before packed', None, None, None)
    for damaged in '{', '[]', 'null', '{"a CPU": 3}', '{"a CPU": {"plain before packed": "false"}}':
        (tmp_path / KEPT).write_text(damaged)
        assert not Choices(tmp_path).of_machines.get('a CPU')


def test_what_cannot_be_kept_is_no_error(tmp_path):
    choices = Choices(tmp_path / 'missing')  # not to be written to
    assert not choices.is_faster('plain before packed', None, None, None)
    choices.keep()
    assert not list(tmp_path.iterdir())


def test_the_first_process_chooses_the_attention_of_training(monkeypatch):
    monkeypatch.setattr(cpu_forms, 'first_of_all', lambda found: {'tiles': 'fused'}[found])
    assert use_attention('auto', 'cpu', torch.bfloat16, 32) == 'fused' and not attn_kernels.tiles_in_bf16


def test_a_model_in_8_bits_has_its_cache_chosen_too():
    assert prepare_weights(make().bfloat16(), 'int8').cache_in_fp32 == {1: False, 16: False}


@pytest.mark.parametrize('fused', [False, True])
def test_attention_of_training_in_bf16_is_what_is_faster(monkeypatch, fused):
    timed, attention = [], attn_kernels.attention

    def noted(*qkv):
        timed.append(attn_kernels.tiles_in_bf16)
        return attention(*qkv)
    monkeypatch.setattr(cpu_forms, 'is_faster', lambda f, g, x, **_: (f(x), g(x), fused)[-1])
    with monkeypatch.context() as patched:
        patched.setattr(attn_kernels, 'attention', noted)
        assert use_attention('auto', 'cpu', torch.bfloat16, 32) == ('fused' if fused else 'tiles')
    assert timed == [False, True]
    tiled = []
    monkeypatch.setattr(attn_kernels, '_tiled_attention', lambda q, *_: tiled.append(1) or q)
    x = torch.ones(1, 32, 2, 16, dtype=torch.bfloat16)
    attn_kernels.attention(x, x, x)
    assert bool(tiled) == (not fused)
    attn_kernels.attention(x, x, x, torch.zeros(1, 32, dtype=torch.int64))  # documents: tiles have keys to skip
    assert len(tiled) == 2 - fused
    for unchosen in ('cpu', torch.float32, 32), ('cuda', torch.bfloat16, 32), ('cpu', torch.bfloat16, 4096):
        assert use_attention('auto', *unchosen) == 'auto'
    with pytest.raises(UserError, match="expected 'auto', 'tiles' or 'fused'"):
        use_attention('flash', 'cpu', torch.bfloat16, 32)


def test_draws_follow_the_distribution(device):
    model = make(device)
    rows = 4000
    got = torch.tensor(generate(model, [[1, 2, 3]] * rows, 2, temperature=0.7, top_k=5, seed=3))
    probs = token_probs(model.logits(torch.tensor([[1, 2, 3]], device=device))[0, -1], 0.7, top_k=5).cpu()
    counts = torch.bincount(got[:, 0], minlength=64)
    assert (counts[probs == 0] == 0).all()
    chi2 = ((counts - rows * probs).square() / (rows * probs).clamp(min=1e-9))[probs > 0].sum()
    assert chi2 < 25  # 4 degrees of freedom: beyond 25 in 5 of 100,000 draws
    first = int(probs.argmax())  # the second token, given the first
    probs_2 = token_probs(model.logits(torch.tensor([[1, 2, 3, first]], device=device))[0, -1], 0.7, top_k=5).cpu()
    second = torch.bincount(got[got[:, 0] == first, 1], minlength=64)
    assert (second / second.sum() - probs_2).abs().max() < 0.06


def test_same_seed_same_text_and_another_seed_another():
    model = make()
    texts = [generate(model, PROMPTS, 10, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_filters():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    expect = lambda want, **kw: torch.testing.assert_close(token_probs(logits, **kw), torch.tensor(want))
    expect([0.5, 0.25, 0.15, 0.1])
    expect([1.0, 0, 0, 0], temperature=0)
    expect([2 / 3, 1 / 3, 0, 0], top_k=2)
    expect([2 / 3, 1 / 3, 0, 0], top_p=0.7)
    expect([1.0, 0, 0, 0], top_p=0.5)
    expect([1.0, 0, 0, 0], top_p=1e-9)
    expect([5 / 9, 2.5 / 9, 1.5 / 9, 0], min_p=0.25)
    expect([x / 0.345 for x in (0.25, 0.0625, 0.0225, 0.01)], temperature=0.5)


def test_rows_end_at_eos_and_at_finished():
    model = make()
    free = generate(model, PROMPTS, 20, temperature=0)
    eos = free[0][4]
    stopped = generate(model, PROMPTS, 20, temperature=0, eos_id=eos)
    for full, cut in zip(free, stopped):
        assert cut == (full[:full.index(eos) + 1] if eos in full else full)
    cut = generate(model, PROMPTS, 20, temperature=0, finished=lambda row, ids: row == 1 and len(ids) == 3)
    assert [len(c) for c in cut] == [20, 3, 20]


def test_empty_prompt_is_a_sentence():
    with pytest.raises(ValueError, match='a prompt is empty'):
        generate(make(), [[1], []], 5)
    tokenizer = load_tokenizer('pointer_chasing')  # to whose symbols a blank is nothing
    record = {'settings': {'block_size': 47}, 'data': {'eos_id': tokenizer.eos_id}}
    with pytest.raises(UserError, match='a prompt has no tokens'):
        sample.encode_prompts(sample.Settings(), tokenizer, record, ['v3 =', ' '])


@pytest.mark.parametrize('temperature', [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_the_distribution_is_right_at_every_temperature_that_is_taken(temperature):
    sample.Settings(temperature=temperature)
    logits = torch.cat([torch.tensor([0.0, 1e-6, -80.0]), torch.full((3,), float('-inf'))])
    want = (logits.double() / temperature).softmax(-1)
    torch.testing.assert_close(token_probs(logits, temperature).double(), want, rtol=1e-4, atol=1e-9)


BAD_SAMPLING = [dict(temperature=1e-46), dict(temperature=1e39), dict(temperature=-1), dict(temperature=float('nan')),
                dict(top_k=0), dict(top_k=-1), dict(top_p=0), dict(top_p=1e-46), dict(top_p=1.1),
                dict(top_p=float('nan')), dict(min_p=-0.1), dict(min_p=float('nan'))]


@pytest.mark.parametrize('options', BAD_SAMPLING, ids=str)
def test_sampling_settings_out_of_range_are_a_sentence(options):
    name, = options
    with pytest.raises(ValueError, match=f'{name} is .*: expected'):
        generate(make(), PROMPTS, 3, **options)
    with pytest.raises(UserError, match=f'{name} is .*: expected'):
        sample.Settings(**options)


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_logits_that_are_not_finite_are_a_sentence(device, bad):
    model = make(device)
    with torch.no_grad():
        model.norm.weight.mul_(bad)
    with pytest.raises(UserError, match='computes no finite logits'):
        generate(model, PROMPTS, 3)


def test_output_in_an_encoding_without_the_character_has_its_code(monkeypatch):
    before, out = signal.getsignal(signal.SIGINT), io.TextIOWrapper(io.BytesIO(), encoding='ascii')
    monkeypatch.setattr(sys, 'stdout', out)
    try:
        quiet_start()
    finally:
        signal.signal(signal.SIGINT, before)
    print('aé日', end='', flush=True)
    assert out.buffer.getvalue() == rb'a\xe9\u65e5'


@pytest.mark.parametrize('running, decodes, spins', [
    ('1', True, '15000'), ('321', True, '15000'), ('322', True, '1000'), ('1', False, '5000'), ('x', True, '15000')])
def test_threads_that_wait_spin_for_long_only_where_no_others_run(monkeypatch, running, decodes, spins):
    looks, before = iter(running), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(start, 'open', lambda path: io.StringIO(f'0.9 0.5 0.1 {next(looks)}/83 3258'), raising=False)
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys, 'stderr', io.TextIOWrapper(io.BytesIO()))
    monkeypatch.delenv('GOMP_SPINCOUNT')
    try:
        quiet_start(decodes)
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.environ['GOMP_SPINCOUNT'] == spins


# ---- the command line ----

@pytest.fixture(scope='module')
def trained(tiny_data, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'trained'
    assert train_tiny(tiny_data, out, '--block_size=64', steps=10).returncode == 0
    return out


@pytest.mark.slow
def test_command_line(trained, tmp_path):
    one = run('sample.py', trained, 'ab cd', '--max_new_tokens=20', '--ignore_eos')
    assert one.returncode == 0 and one.stdout.startswith('ab cd')
    assert '20 tokens in' in one.stderr and 'cache' in one.stderr
    assert_sentence(run('sample.py', trained, 'a', '--stop'), '--stop needs a value: write --stop=VALUE')
    (tmp_path / 'prompts.txt').write_text('ab\ncd e\n')
    many = run('sample.py', trained, 'first', f'--file={tmp_path}/prompts.txt', '--max_new_tokens=5')
    assert many.stdout.count('---') == 3 and 'cd e' in many.stdout
    assert not has_packing or (trained / KEPT).exists()
    again = run('sample.py', trained, 'ab cd', '--max_new_tokens=20', '--ignore_eos')
    assert again.stdout == one.stdout


@pytest.mark.slow
def test_stop_strings_and_utf8(trained, monkeypatch, capsys):
    """A stop string cut into tokens never shows; a character cut into bytes shows whole."""
    text = 'é日x END tail'.encode()

    def fake(model, prompts, n, *, finished, on_tokens, **_):
        new = [[]]
        for byte in text:
            new[0].append(byte)
            done = finished(0, new[0])
            on_tokens(new)
            if done:
                break
        return new
    monkeypatch.setattr(sample, 'generate', fake)
    sample.main([str(trained), 'p', '--stop=END', '--max_new_tokens=20'])
    assert capsys.readouterr().out == 'pé日x \n'


@pytest.mark.slow
def test_the_new_tokens_are_as_many_as_the_context_holds(trained):
    """The run's context is 64 tokens, fewer than the 200 of old; training prints this command at its end."""
    for prompt, *options, n_new in (('ab cd', 60), ('a' * 64, 1), ('a' * 90, '--truncate', 32)):
        result = run('sample.py', trained, prompt, '--ignore_eos', *options)
        assert result.returncode == 0 and f'{n_new} tokens in' in result.stderr, result.stderr
    assert_sentence(run('sample.py', trained, 'a' * 65), 'a prompt of 65 tokens and 1 new ones do not fit')


@pytest.mark.slow
def test_an_empty_prompt_starts_from_eos(trained):
    result = run('sample.py', trained, '', '--max_new_tokens=5', '--ignore_eos')
    assert result.returncode == 0 and '5 tokens in' in result.stderr, result.stderr
    record = {'settings': {'block_size': 64}, 'data': {'eos_id': 256}}
    tokenizer = load_tokenizer('byte')
    assert sample.encode_prompts(sample.Settings(), tokenizer, record, ['', 'a'])[0] == [[256], [97]]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, 'openpty'), reason='needs a pseudo-terminal')
def test_prompts_are_typed_on_a_terminal_until_end_of_file(trained, monkeypatch, capsys):
    """A prompt that does not fit is refused in a sentence, and the next one, an empty line, is answered."""
    here, there = os.openpty()
    with open(there) as terminal, open(here, 'wb', buffering=0) as typed:
        typed.write(b'ab cd\n' + b'a' * 70 + b'\n\n\x04')
        monkeypatch.setattr(sys, 'stdin', terminal)
        sample.main([str(trained), '--max_new_tokens', '9', '--ignore_eos'])
    shown = capsys.readouterr()
    assert shown.out.startswith('ab cd') and shown.err.count('9 tokens in') == 2
    assert 'a prompt of 70 tokens and 9 new ones do not fit' in shown.err and shown.err.count('> ') == 4


@pytest.mark.slow
def test_bad_input_is_a_sentence(trained, tmp_path):
    assert_sentence(run('sample.py'), 'which run?')
    assert_sentence(run('sample.py', tmp_path / 'none', 'a'), f'{tmp_path}/none is not a run folder')
    assert_sentence(run('sample.py', trained), 'a prompt is empty')
    assert_sentence(run('sample.py', trained, '--prompt=a b'), 'a prompt has no name: python sample.py')
    assert_sentence(run('sample.py', trained, '-n', '5'), 'unknown option -n')
    assert_sentence(run('sample.py', trained, 'a', '--top_k=0'), 'top_k is 0: expected at least 1')
    assert_sentence(run('sample.py', trained, 'a', '--min_p=2'), 'min_p is 2.0: expected 0 to 1')
    assert_sentence(run('sample.py', trained, 'a', '--stop=\udcff'), "stop is '\\udcff': expected text in UTF-8")
    assert_sentence(run('sample.py', trained, 'a', f'--file={tmp_path}'), f'there is no prompt file {tmp_path}')
    (tmp_path / 'blank.txt').write_text('\n')
    assert_sentence(run('sample.py', trained, f'--file={tmp_path}/blank.txt'), 'blank.txt has no prompts')
    assert_sentence(run('sample.py', '', 'a'), 'an empty name is not a run folder')
    assert run('sample.py', trained, 'a\0\udcff\ud800', '--max_new_tokens=2').returncode == 0
    assert_sentence(run('sample.py', trained, 'a' * 60, '--max_new_tokens=20'), 'a prompt of 60 tokens and 20 new ones',
                    '64', '--truncate')
    assert run('sample.py', trained, 'a' * 60, '--max_new_tokens=20', '--truncate').returncode == 0
