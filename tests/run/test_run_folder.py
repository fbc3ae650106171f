"""The run folder: one writer, an append-only log, and whole, finite checkpoints."""
import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import assert_sentence, bit_flips, contents, losses, run, start_training, succeeded, train_tiny
from safetensors.torch import load_file

import eval as evaluation
import train
from analysis.runs import evaluations
from lm_architectures.files import UserError, friendly_errors, locked, open_lines, sha256, sync, warn_once
from lm_architectures.machine import terminal
from lm_architectures.run import checkpoint, folders, records

# ---- one writer ----

@pytest.mark.slow
@pytest.mark.parametrize('args', [['--resume'], ['--overwrite']])
def test_a_second_writer_is_refused_and_changes_nothing(tiny_data, tiny_run, tmp_path, args):
    out = shutil.copytree(tiny_run, tmp_path / 'run')
    before = contents(out)
    with locked(out):
        assert_sentence(train_tiny(tiny_data, out, *args), f'process {os.getpid()} on', 'since 20')
        succeeded(run('sample.py', out, 'ab', '--max_new_tokens=1'))  # reading is allowed
    assert contents(out) == before
    succeeded(train_tiny(tiny_data, out, *args))


@pytest.mark.slow
def test_workers_orphaned_by_torchrun_save_and_exit(tiny_data, tmp_path):
    out = tmp_path / 'run'
    launcher = start_training(tiny_data, out, processes=2)
    launcher.kill()
    launcher.wait()
    deadline = time.time() + 10
    while time.time() < deadline and processes_with(out):
        time.sleep(0.05)
    assert not processes_with(out)
    assert checkpoint.load_checkpoint(out)[0]['step'] == records.read_log(out)[-1]['step']


def processes_with(argument):
    """Return the ids of processes with this text in their command line."""
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        with contextlib.suppress(OSError):
            found += [path.parent.name] * (str(argument).encode() in path.read_bytes())
    return found


# ---- the disk ----

def refuse(*args, **kwargs):
    raise PermissionError(errno.EPERM, 'Operation not permitted')


def test_a_folder_that_cannot_be_locked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, 'flock', refuse)
    with pytest.raises(UserError, match=f'{tmp_path}/run cannot be locked .*--out_dir'), locked(tmp_path / 'run'):
        pass


def test_only_a_folder_need_not_be_flushed_to_disk(tmp_path, monkeypatch):
    """CIFS and FUSE cannot flush a folder."""
    (tmp_path / 'file').write_text('')
    monkeypatch.setattr(os, 'fsync', refuse)
    sync(tmp_path)
    with pytest.raises(PermissionError):
        sync(tmp_path / 'file')


def test_a_save_does_not_create_a_run_folder_that_was_moved(run_folder, tmp_path_factory):
    moved = run_folder.rename(tmp_path_factory.mktemp('other') / 'run')
    with pytest.raises(UserError, match='No such file or directory.* find the folder if it was moved'):
        save(run_folder, 3)
    assert not run_folder.exists() and load(moved) == (2, 2.0)


# ---- log.jsonl ----

def test_a_log_continues_after_damaged_and_truncated_lines(tmp_path, capsys):
    """A value of a wrong type damages its line."""
    first, second = ({'step': n, 'tokens': 9 * n, 'seconds': 0.5, 'loss': 2.5} for n in (1, 2))
    values = ('"step": "2"', '"step": 1e400', '"val": Infinity', '"val": {}', '"val": null', '"tokens": "9"',
              '"seconds": true', '"lr": ' + '9' * 400)
    damaged = ['[1]', *(f'{{"step": 1, "tokens": 9, "seconds": 1.0, {value}}}' for value in values)]
    lines = json.dumps(first), *damaged, json.dumps(second), '{"step": 3, "lo'
    (tmp_path / 'log.jsonl').write_text('\n'.join(lines))
    with open_lines(tmp_path / 'log.jsonl') as log:
        log.write(json.dumps({'resumed_from': 1}) + '\n')
        log.write(json.dumps(second | {'loss': 2.125}) + '\n')
    assert records.read_log(tmp_path) == [first, second | {'loss': 2.125}]
    assert 'skipped 10 damaged lines' in capsys.readouterr().err


def test_an_evaluation_after_a_cut_line_is_kept(tmp_path):
    (tmp_path / 'eval.jsonl').write_text('{"results": {"val": {"loss": 1.0}}}\n{"results": {"va')
    evaluation.append_line(tmp_path, {'results': {'val': {'loss': 2.0, 'bad': math.inf}}})
    assert evaluations(tmp_path / 'eval.jsonl') == {'val loss': 2.0}
    (tmp_path / 'eval.jsonl').write_text('{"results": {"val": {"loss": 1}, "piqa": {"acc": 0.5}}, "settings": '
                                         '{"bos": false, "val_tokens": 9, "num_fewshot": 0, "dtype": "auto"}}')
    assert evaluations(tmp_path / 'eval.jsonl') == {'val loss val_tokens=9': 1, 'piqa acc bos=False': 0.5}
    for line in ('[]', '{}', '{"results": []}', '{"results": {"val": 1}}', '{"results": {}, "settings": 1}',
                 '{"results": {"val": {"loss": 3}}, "of_steps": "9", "step": 1}'):
        (tmp_path / 'eval.jsonl').write_text(line + '\n')
        assert evaluations(tmp_path / 'eval.jsonl') == {}, line


@pytest.mark.slow
def test_a_run_that_lost_its_checkpoints_is_not_restarted_silently(tiny_data, tiny_run, tmp_path):
    out = shutil.copytree(tiny_run, tmp_path / 'run')
    shutil.rmtree(out / 'ckpt')
    before = contents(out)
    assert_sentence(run('train.py', f'--out_dir={out}', '--resume'), 'copy', '--overwrite')
    assert contents(out) == before
    log = (out / 'log.jsonl').read_text()
    (out / 'log.jsonl').write_text(log[:log.index('{"saved"')])  # killed before its first checkpoint
    assert 'from step 0;' in succeeded(run('train.py', f'--out_dir={out}', '--resume')).stdout
    assert losses(out) == losses(tiny_run)


@pytest.mark.slow
def test_resuming_continues_the_wandb_run(tiny_data, tmp_path, monkeypatch):
    (tmp_path / 'wandb.py').write_text(
        'import types\ncalls = []\ndef init(id, resume, **rest):\n    calls.append((id, resume))\n'
        '    return types.SimpleNamespace(id=id or f"new{len(calls)}", log=lambda *a, **k: 0, finish=lambda: 0)\n')
    monkeypatch.syspath_prepend(tmp_path)
    out, option = tmp_path / 'run', '--wandb_project=p'
    succeeded(train_tiny(tiny_data, out, option, steps=2))
    succeeded(run('train.py', f'--out_dir={out}', '--resume'))
    succeeded(train_tiny(tiny_data, out, option, '--overwrite', steps=2))
    assert sys.modules['wandb'].calls == [(None, 'allow'), ('new1', 'allow'), (None, 'allow')]
    del sys.modules['wandb']


# ---- overwriting ----

def test_only_a_run_is_overwritten(tiny_data, tmp_path):
    for name, text in (('config.json', '{"editor": "vi"}'), ('thesis.txt', 'years of work')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(text)
        assert_sentence(train_tiny(tiny_data, folder, '--overwrite'), str(folder))
        assert contents(folder) == {name: text.encode()}


@pytest.mark.slow
def test_overwrite_moves_the_run_before_into_the_new_one(tiny_data, tiny_run, tmp_path):
    """The folder may be a link, as may its checkpoints."""
    disk, link = shutil.copytree(tiny_run, tmp_path / 'disk'), tmp_path / 'link'
    ckpt = shutil.move(disk / 'ckpt', tmp_path / 'ckpt')
    link.symlink_to(disk)
    (disk / 'ckpt').symlink_to(ckpt)
    (disk / 'thesis.txt').write_text('years of work')
    first = contents(disk), contents(ckpt)
    assert_sentence(train_tiny(tiny_data, link, '--overwrite', '--n_head=3'), 'n_head = 3')
    assert (contents(disk), contents(ckpt)) == first  # a start that fails moves nothing
    said = succeeded(train_tiny(tiny_data, link, '--overwrite', steps=2)).stdout
    assert f'moved the previous run to {link}/before_1\n' in said
    assert (contents(disk / 'before_1'), contents(ckpt)) == first and not (disk / 'ckpt').is_symlink()
    assert link.is_symlink() and [*losses(disk)] == [1, 2]
    shutil.rmtree(ckpt / 'step_00000020')
    succeeded(run('train.py', f'--out_dir={disk}/before_1', '--resume'))
    assert (ckpt / 'step_00000020').exists() and losses(disk / 'before_1') == losses(tiny_run)
    succeeded(train_tiny(tiny_data, disk, '--overwrite', steps=3))
    assert [[*losses(folder)] for folder in (disk, disk / 'before_2')] == [[1, 2, 3], [1, 2]]


def test_an_export_is_not_listed_as_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('out/run/ckpt').mkdir(parents=True)
    Path('out/export').mkdir()
    Path('out/export/config.json').touch()
    with pytest.raises(UserError, match='Runs here: out/run$'):
        folders.read_run('out/none')


@pytest.mark.slow
def test_a_kill_while_a_run_is_replaced_leaves_nothing_to_resume(tiny_data, tiny_run, tmp_path, monkeypatch):
    out = shutil.copytree(tiny_run, tmp_path / 'run')
    with monkeypatch.context() as patch:
        rename = Path.rename
        patch.setattr(Path, 'rename', lambda path, new: rename(path, new) if path.name == 'config.json' else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_tiny(tiny_data, out, '--overwrite', '--seed=5', steps=2)
    assert_sentence(run('train.py', f'--out_dir={out}', '--resume'), 'is not a run folder')
    assert_sentence(train_tiny(tiny_data, out, '--seed=5', steps=2), 'is not a run folder')
    assert 'step 0/2\n' in succeeded(train_tiny(tiny_data, out, '--overwrite', '--seed=5', steps=2)).stdout
    assert folders.read_run(out)['settings']['seed'] == 5 and contents(out / 'before_1') == contents(tiny_run)


# ---- other files ----

@pytest.mark.slow
def test_stray_files_are_ignored_and_permissions_follow_the_umask(tiny_run, tmp_path):
    out = shutil.copytree(tiny_run, tmp_path / 'run')
    (out / 'ckpt/step_00000099').write_text('a file')
    (out / 'ckpt/step_00000098.bak').mkdir()
    assert checkpoint.load_checkpoint(out)[0]['step'] == 20
    umask = os.umask(0)
    os.umask(umask)
    for path in tiny_run.rglob('*'):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


@pytest.mark.slow
def test_a_run_that_fails_at_its_start_is_removed(tiny_data, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', mock.Mock(**{'init.side_effect': RuntimeError('no api_key')}))
    out, option = tmp_path / 'new', '--wandb_project=p'
    old = shutil.copytree(tiny_run, tmp_path / 'old')
    before = contents(old)
    assert_sentence(train_tiny(tiny_data, out, option), 'no api_key', 'wandb login')
    assert_sentence(train_tiny(tiny_data, old, option, '--overwrite'), 'no api_key')
    assert not out.exists() and contents(old) == before
    monkeypatch.setattr(train, 'train_step', lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_tiny(tiny_data, out)
    shutil.rmtree(old / 'ckpt/step_00000020')
    with pytest.raises(ZeroDivisionError):
        run('train.py', f'--out_dir={old}', '--resume')
    assert not out.exists() and (old / 'config.json').exists() and checkpoint.checkpoints(old)


@pytest.mark.slow
def test_files_of_a_run_are_not_written_through_links(tiny_data, tiny_run, tmp_path):
    for name in ('loss.png', '.loss.png.writing', '.config.json.writing', 'log.jsonl', 'eval.jsonl', '.lock'):
        out, mine = shutil.copytree(tiny_run, tmp_path / name), tmp_path / f'{name}.mine'
        mine.write_text('years of work')
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(mine)
        shutil.rmtree(out / 'ckpt/step_00000020')
        results = [run('eval.py', out, '--val'), run('train.py', f'--out_dir={out}', '--resume'),
                   train_tiny(tiny_data, out, '--overwrite', steps=2)]
        assert mine.read_text() == 'years of work' and not any('Traceback' in r.stderr for r in results), name


# ---- checkpoints ----

@pytest.fixture
def run_folder(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def save(folder, step):
    checkpoint.save_checkpoint(folder, step, {'w': torch.full((3,), float(step))}, {'step': step})


def load(folder):
    state, tensors = checkpoint.load_checkpoint(folder)
    return state['step'], tensors['w'][0].item()


@pytest.mark.parametrize('content', ['null', '[]', '"a"', '{}', '{"step": null}', '{"step": "2"}', '{"step": 2.0}',
                                     '{"step": 3}', '{"step": 2, "seconds": "1"}', '[' * 10 ** 5])
def test_a_checkpoint_with_a_wrong_state_is_skipped(run_folder, content):
    newest = run_folder / 'ckpt/step_00000002'
    (newest / 'state.json').write_text(content)
    names = ('model.safetensors', 'optimizer.safetensors', 'state.json')
    (newest / 'SHA256SUMS').write_text(''.join(f'{sha256(newest / name)}  {name}\n' for name in names))
    assert load(run_folder) == (1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['model.safetensors', 'optimizer.safetensors', 'state.json', 'SHA256SUMS'])
def test_a_flipped_bit_in_a_checkpoint_falls_back_to_the_previous_one(tiny_run, tmp_path, name):
    out = shutil.copytree(tiny_run, tmp_path / 'run')
    newest, before = map(checkpoint.step_of, checkpoint.checkpoints(out)[:2])
    for place in bit_flips(out / f'ckpt/step_{newest:08d}' / name, 8):
        assert checkpoint.load_checkpoint(out, moments=True)[0]['step'] == before, place
    assert checkpoint.load_checkpoint(out, moments=True)[0]['step'] == newest


def test_old_checkpoints_and_damaged_later_ones_are_removed(run_folder, monkeypatch):
    """A file system may refuse modes and removals: then the next save removes them."""
    def keep(path, ignore_errors):
        assert ignore_errors
    for step in (8, 9):
        shutil.copytree(run_folder / 'ckpt/step_00000002', run_folder / f'ckpt/step_0000000{step}')
        (run_folder / f'ckpt/step_0000000{step}/model.safetensors').write_bytes(b'')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'chmod', refuse)
        patch.setattr(shutil, 'rmtree', keep)
        save(run_folder, 3)
        checkpoint.remove_older(run_folder, 3, keep=1, always=1)
    assert len(checkpoint.checkpoints(run_folder)) == 5
    save(run_folder, 4)
    checkpoint.remove_older(run_folder, 4, keep=1, always=1)
    assert load(run_folder) == (4, 4.0)
    assert [path.name for path in checkpoint.checkpoints(run_folder)] == ['step_00000004', 'step_00000001']


# ---- non-finite numbers ----

@pytest.mark.slow
def test_steps_with_non_finite_gradients_are_skipped_and_counted(tiny_data, tmp_path, monkeypatch):
    out, first = tmp_path / 'run', train.train_step

    def train_step(model, ddp, optimizer, data, s, step, *rest):
        add = float('nan') if step + 1 in (4, 5, 9) else 0
        hook = next(model.parameters()).register_hook(lambda gradient: gradient + add)
        result = first(model, ddp, optimizer, data, s, step, *rest)
        hook.remove()
        return result
    monkeypatch.setattr(train, 'train_step', train_step)
    succeeded(train_tiny(tiny_data, out, '--save_interval=1', '--keep_checkpoints=30'))
    log = {record['step']: record for record in records.read_log(out)}
    assert {step: r['skipped'] for step, r in log.items() if 'skipped' in r} == {4: 1, 5: 1, 9: 1}
    assert 'grad_norm' not in log[4] and log[20]['loss'] < log[1]['loss'] - 1
    three, four, five = (load_file(out / f'ckpt/step_{step:08d}/model.safetensors') for step in (3, 4, 5))
    assert all(torch.equal(three[name], four[name]) and torch.equal(three[name], five[name]) for name in three)
    for path in out.rglob('*.safetensors'):
        assert all(t.isfinite().all() for t in load_file(path).values()), path


def test_nan_and_infinity_are_not_saved_but_numbers_whose_sum_overflows_are(run_folder):
    large, inf, nan = torch.full((3,), 3e38), float('inf'), float('nan')
    for bad in ([nan], [inf, 1.0], [inf, -inf], [3e38, 3e38, nan]):
        with pytest.raises(UserError, match='exp_avg_sq/w contains NaN or infinity after step 3.*step_00000002'):
            checkpoint.save_checkpoint(run_folder, 3, {'w': large, 'exp_avg_sq/w': torch.tensor(bad)}, {'step': 3})
    assert load(run_folder) == (2, 2.0)
    finite = {'w': large, 'fp16': torch.full((99,), 6e4).half(), 'empty': torch.ones(0)}
    checkpoint.save_checkpoint(run_folder, 3, finite, {'step': 3})
    assert load(run_folder)[0] == 3


# ---- errors and signals ----

def test_a_run_survives_a_closed_terminal(monkeypatch, terminal_signals):
    with terminal.catch_signals() as stop, monkeypatch.context() as patch:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # shells send two
        patch.setattr(sys, 'stdout', open('/dev/full', 'w'))
        terminal.say('step 1')
    assert stop == [signal.SIGHUP]


@pytest.mark.parametrize('error, status', [(UserError('a sentence'), 'a sentence'), (KeyboardInterrupt(), 130),
                                           (MemoryError('x'), 'out of memory'), (OSError(28, 'full'), 'free some')])
def test_user_errors_give_a_message_and_bugs_a_traceback(error, status):
    with pytest.raises(SystemExit) as end, friendly_errors(None):
        raise error
    assert end.value.code == status or status in str(end.value.code)
    with pytest.raises(type(error)), friendly_errors([]):  # Python code called `main`
        raise error
    with pytest.raises(RuntimeError, match='a bug'), friendly_errors(None):
        raise RuntimeError('a bug')


def test_messages_escape_control_characters(capsys):
    with pytest.raises(SystemExit, match=re.escape(r'no run \x1b[2J\u202e here')), friendly_errors(None):
        raise UserError('no run \x1b[2J\u202e here')
    warn_once('\x1b[31mred')
    assert capsys.readouterr().err == '\\x1b[31mred\n'
