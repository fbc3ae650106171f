"""Hugging Face's Llama, Mistral, Qwen2 and Qwen3, all of which model_standard.py computes."""
import inspect
import re
import sys

from attn_kernels import digest
from lm_architectures.run import models

LINEAR = 1e9, 2e9, 1.0  # end of a rope_scaling that divides all frequencies by one factor
FAMILIES = {'llama': 'Llama', 'mistral': 'Mistral', 'qwen2': 'Qwen2', 'qwen3': 'Qwen3'}  # `model_type`: class
STANDARD_CODE = 'b5fb9893641171dc'  # digest of what computes the same as these: see `code_digest`


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
        factor, low, high, tokens = c.rope_scaling
        rope |= {'rope_type': 'linear', 'factor': factor}
        if (low, high, tokens) != LINEAR:
            rope |= {'rope_type': 'llama3', 'low_freq_factor': low, 'high_freq_factor': high,
                     'original_max_position_embeddings': int(tokens)}
    window = {}
    if family != 'llama':  # theirs counts the query itself
        window = {'sliding_window': None if c.window is None else c.window + 1}
    if family.startswith('qwen') and c.window is not None:
        window |= {'use_sliding_window': True, 'max_window_layers': 0}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=n_rows, hidden_size=c.n_embd, intermediate_size=c.n_ffn, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_size, rms_norm_eps=c.norm_eps,
        rope_parameters=rope, tie_word_embeddings=c.tied_head, max_position_embeddings=max_tokens,
        bos_token_id=None, eos_token_id=ends, pad_token_id=None, **window)
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


def code_digest(module) -> str | None:
    """Return the digest of a model's file and attn_kernels.py, None if it does not use that."""
    kernels = sys.modules.get(getattr(getattr(module, 'attention', None), '__module__', None))
    if kernels is None:
        return None
    text = '\n'.join(map(inspect.getsource, (module, kernels)))
    return digest(re.sub(r'^from \.', 'from ', text, flags=re.MULTILINE))  # in a run's copy, imports are relative


def family_of(record: dict, c) -> tuple[str | None, str]:
    """Return the family that computes what a run computes, or None, and why. c: the model's Config.

    Mistral without a window is a Llama.
    """
    if code_digest(models.model_file(record['model'], record['code'])) != STANDARD_CODE:
        return None, f'model_{record["model"]}.py is not the unedited model_standard.py, which is a Llama'
    if c.qkv_bias and c.qk_norm:
        return None, 'no family has both qkv_bias and qk_norm'
    family = 'qwen2' if c.qkv_bias else 'qwen3' if c.qk_norm else 'llama' if c.window is None else 'mistral'
    return family, f'it has the shape of a {FAMILIES[family]}'
