"""Training: reproducible losses, interruptions, resuming, dry runs, and clear errors."""
import contextlib
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, STEP_TOKENS, TINY, assert_sentence, config_json, contents, losses, run, start_training
from conftest import succeeded, train_tiny

import attn_kernels
import train
from config.gpn import gpn_130m
from lm_architectures.data import open_data
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.data.text.writing import write_data
from lm_architectures import files
from lm_architectures.files import UserError
from lm_architectures.machine import devices
from lm_architectures.run import checkpoint, dry_run, folders, models, records, run_settings
from lm_architectures.run.dry_run import EmulateGPU, LiveBytes, activation_bytes, meta_model
from lm_architectures.score.validation import loss_on_source


@pytest.mark.slow
def test_a_run_learns_and_writes_its_files(tiny_run):
    log = records.read_log(tiny_run)
    assert [r['step'] for r in log] == list(range(1, 21))
    assert log[-1]['loss'] < log[0]['loss'] - 1
    assert {'step', 'tokens', 'seconds', 'loss', 'nll', 'lr', 'grad_norm', 'tokens_per_s'} <= log[0].keys()
    assert [r['step'] for r in log if 'val' in r] == [10, 20]
    assert (tiny_run / 'loss.png').read_bytes()[:4] == b'\x89PNG'
    model, record = folders.load_run(tiny_run)
    assert record['model'] == 'standard' and record['data']['tokenizer'] == 'byte'
    kept = sorted(path.name for path in checkpoint.checkpoints(tiny_run))
    assert kept == ['step_00000015', 'step_00000018', 'step_00000020']


@pytest.mark.slow
@pytest.mark.parametrize('args', [['--model=sps', '--window=4', '--predict_input=token'],
                                  ['--model=gpn', '--d_emb=16', '--d_k=8', '--d_v=8', '--bptt_len=12'],
                                  ['--model=gdn', '--d_k=8', '--d_v=8', '--chunk_len=12'], ['--optimizer=muon']])
def test_other_models_and_optimizers_resume_with_the_same_losses_and_generate(args, tiny_data, tmp_path):
    out = tmp_path / 'run'
    succeeded(train_tiny(tiny_data, out, *args))
    want = losses(out)
    shutil.rmtree(out / 'ckpt/step_00000020')
    assert 'from step 18' in succeeded(run('train.py', f'--out_dir={out}', '--resume')).stdout
    assert losses(out) == want and want[20][0] < want[1][0] - 1
    assert '8 tokens' in succeeded(run('sample.py', out, 'abc', '--max_new_tokens=8', '--ignore_eos')).stderr


def train_and_die(kind, when, command):
    """Train until kill -9: after some seconds ('time'), or at the n-th write of a file.

    Each checkpoint is then written after the next step.
    """
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def first_step(*args):
        train.train_step = step
        threading.Timer(when, die).start()
        return step(*args)

    def counted(function):
        def wrapper(*args, **kwargs):
            calls.append(1)
            if len(calls) >= when:
                die()
            return function(*args, **kwargs)
        return wrapper

    def step_and_say(*args):
        result = step(*args)
        done[args[5] + 1].set()
        return result

    def write_late(folder, n, *rest):
        assert done[n + 1].wait(60)
        write(folder, n, *rest)
    step, write, calls = train.train_step, checkpoint.write_checkpoint, []
    done = [threading.Event() for _ in range(1000)]
    if kind == 'time':
        train.train_step = first_step
    else:
        train.train_step, checkpoint.write_checkpoint = step_and_say, write_late
        for module, name in ((checkpoint, 'save_file'), (checkpoint, 'write_json'), (files, 'write_json'),
                             (checkpoint, 'sync'), (os, 'fsync'), (os, 'replace'), (shutil, 'rmtree')):
            setattr(module, name, counted(getattr(module, name)))
    train.main(command)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
@pytest.mark.parametrize('n_kills, steps', [(5, 100), pytest.param(20, 300, marks=pytest.mark.long)])
def test_kills_lose_nothing(tiny_data, tmp_path, n_kills, steps):
    """After kill -9 at random times, half during a save, --resume gives bitwise equal losses."""
    rng, out = random.Random(7), tmp_path / 'killed'
    succeeded(train_tiny(tiny_data, tmp_path / 'whole', steps=steps))
    command = [*TINY, f'--data={tiny_data}', f'--out_dir={out}', f'--max_tokens={steps * STEP_TOKENS}',
               '--save_interval=2']
    for i in range(n_kills):
        kind, when = ('time', rng.uniform(0, 0.15)) if i % 2 else ('write', rng.randint(1, 45))
        resume = ['--resume'] if (out / 'config.json').exists() else []
        process = multiprocessing.get_context('fork').Process(target=train_and_die, args=(kind, when, command + resume))
        process.start()  # a fork need not import torch
        process.join()
        assert process.exitcode == -signal.SIGKILL, i
    succeeded(run('train.py', *command, '--resume'))
    assert losses(out) == losses(tmp_path / 'whole')
    assert [*losses(out)] == list(range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize('sig, processes', [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_finishes_the_step_saves_and_prints_the_command_that_continues(tiny_data, tmp_path, sig, processes,
                                                                                terminal_signals):
    process = start_training(tiny_data, tmp_path / 'run', processes=processes)
    process.send_signal(sig)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 or processes > 1, stderr
    step = max(losses(tmp_path / 'run'))
    assert checkpoint.load_checkpoint(tmp_path / 'run')[0]['step'] == step
    command = 'torchrun --nnodes=1 --nproc_per_node=2 train.py' if processes > 1 else 'python train.py'
    assert f'stopped after step {step}. Continue with: {command}' in stdout and '--resume' in stdout


@pytest.mark.slow
def test_init_from_loads_the_weights_and_then_no_longer_needs_the_source(tiny_data, tiny_run, tmp_path):
    new = tmp_path / 'new'
    (tmp_path / 'from_tiny.py').write_text(f'init_from = {str(tiny_run)!r}')
    succeeded(train_tiny(tiny_data, new, tmp_path / 'from_tiny.py', steps=2))
    assert losses(new)[1][0] < losses(tiny_run)[1][0] - 1
    record = config_json(new)
    record['settings'] |= {'init_from': '/gone', 'max_tokens': 3 * STEP_TOKENS}
    (new / 'config.json').write_text(json.dumps(record))
    succeeded(run('train.py', f'--out_dir={new}', '--resume'))
    assert folders.load_run(new)[1]['step'] == 3


@pytest.mark.slow
@pytest.mark.parametrize('name, more', [('sps', []), ('standard', ['--model=standard'])])
def test_init_from_takes_the_model_too_unless_another_is_given(tiny_data, tmp_path, name, more):
    """SPS and Standard have the same tensors."""
    succeeded(train_tiny(tiny_data, tmp_path / 'sps', '--model=sps', '--window=4', steps=1))
    succeeded(train_tiny(tiny_data, tmp_path / 'new', f'--init_from={tmp_path / "sps"}', *more, steps=1))
    assert config_json(tmp_path / 'new')['model'] == name


@pytest.mark.slow
def test_what_does_not_fit_the_source_of_a_run_gives_a_clear_error(tiny_data, tiny_run, tmp_path):
    """Neither on --resume nor on --init_from is anything written."""
    out, source = shutil.copytree(tiny_run, tmp_path / 'run'), f'--init_from={tiny_run}'
    record = config_json(out)
    record['data']['n_rows'] = 300  # of an imported run
    (out / 'config.json').write_text(json.dumps(record))
    before = contents(out)
    write_data(tmp_path / 'data', load_tokenizer('byte'), [('train', 'one text ' * 99), ('val', 'another one ' * 99)])
    resume = 'train.py', f'--out_dir={out}', '--resume'
    for setting, sentence in (
            ('--n_embd=32', 'was given'), ('--mask_documents=False', 'was given'), ('--model=sps', 'was given'),
            ('--seed=3', 'has seed = 1337, but 3 was given'),
            ('--max_tokens=200000', f'train longer with --extend={out} --max_tokens=200000 --out_dir=NEW'),
            (f'--data={tmp_path / "data"}', f'is not the data that the run in {out} was trained on')):
        assert_sentence(run(*resume, setting), sentence)
    assert_sentence(train_tiny(tiny_data, out, f'--init_from={out}', '--overwrite'), '--init_from and --out_dir')
    assert_sentence(train_tiny(tiny_data, tmp_path / 'new', source, '--n_embd=32'), 'embed.weight has shape')
    assert_sentence(train_tiny('out/none', tmp_path / 'new', f'--init_from={out}'), 'no data at out/none')
    assert not (tmp_path / 'new').exists() and contents(out) == before


@pytest.mark.slow
def test_a_run_folder_is_never_overwritten_by_default(tiny_data, tiny_run):
    before = {p: p.stat().st_mtime_ns for p in tiny_run.rglob('*')}
    assert_sentence(train_tiny(tiny_data, tiny_run), 'already contains a run', '--resume', '--overwrite')
    succeeded(train_tiny(tiny_data, tiny_run, '--dry_run'))
    assert_sentence(run('train.py', tiny_run, '--resume'), 'is a run folder', f'--out_dir={tiny_run} --resume')
    assert {p: p.stat().st_mtime_ns for p in tiny_run.rglob('*')} == before


@pytest.mark.parametrize('args, parts', [
    (['--n_head=3'], ['n_embd = 16 and n_head = 3']),
    (['--n_ids=99'], ['n_ids is 99', '257']),
    (['--block_size=100000'], ['too few for a window of block_size = 100000']),
    (['--data=/no where'], ['no data at /no where', 'prepare_fineweb.py reads more\n']),
    (['--model=nosuch'], ["unknown model 'nosuch': give the path of its file", 'Models here: bst, context_ready, gdn']),
    (['config/quickstart.py', '--max_tokens', '1000'], ['got config/quickstart.py 1000: write --max_tokens=1000\n']),
    (['--out_dir=/dev/null/run'], ["Not a directory: '/dev/null/run'"]),
    (['--init_from=/nowhere'], ['/nowhere is not a run folder']),
    (['--model=nextlat', '--objective=ntp', '--acceptance_prompts=2'], ['cannot draft for itself']),
    (['--model=gdn', '--scan=fla'], ['needs the package fla-core', "use scan = 'auto'"]),
    (['--model=gdn', '--scan=fla', '--dry_run'], ['needs the package fla-core', "use scan = 'auto'"]),
    (['--attention=triton'], ['use --attention=auto']),
    *(([f'--{name}={value}'], [f'{name} is {value}', 'expected']) for name, value in (
        ('threads', 0), ('eval_tokens', -5), ('block_size', 0), ('beta1', 1), ('decay_fraction', 1.5),
        ('keep_checkpoints', 1), ('shard', 1)))])
def test_bad_input_gives_a_clear_error_and_creates_nothing(tiny_data, tmp_path, args, parts):
    assert_sentence(train_tiny(tiny_data, tmp_path / 'out', *args), *parts)
    assert not (tmp_path / 'out').exists()


@pytest.mark.slow
def test_a_non_finite_loss_stops_the_run_before_it_is_saved(tiny_data, tmp_path):
    result = train_tiny(tiny_data, tmp_path / 'out', '--learning_rate=1e15', '--grad_clip=0', '--save_interval=1')
    assert_sentence(result, 'in three consecutive steps', 'learning rate', 'last good checkpoint is', '--init_from=')
    folders.load_run(tmp_path / 'out')  # as every checkpoint, it is finite


@pytest.mark.slow
def test_a_full_disk_gives_a_clear_error_and_keeps_the_previous_checkpoint(tiny_data, tiny_run, tmp_path):
    out = shutil.copytree(tiny_run, tmp_path / 'run')
    shutil.rmtree(out / 'ckpt/step_00000020')
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))  # bytes of a file: less than the weights need
    try:
        result = run('train.py', f'--out_dir={out}', '--resume')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert_sentence(result, 'checkpoint of step 20 could not be written', 'free some disk space', '--resume')
    assert {p.name for p in (out / 'ckpt').iterdir()} == {'step_00000015', 'step_00000018'}
    succeeded(run('train.py', f'--out_dir={out}', '--resume'))
    assert losses(out) == losses(tiny_run)


@pytest.mark.slow
def test_resume_keeps_the_dtype_and_allows_changing_memory_settings(tiny_run):
    s, given, record = run_settings.read_settings(train.Settings, [
        f'--out_dir={tiny_run}', '--resume', '--dtype=auto', '--checkpoint_blocks=True', '--micro_batch_size=2'])
    assert s.dtype == record['settings']['dtype'] == 'float32' and s.micro_batch_size == 2
    assert run_settings.model_config(s, given, open_data(s.data), record).checkpoint_blocks


def test_learning_rate_schedules():
    s = train.Settings(learning_rate=1.0, warmup_tokens=100, max_tokens=1000)
    wsd = [train.learning_rate(s, t) for t in (10, 100, 500, 900, 950, 1000, 1100)]
    assert wsd == pytest.approx([0.1, 1, 1, 1, 0.55, 0.1, 0.1])
    s.schedule = 'cosine'
    assert [train.learning_rate(s, t) for t in (100, 550, 1000)] == pytest.approx([1, 0.55, 0.1])
    s.schedule = 'constant'
    assert train.learning_rate(s, 1000) == 1
    s.schedule, s.decay_fraction = 'wsd', 0.0
    assert train.learning_rate(s, 1100) == 1
    for percent in range(1, 100):  # exact, as with integers
        s = train.Settings(batch_size=32, block_size=128, max_tokens=20_000 * 4096, decay_fraction=percent / 100)
        assert s.last_before_decay == 200 * (100 - percent)


@pytest.mark.parametrize('name, values', [
    ('standard', {}), ('bst', {'min_k': 1}), ('bst', {'min_k': 2, 'eos_id': None}), ('bst', {'min_k': 2})])
def test_the_gradient_does_not_depend_on_the_micro_batches(tiny_data, name, values):
    """Micro-batches are weighted by counted tokens (BST: by counted pairs)."""
    data = open_data(str(tiny_data))
    c = models.make_config(name, dict(n_layer=1, n_head=2, n_embd=16, vocab_size=320, n_ids=257, eos_id=256) | values)
    idx, targets = data.train_batch(3, 4, 32, 1337)
    assert len({int((x != 256).sum()) for x in idx}) > 1
    torch.manual_seed(0)
    model, found = models.model_file(name).Model(c), []
    for micro in (1, 3, 4):
        s = train.Settings(batch_size=4, micro_batch_size=micro, block_size=32, learning_rate=0.0, grad_clip=0.0)
        parts = train.train_step(model, model, train.make_optimizer(model, s), data, s, 3,
                                 devices.Machine(0, 1, torch.device('cpu')), torch.zeros(3))
        found.append(torch.stack([*parts.values()]).tolist())
    assert found[1] == pytest.approx(found[0], rel=1e-5) and found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
def test_logged_parts_of_the_loss_equal_those_of_eval(tiny_data, tmp_path, monkeypatch):
    args = ['--model=nextlat', '--horizon=2', '--micro_batch_size=20']  # validation in one batch, as below
    monkeypatch.setattr(devices.Machine, 'peak_flops', lambda self: 1e12)
    result = train_tiny(tiny_data, tmp_path, *args, steps=2)
    assert 'nats per token, val_' in result.stdout and ', val_kl ' in result.stdout
    last = records.read_log(tmp_path)[-1]
    model, _ = folders.load_run(tmp_path)
    assert last['mfu'] == pytest.approx(last['tokens_per_s'] * model.flops_per_token(32) / 1e12)
    parts = model(*open_data(tiny_data).val_batch(range(20), 32, seed=42))
    for name in ('kl', 'next_hidden'):
        assert last[f'val_{name}'] == pytest.approx(parts[name].item(), rel=1e-5)
    assert last['val'] == pytest.approx(parts['nll'].item(), rel=1e-5)
    succeeded(run('eval.py', tmp_path, '--val', '--val_tokens=640', '--dtype=float32'))
    judged = json.loads((tmp_path / 'eval.jsonl').read_text())['results']['val']
    assert judged['kl'] == pytest.approx(last['val_kl'], rel=1e-4)
    assert judged['nats_per_token'] == pytest.approx(last['val'], rel=1e-5)


# ---- memory estimates and dry runs ----

@pytest.mark.slow
@pytest.mark.parametrize('name, values, rows', [
    ('standard', {}, 40), ('standard', {'checkpoint_blocks': True, 'vocab_size': 8192}, 160),
    ('sps', {'checkpoint_blocks': True}, 40), ('context_ready', {'K': 3}, 40), ('nextlat', {'horizon': 2}, 40),
    ('mtp', {'horizon': 2}, 40), ('jtp', {}, 40), ('bst', {'pair_share': 0.5}, 40),
    ('context_ready', {'bptt': True}, 40)])
def test_estimated_memory_equals_the_tensors_of_a_real_step(name, values, rows, monkeypatch):
    """The estimate from meta tensors is within 10% of that from real tensors."""
    T = 64
    c = models.make_config(name, dict(vocab_size=320, n_ids=257, eos_id=None, n_layer=2, n_head=1, n_embd=64) | values)
    estimate = activation_bytes(meta_model(name, c), torch.float32, T, rows)
    monkeypatch.setattr(attn_kernels, 'CPU_CHUNK', attn_kernels.GPU_CHUNK)
    monkeypatch.setattr(torch.ops.aten, '_scaled_dot_product_flash_attention',
                        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
    real = activation_bytes(models.model_file(name).Model(c), torch.float32, T, rows)
    assert estimate == pytest.approx(real, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['standard', 'sps'])
def test_estimated_memory_is_what_compiled_blocks_keep_for_the_backward_pass_or_a_little_more(name, monkeypatch):
    """Compared with the compiler's own choice of what to keep: 1 to 1.06 times as much."""
    c = models.make_config(name, dict(n_layer=2, n_head=2, n_embd=64, vocab_size=320, n_ids=257, eos_id=None))
    idx, kept = torch.zeros(8, 128, dtype=torch.int64), {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    monkeypatch.setattr(models.model_file(name), 'make_mask', lambda *args, **options: attn_kernels.Mask('causal'))
    meta, model = meta_model(name, c), models.model_file(name).Model(c)
    with LiveBytes() as live, torch.autocast('cpu', torch.bfloat16), EmulateGPU():
        h = meta.final_hidden(idx.to('meta'))  # noqa: F841
        estimate = live.live
    for block in model.blocks:
        block.compile(backend='aot_eager_decomp_partition')
    with torch.autocast('cpu', torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.final_hidden(idx)
    for p in model.parameters():
        kept.pop(p.data_ptr(), None)
    assert 1 <= estimate / sum(kept.values()) < 1.06


@pytest.mark.slow
def test_a_dry_run_without_data_prints_assumptions_how_to_make_the_data_and_whether_a_step_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = [*TINY, '--out_dir=out', '--max_tokens=1e6', '--warmup_tokens=950_000', '--dry_run']
    result = succeeded(run('train.py', *args, '--gpu_gib=4'))
    for part in ('assuming a vocabulary of 50,257 ids', 'a step fits 4 GiB',
                 'prepare_fineweb.py --out_dir=data/built/fineweb_edu --max_tokens=1.05e06', 'FLOP per token',
                 'the warm-up takes 950,000 tokens, but the decay begins, or the run ends, after 900,000',
                 '7,813 steps of 4 x 32 = 128 tokens'):
        assert part in result.stdout
    small = run('train.py', *args, '--gpu_gib=0.0001', '--assumed_ids=300').stdout
    assert 'a step does not fit 0.0001 GiB' in small and 'vocabulary of 300 ids' in small
    shown = run('train.py', ROOT / 'config/gpn/gpn_130m.py', '--dry_run').stdout
    assert '129,151,902 parameters' in shown and gpn_130m.make_data.partition('prepare_fineweb.py')[2] in shown
    monkeypatch.setattr(dry_run, 'MAX_OPERATORS', 1000)
    shown = run('train.py', *args, '--model=context_ready', '--bptt=True', '--assumed_ids=300').stdout
    assert 'activations are left out: a step of 32 tokens takes over 1,000 operators' in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize('scale', ['xs', 's', 'm', 'l', 'xl'])
@pytest.mark.parametrize('method', ['standard', 'sps', 'sps/two_x_memory', 'sps/delayed_state', 'sps/reverse_sps'])
def test_every_sps_config_is_estimated_to_fit_80_gib(method, scale):
    result = run('train.py', f'config/{method}_{scale}.py', '--dry_run', '--gpu_gib=80')
    assert 'a step fits 80 GiB' in result.stdout, result.stdout + result.stderr


def test_a_validation_window_without_a_counted_token_is_left_out():
    def model(idx, targets):
        return {'nll': torch.tensor(2.0 if idx[0, 0] < 2 else math.nan)}
    model.config = SimpleNamespace(eos_id=2)
    for first, n in ((1, 32), (2, 0)):  # of two windows, the second has only ends of text
        data = SimpleNamespace(folder='folder', T=None, splits={'val': {'tokens': 65}}, val_batch=lambda w, T, seed: (
            torch.full((1, T), 2 if w[0] else first), torch.ones(1, T)))  # noqa: B023
        with pytest.raises(UserError, match='input of folder ends a text') if n == 0 else contextlib.nullcontext():
            assert loss_on_source(model, data, 32, None, None, 1, 'cpu') == ({'nll': 2.0}, n)


def test_the_resume_command_has_the_folder_and_the_processes_per_machine(monkeypatch):
    assert run_settings.resume_command(['--init_from=out/A'], 1, 'out/sps').endswith('--out_dir=out/sps --resume')
    monkeypatch.setattr(run_settings, 'ranks', lambda: (0, 16, 0, 8))
    assert run_settings.resume_command([], 16, 'out/A').startswith('torchrun --nnodes=2 --nproc_per_node=8 train.py ')
