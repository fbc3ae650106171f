"""Reading a run folder: `load_run`, or `read_run` if the model is not needed, and `run_data`.

Training reads a folder only for --resume, --extend and --init_from, which take settings and weights
from it, on the same data. run/records.py writes it. docs/runs.md lists the files.
"""
import dataclasses
import os
from pathlib import Path

import torch

from lm_architectures.data import open_data
from lm_architectures.data.text.tokenizers import TOKENIZER_FILES, tokenizer_digest
from lm_architectures.files import ROOT, UserError, command, first_line, read_json, warn_once
from lm_architectures.machine.wrapping import shard_like
from lm_architectures.run import checkpoint
from lm_architectures.run.models import STORED, code_of, given_model, model_file
from lm_architectures.settings import make_settings, typed

REQUIRED_KEYS = {  # keys of config.json and their types, besides the other settings of training and of the model
    'model': str, 'settings': dict, 'settings.block_size': int, 'settings.eval_seed': int | None, 'model_config': dict,
    'versions': dict, 'data': dict, 'data.tokenizer': str, 'data.n_ids': int, 'data.eos_id': int, 'data.bos': bool,
    'data.sha256': str}
OPTIONAL_KEYS = {  # imported runs lack some of them, other runs lack others
    'settings.data': str, 'settings.max_tokens': int, 'settings.batch_size': int, 'settings.seed': int,
    'data.ends': list, 'data.n_rows': int, 'versions.processes': int}
MAY_CHANGE = {  # on --resume, besides the model settings in `Config.may_change`
    'resume', 'code', 'overwrite', 'dry_run', 'gpu_gib', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'compile', 'parallel', 'shard', 'threads', 'make_data', 'assumed_ids',
    'data'}  # the folder may move; the checksum of its content must match


# ---- config.json ----

def read_run(folder, code: str | None = None) -> dict:
    """Return config.json of a run folder. UserError if it is missing or damaged.

    'code' is the folder if code = 'run': its copy of the model's code will be imported. Else None.
    """
    if code not in (None, 'run'):
        raise UserError(f"code is {code!r}: expected 'run' or None")
    path = Path(folder) / 'config.json'
    if not path.is_file():
        known = ', '.join(sorted(str(p.parent) for p in Path('out').glob('*/ckpt')))  # no exports
        quickstart = command('train.py', os.path.relpath(ROOT / 'config/quickstart.py'))
        raise UserError(f'{folder or "an empty name"} is not a run folder (it has no config.json). Runs here: '
                        + (known or f'none; train one with {quickstart}'))
    remedy = 'copy the run again or retrain it'
    if 'model_type' in read_json(path, remedy):
        name = f'out/{Path(folder).resolve().name}_run'
        convert = command('-m', 'lm_architectures.hf.import_model', folder, f'--out_dir={name}')
        raise UserError(f'{folder} is a Hugging Face folder: if it is a Llama, Mistral or Qwen, convert it with '
                        f'{convert}, then use {name}')
    record = read_json(path, remedy, check_record)
    data = record['data']
    if data['tokenizer'] in TOKENIZER_FILES:
        data['tokenizer'] = str((Path(folder) / data['tokenizer']).resolve())
    return {**{name: record[name] for name in REQUIRED_KEYS if '.' not in name},
            'code': str(folder) if code == 'run' else None}


def check_record(record: dict) -> None:
    """Raise ValueError for a missing key or a wrong type in config.json. Converts 2.0 to 2."""
    for name, kind in (REQUIRED_KEYS | OPTIONAL_KEYS).items():
        part, _, key = name.rpartition('.')
        owner = record[part] if part else record
        if key in owner:
            owner[key] = typed(key, owner[key], kind, 'there')
            if type(owner[key]) is int and owner[key] < (key in ('block_size', 'batch_size', 'n_ids')):
                raise ValueError(f'{key} is {owner[key]}')
        elif name in REQUIRED_KEYS:
            raise ValueError(f'no {name}')
    data = record['data']
    if not record['model'].isidentifier():  # a path, perhaps: what is imported is the user's decision
        raise ValueError(f'{record["model"]!r} is not the name of a model')
    if data['eos_id'] >= data['n_ids']:
        raise ValueError('eos_id is not an id of the tokenizer')
    ends, n_rows = data.get('ends', [data['eos_id']]), data.get('n_rows', data['n_ids'])
    if not ends or not all(type(i) is int and 0 <= i < n_rows for i in ends):
        raise ValueError(f'ends of text are {ends}: expected ids from 0 to {n_rows - 1}')


# ---- the code and the model ----

def report_edits(model: str, code: str | None, folder) -> list[str] | None:
    """Return the files of a run's model that differ from the run's copies; None without copies.

    Prints a line for each, with both paths. code: see `find_file`; given: the copies are used.
    """
    stored, edited = Path(folder) / STORED, []
    if code or not stored.is_dir():
        return [] if code else None
    for module, (path, text) in code_of(model).items():
        copy = stored / f'{module}.py'
        if not copy.is_file():
            edited.append(str(path))
            warn_once(f'{path} has no copy in {stored}: this run was started without it')
        elif copy.read_text(encoding='utf-8', errors='replace') != text:
            edited.append(str(path))
            warn_once(f'{path} differs from {copy}, with which this run was started: train.py, sample.py, eval.py and '
                      'lm_architectures.hf.export use that copy with --code=run')
    return edited


def saved_config(record: dict, folder):
    """Return the model Config in a run's config.json (`record`). Reports code that was edited."""
    report_edits(record['model'], record['code'], folder)
    Config = model_file(record['model'], record['code']).Config
    return make_settings(Config, record['model_config'], f'in {folder}/config.json')


def portable_config(record: dict, folder):
    """Return a run's `saved_config`, with defaults for kernels, which another machine may lack."""
    config = saved_config(record, folder)
    kernels = [f for f in dataclasses.fields(config) if f.name in getattr(config, 'may_change', ())]
    return dataclasses.replace(config, **{f.name: f.default for f in kernels})


def load_run(folder, device='cpu', dtype: torch.dtype | None = None, code: str | None = None,
             model: str | None = None) -> tuple:
    """Load a trained run from its newest undamaged checkpoint.

    Returns (model in eval mode, config.json plus the checkpoint's 'step'). dtype None: fp32. code:
    see `read_run`. model: path of the model's file, if the user gave one; UserError for another's.
    """
    given, record = given_model(model or ''), read_run(folder, code)
    if model and given != record['model']:
        raise UserError(f'{folder} is a run of the model {record["model"]!r}: {model} is not its file')
    if torch.device(device).type == 'cuda':
        from lm_architectures.machine.compiling import set_compiler_options
        set_compiler_options()  # attention, and GPN's gates, are compiled for each shape
    model = model_file(record['model'], record['code']).Model(portable_config(record, folder))
    state, tensors = checkpoint.load_checkpoint(folder)
    load_weights(model, tensors, folder)
    return model.eval().to(device=device, dtype=dtype), {**record, 'step': state['step']}


# ---- the data ----

def run_data(record: dict, name: str | None, folder=None):
    """Return the data `name`, or the run's own: Data, or Generated for a task.

    UserError if there is none or tokenizers differ.
    """
    own = record['settings'].get('data')
    if not name and not own:  # an imported run
        raise UserError(f'{folder or "this run"} has no data: give --data=FOLDER')
    data = open_data(str(name or own))
    if not name and data.sha256 != record['data']['sha256']:
        warn_once(f'{data.folder} has changed since the run was trained')
    check_vocabulary(record, data, folder)
    return data


def same_vocabulary(a: dict, b: dict) -> bool:
    """Return True if two 'data' records have the same tokenizer. A missing file matches any."""
    digests = {tokenizer_digest(a['tokenizer']), tokenizer_digest(b['tokenizer'])} - {None}
    return a['n_ids'] == b['n_ids'] and a['eos_id'] == b['eos_id'] and len(digests) < 2


def check_vocabulary(record: dict, data, folder=None) -> None:
    """Raise UserError unless the run in `folder` was trained with the data's tokenizer."""
    want, have = record['data'], {'tokenizer': data.tokenizer, 'n_ids': data.n_ids, 'eos_id': data.eos_id}
    if not same_vocabulary(want, have):
        run = f'the run in {folder}' if folder else 'this run'
        raise UserError(f'{data.folder} has tokenizer {data.tokenizer!r} ({data.n_ids} ids), but {run} was trained '
                        f'with {want["tokenizer"]!r} ({want["n_ids"]}): use data with that tokenizer')


# ---- settings and weights of another run ----

def may_change(record: dict) -> set[str]:
    """Return the names of all settings of a run (config.json) that may change on --resume."""
    return MAY_CHANGE | {*getattr(model_file(record['model'], record['code']).Config, 'may_change', ())}


def continued_settings(s, source: str, record: dict, given: dict) -> dict:
    """Return all settings of the run to continue. UserError for given ones that differ.

    s: train.Settings that say where to start. record: config.json of the run `source`.
    """
    if 'max_tokens' not in record['settings']:  # imported, or by `save`
        raise UserError(f'{source} was not trained by train.py, so it cannot be resumed or extended: start a new run '
                        f'from its weights, with --init_from={source} and another --out_dir')
    settings = make_settings(type(s), record['settings'], f'in {source}/config.json')
    saved = dataclasses.asdict(settings) | dataclasses.asdict(saved_config(record, source))
    free = may_change(record)
    if not s.resume:
        free |= {'extend', 'max_tokens'}
        if saved['schedule'] == 'cosine':
            raise UserError(f'{source} has schedule = cosine, whose learning rates depend on max_tokens from the '
                            'start, so it cannot be extended: use wsd or constant for a run that you want to extend')
        if 'out_dir' not in given or Path(s.out_dir).resolve() == Path(source).resolve():
            raise UserError(f'--extend={source} needs a new run folder: add --out_dir=NEW')
        if given.get('max_tokens', 0) <= saved['max_tokens']:
            raise UserError(f'{source} has max_tokens = {saved["max_tokens"]}: set --max_tokens to more than that')
    for name in sorted(given.keys() - free, key=lambda name: name != 'model'):  # it decides which there are
        if name in saved and given[name] == saved[name]:
            continue
        have = f'{name} = {saved[name]!r}' if name in saved else f'model = {saved["model"]!r}, without {name}'
        other = 'start another run with another --out_dir'
        if name == 'max_tokens' and saved['schedule'] != 'cosine' and saved[name] < given[name]:
            other = f'train longer with --extend={source} --max_tokens={given[name]} --out_dir=NEW'
        raise UserError(f'the run in {source} has {have}, but {given[name]!r} was given: leave out {name} '
                        f'(and the config file), or {other}')
    return saved


def inherited_settings(s, record: dict, Config: type) -> dict:
    """Return the settings that a new model, with this Config, takes over from s.init_from.

    s, record: see `continued_settings`.
    """
    source = s.init_from
    if Path(s.out_dir).resolve() == Path(source).resolve():
        raise UserError(f'--init_from and --out_dir are both {source}: set another --out_dir')
    values = dataclasses.asdict(saved_config(record, source))
    theirs = model_file(record['model'], record['code']).Config
    known = {f.name for f in dataclasses.fields(Config)}
    for name in getattr(theirs, 'defining', ()):
        if values[name] is not None and name not in known:
            raise UserError(f'{source} cannot be converted to this model: it has {name} = {values[name]}, but '
                            f'model_{s.model} has no {name}')
    known -= {*getattr(theirs, 'own', ())} ^ {*getattr(Config, 'own', ())}  # these mean something else in one of them
    masks = {'mask_documents': values['eos_id'] is not None} if 'eos_id' in values else {}
    return masks | {name: value for name, value in values.items() if name in known - {'n_ids', 'eos_id'}}


def check_data(s, record, data) -> None:
    """Raise UserError if the tokenizer, or the data of a continued run, differ from the source's.

    record: config.json of the run to continue, or None.
    """
    source = s.out_dir if s.resume else s.extend or s.init_from
    check_vocabulary(record or read_run(source), data, source)
    if record and record['data']['sha256'] != data.sha256:
        raise UserError(f'{data.folder} is not the data that the run in {source} was trained on (checksums '
                        'differ): restore that data, or start a new run with --init_from')


def restore(s, model: torch.nn.Module, optimizer) -> tuple[int, float]:
    """Load the checkpoint to continue from. Returns (step, seconds of training), or (0, 0.0)."""
    source, up_to, log = s.out_dir, None, Path(s.out_dir) / 'log.jsonl'
    if not (s.resume and checkpoint.checkpoints(source)):
        if s.resume and log.exists() and b'{"saved": ' in log.read_bytes():
            raise UserError(f'{source} has no checkpoint, but its log lists one: copy {source}/ckpt back, or '
                            'repeat the command that started it, with --overwrite')
        if not s.extend:  # killed before the first checkpoint
            return 0, 0.0
        planned = read_run(s.extend)['settings']['max_tokens']
        source, up_to = s.extend, dataclasses.replace(s, max_tokens=planned).last_before_decay
    return restore_training(source, model, optimizer, up_to)


def restore_training(folder, model: torch.nn.Module, optimizer, up_to: int | None = None) -> tuple[int, float]:
    """Load the newest undamaged checkpoint up to step `up_to`. Returns (step, seconds trained)."""
    state, tensors = checkpoint.load_checkpoint(folder, True, up_to)
    load_weights(model, {name: tensor for name, tensor in tensors.items() if '/' not in name}, folder)
    on_device = {p for group in optimizer.param_groups if group.get('fused') or group.get('capturable')
                 for p in group['params']}  # with their step counts
    params, groups = dict(model.named_parameters()), {}  # the owners of values, by their names in the checkpoint
    for i, group in enumerate(optimizer.param_groups):
        checkpoint.made_with(group)  # remembers it before it changes here
        groups[f'group {i}'] = group
    try:
        for name, tensor in tensors.items():
            key, is_moment, owner = name.partition('/')
            if owner in groups:
                groups[owner][key] = tensor.to(groups[owner]['params'][0].device)
            elif is_moment and key == 'step' and params[owner] not in on_device:  # on the CPU, as in load_state_dict
                optimizer.state[params[owner]][key] = tensor
            elif is_moment:
                optimizer.state[params[owner]][key] = shard_like(tensor, params[owner])
        for owner, rest in state['optimizer'].items():
            (groups[owner] if owner in groups else optimizer.state[params[owner]]).update(rest)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the optimizer's state in {folder} does not fit this model ({first_line(error)})")
    return state['step'], state['seconds']


def load_initial_weights(s, model: torch.nn.Module, idx: torch.Tensor) -> None:
    """Load the weights of s.init_from, unless the run continues from a checkpoint.

    If the model's `adopt` adds new weights, check on idx (B, T) that the logits are unchanged.
    """
    if s.extend or s.resume and checkpoint.checkpoints(s.out_dir):
        return
    source = s.init_from
    state, tensors = checkpoint.load_checkpoint(source)
    try:
        converted = model.adopt(tensors) if hasattr(model, 'adopt') else tensors
    except ValueError as error:
        raise UserError(f'{source} does not fit this model: {error}')
    load_weights(model, converted, source)
    print(f'loaded the weights of {source}, step {state["step"]}')
    if new := sorted(converted.keys() - tensors.keys()):
        original, _ = load_run(source, idx.device, code=None if s.resume else s.code)
        if next(model.parameters()).is_meta:  # with FSDP, rank 0 has the weights and compares
            return
        with torch.no_grad():
            want, have = (m.eval().logits(idx)[..., :model.config.n_ids] for m in (original, model))
        model.train()
        worst = (have - want).abs().max().item()
        if not worst < 1e-4:
            raise UserError(f'{source} cannot be converted to this model: its logits change by {worst:.1e} before any '
                            'training. Settings unrelated to the new weights (window, mask_documents, n_head) must '
                            "match the source's and be supported by this model")
        print(f'converted {source}: {", ".join(new)} are new weights; at step 0 the logits differ by at most '
              f'{worst:.1e}')


def load_weights(model: torch.nn.Module, tensors: dict, source) -> None:
    """Copy named tensors into the model's parameters and buffers. UserError on a mismatch."""
    own = checkpoint.checkpoint_tensors(model)
    for name in own | tensors:
        have, want = (tuple(some[name].shape) if name in some else 'missing' for some in (tensors, own))
        if have != want:
            raise UserError(f'{source} does not fit this model: {name} has shape {have}, expected {want}')
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(shard_like(tensor, own[name]))
