"""Export runs to Hugging Face format and import Hugging Face models as runs.

    python -m common.export RUN --to_hf=FOLDER          write any run as a new Hugging Face folder
    python -m common.export RUN --to_llama=FOLDER       write a Standard run as a new Llama folder
    python -m common.export RUN --from_llama=FOLDER     import a Llama, Mistral or Qwen as RUN

`--to_hf` writes a Llama if the run is one. Otherwise the folder includes the model's code, so load
it with `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.

Llama 2 and 3, Mistral, TinyLlama, SmolLM2, Qwen2, Qwen2.5 and Qwen3 differ only in settings of
model_standard.py. transformers loads their weights; missing or unexpected tensors are errors.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import dataclasses
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from attn_kernels import digest
from common import checkpoint, models, runs
from common.files import ROOT, UserError, command, first_line, friendly_errors, read_json, write_file
from common.hf_tokenizer import fast_tokenizer, save_tokenizer
from common.settings import load_settings
from data.tokenizers import Tokenizer, copy_tokenizer, load_tokenizer, padded_vocab

LINEAR = 1e9, 2e9, 1.0  # end of a rope_scaling that divides all frequencies by one factor
ONLY_DATA = {'local_files_only': True, 'trust_remote_code': False}  # for from_pretrained
FAMILIES = ('llama', 'mistral', 'qwen2', 'qwen3')  # `model_type` in config.json
LLAMA_CODE = '719512c4d7c5a419'  # digest of Block and Model in model_standard.py, which compute what a Llama does


@dataclass
class Settings:
    from_llama: str | None = None  # Hugging Face folder to import as a run
    to_llama: str | None = None  # new folder for a Llama export
    to_hf: str | None = None  # new folder to write, with the model's code unless the run is a Llama
    tokenizer: str | None = None  # with --from_llama: tokenizer, as in prepare_fineweb.py; None: the folder's own
    eos_token: str | None = None  # with --from_llama: token that ends a document; None: from tokenizer_config.json
    code: Literal['run'] | None = None  # run: the model's code as stored in the run, not as it is now
    model: str | None = None  # path of the model's file, if it is not in this repository


def hf_tensor_map(c, n_rows: int) -> dict[str, list[tuple[str, int]]]:
    """Return {tensor of model_standard.Model: [(Hugging Face tensor, its rows)]} for a Config.

    Here q, k, v are one stacked matrix, and so are gate and up. Hugging Face's embedding and head
    have n_rows rows; ours have padding rows below them.
    """
    q, kv = c.n_head * c.head_size, c.n_kv_head * c.head_size
    block_parts = {
        'attn_norm.weight': [('input_layernorm.weight', c.n_embd)],
        'qkv.weight': [(f'self_attn.{name}_proj.weight', rows) for name, rows in (('q', q), ('k', kv), ('v', kv))],
        'attn_out.weight': [('self_attn.o_proj.weight', c.n_embd)],
        'ffn_norm.weight': [('post_attention_layernorm.weight', c.n_embd)],
        'gate_up.weight': [('mlp.gate_proj.weight', c.n_ffn), ('mlp.up_proj.weight', c.n_ffn)],
        'ffn_out.weight': [('mlp.down_proj.weight', c.n_embd)]}
    if c.qkv_bias:
        block_parts['qkv.bias'] = [(name.replace('weight', 'bias'), rows) for name, rows in block_parts['qkv.weight']]
    if c.qk_norm:
        block_parts |= {f'{name}.weight': [(f'self_attn.{name}.weight', c.head_size)] for name in ('q_norm', 'k_norm')}
    found = {'embed.weight': [('model.embed_tokens.weight', n_rows)], 'norm.weight': [('model.norm.weight', c.n_embd)]}
    if not c.tied_head:
        found['head.weight'] = [('lm_head.weight', n_rows)]
    for i in range(c.n_layer):
        for ours, parts in block_parts.items():
            found[f'blocks.{i}.{ours}'] = [(f'model.layers.{i}.{name}', rows) for name, rows in parts]
    return found


# ---- to Hugging Face ----

def to_llama(c, tensors: dict, n_rows: int, max_tokens: int = 8192, ends: int | list[int] | None = None):
    """Return a Hugging Face LlamaForCausalLM with the tensors (and dtype) of a Standard model.

    c: the model's Config. n_rows: vocabulary of the Llama, without padding. ends: ids that end a
    text in `generate`. There is no pad id, because `generate` would mask it in prompts.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    rope = {'rope_type': 'default', 'rope_theta': c.rope_theta}
    if c.rope_scaling:
        factor, low, high, tokens = c.rope_scaling
        rope |= {'rope_type': 'linear', 'factor': factor}
        if (low, high, tokens) != LINEAR:
            rope |= {'rope_type': 'llama3', 'low_freq_factor': low, 'high_freq_factor': high,
                     'original_max_position_embeddings': int(tokens)}
    config = LlamaConfig(
        vocab_size=n_rows, hidden_size=c.n_embd, intermediate_size=c.n_ffn, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_size, rms_norm_eps=c.norm_eps,
        rope_parameters=rope, tie_word_embeddings=c.tied_head, max_position_embeddings=max_tokens,
        bos_token_id=None, eos_token_id=ends, pad_token_id=None)
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=llama_tensors(c, tensors, n_rows),
                                            dtype=tensors['embed.weight'].dtype)


def llama_tensors(c, tensors: dict, n_rows: int) -> dict:
    """Return a Standard model's tensors under Hugging Face names, as views (`hf_tensor_map`)."""
    theirs = {}
    for ours, parts in hf_tensor_map(c, n_rows).items():
        names, rows = zip(*parts)
        theirs |= zip(names, tensors[ours][:sum(rows)].split(rows))
    return theirs


def llama_mismatch(record: dict, c) -> str | None:
    """Return why a run cannot be a Llama, or None if it can. c: the model's Config."""
    module = models.model_file(record['model'])
    if not hasattr(module, 'Block') or digest(module.Block, module.Model) != LLAMA_CODE:
        return f'is of {Path(module.__file__).name}, whose code is not that of a Llama'
    for name, plain in (('window', None), ('qkv_bias', False), ('qk_norm', False)):
        if getattr(c, name) != plain:
            return f'has {name} = {getattr(c, name)}'
    return None


def export_run(run, folder, as_llama: bool = True, code: str | None = None) -> None:
    """Write a run as a new Hugging Face folder, in its checkpoint's dtype, with its tokenizer.

    as_llama: UserError if the run is no Llama; False: add the model's code instead.
    """
    from transformers import GenerationConfig
    run, folder = Path(run), Path(folder)
    if folder.exists():
        raise UserError(f'{folder} already exists: choose a new folder')
    record = runs.read_run(run, code)
    c, data, block_size = models.portable_config(record, run), record['data'], record['settings']['block_size']
    reason = llama_mismatch(record, c)
    if as_llama and reason:
        raise UserError(f'{run} {reason}, which is not supported for Llama: use --to_hf')
    tensors = checkpoint.load_checkpoint(run)[1]
    n_rows, ends = data.get('n_rows', c.n_ids), data.get('ends', data['eos_id'])
    if reason:
        save_with_code(record, c, tensors, n_rows, ends, folder)
    else:
        to_llama(c, tensors, n_rows, block_size, ends).save_pretrained(folder, max_shard_size='1TB')
    with suppress(OSError):  # some file systems have no modes; safetensors makes files owner-only
        (folder / 'model.safetensors').chmod((folder / 'config.json').stat().st_mode)
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    save_tokenizer(folder, data['tokenizer'], data['bos'], block_size)
    if (run / runs.CHAT_TEMPLATE).is_file():
        shutil.copy(run / runs.CHAT_TEMPLATE, folder)
    print(f'{folder} is a Hugging Face folder: load it with AutoModelForCausalLM.from_pretrained({str(folder)!r}'
          f'{", trust_remote_code=True" if reason else ""})')
    if not reason and c.eos_id is not None:
        print('A Llama does not mask attention between documents: its logits differ from this run after an end-of-text '
              'token inside a text')


def save_with_code(record: dict, c, tensors: dict, n_rows: int, ends: int | list[int], folder: Path) -> None:
    """Write weights, model file and the wrapper common/hf_model.py as a Hugging Face folder."""
    from common.hf_model import RunConfig
    folder.mkdir(parents=True)
    RunConfig(
        model_config=dataclasses.asdict(c), vocab_size=n_rows,
        hidden_size=getattr(c, 'n_embd', None), num_hidden_layers=getattr(c, 'n_layer', None),
        max_position_embeddings=record['settings']['block_size'], eos_token_id=ends,
        architectures=['RunForCausalLM'], dtype=next(iter(tensors.values())).dtype, auto_map={
            'AutoConfig': 'hf_model.RunConfig', 'AutoModelForCausalLM': 'hf_model.RunForCausalLM'},
    ).save_pretrained(folder)
    save_file({f'model.{ours}': tensor for ours, tensor in tensors.items()}, folder / 'model.safetensors',
              {'format': 'pt'})
    wrapper = (ROOT / 'common/hf_model.py').read_text(encoding='utf-8')
    wrapper = wrapper.replace('from model_standard import', f'from .model_{models.model_name(record["model"])} import')
    write_file(folder / 'hf_model.py', wrapper.encode())
    models.copy_code(record['model'], folder)


# ---- from Hugging Face ----

def import_llama(folder, run, tokenizer: str | None = None, eos_token: str | None = None) -> None:
    """Create a run folder from a Hugging Face folder.

    tokenizer, eos_token: see `load_tokenizer`. tokenizer None: the folder's own; then texts start
    with bos if they do in transformers, and the chat template is copied.
    """
    from transformers import AutoTokenizer
    folder, run = Path(folder), Path(run)
    if run.exists():
        raise UserError(f'{run} already exists: choose a new run folder')
    try:
        found = filter(Path.is_file, (folder / 'tokenizer.json', folder / 'tokenizer.model'))
        path = tokenizer or next(found, None)
        if path is None:
            raise UserError(f'{folder} has neither tokenizer.json nor tokenizer.model: give --tokenizer=FILE, or '
                            '--tokenizer=gpt2')
        own = load_tokenizer(path, eos_token=eos_token)
        if eos_token and fast_tokenizer(own.name).id_to_token(own.eos_id) != eos_token:
            raise UserError(f'the tokenizer {own.name} has a fixed eos token: --eos_token is for tokenizer.json')
        hf_tokenizer = None if tokenizer else AutoTokenizer.from_pretrained(folder, **ONLY_DATA)
        bos = hf_tokenizer is not None and hf_tokenizer('a').input_ids[:1] == [own.bos_id]
        c, n_rows, block_size = standard_config(folder, own)
        theirs = load_hf_model(folder)
        c.tied_head = torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
        tensors = read_tensors(theirs, c, n_rows)
        ends = sorted({own.eos_id, *read_eos_ids(folder)})
        record = {
            'model': 'standard', 'settings': {'block_size': block_size, 'eval_seed': None, 'data': ''},
            'model_config': dataclasses.asdict(c),
            'data': {'folder': '', 'tokenizer': own.name, 'n_ids': own.n_ids, 'eos_id': own.eos_id, 'bos': bos,
                     'sha256': '', 'n_rows': n_rows, **({'ends': ends} if len(ends) > 1 else {})},
            'versions': {'torch': torch.__version__}}
        runs.check_record(record)
    except UserError:
        raise
    except Exception as error:  # transformers and safetensors raise various errors for damaged files
        raise UserError(f'{folder} could not be read ({type(error).__name__}: {first_line(error)})')
    with runs.locked_run(run, is_new=True, overwrite=False):
        checkpoint.save_checkpoint(run, 0, tensors, {'step': 0})
        runs.save_run(run, record)
        copy_tokenizer(run, own.name, eos_token)
        if hf_tokenizer and isinstance(hf_tokenizer.chat_template, str):
            write_file(run / runs.CHAT_TEMPLATE, hf_tokenizer.chat_template.encode())
    sample = command('sample.py', run, 'Once upon a time')
    print(f'imported {run} (model_standard, tokenizer {own.name}). Sample: {sample}; finetune: train.py with '
          f'{shlex.quote(f"--init_from={run}")}')
    if len(ends) > 1:
        name_of = fast_tokenizer(own.name).id_to_token
        print(f'Generation stops at {", ".join(f"{name_of(i)!r} ({i})" for i in ends)}; documents at {own.eos_id}')


def read_eos_ids(folder: Path) -> set[int]:
    """Return the eos ids in config.json and generation_config.json of a Hugging Face folder."""
    found = []
    for path in (folder / 'config.json', folder / 'generation_config.json'):
        ends = read_json(path, 'copy it again').get('eos_token_id') if path.is_file() else []
        found += ends if isinstance(ends, list) else [ends]
    return {i for i in found if type(i) is int}


def standard_config(folder: Path, tokenizer: Tokenizer) -> tuple:
    """Return (model_standard.Config, vocabulary rows, maximum length) of a Hugging Face folder.

    Raises UserError for features that model_standard does not support.
    """
    from transformers import AutoConfig
    if not (folder / 'config.json').is_file():
        raise UserError(f'{folder} is not a Hugging Face folder: it has no config.json')
    theirs = AutoConfig.from_pretrained(folder, **ONLY_DATA)
    family, rope, n_rows = theirs.model_type, getattr(theirs, 'rope_parameters', None), theirs.vocab_size
    if family not in FAMILIES:
        raise UserError(f'{folder} has model_type = {family!r}: expected one of {", ".join(FAMILIES)}')
    if theirs.hidden_act != 'silu':
        raise UserError(f'{folder} has hidden_act = {theirs.hidden_act!r}: model_standard only has silu')
    if n_rows < tokenizer.n_ids:
        extra = [f'{tokenizer.decode([i]).decode(errors="replace")!r} ({i})' for i in range(n_rows, tokenizer.n_ids)]
        raise UserError(f'{folder} has a vocabulary of {n_rows} rows, but the tokenizer {tokenizer.name} has '
                        f'{tokenizer.n_ids} ids: remove {", ".join(extra[:5])} from the tokenizer, or choose another '
                        'with --tokenizer')
    # Hugging Face's padding rows (more rows than ids) are part of the softmax; ours are not.
    is_padded = n_rows > tokenizer.n_ids
    c = models.make_config('standard', dict(
        n_layer=theirs.num_hidden_layers, n_head=theirs.num_attention_heads, n_embd=theirs.hidden_size,
        n_ffn=theirs.intermediate_size, n_kv_head=theirs.num_key_value_heads,
        head_size=getattr(theirs, 'head_dim', None), qkv_bias=family == 'qwen2', qk_norm=family == 'qwen3',
        rope_theta=float(rope['rope_theta']), rope_scaling=rope_scaling_of(rope, folder),
        norm_eps=theirs.rms_norm_eps, tied_head=theirs.tie_word_embeddings, window=window_of(theirs, folder),
        vocab_size=n_rows if is_padded else padded_vocab(n_rows), pad_rows_in_loss=is_padded, n_ids=tokenizer.n_ids,
        eos_id=None))
    return c, n_rows, theirs.max_position_embeddings


def rope_scaling_of(rope: dict, folder) -> tuple[float, ...] | None:
    """Convert Hugging Face's rope_parameters to model_standard.Config.rope_scaling."""
    if rope['rope_type'] == 'default':
        return None
    if rope['rope_type'] == 'linear':
        return (rope['factor'], *LINEAR)
    if rope['rope_type'] == 'llama3':
        names = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')
        return tuple(rope[name] for name in names)
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
    tensors, state = {}, theirs.state_dict()
    for ours, parts in hf_tensor_map(c, n_rows).items():
        tensors[ours] = torch.cat([state[name] for name, _ in parts])
    for name in {'embed.weight', 'head.weight'} & tensors.keys():
        tensors[name] = F.pad(tensors[name], (0, 0, 0, c.vocab_size - n_rows))
    return tensors


def load_hf_model(folder: Path) -> torch.nn.Module:
    """Load a Hugging Face folder in its dtype. UserError for missing or unexpected tensors."""
    from transformers import AutoModelForCausalLM
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype='auto', output_loading_info=True,
                                                        ignore_mismatched_sizes=True, **ONLY_DATA)
    for kind, names in info.items():
        if names:
            raise UserError(f'{folder} does not fit its config.json: {kind.replace("_", " ")} {sorted(names)[:3]}')
    return theirs


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        jobs = [s.from_llama, s.to_llama, s.to_hf]
        if len(positional) != 1 or len(jobs) - jobs.count(None) != 1:
            raise UserError('expected one run and one option. Usage: python -m common.export RUN --to_hf=FOLDER, '
                            '--to_llama=FOLDER or --from_llama=FOLDER')
        from transformers.utils import logging
        logging.disable_progress_bar()
        run, = positional
        models.add_file(s.model)
        if s.from_llama is not None:
            import_llama(s.from_llama, run, s.tokenizer, s.eos_token)
        else:
            export_run(run, s.to_llama if s.to_hf is None else s.to_hf, s.to_hf is None, s.code)


if __name__ == '__main__':
    main()
