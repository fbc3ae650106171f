"""Settings of a training run: one dict, merged from a run, a config file and the command line.

    {**saved, **config file, **command line}  ->  train.Settings, and values of the model's Config

`saved` holds all settings of the run to --resume or --extend, or the model settings of --init_from.
train.py calls `read_settings` and `training_data`; with the data, `model_config` and
`check_settings`.
"""
import os
import re
import shlex
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

from lm_architectures.data import MissingData, open_data
from lm_architectures.data.text.tokenizers import load_tokenizer, padded_vocab
from lm_architectures.files import ROOT, UserError, command
from lm_architectures.machine.devices import ranks
from lm_architectures.run import folders, models
from lm_architectures.settings import HERE, convert, make_settings, parse_args, print_help, read_config_file

FIRST = 'model', 'out_dir', 'resume', 'code', 'extend', 'init_from'  # they say where the other settings come from
MAY_CHANGE = {  # on --resume, besides the model settings in `Config.may_change`
    'resume', 'code', 'overwrite', 'dry_run', 'gpu_gib', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'compile', 'parallel', 'shard', 'threads', 'make_data', 'assumed_ids',
    'data'}  # the folder may move; the checksum of its content must match


# ---- merging ----

def read_settings(Settings: type, argv: list[str]) -> tuple:
    """Return (settings, {name: value} for the model's Config, config.json of the run to continue).

    Settings: train.py's dataclass. `--help` prints all settings and exits.
    """
    line, files = parse_args(argv)
    wants_help = line.pop('help', False)
    if len(files) > 1:
        spaced = [f': write {name}={text}' for name, text in zip(argv, argv[1:])
                  if re.fullmatch(r'--\w+', name) and text in files]
        raise UserError('expected one config file and overrides as --key=value, got ' + ' '.join(files)
                        + ''.join(spaced[:1]))
    file, in_file = (read_config_file(files[0]), f'in {files[0]}') if files else ({}, '')
    default = {f.name: f.default for f in fields(Settings)}
    first = SimpleNamespace(**default | convert(only(FIRST, file), in_file, Settings)
                            | convert(only(FIRST, line), HERE, Settings))

    def out_dir() -> str:
        return first.out_dir or f'out/{Path(files[0]).stem if files else models.model_name(first.model)}'
    source = out_dir() if first.resume else first.extend or first.init_from
    record, continues = folders.read_run(source, first.code) if source else None, first.resume or bool(first.extend)
    if record and not files and 'model' not in line:
        first.model = record['model']
    first.model, first.out_dir = models.given_model(first.model), out_dir()  # the model may be given as a path
    Config = models.model_file(first.model, source if continues and first.code else None).Config
    if 'model' in file and 'model' in line:  # then settings that only the file's model has are left out
        other = models.model_file(models.given_model(file['model'])).Config
        file = only({*file} - names_of(other) | names_of(Config) | {*default}, file)
    if wants_help:
        print_help(Settings, Config)
    this, saved = {'model': first.model, 'out_dir': first.out_dir}, {}
    given = convert(file, in_file, Settings, Config) | convert(line, HERE, Settings, Config)
    given |= only(given, this)
    if continues:
        saved = asdict(make_settings(Settings, record['settings'], f'in {source}/config.json')) | asdict(
            models.saved_config(record, source))
        if given.get('dtype') == 'auto':
            del given['dtype']  # the run recorded the dtype that auto chose
        check_unchanged(source, record, saved, given, first)
    elif record:
        saved = inherited_settings(source, record, Config, first)
    values = saved | this | given
    s = Settings(**only(default, values))
    return s, only(values.keys() - default.keys(), values), record if continues else None


def only(names, values: dict) -> dict:
    """Return the values with these names."""
    return {name: value for name, value in values.items() if name in names}


def names_of(Settings: type) -> set[str]:
    return {f.name for f in fields(Settings)}


def may_change(record: dict) -> set[str]:
    """Return the names of all settings of a run (config.json) that may change on --resume."""
    return MAY_CHANGE | {*getattr(models.model_file(record['model'], record['code']).Config, 'may_change', ())}


def check_unchanged(source: str, record: dict, saved: dict, given: dict, first) -> None:
    """Raise UserError for given settings that cannot differ from those of the run to continue.

    saved: all its settings. first: the settings FIRST.
    """
    free = may_change(record)
    if not first.resume:
        free |= {'extend', 'max_tokens'}
        if saved['schedule'] == 'cosine':
            raise UserError(f'{source} has schedule = cosine, whose learning rates depend on max_tokens from the '
                            'start, so it cannot be extended: train a new run, with wsd or constant to extend that one')
        if 'out_dir' not in given or Path(first.out_dir).resolve() == Path(source).resolve():
            raise UserError(f'--extend={source} needs a new run folder: add --out_dir=NEW')
        if given.get('max_tokens', 0) <= saved['max_tokens']:
            raise UserError(f'{source} has max_tokens = {saved["max_tokens"]}: set --max_tokens to more than that')
    for name in sorted(given.keys() - free, key=lambda name: name != 'model'):  # first, as it decides which there are
        if name in saved and given[name] == saved[name]:
            continue
        have = f'{name} = {saved[name]!r}' if name in saved else f'model = {saved["model"]!r}, without {name}'
        other = 'start another run with another --out_dir'
        if name == 'max_tokens' and saved['schedule'] != 'cosine' and saved[name] < given[name]:
            other = f'train longer with --extend={source} --max_tokens={given[name]} --out_dir=NEW'
        raise UserError(f'the run in {source} has {have}, but {given[name]!r} was given: leave out {name} '
                        f'(and the config file), or {other}')


def inherited_settings(source: str, record: dict, Config: type, first) -> dict:
    """Return the settings that a new model takes over from the run `source` of --init_from.

    record: its config.json. Config: that of the new model. first: the settings FIRST.
    """
    if Path(first.out_dir).resolve() == Path(source).resolve():
        raise UserError(f'--init_from and --out_dir are both {source}: set another --out_dir')
    values = asdict(models.saved_config(record, source))
    theirs, known = models.model_file(record['model'], record['code']).Config, names_of(Config)
    for name in getattr(theirs, 'defining', ()):
        if values[name] is not None and name not in known:
            raise UserError(f'{source} cannot be converted to this model: it has {name} = {values[name]}, but '
                            f'model_{first.model} has no {name}')
    known -= {*getattr(theirs, 'own', ())} ^ {*getattr(Config, 'own', ())}  # these mean something else in one of them
    masks = {'mask_documents': values['eos_id'] is not None} if 'eos_id' in values else {}
    return masks | only(known - {'n_ids', 'eos_id'}, values)


# ---- the data, and the model's Config ----

def training_data(s, record):
    """Open the data of a run. UserError if there are none."""
    try:
        data = open_data(s.data)
    except MissingData as error:
        raise UserError(f'{error}{assumed_data(s, record).hint}')
    if s.verify:
        data.verify()
    return data


def assumed_data(s, record) -> SimpleNamespace:
    """Return a stand-in for missing data, with the vocabulary of a run or of s.assumed_ids ids.

    Its field `hint` says how to build the data that a config names.
    """
    record = record or (folders.read_run(s.init_from) if s.init_from else {})
    like = {'tokenizer': 'gpt2' if s.assumed_ids == 50257 else 'FILE', 'n_ids': s.assumed_ids,
            'eos_id': s.assumed_ids - 1, 'sha256': '', 'bos': False, **record.get('data', {})}
    options = [f'--tokenizer={like["tokenizer"]}'] * (like['tokenizer'] != 'gpt2') + [
        f'--out_dir={s.data}', f'--max_tokens={1.05 * s.max_tokens:.3g}'.replace('e+', 'e')]  # 5% more, for validation
    make = s.make_data if s.make_data and s.data in s.make_data else (
        shlex.join(['python', 'prepare_fineweb.py', *options]) if s.data == type(s).data else '')
    hint = f'. To build it: {make}'.replace('prepare_fineweb.py', os.path.relpath(ROOT / 'prepare_fineweb.py'))
    return SimpleNamespace(**{**like, 'folder': s.data, 'splits': {'train': {'tokens': s.max_tokens}},
                              'n_rows': lambda split, T: 1, 'hint': hint if make else ''})


def code_folder(s) -> str | None:
    """Return the run whose copy of the code is trained, or None. Not s.init_from, the source."""
    return (s.out_dir if s.resume else s.extend) if s.code else None


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


# ---- checks and messages ----

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
