"""Speculative decoding over several texts as one table."""
import csv

from conftest import assert_sentence, run

from analysis import domains


def test_a_run_has_in_each_text_the_fixed_length_with_the_largest_speed_up_and_that_of_auto():
    rows = [{'run': 'out/a', 'data': data, 'draft_len': length, 'speedup': speedup, 'accepted': accepted}
            for data, length, speedup, accepted in (
                ('x/wiki', 1, 1.6, 0.9), ('x/wiki', 2, 1.5, 1.2), ('x/wiki', 3, 1.25, 1.4),
                ('x/wiki', 'auto', 1.75, 2.0),
                ('x/code', 1, 1.25, 1.0))]
    assert domains.markdown(rows) == (
        '| run | wiki: speed-up | accepted | length | auto | code: speed-up | accepted | length | auto |\n'
        '|---|---|---|---|---|---|---|---|---|\n| a | 1.50 | 1.20 | 2 | 1.75 | 1.25 | 1.00 | 1 |  |\n')


def test_the_table_is_of_the_runs_own_drafts(tmp_path):
    trained = run('train.py', '--model=nextlat', '--data=python_docs', '--n_layer=1', '--n_head=2', '--n_embd=16',
                  '--block_size=32', '--batch_size=4', '--max_tokens=256', '--warmup_tokens=0', '--eval_tokens=64',
                  '--sample_tokens=0', f'--out_dir={tmp_path / "run"}')
    assert trained.returncode == 0, trained.stderr
    result = run('-m', 'analysis.domains', tmp_path / 'run', '--data=python_docs', f'--out={tmp_path / "table"}',
                 '--draft_lens=1,3', '--n_prompts=2', '--prompt_tokens=8', '--new_tokens=8')
    assert result.returncode == 0, result.stderr
    assert [row['draft_len'] for row in csv.DictReader(open(tmp_path / 'table.csv'))] == ['1', '3']
    assert 'python_docs: speed-up' in (tmp_path / 'table.md').read_text()
    assert_sentence(run('-m', 'analysis.domains', tmp_path / 'run'), 'which texts?')
