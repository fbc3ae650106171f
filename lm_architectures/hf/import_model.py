"""Import a Hugging Face folder as a run.

    python -m lm_architectures.hf.import_model FOLDER --out_dir=RUN

Llama 2 and 3, Mistral, TinyLlama, SmolLM2, Qwen2, Qwen2.5 and Qwen3 differ only in settings of
model_standard.py. transformers loads their weights; missing or unexpected tensors are errors.
"""
if __name__ == '__main__':
    from lm_architectures.start import quiet_start
    quiet_start()

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from lm_architectures.data.text.tokenizers import Tokenizer, load_tokenizer, padded_vocab
from lm_architectures.files import UserError, command, first_line, friendly_errors, read_json, warn_once, write_file
from lm_architectures.hf.families import FAMILIES, LINEAR, LLAMA3, SETTINGS, hf_tensor_map
from lm_architectures.hf.tokenizers import fast_tokenizer
from lm_architectures.run import checkpoint, folders, models, records
from lm_architectures.settings import load_settings


@dataclass
class Settings:
    out_dir: str | None = None  # run folder to write; None: out/<name of the folder>
    tokenizer: str | None = None  # tokenizer, as in prepare_fineweb.py; None: the folder's own
    eos_token: str | None = None  # token that ends a document; None: from tokenizer_config.json


def import_folder(folder, run, tokenizer: str | None = None, eos_token: str | None = None) -> None:
    """Create a run folder from a Hugging Face folder.

    tokenizer, eos_token: see `load_tokenizer`. tokenizer None: the folder's own; then texts start
    with bos if they do in transformers, and the chat template is copied.
    """
    folder, run = Path(folder), Path(run)
    if run.exists():
        raise UserError(f'{run} already exists: choose a new run folder')
    if not (folder / 'config.json').is_file():
        raise UserError(f'{folder} is not a Hugging Face folder: it has no config.json')
    family = read_json(folder / 'config.json', 'copy it again').get('model_type')
    if str(family) not in FAMILIES:
        raise UserError(f'{folder} has model_type = {family!r}: expected one of {", ".join(FAMILIES)}')
    own, bos, template = read_tokenizer(folder, tokenizer, eos_token)
    c, n_rows, block_size = standard_config(folder, own)
    theirs, info = pretrained('AutoModelForCausalLM', folder, dtype='auto', output_loading_info=True,
                              ignore_mismatched_sizes=True)
    for kind, names in info.items():
        if names:
            raise UserError(f'{folder} does not fit its config.json: {kind.replace("_", " ")} {sorted(names)[:3]}')
    c.tied_head = torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    tensors = read_tensors(theirs, c, n_rows)
    if bad := checkpoint.first_nonfinite(tensors):
        raise UserError(f'{folder} has NaN or infinity in {bad}: download it again')
    ends = sorted({own.eos_id, *read_eos_ids(folder)})
    record = {
        'model': 'standard', 'settings': {'block_size': block_size, 'eval_seed': None, 'data': ''},
        'model_config': dataclasses.asdict(c),
        'data': {'folder': '', 'tokenizer': own.name, 'n_ids': own.n_ids, 'eos_id': own.eos_id, 'bos': bos,
                 'sha256': '', 'n_rows': n_rows, **({'ends': ends} if len(ends) > 1 else {})},
        'versions': {'torch': torch.__version__}}
    try:
        folders.check_record(record)
    except ValueError as error:
        raise UserError(f'{folder} cannot be a run: {error}')
    with records.locked_run(run, is_new=True, overwrite=False):
        checkpoint.save_checkpoint(run, 0, tensors, {'step': 0})
        if template:
            write_file(run / records.CHAT_TEMPLATE, template.encode())
        records.save_run(run, record, eos_token)
    print(f'imported {run} (model_standard, tokenizer {own.name}). Sample: '
          f'{command("sample.py", run, "Once upon a time")}; finetune: train.py with '
          f'{shlex.quote(f"--init_from={run}")}')
    if len(ends) > 1:
        name_of = fast_tokenizer(own.name).id_to_token
        print(f'Generation stops at {", ".join(f"{name_of(i)!r} ({i})" for i in ends)}; documents at {own.eos_id}')


def pretrained(kind: str, folder: Path, **options):
    """Return what a class of transformers reads from a folder. None of the folder's code runs."""
    import transformers
    try:
        return getattr(transformers, kind).from_pretrained(folder, local_files_only=True, trust_remote_code=False,
                                                           **options)
    except Exception as error:  # of transformers and safetensors, for damaged files: they have no common class
        raise UserError(f'{folder} could not be read ({type(error).__name__}: {first_line(error)})')


def read_tokenizer(folder: Path, name: str | None, eos_token: str | None) -> tuple[Tokenizer, bool, str | None]:
    """Return (tokenizer, whether texts start with bos, chat template). name: as in --tokenizer."""
    path = name or next(filter(Path.is_file, (folder / 'tokenizer.json', folder / 'tokenizer.model')), None)
    if path is None:
        raise UserError(f'{folder} has neither tokenizer.json nor tokenizer.model: give --tokenizer=FILE, or '
                        '--tokenizer=gpt2')
    own = load_tokenizer(path, eos_token=eos_token)
    if eos_token and not own.name.endswith('.json'):
        raise UserError(f'the tokenizer {own.name} has a fixed eos token: --eos_token is for tokenizer.json')
    if name:
        return own, False, None
    theirs = pretrained('AutoTokenizer', folder)
    if len(theirs) > own.n_ids:
        lost = theirs.convert_ids_to_tokens(range(own.n_ids, len(theirs)))
        warn_once(f'{path} lacks {", ".join(lost)}, which transformers adds: they are read as text here. To keep them, '
                  f'call AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(NEW), and import with '
                  '--tokenizer=NEW/tokenizer.json')
    template = theirs.chat_template if isinstance(theirs.chat_template, str) else None
    return own, theirs('a').input_ids[:1] == [own.bos_id], template


def read_eos_ids(folder: Path) -> set[int]:
    """Return the eos ids in config.json and generation_config.json of a Hugging Face folder."""
    found = []
    for path in (folder / 'config.json', folder / 'generation_config.json'):
        ends = read_json(path, 'copy it again').get('eos_token_id') if path.is_file() else []
        found += ends if isinstance(ends, list) else [ends]
    return {i for i in found if type(i) is int}


def standard_config(folder: Path, tokenizer: Tokenizer) -> tuple:
    """Return (model_standard.Config, vocabulary rows, maximum length) of a Hugging Face folder."""
    theirs = pretrained('AutoConfig', folder)
    family, rope, n_rows = theirs.model_type, theirs.rope_parameters, theirs.vocab_size
    if theirs.hidden_act != 'silu':
        raise UserError(f'{folder} has hidden_act = {theirs.hidden_act!r}: model_standard only has silu')
    if n_rows < tokenizer.n_ids:
        raise UserError(f'{folder} has a vocabulary of {n_rows} rows, but the tokenizer {tokenizer.name} has '
                        f'{tokenizer.n_ids} ids: remove those from {n_rows} on from the tokenizer, or choose another '
                        'with --tokenizer')
    # Hugging Face's padding rows (more rows than ids) are part of the softmax; ours are not.
    is_padded = n_rows > tokenizer.n_ids
    c = models.make_config('standard', {
        **{ours: getattr(theirs, name, None) for ours, name in SETTINGS.items()}, 'eos_id': None,
        'qkv_bias': family == 'qwen2', 'qk_norm': family == 'qwen3', 'window': window_of(theirs, folder),
        'rope_theta': float(rope['rope_theta']), 'rope_scaling': rope_scaling_of(rope, folder),
        'vocab_size': n_rows if is_padded else padded_vocab(n_rows), 'pad_rows_in_loss': is_padded,
        'n_ids': tokenizer.n_ids})
    return c, n_rows, theirs.max_position_embeddings


def rope_scaling_of(rope: dict, folder) -> tuple[float, ...] | None:
    """Convert Hugging Face's rope_parameters to model_standard.Config.rope_scaling."""
    if rope['rope_type'] == 'default':
        return None
    if rope['rope_type'] == 'linear':
        return (rope['factor'], *LINEAR)
    if rope['rope_type'] == 'llama3':
        return tuple(rope[name] for name in LLAMA3)
    raise UserError(f'{folder} has rope_type {rope["rope_type"]!r}: expected default, linear or llama3')


def window_of(theirs, folder) -> int | None:
    """Convert Hugging Face's sliding window, which counts the query itself, to Config.window."""
    if theirs.model_type == 'llama' or getattr(theirs, 'sliding_window', None) is None:  # Llama ignores sliding_window
        return None
    kinds = set(getattr(theirs, 'layer_types', None) or ['sliding_attention'])
    if len(kinds) > 1:
        raise UserError(f'{folder} has a sliding window in some layers only: model_standard needs it in all')
    return theirs.sliding_window - 1 if kinds == {'sliding_attention'} else None


def read_tensors(theirs: torch.nn.Module, c, n_rows: int) -> dict:
    """Convert a Hugging Face model's tensors to a Standard model's (see `hf_tensor_map`)."""
    tensors, state = {}, dict(theirs.state_dict())
    for ours, parts in hf_tensor_map(c, n_rows).items():
        tensors[ours] = torch.cat([state.pop(name) for name, _ in parts])
    if unread := sorted(state.keys() - {'lm_head.weight'}):  # of a tied head
        raise UserError(f'this model has {unread[0]}, which model_standard lacks: it cannot be imported')
    for name in {'embed.weight', 'head.weight'} & tensors.keys():
        tensors[name] = F.pad(tensors[name], (0, 0, 0, c.vocab_size - n_rows))
    return tensors


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        if len(positional) != 1:
            raise UserError('expected one folder. Usage: python -m lm_architectures.hf.import_model FOLDER '
                            '--out_dir=RUN')
        from transformers.utils import logging
        logging.disable_progress_bar()
        folder, = positional
        import_folder(folder, s.out_dir or f'out/{Path(folder).resolve().name}', s.tokenizer, s.eos_token)


if __name__ == '__main__':
    main()
