"""Settings of a training run: reading them, checking them, and describing what they cost.

train.py calls `read_settings` and `training_data`; with the data, `model_config` and
`check_settings`; with the model, `describe`. A run that takes over another's settings gets them
from lm_architectures/run/continuing.py.
"""
from dataclasses import fields
from pathlib import Path

from lm_architectures.data import MissingData, open_data
from lm_architectures.data.text.tokenizers import load_tokenizer, padded_vocab
from lm_architectures.files import UserError, command
from lm_architectures.machine.devices import ranks
from lm_architectures.run import folders, models
from lm_architectures.settings import load_settings, options_of


def read_settings(Settings: type, argv: list[str]) -> tuple:
    """Return (settings, {name: value} for the model's Config, config.json of the run to continue).

    What the user does not give comes from the run that is continued or given as --init_from. That
    run also says which model it is, if the user names no model and no config file. Settings:
    train.py's dataclass.
    """
    options = {name: text for name, text in options_of(argv).items() if text not in ('None', 'False', 'false')}
    continued = options.get('out_dir' if 'resume' in options else 'extend')
    source, has_file = continued or options.get('init_from'), not all(arg.startswith('-') for arg in argv)
    if isinstance(source, str) and 'model' not in options and not has_file:
        argv = [*argv, f'--model={folders.read_run(source)["model"]}']
    code = continued if isinstance(continued, str) and options.get('code') == 'run' else None
    s, positional, given = load_settings(Settings, argv, lambda model: config_class(model, code))
    s.model = models.given_model(s.model)
    given |= {'model': s.model} if 'model' in given else {}
    if s.out_dir is None:
        s.out_dir = f'out/{Path(positional[0]).stem}' if positional else f'out/{s.model}'
    record = None
    if s.extend or s.resume:
        from lm_architectures.run.continuing import continued_settings
        s, given, record = continued_settings(s, given)
    elif s.init_from:  # perhaps from a config file
        from lm_architectures.run.continuing import inherit_model_settings
        s, given = inherit_model_settings(s, given)
    own = {f.name for f in fields(Settings)}
    return s, {name: value for name, value in given.items() if name not in own}, record


def config_class(model: str, code: str | None = None) -> type:
    """Return the Config of a model that the user gave by name or path. code: see `model_file`."""
    return models.model_file(models.given_model(model), code).Config


def code_folder(s) -> str | None:
    """Return the run whose copy of the code is trained, or None. Not s.init_from, the source."""
    return (s.out_dir if s.resume else s.extend) if s.code else None


def training_data(s, record):
    """Open the data of a run. UserError if there are none."""
    try:
        data = open_data(s.data)
    except MissingData as error:
        from lm_architectures.run.missing_data import assumed_data
        raise UserError(f'{error}{assumed_data(s, record).hint}')
    if s.verify:
        data.verify()
    return data


def model_config(s, given, data, record):
    """Return the model's Config: `given`, and the data's vocabulary. UserError if they do not fit.

    given, record: see `read_settings`.
    """
    source = s.out_dir if s.resume else s.extend or s.init_from
    if source:
        folders.check_vocabulary(record or folders.read_run(source), data, source)
    if record and record['data']['sha256'] != data.sha256:
        raise UserError(f'{data.folder} is not the data that the run in {source} was trained on (checksums '
                        'differ): restore that data, or start a new run with --init_from')
    if given.get('n_ids', data.n_ids) != data.n_ids:
        raise UserError(f'n_ids is {given["n_ids"]}, but the tokenizer of {data.folder} has {data.n_ids} ids: leave '
                        'out n_ids')
    eos_id = data.eos_id if s.mask_documents else None
    vocabulary = {'vocab_size': padded_vocab(data.n_ids), 'n_ids': data.n_ids, 'eos_id': eos_id}
    Config = models.model_file(s.model, code_folder(s)).Config
    shared = {name: getattr(s, name) for name in getattr(Config, 'shared', ()) if hasattr(s, name)}
    if clash := {f.name for f in fields(Config)} & {f.name for f in fields(s)} - shared.keys():
        raise UserError(f'the Config of model {s.model!r} has {min(clash)}, which is a setting of train.py: rename it, '
                        'or list it in Config.shared to get the value of that setting')
    return models.make_config(s.model, vocabulary | shared | given, code_folder(s))


def describe(s, model, data) -> None:
    """Print the size and cost of a run. UserError for settings that do not fit the model."""
    if s.acceptance_prompts and not getattr(model, 'longest_draft', 0):
        raise UserError(f'acceptance_prompts = {s.acceptance_prompts} measures drafting, but this model ({s.model}) '
                        'cannot draft for itself: use 0')
    flops = model.flops_per_token(s.block_size) if hasattr(model, 'flops_per_token') else None
    tokens = data.splits['train']['tokens']
    amount = f'{tokens:,} training tokens, {s.max_tokens / tokens:.2f} epochs' if tokens else 'unlimited generated rows'
    n_parameters = models.count_parameters(model)
    print(f'model {s.model}: {n_parameters:,} parameters, vocabulary {data.n_ids} ({data.tokenizer})\n'
          f'data {data.folder}: {amount}\n'
          f'{s.n_steps:,} steps of {s.batch_size} x {s.block_size} = {s.tokens_per_step:,} tokens'
          + (f', {flops / 1e6:,.1f} MFLOP per token' if flops else ''))
    constant_until = s.max_tokens * (1 - s.decay_fraction * (s.schedule == 'wsd'))
    if s.warmup_tokens > constant_until:
        print(f'learning_rate = {s.learning_rate:g} is never reached: the warm-up takes {s.warmup_tokens:,} tokens, '
              f'but the decay begins, or the run ends, after {constant_until:,.0f}')


def resume_command(argv: list[str], world: int, out_dir: str) -> str:
    """Return the command that continues a run, from the arguments that started it."""
    args = [a for a in argv if a not in ('--resume', '--overwrite') and not a.startswith('--extend=')]
    if not any(a.startswith('--out_dir=') for a in args):
        args.append(f'--out_dir={out_dir}')
    here = ranks()[-1]  # processes per machine
    start = f'torchrun --nnodes={world // here} --nproc_per_node={here}' if world > 1 else 'python'
    return start + command('train.py', *args, '--resume').removeprefix('python')


def check_settings(s, data, world) -> None:
    """Raise UserError for settings that would fail later. world: the number of processes."""
    for wrong, sentence in (
            (s.code and not (s.resume or s.extend or s.init_from),
             'code = run uses the code that is stored in a run: add --resume, --extend or --init_from'),
            (s.resume and s.overwrite, 'resume and overwrite exclude each other: give one of them'),
            (s.optimizer == 'muon' and s.parallel == 'fsdp',
             'optimizer = muon needs full matrices, but parallel = fsdp shards them: use '
             '--parallel=ddp or --optimizer=adamw'),
            (s.shard and s.parallel == 'ddp',
             f'shard is {s.shard}, but parallel = ddp does not shard weights: use --parallel=fsdp'),
            (s.shard and world > 1 and world % s.shard,
             f'shard is {s.shard}: expected a divisor of the {world} processes, such as the '
             'number of GPUs per machine'),
            (s.batch_size < world,
             f'batch_size is {s.batch_size}: each of the {world} processes needs at least one sequence'),
            (s.parallel == 'fsdp' and s.batch_size % world,
             f'batch_size is {s.batch_size}: parallel = fsdp needs a multiple of the number of processes, {world}'),
            (s.acceptance_prompts and hasattr(data, 'score'),
             f'acceptance_prompts = {s.acceptance_prompts} needs text, but {data.folder} is a task: use 0')):
        if wrong:
            raise UserError(sentence)
    check_windows(data, s.block_size)
    if s.sample_tokens and not s.dry_run:
        load_tokenizer(data.tokenizer)  # fail now, not after training


def check_windows(data, block_size: int) -> None:
    """Raise UserError if a split is too short for windows of block_size tokens."""
    for split in ('train', 'val'):
        if data.n_rows(split, block_size) < 1:
            needed = 2 * block_size if split == 'train' else block_size + 1
            raise UserError(f'{data.folder} has {data.splits[split]["tokens"]} {split} tokens, too few for a window of '
                            f'block_size = {block_size}, which needs {needed}: use a smaller block_size or more data')
