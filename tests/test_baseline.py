"""Standard beside nanoGPT's shape: the same loss of two models of equal size, equal tokens and equal time."""
import csv

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_sentence, run

from analysis import baseline, sweep
from analysis.baseline import IN_OUR_TIME, NANOGPT, OURS, Settings
from bench import nanogpt
from common.decoding import generate
from common.runs import blank_model, make_config, model_file


def make(**values):
    config = make_config('standard.NanoGPT', dict(n_layer=2, n_head=2, n_embd=16, n_ffn=64, vocab_size=20, n_ids=20,
                                                  eos_id=None) | values)
    torch.manual_seed(0)
    return model_file('standard.NanoGPT').Model(config).double()


def test_nanogpts_shape_has_the_benchmarks_loss_and_counts_standards_positions():
    model, idx = make(), torch.randint(0, 20, (2, 12))
    plain = nanogpt.Model(2, 2, 16, 20, 1024).double()
    plain.load_state_dict(model.state_dict())
    assert model.head.weight is model.embed.weight
    assert model(idx, idx)['loss'].item() == pytest.approx(plain(idx, idx)['loss'].item(), abs=1e-12)
    eos_id = model.config.eos_id = idx[0, 5].item()
    counted = idx != eos_id
    assert not counted.all()
    nll = F.cross_entropy(model.logits(idx)[counted], idx[counted])
    assert model(idx, idx)['loss'].item() == pytest.approx(nll.item(), abs=1e-12)
    with pytest.raises(ValueError, match=r'standard\.NanoGPT has learned 1024 positions'):
        model(*torch.zeros(2, 1, 1025, dtype=torch.int64))
    prompt = idx[0, :4].tolist()
    new, = generate(model, [prompt], 2, temperature=0)
    assert new[0] == model.logits(idx[:1, :4])[0, -1].argmax()


@pytest.mark.parametrize('s', [Settings(), Settings(n_layer=8, n_head=8, n_embd=512)])
def test_both_have_equal_parameters(s):
    sizes = {}
    for name in (OURS, NANOGPT):
        values = dict(arg[2:].split('=') for arg in baseline.arguments(s, name)[1:])
        config = {key: int(values[key]) for key in ('n_layer', 'n_head', 'n_embd', 'n_ffn')} | {'vocab_size': 320,
                                                                                               'n_ids': 257}
        model = blank_model(values['model'], make_config(values['model'], config | {'eos_id': None}))
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert sizes[NANOGPT] == pytest.approx(sizes[OURS], rel=0.01)


def test_equal_time_is_as_many_tokens_as_it_is_faster(monkeypatch, tmp_path):
    trained = {}
    monkeypatch.setattr(baseline, 'best_rates', lambda commands, first, folder_of, jobs: {OURS: 2e-3, NANOGPT: 1e-3})
    monkeypatch.setattr(sweep, 'train_all', lambda commands, jobs: trained.update(commands))
    monkeypatch.setattr(baseline, 'speed', lambda folder: 200. if folder.name.startswith('nanogpt') else 100.)
    runs = baseline.train_cells(Settings(seeds=2, max_tokens=40_000), tmp_path)
    assert len(trained) == 6 and list(runs) == [OURS, NANOGPT, IN_OUR_TIME]
    for name, parts in ((OURS, ('--model=standard', '--max_tokens=40000', '--learning_rate=0.002')),
                        (NANOGPT, ('--model=standard.NanoGPT256', '--max_tokens=40000', '--learning_rate=0.001')),
                        (IN_OUR_TIME, ('--max_tokens=80000', '--warmup_tokens=4000', '--seed=2'))):
        assert set(parts) <= set(trained[runs[name][1]]), name


def test_a_wrong_setting_is_a_sentence(tmp_path):
    assert_sentence(run('-m', 'analysis.baseline', '--n_embd=8', f'--out_dir={tmp_path}'), 'n_embd is 8')


@pytest.mark.long
def test_both_from_training_to_the_table(tiny_data, tmp_path):
    out = tmp_path / 'out'
    done = run('-m', 'analysis.baseline', f'--data={tiny_data}', '--n_layer=1', '--n_head=2', '--n_embd=64',
               '--seeds=1', '--batch_size=1', '--max_tokens=2560', f'--out_dir={out}')
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((out / 'baseline.csv').open()))
    assert [row['model'] for row in rows] == [OURS, NANOGPT, IN_OUR_TIME]
    assert all(float(row['loss']) > 0 for row in rows)
