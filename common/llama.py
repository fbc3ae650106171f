"""A Standard run as a Hugging Face Llama folder, and back."""
import dataclasses
import os
import shutil
from pathlib import Path

import torch

from common.runs import UserError, first_line, load_run, locked, make_config, model_file, save_checkpoint, save_run
from data.tokenizers import Tokenizer, padded_vocab


def llama_weights(block: torch.nn.Module) -> list[tuple]:
    """[(name in a Hugging Face Llama layer, the weight's part in a model_standard block)].

    Ours joins q, k, v into one matrix, and gate, up into another.
    """
    q, k, v = block.qkv.weight.chunk(3)
    gate, up = block.gate_up.weight.chunk(2)
    return [('input_layernorm', block.attn_norm.weight), ('post_attention_layernorm', block.ffn_norm.weight),
            ('self_attn.q_proj', q), ('self_attn.k_proj', k), ('self_attn.v_proj', v),
            ('self_attn.o_proj', block.attn_out.weight),
            ('mlp.gate_proj', gate), ('mlp.up_proj', up), ('mlp.down_proj', block.ffn_out.weight)]


def to_llama(model: torch.nn.Module) -> torch.nn.Module:
    """A Hugging Face LlamaForCausalLM with the weights of a model_standard.Model.

    Equal but for documents, which Llama does not know, and for the rows that pad the vocabulary, which it has not.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    c = model.config
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.n_ids, hidden_size=c.n_embd, intermediate_size=c.n_ffn, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, tie_word_embeddings=c.tied_head,
        bos_token_id=None, eos_token_id=c.eos_id, pad_token_id=0, max_position_embeddings=8192))
    weights = {'model.embed_tokens': model.embed.weight[:c.n_ids], 'model.norm': model.norm.weight,
               'lm_head': model.head.weight[:c.n_ids]}
    for i, block in enumerate(model.blocks):
        weights |= {f'model.layers.{i}.{name}': weight for name, weight in llama_weights(block)}
    llama.load_state_dict({f'{name}.weight': weight.detach().clone() for name, weight in weights.items()})
    return llama.to(model.embed.weight.device).eval()


def export_llama(run, folder) -> None:
    """Writes a Standard run as a Hugging Face Llama folder, with the tokenizer where it is a file."""
    if Path(folder).exists():
        raise UserError(f'{folder} exists: remove it first, or write to another folder')
    model, record = load_run(run)
    if record['model'] != 'standard' or model.config.window is not None:
        raise UserError(f'{run} is a model_{record["model"]} with window = {getattr(model.config, "window", None)}: '
                        'only model_standard without a window is a Llama')
    temporary = Path(f'{folder}.writing')
    shutil.rmtree(temporary, ignore_errors=True)
    llama = to_llama(model)
    block_size = record['settings']['block_size']
    llama.config.max_position_embeddings = block_size
    llama.save_pretrained(temporary)
    tokenizer = Path(record['data']['tokenizer'])
    if tokenizer.is_file():
        shutil.copy(tokenizer, temporary)
    os.replace(temporary, folder)
    print(f'{folder} is a Llama of {block_size} positions; its tokenizer is {tokenizer.name}')


def import_llama(folder, run, tokenizer: Tokenizer) -> None:
    """Makes a run folder from a Hugging Face Llama folder without grouped queries or biases."""
    if Path(run).exists():
        raise UserError(f'{run} exists: remove it first, or write to another folder')
    c, config = read_llama_config(folder, tokenizer)
    theirs = read_llama_weights(folder)
    model = model_file('standard').Model(config)
    with torch.no_grad():
        model.embed.weight.zero_()[:c.vocab_size] = theirs['model.embed_tokens.weight']
        model.head.weight[:c.vocab_size] = theirs['lm_head.weight']
        model.norm.weight.copy_(theirs['model.norm.weight'])
        for i, block in enumerate(model.blocks):
            for name, part in llama_weights(block):
                part.copy_(theirs[f'model.layers.{i}.{name}.weight'])
    Path(run).mkdir(parents=True)
    with locked(run):
        save_checkpoint(run, 0, {'model.safetensors': dict(model.named_parameters())}, {'step': 0})
        save_run(run, {
            'model': 'standard', 'settings': {'block_size': c.max_position_embeddings, 'data': ''},
            'model_config': dataclasses.asdict(config),
            'data': {'folder': '', 'tokenizer': tokenizer.name, 'n_ids': tokenizer.n_ids, 'eos_id': tokenizer.eos_id,
                     'sha256': ''},
            'versions': {'torch': torch.__version__}})
    print(f'{run} is a run of model_standard: python sample.py {run} "..."; train.py starts from it with '
          f'--init_from={run} --eos_id=None')


def read_llama_config(folder, tokenizer: Tokenizer) -> tuple:
    """The config of a Llama folder, and model_standard's Config for it; UserError where there can be none."""
    from transformers import LlamaConfig
    try:
        c = LlamaConfig.from_pretrained(folder, local_files_only=True)
        rope = c.rope_parameters
        other_ids = f'{c.vocab_size} ids where {tokenizer.name} has {tokenizer.n_ids}'
        lacks = [what for what, is_so in (
            ('grouped queries', c.num_key_value_heads != c.num_attention_heads),
            ('biases', c.attention_bias or c.mlp_bias),
            ('heads of another size', c.head_dim * c.num_attention_heads != c.hidden_size),
            ('scaled positions', rope['rope_type'] != 'default'),
            ('no positions', c.max_position_embeddings < 1),
            (other_ids, c.vocab_size != tokenizer.n_ids)) if is_so]
    except Exception as error:  # the library raises nothing narrower for a config.json that is damaged
        raise UserError(f'{folder} is not a Llama folder: {first_line(error)}')
    if lacks:
        raise UserError(f'{folder} has {lacks[0]}, which model_standard has not')
    return c, make_config('standard', dict(
        n_layer=c.num_hidden_layers, n_head=c.num_attention_heads, n_embd=c.hidden_size, n_ffn=c.intermediate_size,
        rope_theta=rope['rope_theta'], norm_eps=c.rms_norm_eps, tied_head=c.tie_word_embeddings,
        vocab_size=padded_vocab(c.vocab_size), n_ids=c.vocab_size, eos_id=None))


def read_llama_weights(folder) -> dict:
    """The tensors of a Llama folder by name; UserError if one is missing, or of another shape than its config says."""
    from transformers import LlamaForCausalLM
    try:
        llama, report = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f'{folder} has no weights of a Llama: {first_line(error)}')
    unfit = [*report['missing_keys'], *report['unexpected_keys'], *report['mismatched_keys']]
    if unfit:  # the library only warns, and draws random numbers
        raise UserError(f'{folder} does not fit its config.json: {unfit[0]} is missing, unknown or of another shape')
    return llama.state_dict()
