"""What --resume, --extend and --init_from take from a run: its settings, its data, its weights."""
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


# ---- data and weights ----

def check_data(s, record, data) -> None:
    """Raise UserError unless the run continues on its data, and starts with its source's tokenizer.

    record: config.json of the run to continue, or None.
    """
    source = s.out_dir if s.resume else s.extend or s.init_from
    folders.check_vocabulary(record or folders.read_run(source), data, source)
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
        planned = folders.read_run(s.extend)['settings']['max_tokens']
        source, up_to = s.extend, replace(s, max_tokens=planned).last_before_decay
    return checkpoint.restore_training(source, model, optimizer, up_to)


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
