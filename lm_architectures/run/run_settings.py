"""Settings of a training run: one dict, merged from a run, a config file and the command line.

    {**saved, **config file, **command line}  ->  train.Settings, and values of the model's Config

`saved` holds all settings of the run to --resume or --extend, or the model settings of --init_from.
train.py calls `read_settings` and `training_data`; with the data, `model_config` and
`check_settings`.
"""
import re
from dataclasses import fields
from pathlib import Path

from lm_architectures.data import open_data
from lm_architectures.data.text.tokenizers import load_tokenizer, padded_vocab
from lm_architectures.files import MissingData, UserError, command
from lm_architectures.machine.parallel import ranks
from lm_architectures.run import models
from lm_architectures.settings import HERE, convert, parse_args, print_help, read_config_file

FIRST = 'model', 'out_dir', 'resume', 'code', 'extend', 'init_from'  # read first: the others follow from them


# ---- merging ----

def read_settings(Settings: type, argv: list[str]) -> tuple:
    """Return (settings, {name: value} for the model's Config, config.json of the run to continue).

    Settings: train.py's dataclass. `--help` prints all settings and exits.
    """
    line, files = parse_args(argv)
    wants_help = line.pop('help', False)
    path = one_file(files, argv)
    file, in_file = (read_config_file(path), f'in {path}') if path else ({}, '')

    # where the run starts
    first = Settings(**convert(only(FIRST, file), in_file, Settings) | convert(only(FIRST, line), HERE, Settings))
    continues, record = first.resume or bool(first.extend), None
    first.out_dir = first.out_dir or (path and f'out/{Path(path).stem}')
    if first.resume and not first.out_dir:
        first.out_dir = f'out/{models.model_name(first.model)}'
    if source := first.out_dir if first.resume else first.extend or first.init_from:
        from lm_architectures.run import folders  # most runs start anew
        record = folders.read_run(source, first.code)
        if 'model' not in file | line and (continues or not path):
            first.model = record['model']
    first.model = models.given_model(first.model)  # the name, if it is a path
    first.out_dir = first.out_dir or f'out/{first.model}'

    # what was given, and the merge
    Config = models.model_file(first.model, models.code_folder(first)).Config
    if wants_help:
        print_help(Settings, Config)
    own = {f.name for f in fields(Settings)}
    if 'model' in file and 'model' in line:  # then settings that only the file's model has are left out
        theirs = models.model_file(models.given_model(file['model'])).Config
        foreign = {f.name for f in fields(theirs)} - {f.name for f in fields(Config)} - own
        file = only(file.keys() - foreign, file)
    given = convert(file, in_file, Settings, Config) | convert(line, HERE, Settings, Config)
    if 'model' in given:
        given['model'] = first.model
    if continues and given.get('dtype') == 'auto':
        del given['dtype']  # the run recorded the dtype that auto chose
    saved = (folders.continued_settings(first, source, record, given) if continues else
             folders.inherited_settings(first, record, Config) if source else {})
    values = {**saved, **given, 'model': first.model, 'out_dir': first.out_dir}
    s = Settings(**only(own, values))
    return s, only(values.keys() - own, values), record if continues else None


def one_file(files: list[str], argv: list[str]) -> str | None:
    """Return the config file, the only positional argument, if there is one."""
    if len(files) > 1:
        spaced = [f': write {name}={text}' for name, text in zip(argv, argv[1:])
                  if re.fullmatch(r'--\w+', name) and text in files]
        raise UserError('expected one config file and overrides as --key=value, got ' + ' '.join(files)
                        + ''.join(spaced[:1]))
    return files[0] if files else None


def only(names, values: dict) -> dict:
    """Return the values with these names."""
    return {name: value for name, value in values.items() if name in names}


# ---- the data, and the model's Config ----

def training_data(s, record):
    """Open the data of a run. UserError if there are none, but a dry run gets a stand-in."""
    try:
        data = open_data(s.data)
    except MissingData as error:
        from lm_architectures.run.dry_run import assumed_data, build_hint
        data = assumed_data(s, record)
        hint = build_hint(s, data.tokenizer)
        if not s.dry_run:
            raise UserError(f'{error}{hint}')
        print(f'no data at {s.data}: assuming a vocabulary of {data.n_ids:,} ids (tokenizer {data.tokenizer}) and '
              f'enough text{hint}')
    if s.verify and not s.dry_run:
        data.verify()
    return data


def model_config(s, given, data, record):
    """Return the model's Config: `given`, and the data's vocabulary. UserError if they do not fit.

    given, record: see `read_settings`.
    """
    if record or s.init_from:
        from lm_architectures.run import folders
        folders.check_data(s, record, data)
    if given.get('n_ids', data.n_ids) != data.n_ids:
        raise UserError(f'n_ids is {given["n_ids"]}, but the tokenizer of {data.folder} has {data.n_ids} ids: leave '
                        'out n_ids')
    eos_id = data.eos_id if s.mask_documents else None
    vocabulary = {'vocab_size': padded_vocab(data.n_ids), 'n_ids': data.n_ids, 'eos_id': eos_id}
    Config = models.model_file(s.model, models.code_folder(s)).Config
    shared = {name: getattr(s, name) for name in getattr(Config, 'shared', ()) if hasattr(s, name)}
    if clash := {f.name for f in fields(Config)} & {f.name for f in fields(s)} - shared.keys():
        raise UserError(f'the Config of model {s.model!r} has {min(clash)}, which is a setting of train.py: rename it, '
                        'or list it in Config.shared to get the value of that setting')
    return models.make_config(s.model, vocabulary | shared | given, models.code_folder(s))


# ---- checks and messages ----

def resume_command(argv: list[str], world: int, out_dir: str) -> str:
    """Return the command that continues a run, from the arguments that started it."""
    args = [a for a in argv if a.partition('=')[0] not in ('--resume', '--overwrite', '--extend')]
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
            (s.acceptance_prompts and data.T,
             f'acceptance_prompts = {s.acceptance_prompts} needs text, but {data.folder} is a task: use 0'),
            (s.acceptance_prompts and s.block_size < 3,
             f'acceptance_prompts = {s.acceptance_prompts} needs a block_size of 3, not {s.block_size}')):
        if wrong:
            raise UserError(sentence)
    for split in ('train', 'val'):
        data.n_rows(split, s.block_size)  # an error if it is too short
    if s.sample_tokens and not s.dry_run:
        load_tokenizer(data.tokenizer)  # fail now, not after training
