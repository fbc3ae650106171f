"""Edited models: GPN with one equation changed, and nanoGPT as a variant of Standard."""
import pytest
import torch
import torch.nn.functional as F
from test_gpn import make, paper_states
from test_models import decode_in_pieces

from lm_architectures.decode.generation import generate
from lm_architectures.files import UserError
from lm_architectures.run import models


@pytest.mark.parametrize('name', ['gate_at_one', 'prediction_not_carried', 'key_from_this_state', 'no_write_gate',
                                  'no_decay'])
def test_each_edit_changes_one_equation_of_the_paper_and_decodes(name):
    """The fast scan, which knows nothing of the edit, does not run."""
    original, idx = make()
    model = models.model_file(f'gpn_{name}').Model(original.config).double()
    model.load_state_dict(original.state_dict())
    with torch.no_grad():
        want, got = paper_states(model, idx[0], name), model.states(idx)[0]
    assert not model.fast and (got - want).norm() < 1e-10 * want.norm()
    decode_in_pieces(model, idx, max_call=4, tolerance=1e-8)


def test_an_edit_needs_a_name_of_its_own(tmp_path, monkeypatch):
    (tmp_path / 'papers/gpn/edits').mkdir(parents=True)
    for path in ('papers/gpn/edits/sps.py', 'model_sps.py'):
        (tmp_path / path).touch()
    monkeypatch.setattr(models, 'ROOT', tmp_path)
    with pytest.raises(UserError, match='papers/gpn/edits/sps.py has the name of model_sps.py: rename it'):
        models.model_file('sps')


def test_the_nanogpt_variant_has_a_tied_head_and_standards_loss():
    torch.manual_seed(0)
    config = dict(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=20, n_ids=20, eos_id=None)
    model = models.model_file('nanogpt').Model(models.make_config('nanogpt', config)).double()
    idx = torch.randint(0, 20, (2, 12))
    assert model.head.weight is model.embed.weight
    eos_id = model.config.eos_id = idx[0, 5].item()
    counted = idx != eos_id
    assert not counted.all()
    nll = F.cross_entropy(model.logits(idx)[counted], idx[counted])
    assert model(idx, idx)['loss'].item() == pytest.approx(nll.item(), abs=1e-12)
    with pytest.raises(ValueError, match='13 tokens, but the model has 12 learned'):
        model(*torch.zeros(2, 1, 13, dtype=torch.int64))
    new, = generate(model, [idx[0, :4].tolist()], 2, temperature=0)
    assert new[0] == model.logits(idx[:1, :4])[0, -1].argmax()
