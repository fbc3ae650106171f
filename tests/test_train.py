"""Training: the same losses however it is cut up, nothing lost however it is stopped, a sentence for whatever is wrong."""
import importlib.util
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, STEP_TOKENS, TINY, assert_sentence, run, train_tiny

import train
from common import machine, runs
from common.scoring import counted
from data import open_data
from data.shards import write_data
from data.tokenizers import load_tokenizer


def losses(out):
    """{step: (loss, val, lr, gradient norm)} of a run's log."""
    return {r['step']: (r['loss'], r.get('val'), r['lr'], r['grad_norm']) for r in runs.read_log(out)}


@pytest.fixture(scope='module')
def undisturbed(tiny_data, tmp_path_factory):
    out = tmp_path_factory.mktemp('runs') / 'undisturbed'
    result = train_tiny(tiny_data, out)
    assert result.returncode == 0, result.stderr
    return out


def test_a_run_learns_and_leaves_its_records(undisturbed):
    log = runs.read_log(undisturbed)
    assert [r['step'] for r in log] == list(range(1, 21))
    assert log[-1]['loss'] < log[0]['loss'] - 1
    assert {'step', 'tokens', 'seconds', 'loss', 'nll', 'lr', 'grad_norm', 'tokens_per_s', 'mfu'} <= log[0].keys()
    assert [r['step'] for r in log if 'val' in r] == [10, 20]
    assert (undisturbed / 'loss.png').read_bytes()[:4] == b'\x89PNG'
    model, record = runs.load_run(undisturbed)
    assert record['model'] == 'standard' and record['data']['tokenizer'] == 'byte'
    assert sorted(p.name for p in runs.checkpoints(undisturbed)) == ['step_00000015', 'step_00000020']


@pytest.mark.parametrize('args', [['--model=sps', '--window=4', '--predict_input=token'],
                                  ['--model=gpn', '--d_emb=16', '--d_k=8', '--d_v=8', '--bptt_len=12']])
def test_a_run_of_another_model_resumes_on_the_same_losses_and_generates(args, tiny_data, tmp_path):
    result = train_tiny(tiny_data, tmp_path / 'run', *args)
    assert result.returncode == 0, result.stderr
    want = losses(tmp_path / 'run')
    shutil.rmtree(tmp_path / 'run/ckpt/step_00000020')
    result = train_tiny(tiny_data, tmp_path / 'run', *args, '--resume')
    assert result.returncode == 0 and 'from step 15' in result.stdout, result.stdout + result.stderr
    assert losses(tmp_path / 'run') == want and want[20][0] < want[1][0] - 1
    sampled = run('sample.py', tmp_path / 'run', 'abc', '--max_new_tokens=8', '--ignore_eos')
    assert sampled.returncode == 0 and '8 tokens' in sampled.stderr, sampled.stderr


@pytest.mark.parametrize('args, processes', [(['--micro_batch_size=1'], 1), (['--micro_batch_size=2'], 1), (['--micro_batch_size=3'], 1), ([], 2),
                                             (['--micro_batch_size=1'], 2)])
def test_losses_do_not_depend_on_processes_and_micro_batches(tiny_data, undisturbed, tmp_path, args, processes):
    result = train_tiny(tiny_data, tmp_path / 'run', *args, processes=processes)
    assert result.returncode == 0, result.stderr
    want, got = losses(undisturbed), losses(tmp_path / 'run')
    assert want.keys() == got.keys()
    for step in want:
        for a, b in zip(want[step], got[step]):
            assert (a is None) == (b is None) and (a is None or abs(a - b) < 1e-4 * (1 + abs(a))), (step, want[step], got[step])


# Runs train.py in a process that kills itself: 'time' after that many seconds of training, 'write' at that call of the functions
# that put a checkpoint on the disk.
KILLED = '''
import os, signal, sys, threading
kind, when = sys.argv.pop(1), float(sys.argv.pop(1))
sys.argv[0] = 'train.py'
import train
from common import runs
def die():
    os.kill(os.getpid(), signal.SIGKILL)
if kind == 'time':
    first = train.train_step
    def train_step(*args):
        if train.train_step is not first:
            train.train_step = first
            threading.Timer(when, die).start()
        return first(*args)
    train.train_step = train_step
else:
    calls = [0]
    def counted(function):
        def wrapper(*args, **kwargs):
            calls[0] += 1
            if calls[0] >= when:
                die()
            return function(*args, **kwargs)
        return wrapper
    for module, name in ((runs, 'save_file'), (runs, 'write_json'), (runs, 'sync_folder'), (os, 'fsync'), (os, 'replace'), (runs.shutil, 'rmtree')):
        setattr(module, name, counted(getattr(module, name)))
train.main()
'''


def test_twenty_kills_lose_nothing(tiny_data, tmp_path):
    """kill -9 at random moments, half of them inside the writing of a checkpoint: --resume gives the undisturbed losses, bitwise."""
    rng, steps, out = random.Random(7), 300, tmp_path / 'killed'
    whole = train_tiny(tiny_data, tmp_path / 'whole', steps=steps)
    assert whole.returncode == 0, whole.stderr
    command = [*TINY, f'--data={tiny_data}', f'--out_dir={out}', f'--max_tokens={steps * STEP_TOKENS}', '--save_interval=2']
    for i in range(20):
        kind, when = ('time', rng.uniform(0, 0.15)) if i % 2 else ('write', rng.randint(1, 45))
        resume = ['--resume'] if (out / 'config.json').exists() else []
        killed = subprocess.run([sys.executable, '-c', KILLED, kind, str(when), *command, *resume], cwd=ROOT, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, (i, killed.stdout, killed.stderr)
    result = run('train.py', *command, '--resume')
    assert result.returncode == 0, result.stderr
    assert losses(out) == losses(tmp_path / 'whole')
    assert [r['step'] for r in runs.read_log(out)] == list(range(1, steps + 1))


@pytest.mark.parametrize('sig', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tiny_data, tmp_path, sig):
    out = tmp_path / 'stopped'
    command = [*TINY, f'--data={tiny_data}', f'--out_dir={out}', f'--max_tokens={5000 * STEP_TOKENS}', '--save_interval=5000', '--eval_interval=5000']
    process = subprocess.Popen([sys.executable, 'train.py', *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(runs.read_log(out)) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(sig)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    step = runs.read_log(out)[-1]['step']
    assert f'stopped after step {step}' in stdout and 'python train.py' in stdout and '--resume' in stdout
    assert runs.load_checkpoint(out)[0]['step'] == step


def test_a_stop_of_two_processes_is_agreed(tiny_data, tmp_path):
    out = tmp_path / 'stopped'
    command = [*TINY, f'--data={tiny_data}', f'--out_dir={out}', f'--max_tokens={50000 * STEP_TOKENS}', '--eval_interval=50000']
    start = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train.py']
    process = subprocess.Popen([*start, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(runs.read_log(out)) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    step = runs.read_log(out)[-1]['step']
    assert runs.load_checkpoint(out)[0]['step'] == step
    assert f'stopped after step {step}. Go on with: torchrun --nproc_per_node=2 train.py' in stdout


def test_a_damaged_checkpoint_is_replayed_from_the_one_before(tiny_data, undisturbed, tmp_path):
    out = shutil.copytree(undisturbed, tmp_path / 'run')
    path = out / 'ckpt/step_00000020/optimizer.safetensors'
    path.write_bytes(path.read_bytes()[:-5])
    result = run('train.py', f'--out_dir={out}', '--resume')
    assert result.returncode == 0 and 'step_00000020 is damaged' in result.stderr, result.stderr
    assert losses(out) == losses(undisturbed)
    assert runs.load_checkpoint(out)[0]['step'] == 20


def test_eval_only_and_init_from(tiny_data, undisturbed, tmp_path):
    val = losses(undisturbed)[20][1]
    assert f'validation loss {val:.4f}' in run('train.py', f'--out_dir={undisturbed}', '--eval_only').stdout
    new = tmp_path / 'new'
    assert train_tiny(tiny_data, new, f'--init_from={undisturbed}', steps=2).returncode == 0
    assert losses(new)[1][0] < losses(undisturbed)[1][0] - 1
    for more in ([], ['--dry_run']):
        wider = train_tiny(tiny_data, tmp_path / 'other', f'--init_from={undisturbed}', '--n_embd=32', *more)
        assert_sentence(wider, 'embed.weight has shape')
    assert not (tmp_path / 'other').exists()
    record = json.loads((new / 'config.json').read_text())
    record['settings'] |= {'init_from': '/gone', 'max_tokens': 3 * STEP_TOKENS}
    (new / 'config.json').write_text(json.dumps(record))
    assert run('train.py', f'--out_dir={new}', '--resume').returncode == 0  # the first run's folder is needed no more
    shutil.rmtree(new / 'ckpt')
    assert_sentence(run('train.py', f'--out_dir={new}', '--eval_only'), 'has no checkpoint to load')


def test_a_run_folder_is_never_overwritten_unasked(tiny_data, undisturbed, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob('*')}
    assert_sentence(train_tiny(tiny_data, undisturbed), 'holds a run already', '--resume', '--overwrite')
    assert_sentence(train_tiny(tiny_data, undisturbed, '--resume', '--seed=3'), 'has seed = 1337, but 3 is asked for')
    assert {p: p.stat().st_mtime_ns for p in undisturbed.rglob('*')} == before
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis.txt').write_text('years of work')
    assert_sentence(train_tiny(tiny_data, tmp_path / 'mine', '--overwrite'), 'is not a run folder')
    (tmp_path / 'mine/thesis.txt').rename(tmp_path / 'mine/.thesis')
    assert_sentence(train_tiny(tiny_data, tmp_path / 'mine', '--overwrite'), 'is not a run folder')
    assert (tmp_path / 'mine/.thesis').exists()
    copy = shutil.copytree(undisturbed, tmp_path / 'copy')
    assert train_tiny(tiny_data, copy, '--overwrite', steps=2).returncode == 0
    assert len(losses(copy)) == 2 and sorted(p.name for p in tmp_path.iterdir()) == ['copy', 'mine']


@pytest.mark.parametrize('args, parts', [
    (['--lerning_rate=1'], ["unknown setting 'lerning_rate'", "'learning_rate'"]),
    (['--model=standart'], ["unknown model 'standart': did you mean 'standard'"]),
    (['--batch_size=many'], ["'batch_size'", 'expected int']),
    (['--n_head=3'], ['n_embd = 16 and n_head = 3']),
    (['--n_ids=99'], ['n_ids is 99', '257']),
    (['--schedule=linear'], ["schedule is 'linear'"]),
    (['--block_size=100000'], ['too few for windows of block_size = 100000']),
    (['--dtype=float8'], ["dtype is 'float8'"]),
    (['--data=/nowhere'], ['no data at /nowhere']),
    (['--resume'], ['is not a run folder']),
    (['--init_from=/nowhere'], ['/nowhere is not a run folder']),
    (['--window=-1'], ['window = -1: expected 0 or more']),
    (['--n_layer=0'], ['n_layer = 0: expected more than 0']),
    (['--grad_clip=-1.0'], ['grad_clip is -1.0: expected at least 0']),
    (['--device=tpu'], ["device is 'tpu'"]),
    pytest.param(['--wandb_project=x'], ['wandb is not installed'], marks=pytest.mark.skipif(
        importlib.util.find_spec('wandb') is not None, reason='wandb is installed'))])
def test_bad_input_is_a_sentence_and_creates_nothing(tiny_data, tmp_path, args, parts):
    assert_sentence(train_tiny(tiny_data, tmp_path / 'out', *args), *parts)
    assert not (tmp_path / 'out').exists()


def test_dry_run_prints_costs_and_creates_nothing(tiny_data, tmp_path):
    result = train_tiny(tiny_data, tmp_path / 'out', '--dry_run')
    assert result.returncode == 0 and not (tmp_path / 'out').exists()
    for part in ('parameters', '20 steps of 4 x 32 = 128 tokens', 'FLOP per token', 'estimated memory'):
        assert part in result.stdout


def test_a_loss_that_is_not_a_number_stops_the_run_before_it_is_saved(tiny_data, tmp_path):
    result = train_tiny(tiny_data, tmp_path / 'out', '--learning_rate=1e30', '--grad_clip=0', '--save_interval=1')
    assert_sentence(result, 'the loss became', 'learning rate', 'lower learning_rate')
    model, _ = runs.load_run(tmp_path / 'out')
    assert len(runs.read_log(tmp_path / 'out')) == runs.load_checkpoint(tmp_path / 'out')[0]['step']


def test_a_full_disk_is_a_sentence_and_keeps_the_checkpoint_before(tiny_data, undisturbed, tmp_path):
    out = shutil.copytree(undisturbed, tmp_path / 'run')
    shutil.rmtree(out / 'ckpt/step_00000020')
    limit = 20_000  # bytes a file may have: fewer than the weights need
    result = run('train.py', f'--out_dir={out}', '--resume', preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert_sentence(result, 'step_00000020 could not be written', 'make room', '--resume')
    assert [p.name for p in (out / 'ckpt').iterdir()] == ['step_00000015']
    assert run('train.py', f'--out_dir={out}', '--resume').returncode == 0
    assert losses(out) == losses(undisturbed)


def test_resume_wants_the_same_data(tiny_data, undisturbed, tmp_path):
    other, out = tmp_path / 'other', shutil.copytree(undisturbed, tmp_path / 'run')
    write_data(other, load_tokenizer('byte'), [('train', 'another text ' * 100), ('val', 'of other words ' * 10)])
    record = json.loads((out / 'config.json').read_text())
    record['settings']['data'] = str(other)
    (out / 'config.json').write_text(json.dumps(record))
    assert_sentence(run('train.py', f'--out_dir={out}', '--resume'), f'{other} is not the data that the run in {out} was trained on')


def test_a_vocabulary_that_does_not_fit_the_run_is_a_sentence(tiny_data, undisturbed, tmp_path):
    other, out = shutil.copytree(tiny_data, tmp_path / 'other'), shutil.copytree(undisturbed, tmp_path / 'run')
    meta = json.loads((other / 'meta.json').read_text())
    (other / 'meta.json').write_text(json.dumps({**meta, 'n_ids': 300}))
    record = json.loads((out / 'config.json').read_text())
    record['settings']['data'] = str(other)
    (out / 'config.json').write_text(json.dumps(record))
    assert_sentence(run('train.py', f'--out_dir={out}', '--resume'), "has tokenizer 'byte' with 300 ids", "'byte' and 257")


@pytest.mark.parametrize('change, part', [
    ({'batch_size': 'many'}, "setting 'batch_size' in"), ({'colour': 1}, 'does not know: colour')])
def test_a_damaged_config_json_is_a_sentence(undisturbed, tmp_path, change, part):
    out = shutil.copytree(undisturbed, tmp_path / 'run')
    record = json.loads((out / 'config.json').read_text())
    record['settings'] |= change
    (out / 'config.json').write_text(json.dumps(record))
    assert_sentence(run('train.py', f'--out_dir={out}', '--resume'), str(out / 'config.json'), part)


def test_resume_keeps_the_dtype_that_auto_was(undisturbed):
    record = json.loads((undisturbed / 'config.json').read_text())
    s, _, _ = train.read_settings([f'--out_dir={undisturbed}', '--resume', '--dtype=auto'])
    assert s.dtype == record['settings']['dtype'] == 'float32'


def test_schedules():
    s = train.Settings(learning_rate=1.0, warmup_tokens=100, max_tokens=1000)
    wsd = [train.learning_rate(s, t) for t in (10, 100, 500, 900, 950, 1000, 1100)]
    assert wsd == pytest.approx([0.1, 1, 1, 1, 0.55, 0.1, 0.1])
    s.schedule = 'cosine'
    assert [train.learning_rate(s, t) for t in (100, 550, 1000)] == pytest.approx([1, 0.55, 0.1])
    s.schedule = 'constant'
    assert train.learning_rate(s, 1000) == 1


def test_the_loss_weighs_tokens_not_micro_batches(tiny_data):
    """One micro-batch with few counted tokens weighs little: the gradient is that of the global mean."""
    s = train.Settings(data=str(tiny_data), batch_size=4, micro_batch_size=1, block_size=32, warmup_tokens=0, grad_clip=0.0)
    data = open_data(s.data)
    c = runs.make_config('standard', dict(n_layer=1, n_head=2, n_embd=16, vocab_size=320, n_ids=257, eos_id=256))
    torch.manual_seed(0)
    model = runs.model_file('standard').Model(c)
    idx, targets = data.train_batch(3, 4, 32, s.seed)
    assert len({counted(x, y, 256) for x, y in zip(idx, targets)}) > 1
    want = model(idx, targets)['loss'].item()
    parts, *_ = train.train_step(model, model, train.make_optimizer(model, s), data, s, 3,
                                 machine.Machine(0, 1, torch.device('cpu')), False)
    assert parts['loss'].item() == pytest.approx(want, abs=1e-6)
