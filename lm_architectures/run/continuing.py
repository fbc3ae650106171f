"""What --resume, --extend and --init_from take from another run: settings, on the same data."""
from dataclasses import asdict, fields
from pathlib import Path

from lm_architectures.files import UserError
from lm_architectures.run import folders, models
from lm_architectures.settings import make_settings

MAY_CHANGE = {  # on --resume, besides the model settings in `Config.may_change`
    'resume', 'code', 'overwrite', 'dry_run', 'gpu_gib', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'compile', 'parallel', 'shard', 'threads', 'make_data', 'assumed_ids',
    'data'}  # the folder may move; the checksum of its content must match


def may_change(record: dict) -> set[str]:
    """Return the names of all settings of a run (config.json) that may change on --resume."""
    return MAY_CHANGE | {*getattr(models.model_file(record['model'], record['code']).Config, 'may_change', ())}


def continued_settings(s, source: str, record: dict, given: dict) -> dict:
    """Return all settings of the run to continue. UserError for given ones that differ.

    s: train.Settings that say where to start. record: config.json of the run `source`.
    """
    saved = asdict(make_settings(type(s), record['settings'], f'in {source}/config.json')) | asdict(
        folders.saved_config(record, source))
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
    values = asdict(folders.saved_config(record, source))
    theirs, known = models.model_file(record['model'], record['code']).Config, {f.name for f in fields(Config)}
    for name in getattr(theirs, 'defining', ()):
        if values[name] is not None and name not in known:
            raise UserError(f'{source} cannot be converted to this model: it has {name} = {values[name]}, but '
                            f'model_{s.model} has no {name}')
    known -= {*getattr(theirs, 'own', ())} ^ {*getattr(Config, 'own', ())}  # these mean something else in one of them
    masks = {'mask_documents': values['eos_id'] is not None} if 'eos_id' in values else {}
    return masks | {name: value for name, value in values.items() if name in known - {'n_ids', 'eos_id'}}


def check_data(s, record, data) -> None:
    """Raise UserError unless the run continues on its data, and starts with its source's tokenizer.

    record: config.json of the run to continue, or None.
    """
    source = s.out_dir if s.resume else s.extend or s.init_from
    folders.check_vocabulary(record or folders.read_run(source), data, source)
    if record and record['data']['sha256'] != data.sha256:
        raise UserError(f'{data.folder} is not the data that the run in {source} was trained on (checksums '
                        'differ): restore that data, or start a new run with --init_from')
