"""Hugging Face's Llama, Mistral, Qwen2 and Qwen3, all of which model_standard.py computes."""
import dataclasses

import torch

from lm_architectures.files import first_line, warn_once
from lm_architectures.run import checkpoint, models

FAMILIES = {'llama': 'Llama', 'mistral': 'Mistral', 'qwen2': 'Qwen2', 'qwen3': 'Qwen3'}  # `model_type`: class
SETTINGS = {  # model_standard's Config: theirs
    'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads', 'n_embd': 'hidden_size', 'head_size': 'head_dim',
    'n_kv_head': 'num_key_value_heads', 'n_ffn': 'intermediate_size', 'norm_eps': 'rms_norm_eps',
    'tied_head': 'tie_word_embeddings'}
LLAMA3 = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'  # rope_scaling
LINEAR = 1e9, 2e9, 1.0  # end of a rope_scaling that divides all frequencies by one factor


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


def to_family(c, tensors: dict, n_rows: int, max_tokens: int = 8192, ends: int | list[int] | None = None,
              family: str = 'llama'):
    """Return a Hugging Face model with the tensors (and dtype) of a Standard model.

    c: the model's Config. n_rows: vocabulary of the result, without padding. ends: ids that end a
    text in `generate`. There is no pad id, because `generate` would mask it in prompts. family: see
    `family_of`.
    """
    import transformers
    rope = {'rope_type': 'default', 'rope_theta': c.rope_theta}
    if c.rope_scaling:
        *factors, tokens = c.rope_scaling
        is_linear = c.rope_scaling[1:] == LINEAR
        rope |= {'rope_type': 'linear', 'factor': factors[0]} if is_linear else {
            'rope_type': 'llama3', **dict(zip(LLAMA3, (*factors, int(tokens))))}
    window = {}
    if family != 'llama':  # theirs counts the query itself
        window = {'sliding_window': None if c.window is None else c.window + 1}
    if family.startswith('qwen') and c.window is not None:
        window |= {'use_sliding_window': True, 'max_window_layers': 0}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=n_rows, rope_parameters=rope, max_position_embeddings=max_tokens, bos_token_id=None,
        eos_token_id=ends, pad_token_id=None, **window, **{name: getattr(c, ours) for ours, name in SETTINGS.items()})
    family_class = getattr(transformers, f'{FAMILIES[family]}ForCausalLM')
    return family_class.from_pretrained(None, config=config, state_dict=family_tensors(c, tensors, n_rows),
                                        dtype=tensors['embed.weight'].dtype)


def family_tensors(c, tensors: dict, n_rows: int) -> dict:
    """Return a Standard model's tensors under Hugging Face names, as views (`hf_tensor_map`)."""
    theirs = {}
    for ours, parts in hf_tensor_map(c, n_rows).items():
        names, rows = zip(*parts)
        theirs |= zip(names, tensors[ours][:sum(rows)].split(rows))
    return theirs


def family_of(record: dict, c, tensors: dict) -> str | None:
    """Return the family that gives a run's logits, or None. Mistral without a window is a Llama.

    c, tensors: the model's Config and the tensors of its checkpoint. Compares a narrow copy of the
    model on up to 160 tokens. They include the first and last ids, but not eos, which only
    separates documents here.
    """
    is_alike = {'n_ffn', 'window', 'tied_head', 'rope_scaling', 'qkv_bias', 'qk_norm'} <= vars(c).keys()
    if not is_alike or tensors.keys() != hf_tensor_map(c, c.n_ids).keys():
        return None
    if c.qkv_bias and c.qk_norm or c.n_embd % c.n_head:  # no family has both; transformers needs a multiple of n_head
        return None
    family = 'qwen2' if c.qkv_bias else 'qwen3' if c.qk_norm else 'llama' if c.window is None else 'mistral'
    ids = torch.tensor([[i % c.n_ids for i in range(-80, 80) if i % c.n_ids != c.eos_id]])
    try:
        model = narrow_copy(models.model_file(record['model'], record['code']).Model, c)
        ours = [model.logits(ids)]  # as in training
        with torch.no_grad():
            ours.append(model.logits(ids))  # as in evaluation
            theirs = to_family(model.config, checkpoint.checkpoint_tensors(model), c.n_ids, family=family)
            logits = theirs.eval()(ids).logits
    except Exception as error:  # of an edited model, which may not run at this size or have other shapes
        warn_once(f'model_{record["model"]} is not compared with {FAMILIES[family]}, because a narrow copy of it fails '
                  f'({type(error).__name__}: {first_line(error)})')
        return None
    return family if all((x[..., :c.n_ids] - logits).abs().max() < 1e-4 for x in ours) else None


def narrow_copy(Model: type, c) -> torch.nn.Module:
    """Return a model with c's layers, but narrow, and with random weights instead of the run's."""
    width = 3 * c.n_head * (24 // c.n_head + 1)  # a multiple of n_head
    narrow = dataclasses.replace(c, n_embd=width, n_ffn=88, window=c.window and min(c.window, 64))
    model, random = Model(narrow).double().eval(), torch.Generator().manual_seed(0)
    for p in model.parameters():  # so large that each weight counts; the logits are near 1
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5, random)
        else:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=random)
    return model
