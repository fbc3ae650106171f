"""Edited models: GPN with one equation changed."""
import pytest
import torch
from test_gpn import make, paper_states
from test_models import decode_in_pieces

from lm_architectures.files import UserError
from lm_architectures.run import models


@pytest.mark.parametrize('name', ['gate_at_one', 'prediction_not_carried', 'key_from_this_state', 'no_write_gate',
                                  'no_decay'])
def test_each_edit_changes_one_equation_of_the_paper_and_decodes(name):
    original, idx = make()
    model = models.model_file(f'gpn_{name}').Model(original.config).double()
    model.load_state_dict(original.state_dict())
    with torch.no_grad():
        want, got = paper_states(model, idx[0], name), model.states(idx)[0]
    assert (got - want).norm() < 1e-10 * want.norm()
    decode_in_pieces(model, idx, max_call=4, tolerance=1e-8)


def test_an_edit_needs_a_name_of_its_own(tmp_path, monkeypatch):
    (tmp_path / 'papers/gpn/edits').mkdir(parents=True)
    for path in ('papers/gpn/edits/sps.py', 'model_sps.py'):
        (tmp_path / path).touch()
    monkeypatch.setattr(models, 'ROOT', tmp_path)
    with pytest.raises(UserError, match='papers/gpn/edits/sps.py has the name of model_sps.py: rename it'):
        models.model_file('sps')
