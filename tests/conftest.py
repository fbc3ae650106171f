"""Shared test helpers: tiny data and runs, and scripts run in this process or a subprocess."""
import contextlib
import dataclasses
import importlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault('GOMP_SPINCOUNT', '1000')  # before importing torch: idle threads must not spin
os.environ.setdefault('OMP_NUM_THREADS', '1')  # test workers and subprocesses share the cores

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)

if not torch.cuda.is_available():  # tests of the kernels then use Triton's interpreter
    os.environ['TRITON_INTERPRET'] = '1'
import scans
import scans.attention  # noqa: F401  define their kernels for the interpreter
import scans.delta  # noqa: F401
from lm_architectures.data.text.tokenizers import load_tokenizer, padded_vocab
from lm_architectures.data.text.writing import write_data
from lm_architectures.files import warn_once
from lm_architectures.run import checkpoint, folders, models, records
from scans import recurrent

sys.modules['lm_architectures.scans'] = scans  # one copy for `import model_gpn` and `model_file('gpn')`
for scan in ('attention', 'delta', 'gdn', 'products', 'recurrent'):
    sys.modules[f'lm_architectures.scans.{scan}'] = importlib.import_module(f'scans.{scan}')
os.environ.pop('TRITON_INTERPRET', None)
scans.KERNELS_ON_CPU = False

TINY = ['--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=32', '--batch_size=4', '--warmup_tokens=256',
        '--learning_rate=1e-2', '--eval_tokens=640', '--eval_interval=10', '--log_interval=1', '--save_interval=5',
        '--sample_tokens=0', '--threads=1', '--device=cpu', '--dtype=float32']
NO_SIZES = TINY[3:]  # without the model's options
STEP_TOKENS = 4 * 32
MODELS = ['standard', 'sps', 'context_ready', 'nextlat', 'gpn', 'gdn', 'mtp', 'jtp', 'bst']


def pytest_collection_modifyitems(config, items):
    """Deselect tests marked `long`, which take minutes, unless -m names them."""
    if 'long' in config.getoption('-m'):
        return
    items[:] = [item for item in items if not item.get_closest_marker('long')]


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(),
                                                                             reason='needs a GPU'))])
def device(request):
    return request.param


@pytest.fixture
def kernels_device(monkeypatch):
    """Return the device for Triton kernels: a GPU if there is one, else the CPU (interpreter)."""
    if torch.cuda.is_available():
        return 'cuda'
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    monkeypatch.setattr(scans, 'KERNELS_ON_CPU', True)
    return 'cpu'


@pytest.fixture(autouse=True)
def recurrences_are_traced_but_not_compiled(request, monkeypatch):
    """Run the graphs of scans/recurrent.py in Python: compiling one takes 2 to 8 s."""
    if request.node.get_closest_marker('compiles') is None:
        monkeypatch.setattr('torch._inductor.compile', lambda graph, examples, options: graph)


class Rerun(recurrent._CudaGraph):
    """Stand-in for a CUDA graph, with the same input and output tensors in each replay."""

    def __init__(self, function, inputs):
        def rerun():
            for own, x in zip(*map(tree_leaves, (self.results, function(*self.inputs)))):
                own.copy_(x)

        self.inputs = tree_map(torch.clone, inputs)
        self.results, self.graph = function(*self.inputs), SimpleNamespace(replay=rerun)


@pytest.fixture
def gpu_form(monkeypatch):
    """Return a GPU, or a CPU that runs the graphs of a GPU, without CUDA graphs."""
    if torch.cuda.is_available():
        return 'cuda'
    monkeypatch.setattr('scans.products.on_gpu', lambda tensor: True)
    monkeypatch.setattr(recurrent, '_CudaGraph', Rerun)
    return 'cpu'


@pytest.fixture(autouse=True)
def exports_are_not_loaded_in_another_process(monkeypatch):
    """Save 4 s an export. One test loads them."""
    monkeypatch.setattr('lm_architectures.hf.export.why_it_fails', lambda *args: '')


@pytest.fixture(scope='session')
def code_folder(tmp_path_factory):
    """Keep the code that transformers copies from model folders in a temporary folder."""
    from transformers import dynamic_module_utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, 'HF_MODULES_CACHE', str(tmp_path_factory.mktemp('modules')))
        yield


@pytest.fixture(scope='session')
def tiny_data(tmp_path_factory):
    """Write short random documents as byte tokens in several shards; return the folder."""
    folder = tmp_path_factory.mktemp('data') / 'tiny'
    rng = random.Random(0)
    words = [''.join(rng.choices('abcdefgh', k=rng.randint(1, 6))) for _ in range(40)]
    documents = [('val' if i % 10 == 0 else 'train', ' '.join(rng.choices(words, k=rng.randint(3, 30))))
                 for i in range(300)]
    write_data(folder, load_tokenizer('byte'), documents, shard_tokens=5000)
    return folder


@pytest.fixture(scope='session')
def tiny_run(tiny_data, tmp_path_factory):
    """Train for 20 steps and return the run folder. Copy it before changing it."""
    return trained_run(tiny_data, tmp_path_factory.mktemp('runs') / 'tiny')


def make_run(folder, model='standard', tokenizer='byte', bos=False, ends=None, **settings):
    """Write a run with random weights; return model and tokenizer. ends: ids that end a text."""
    own = load_tokenizer(tokenizer, bos)
    module, sizes = models.model_file(model), {'n_layer': 2, 'n_embd': 32, 'n_head': 2}
    c = models.make_config(model, {'vocab_size': padded_vocab(own.n_ids), 'n_ids': own.n_ids, 'eos_id': None,
                                 **sizes, **settings})
    torch.manual_seed(0)
    weights = {name: x + 0.05 * torch.randn_like(x) if x.is_floating_point() else x
               for name, x in checkpoint.checkpoint_tensors(module.Model(c)).items()}
    records.save_run(folder, {
        'model': model, 'settings': {'block_size': 64, 'eval_seed': None, 'data': ''},
        'model_config': dataclasses.asdict(c), 'versions': {},
        'data': {'folder': '', 'tokenizer': str(tokenizer), 'n_ids': own.n_ids, 'eos_id': own.eos_id, 'bos': bos,
                 'sha256': '', **({'ends': ends} if ends else {})}})
    checkpoint.save_checkpoint(folder, 0, weights, {'step': 0})
    return folders.load_run(folder)[0], own


def contents(folder):
    """Return {relative path: bytes} of the files in a folder, except its lock file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*')
            if path.is_file() and path.name != '.lock'}


def shard_ids(folder, split):
    """Read the ids of all shards of a split, in order, without using Data."""
    return np.concatenate([np.fromfile(path, '<u2') for path in sorted(folder.glob(f'{split}_*.bin'))])


def byte_documents(folder, split):
    """Return the texts of the documents in a split of byte tokens."""
    return [text.decode() for text in bytes(min(i, 255) for i in shard_ids(folder, split)).split(b'\xff')[:-1]]


def bit_flips(path, n):
    """Flip a random bit of a file n times, each time yielding which bit and then restoring it."""
    rng, whole = random.Random(0), path.read_bytes()
    for _ in range(n):
        byte, bit, content = rng.randrange(len(whole)), rng.randrange(8), bytearray(whole)
        content[byte] ^= 1 << bit
        path.write_bytes(content)
        yield f'bit {bit} of byte {byte} of {path}'
        path.write_bytes(whole)


# ---- running the scripts ----

def run(*args, processes=1, **kwargs):
    """Run a script or `-m module` of the repository; return its returncode, stdout and stderr.

    Calls main(argv) in this process, to avoid importing torch again. With several processes (via
    torchrun) or options of subprocess.run, it starts subprocesses instead.
    """
    args = [*map(str, args)]
    if processes > 1 or kwargs:
        return run_subprocess(*torchrun(processes), *args, **kwargs)
    name, argv = (args[1], args[2:]) if args[0] == '-m' else (Path(args[0]).stem, args[1:])
    return run_here(importlib.import_module(name).main, [f'{name}.py', *argv])


def torchrun(processes):
    """Return the arguments of Python that start several processes; none for one."""
    several = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    return several if processes > 1 else []


def run_subprocess(*args, **kwargs):
    """Run `python args` in a subprocess."""
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True,
                          **{'cwd': ROOT, 'stdin': subprocess.DEVNULL, 'timeout': 300, **kwargs})


@pytest.fixture
def terminal_signals():
    """Handle Ctrl-C and hang-ups as in a terminal: `nohup` and `&` in a script ignore them."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_here(main, argv):
    """Call main() with sys.argv; capture its output, restore threads, RNG state, signals, stdin."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    warn_once.cache_clear()  # as in another process
    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with (open(os.devnull) as nothing, torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
        patch.setattr(sys, 'stdin', nothing)
        patch.setattr(sys, 'argv', argv)
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=err)
        finally:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(False)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def train_tiny(data, out, *args, steps=20, **kwargs):
    return run('train.py', *TINY, f'--data={data}', f'--out_dir={out}', f'--max_tokens={steps * STEP_TOKENS}', *args,
               **kwargs)


def trained_run(data, out, *args, **kwargs):
    succeeded(train_tiny(data, out, *args, **kwargs))
    return out


def start_training(data, out, *args, processes=1):
    """Start a 100,000-step run, wait until it has logged three steps, and return its Popen."""
    command = [*torchrun(processes), 'train.py', *TINY, f'--data={data}', f'--out_dir={out}',
               f'--max_tokens={100_000 * STEP_TOKENS}', '--save_interval=100000', '--eval_interval=100000', *args]
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    log = out / 'log.jsonl'
    while process.poll() is None and (not log.exists() or log.read_text().count('\n') < 3):
        time.sleep(0.05)
    return process


def losses(out):
    """Return {step: (loss, val, lr, grad_norm)} from the log of a run."""
    return {r['step']: (r['loss'], r.get('val', 0), r['lr'], r['grad_norm']) for r in records.read_log(out)}


def succeeded(result):
    assert result.returncode == 0, result.stderr
    return result


def prepare(source, out, *args):
    return run('prepare_fineweb.py', source, '--tokenizer=byte', '--workers=1', f'--out_dir={out}', *args)


def prepared(source, out, *args):
    succeeded(prepare(source, out, *args))
    return out


def config_json(out):
    return json.loads((out / 'config.json').read_text())


def assert_sentence(result, *parts):
    """Check for exit status 1 and an error message that contains `parts`, without a traceback."""
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert 'Traceback' not in result.stderr, result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


def eval_lines(folder):
    return [json.loads(line) for line in (folder / 'eval.jsonl').read_text().splitlines()]


# ---- for tests of models ----

@pytest.fixture
def import_edited(tmp_path, monkeypatch):
    """Return a function that imports model_NAME.py with edit(source) applied."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def import_it(name, edit):
        (tmp_path / 'model_edited.py').write_text(edit((ROOT / f'model_{name}.py').read_text()))
        return importlib.import_module('model_edited')
    yield import_it
    sys.modules.pop('model_edited', None)


def saved_bytes(function):
    """Return the bytes autograd saves for the backward of function(), each storage once."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function()
    del out
    return sum(kept.values())
