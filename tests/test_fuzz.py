"""Whatever it is given, a script ends with its result or with a sentence.

Hypothesis takes a command that works, puts a fault or two into its arguments and into the files that it reads, and
calls the script's main(argv) in a fork of this process, which spares the imports. What fails: a traceback, a signal,
ten minutes without an end, and a changed file that is not this command's.

    python -m pytest tests/test_fuzz.py                                            the same few inputs each time
    FUZZ=10000 python -m pytest -n 2 tests/test_fuzz.py --hypothesis-seed=1        10,000 others

Read COMMANDS, then the faults, then `check`.
"""
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train
from common import machine, runs
from common.start import quiet_start
from data.shards import write_data
from data.tokenizers import load_tokenizer

try:
    from common import lm_eval_adapter
except ImportError:
    lm_eval_adapter = None

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')]

FUZZ = int(os.environ.get('FUZZ', 0))  # inputs, over all scripts; 0: few, and the same each time
WAIT = 600  # seconds after which a script hangs; an input takes less than one on an idle machine
MEMORY = 4 * 2 ** 30  # bytes that a script may take beyond those of the imports
FILE_BYTES = 2 ** 26  # of a file that it writes
STEPS = 3  # after which training gets a SIGTERM: one that is asked to read 1e18 tokens is no hang

TASK = 'path_star:degree=2,length=3,nodes=8,train_rows=20,val_rows=4'
CONFIG = {'data': 'data', 'n_layer': 1, 'n_head': 2, 'n_embd': 16, 'block_size': 16, 'batch_size': 2, 'max_tokens': 96,
          'warmup_tokens': 16, 'eval_interval': 2, 'eval_tokens': 32, 'log_interval': 1, 'save_interval': 2,
          'sample_tokens': 2, 'threads': 1, 'device': 'cpu', 'dtype': 'float32'}
PREPARE = '--tokenizer=byte --val_share=0.3 --workers=1'
COMMANDS = {  # script and what it does: its share of the inputs, and commands that work in the folder `base` makes
    'train': (0.33, ['config.py --out_dir=new --dry_run',
                     'config.py --out_dir=new --dry_run --init_from=standard',
                     f'config.py --out_dir=new --dry_run --data={TASK} --block_size=17',
                     'config.py --out_dir=new --dry_run --data=texts',
                     '--out_dir=standard --eval_only',
                     '--out_dir=task --eval_only --verify',
                     '--out_dir=nextlat --resume --dry_run']),
    'train to the end': (0.04, ['--out_dir=standard --resume',
                                'config.py --out_dir=new --model=nextlat --init_from=nextlat --acceptance_prompts=1']),
    'sample': (0.3, ['standard ab cd --max_new_tokens=4 --top_k=5 --top_p=0.9 --min_p=0.01',
                     'standard --file=prompts.txt --max_new_tokens=4 --stop=a',
                     'task 1,2|3,4/1,2= --max_new_tokens=3 --temperature=0',
                     'nextlat ab --max_new_tokens=4 --draft_len=1',
                     'standard ab --max_new_tokens=4 --draft=nextlat --draft_len=auto']),
    'eval': (0.2, ['standard nextlat --val --batch_size=3',
                   'task --val --val_tokens=40',
                   'nextlat --tasks=lambada_first_token --data_dir=bench --limit=2 --max_length=8']),
    'common.export': (0.05, ['standard --to_llama=new', 'new --from_llama=llama --tokenizer=byte']),
    'analysis.speculative': (0.02, [
        'nextlat --n_prompts=2 --prompt_tokens=4 --new_tokens=3 --draft_lens=1,auto --out=figure']),
    'prepare_fineweb': (0.09, [f'texts.jsonl --out_dir=new {PREPARE}',
                               f'texts.jsonl --out_dir=new {PREPARE} --shard_tokens=200 --max_tokens=100']),
    'analysis.scores': (0.01, ['task --out=figure']),
    'analysis.loss_curves': (0.01, ['standard nextlat --out=figure']),
    'analysis.tables': (0.01, ['standard nextlat --out=figure']),
    'analysis.window_sweep': (0.01, ['standard nextlat --out=figure']),
}
RUNS = {'standard', 'nextlat', 'task'}
OWN = {'train': RUNS, 'eval': RUNS, 'analysis.speculative': RUNS}  # what it may change of `base`, if it names it


# ---- a folder in which the commands work ----

@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """Runs of three steps, a Llama, token data, texts, prompts, a config."""
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
    for command in ('train config.py --out_dir=standard', 'common.export standard --to_llama=llama',
                    'train config.py --out_dir=nextlat --model=nextlat --save_interval=1',
                    f'train config.py --out_dir=task --data={TASK} --block_size=17'):
        must_work(folder, command)
    shutil.rmtree(folder / 'standard/ckpt/step_00000003')  # --resume continues from step 2
    return folder


def must_work(folder, command: str) -> None:
    """Run a command in this process and in the folder."""
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
where = st.integers(0, 2 ** 16)  # which of the places that a fault can be at, modulo their number


def as_argument(text: str) -> str:
    """A text as a shell can pass it; without a slash, so that it names nothing outside the folder."""
    raw = text.encode(errors='surrogatepass')
    return os.fsdecode(raw.replace(b'\0', b'').replace(b'/', b''))


words = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.integers(-5, 20).map(str),
                  st.integers().map(str), st.floats().map(repr), st.text(st.characters(), max_size=8)).map(as_argument)
how_many = st.sampled_from([1, 1, 1, 0, 2])  # faults


def setting_names(program: str) -> list[str]:
    """What can stand in --NAME=, the settings of two models included."""
    Settings = importlib.import_module(program).Settings
    Configs = [runs.model_file(name).Config for name in ('standard', 'nextlat')] if program == 'train' else []
    return sorted({field.name for cls in (Settings, *Configs) for field in fields(cls)})


@st.composite
def argvs(draw, kind: str) -> list[str]:
    """The arguments of one of the COMMANDS of a kind, with up to two faults."""
    argv, names = draw(st.sampled_from(COMMANDS[kind][1])).split(), setting_names(kind.split()[0])
    for _ in range(draw(how_many)):
        i = draw(where) % len(argv)
        name, equals, _ = argv[i].partition('=')
        fault = draw(st.sampled_from(['setting'] * 5 + ['value'] * 3 + ['flag', 'word', 'misspell', 'remove']))
        if fault == 'value':
            argv[i] = name + '=' + draw(words) if equals else draw(words)
        elif fault == 'setting':
            argv.append(f'--{draw(st.sampled_from(names))}={draw(words)}')
        elif fault == 'flag':
            argv.append(f'--{draw(st.sampled_from(names))}')
        elif fault == 'word':
            argv.insert(i, draw(words))
        elif fault == 'misspell':
            argv[i] = name[:-1] + argv[i][len(name):]
        elif fault == 'remove' and len(argv) > 1 and argv[i] != 'config.py':  # without it, a model has its full size
            del argv[i]
    return argv


# ---- faults in files ----

ODD_JSON = ['null', 'true', '0', '-0', '-1', '1', '0.5', '1e400', '-1e400', 'NaN', '9' * 40, '9' * 5000, '1e-400', '""',
            '" "', '"a"', '"1"', '"byte"', '"standard"', '"gpn"', '"uint32"', '"../data"', '"\\u0000"', '"\\ud800"',
            '"' + 'x' * 5000 + '"', '[]', '[[]]', '[null]', '{}', '{"a": 1}', '[' * 100_000, '{"": {"": 0}}', '']
MARK = 'this stands for the new value'
json_texts = st.one_of(st.sampled_from(ODD_JSON), st.integers().map(str), st.text(max_size=8).map(json.dumps))
damages = how_many.flatmap(lambda n: st.lists(st.one_of(  # (what is done, to which file, where in it, what with)
    st.tuples(st.sampled_from(['set', 'set', 'delete']), where, where, json_texts),
    st.tuples(st.sampled_from(['flip', 'flip', 'cut', 'insert', 'remove']), where, where,
              st.binary(min_size=1, max_size=8))), min_size=n, max_size=n))


def files_read(program: str, argv: list[str], folder: Path) -> list[Path]:
    """The files of `base` that a command reads: those that its arguments name, and the data of the runs."""
    names = {arg.rpartition('=')[2] for arg in argv} | ({'data'} if program in ('train', 'eval') else set())
    found = [folder / name for name in names if name in {path.name for path in folder.iterdir()}]
    return sorted(path for top in found for path in (top, *top.rglob('*')) if path.is_file())


def damage(files: list[Path], kind: str, file: int, place: int, new) -> None:
    """Damage one of the files: its JSON if `new` is a text, else its bytes."""
    is_json = isinstance(new, str)
    files = [path for path in files if path.is_file() and not (
        is_json and (path.suffix not in ('.json', '.jsonl') or 'ckpt' in path.parts))]
    if not files:  # the argument that named them has a fault, or an earlier fault has removed them
        return
    path = files[file % len(files)]
    content = path.read_bytes()
    if is_json:
        with suppress(ValueError, RecursionError):  # after an earlier fault
            path.write_text(damaged_json(content.decode(), kind, place, new))
        return
    place %= len(content) or 1
    rest = {'flip': bytes(byte ^ 1 << new[0] % 8 for byte in content[place:place + 1]) + content[place + 1:],
            'cut': b'', 'insert': new + content[place:]}
    path.unlink()
    if kind != 'remove':
        path.write_bytes(content[:place] + rest[kind])


def damaged_json(text: str, kind: str, place: int, new: str) -> str:
    """Return JSON lines or indented JSON with one of its values set to `new` or deleted."""
    documents = [json.loads(line) for line in ([text] if text.startswith('{\n') else text.splitlines())]
    places = list(places_of(documents))
    holder, key = places[place % len(places)] if places else ([None], 0)
    if kind == 'delete':
        del holder[key]
    else:
        holder[key] = MARK
    return '\n'.join(map(json.dumps, documents)).replace(json.dumps(MARK), new)


def places_of(value):
    """Yields (holder, key or index) of every value inside a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places_of(value[key])


# ---- a script in a fork ----

def in_a_fork(program: str, argv: list[str], folder: Path, encoding: str, stdin: bytes):
    """Run main(argv) of a script in a fork that works in the folder. Returns (its wait status, its stderr)."""
    main = importlib.import_module(program).main
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.chdir(folder)
                stand_alone((given, output, errors), encoding)
                sys.argv = [f'{program}.py', *argv]
                main(argv)
                sys.stdout.flush()
                code = 0
            except SystemExit as end:  # as Python ends
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                print(end.code if isinstance(end.code, str) else '', file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # workers that it left
        errors.seek(0)
        return status, errors.read().decode(errors='replace')


def stand_alone(standard_files, encoding: str) -> None:
    """Make a fork of the tests a process like that of a script, with limits, without a network or a GPU.

    Built data goes to its folder, training ends after STEPS, and what takes seconds is left out.
    """
    os.setsid()
    for number, file in enumerate(standard_files):
        os.dup2(file.fileno(), number)
    sys.stdin = open(0, encoding=encoding, closefd=False)
    sys.stdout = open(1, 'w', encoding=encoding, closefd=False)
    sys.stderr = open(2, 'w', encoding=encoding, errors='backslashreplace', closefd=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    quiet_start()
    now = int(Path('/proc/self/statm').read_text().split()[0]) * os.sysconf('SC_PAGE_SIZE')
    for limit, value in ((resource.RLIMIT_AS, now + MEMORY), (resource.RLIMIT_FSIZE, FILE_BYTES),
                         (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    signal.alarm(WAIT)
    torch.set_num_threads(1)
    torch.set_num_threads = lambda n: None  # whatever --threads says: idle threads spin
    torch.cuda.is_available = lambda: False
    socket.getaddrinfo = no_network
    os.environ['HF_HUB_OFFLINE'] = '1'
    for name in {'huggingface_hub.constants', 'datasets.config'} & sys.modules.keys():  # which have read that already
        sys.modules[name].HF_HUB_OFFLINE = True
    gc.disable()  # it would copy the memory that the fork shares
    for module in map(importlib.import_module, ('data', 'data.shards', 'prepare_fineweb')):
        module.BUILT = Path('built')
    step, done = train.train_step, []

    def train_step(*args):
        done.append(1)
        if len(done) == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args)
    train.train_step = train_step
    machine.peak_flops = lambda *_: 1e12
    if lm_eval_adapter:
        lm_eval_adapter.task_manager = lambda: SimpleNamespace(all_tasks=[])
    torch.compile = lambda model, *_, **__: model


def no_network(*_, **__):
    raise OSError('no network in tests')


# ---- the check ----

def contents(folder: Path) -> dict[str, bytes | None]:
    """{path: what is in the file, None for a folder}."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in folder.rglob('*')}


def as_in(base: Path) -> Path:
    """A working copy of the folder: that of the call before, where it is still as it was."""
    folder = base.with_name('work')
    if not folder.exists() or contents(folder) != contents(base):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
    return folder


def check(base: Path, program: str, argv, faults, encoding, stdin) -> None:
    """Check one input: fails where the docstring of this file says."""
    folder = as_in(base)
    files = files_read(program, argv, folder)
    for fault in faults:
        damage(files, *fault)
    before = contents(folder)
    status, stderr = in_a_fork(program, argv, folder, encoding, stdin)
    case = f'{program} {argv!r} faults={faults!r} encoding={encoding} stdin={stdin!r}\n{stderr[-5000:]}'
    assert os.WIFEXITED(status), f'{signal.Signals(os.WTERMSIG(status)).name}: {case}'
    assert 'Traceback' not in stderr, case
    assert os.WEXITSTATUS(status) == 0 or stderr.strip(), f'no sentence: {case}'
    own = {name for name in OWN.get(program, ()) if any(name in arg for arg in argv)}
    others = {name.partition('/')[0] for name in before} - own
    changed = {name for name, _ in before.items() ^ contents(folder).items() if name.partition('/')[0] in others}
    assert not changed, f'changed {changed}: {case}'


surroundings = st.sampled_from([  # encoding of the output, standard input
    *[('utf-8', b'')] * 5, ('ascii', b''), ('utf-8', b'ab'), ('utf-8', b'\xff\0')])


@pytest.mark.parametrize('kind', COMMANDS)
def test_whatever_it_is_given_a_script_ends_with_its_result_or_a_sentence(base, kind):
    program = kind.split()[0]
    if program == 'prepare_fineweb':
        pytest.importorskip('datasets')
    share, commands = COMMANDS[kind]
    for command in commands:
        must_work(as_in(base), f'{program} {command}')  # and what it imports is there for all forks

    @settings(max_examples=round((FUZZ or 300) * share), derandomize=not FUZZ, database=None, deadline=None,
              suppress_health_check=list(HealthCheck))
    @given(argvs(kind), damages, surroundings)
    def every_input(argv, faults, around):
        check(base, program, argv, faults, *around)
    every_input()
