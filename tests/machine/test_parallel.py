"""Several processes: FSDP equals DDP, and runs resume on any number of processes."""
import json
import os
import shutil
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, STEP_TOKENS, TINY, bit_flips, losses, run, run_subprocess, succeeded
from references import random_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model_context_ready
import model_gdn
import model_standard
import train
from attn_kernels import Mask
from lm_architectures.data import open_data
from lm_architectures.files import UserError
from lm_architectures.machine import devices, parallel, wrapping
from lm_architectures.machine.parallel import full_tensor
from lm_architectures.machine.wrapping import shard_model
from lm_architectures.run import checkpoint, dry_run, models, run_settings

STEPS = 25
MODELS = {
    'standard': ['--model=standard', '--checkpoint_blocks=True'],
    'sps': ['--model=sps', '--window=4'],
    'nextlat': ['--model=nextlat', '--horizon=3', '--acceptance_prompts=2'],
    'mtp': ['--model=mtp', '--horizon=2'],
    'jtp': ['--model=jtp', '--horizon=2'],
    # Sharded as one group (some read weights without calling modules). Low rates limit rounding.
    'bst': ['--model=bst', '--learning_rate=1e-3'],
    'gpn': ['--model=gpn', '--d_emb=16', '--d_k=8', '--d_v=8', '--segment_len=8', '--learning_rate=1e-3'],
    'gdn': ['--model=gdn', '--n_layer=1', '--n_head=1', '--learning_rate=1e-3'],
    'context_ready': ['--model=context_ready', '--learning_rate=1e-3'],
    'context_ready_tied': ['--model=context_ready', '--variant=tied', '--learning_rate=1e-3'],
    'context_ready_bptt': ['--model=context_ready', '--bptt=True', '--learning_rate=1e-3'],
}

# Runs several trainings in the same processes, to start them only once. Each checkpoint is written
# after the next step, if there is one. The disk of a run named `full` is full.
SEVERAL = '''
import json, os, sys, threading
import train
from lm_architectures.files import UserError
from lm_architectures.run import checkpoint
train_step, write, save_file = train.train_step, checkpoint.write_checkpoint, checkpoint.save_file
done = [threading.Event() for _ in range(100)]
def step_and_say(model, ddp, optimizer, data, s, step, *rest):
    parts = train_step(model, ddp, optimizer, data, s, step, *rest)
    for event in done[step + 1:step + 2 + (step + 1 == s.n_steps)]:
        event.set()
    return parts
def write_late(folder, step, *rest):
    assert done[step + 1].wait(60)
    write(folder, step, *rest)
def save_unless_full(tensors, path):
    if path.parts[-4] == 'full':
        raise OSError(28, 'No space left on device')
    save_file(tensors, path)
train.train_step, checkpoint.write_checkpoint, checkpoint.save_file = step_and_say, write_late, save_unless_full
end, os._exit = os._exit, lambda code: None
for argv in json.load(open(sys.argv[1])):
    for event in done:
        event.clear()
    try:
        train.main(argv)
    except UserError as error:
        print(error)
end(0)
'''


def arguments(data, out, model, *args):
    return [*TINY, f'--data={data}', f'--out_dir={out}', *MODELS[model], '--micro_batch_size=1',
            f'--max_tokens={STEPS * STEP_TOKENS}', '--save_interval=5', '--keep_checkpoints=9', '--eval_interval=12',
            *map(str, args)]


def run_on_processes(n, folder, code, *args):
    """Run code on n processes and return the result."""
    (folder / 'script.py').write_text(code)
    return run_subprocess('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}', folder / 'script.py',
                     *args, env={**os.environ, 'PYTHONPATH': str(ROOT)})


def train_several(folder, processes, trainings):
    """Run several trainings (argv of train.py each) on the same processes; return the result."""
    (folder / 'trainings.json').write_text(json.dumps(trainings))
    return succeeded(run_on_processes(processes, folder, SEVERAL, folder / 'trainings.json'))


def resume(out, processes, step, *args):
    """Resume a run on some processes, check that it starts at `step`, and return the result."""
    argv = [f'--out_dir={out}', '--resume', *args]
    result = train_several(out.parent, processes, [argv]) if processes > 1 else succeeded(run('train.py', *argv))
    assert f'from step {step};' in result.stdout, result.stderr
    return result


def is_close(out, other, n_steps=STEPS):
    """Return True if two runs have logged all steps, with the same losses."""
    have, want = ([loss for loss, *_ in losses(folder).values()] for folder in (out, other))
    return len(have) == len(want) == n_steps and max(abs(a - b) for a, b in zip(have, want)) < 1e-5


def copy_up_to(source, out, step):
    """Copy a run folder, without checkpoints after a step, as if it was killed then."""
    shutil.copytree(source, out)
    for path in checkpoint.checkpoints(out):
        if checkpoint.step_of(path) > step:
            shutil.rmtree(path)
    return out


@pytest.fixture(scope='module')
def trained(tiny_data, tmp_path_factory):
    """Train standard_ddp, full and standard_fsdp on two processes; return their parent folder."""
    folder = tmp_path_factory.mktemp('parallel')
    result = train_several(folder, 2, [
        arguments(tiny_data, folder / name, 'standard', f'--parallel={kind}', '--sample_tokens=8')
        for name, kind in (('standard_ddp', 'ddp'), ('full', 'fsdp'), ('standard_fsdp', 'fsdp'))])
    assert 'weights in 2 shards' in result.stdout
    assert result.stdout.count('checkpoint of step 5 could not be written') == 2  # both processes stop
    return folder


@pytest.mark.slow
def test_two_processes_log_and_save_what_one_does(trained, tiny_data, tmp_path):
    """With FSDP as with DDP."""
    succeeded(run('train.py', *arguments(tiny_data, tmp_path / 'alone', 'standard')))
    sharded, copied = trained / 'standard_fsdp', trained / 'standard_ddp'
    alone, both = losses(tmp_path / 'alone'), losses(copied)
    assert alone.keys() == both.keys() and is_close(sharded, copied)
    for step in alone:
        assert both[step] == pytest.approx(alone[step], rel=1e-4, abs=1e-4), step
    (state, tensors), (its_state, its_tensors) = (checkpoint.load_checkpoint(out, True) for out in (sharded, copied))
    assert state['optimizer'] == its_state['optimizer'] and tensors.keys() == its_tensors.keys()
    assert all(torch.allclose(tensors[name], its_tensors[name], atol=1e-4) for name in tensors)


@pytest.mark.slow
def test_four_processes_train_as_one(tiny_data, tmp_path):
    """With two copies of the weights in two shards each."""
    more = 'sps', f'--max_tokens={5 * STEP_TOKENS}'
    train_several(tmp_path, 4, [arguments(tiny_data, tmp_path / 'four', *more, '--parallel=fsdp', '--shard=2')])
    succeeded(run('train.py', *arguments(tiny_data, tmp_path / 'one', *more)))
    assert is_close(tmp_path / 'four', tmp_path / 'one', 5)


@pytest.mark.parametrize('environment, ranks, is_child', [
    (dict(RANK='3', WORLD_SIZE='8', LOCAL_RANK='1', LOCAL_WORLD_SIZE='2', MASTER_ADDR='a'), (3, 8, 1, 2), False),
    (dict(RANK='1', WORLD_SIZE='2', LOCAL_RANK='1', TORCHELASTIC_RUN_ID='x'), (1, 2, 1, 1), True),
    (dict(RANK='3', WORLD_SIZE='8', MASTER_ADDR='a'), (0, 1, 0, 1), False), ({}, (0, 1, 0, 1), False)])
def test_ranks_come_from_torchrun_or_the_environment(monkeypatch, environment, ranks, is_child):
    """Only torchrun workers exit with their parent."""
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'TORCHELASTIC_RUN_ID'):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, 'init_distributed', lambda backend: None)
    assert parallel.ranks() == ranks
    found = devices.start_processes(train.Settings(device='cpu', threads=1))
    assert (found.rank, found.world) == ranks[:2] and found.launcher == (os.getppid() if is_child else None)


def test_waiting_for_other_processes_and_a_taken_port_are_said(monkeypatch, capsys):
    """The timer is not started here."""
    environment = dict(RANK='0', WORLD_SIZE='2', LOCAL_RANK='0', MASTER_ADDR='node7', MASTER_PORT='29500')
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with (mock.patch.object(parallel.threading, 'Timer') as timer, mock.patch.object(parallel.atexit, 'register'),
          mock.patch.object(dist, 'init_process_group') as start):
        parallel.init_distributed('gloo')
        seconds, function, args, kwargs = timer.call_args.args
        start.side_effect = dist.DistNetworkError('EADDRINUSE\nmore')
        with pytest.raises(UserError, match=r'at node7:29500 \(EADDRINUSE\).* set MASTER_PORT'):
            parallel.init_distributed('gloo')
    function(*args, **kwargs)
    assert seconds == 10 and timer().cancel.call_count == 2
    assert 'process 0 is waiting for all 2 processes at node7' in capsys.readouterr().err


@contextmanager
def process_group(world=1, rank=0):
    """Join a group: alone with gloo, or a fake one, in which values of other ranks are lost."""
    backend, store = ('gloo', dist.HashStore()) if world == 1 else ('fake', FakeStore())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def small_model(file=model_standard, **settings):
    """Return a model with random weights everywhere, whose sizes are multiples of 8."""
    sizes = {'n_layer': 2, 'n_head': 2, 'n_embd': 32, 'vocab_size': 64, 'n_ids': 60, 'eos_id': None}
    return random_model(file, 1, **sizes | settings)[0].float()


def run_step(model, ddp, n_micro):
    idx = torch.arange(40).view(2, 20)
    for i in range(n_micro):
        parallel.reduce_gradients(model, ddp, i == n_micro - 1)
        with torch.autocast('cpu', torch.bfloat16):
            loss = ddp(idx, idx)['loss']
        loss.backward()
        yield i


class Biased(model_standard.Model):
    def __init__(self, config):
        super().__init__(config)
        self.slopes = torch.nn.Parameter(torch.ones(config.n_head))

    def score_bias(self, q, k, head):
        return (k.pos - q.pos) * self.slopes[head]


BIASED = SimpleNamespace(Model=Biased, Config=model_standard.Config)


@pytest.mark.parametrize('file, settings', [
    (model_standard, {}), (model_gdn, {}), (model_context_ready, {}), (BIASED, {}),
    (BIASED, {'checkpoint_blocks': True})])
def test_gathering_linear_layers_in_bf16_changes_no_gradient_of_autocast(file, settings):
    """Norms, decays, convolutions and biases stay in fp32. Two micro-batches."""
    gradients = []
    with process_group():
        for sharded in (False, True):
            model = small_model(file, **settings)
            if sharded:
                shard_model(model, torch.device('cpu'), None, torch.bfloat16)
            [*run_step(model, model, 2)]
            gradients.append({name: full_tensor(p.grad) for name, p in model.named_parameters()})
    whole, gathered = gradients
    assert whole.keys() == gathered.keys() and all(torch.equal(whole[name], gathered[name]) for name in whole)


class Traffic(TorchDispatchMode):
    """Count the bytes of collective operations in `sent`: {(operator, dtype): bytes}."""

    def __init__(self):
        super().__init__()
        self.sent = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == 'c10d':
            whole = max((t for t in tree_leaves(args) if isinstance(t, torch.Tensor)), key=lambda t: t.nbytes)
            key = operator._opname, whole.dtype
            self.sent[key] = self.sent.get(key, 0) + whole.nbytes
        return operator(*args, **(kwargs or {}))


def test_fsdp_gathers_linear_layers_of_blocks_in_bf16_twice_and_all_else_once():
    """In each of two micro-batches: linear layers before forward and before backward."""
    model = small_model()
    n, n_linear = models.count_parameters(model), sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    with process_group(8):
        shard_model(model, torch.device('cpu'), None, torch.bfloat16)
        with Traffic() as traffic:
            [*run_step(model, model, 2)]
    assert traffic.sent == {('_allgather_base_', torch.bfloat16): 2 * 2 * 2 * n_linear,
                            ('_allgather_base_', torch.float32): 2 * 4 * (n - n_linear),
                            ('_reduce_scatter_base_', torch.float32): 4 * n}


def test_with_ddp_gradients_of_several_micro_batches_are_held_once_and_sent_once(monkeypatch):
    """In DDP's buckets, from the first step on: with the weights, 8 bytes per weight."""
    monkeypatch.setattr(wrapping, 'world', lambda: 8)
    with process_group(), dry_run.LiveBytes() as live:
        model, s = small_model(n_embd=128), train.Settings(batch_size=64, micro_batch_size=2)
        ddp = wrapping.wrap_model(model, model, devices.Machine(0, 8, torch.device('cpu')), s)
        optimizer, n = torch.optim.SGD(model.parameters()), models.count_parameters(model)
        for _ in range(3):
            with Traffic() as traffic:
                for _ in run_step(model, ddp, 4):
                    assert live.live < 8.2 * n
            assert traffic.sent == {('allreduce_', torch.float32): 4 * n}
            optimizer.zero_grad(set_to_none=not ddp.keeps_gradients)
        assert not any(p.grad.any() for p in model.parameters())


def test_with_fsdp_only_rank_0_makes_the_weights(tiny_data):
    s = train.Settings(parallel='fsdp', data=str(tiny_data))
    data, machine = open_data(s.data), devices.Machine(1, 2, torch.device('cpu'))
    with process_group(2, rank=1):
        model = train.make_model(s, small_model().config, data, machine)
        assert all(p.is_meta for p in model.parameters())
        n = models.count_parameters(model)
        wrapping.wrap_model(model, model, machine, s)
        assert sum(p.to_local().untyped_storage().nbytes() for p in model.parameters()) < 2.1 * n
        assert model.head.weight is model.embed.weight


@pytest.mark.parametrize('value', [lambda model: torch.ones(2), lambda model: float(model.head.weight[0, 0])])
def test_a_model_with_values_besides_weights_and_buffers_is_made_by_all_ranks(value, tiny_data, monkeypatch):
    class Model(model_standard.Model):
        def __init__(self, config):
            super().__init__(config)
            self.value = value(self)
    monkeypatch.setattr(models, 'model_file', lambda *args: SimpleNamespace(Model=Model))
    data, machine = open_data(tiny_data), devices.Machine(1, 2, torch.device('cpu'))
    with process_group(2, rank=1):
        model = train.make_model(train.Settings(parallel='fsdp'), small_model().config, data, machine)
    assert not any(x.is_meta for x in [*model.parameters(), torch.as_tensor(model.value)])


@pytest.mark.slow
def test_checkpointed_sharded_blocks_are_compiled_whole(monkeypatch):
    """Each is one graph. With PyTorch's attention, because ours runs outside graphs on a CPU."""
    are_whole, gradients, idx = [], [], torch.arange(40).view(2, 20)

    def nodes(graph, inputs):
        called = str([node.target for part in graph.modules() if hasattr(part, 'graph') for node in part.graph.nodes])
        are_whole.append('scaled_dot_product_attention' in called and 'silu' in called)
        return graph
    monkeypatch.setattr(model_standard, 'make_mask', lambda *args, **options: Mask('causal'))
    config = model_standard.Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_ids=60, eos_id=None,
                                   checkpoint_blocks=True)
    torch.compiler.reset()
    with process_group():
        for in_parts in (False, True):
            torch.manual_seed(0)
            model = model_standard.Model(config)
            if in_parts:
                for block in model.blocks:
                    block.compile(backend=nodes)
                shard_model(model, torch.device('cpu'), None)
            model(idx, idx)['loss'].backward()
            gradients.append([full_tensor(p.grad) for p in model.parameters()])
    assert are_whole and all(are_whole)
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(*gradients))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
def test_one_process_resumes_from_a_checkpoint_of_two(trained, tmp_path, kind):
    """Which was written while they went on to train."""
    out = copy_up_to(trained / f'standard_{kind}', tmp_path / 'run', 10)
    resume(out, 1, 10)
    assert is_close(out, trained / f'standard_{kind}')


@pytest.mark.parametrize('settings, sentence', [
    (dict(parallel='ddp', shard=2), 'shard is 2, but parallel = ddp'),
    (dict(parallel='fsdp', optimizer='muon'), 'optimizer = muon needs full matrices'),
    (dict(parallel='fsdp', batch_size=6), 'batch_size is 6: parallel = fsdp needs a multiple of the number'),
    (dict(parallel='fsdp', shard=3), 'shard is 3: expected a divisor of the 4 processes')])
def test_impossible_parallel_settings_give_a_clear_error(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        run_settings.check_settings(train.Settings(**settings), open_data('a5'), 4)


def test_a_dry_run_counts_the_shard_of_one_process_and_the_moments_of_the_optimizer(tmp_path):
    """16 bytes per parameter. With FSDP their 64th, and what is gathered. Muon keeps one moment."""
    args = ['train.py', *TINY, '--data=none', f'--out_dir={tmp_path / "run"}', '--n_layer=3', '--n_embd=512',
            '--batch_size=64', '--dry_run', '--gpu_gib=0.7']
    fsdp = ['--parallel=fsdp', '--shard=64', '--dtype=bfloat16']
    one, several, whole, muon = (run(*args, *more).stdout for more in (
        fsdp, [*fsdp, '--batch_size=256', '--micro_batch_size=2'], [], ['--optimizer=muon']))
    model = dry_run.meta_model('standard', models.make_config('standard', {'n_layer': 3, 'n_head': 2, 'n_embd': 512}))
    n, matrices = models.count_parameters(model), sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
    gathered = 4 * (n - matrices) + 2 * 2 * matrices / 3  # fp32, and two blocks in bf16
    gradients = 4 * (n - matrices) + 4 * 2 * matrices / 3
    for held, printed, share in (
            (16 * n / 64 + gathered + gradients, one, ' (1/64, and what FSDP gathers)'),
            (12 * n / 64 + gathered + 4 * n, several, ' (1/64, and what FSDP gathers)'),
            (16 * n, whole, ''), (16 * n - 4 * matrices, muon, '')):
        assert f' {held / 2**30:.2f} GiB for weights, gradients and moments{share}, ' in printed
    assert 'a step fits 0.7 GiB' in one and 'a step does not fit 0.7 GiB' in whole


def test_a_dry_run_does_not_count_weights_that_fsdp_gathers_in_bf16_as_activations():
    model, estimates = dry_run.meta_model('standard', small_model().config), []
    weights = wrapping.linear_weights(wrapping.gathered_modules(model))
    for dtype in (torch.float32, torch.bfloat16):
        for p in weights:
            p.data = p.data.to(dtype)
        estimates.append(dry_run.activation_bytes(model, torch.bfloat16, 16, 1))
    assert estimates[0] - estimates[1] == pytest.approx(2 * sum(p.numel() for p in weights), rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize('processes', [2, 4])
def test_every_model_trains_with_fsdp_as_with_ddp(tiny_data, tmp_path, processes):
    """With 4 processes also as two replicas of two shards, and compared with one process."""
    kinds = {'ddp': ['--parallel=ddp'], 'fsdp': ['--parallel=fsdp']}
    if processes == 4:
        kinds['hsdp'] = ['--parallel=fsdp', '--shard=2']
    train_several(tmp_path, processes, [
        arguments(tiny_data, tmp_path / f'{model}_{kind}', model, *args)
        for model in MODELS for kind, args in kinds.items()])
    for model in MODELS:
        succeeded(run('train.py', *arguments(tiny_data, tmp_path / model, model)))
        for kind in kinds:
            assert is_close(tmp_path / f'{model}_{kind}', tmp_path / model), (model, kind)


@pytest.mark.long
def test_a_run_on_two_then_one_then_four_processes_equals_the_uninterrupted_run(trained, tmp_path):
    out = copy_up_to(trained / 'standard_fsdp', tmp_path / 'run', 10)
    shutil.rmtree(out / 'ckpt/step_00000005')
    resume(out, 1, 10)
    out = copy_up_to(out, tmp_path / 'further', 15)
    resume(out, 4, 15)
    assert is_close(out, trained / 'standard_fsdp')
    for kind in ('ddp', 'fsdp'):
        again = copy_up_to(out, tmp_path / kind, 20)
        resume(again, 2, 20, f'--parallel={kind}')
        assert is_close(again, trained / 'standard_fsdp')


@pytest.mark.long
def test_all_processes_fall_back_from_a_damaged_checkpoint(trained, tmp_path):
    out = copy_up_to(trained / 'standard_fsdp', tmp_path / 'run', 15)
    next(bit_flips(out / 'ckpt/step_00000015/optimizer.safetensors', 1))  # and do not restore it
    assert resume(out, 2, 10).stderr.count('step_00000015 is damaged') == 1
    assert is_close(out, trained / 'standard_fsdp')


# Kills all processes (kill -9) while a checkpoint is written.
KILLED = '''
import os, sys
from lm_architectures.run import checkpoint
import train
def kill_at_10(path, remove=checkpoint.remove):
    if path.name == 'step_00000010':
        os.kill(os.getpid(), 9)
    remove(path)
checkpoint.remove = kill_at_10
train.main(sys.argv[1:])
'''


@pytest.mark.long
def test_a_kill_while_a_checkpoint_is_written_leaves_the_previous_one(tiny_data, trained, tmp_path):
    args = arguments(tiny_data, tmp_path / 'run', 'standard', '--parallel=fsdp')
    assert run_on_processes(2, tmp_path, KILLED, *args).returncode != 0
    assert [path.name for path in checkpoint.checkpoints(tmp_path / 'run')] == ['step_00000005']
    resume(tmp_path / 'run', 2, 5)
    assert not (tmp_path / 'run/ckpt/.writing').exists()
    assert is_close(tmp_path / 'run', trained / 'standard_ddp')
