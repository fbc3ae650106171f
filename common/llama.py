"""Runs of model_standard from Hugging Face folders of the Llama family, and Standard runs as Llama folders.

Llama 2 and 3, Mistral, TinyLlama, SmolLM2, Qwen2, Qwen2.5 and Qwen3 differ in settings of model_standard.py alone. A
folder is read tensor by tensor; one that has a tensor with no place here, or lacks one, is refused.
"""
import dataclasses
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import checkpoint, runs
from common.files import UserError, first_line, write_file
from data.shards import keep_tokenizer
from data.tokenizers import Tokenizer, load_tokenizer, padded_vocab

FAMILIES = ('llama', 'mistral', 'qwen2', 'qwen3')  # `model_type` in config.json


def parts_of(c) -> dict[str, list[tuple[str, int]]]:
    """{tensor of a model_standard.Model: [(tensor of Hugging Face's, its rows)]} for a Config.

    Ours is theirs, one below the other: q, k, v are one matrix here, and so are gate and up.
    """
    q, kv = c.n_head * c.head_size, c.n_kv_head * c.head_size
    of_block = {
        'attn_norm.weight': [('input_layernorm.weight', c.n_embd)],
        'qkv.weight': [(f'self_attn.{name}_proj.weight', rows) for name, rows in (('q', q), ('k', kv), ('v', kv))],
        'attn_out.weight': [('self_attn.o_proj.weight', c.n_embd)],
        'ffn_norm.weight': [('post_attention_layernorm.weight', c.n_embd)],
        'gate_up.weight': [('mlp.gate_proj.weight', c.n_ffn), ('mlp.up_proj.weight', c.n_ffn)],
        'ffn_out.weight': [('mlp.down_proj.weight', c.n_embd)]}
    if c.qkv_bias:
        of_block['qkv.bias'] = [(name.replace('weight', 'bias'), rows) for name, rows in of_block['qkv.weight']]
    if c.qk_norm:
        of_block |= {f'{name}.weight': [(f'self_attn.{name}.weight', c.head_size)] for name in ('q_norm', 'k_norm')}
    found = {'norm.weight': [('model.norm.weight', c.n_embd)]}
    for i in range(c.n_layer):
        for ours, parts in of_block.items():
            found[f'blocks.{i}.{ours}'] = [(f'model.layers.{i}.{name}', rows) for name, rows in parts]
    return found


def tables_of(c) -> dict[str, str]:
    """{table of a model_standard.Model with a row for each id, then padding: Hugging Face's}."""
    return {'embed.weight': 'model.embed_tokens.weight'} | (
        {} if c.tied_head else {'head.weight': 'lm_head.weight'})


# ---- to Hugging Face ----

def llama_config(c, n_rows: int, max_tokens: int, eos_id: int | None):
    """The LlamaConfig of a model_standard.Config. Documents are left out: Llama does not know them.

    eos_id ends a text in generation. No id is padding: where one is, `generate` hides it in prompts.
    """
    from transformers import LlamaConfig
    rope = {'rope_type': 'default', 'rope_theta': c.rope_theta}
    if c.rope_scaling:
        factor, low, high, tokens = map(float, c.rope_scaling.split(','))
        rope |= {'rope_type': 'linear', 'factor': factor}
        if c.rope_scaling != linear_scaling(factor):
            rope |= {'rope_type': 'llama3', 'low_freq_factor': low, 'high_freq_factor': high,
                     'original_max_position_embeddings': int(tokens)}
    return LlamaConfig(
        vocab_size=n_rows, hidden_size=c.n_embd, intermediate_size=c.n_ffn, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_size, rms_norm_eps=c.norm_eps,
        rope_parameters=rope, tie_word_embeddings=c.tied_head, max_position_embeddings=max_tokens,
        bos_token_id=None, eos_token_id=eos_id, pad_token_id=None)


def llama_tensors(c, tensors: dict, n_rows: int) -> dict:
    """Tensors of a model_standard.Model under Hugging Face's names, as views. n_rows: of the vocabulary."""
    theirs = {name: tensors[ours][:n_rows] for ours, name in tables_of(c).items()}
    for ours, parts in parts_of(c).items():
        names, rows = zip(*parts)
        theirs |= dict(zip(names, tensors[ours].split(rows)))
    return theirs


def to_llama(model: torch.nn.Module) -> torch.nn.Module:
    """A Hugging Face LlamaForCausalLM with the weights of a model_standard.Model.

    Equal but for documents, which Llama does not know, and for the rows that pad the vocabulary, which it has not.
    """
    from transformers import LlamaForCausalLM
    c = model.config
    llama = LlamaForCausalLM(llama_config(c, c.n_ids, 8192, c.eos_id))
    tensors = llama_tensors(c, dict(model.named_parameters()), c.n_ids)
    if c.tied_head:
        tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
    llama.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()})
    return llama.to(model.embed.weight.device).eval()


def export_llama(run, folder) -> None:
    """Writes a Standard run as a Hugging Face Llama folder, in its checkpoint's dtype, with its tokenizer's file."""
    folder = Path(folder)
    if folder.exists():
        raise UserError(f'{folder} exists: give --to_llama the name of a folder that is not there yet')
    record = runs.read_run(run)
    c = runs.saved_config(record, run)
    if record['model'] != 'standard':
        raise UserError(f'{run} is a run of model_{record["model"]}: only model_standard is a Llama')
    for setting, plain in (('window', None), ('qkv_bias', False), ('qk_norm', False)):
        if getattr(c, setting) != plain:
            raise UserError(f'{run} has {setting} = {getattr(c, setting)}, which a Llama has not')
    if c.n_embd % c.n_head:
        raise UserError(f'{run} has n_embd = {c.n_embd} and n_head = {c.n_head}: transformers takes a Llama only where '
                        'n_head divides n_embd')
    tensors = checkpoint.load_checkpoint(run, ('model.safetensors',))[1]['model.safetensors']
    n_rows, block_size = record['data'].get('n_rows', c.n_ids), record['settings']['block_size']
    config = llama_config(c, n_rows, block_size, record['data']['eos_id'])
    config.architectures, config.dtype = ['LlamaForCausalLM'], tensors['embed.weight'].dtype
    temporary = folder.with_name(f'{folder.name}.writing')
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    config.save_pretrained(temporary)
    theirs = {name: tensor.contiguous() for name, tensor in llama_tensors(c, tensors, n_rows).items()}
    save_file(theirs, temporary / 'model.safetensors', {'format': 'pt'})
    (temporary / 'model.safetensors').chmod((temporary / 'config.json').stat().st_mode)
    tokenizer = keep_tokenizer(temporary, record['data']['tokenizer'])
    if tokenizer == 'tokenizer.json':
        start_as_trained(temporary, record['data']['bos'])
    os.replace(temporary, folder)
    print(f'{folder} is a Llama of {block_size} positions; its tokenizer is {tokenizer}')


def start_as_trained(folder: Path, bos: bool) -> None:
    """Has transformers start the texts of a folder's tokenizer.json with its bos, or with nothing, unless it does."""
    from tokenizers import Tokenizer as Fast
    from tokenizers.processors import TemplateProcessing
    path = folder / 'tokenizer.json'
    tokenizer = load_tokenizer(path)
    if starts_with_bos(folder, tokenizer) != bos:
        fast = Fast.from_file(str(path))
        start = [fast.id_to_token(tokenizer.bos_id)] if bos else []
        fast.post_processor = TemplateProcessing(
            single=[*start, '$A'], special_tokens=[(token, tokenizer.bos_id) for token in start])
        write_file(path, fast.to_str(pretty=True).encode())


# ---- from Hugging Face ----

def import_llama(folder, run, tokenizer: Tokenizer | None = None) -> None:
    """Makes a run folder from a Hugging Face folder. Raises UserError if a tensor of it has no place, or is missing.

    tokenizer None: the folder's own, and GPT-2's if it has none and as many ids. Texts start with bos if the folder's
    own says so.
    """
    folder, run = Path(folder), Path(run)
    if is_hugging_face(run) and not is_hugging_face(folder):
        raise UserError(f'{run} is the Hugging Face folder, so it comes first: python eval.py {run} '
                        f'--from_llama={folder}')
    if run.exists():
        raise UserError(f'{run} exists: give --from_llama the name of a run folder that is not there yet')
    family_of(folder)
    bos = is_guess = False
    if tokenizer is None:
        own = [folder / name for name in ('tokenizer.json', 'tokenizer.model') if (folder / name).is_file()]
        tokenizer = load_tokenizer(own[0] if own else 'gpt2')
        bos, is_guess = bool(own) and starts_with_bos(folder, tokenizer), not own
    c, n_rows, block_size = standard_config(folder, tokenizer)
    if is_guess and n_rows > padded_vocab(tokenizer.n_ids):
        raise UserError(f"{folder} has neither tokenizer.json nor tokenizer.model, and {n_rows} ids, so GPT-2's "
                        f'{tokenizer.n_ids} are not its own: give its tokenizer with --tokenizer=FILE')
    with torch.device('meta'):
        shapes = {name: p.shape for name, p in runs.model_file('standard').Model(c).named_parameters()}
    tensors = read_tensors(folder, c, n_rows, shapes)
    with runs.claimed(run, is_new=True, overwrite=False):
        checkpoint.save_checkpoint(run, 0, {'model.safetensors': tensors}, {'step': 0})
        runs.save_run(run, {
            'model': 'standard', 'settings': {'block_size': block_size, 'eval_seed': None, 'data': ''},
            'model_config': dataclasses.asdict(c),
            'data': {'folder': '', 'tokenizer': tokenizer.name, 'n_ids': tokenizer.n_ids, 'eos_id': tokenizer.eos_id,
                     'bos': bos, 'sha256': '', 'n_rows': n_rows},
            'versions': {'torch': torch.__version__}})
    print(f'{run} is a run of model_standard, its tokenizer is {tokenizer.name}: python sample.py {run} "..."; '
          f'train.py starts from it with --init_from={run}')
    ends = json.loads((folder / 'config.json').read_bytes()).get('eos_token_id')
    if ends is not None and tokenizer.eos_id not in (ends if isinstance(ends, list) else [ends]):
        print(f'{folder}/config.json ends texts with the id {ends}: sample.py does not stop there, but at '
              f"{tokenizer.eos_id}, which ends the tokenizer's documents")


def starts_with_bos(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether transformers starts every text with bos where it reads the folder's tokenizer.

    Where it cannot, as a tokenizer.model without protobuf, tokenizer_config.json decides, and a line says so.
    """
    from transformers import AutoTokenizer
    try:
        ids = AutoTokenizer.from_pretrained(folder, local_files_only=True)('a').input_ids
    except Exception as error:  # it needs more than ours does, and raises what it likes
        try:
            settings = json.loads((folder / 'tokenizer_config.json').read_bytes())
        except (OSError, ValueError):
            return False
        bos = isinstance(settings, dict) and settings.get('add_bos_token') is True and tokenizer.bos_id is not None
        print(f'{folder}: transformers cannot read its tokenizer ({first_line(error)}): by tokenizer_config.json texts '
              f'start {"with" if bos else "without"} bos')
        return bos
    return tokenizer.bos_id is not None and ids[0] == tokenizer.bos_id


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder's config.json is of a Hugging Face model."""
    try:
        return 'model_type' in json.loads((folder / 'config.json').read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def family_of(folder: Path) -> str:
    """The `model_type` of a Hugging Face folder. Raises UserError unless it is one of FAMILIES."""
    if not is_hugging_face(folder):
        raise UserError(f'{folder} is no Hugging Face folder: expected config.json with a model_type, and safetensors')
    family = json.loads((folder / 'config.json').read_bytes())['model_type']
    if family not in FAMILIES:
        raise UserError(f'{folder} is a {family}: expected one of {", ".join(FAMILIES)}')
    return family


def standard_config(folder: Path, tokenizer: Tokenizer) -> tuple:
    """The Config of model_standard for a Hugging Face folder, its rows of the vocabulary and its longest window.

    Raises UserError for what model_standard has not.
    """
    from transformers import AutoConfig
    family = family_of(folder)
    try:
        theirs = AutoConfig.from_pretrained(folder, local_files_only=True)
        rope, n_rows = theirs.rope_parameters, theirs.vocab_size
        values = dict(
            n_layer=theirs.num_hidden_layers, n_head=theirs.num_attention_heads, n_embd=theirs.hidden_size,
            n_ffn=theirs.intermediate_size, n_kv_head=theirs.num_key_value_heads,
            head_size=getattr(theirs, 'head_dim', None), qkv_bias=family == 'qwen2', qk_norm=family == 'qwen3',
            rope_theta=float(rope['rope_theta']), rope_scaling=rope_scaling_of(rope, folder),
            norm_eps=theirs.rms_norm_eps, tied_head=theirs.tie_word_embeddings, window=window_of(theirs, folder))
        activation, block_size = theirs.hidden_act, int(theirs.max_position_embeddings)
        if min(n_rows, block_size) < 1:
            raise ValueError(f'vocab_size = {n_rows} and max_position_embeddings = {block_size}')
    except UserError:
        raise
    except Exception as error:  # the library raises nothing narrower for a config.json that is damaged
        raise UserError(f'{folder}/config.json is damaged: {type(error).__name__}: {first_line(error)}')
    if activation != 'silu':
        raise UserError(f'{folder} has hidden_act = {activation!r}: model_standard has silu')
    if n_rows < tokenizer.n_ids:
        raise UserError(f'{folder} has {n_rows} rows in its vocabulary, fewer than the {tokenizer.n_ids} ids of the '
                        f'tokenizer {tokenizer.name}: give its own with --tokenizer')
    # More rows than ids: Hugging Face's padding, which takes part in the softmax. Else ours, which does not.
    is_padded = n_rows > tokenizer.n_ids
    vocabulary = dict(vocab_size=n_rows if is_padded else padded_vocab(n_rows), pad_rows_in_loss=is_padded)
    try:
        c = runs.make_config('standard', {**values, **vocabulary, 'n_ids': tokenizer.n_ids, 'eos_id': None})
    except UserError as error:
        raise UserError(f'{folder}/config.json: {error}')
    return c, n_rows, block_size


def rope_scaling_of(rope: dict, folder) -> str | None:
    """`rope_scaling` of model_standard.Config for Hugging Face's rope_parameters."""
    if rope['rope_type'] == 'default':
        return None
    if rope['rope_type'] == 'linear':
        return linear_scaling(rope['factor'])
    if rope['rope_type'] == 'llama3':
        names = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')
        return ','.join(f'{rope[name]:.15g}' for name in names)
    raise UserError(f'{folder} scales its positions by {rope["rope_type"]!r}: expected default, linear or llama3')


def linear_scaling(factor: float) -> str:
    """`rope_scaling` of model_standard.Config that slows all waves."""
    return f'{factor:.15g},1e9,2e9,1'


def window_of(theirs, folder) -> int | None:
    """`window` of model_standard.Config for a Hugging Face config: their window counts the query's own position."""
    of_layers = getattr(theirs, 'layer_types', None)
    n_sliding = 0
    if theirs.model_type != 'llama' and getattr(theirs, 'sliding_window', None) is not None:  # a Llama has none
        n_sliding = theirs.num_hidden_layers if of_layers is None else of_layers.count('sliding_attention')
    if n_sliding not in (0, theirs.num_hidden_layers):
        raise UserError(f'{folder} has a sliding window in {n_sliding} of {theirs.num_hidden_layers} layers: '
                        'model_standard has one window for all')
    return theirs.sliding_window - 1 if n_sliding else None


def read_tensors(folder: Path, c, n_rows: int, shapes: dict) -> dict:
    """The tensors of a model_standard.Model with these shapes, in the dtype that a Hugging Face folder has them in."""
    file_of = tensor_files(folder)
    parts = parts_of(c) | {ours: [(name, n_rows)] for ours, name in tables_of(c).items()}
    wanted = {name for of_ours in parts.values() for name, _ in of_ours}
    tied = {'lm_head.weight'} if c.tied_head else set()  # some files have it a second time
    for name in sorted(wanted - file_of.keys()):
        raise UserError(f'{folder} lacks the tensor {name}')
    for name in sorted(file_of.keys() - wanted - tied):
        if not name.endswith('rotary_emb.inv_freq'):  # of older folders: a function of the settings
            raise UserError(f'{folder} has a tensor {name}, for which model_standard has no place')

    def read(name, shape):
        with safe_open(file_of[name], 'pt') as file:
            tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UserError(f'{folder}: {name} has shape {tuple(tensor.shape)}, its config.json says {shape}')
        return tensor
    tensors = {}
    try:
        if tied & file_of.keys():
            rows = (n_rows, c.n_embd)
            if not torch.equal(read('lm_head.weight', rows), read('model.embed_tokens.weight', rows)):
                raise UserError(f'{folder} has tie_word_embeddings = true in config.json, and a lm_head.weight that is '
                                'not its model.embed_tokens.weight: set it to false there, if the weights are right')
        for ours, of_ours in parts.items():
            of_theirs = [read(name, (rows, *shapes[ours][1:])) for name, rows in of_ours]
            padding = of_theirs[0].new_zeros(shapes[ours][0] - sum(map(len, of_theirs)), *shapes[ours][1:])
            tensors[ours] = torch.cat([*of_theirs, padding])
    except SafetensorError as error:
        raise UserError(f'{folder} has damaged weights: {first_line(error)}')
    return tensors


def tensor_files(folder: Path) -> dict[str, Path]:
    """{tensor: the safetensors file of a Hugging Face folder that has it}."""
    index = folder / 'model.safetensors.index.json'
    try:
        names = sorted(set(json.loads(index.read_bytes())['weight_map'].values())) if index.is_file() else []
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f'{index} is damaged: copy the folder again')
    file_of = {}
    for name in names or ['model.safetensors']:
        path = folder / Path(name).name
        if not path.is_file():
            raise UserError(f'{folder} has no {path.name}: expected its weights as safetensors')
        try:
            with safe_open(path, 'pt') as file:
                file_of |= dict.fromkeys(file.keys(), path)
        except SafetensorError as error:
            raise UserError(f'{path} is damaged: {first_line(error)}')
    return file_of
