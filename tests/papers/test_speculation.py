"""The table of speculative decoding by draft length (papers/nextlat/speculation.py)."""
import csv

import pandas as pd
import pytest
from conftest import assert_sentence, run, succeeded, train_tiny
from test_speculative import make

from lm_architectures.data import open_data
from lm_architectures.files import UserError
from lm_architectures.run.folders import read_run
from papers.nextlat.speculation import Settings, draft_lengths, read_prompts, summary


@pytest.fixture(scope='module')
def runs(tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    for model in ('nextlat', 'standard'):
        succeeded(train_tiny(tiny_data, folder / model, '--block_size=64', f'--model={model}', steps=5))
    return folder


@pytest.mark.slow
def test_two_processes_give_the_same_table_as_one(runs, tiny_data, tmp_path):
    small = ['--n_prompts=3', '--prompt_tokens=8', '--new_tokens=10', '--draft_lens=1,3,auto', f'--out={tmp_path}/out']
    command, both = ['-m', 'papers.nextlat.speculation', runs / 'nextlat'], []
    for processes in (2, 1):
        result = succeeded(run(*command, *small, f'--data={tiny_data},{tiny_data}', processes=processes))
        assert result.stdout.count('accepted') == 1
        both.append(list(csv.DictReader(open(tmp_path / 'out.csv'))))
    rows, by_time = both[1], ('speedup', 'tokens_per_s')
    assert all(a[key] == b[key] for a, b in zip(*both, strict=True) for key in a.keys() - by_time)
    assert [row['draft_len'] for row in rows] == 2 * ['1', '3', 'auto']
    shares = [float(rows[1][f'cumulative_{i}']) for i in (1, 2, 3)]
    assert sorted(shares, reverse=True) == shares and 0 <= shares[-1] and shares[0] <= 1
    assert float(rows[1]['accepted']) <= 3 and float(rows[1]['tokens_per_s']) > 0
    assert (tmp_path / 'out.png').stat().st_size > 10_000 and '| speed-up |' in (tmp_path / 'out.md').read_text()
    succeeded(run(*command, *small, f'--draft={runs / "standard"}', '--new_tokens=2'))
    assert_sentence(run(*command), 'do not fit the context of 64 tokens', 'lower prompt_tokens')


@pytest.mark.slow
def test_prompts_are_document_beginnings(runs, tiny_data):
    ids = open_data(str(tiny_data)).tokens('val', 0, 2000).tolist()
    starts = [0, *(i + 1 for i, token in enumerate(ids) if token == 256)]
    s = Settings(draft_lens='1', n_prompts=3, prompt_tokens=9, new_tokens=9)
    prompts = read_prompts(read_run(runs / 'nextlat'), str(tiny_data), s)
    assert prompts == [ids[i:i + 9] for i in starts if 256 not in ids[i:i + 9]][:3]


def test_the_summary_has_the_best_fixed_length_and_auto():
    x = (1, 1.6, 0.9), (2, 1.5, 1.2), (3, 1.25, 1.4), ('auto', 1.75, 2.0)
    rows = pd.DataFrame([('a', data, *row) for data, own in (('x/wiki', x), ('y/wiki', x[:1])) for row in own],
                        columns=['label', 'data', 'draft_len', 'speedup', 'accepted'])
    assert summary(rows).to_numpy().tolist() == [
        ['a', 'x/wiki', '1.50', '1.20', 2, '1.75'], ['a', 'y/wiki', '1.60', '0.90', 1, '']]


def test_lengths_that_the_model_cannot_draft_are_left_out():
    assert draft_lengths((2, 5, 'auto'), make('nextlat'), None) == [2, 5, 'auto']
    assert draft_lengths((2, 5, 'auto'), make('mtp'), None) == [2, 'auto']  # it drafts 2 tokens
    for name, part in (('mtp', 'this model drafts up to 2 tokens'), ('standard', 'standard cannot draft for itself')):
        with pytest.raises(UserError, match=part):
            draft_lengths((3, 4), make(name), None)
