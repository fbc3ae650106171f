"""The commands of docs/recipes.md and recurrent.md run, in order, with small data and models."""
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import NO_SIZES, ROOT, byte_documents, make_run, run, run_subprocess, succeeded
from references import some_tokens
from variants import decode_in_pieces

from lm_architectures.hf import export

RECIPES = dict(re.findall(r'^## ([^\n]*)\n(.*?)(?=^## |\Z)', (ROOT / 'docs/recipes.md').read_text(), re.M | re.S))
RECIPES[CACHE := 'A decoding cache'] = (ROOT / 'docs/recurrent.md').read_text()
SIZES = ['--n_layer=1', '--n_head=2', '--n_embd=16']
SHORT = [*NO_SIZES, '--max_tokens=512', '--warmup_tokens=0']
PAPER = "A paper's table, on 8 GPUs"
LONG = 'A sweep of learning rates', 'LoRA on an export', 'Serving over HTTP'  # start other processes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore'), pytest.mark.usefixtures('code_folder')]


def commands(recipe):
    """Return the commands of a recipe as lists of arguments, in order."""
    text = re.sub(r'```.*?```|\\\n', '', RECIPES[recipe], flags=re.S)
    for name, value in re.findall(r'(\w)="([^"]*)"', text):
        text = text.replace(f'${name}', re.sub(r'\s+', ' ', value))
    return [shlex.split(line) for line in re.findall(r'^    ((?:python|transformers|trl|curl) .*)', text, re.M)]


@pytest.fixture(scope='module')
def made(tiny_data, tmp_path_factory):
    """Make a folder with the files that the page assumes."""
    folder = tmp_path_factory.mktemp('week')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(export, 'why_it_fails', lambda *args: '')
        make_files(tiny_data)
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def make_files(tiny_data):
    Path('config').symlink_to(ROOT / 'config')
    texts = byte_documents(tiny_data, 'train')[:60]
    for path in 'own.jsonl', 'other.jsonl', 'own/own.jsonl':
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(''.join(json.dumps({'text': path + text}) + '\n' for text in texts))
    Path('texts').mkdir()
    for i in range(3):
        Path(f'texts/{i}.txt').write_text('\n'.join(texts[i::3]) * 3)
    make_run(Path('out/quickstart'), 'sps', eos_id=None)
    make_run(Path('llama'), eos_id=None)
    export.export_run('llama', 'SmolLM2')  # as from `hf download`


def smaller(script, arguments):
    """Return the arguments of a script with smaller sizes, and data that exist."""
    given = ' '.join(arguments)
    if script == 'train.py' and '--resume' not in given and '--dry_run' not in given:
        of_model = SIZES * ('--init_from' not in given and '--model=' not in given)
        data = ['--data=own.jsonl'] * ('--data=' not in given)
        arguments = [*arguments, *SHORT, *of_model, *data]
    if script == 'prepare_fineweb.py':
        arguments = [*arguments, '--workers=1', *['--tokenizer=byte'] * ('--tokenizer' not in given)]
    if script == 'sample.py':
        arguments = [*arguments, '--max_new_tokens=4']
    return [argument.replace('python_docs', 'other.jsonl') for argument in arguments]


def follow(recipe, *more):
    """Run the Python commands of a recipe, with `more` arguments. Returns what they print."""
    printed = []
    for program, *arguments in commands(recipe):
        if program == 'python':
            n = 2 if arguments[0] == '-m' else 1
            script = arguments[:n]
            printed.append(succeeded(run(*script, *smaller(script[-1], arguments[n:]), *more)).stdout)
    return printed


@pytest.mark.parametrize('recipe', [name for name in RECIPES if name not in (*LONG, PAPER, CACHE)])
def test_a_recipe_runs(recipe, folder, monkeypatch):
    logged = SimpleNamespace(id='1', log=lambda *args, **kwargs: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=lambda **kwargs: logged))
    printed = follow(recipe)
    for found, claimed in zip(printed, re.findall(r'\d\d\.\d\d GiB', RECIPES[recipe])):
        assert f'{claimed} at the peak' in found


def test_the_paper_has_as_many_runs_as_the_page_says():
    for (_, *arguments), n_runs in zip(commands(PAPER), (20, 2)):
        printed = run_subprocess(*(argument for argument in arguments if argument != '--run')).stdout
        assert len(re.findall('^torchrun --nproc_per_node=8 train.py', printed, re.M)) == n_runs


def test_the_cache_of_the_page_decodes_like_the_full_text(folder):
    source, methods, *_ = re.findall(r'```python\n(.*?)```', (ROOT / 'docs/recurrent.md').read_text(), re.S)
    source = source.replace('\ntry:', '\nfrom state_cache import StateCache\n\ntry:', 1) + '\n' + methods
    Path('model_lstm.py').write_text(source)
    exec(source, names := {'__name__': 'model_lstm'})
    for seed, eos_id in enumerate((None, 59)):
        torch.manual_seed(seed)
        model = names['Model'](names['Config'](n_embd=16, vocab_size=64, n_ids=60, eos_id=eos_id)).eval()
        model.final_hidden = model.states
        with torch.no_grad():
            decode_in_pieces(model, some_tokens(3, 64, seed), 4, seed)
    follow(CACHE, '--model=model_lstm.py')


@pytest.mark.long
def test_the_sweep_runs(folder):
    (_, _, _, *arguments), = commands('A sweep of learning rates')
    small = [f'{x} {" ".join(SHORT)} --data=own.jsonl' if ': ' in x else x.replace('3e-4,1e-3,', '') for x in arguments]
    succeeded(run('-m', 'analysis.compare', *small, '--seeds=1'))
    assert (folder / 'out/sweep/learning_rate.png').exists()


@pytest.mark.long
def test_lora_with_trl_runs_and_merges(folder):
    pytest.importorskip('trl')
    pytest.importorskip('peft')
    follow('LoRA on an export')
    trl = next(arguments for program, *arguments in commands('LoRA on an export') if program == 'trl')
    subprocess.run([shutil.which('trl'), *trl, '--max_steps=2', '--report_to=none'], check=True)
    code, = re.findall(r'```python\n(.*?)```', RECIPES['LoRA on an export'], re.S)
    succeeded(run_subprocess('-c', code, cwd=folder))
    assert (folder / 'out/merged/hf_model.py').exists()


@pytest.mark.long
def test_an_export_is_served(folder):
    if not find_spec('fastapi') or not find_spec('uvicorn'):
        pytest.skip('needs fastapi and uvicorn: pip install "transformers[serving]"')
    follow('Serving over HTTP')
    (serve,), (curl,) = ([arguments for program, *arguments in commands('Serving over HTTP') if program == name]
                         for name in ('transformers', 'curl'))
    server = subprocess.Popen([shutil.which('transformers'), *serve])
    try:
        for _ in range(120):
            time.sleep(0.5)
            try:
                urllib.request.urlopen('http://localhost:8000/health')
                break
            except OSError:
                assert server.poll() is None
        request = urllib.request.Request(f'http://{curl[0]}', curl[curl.index('-d') + 1].encode(),
                                         {'Content-Type': 'application/json'})
        assert json.load(urllib.request.urlopen(request))['choices'][0]['text']
    finally:
        server.terminate()
        server.wait()
