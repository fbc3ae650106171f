"""The settings of a training run, checked: of a new one, and of one that goes on from another.

`read_settings` reads train.py's command line. With --resume or --eval_only what is not given is the run's, with
--extend that of the run that is made longer; with --init_from what is not given of the model is that of the run whose
weights it starts from. A run that goes on refuses other values than it began with, but for `MAY_CHANGE`. `model_config`
makes the model's Config, `check_settings` stops what would fail later.
"""
import importlib.util
from dataclasses import asdict, fields, replace
from pathlib import Path

from common import parallel, runs
from common.files import UserError
from common.settings import load_settings, saved_settings
from data import has_data
from data.tokenizers import load_tokenizer, padded_vocab

MAY_CHANGE = {  # on --resume; the last line has settings of models, which change memory and time alone
    'resume', 'overwrite', 'eval_only', 'dry_run', 'memory', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'matmul', 'attention', 'compile', 'parallel', 'shard', 'threads', 'make_data',
    'assumed_ids',
    'data',  # where it lies: what it holds is compared by its checksum
    'scan', 'segment_len', 'chunk_len', 'checkpoint_blocks', 'checkpoint_unrolls'}


def read_settings(Settings: type, argv: list[str]) -> tuple:
    """(settings, {name: value} of the model's Config, record of the run that goes on or is evaluated, or None).

    The values are those that are given, or taken over from --init_from. Settings: the dataclass of train.py's.
    """
    argv = with_model_of_run(argv)
    s, positional, given = load_settings(Settings, argv, lambda name: runs.model_file(name).Config)
    if s.out_dir is None:
        s.out_dir = f'out/{Path(positional[0]).stem}' if positional else f'out/{s.model}'
    record = None
    if is_extension(s):
        s, record = extended_settings(s, given)
    elif s.resume or (s.eval_only and not s.init_from):
        s, record = resumed_settings(s, given)
    elif s.init_from:
        s, given = with_model_of_source(s, given)
    own = {f.name for f in fields(Settings)}
    return s, {k: v for k, v in given.items() if k not in own}, record


def resumed_settings(s, given: dict) -> tuple:
    """(settings of the run in s.out_dir, which goes on or is evaluated, with what is given; that run's record)."""
    record = runs.read_run(s.out_dir)
    if s.dtype == 'auto':
        given.pop('dtype', None)  # the run recorded what auto was
    saved = saved_settings(type(s), record['settings'], f'{s.out_dir}/config.json')
    own = {f.name for f in fields(s)}
    of_model = {name: value for name, value in given.items() if name not in own or name in ('model', 'documents')}
    check_unchanged(s.out_dir, {**asdict(saved), **asdict(runs.saved_config(record, s.out_dir))},
                    given if s.resume else of_model)
    asked = {name: value for name, value in given.items() if name in own}
    s = replace(saved, **{**asked, 'out_dir': s.out_dir})
    if not s.data:
        raise UserError(f'the run in {s.out_dir} has no data of its own: give --data=FOLDER')
    return s, record


def with_model_of_source(s, given: dict) -> tuple:
    """(settings, given) of a run that starts from the weights of s.init_from, with its model's settings where none are
    given."""
    if is_new(s) and Path(s.out_dir).resolve() == Path(s.init_from).resolve():
        raise UserError(f'--init_from={s.init_from} is the source of the weights: give a new folder, --out_dir=NEW')
    source = runs.read_run(s.init_from)
    values = asdict(runs.saved_config(source, s.init_from))
    if source['model'] != s.model:  # what both have; in SPS a window is that of the predict stream
        known = {f.name for f in fields(runs.model_file(s.model).Config)}
        known -= {'window'} if 'sps' in (source['model'], s.model) else set()
        values = {k: v for k, v in values.items() if k in known}
    if 'documents' not in given and 'eos_id' in values:
        s = replace(s, documents=values['eos_id'] is not None)
    return s, {k: v for k, v in values.items() if k not in ('n_ids', 'eos_id')} | given


def extended_settings(s, given: dict) -> tuple:
    """(settings of a run that makes the run s.extend longer, that run's record)."""
    record = runs.read_run(s.extend)
    saved = saved_settings(type(s), record['settings'], f'{s.extend}/config.json')
    if saved.schedule == 'cosine':
        raise UserError(f'{s.extend} has schedule = cosine, whose learning rates depend on max_tokens from the start, '
                        'so it cannot be made longer: train anew with more max_tokens, or use wsd or constant')
    if 'out_dir' not in given or Path(s.out_dir).resolve() == Path(s.extend).resolve():
        raise UserError(f'--extend={s.extend} leaves that run as it is: give a new folder, --out_dir=NEW')
    if s.max_tokens <= saved.max_tokens or 'max_tokens' not in given:
        raise UserError(f'{s.extend} has max_tokens = {saved.max_tokens}: give --max_tokens, more than that')
    if s.init_from and 'init_from' in given:
        raise UserError('--extend and --init_from name two runs to start from: give one')
    if s.dtype == 'auto':
        given.pop('dtype', None)
    known = {**asdict(saved), **asdict(runs.saved_config(record, s.extend))}
    check_unchanged(s.extend, known, {k: v for k, v in given.items() if k not in ('extend', 'max_tokens')})
    own = {f.name for f in fields(s)} - {'overwrite'}
    asked = {name: value for name, value in given.items() if name in own}
    return replace(saved, **{**asked, 'overwrite': s.overwrite}), record


def with_model_of_run(argv):
    """argv; with the model of the run it goes on with or starts from, if it names neither a model nor a config file."""
    options = dict(arg[2:].partition('=')[::2] for arg in argv if arg.startswith('--'))
    options = {name: value for name, value in options.items() if value not in ('None', 'False', 'false')}
    source = options.get('extend') or options.get('init_from')
    if 'resume' in options or 'eval_only' in options and 'init_from' not in options:
        source = options.get('out_dir')
    if source and 'model' not in options and all(arg.startswith('-') for arg in argv):
        return [*argv, f'--model={runs.read_run(source)["model"]}']
    return argv


def check_unchanged(folder, saved, given):
    """Raises UserError if a saved run is given other settings than it was started with, but for MAY_CHANGE."""
    # model first: another has other settings
    for name in sorted(given.keys() - MAY_CHANGE, key=lambda name: (name != 'model', name)):
        if name not in saved:
            raise UserError(f'the run in {folder} has model = {saved["model"]!r}, which has no setting {name!r}: leave '
                            f'{name} out (a saved run needs no config file either)')
        if saved[name] != given[name]:
            other = 'start another with another --out_dir'
            if name == 'max_tokens' and saved['schedule'] != 'cosine' and saved[name] < given[name]:
                other = f'make it longer with --extend={folder} --max_tokens={given[name]} --out_dir=NEW'
            raise UserError(f'the run in {folder} has {name} = {saved[name]!r}, but {given[name]!r} is asked for: '
                            f'leave {name} out (a saved run needs no config file either), or {other}')


def is_new(s) -> bool:
    """Whether a run folder is to be made."""
    return not (s.resume or s.eval_only)


def is_extension(s) -> bool:
    """Whether this is the start of a longer run of s.extend."""
    return bool(s.extend) and is_new(s)


def run_of(s) -> str:
    """The run folder that the settings are those of."""
    return s.extend if is_extension(s) else s.out_dir


def check_settings(s, data, world):
    """Raises UserError for what would fail later."""
    if s.schedule not in ('wsd', 'cosine', 'constant'):
        raise UserError(f"schedule is {s.schedule!r}: expected 'wsd', 'cosine' or 'constant'")
    if s.optimizer not in ('adamw', 'muon'):
        raise UserError(f"optimizer is {s.optimizer!r}: expected 'adamw' or 'muon'")
    if s.optimizer == 'muon' and s.parallel == 'fsdp':
        raise UserError('optimizer = muon needs whole matrices, of which each process has a part with parallel = fsdp: '
                        'use --parallel=ddp or --optimizer=adamw')
    if s.sample_tokens and not s.eval_only and has_data(s.data):
        load_tokenizer(data.tokenizer)  # now, not after the training
    parallel.check_sharding(s.parallel, s.shard, world)
    if s.batch_size < world and not s.eval_only:
        raise UserError(f'batch_size is {s.batch_size}, fewer sequences than the {world} processes: each needs one')
    if s.parallel == 'fsdp' and s.micro_batch_size == 1 and s.batch_size % world and not s.eval_only:
        raise UserError(f'batch_size = {s.batch_size} gives some of the {world} processes one sequence more than '
                        'others, and with parallel = fsdp and micro_batch_size = 1 one micro-batch more, for which the '
                        f'others would wait: use --micro_batch_size=2, or a batch_size that {world} divides')
    if s.memory is not None and not s.dry_run:
        raise UserError(f'--memory={s.memory:g} asks whether a step would fit: add --dry_run, or leave it out to train')
    if s.acceptance_prompts and hasattr(data, 'score'):
        raise UserError(f'acceptance_prompts = {s.acceptance_prompts} continues text, {data.folder} is a task: use 0')
    if s.wandb_project and not s.eval_only and importlib.util.find_spec('wandb') is None:
        raise UserError(f'wandb_project is {s.wandb_project!r}, but wandb is not installed: pip install wandb, or use '
                        '--wandb_project=None')
    for split in ('train', 'val'):
        if data.n_windows(split, s.block_size) < 1:
            raise UserError(f'{data.folder} has {data.splits[split]["tokens"]} {split} tokens, too few for windows of '
                            f'block_size = {s.block_size}: use a smaller block_size or more data')


def model_config(s, given, data, record):
    """The model's Config: the saved one, or the user's values with the vocabulary of the data."""
    if record:
        runs.check_vocabulary(record, data, run_of(s))
        if not s.eval_only and record['data']['sha256'] != data.sha256:
            raise UserError(f'{data.folder} is not the data that the run in {run_of(s)} was trained on (its checksums '
                            'differ): bring that data back, or start another run with --init_from')
        changed = {name: value for name, value in given.items() if name in MAY_CHANGE}
        return runs.saved_config({**record, 'model_config': {**record['model_config'], **changed}}, run_of(s))
    if s.init_from:
        runs.check_vocabulary(runs.read_run(s.init_from), data, s.init_from)
    if given.get('n_ids', data.n_ids) != data.n_ids:
        raise UserError(f'n_ids is {given["n_ids"]}, but the tokenizer of {data.folder} has {data.n_ids} ids: leave '
                        'n_ids out')
    eos_id = data.eos_id if s.documents else None
    vocabulary = {'vocab_size': padded_vocab(data.n_ids), 'n_ids': data.n_ids, 'eos_id': eos_id}
    names_of_both = [f.name for f in fields(runs.model_file(s.model).Config) if hasattr(s, f.name)]  # as block_size
    return runs.make_config(s.model, {**vocabulary, **{name: getattr(s, name) for name in names_of_both}, **given})
