"""Fast scans in scans/ equal the code they reimplement, and are pinned to it.

Edits run step by step. After an edit of both forms, `test_both_forms_are_equal` compares them, and
a warning shows the digest to pin. To compare a copy of a model, add it to FAST.
"""
import importlib
import inspect
import operator
import re
import shutil

import pytest
import torch
from conftest import ROOT, run_subprocess, succeeded
from references import assert_near, decode, loss_and_gradients, random_model
from test_gpn import SMALL

import scans
from scans import gdn

FAST = {'gdn': gdn}  # {NAME: fast form of model_NAME.py}
MODELS = {'gpn': SMALL, 'gdn': gdn.SMALL}
PINNED = {'gdn': 'read Block.step Block.loop'}


def make(file, name, **values):
    return random_model(file, 2, **MODELS[name] | values)


@torch.no_grad()
def results(model, idx):
    """Return the loss, the logits of decoding in pieces, and those of the full forward."""
    return model(idx, idx)['loss'].item(), decode(model, idx, [9, 1, 3, 10], 3), model.logits(idx)[..., :60]


@pytest.mark.parametrize('name', FAST)
def test_both_forms_are_equal(name):
    """Loss, gradients, and logits of decoding in pieces and of rows with different lengths."""
    found = []
    for scan in ('loop', 'fast'):
        model, idx = make(importlib.import_module(f'model_{name}'), name, scan=scan)
        loss = model(idx, idx.roll(-1, 1))['loss']
        with torch.no_grad():
            cache = model.new_cache(*idx.shape, max_call=3)
            *parts, last = idx.split([9, 1, 3, 10], 1)
            decoded = [model.extend(part, cache, all_positions=True) for part in parts]
            decoded.append(model.extend(last, cache, torch.tensor([10, 4])).unsqueeze(1))
        found.append({**loss_and_gradients(loss, model), 'decoded': torch.cat(decoded, 1)[..., :60]})
    loop, fast = found
    assert_near(fast, loop, 1e-11)


@pytest.mark.parametrize('name', PINNED)
def test_pins_cover_the_listed_objects(name):
    file, fast = importlib.import_module(f'model_{name}'), FAST[name]
    of_file = [x for x in fast.implements(file) if inspect.getmodule(x) is file]
    assert of_file == [operator.attrgetter(piece)(file) for piece in PINNED[name].split()]


@pytest.mark.parametrize('name, piece', [(name, piece) for name in PINNED for piece in PINNED[name].split()])
def test_editing_any_pinned_object_is_detected(name, piece, monkeypatch, capsys):
    scans.warn_once.cache_clear()
    model, _ = make(importlib.import_module(f'model_{name}'), name)
    assert model.fast and capsys.readouterr().err == ''
    monkeypatch.setattr(f'model_{name}.{piece}', lambda *args: 'an edit')
    for n_lines in (1, 0):  # printed once
        assert scans.pinned(model, FAST[name]) is None
        assert capsys.readouterr().err.count(f'without scans.{name}') == n_lines


EDITS = {  # name: a variable, and an edit of an equation
    'gpn': ('error', ('error = v - read(memory, k)', 'error = v')),
    'gdn': ('error', ('error = v - read(memory, k)', 'error = v'))}


@pytest.mark.parametrize('name', EDITS)
def test_an_edited_equation_trains_and_decodes(name, import_edited):
    loss, decoded, _ = results(*make(importlib.import_module(f'model_{name}'), name))
    file = import_edited(name, lambda source: source.replace(*EDITS[name][1]))
    new_loss, new_decoded, new_logits = results(*make(file, name))
    assert (new_decoded - new_logits).abs().max() < 1e-4 * (1 + new_logits.abs().max())
    assert abs(new_loss - loss) > 1e-4 and (new_decoded - decoded).abs().max() > 1e-3
    assert results(*make(file, name, scan='loop'))[0] == new_loss


@pytest.mark.parametrize('name', FAST)
def test_the_digest_of_an_edit_is_printed_and_enables_the_fast_form(name, import_edited, monkeypatch, capsys):
    file = import_edited(name, lambda source: re.sub(rf'\b{EDITS[name][0]}\b', 'other_name', source))
    scans.warn_once.cache_clear()
    assert not make(file, name)[0].fast
    pin = re.search(rf"add '(\w+)' to PINS in scans/{name}.py", capsys.readouterr().err)[1]
    monkeypatch.setattr(FAST[name], 'PINS', {pin})
    assert make(file, name)[0].fast and capsys.readouterr().err == ''


def test_moving_a_statement_out_of_a_block_is_an_edit():
    inside, outside = 'if a:\n    x = 1\n    y = 2\n', 'if a:\n    x = 1\ny = 2\n'
    assert scans.digest(inside) != scans.digest(outside)


@pytest.mark.parametrize('name', FAST)
def test_comments_docstrings_and_code_around_the_recurrence_can_change(name, import_edited, capsys):
    def commented(source):
        source = re.sub(r'(?m)^( +(def|for|if|return) .*)$', r'\1  # a comment', source)
        source = source.replace('self.head(h)', '30 * torch.tanh(self.head(h) / 30)')
        return re.sub(r'(?m)^( +""")(?=\w)', r'\1Other words. ', source)
    assert make(import_edited(name, commented), name)[0].fast and capsys.readouterr().err == ''


@pytest.mark.parametrize('name', FAST)
def test_renamed_functions_and_subclasses_run_the_equations_unless_scan_is_fast(name, capsys, monkeypatch):
    file = importlib.import_module(f'model_{name}')
    scans.warn_once.cache_clear()

    class Own(file.Model):
        pass

    fast = lambda cls, scan: bool(cls(file.Config(**MODELS[name], scan=scan)).fast)
    assert fast(file.Model, 'auto') and fast(file.Model, 'fast') and fast(Own, 'fast')
    assert not fast(file.Model, 'loop') and not fast(Own, 'loop') and capsys.readouterr().err == ''
    assert not fast(Own, 'auto') and 'subclass' in capsys.readouterr().err
    monkeypatch.setattr(f'scans.{name}.implements', lambda file: [file.no_such_name])
    assert not fast(file.Model, 'auto') and 'no_such_name' in capsys.readouterr().err


WITHOUT_SCANS = """
for name, values in models.items():
    torch.manual_seed(0)
    file = importlib.import_module(f'model_{name}')
    model, idx = file.Model(file.Config(**values)), torch.randint(0, 60, (2, 23))
    model(idx, idx)['loss'].backward()
    with torch.no_grad():
        logits = model.extend(idx, model.new_cache(2, 23, 3), all_positions=True)
        assert not model.fast and (logits - model.logits(idx))[..., :60].abs().max() < 1e-4
try:
    file.Model(file.Config(**values, scan='fast'))  # of the last file, GDN
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_scans_folder_can_be_deleted(tmp_path):
    for path in (*(f'model_{name}.py' for name in MODELS), 'attn_kernels.py', 'state_cache.py'):
        shutil.copy(ROOT / path, tmp_path)
    (tmp_path / 'script.py').write_text(f'import importlib, torch\nmodels = {MODELS}\n{WITHOUT_SCANS}')
    result = succeeded(run_subprocess(tmp_path / 'script.py'))
    assert result.stderr == '' and 'needs the folder scans/' in result.stdout
