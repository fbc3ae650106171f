"""Fuzzing: on any input, a script ends with a result or with a clear error.

Hypothesis takes a working command, damages its arguments and input files, and calls the script's
main(argv) in a fork, which need not repeat the imports. A traceback, a signal, a run of more than
ten minutes, or a change to a file that is not the command's own fails the test.

    python -m pytest tests/run/test_fuzz.py                               about 350 fixed inputs
    FUZZ=9999 python -m pytest tests/run/test_fuzz.py --hypothesis-seed=1    9,999 random ones

Read COMMANDS, then the faults, then `check`.
"""
import functools
import gc
import importlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import contents, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prepare_fineweb  # here, because a fork would import it each time
import train
from lm_architectures import data
from lm_architectures.data.text import shards
from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.data.text.writing import write_data
from lm_architectures.files import sha256
from lm_architectures.run import models
from lm_architectures.start import quiet_start

try:
    from lm_architectures.score import lm_eval_adapter
except ImportError:
    lm_eval_adapter = None

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')]

FUZZ = int(os.environ.get('FUZZ', 0))  # number of inputs over all scripts; 0: about 350 fixed ones
WAIT = 600  # seconds until a script counts as hanging; most inputs take less than one
MEMORY = 4 * 2 ** 30  # bytes that a script may use beyond its imports
STEPS = 3  # training steps before a SIGTERM, because a run over 1e18 tokens is no hang

TASK = 'path_star:degree=2,length=3,nodes=8,train_rows=20,val_rows=4'
CONFIG = {'data': 'data', 'n_layer': 1, 'n_head': 2, 'n_embd': 16, 'block_size': 16, 'batch_size': 2, 'max_tokens': 96,
          'warmup_tokens': 16, 'eval_interval': 2, 'eval_tokens': 32, 'log_interval': 1, 'save_interval': 2,
          'sample_tokens': 2, 'threads': 1, 'device': 'cpu', 'dtype': 'float32'}
PREPARE = '--tokenizer=byte --val_fraction=0.3 --workers=1'
COMMANDS = {  # name: share of the inputs, and working commands in the folder that `base` makes
    'train': (0.33, ['config.py --out_dir=new --dry_run',
                     'config.py --out_dir=new --dry_run --init_from=standard',
                     f'config.py --out_dir=new --dry_run --data={TASK} --block_size=17',
                     'config.py --out_dir=new --dry_run --data=texts',
                     '--out_dir=standard --resume --dry_run',
                     '--out_dir=task --resume --dry_run --verify',
                     '--out_dir=nextlat --resume --dry_run']),
    'train to the end': (0.04, ['--out_dir=standard --resume',
                                'config.py --out_dir=new --model=nextlat --init_from=nextlat --acceptance_prompts=1']),
    'sample': (0.3, ['standard ab cd --max_new_tokens=4 --top_k=5 --top_p=0.9 --min_p=0.01',
                     'standard --file=prompts.txt --max_new_tokens=4 --stop=a',
                     'task 1,2|3,4/1,2= --max_new_tokens=3 --temperature=0',
                     'nextlat ab --max_new_tokens=4 --draft_len=1',
                     'standard ab --max_new_tokens=4 --draft=nextlat --draft_len=auto']),
    'eval': (0.2, ['standard nextlat --val --batch_tokens=48',
                   'task --val --val_tokens=40',
                   'nextlat --tasks=lambada_first_token --data_dir=bench --limit=2 --max_length=8']),
    'lm_architectures.hf.export': (0.03, ['standard --to_hf=new', 'standard --to_hf=new --exact']),
    'lm_architectures.hf.import_model': (0.02, ['llama --out_dir=new --tokenizer=byte']),
    'prepare_fineweb': (0.09, [f'texts.jsonl --out_dir=new {PREPARE}',
                               f'texts.jsonl --out_dir=new {PREPARE} --shard_tokens=200 --max_tokens=100']),
    'analysis.commands': (0.03, ['final standard nextlat --paper=sps --out=figure']),
}
OWN = {'train', 'eval'}  # may modify the runs passed to them


# ---- a folder for the commands ----

@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """Make runs of three steps, a Llama, token data, texts, prompts and a config."""
    folder = tmp_path_factory.mktemp('fuzz') / 'base'
    texts = [f'text {i} of some words' for i in range(40)]
    records = ''.join(json.dumps({'id': str(i), 'text': text}) + '\n' for i, text in enumerate(texts))
    documents = [('train' if i % 4 else 'val', text) for i, text in enumerate(texts)]
    write_data(folder / 'data', load_tokenizer('byte'), documents, shard_tokens=400)
    for name, text in {'config.py': ''.join(f'{name} = {value!r}\n' for name, value in CONFIG.items()),
                       'prompts.txt': 'ab\ncd\n', 'texts.jsonl': records, 'texts/all.txt': '\n'.join(texts),
                       'bench/lambada_openai.jsonl': records}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for command in ('train config.py --out_dir=standard', 'lm_architectures.hf.export standard --to_hf=llama',
                    'train config.py --out_dir=nextlat --model=nextlat --save_interval=1',
                    f'train config.py --out_dir=task --data={TASK} --block_size=17'):
        must_work(folder, command)
    must_work(folder, 'eval standard nextlat --val --val_tokens=40')
    shutil.rmtree(folder / 'standard/ckpt/step_00000003')  # --resume continues from step 2
    return folder


def must_work(folder, command: str) -> None:
    """Run a command in the folder, in this process."""
    before = os.getcwd()
    os.chdir(folder)
    result = run('-m', *command.split())
    os.chdir(before)
    assert result.returncode == 0, result.stderr


# ---- faults in arguments ----

NUMBERS = ['0', '-0', '-1', '1', '2', '3', '100', '0.5', '1e-46', '1e39', '1e400', '-1e400', 'nan', '-inf', '1_0',
           '0x10', '9' * 19, '9' * 40, '-' + '9' * 40, '9' * 5000]
TEXTS = ['', ' ', 'True', 'false', 'maybe', 'None', 'null', '[]', '{}', "''", '"a', '(' * 300, 'auto', 'cuda', 'byte',
         'gpt2', 'path_star', 'path_star:degree=x', 'path_star:degree=9,', 'a,b,,', ':', '=', '--', '-', '*', '[', '~',
         '.', '..', 'data', 'standard', 'nextlat', 'texts', 'texts.jsonl', 'missing',
         'standard,nextlat', 'x' * 300, 'é', '日本', '\u202eab', '\x1b[2J', '\n', '\\n', '%s', 'a\ud800']
where = st.integers(0, 2 ** 16)  # the place to damage, modulo the number of places


def as_argument(text: str) -> str:
    """Drop NUL bytes, which no shell passes, and slashes, to stay inside the folder."""
    raw = text.encode(errors='surrogatepass')
    return os.fsdecode(raw.replace(b'\0', b'').replace(b'/', b''))


words = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.integers(-5, 20).map(str),
                  st.integers().map(str), st.floats().map(repr), st.text(st.characters(), max_size=8)).map(as_argument)
how_many = st.sampled_from([1, 1, 1, 0, 2])  # number of faults


@functools.cache
def setting_names(program: str) -> list[str]:
    """Return all option names, including the settings of two models."""
    module = importlib.import_module(program)
    Settings = module.Final if program == 'analysis.commands' else module.Settings
    Configs = [models.model_file(name).Config for name in ('standard', 'nextlat')] if program == 'train' else []
    return sorted({field.name for cls in (Settings, *Configs) for field in fields(cls)})


@st.composite
def argvs(draw, kind: str) -> list[str]:
    """Draw a command and its faults: arguments that are added, replaced or removed."""
    argv, names = draw(st.sampled_from(COMMANDS[kind][1])).split(), setting_names(kind.split()[0])
    flags = st.sampled_from([*names, 'n_laye']).map('--{}'.format)
    values = st.builds('{}={}'.format, flags, words)
    for _ in range(draw(how_many)):
        i, new = draw(where) % len(argv), draw(st.lists(st.one_of(values, values, values, words, flags), max_size=1))
        is_config = argv[i] == 'config.py'  # without the config, a model has its full size
        argv[i:i + (0 if is_config else draw(st.sampled_from([0, 0, 1])))] = new
    return argv


# ---- faults in files ----

ODD_JSON = ['null', 'true', '0', '-0', '-1', '1', '0.5', '1e400', '-1e400', 'NaN', '9' * 40, '9' * 5000, '1e-400', '""',
            '" "', '"a"', '"1"', '"byte"', '"standard"', '"gpn"', '"uint32"', '"../data"', '"\\u0000"', '"\\ud800"',
            '"' + 'x' * 5000 + '"', '[]', '[[]]', '[null]', '{}', '{"a": 1}', '[' * 100_000, '{"": {"": 0}}', '']
JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-\w.]+')  # keys and values
json_texts = st.one_of(st.sampled_from(ODD_JSON), st.integers().map(str), st.text(max_size=8).map(json.dumps))
damages = how_many.flatmap(lambda n: st.lists(st.one_of(  # (what to replace, file, place, replacement)
    st.tuples(st.just('token'), where, where, json_texts.map(str.encode)),
    st.tuples(st.sampled_from(['byte', 'byte', 'rest', 'file']), where, where, st.binary(max_size=8))),
    min_size=n, max_size=n))


def files_read(program: str, argv: list[str], folder: Path) -> list[Path]:
    """Return the files that a command reads: those in its arguments, and the data of runs."""
    names = {arg.rpartition('=')[2] for arg in argv} | ({'data'} if program in ('train', 'eval') else set())
    found = [folder / name for name in names if name in {path.name for path in folder.iterdir()}]
    return sorted(path for top in found for path in (top, *top.rglob('*')) if path.is_file())


def damage(files: list[Path], what: str, file: int, place: int, new: bytes) -> None:
    """Replace a JSON token, a byte or the rest of one of the files, or remove the file."""
    files = [path for path in files if path.is_file() and (what != 'token' or path.suffix in ('.json', '.jsonl'))]
    if not files:  # the argument is damaged, or an earlier fault removed them
        return
    path = files[file % len(files)]
    content = path.read_bytes()
    path.unlink()
    start = place % (len(content) or 1)
    end = len(content) if what == 'rest' else start + 1
    if what == 'token' and (tokens := list(JSON_TOKEN.finditer(content))):
        start, end = tokens[place % len(tokens)].span()
    if what != 'file':
        path.write_bytes(content[:start] + new + content[end:])
    if what == 'token' and path.name == 'state.json':  # a stranger's, whose checksum is right
        sums = path.with_name('SHA256SUMS')
        sums.write_text(re.sub(r'\w+(?=  state.json)', sha256(path), sums.read_text()))


# ---- a script in a fork ----

def in_a_fork(program: str, argv: list[str], folder: Path) -> tuple[int, str]:
    """Run main(argv) in a fork with cwd=folder; return exit code (-n: signal n) and stderr."""
    with open(os.devnull, 'r+') as nothing, tempfile.TemporaryFile() as errors:
        sys.stdout.flush()
        sys.stderr.flush()

        def script():
            os.chdir(folder)
            sys.stdin, sys.stdout = nothing, nothing
            sys.stderr = open(errors.fileno(), 'w', errors='backslashreplace', closefd=False)
            stand_alone()
            sys.argv = [f'{program}.py', *argv]
            importlib.import_module(program).main()
            sys.stdout.flush()
        process = multiprocessing.get_context('fork').Process(target=script)
        process.start()
        process.join()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # remaining workers
        errors.seek(0)
        return process.exitcode, errors.read().decode(errors='replace')


def stand_alone() -> None:
    """Make a forked test process behave like a script, with time limits, no network and no GPU.

    Built data goes to its folder, training ends after STEPS, and slow steps are skipped.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    quiet_start()
    now = int(Path('/proc/self/statm').read_text().split()[0]) * os.sysconf('SC_PAGE_SIZE')
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    signal.alarm(WAIT)
    torch.set_num_threads(1)
    torch.set_num_threads = lambda n: None  # ignore --threads: idle threads spin
    torch.cuda.is_available = lambda: False
    os.environ |= {'HF_HUB_OFFLINE': '1', 'HTTPS_PROXY': 'http://127.0.0.1:1'}  # offline
    for name in {'huggingface_hub.constants', 'datasets.config'} & sys.modules.keys():  # imported before it was set
        sys.modules[name].HF_HUB_OFFLINE = True
    gc.disable()  # a collection would copy the memory shared with the parent
    for module in (data, shards, prepare_fineweb):
        module.BUILT = Path('built')
    step, done = train.train_step, []

    def train_step(*args):
        done.append(1)
        if len(done) == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)
    train.train_step = train_step
    if lm_eval_adapter:
        lm_eval_adapter.task_manager = lambda: SimpleNamespace(all_tasks=[])
    torch.compile = lambda model, *_, **__: model


def copy_of(base: Path) -> Path:
    shutil.rmtree(base.with_name('work'), ignore_errors=True)
    return shutil.copytree(base, base.with_name('work'))


def check(base: Path, program: str, argv, faults) -> None:
    """Check one input; the docstring of this file says what fails."""
    folder = copy_of(base)
    files = files_read(program, argv, folder)
    for fault in faults:
        damage(files, *fault)
    before = contents(folder)
    code, stderr = in_a_fork(program, argv, folder)
    case = f'{program} {argv!r} faults={faults!r}\n{stderr[-5000:]}'
    assert code >= 0, f'{signal.Signals(-code).name}: {case}'
    assert 'Traceback' not in stderr, case
    assert code == 0 or stderr.strip(), f'no error message: {case}'
    after = contents(folder)
    changed = {name for name in before if after.get(name) != before[name]}
    if program in OWN:
        changed = {name for name in changed if not any(name.partition('/')[0] in arg for arg in argv)}
    assert not changed, f'changed {changed}: {case}'


@pytest.mark.parametrize('kind', COMMANDS)
def test_scripts_end_with_a_result_or_a_clear_error_on_any_input(base, kind):
    program = kind.split()[0]
    if program == 'prepare_fineweb':
        pytest.importorskip('datasets')
    share, commands = COMMANDS[kind]
    for command in commands:
        must_work(copy_of(base), f'{program} {command}')  # this also imports its modules for all forks

    @settings(max_examples=round((FUZZ or 350) * share), derandomize=not FUZZ, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))
    @given(argvs(kind), damages)
    def every_input(argv, faults):
        check(base, program, argv, faults)
    every_input()
