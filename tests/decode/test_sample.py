"""Generation: sampling distributions, ends of texts, prompts, and streamed output."""
import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_sentence, run, succeeded
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculative import PROMPTS, make

import sample
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.decode.generation import generate, token_probs
from lm_architectures.decode.speculation import speculative_generate
from lm_architectures.files import UserError
from lm_architectures.run import load


def test_cpu_decoding_is_in_fp32_even_under_autocast():
    model, seen = make('standard'), []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast('cpu', torch.bfloat16):
        generate(model, PROMPTS, 3)
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize('options, want', [
    ({}, [0.5, 0.25, 0.15, 0.1]), ({'temperature': 0}, [1, 0, 0, 0]), ({'top_k': 2}, [2 / 3, 1 / 3, 0, 0]),
    ({'top_p': 0.7}, [2 / 3, 1 / 3, 0, 0]), ({'top_p': 0.5}, [1, 0, 0, 0]), ({'top_p': 1e-9}, [1, 0, 0, 0]),
    ({'min_p': 0.25}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
    ({'temperature': 0.5}, [x / 0.345 for x in (0.25, 0.0625, 0.0225, 0.01)])], ids=str)
def test_filters_give_the_expected_probabilities(options, want):
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    torch.testing.assert_close(token_probs(logits, **options), torch.tensor(want, dtype=torch.float32))


def drafted(model, prompts, n, **options):
    return speculative_generate(model, prompts, n, draft=make('standard'), **options)[0]


@pytest.mark.parametrize('decode', [generate, drafted])
def test_a_seed_repeats_the_text_and_rows_end_at_eos_and_at_finished(decode):
    model = make('standard')
    texts, again, other = (decode(model, PROMPTS, 30, seed=seed) for seed in (3, 3, 4))
    assert texts == again != other
    free = decode(model, PROMPTS, 20, temperature=0)
    for ends in ([free[0][4]], [free[1][2], 999, free[0][4]]):
        for full, text in zip(free, decode(model, PROMPTS, 20, temperature=0, eos_id=ends if ends[1:] else ends[0])):
            assert text == full[:next((i + 1 for i, token in enumerate(full) if token in ends), 20)]
    texts = decode(model, PROMPTS, 20, temperature=0, finished=lambda row, ids: row == 1 and len(ids) == 3)
    assert [len(text) for text in texts] == [20, 3, 20]


@pytest.mark.parametrize('temperature', [0, 1e-46, 1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_token_probabilities_are_right_at_every_temperature(temperature):
    sample.Settings(temperature=temperature)
    logits = torch.cat([torch.tensor([0.0, 1e-6, -80.0]), torch.full((3,), float('-inf'))])
    want = (logits.double() / max(temperature, 1e-15)).softmax(-1)
    torch.testing.assert_close(token_probs(logits, temperature).double(), want, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize('options', [dict(temperature=-1), dict(temperature=float('nan')),
                                     dict(top_k=0), dict(top_p=0), dict(top_p=1.1), dict(min_p=-0.1)], ids=str)
def test_sampling_settings_out_of_range_give_a_clear_error(options):
    name, = options
    for call in (functools.partial(generate, make('standard'), PROMPTS, 3), sample.Settings,
                 functools.partial(drafted, make('standard'), PROMPTS, 3)):
        with pytest.raises(UserError, match=f'{name} is .*: expected'):
            call(**options)


@pytest.mark.parametrize('drafting', [False, True], ids=['plain', 'drafted'])
def test_empty_prompts_and_non_finite_logits_give_a_clear_error(device, drafting):
    model = make('standard').to(device)
    decode = functools.partial(speculative_generate, draft=make('standard').to(device)) if drafting else generate
    with pytest.raises(UserError, match='a prompt is empty'):
        decode(model, [[1], []], 5)
    with torch.no_grad():
        model.norm.weight.mul_(float('nan'))
    with pytest.raises(UserError, match='the logits of a prompt are not finite'):
        decode(model, PROMPTS, 3)


# ---- prompts and texts ----

def byte_run(block_size):
    """Return a run without a model, for its prompts and texts."""
    run = load.Run.__new__(load.Run)
    run.tokenizer, run.model, run.block_size = load_tokenizer('byte'), None, block_size
    run.record = {'data': {'eos_id': 256}}
    return run


@pytest.mark.parametrize('prompt, options, want', [
    ('ab', {}, ([97, 98], 47)), ('a' * 48, {}, ([97] * 48, 1)), ('', {}, ([256], 48)),
    ('ab' * 20, dict(max_new_tokens=9), ([97, 98] * 20, 9)),
    ('a' * 49, {}, 'a prompt of 49 tokens plus 1 new tokens exceeds the context of 48: lower --max_new_tokens'),
    ('a', dict(max_new_tokens=49), 'exceeds the context of 48')])
def test_prompt_and_new_tokens_fit_the_context(prompt, options, want):
    """The last new token is not read again. An empty prompt starts a document."""
    with pytest.raises(UserError, match=want) if isinstance(want, str) else contextlib.nullcontext():
        generation = load.Generation(byte_run(48), [prompt], load.Options(**options))
        assert (*generation.prompts, generation.n_new) == want


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from('éENDx日')), st.sampled_from([None, 'END', 'é', 'NDE']))
def test_text_is_streamed_up_to_the_stop_string(text, stop):
    """Never prints part of a stop string that spans tokens, or part of a character."""
    def steps(*_, finished, **__):
        for n in range(1, 1 + len(text.encode())):
            is_last = finished(0, [*text.encode()[:n]])
            yield [[*text.encode()[:n]]]
            if is_last:
                return
    generation, shown = load.Generation(byte_run(9), [''], load.Options(stop=stop)), ''
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load.generation, 'generation_steps', steps)
        patch.setattr(load.generation, 'allocate_cache', lambda *_: SimpleNamespace(nbytes=0))
        for piece in generation:
            shown += piece
            assert text.startswith(shown)
    assert [shown] == generation.texts == [text.partition(stop)[0] if stop else text]


# ---- the command line ----

@pytest.mark.slow
def test_command_line(tiny_run, tmp_path):
    one, again = (run('sample.py', tiny_run, 'ab cd', '--max_new_tokens=20', '--ignore_eos') for _ in range(2))
    assert one.returncode == 0 and one.stdout.startswith('ab cd') and again.stdout == one.stdout
    assert '20 tokens in' in one.stderr and 'cache' in one.stderr
    (tmp_path / 'prompts.txt').write_text('ab\ncd e\n')
    many = run('sample.py', tiny_run, 'first', f'--file={tmp_path}/prompts.txt', '--max_new_tokens=5')
    assert many.stdout.count('---') == 3 and 'cd e' in many.stdout
    assert run('sample.py', tiny_run, 'a\0\udcff\ud800', '--max_new_tokens=2', '--stop=\udcff').returncode == 0
    literal = succeeded(run('sample.py', '--max_new_tokens=2', tiny_run, '--', '--help', '-h', '--'))
    assert '\n--help' in literal.stdout and '\n-h' in literal.stdout and literal.stdout.count('\n--- ') == 2


@pytest.mark.slow
@pytest.mark.parametrize('args, part', [
    ([], 'no run given'), (['none', 'a'], 'none is not a run folder'), (['', 'a'], 'an empty name is not a run folder'),
    (['RUN'], 'no prompt'), (['RUN', 'a', '--file=none.txt'], "No such file or directory: 'none.txt'"),
    (['RUN', 'a', '--min_p=2'], 'min_p is 2.0: expected 0 to 1')])
def test_bad_input_gives_a_clear_error(tiny_run, args, part):
    assert_sentence(run('sample.py', *[tiny_run if arg == 'RUN' else arg for arg in args]), part)
