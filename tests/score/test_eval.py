"""eval.py: scores against full forward passes, and local tasks (vs lm-eval: test_export.py)."""
import json
import logging
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_sentence, eval_lines, run, succeeded, trained_run
from test_models import make

import eval as judge
from analysis.runs import evaluations
from lm_architectures.data import open_data
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.files import UserError
from lm_architectures.run import checkpoint, folders, records
from lm_architectures.score.benchmarks import local_records
from lm_architectures.score.scoring import Scorer

lm_eval = pytest.importorskip('lm_eval')
from lm_architectures.score import lm_eval_adapter
from lm_architectures.score.lm_eval_adapter import RunLM


@pytest.fixture(scope='module')
def trained(tiny_data, tmp_path_factory):
    """Train model_standard without document masking, as in Llama."""
    return trained_run(tiny_data, tmp_path_factory.mktemp('runs') / 'run', 'config/standard_xs.py', '--eos_id=None')


@pytest.fixture(autouse=True, scope='module')
def small_index():
    """Index only the tasks that are used here: lm-eval's whole index takes 8 s."""
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in (
        'arc', 'glue', 'hellaswag', 'lambada', 'mmlu/default', 'piqa', 'sciq', 'siqa', 'winogrande', 'wikitext', 'c4')]
    index = lm_eval.tasks.TaskManager(include_path=[*folders, lm_eval_adapter.OUR_TASKS], include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval_adapter, 'task_manager', lambda: index)
        yield


@pytest.fixture(scope='module')
def benchmarks(tmp_path_factory):
    """Write small files in the formats of the benchmarks."""
    folder, rng = tmp_path_factory.mktemp('benchmarks'), random.Random(0)
    words = lambda n: ' '.join(''.join(rng.choices('abcdefgh', k=rng.randint(1, 4))) for _ in range(n))
    files = {
        'arc_easy': lambda i: {'query': f'Question: {words(4)}?', 'choices': [words(1) for _ in range(4)], 'gold': i},
        'arc_challenge': lambda i: {'question': {'stem': words(4), 'choices': [{'text': words(1), 'label': x}
                                                                               for x in 'ABCD']}, 'answerKey': 'C'},
        'piqa': lambda i: {'goal': words(3), 'sol1': words(2), 'sol2': words(2)},
        'sciq': lambda i: {'question': words(3), **{f'distractor{n}': words(1) for n in (1, 2, 3)},
                           'correct_answer': words(1), 'support': words(4)},
        'hellaswag': lambda i: {'activity_label': words(1), 'ctx_a': words(3), 'ctx_b': words(1),
                                'endings': [words(2) for _ in range(4)], 'label': '1'},
        'winogrande': lambda i: {'sentence': f'{words(2)} _ {words(2)}', 'option1': 'a', 'option2': 'c', 'answer': '2'},
        'social_iqa': lambda i: {'context': words(3), 'question': words(2), 'answerA': 'a', 'answerB': 'b',
                                 'answerC': 'c'},
        'lambada_openai': lambda i: {'context': words(6), 'continuation': words(1)},
        'lambada_standard': lambda i: {'text': words(6)},
        'wikitext': lambda i: {'page': f' = {words(1)} = \n {words(30)} @-@ {words(9)}'},
        **dict.fromkeys(('c4', 'books3', 'govreport'), lambda i: {'text': words(40)})}
    for name, record in files.items():
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(record(i)) + '\n' for i in range(4)))
    (folder / 'piqa_labels.lst').write_text('0\n1\n1\n0\n')
    (folder / 'social_iqa_labels.lst').write_text('1\n2\n3\n1\n')
    return folder


@pytest.mark.parametrize('variant', ['standard', 'standard, documents', 'sps', 'reverse_sps', 'gpn'])
@pytest.mark.parametrize('logits', [2 ** 26, 64 * 40])
def test_scores_equal_full_forward_log_likelihoods(variant, logits):
    """Covers shared contexts, one-token and long continuations, and truncated contexts."""
    model, rng, requests = make(variant), random.Random(0), []
    ids = lambda n: [rng.randrange(60) for _ in range(n)]
    for _ in range(12):
        context = ids(rng.randint(1, 20))
        requests += [(context, ids(rng.randint(1, 6))) for _ in range(rng.choice([1, 3, 4]))]
    requests += [(ids(1), ids(70)), (ids(5), ids(90)), (ids(3), ids(100)), (ids(120), ids(3))]
    scorer = Scorer(model, 100, batch_tokens=300, max_logits=logits)
    for (context, continuation), (nats, greedy, first) in zip(requests, scorer.score(requests)):
        window = (context + continuation)[-101:]
        want = model.logits(torch.tensor([window[:-1]]))[0].log_softmax(-1)[-len(continuation):]
        targets = torch.tensor(continuation)
        assert abs(want.gather(1, targets[:, None]).sum().item() - nats) < 2e-4
        assert greedy == bool((want.argmax(-1) == targets).all()) and first == bool(want[0].argmax() == targets[0])
    assert scorer.truncated == 2
    for request, part in ((([1], ids(101)), 'a continuation of 101 tokens exceeds max_length = 100'),
                          (([1], []), 'empty context or continuation'), (([], [1]), 'empty context or continuation')):
        with pytest.raises(UserError, match=part):
            scorer.score([([1, 2], [3]), request])


@pytest.mark.slow
def test_answers_end_at_stop_strings_and_sampled_answers_differ(trained):
    model, _ = folders.load_run(trained)
    lm = RunLM(Scorer(model, 32, batch_tokens=64), load_tokenizer('byte'))
    requests = [SimpleNamespace(args=(text, {'until': ['e'], 'max_gen_toks': n}))
                for text, n in (('ab cd', 12), ('', 5), ('a' * 60, 12), ('ab', 12))]
    texts = lm.generate_until(requests)
    assert texts == [lm.generate_until([request])[0] for request in requests]
    assert not any('e' in text for text in texts) and len(texts[1]) <= 5
    again = lm.generate_until([SimpleNamespace(args=('ab', {'do_sample': True, 'max_gen_toks': 12}))] * 8)
    assert len(set(again)) == 8


@pytest.mark.parametrize('options, want', [
    ({'max_new_tokens': 7}, (7, 0)), ({'max_gen_toks': 5, 'temperature': 0.5}, (5, 0.5)),
    ({'do_sample': False, 'temperature': 0.5}, (16, 0)), ({'do_sample': True, 'top_k': 0}, (16, 1.0))])
def test_generation_options_follow_lm_eval(options, want, monkeypatch):
    """The prompt keeps at least half of the 32-token window and is truncated at its start."""
    asked = []

    def generate(model, prompts, n, **given):
        asked.append((n, given['temperature'], prompts))
        assert given.get('top_k') is None
        return [[0]]
    monkeypatch.setattr(lm_eval_adapter, 'generate', generate)
    scorer = SimpleNamespace(model=None, max_length=32, truncated=0, batch_tokens=64)
    RunLM(scorer, load_tokenizer('byte')).generate_until([SimpleNamespace(args=('a' * 30, options))])
    assert asked == [(*want, [[97] * min(30, 32 - want[0])])] and scorer.truncated == 1


@pytest.mark.slow
def test_tasks_run_on_files_as_published(trained, tmp_path):
    """Covers labels in a separate file and a task with unusual split names."""
    files = {'winogrande': {'sentence': 'a _ b', 'option1': 'c', 'option2': 'd'},
             'mnli': {'premise': 'a', 'hypothesis': 'b', 'label': 1}}
    for name, record in files.items():
        (tmp_path / f'{name}.jsonl').write_text(2 * (json.dumps(record) + '\n'))
    (tmp_path / 'winogrande_labels.lst').write_text('1\n2\n')
    trained = shutil.copytree(trained, tmp_path / 'run')
    result = succeeded(run('eval.py', trained, '--tasks=winogrande,mnli', f'--data_dir={tmp_path}'))
    assert 'winogrande acc' in result.stdout and 'mnli acc' in result.stdout
    assert_sentence(run('eval.py', trained, '--tasks=mmlu', f'--data_dir={tmp_path}'),
                    'mmlu is a group of lm-eval tasks: with --data_dir, name the tasks one by one')


@pytest.mark.slow
def test_few_shot_examples_come_from_the_training_file(trained, benchmarks, tmp_path, monkeypatch):
    """Two examples with answers precede each question; corpora have none."""
    folder, out, asked = tmp_path / 'benchmarks', shutil.copytree(trained, tmp_path / 'run'), []
    shutil.copytree(benchmarks, folder)
    command = ['eval.py', out, '--tasks=sciq', '--corpus=c4', f'--data_dir={folder}', '--num_fewshot=2', '--device=cpu']
    assert_sentence(run(*command), 'no file for sciq: expected sciq_train.jsonl')
    shown = {'question': 'an example', 'support': '', 'correct_answer': 'yes',
             **{f'distractor{i}': 'no' for i in (1, 2, 3)}}
    (folder / 'sciq_train.jsonl').write_text(3 * f'{json.dumps(shown)}\n')
    tokens_of = RunLM._loglikelihood_tokens

    def spy(self, requests, **kwargs):
        asked.extend(context for (context, _), *_ in requests)
        return tokens_of(self, requests, **kwargs)
    monkeypatch.setattr(RunLM, '_loglikelihood_tokens', spy)
    result = succeeded(run(*command))
    assert asked and all(context.count('Question: an example\nAnswer: yes') == 2 for context in asked)
    assert 'c4 word_perplexity' in evaluations(out / 'eval.jsonl')  # without examples
    assert eval_lines(out)[-1]['settings']['num_fewshot'] == 2 and 'sciq acc num_fewshot=2' in evaluations(
        out / 'eval.jsonl')
    assert result.stdout.count('c4 nats_per_word') == 1


@pytest.mark.slow
def test_every_run_is_one_column_of_one_table(trained, tmp_path):
    """Also if a later run fails; and lm-eval's warnings need --verbose."""
    a, b = (shutil.copytree(trained, tmp_path / name) for name in 'ab')
    result = succeeded(run('eval.py', a, b, a, '--val', '--val_tokens=64', '--device=cpu'))
    assert result.stdout.count('val nats_per_token') == 1 and result.stdout.count('checkpoint of step') == 2
    assert not logging.getLogger('lm_eval.api.task').isEnabledFor(logging.WARNING)
    result = run('eval.py', a, tmp_path / 'none', '--val', '--val_tokens=64', '--device=cpu', '--verbose')
    assert_sentence(result, 'none is not a run folder')
    assert 'val nats_per_token' in result.stdout and logging.getLogger('lm_eval.api.task').isEnabledFor(logging.WARNING)


@pytest.mark.slow
def test_papers_and_validation_from_the_command_line(trained, benchmarks, tiny_data, tmp_path):
    sets = {'sps': ['arc_easy acc_norm', 'books3 nats_per_word', 'average accuracy', 'average nats_per_word'],
            'nextlat': ['wikitext word_perplexity', 'social_iqa acc', 'winogrande acc', 'arc_challenge acc_norm'],
            'gpn': ['lambada_first_token perplexity']}
    out = shutil.copytree(trained, tmp_path / 'run')
    for paper, rows in sets.items():
        result = succeeded(run('eval.py', out, '--val', '--val_tokens=640', f'--paper={paper}',
                               f'--data_dir={benchmarks}', '--max_length=200', '--device=cpu', '--dtype=float32'))
        for row in rows:
            assert row in result.stdout
    lines = eval_lines(out)
    val = lines[-1]['results']['val']
    trained_to = [r['val'] for r in records.read_log(trained) if 'val' in r][-1]
    assert val['perplexity'] == pytest.approx(math.exp(val['nats_per_token'])) and len(lines) == 3
    assert val['nats_per_token'] == pytest.approx(trained_to, abs=1e-4)
    info = open_data(str(tiny_data)).splits['val']  # document masking is off, so eos counts like any token
    assert val['bits_per_byte'] == pytest.approx(val['nats_per_token'] / math.log(2) * info['tokens'] / info['bytes'])
    accuracies = [lines[0]['results'][task][metric] for task, metric in judge.PAPERS['sps'][0].items()]
    assert lines[0]['results']['average']['accuracy'] == pytest.approx(sum(accuracies) / 5)


@pytest.mark.slow
def test_scores_record_the_step_of_the_checkpoint(trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / 'run')
    whole = checkpoint.checkpoints(out)[0]
    step, before = map(checkpoint.step_of, checkpoint.checkpoints(out)[:2])
    args, named = ['eval.py', out, '--val', '--device=cpu'], 'val nats_per_token'
    assert f'checkpoint of step {step} of {step}\n' in run(*args).stdout
    shutil.rmtree(whole)
    assert f'checkpoint of step {before} of {step}\n' in run(*args).stdout
    lines = eval_lines(out)
    assert [(line['step'], line['of_steps']) for line in lines] == [(step, step), (before, step)]
    final, unfinished = (line['results']['val']['nats_per_token'] for line in lines)
    assert run(*args, '--max_length=16').returncode == 0
    found = evaluations(out / 'eval.jsonl')
    assert found[named] == final and found[f'{named} step={before}'] == unfinished != final
    assert f'{named} max_length=16 step={before}' in found


@pytest.mark.slow
@pytest.mark.parametrize('tasks', ['lambada_first_token',
                                   pytest.param('arc_easy,lambada_openai', marks=pytest.mark.long)])
def test_two_processes_give_the_scores_of_one(trained, benchmarks, tasks):
    args = [trained, '--val', f'--tasks={tasks}', f'--data_dir={benchmarks}', '--device=cpu', '--dtype=float32']
    for processes in (1, 2):
        succeeded(run('eval.py', *args, processes=processes))
    alone, shared = (line['results'] for line in eval_lines(trained)[-2:])
    assert alone.keys() == shared.keys() == {'val', *tasks.split(',')}
    for task, metrics in alone.items():
        assert shared[task] == pytest.approx(metrics, rel=1e-5)


@pytest.mark.slow
def test_bad_input_gives_a_clear_error(trained, benchmarks, tmp_path):
    assert_sentence(run('eval.py', trained), 'nothing to do')
    assert_sentence(run('eval.py', trained, '--tasks=arc_eazy'), "unknown lm-eval task 'arc_eazy'", 'arc_easy')
    assert_sentence(run('eval.py', trained, '--tasks=sciq', f'--data_dir={tmp_path}'), 'no file for sciq')
    assert_sentence(run('eval.py', trained, '--tasks=arc_easy', '--limit=0'), 'limit is 0')


@pytest.mark.slow
@pytest.mark.parametrize('error', [OSError('no network'), ImportError('SOCKS needs a package')])
def test_data_that_cannot_be_loaded_give_an_error_that_names_the_proxy(trained, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error
    monkeypatch.setattr(judge, 'lambada_first_token', fail)
    result = run('eval.py', trained, '--tasks=lambada_first_token')
    assert_sentence(result, str(error), 'the variables *_proxy', '--data_dir')


@pytest.mark.slow
def test_malformed_records_and_data_settings_give_a_clear_error(trained, tmp_path, capsys):
    (tmp_path / 'lambada_openai.jsonl').write_text('{"text": "a b"}\n{"question": "a"}')
    with pytest.raises(UserError, match='record 2, does not have the fields of lambada_openai'):
        local_records(tmp_path, 'lambada_openai')
    (tmp_path / 'piqa.jsonl').write_text('{"goal": "a"}\n' * 2)
    (tmp_path / 'piqa_labels.lst').write_text('0')
    with pytest.raises(UserError, match='piqa_labels.lst has 1 labels, but piqa.jsonl has 2 records'):
        local_records(tmp_path, 'piqa')
    with pytest.raises(UserError, match='no data at True'):
        folders.run_data({'settings': {'data': True}}, None)
    record = folders.read_run(trained)
    folders.run_data(record | {'data': record['data'] | {'sha256': 'old'}}, None)
    assert 'has changed since the run was trained' in capsys.readouterr().err


def test_arc_is_read_as_published_and_as_on_the_hub(tmp_path):
    published = {'question': {'stem': 'a', 'choices': [{'text': 'b', 'label': 'A'}]}, 'answerKey': 'A'}
    on_the_hub = {'question': 'a', 'choices': {'text': ['b'], 'label': ['A']}, 'answerKey': 'A'}
    (tmp_path / 'arc_easy.jsonl').write_text(f'{json.dumps(published)}\n{json.dumps(on_the_hub)}')
    assert local_records(tmp_path, 'arc_easy') == [on_the_hub] * 2
