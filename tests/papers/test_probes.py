"""Linear probes of frozen states: their targets, training, and table."""
import pandas as pd
import pytest
import torch
from conftest import assert_sentence, run, succeeded

from papers.nextlat import probes


@pytest.mark.parametrize('offset', [1, 2, 5])
def test_targets_are_offset_within_the_same_document(offset):
    torch.manual_seed(offset)
    tokens = torch.randint(0, 4, (3, 13))  # 0: end of document
    want = torch.full((3, 12), -1)
    for b in range(3):
        for t in range(12):
            if t + offset <= 12 and 0 not in tokens[b, t:t + offset]:
                want[b, t] = tokens[b, t + offset]
    assert torch.equal(probes.offset_targets(tokens, offset, 0), want)


class Ahead(torch.nn.Module):
    """Model whose state at t is x_{t+2}, one-hot."""

    def final_hidden(self, idx):
        return torch.nn.functional.one_hot(idx.roll(-2, 1), 4).float()


def test_a_probe_learns_the_offset_encoded_in_the_state():
    torch.manual_seed(0)
    s = probes.Settings(offsets=3, steps=60)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    for _ in range(60):
        probes.train_step(Ahead(), layers, optimizer, torch.randint(1, 4, (8, 17)), 0, 3, s, 1.0)
    windows = torch.randint(1, 4, (8, 17))
    h = probes.states(Ahead(), windows[:, :-1], s)
    losses = []
    for k in (1, 2, 3):
        wanted = probes.offset_targets(windows, k, 0)
        wanted[:, 14:] = -1  # the last two states wrap around
        losses.append(probes.nats(layers[k - 1], h, wanted).item() / (wanted >= 0).sum().item())
    assert losses[1] < 0.5 and min(losses[0], losses[2]) > 0.9


def test_the_table_compares_each_offset_with_the_first_label():
    measured = [('ntp', 1, 1.0), ('ntp', 2, 2.0), ('ntp', 1, 3.0), ('ntp', 2, 4.0), ('nextlat', 1, 2.5),
                ('nextlat', 2, 2.0)]
    rows = probes.table(pd.DataFrame(measured, columns=['label', 'offset', 'nats']))
    assert rows[['label', 'offset', 'mean', 'difference', 'seeds']].to_numpy().tolist() == [
        ['ntp', 1, 2.0, 0.0, 2], ['ntp', 2, 3.0, 0.0, 2], ['nextlat', 1, 2.5, 0.5, 1], ['nextlat', 2, 2.0, -1.0, 1]]
    assert (rows.lowest[0], rows.highest[0]) == (1.0, 3.0)


def test_probes_of_trained_runs_are_drawn_and_written(tmp_path, monkeypatch):
    sizes = ['--data=python_docs', '--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
             '--max_tokens=128', '--warmup_tokens=0', '--eval_tokens=64', '--sample_tokens=0']
    for name, model in (('ntp', ['--model=nextlat', '--objective=ntp']), ('mtp', ['--model=mtp'])):
        succeeded(run('train.py', *model, *sizes, f'--out_dir={tmp_path / name}'))
    succeeded(run('-m', 'papers.nextlat.probes', tmp_path / 'ntp', tmp_path / 'mtp', f'--out={tmp_path / "probes"}',
                  '--offsets=3', '--steps=2', '--eval_tokens=64'))
    rows = pd.read_csv(tmp_path / 'probes.csv')
    assert [*rows.offset] == [1, 2, 3] * 2 and (tmp_path / 'probes.png').exists()
    assert rows['mean'].between(4, 7).all()
    for option, sentence in (('--offsets=17', 'offsets is 17'), ('--steps=0', 'steps is 0: expected at least 1'),
                             ('--learning_rate=-1', 'learning_rate is -1.0')):
        assert_sentence(run('-m', 'papers.nextlat.probes', tmp_path / 'ntp', option), sentence)
    task = '-m', 'papers.nextlat.probes', tmp_path / 'ntp', '--data=path_star:degree=2,length=3'
    assert_sentence(run(*task), 'use data with that tokenizer')
    monkeypatch.setattr('lm_architectures.run.folders.check_vocabulary', lambda *_: None)
    assert_sentence(run(*task), 'is a task')
