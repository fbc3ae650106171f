"""Settings and run folders.

A script's settings are a dataclass; a training run's are `train.Settings` plus the `Config` of the chosen model file. Values
come from the defaults, then from a config file (plain Python assignments), then from `--key=value`. A name nobody knows is an
error, in the file as on the command line.

A run folder holds

    config.json             model, settings, model_config, data (tokenizer and vocabulary), versions
    log.jsonl               one line per logged step
    loss.png                the loss curve
    ckpt/step_00000100/     model.safetensors, optimizer.safetensors, state.json, SHA256SUMS
"""
import ast
import dataclasses
import difflib
import errno
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import runpy
import shutil
import sys
import types
import typing
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data import UserError, padded_vocab, sync_folder, write_json

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def sentences():
    """Ends the program with exit status 1 and a sentence instead of a traceback, where the cause is input, disk or memory."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as error:
        remedy = ': make room and start again, a training run with --resume' if getattr(error, 'errno', 0) == errno.ENOSPC else ''
        sys.exit(f'{Path(sys.argv[0]).name}: {error}{remedy}')
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        sys.exit(f'{Path(sys.argv[0]).name}: too little memory. Training: lower micro_batch_size or set checkpoint_blocks '
                 '(context_ready: checkpoint_unrolls); sampling: '
                 f'give fewer or shorter prompts. {str(error).splitlines()[0]}')


# ---- settings ----

def load_settings(Settings, argv, parse_model=False):
    """Reads a script's command line into (settings, positional arguments, {name: value} of what the user gave).

    Settings is a dataclass. With parse_model, one positional argument is a config file, the field `model` names a model file,
    and the names of that model's Config are settings too; they are only in the returned dict. Raises UserError with the nearest
    valid names for an unknown one. `--help` prints all settings and exits.
    """
    given, where, positional, help_wanted = {}, {}, [], False
    for arg in argv:
        if arg in ('-h', '--help'):
            help_wanted = True
        elif arg.startswith('--'):
            name, equals, text = arg[2:].partition('=')
            given[name], where[name] = Text(text) if equals else True, 'on the command line'
        else:
            positional.append(arg)
    if parse_model and positional:
        path, *more = positional
        if more:
            raise UserError(f'one config file is expected, got {len(positional)}: {" ".join(positional)}. Overrides are --key=value')
        from_file = read_config_file(path)
        given = {**from_file, **given}
        where = {**dict.fromkeys(from_file, f'in {path}'), **where}
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    own = set(fields)
    if parse_model:
        model_name = str(given.get('model', fields['model'].default))
        fields |= {f.name: f for f in dataclasses.fields(model_file(model_name).Config)}
    if help_wanted:
        print_help(Settings, model_file(model_name).Config if parse_model else None)
        sys.exit(0)
    types_of = typing.get_type_hints(Settings) | (typing.get_type_hints(model_file(model_name).Config) if parse_model else {})
    for name in given:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 3, 0.6)
            hint = f'did you mean {" or ".join(map(repr, near))}?' if near else 'run with --help for the list'
            raise UserError(f'unknown setting {name!r} {where[name]}: {hint}')
        given[name] = typed(name, given[name], types_of[name], where[name])
    return Settings(**{k: v for k, v in given.items() if k in own}), positional, given


class Text(str):
    """A value from the command line, still to be read as the type of its setting."""


def read_config_file(path):
    """The assignments of a config file as {name: value}; modules, functions and names with a leading underscore are not settings."""
    if not os.path.isfile(path):
        known = sorted(str(p.relative_to(ROOT)) for p in (ROOT / 'config').rglob('*.py') if p.name != '__init__.py')
        near = difflib.get_close_matches(path, known, 3, 0.4) or [name for name in known if name.count('/') == 1]
        raise UserError(f'there is no config file {path}: did you mean {" or ".join(near)}?')
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise UserError(f'config file {path} does not run: {type(error).__name__}: {error}')
    return {k: v for k, v in names.items() if not k.startswith('_') and not callable(v) and not isinstance(v, types.ModuleType)}


def typed(name, value, annotation, where):
    """value as the type of its setting, or a UserError. 20e9 may be an int; an int may be a float; text only from the command line."""
    options = typing.get_args(annotation) or (annotation,)
    if isinstance(value, Text):
        if str in options and value not in ('None', "''", '""'):
            return str(value)
        try:
            value = ast.literal_eval({'true': 'True', 'false': 'False', 'none': 'None'}.get(value, value))
        except (ValueError, SyntaxError):
            value = str(value)
    for option in options:
        if option is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if option is float and type(value) is int:
            return float(value)
        if type(value) is option:
            return value
    if value is True and where == 'on the command line':
        raise UserError(f'--{name} needs a value: write --{name}=VALUE')
    wanted = ' or '.join('None' if o is type(None) else o.__name__ for o in options)
    raise UserError(f'setting {name!r} {where} is {value!r}, a {type(value).__name__}: expected {wanted}')


def saved_settings(Settings, values, path):
    """Settings from the dict of a config.json at `path`, or a UserError if a name or a type is not as it was written."""
    types_of = typing.get_type_hints(Settings)
    if values.keys() != types_of.keys():
        raise UserError(f'{path} is not of this version: the settings {sorted(values.keys() ^ types_of.keys())} are unknown or missing')
    return Settings(**{name: typed(name, value, types_of[name], f'in {path}') for name, value in values.items()})


def check_ranges(settings, **ranges):
    """Raises UserError for a setting outside its (low, high), both included; None is always inside."""
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise UserError(f'{name} is {value}: expected {f"{low} to {high}" if high < math.inf else f"at least {low}"}')


def print_help(Settings, ModelConfig=None):
    """Every setting with type, default and the comment beside it in the source."""
    print(inspect.getmodule(Settings).__doc__.strip() + '\n')
    for cls, title in ((Settings, 'settings'), (ModelConfig, f'model settings ({ModelConfig and ModelConfig.__module__}.py)')):
        if cls is None:
            continue
        print(f'{title}:')
        comments = dict(re.findall(r'^    (\w+): .*?  # (.*)$', inspect.getsource(cls), re.M))
        for f in dataclasses.fields(cls):
            kind = f.type.__name__ if isinstance(f.type, type) else str(f.type)
            print(f'  --{f.name}={f.default!r}  ({kind})\n        {comments.get(f.name, "")}')


# ---- device ----

def pick_device(name):
    """'cuda' or 'cpu' for a device setting of auto, cuda or cpu; UserError if it is not to be had."""
    if name not in ('auto', 'cuda', 'cpu'):
        raise UserError(f"device is {name!r}: expected 'auto', 'cuda' or 'cpu'")
    if name == 'cuda' and not torch.cuda.is_available():
        raise UserError('device is cuda, but PyTorch sees no GPU here: use --device=cpu, or install a CUDA build of PyTorch')
    return name if name != 'auto' else 'cuda' if torch.cuda.is_available() else 'cpu'


def pick_dtype(name, device, big_enough=True):
    """The dtype of products for a setting of auto, bfloat16 or float32. auto is bf16 on GPUs, and on CPUs with bf16 units if
    the model is big enough to gain."""
    if name not in ('auto', 'bfloat16', 'float32'):
        raise UserError(f"dtype is {name!r}: expected 'auto', 'bfloat16' or 'float32'")
    if name != 'auto':
        return getattr(torch, name)
    tests = ('_is_amx_tile_supported', '_is_avx512_bf16_supported')  # private, so they may be missing
    units = big_enough and any(getattr(torch.cpu, test, bool)() for test in tests)
    return torch.bfloat16 if device == 'cuda' or units else torch.float32


# ---- models ----

def model_file(name):
    """The module model_<name>.py of the repository. The name is checked, so that a stranger's run folder cannot name other code."""
    known = sorted(p.stem.removeprefix('model_') for p in ROOT.glob('model_*.py'))
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 1, 0.4) or known
        raise UserError(f'unknown model {name!r}: did you mean {" or ".join(map(repr, near))}? (there is one model_NAME.py per model)')
    return importlib.import_module(f'model_{name}')


def make_config(model_name, values):
    """The Config of a model file from {name: value}; what the Config itself rejects becomes a UserError."""
    try:
        return model_file(model_name).Config(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f'model {model_name!r}: {error}')


def adopted(model, tensors, source):
    """The tensors of another run as this model takes them: as they are, or through its `adopt`, whose ValueError becomes a UserError."""
    try:
        return model.adopt(tensors) if hasattr(model, 'adopt') else tensors
    except ValueError as error:
        raise UserError(f'{source} does not fit this model: {error}')


def check_weights(model, tensors, source):
    """Raises UserError unless the names and shapes of the tensors are those of the model's parameters."""
    params = dict(model.named_parameters())
    for name in (*params, *tensors):
        if name not in params or name not in tensors:
            raise UserError(f'{source} does not fit this model: {name} is only in the {"model" if name in params else "checkpoint"}')
        have, want = tuple(tensors[name].shape), tuple(params[name].shape)
        if have != want:
            raise UserError(f'{source} does not fit this model: {name} has shape {have}, the model needs {want}')


def load_weights(model, tensors, source):
    """Copies named tensors into the model's parameters; UserError unless they fit exactly."""
    check_weights(model, tensors, source)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[name])


# ---- run folders ----

def save_run(folder, record):
    """Writes config.json of a new run folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_json(Path(folder) / 'config.json', record)


def read_run(folder):
    """config.json of a run folder as a dict, or a UserError."""
    path = Path(folder) / 'config.json'
    if not path.is_file():
        runs = sorted(str(p.parent) for p in Path('out').glob('*/config.json')) if Path('out').is_dir() else []
        known = f'runs here: {", ".join(runs)}' if runs else 'train one first: python train.py config/quickstart.py'
        raise UserError(f'{folder} is not a run folder (it has no config.json); {known}')
    try:
        record = json.loads(path.read_text())
        for part, keys in (('settings', ['block_size']), ('model_config', []), ('data', ['tokenizer', 'n_ids', 'eos_id', 'sha256'])):
            if not isinstance(record[part], dict) or not all(key in record[part] for key in keys):
                raise ValueError(f'{part} is incomplete')
        return {key: record[key] for key in ('model', 'settings', 'model_config', 'data', 'versions')}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path} is damaged ({type(error).__name__}: {error}); copy the run again or train it anew')


def check_vocabulary(record, data, folder):
    """Raises UserError unless the run in `folder` was trained with the tokenizer of the data."""
    want, have = record['data'], {'tokenizer': data.tokenizer, 'n_ids': data.n_ids}
    if any(want[key] != have[key] for key in have):
        raise UserError(f'{data.folder} has tokenizer {data.tokenizer!r} with {data.n_ids} ids, the run in {folder} was trained '
                        f'with {want["tokenizer"]!r} and {want["n_ids"]}: use data with the same tokenizer')


def read_log(folder):
    """The records of a run's log.jsonl; a last line cut by a kill is left out."""
    path, records = Path(folder) / 'log.jsonl', []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def load_run(folder, device='cpu', dtype=None):
    """The trained model of a run folder, in eval mode, and its config.json: (model, record).

    device as for Tensor.to; dtype None keeps fp32. Reads the newest checkpoint that is whole.
    """
    record = read_run(folder)
    config = make_config(record['model'], record['model_config'])
    tensors = load_checkpoint(folder, ('model.safetensors',))[1]['model.safetensors']
    model = model_file(record['model']).Model(config)
    load_weights(model, tensors, folder)
    return model.eval().to(device=device, dtype=dtype), record


# ---- Hugging Face ----

def llama_weights(block):
    """[(name in a Hugging Face Llama layer, the weight's rows in a model_standard block)]: ours joins q, k, v and gate, up."""
    q, k, v = block.qkv.weight.chunk(3)
    gate, up = block.gate_up.weight.chunk(2)
    return [('input_layernorm', block.attn_norm.weight), ('post_attention_layernorm', block.ffn_norm.weight), ('self_attn.q_proj', q),
            ('self_attn.k_proj', k), ('self_attn.v_proj', v), ('self_attn.o_proj', block.attn_out.weight), ('mlp.gate_proj', gate),
            ('mlp.up_proj', up), ('mlp.down_proj', block.ffn_out.weight)]


def to_llama(model):
    """A Hugging Face LlamaForCausalLM with the weights of a model_standard.Model, without the rows that pad its vocabulary.

    Equal but for documents, which Llama does not know.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    c = model.config
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.n_ids, hidden_size=c.n_embd, intermediate_size=c.n_ffn, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, tie_word_embeddings=c.tied_head,
        bos_token_id=None, eos_token_id=c.eos_id, pad_token_id=0, max_position_embeddings=8192))
    weights = {'model.embed_tokens': model.embed.weight[:c.n_ids], 'model.norm': model.norm.weight, 'lm_head': model.head.weight[:c.n_ids]}
    for i, block in enumerate(model.blocks):
        weights |= {f'model.layers.{i}.{name}': w for name, w in llama_weights(block)}
    llama.load_state_dict({f'{name}.weight': w.detach().clone() for name, w in weights.items()})
    return llama.to(model.embed.weight.device).eval()


def export_llama(run, folder):
    """Writes a Standard run as a Hugging Face Llama folder: config.json, safetensors, and the tokenizer where it is a file."""
    model, record = load_run(run)
    if record['model'] != 'standard' or model.config.window is not None:
        raise UserError(f'{run} is a model_{record["model"]} with window = {getattr(model.config, "window", None)}: '
                        'only model_standard without a window is a Llama')
    if Path(folder).exists():
        raise UserError(f'{folder} exists: remove it first, or write to another folder')
    temporary = Path(f'{folder}.writing')
    shutil.rmtree(temporary, ignore_errors=True)
    llama = to_llama(model)
    llama.config.max_position_embeddings = record['settings']['block_size']
    llama.save_pretrained(temporary)
    tokenizer = Path(record['data']['tokenizer'])
    if tokenizer.is_file():
        shutil.copy(tokenizer, temporary)
    os.replace(temporary, folder)
    print(f'{folder} is a Llama of {record["settings"]["block_size"]} positions; its tokenizer is {tokenizer.name}')


def import_llama(folder, run, tokenizer):
    """Makes a run folder from a Hugging Face Llama folder without grouped queries or biases; its tokenizer is a data.Tokenizer."""
    from transformers import LlamaForCausalLM
    if Path(run).exists():
        raise UserError(f'{run} exists: remove it first, or write to another folder')
    try:
        llama = LlamaForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f'{folder} is not a Llama folder: {error}')
    c = llama.config
    rope = c.rope_parameters
    for what, is_so in (('grouped queries', c.num_key_value_heads != c.num_attention_heads), ('biases', c.attention_bias or c.mlp_bias),
                        ('heads of another size', c.head_dim * c.num_attention_heads != c.hidden_size),
                         ('scaled positions', rope['rope_type'] != 'default'),
                        (f'{c.vocab_size} ids where {tokenizer.name} has {tokenizer.n_ids}', c.vocab_size != tokenizer.n_ids)):
        if is_so:
            raise UserError(f'{folder} has {what}, which model_standard has not')
    config = make_config('standard', dict(
        n_layer=c.num_hidden_layers, n_head=c.num_attention_heads, n_embd=c.hidden_size, n_ffn=c.intermediate_size, rope_theta=rope['rope_theta'],
        norm_eps=c.rms_norm_eps, tied_head=c.tie_word_embeddings, vocab_size=padded_vocab(c.vocab_size), n_ids=c.vocab_size, eos_id=None))
    model, theirs = model_file('standard').Model(config), llama.state_dict()
    with torch.no_grad():
        model.embed.weight.zero_()[:c.vocab_size] = theirs['model.embed_tokens.weight']
        model.head.weight[:c.vocab_size] = theirs['lm_head.weight']
        model.norm.weight.copy_(theirs['model.norm.weight'])
        for i, block in enumerate(model.blocks):
            for name, part in llama_weights(block):
                part.copy_(theirs[f'model.layers.{i}.{name}.weight'])
    save_checkpoint(run, 0, {'model.safetensors': dict(model.named_parameters())}, {'step': 0})
    save_run(run, {'model': 'standard', 'settings': {'block_size': c.max_position_embeddings, 'data': ''}, 'model_config': dataclasses.asdict(config),
                   'data': {'folder': '', 'tokenizer': tokenizer.name, 'n_ids': tokenizer.n_ids, 'eos_id': tokenizer.eos_id, 'sha256': ''},
                   'versions': {'torch': torch.__version__}})
    print(f'{run} is a run of model_standard: python sample.py {run} "..."; train.py starts from it with --init_from={run} --eos_id=None')


# ---- checkpoints ----

def save_checkpoint(folder, step, tensor_files, state, keep=2):
    """Writes ckpt/step_<step> of a run folder, all or nothing, then removes all but the newest `keep` checkpoints.

    tensor_files {file name: {tensor name: tensor}}, state a dict for state.json. The files go to a temporary folder, reach the
    disk (fsync), and get their final name by one rename. Raises UserError with nothing changed when the disk is full.
    """
    ckpt = Path(folder) / 'ckpt'
    final, temporary = ckpt / f'step_{step:08d}', ckpt / f'.writing_{step:08d}'
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, tensors in tensor_files.items():
            save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, temporary / name)
        write_json(temporary / 'state.json', state)
        sums = ''.join(f'{sha256(temporary / name)}  {name}\n' for name in (*tensor_files, 'state.json'))
        (temporary / 'SHA256SUMS').write_text(sums)
        for path in temporary.iterdir():
            with open(path, 'rb') as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        if final.exists():  # only a damaged one that a resumed run fell back from
            shutil.rmtree(final)
        os.replace(temporary, final)
        sync_folder(ckpt)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f'{final} could not be written: {error}. Earlier checkpoints are whole: make room, then go on with --resume')
    newest_first = checkpoints(folder)
    at = newest_first.index(final)  # those above are damaged ones that this run fell back from
    for old in newest_first[:at] + newest_first[at + keep:]:
        shutil.rmtree(old)


def checkpoints(folder):
    """The checkpoint folders of a run, newest first."""
    return sorted((Path(folder) / 'ckpt').glob('step_*'), reverse=True)


def load_checkpoint(folder, names=('model.safetensors', 'optimizer.safetensors')):
    """The newest whole checkpoint of a run folder: (state, {file name: {tensor name: tensor}}).

    Each file is checked against SHA256SUMS; a damaged checkpoint is named on stderr and the one before it is taken. Only JSON
    and safetensors are read, neither of which can run code.
    """
    found = checkpoints(folder)
    for path in found:
        try:
            sums = dict(reversed(line.split()) for line in (path / 'SHA256SUMS').read_text().splitlines())
            for name in ('state.json', *names):
                if sha256(path / name) != sums[name]:
                    raise ValueError(f'{name} does not match its checksum')
            state = json.loads((path / 'state.json').read_text())
            return state, {name: load_file(path / name) for name in names}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            print(f'checkpoint {path} is damaged ({error}); trying the one before it', file=sys.stderr)
    raise UserError(f'{folder} has no {"whole " if found else ""}checkpoint to load')


def sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(2 ** 24):
            digest.update(block)
    return digest.hexdigest()
