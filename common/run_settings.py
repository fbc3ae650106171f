"""The settings of a training run: a new one, or one that takes over another run's settings.

`read_settings` reads train.py's command line. With --resume, settings that are not given are those of the run in
out_dir; with --extend, those of the run that is extended; with --init_from, the model's settings are those of the run
whose weights are loaded. A resumed or extended run refuses changed settings, except `MAY_CHANGE`.
"""
import importlib.util
import math
import shlex
from dataclasses import asdict, fields, replace
from pathlib import Path

from common import checkpoint, runs
from common.files import UserError
from common.machine import torchrun_ranks
from common.settings import load_settings, make_settings
from data.tokenizers import load_tokenizer, padded_vocab

MAY_CHANGE = {  # on --resume; the last line has settings of models that only change memory and speed
    'resume', 'overwrite', 'dry_run', 'memory', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'compile', 'parallel', 'shard', 'threads', 'make_data', 'assumed_ids',
    'data',  # its folder; the content is compared by its checksum
    'attention', 'scan', 'segment_len', 'chunk_len', 'checkpoint_blocks', 'checkpoint_unrolls'}


def read_settings(Settings: type, argv: list[str]) -> tuple:
    """Return (settings, {name: value} for the model's Config, config.json of the run that is continued, or None).

    The values are given by the user or taken from --init_from. Settings: train.py's dataclass.
    """
    s, positional, given = load_settings(Settings, with_model_of_run(argv), lambda name: runs.model_file(name).Config)
    if s.out_dir is None:
        s.out_dir = f'out/{Path(positional[0]).stem}' if positional else f'out/{s.model}'
    record = None
    if s.extend or s.resume:
        s, record = continued_settings(s, given)
    elif s.init_from:
        s, given = with_model_of_source(s, given)
    own = {f.name for f in fields(Settings)}
    return s, {name: value for name, value in given.items() if name not in own}, record


def with_model_of_run(argv: list[str]) -> list[str]:
    """Return argv, with --model of the run that is continued, unless argv names a model or a config file."""
    options = dict(arg[2:].partition('=')[::2] for arg in argv if arg.startswith('--'))
    options = {name: value for name, value in options.items() if value not in ('None', 'False', 'false')}
    source = options.get('extend') or options.get('init_from')
    if 'resume' in options:
        source = options.get('out_dir')
    if source and 'model' not in options and all(arg.startswith('-') for arg in argv):
        return [*argv, f'--model={runs.read_run(source)["model"]}']
    return argv


def continued_settings(s, given: dict) -> tuple:
    """Return (settings of the run that is resumed or extended, updated with `given`; its record)."""
    folder = s.out_dir if s.resume else s.extend
    record = runs.read_run(folder)
    saved = make_settings(type(s), record['settings'], f'in {folder}/config.json')
    may_change = MAY_CHANGE
    if not s.resume:
        check_extension(s, saved, given)
        may_change = MAY_CHANGE | {'extend', 'max_tokens'}
    if s.dtype == 'auto':
        given.pop('dtype', None)  # the run has recorded the dtype that auto stood for
    known = asdict(saved) | asdict(runs.saved_config(record, folder))
    check_unchanged(folder, known, {name: value for name, value in given.items() if name not in may_change})
    own = {f.name for f in fields(s)}
    return replace(saved, **{name: given[name] for name in given if name in own} | {'out_dir': s.out_dir}), record


def check_extension(s, saved, given: dict) -> None:
    """Raise UserError unless the run s.extend, whose settings are `saved`, can be made longer as asked."""
    if saved.schedule == 'cosine':
        raise UserError(f'{s.extend} has schedule = cosine, whose learning rates depend on max_tokens from the start, '
                        'so it cannot be made longer: train a new run, or use wsd or constant')
    if 'out_dir' not in given or Path(s.out_dir).resolve() == Path(s.extend).resolve():
        raise UserError(f'--extend={s.extend} leaves that run as it is: give a new folder, --out_dir=NEW')
    if s.max_tokens <= saved.max_tokens or 'max_tokens' not in given:
        raise UserError(f'{s.extend} has max_tokens = {saved.max_tokens}: give --max_tokens, more than that')


def check_unchanged(folder, saved: dict, given: dict) -> None:
    """Raise UserError if settings given for a saved run differ from its own."""
    for name in sorted(given, key=lambda name: name != 'model'):  # another model has other settings
        if name in saved and saved[name] == given[name]:
            continue
        have = f'{name} = {saved[name]!r}' if name in saved else f'model = {saved["model"]!r}, without {name}'
        other = 'start another run with another --out_dir'
        if name == 'max_tokens' and saved['schedule'] != 'cosine' and saved[name] < given[name]:
            other = f'make it longer with --extend={folder} --max_tokens={given[name]} --out_dir=NEW'
        raise UserError(f'the run in {folder} has {have}, but {given[name]!r} is asked for: leave {name} out (a saved '
                        f'run needs no config file either), or {other}')


def with_model_of_source(s, given: dict) -> tuple:
    """Return (settings, given), with the settings of the model in s.init_from where the user gave none."""
    if Path(s.out_dir).resolve() == Path(s.init_from).resolve():
        raise UserError(f'--init_from={s.init_from} is the source of the weights: give a new folder, --out_dir=NEW')
    source = runs.read_run(s.init_from)
    values = asdict(runs.saved_config(source, s.init_from))
    if source['model'] != s.model:  # only common settings; SPS's window is that of its predict stream
        known = {f.name for f in fields(runs.model_file(s.model).Config)}
        known -= {'window'} if 'sps' in (source['model'], s.model) else set()
        values = {name: value for name, value in values.items() if name in known}
    if 'documents' not in given and 'eos_id' in values:
        s = replace(s, documents=values['eos_id'] is not None)
    return s, {name: value for name, value in values.items() if name not in ('n_ids', 'eos_id')} | given


# ---- what a run starts from ----

def model_config(s, given, data, record):
    """Return the model's Config: the saved one, or the user's values with the vocabulary of the data."""
    if record:
        folder = s.out_dir if s.resume else s.extend
        runs.check_vocabulary(record, data, folder)
        if record['data']['sha256'] != data.sha256:
            raise UserError(f'{data.folder} is not the data that the run in {folder} was trained on (its checksums '
                            'differ): restore that data, or start another run with --init_from')
        changed = {name: value for name, value in given.items() if name in MAY_CHANGE}
        return runs.saved_config(record | {'model_config': record['model_config'] | changed}, folder)
    if s.init_from:
        runs.check_vocabulary(runs.read_run(s.init_from), data, s.init_from)
    if given.get('n_ids', data.n_ids) != data.n_ids:
        raise UserError(f'n_ids is {given["n_ids"]}, but the tokenizer of {data.folder} has {data.n_ids} ids: leave '
                        'n_ids out')
    eos_id = data.eos_id if s.documents else None
    vocabulary = {'vocab_size': padded_vocab(data.n_ids), 'n_ids': data.n_ids, 'eos_id': eos_id}
    names_of_both = [f.name for f in fields(runs.model_file(s.model).Config) if hasattr(s, f.name)]  # e.g. block_size
    return runs.make_config(s.model, vocabulary | {name: getattr(s, name) for name in names_of_both} | given)


def initial_weights(s, record) -> tuple:
    """Return the weights of s.init_from: (step, tensors); (0, None) if the run starts from no other's weights alone.

    record: config.json of the run that is continued, None for a new one.
    """
    if not s.init_from or s.extend or record and checkpoint.checkpoints(s.out_dir):
        return 0, None
    state, tensors = checkpoint.load_checkpoint(s.init_from)
    return state['step'], tensors


def extension_starts(s) -> bool:
    """Return True if the run starts from the checkpoint of the run s.extend, because it has none of its own."""
    return bool(s.extend) and not (s.resume and checkpoint.checkpoints(s.out_dir))


def restore(s, record, model, optimizer) -> tuple[int, float]:
    """Load the checkpoint that a run continues from. Returns (step, seconds of training so far); (0, 0.0) for none."""
    if not record:
        return 0, 0.0
    if not extension_starts(s):
        return checkpoint.restore_training(s.out_dir, model, optimizer)
    up_to = last_before_decay(make_settings(type(s), runs.read_run(s.extend)['settings'], f'in {s.extend}/config.json'))
    if not checkpoint.checkpoints(s.extend, up_to):
        before = '' if up_to is None else f' from before its decay, which begins after step {up_to}'
        raise UserError(f'{s.extend} has no checkpoint{before}, so it cannot be made longer: train a new run')
    return checkpoint.restore_training(s.extend, model, optimizer, up_to)


# ---- length, cost and checks ----

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
    if s.warmup_tokens > constant_until:
        print(f'learning_rate = {s.learning_rate:g} is never reached: the warm-up takes {s.warmup_tokens:,} tokens, '
              f'and the decay begins, or the run ends, after {constant_until:,.0f}')


def resume_command(argv: list[str], world: int, out_dir: str) -> str:
    """Return the command that continues a run, from the arguments of the one that started it."""
    args = [a for a in argv if a not in ('--resume', '--overwrite') and not a.startswith('--extend=')]
    if not any(a.startswith('--out_dir=') for a in args):
        args.append(f'--out_dir={out_dir}')
    here = torchrun_ranks()[-1]  # processes on this machine
    start = f'torchrun --nnodes={world // here} --nproc_per_node={here}' if world > 1 else 'python'
    return f'{start} {shlex.join(["train.py", *args, "--resume"])}'


def check_settings(s, data, world) -> None:
    """Raise UserError for settings that would fail later. world: the number of processes."""
    for wrong, sentence in (
            (s.optimizer == 'muon' and s.parallel == 'fsdp',
             'optimizer = muon needs whole matrices, but with parallel = fsdp each process has a part: use '
             '--parallel=ddp or --optimizer=adamw'),
            (s.shard and s.parallel == 'ddp',
             f'shard is {s.shard}, but with parallel = ddp each process has all weights: use --parallel=fsdp'),
            (s.shard and world > 1 and world % s.shard,
             f'shard is {s.shard}, which does not divide the {world} processes: use a divisor, such as the number of '
             'GPUs per machine'),
            (s.batch_size < world,
             f'batch_size is {s.batch_size}, fewer sequences than the {world} processes: each needs one'),
            (s.parallel == 'fsdp' and s.micro_batch_size == 1 and s.batch_size % world,
             f'batch_size = {s.batch_size} with micro_batch_size = 1 gives some of the {world} processes one '
             'micro-batch more than others, which parallel = fsdp does not allow: use --micro_batch_size=2, or a '
             f'batch_size that is a multiple of {world}'),
            (s.acceptance_prompts and hasattr(data, 'score'),
             f'acceptance_prompts = {s.acceptance_prompts} continues text, {data.folder} is a task: use 0'),
            (s.wandb_project and importlib.util.find_spec('wandb') is None,
             f'wandb_project is {s.wandb_project!r}, but wandb is not installed: pip install wandb')):
        if wrong:
            raise UserError(sentence)
    for split in ('train', 'val'):
        if data.n_windows(split, s.block_size) < 1:
            raise UserError(f'{data.folder} has {data.splits[split]["tokens"]} {split} tokens, too few for windows of '
                            f'block_size = {s.block_size}: use a smaller block_size or more data')
    if s.sample_tokens and not s.dry_run:
        load_tokenizer(data.tokenizer)  # fails now, not after training
