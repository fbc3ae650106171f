"""Settings, weights and log that a run inherits from another one: --resume, --extend, --init_from.

Settings that are not given come from the run in out_dir (--resume) or the extended run (--extend),
and may not change, except `MAY_CHANGE`. With --init_from, only the model's settings are inherited.
"""
import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from common import checkpoint, models, runs
from common.files import UserError, write_file
from common.settings import make_settings, options_of

MAY_CHANGE = {  # on --resume, besides the model settings in `Config.may_change`
    'resume', 'code', 'overwrite', 'dry_run', 'memory', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'compile', 'parallel', 'shard', 'threads', 'make_data', 'assumed_ids',
    'data'}  # the folder may move; the checksum of its content must match


# ---- settings ----

def may_change(record: dict) -> set[str]:
    """Return the names of all settings of a run (config.json) that may change on --resume."""
    return MAY_CHANGE | {*getattr(models.model_file(record['model'], record['code']).Config, 'may_change', ())}


def add_model_option(argv: list[str]) -> list[str]:
    """Add --model of the run to continue to argv, unless argv names a model or a config file."""
    options = {name: value for name, value in options_of(argv).items() if value not in ('None', 'False', 'false')}
    source = options.get('out_dir') if 'resume' in options else options.get('extend') or options.get('init_from')
    if source and source is not True and 'model' not in options and all(arg.startswith('-') for arg in argv):
        return [*argv, f'--model={runs.read_run(source)["model"]}']
    return argv


def continued_settings(s, given: dict) -> tuple:
    """Return (settings of the run to resume or extend, updated with `given`; its config.json)."""
    folder = s.out_dir if s.resume else s.extend
    record = runs.read_run(folder, s.code)
    saved = make_settings(type(s), record['settings'], f'in {folder}/config.json')
    free = may_change(record)
    if not s.resume:
        check_extension(s, saved, given)
        free |= {'extend', 'max_tokens'}
    if s.dtype == 'auto':
        given.pop('dtype', None)  # the run recorded the dtype that auto chose
    known = asdict(saved) | asdict(models.saved_config(record, folder))
    check_unchanged(folder, known, {name: value for name, value in given.items() if name not in free})
    own = {f.name for f in fields(s)}
    values = {name: given[name] for name in given if name in own}
    return replace(saved, **values | {'out_dir': s.out_dir}), record


def check_extension(s, saved, given: dict) -> None:
    """Raise UserError unless the run s.extend, with settings `saved`, can be extended."""
    if saved.schedule == 'cosine':
        raise UserError(f'{s.extend} has schedule = cosine, whose learning rates depend on max_tokens from the start, '
                        'so it cannot be extended: train a new run, or use wsd or constant')
    if 'out_dir' not in given or Path(s.out_dir).resolve() == Path(s.extend).resolve():
        raise UserError(f'--extend={s.extend} needs a new run folder: add --out_dir=NEW')
    if s.max_tokens <= saved.max_tokens or 'max_tokens' not in given:
        raise UserError(f'{s.extend} has max_tokens = {saved.max_tokens}: set --max_tokens to more than that')


def check_unchanged(folder, saved: dict, given: dict) -> None:
    """Raise UserError if settings given for a saved run differ from the saved ones."""
    for name in sorted(given, key=lambda name: name != 'model'):  # first, because it decides which settings exist
        if name in saved and saved[name] == given[name]:
            continue
        have = f'{name} = {saved[name]!r}' if name in saved else f'model = {saved["model"]!r}, without {name}'
        other = 'start another run with another --out_dir'
        if name == 'max_tokens' and saved['schedule'] != 'cosine' and saved[name] < given[name]:
            other = f'train longer with --extend={folder} --max_tokens={given[name]} --out_dir=NEW'
        raise UserError(f'the run in {folder} has {have}, but {given[name]!r} was given: leave out {name} '
                        f'(and the config file), or {other}')


def inherit_model_settings(s, given: dict) -> tuple:
    """Return (settings, given), with the model settings of s.init_from where the user gave none."""
    if Path(s.out_dir).resolve() == Path(s.init_from).resolve():
        raise UserError(f'--init_from and --out_dir are both {s.init_from}: set another --out_dir')
    source = runs.read_run(s.init_from, s.code)
    values = asdict(models.saved_config(source, s.init_from))
    theirs = models.model_file(source['model'], source['code']).Config
    ours = models.model_file(s.model).Config
    known = {f.name for f in fields(ours)}
    for name in getattr(theirs, 'defining', ()):
        if values[name] is not None and name not in known:
            raise UserError(f'{s.init_from} cannot be converted to this model: it has {name} = {values[name]}, but '
                            f'model_{s.model} has no {name}')
    known -= {*getattr(theirs, 'own', ())} ^ {*getattr(ours, 'own', ())}  # these mean something else in one of them
    values = {name: value for name, value in values.items() if name in known}
    if 'mask_documents' not in given and 'eos_id' in values:
        s = replace(s, mask_documents=values['eos_id'] is not None)
    return s, {name: value for name, value in values.items() if name not in ('n_ids', 'eos_id')} | given


def continued_config(s, given: dict, data, record: dict):
    """Return the model Config of the run to resume or extend. UserError if its data differ."""
    folder = s.out_dir if s.resume else s.extend
    runs.check_vocabulary(record, data, folder)
    if record['data']['sha256'] != data.sha256:
        raise UserError(f'{data.folder} is not the data that the run in {folder} was trained on (checksums '
                        'differ): restore that data, or start a new run with --init_from')
    changed = {name: value for name, value in given.items() if name in may_change(record)}
    return models.saved_config(record | {'model_config': record['model_config'] | changed}, folder)


# ---- weights and log ----

def restore(s, model: torch.nn.Module, optimizer) -> tuple[int, float]:
    """Load the checkpoint to continue from. Returns (step, seconds of training), or (0, 0.0)."""
    log = Path(s.out_dir) / 'log.jsonl'
    if s.resume and not checkpoint.checkpoints(s.out_dir) and log.exists() and b'{"saved": ' in log.read_bytes():
        raise UserError(f'{s.out_dir} has no checkpoint, but its log lists one: copy {s.out_dir}/ckpt back, or start '
                        'again with --overwrite instead of --resume')
    if not runs.extension_starts(s):
        return checkpoint.restore_training(s.out_dir, model, optimizer)
    saved = make_settings(type(s), runs.read_run(s.extend)['settings'], f'in {s.extend}/config.json')
    up_to = runs.last_before_decay(saved)
    if not checkpoint.checkpoints(s.extend, up_to):
        before = '' if up_to is None else f' from before its decay, which begins after step {up_to}'
        raise UserError(f'{s.extend} has no checkpoint{before}, so it cannot be extended: train a new run')
    return checkpoint.restore_training(s.extend, model, optimizer, up_to)


def copy_log(source, folder, step: int) -> None:
    """Start the log of an extending run with the lines of the source run up to a step."""
    lines = [json.dumps(record) + '\n' for record in runs.read_log(source) if record['step'] <= step]
    write_file(Path(folder) / 'log.jsonl', ''.join(lines).encode())


def load_initial_weights(s, record, model: torch.nn.Module, idx: torch.Tensor) -> None:
    """Load the weights of s.init_from, unless the run continues from a checkpoint of its own.

    record: config.json of the run to continue, None if new. If the model's `adopt` adds new
    weights, check on idx (B, T) that the logits are unchanged.
    """
    if s.extend or record and checkpoint.checkpoints(s.out_dir):
        return
    source = s.init_from
    state, tensors = checkpoint.load_checkpoint(source)
    try:
        converted = model.adopt(tensors) if hasattr(model, 'adopt') else tensors
    except ValueError as error:
        raise UserError(f'{source} does not fit this model: {error}')
    checkpoint.load_weights(model, converted, source)
    print(f'loaded the weights of {source}, step {state["step"]}')
    new = sorted(converted.keys() - tensors.keys())
    if not new:
        return
    original, _ = runs.load_run(source, idx.device, code=None if s.resume else s.code)
    with torch.no_grad():
        want, have = (m.eval().logits(idx)[..., :model.config.n_ids] for m in (original, model))
    model.train()
    worst = (have - want).abs().max().item()
    if not worst < 1e-4:
        raise UserError(f'{source} cannot be converted to this model: its logits change by {worst:.1e} before any '
                        'training. Settings unrelated to the new weights (window, mask_documents, n_head) must match '
                        "the source's and be supported by this model")
    print(f'converted {source}: {", ".join(new)} are new weights; at step 0 the logits differ by at most '
          f'{worst:.1e}')
