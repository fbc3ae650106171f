"""The settings of a training run: a new one, or one that takes over another run's settings.

`read_settings` reads train.py's command line. With --resume and --eval_only, settings that are not given are those of
the run in out_dir; with --extend, those of the run that is extended; with --init_from, the model's settings are those
of the run whose weights are loaded. A resumed or extended run refuses changed settings, except `MAY_CHANGE`.
`model_config` makes the model's Config, `check_settings` and `describe` find problems that would otherwise come up
later, and `initial_weights` and `restore` load what the run starts from.
"""
import importlib.util
import math
import shlex
from dataclasses import asdict, fields, replace
from pathlib import Path

from common import checkpoint, parallel, runs
from common.files import UserError
from common.machine import torchrun_ranks
from common.settings import load_settings, make_settings
from data.tokenizers import load_tokenizer, padded_vocab

MAY_CHANGE = {  # on --resume; the last line has settings of models that only change memory and speed
    'resume', 'overwrite', 'eval_only', 'dry_run', 'memory', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'compile', 'parallel', 'shard', 'threads', 'make_data', 'assumed_ids',
    'data',  # its folder; the content is compared by its checksum
    'attention', 'scan', 'segment_len', 'chunk_len', 'checkpoint_blocks', 'checkpoint_unrolls'}


def read_settings(Settings: type, argv: list[str]) -> tuple:
    """Return (settings, {name: value} for the model's Config, config.json of the run that is continued, or None).

    The values are given by the user or taken from --init_from. Settings: train.py's dataclass.
    """
    argv = with_model_of_run(argv)
    s, positional, given = load_settings(Settings, argv, lambda name: runs.model_file(name).Config)
    if s.out_dir is None:
        s.out_dir = f'out/{Path(positional[0]).stem}' if positional else f'out/{s.model}'
    record = None
    if is_extension(s) or s.resume or s.eval_only and not s.init_from:
        s, record = continued_settings(s, given)
    elif s.init_from:
        s, given = with_model_of_source(s, given)
    own = {f.name for f in fields(Settings)}
    return s, {k: v for k, v in given.items() if k not in own}, record


def continued_settings(s, given: dict) -> tuple:
    """Return (settings of the run that is resumed, evaluated or extended, updated with `given`; its record)."""
    folder = run_of(s)
    record = runs.read_run(folder)
    saved = make_settings(type(s), record['settings'], f'in {folder}/config.json')
    may_change = MAY_CHANGE
    if is_extension(s):
        check_extension(s, saved, given)
        may_change = MAY_CHANGE | {'extend', 'max_tokens'}
    if s.dtype == 'auto':
        given.pop('dtype', None)  # the run has recorded the dtype that auto stood for
    own = {f.name for f in fields(s)}
    if s.eval_only and not s.resume:
        may_change = MAY_CHANGE | own - {'model', 'documents'}
    known = asdict(saved) | asdict(runs.saved_config(record, folder))
    check_unchanged(folder, known, {name: value for name, value in given.items() if name not in may_change})
    asked = {name: value for name, value in given.items() if name in own}
    s = replace(saved, **{**asked, 'out_dir': s.out_dir, 'overwrite': s.overwrite})
    return s, record


def check_extension(s, saved, given: dict) -> None:
    """Raise UserError unless the run s.extend, whose settings are `saved`, can be made longer as asked."""
    if saved.schedule == 'cosine':
        raise UserError(f'{s.extend} has schedule = cosine, whose learning rates depend on max_tokens from the start, '
                        'so it cannot be made longer: train anew with more max_tokens, or use wsd or constant')
    if 'out_dir' not in given or Path(s.out_dir).resolve() == Path(s.extend).resolve():
        raise UserError(f'--extend={s.extend} leaves that run as it is: give a new folder, --out_dir=NEW')
    if s.max_tokens <= saved.max_tokens or 'max_tokens' not in given:
        raise UserError(f'{s.extend} has max_tokens = {saved.max_tokens}: give --max_tokens, more than that')


def with_model_of_source(s, given: dict) -> tuple:
    """Return (settings, given), with the settings of the model in s.init_from where the user gave none."""
    if is_new(s) and Path(s.out_dir).resolve() == Path(s.init_from).resolve():
        raise UserError(f'--init_from={s.init_from} is the source of the weights: give a new folder, --out_dir=NEW')
    source = runs.read_run(s.init_from)
    values = asdict(runs.saved_config(source, s.init_from))
    if source['model'] != s.model:  # only common settings; SPS's window is that of its predict stream
        known = {f.name for f in fields(runs.model_file(s.model).Config)}
        known -= {'window'} if 'sps' in (source['model'], s.model) else set()
        values = {k: v for k, v in values.items() if k in known}
    if 'documents' not in given and 'eos_id' in values:
        s = replace(s, documents=values['eos_id'] is not None)
    return s, {k: v for k, v in values.items() if k not in ('n_ids', 'eos_id')} | given


def with_model_of_run(argv):
    """Return argv, with --model of the run that is continued, unless argv names a model or a config file."""
    options = dict(arg[2:].partition('=')[::2] for arg in argv if arg.startswith('--'))
    options = {name: value for name, value in options.items() if value not in ('None', 'False', 'false')}
    source = options.get('extend') or options.get('init_from')
    if 'resume' in options or 'eval_only' in options and 'init_from' not in options:
        source = options.get('out_dir')
    if source and 'model' not in options and all(arg.startswith('-') for arg in argv):
        return [*argv, f'--model={runs.read_run(source)["model"]}']
    return argv


def check_unchanged(folder, saved: dict, given: dict) -> None:
    """Raise UserError if settings given for a saved run differ from its own."""
    for name in sorted(given, key=lambda name: (name != 'model', name)):  # another model has other settings
        if name not in saved:
            raise UserError(f'the run in {folder} has model = {saved["model"]!r}, which has no setting {name!r}: leave '
                            f'{name} out (a saved run needs no config file either)')
        if saved[name] != given[name]:
            other = 'start another run with another --out_dir'
            if name == 'max_tokens' and saved['schedule'] != 'cosine' and saved[name] < given[name]:
                other = f'make it longer with --extend={folder} --max_tokens={given[name]} --out_dir=NEW'
            raise UserError(f'the run in {folder} has {name} = {saved[name]!r}, but {given[name]!r} is asked for: '
                            f'leave {name} out (a saved run needs no config file either), or {other}')


def initial_weights(s, record) -> tuple:
    """Return the weights of another run to start from: (run folder, step, tensors), or (None, 0, None).

    None also for a run that is resumed or extended: `restore` loads its weights and its optimizer's state.
    """
    source = s.init_from
    if record and s.eval_only:
        source = s.out_dir
    elif s.extend or record and checkpoint.checkpoints(s.out_dir):
        source = None
    if not source:
        return None, 0, None
    state, files = checkpoint.load_checkpoint(source, ('model.safetensors',))
    return source, state['step'], files['model.safetensors']


def restore(s, record, model, optimizer) -> tuple[int, float]:
    """Load the checkpoint that a run continues from. Returns (step, seconds of training so far); (0, 0.0) for none.

    record: config.json of the run that is continued, None for a new run.
    """
    if not record:
        return 0, 0.0
    if not is_extension(s):
        if s.extend and not checkpoint.checkpoints(s.out_dir):
            raise UserError(f'{s.out_dir} was stopped before it had the weights of {s.extend}: start it again, with '
                            f'--extend={s.extend} --max_tokens={s.max_tokens} --overwrite instead of --resume')
        return checkpoint.restore_training(s.out_dir, model, optimizer)
    up_to = last_before_decay(make_settings(type(s), record['settings'], f'in {s.extend}/config.json'))
    if not checkpoint.checkpoints(s.extend, up_to):
        before = '' if up_to is None else f' from before its decay, which begins after step {up_to}'
        raise UserError(f'{s.extend} has no checkpoint{before}, so it cannot be made longer: train a new run with more '
                        'max_tokens')
    return checkpoint.restore_training(s.extend, model, optimizer, up_to)


def last_before_decay(s) -> int | None:
    """Return the last step of wsd's constant phase, whose checkpoint is kept for --extend; None for other schedules."""
    tokens_per_step = s.batch_size * s.block_size
    return int(s.max_tokens * (1 - s.decay_fraction) // tokens_per_step) if s.schedule == 'wsd' else None


def n_steps(s) -> int:
    return math.ceil(s.max_tokens / (s.batch_size * s.block_size))


def describe(s, model, data) -> None:
    """Print the size and cost of a run. Raises UserError for settings that do not suit the model."""
    if s.acceptance_prompts and not getattr(model, 'longest_draft', 0):
        raise UserError(f'acceptance_prompts = {s.acceptance_prompts} measures drafting, but this model ({s.model}) '
                        'cannot draft for itself: use 0')
    try:
        flops = model.flops_per_token(s.block_size) if hasattr(model, 'flops_per_token') else None
    except ValueError as error:  # block_size does not suit the model
        raise UserError(str(error))
    tokens = data.splits['train']['tokens']
    amount = f'{tokens:,} training tokens, {s.max_tokens / tokens:.2f} epochs' if tokens else 'unlimited generated rows'
    print(f'model {s.model}: {runs.count_parameters(model):,} parameters, vocabulary {data.n_ids} ({data.tokenizer})\n'
          f'data {data.folder}: {amount}\n'
          f'{n_steps(s):,} steps of {s.batch_size} x {s.block_size} = {s.batch_size * s.block_size:,} tokens'
          + (f', {flops / 1e6:,.1f} MFLOP per token' if flops else ''))
    constant_until = s.max_tokens * (1 - s.decay_fraction * (s.schedule == 'wsd'))
    if s.warmup_tokens > constant_until and not s.eval_only:
        print(f'learning_rate = {s.learning_rate:g} is never reached: the warm-up takes {s.warmup_tokens:,} tokens, '
              f'and the decay begins, or the run ends, after {constant_until:,.0f}')


def is_new(s) -> bool:
    """Return True if a new run folder is made."""
    return not (s.resume or s.eval_only)


def is_extension(s) -> bool:
    """Return True if a run that extends s.extend starts now."""
    return bool(s.extend) and is_new(s)


def run_of(s) -> str:
    """Return the folder of the run that is continued."""
    return s.extend if is_extension(s) else s.out_dir


def resume_command(argv: list[str], world: int, out_dir: str) -> str:
    """Return the command that continues a run, from the arguments of the one that started it."""
    args = [a for a in argv if a not in ('--resume', '--overwrite') and not a.startswith('--extend=')]
    if not any(a.startswith('--out_dir=') for a in args):
        args.append(f'--out_dir={out_dir}')
    here = torchrun_ranks()[-1]  # processes on this machine
    start = f'torchrun --nproc_per_node={here}' if world > 1 else 'python'
    if world > here:
        start = f'torchrun --nnodes={world // here} --nproc_per_node={here} ...'
    return f'{start} {shlex.join(["train.py", *args, "--resume"])}'


def check_settings(s, data, world):
    """Raise UserError for settings that would fail later."""
    if s.optimizer == 'muon' and s.parallel == 'fsdp':
        raise UserError('optimizer = muon needs whole matrices, but with parallel = fsdp each process has a part: use '
                        '--parallel=ddp or --optimizer=adamw')
    if s.sample_tokens and not s.eval_only and not s.dry_run:
        load_tokenizer(data.tokenizer)  # fails now, not after training
    parallel.check_sharding(s.parallel, s.shard, world)
    if s.batch_size < world and not s.eval_only:
        raise UserError(f'batch_size is {s.batch_size}, fewer sequences than the {world} processes: each needs one')
    if s.parallel == 'fsdp' and s.micro_batch_size == 1 and s.batch_size % world and not s.eval_only:
        raise UserError(f'batch_size = {s.batch_size} gives some of the {world} processes one sequence and, with '
                        'micro_batch_size = 1, one micro-batch more than others, which parallel = fsdp does not allow: '
                        f'use --micro_batch_size=2, or a batch_size that is a multiple of {world}')
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
    """Return the model's Config: the saved one, or the user's values with the vocabulary of the data."""
    if record:
        runs.check_vocabulary(record, data, run_of(s))
        if not s.eval_only and record['data']['sha256'] != data.sha256:
            raise UserError(f'{data.folder} is not the data that the run in {run_of(s)} was trained on (its checksums '
                            'differ): restore that data, or start another run with --init_from')
        changed = {name: value for name, value in given.items() if name in MAY_CHANGE}
        return runs.saved_config({**record, 'model_config': {**record['model_config'], **changed}}, run_of(s))
    if s.init_from:
        runs.check_vocabulary(runs.read_run(s.init_from), data, s.init_from)
    if given.get('n_ids', data.n_ids) != data.n_ids:
        raise UserError(f'n_ids is {given["n_ids"]}, but the tokenizer of {data.folder} has {data.n_ids} ids: leave '
                        'n_ids out')
    eos_id = data.eos_id if s.documents else None
    vocabulary = {'vocab_size': padded_vocab(data.n_ids), 'n_ids': data.n_ids, 'eos_id': eos_id}
    names_of_both = [f.name for f in fields(runs.model_file(s.model).Config) if hasattr(s, f.name)]  # e.g. block_size
    return runs.make_config(s.model, {**vocabulary, **{name: getattr(s, name) for name in names_of_both}, **given})
