"""What a run takes over: its own past (--resume), or another run (--extend, --init_from).

Settings: what the user does not give comes from the run to continue, and only what `may_change`
names may be given another value. --extend is a --resume whose first checkpoint lies in another
folder, and which may change max_tokens. With --init_from, only the model's settings are taken over.
Weights: `restore` for a run to continue, `load_initial_weights` for --init_from.
"""
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from lm_architectures.files import UserError
from lm_architectures.run import checkpoint, folders, models
from lm_architectures.settings import make_settings

MAY_CHANGE = {  # on --resume, besides the model settings in `Config.may_change`
    'resume', 'code', 'overwrite', 'dry_run', 'gpu_gib', 'out_dir', 'verify', 'micro_batch_size',
    'eval_interval', 'log_interval', 'save_interval', 'keep_checkpoints', 'acceptance_prompts', 'sample_tokens',
    'wandb_project', 'device', 'compile', 'parallel', 'shard', 'threads', 'make_data', 'assumed_ids',
    'data'}  # the folder may move; the checksum of its content must match


# ---- settings ----

def may_change(record: dict) -> set[str]:
    """Return the names of all settings of a run (config.json) that may change on --resume."""
    return MAY_CHANGE | {*getattr(models.model_file(record['model'], record['code']).Config, 'may_change', ())}


def continued_settings(s, given: dict) -> tuple:
    """Take over the settings of the run to resume or extend, except those that the user gave.

    Returns (settings, {name: value} for the model's Config, config.json of the run).
    """
    folder = s.out_dir if s.resume else s.extend
    record = folders.read_run(folder, s.code)
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
    return replace(saved, **values | {'out_dir': s.out_dir}), record['model_config'] | given, record


def check_extension(s, saved, given: dict) -> None:
    """Raise UserError unless the run s.extend, with settings `saved`, can be extended."""
    if saved.schedule == 'cosine':
        raise UserError(f'{s.extend} has schedule = cosine, whose learning rates depend on max_tokens from the start, '
                        'so it cannot be extended: train a new run, with wsd or constant to extend that one')
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
    source = folders.read_run(s.init_from, s.code)
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


# ---- weights ----

def restore(s, model: torch.nn.Module, optimizer) -> tuple[int, float]:
    """Load the checkpoint to continue from. Returns (step, seconds of training), or (0, 0.0)."""
    source, up_to, log = s.out_dir, None, Path(s.out_dir) / 'log.jsonl'
    if not has_checkpoint(s):
        if s.resume and log.exists() and b'{"saved": ' in log.read_bytes():
            raise UserError(f'{source} has no checkpoint, but its log lists one: copy {source}/ckpt back, or '
                            'repeat the command that started it, with --overwrite')
        if not s.extend:  # killed before the first checkpoint
            return 0, 0.0
        planned = folders.read_run(s.extend)['settings']['max_tokens']
        source, up_to = s.extend, replace(s, max_tokens=planned).last_before_decay
    return checkpoint.restore_training(source, model, optimizer, up_to)


def has_checkpoint(s) -> bool:
    """Return True if the run is resumed from a checkpoint of its own."""
    return s.resume and bool(checkpoint.checkpoints(s.out_dir))


def load_initial_weights(s, model: torch.nn.Module, idx: torch.Tensor) -> None:
    """Load the weights of s.init_from, unless the run continues from a checkpoint.

    If the model's `adopt` adds new weights, check on idx (B, T) that the logits are unchanged.
    """
    if s.extend or has_checkpoint(s):
        return
    source = s.init_from
    state, tensors = checkpoint.load_checkpoint(source)
    try:
        converted = model.adopt(tensors) if hasattr(model, 'adopt') else tensors
    except ValueError as error:
        raise UserError(f'{source} does not fit this model: {error}')
    checkpoint.load_weights(model, converted, source)
    print(f'loaded the weights of {source}, step {state["step"]}')
    if new := sorted(converted.keys() - tensors.keys()):
        original, _ = folders.load_run(source, idx.device, code=None if s.resume else s.code)
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
