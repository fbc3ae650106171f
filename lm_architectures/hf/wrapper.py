"""Hugging Face wrapper for a run of this repository.

lm_architectures/hf/export.py writes this file next to the weights, with imports of the run's model
in place of model_standard. The folder then works with only torch and transformers installed:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Batches may be padded on either side. `generate` uses the model's own cache. `AutoModel` gives the
states before the output head. Trainer, PEFT and gradient checkpointing work (docs/pretrained.md).
"""
import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.utils import can_return_tuple

from model_standard import Config, Model


class RunConfig(PretrainedConfig):
    """Config with `model_config`: the fields of the model's own `Config`."""

    model_type = 'language-model-architectures'

    def __init__(self, model_config: dict | None = None, **kwargs):
        self.model_config = model_config or {}
        super().__init__(**{'tie_word_embeddings': True, **kwargs})


class RunModel(PreTrainedModel):
    """The model without its output head."""

    config_class = RunConfig
    _input_embed_layer = 'embed'  # for get_input_embeddings

    def __init__(self, config: RunConfig):
        super().__init__(config)
        with torch.device('cpu'):  # not on transformers' meta device, which would lose the rotary tables
            values = {name: tuple(x) if isinstance(x, list) else x for name, x in config.model_config.items()}
            self.model = Model(Config(**values))
        for module in self.model.modules():
            module.unsaved_buffers = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)
                                      if name in module._non_persistent_buffers_set}
        self._tied_weights_keys = dict(repeated(self.named_parameters(remove_duplicate=False)))
        self.shared = repeated(self.named_modules(remove_duplicate=False))
        self.supports_gradient_checkpointing = any(hasattr(m, 'checkpoints') for m in self.modules())
        self.decoding = None  # during `generate`: (cache, its tokens, their padding, its size)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """Restore the buffers that are not saved, which transformers empties. Weights stay."""
        for name, value in getattr(module, 'unsaved_buffers', {}).items():
            getattr(module, name).copy_(value)

    def get_output_embeddings(self):
        return getattr(self.model, 'head', None)

    def set_output_embeddings(self, module):
        self.model.head = module

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs):
        """Return the embedding. ValueError for another number of tokens than the model has."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(f'resize_token_embeddings({new_num_tokens}): the model has {self.config.vocab_size} ids, '
                             'which cannot change. Train it with a tokenizer that has the tokens you need')
        return self.get_input_embeddings()

    def _set_gradient_checkpointing(self, enable=True, **kwargs):
        for module in self.modules():
            if hasattr(module, 'checkpoints'):
                module.checkpoints = enable

    def check_adapters(self):
        """Raise ValueError if an adapter replaced a module that has a second place in the model."""
        for name, other in self.shared:
            if self.get_submodule(name) is not self.get_submodule(other):
                raise ValueError(f'{other} and {name} are one module, but only one of them was replaced, for example '
                                 'by an adapter: leave both out of target_modules')

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, **kwargs):
        """Return the states before the output head, (B, T, C), for input_ids (B, T)."""
        self.check_adapters()
        tokens, _, back = aligned(input_ids, attention_mask)
        return BaseModelOutput(last_hidden_state=take(self.model.final_hidden(tokens), back))


def repeated(named) -> list[tuple[str, str]]:
    """Return (name, first name) of parameters or modules that occur under several names."""
    first = {}
    return [(name, first[x]) for name, x in named if first.setdefault(x, name) != name]


def aligned(input_ids, attention_mask):
    """Move texts (B, T) to position 0. Returns tokens, and the positions to take for it and back.

    Right padding has no effect on a causal model.
    """
    T, n_pads = input_ids.shape[1], input_ids.new_zeros(len(input_ids), 1)
    if attention_mask is not None:
        n_pads = (attention_mask.cumsum(1) == 0).sum(1, keepdim=True)  # left padding
    shift = torch.arange(T, device=input_ids.device) + n_pads
    return input_ids.gather(1, shift.clamp(max=T - 1)), shift, (shift - 2 * n_pads).clamp(min=0)


def take(x, positions):
    """Return x (B, T, C) at positions (B, T)."""
    return x.gather(1, positions[..., None].expand_as(x))


class RunForCausalLM(RunModel, GenerationMixin):
    accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides by the number of micro-batches

    @can_return_tuple
    def forward(self, input_ids, attention_mask=None, labels=None, output_hidden_states=None, decode=False, **kwargs):
        """Return logits (B, T, V) for input_ids (B, T), and the loss if there are labels.

        attention_mask, labels: (B, T); labels equal input_ids, with -100 where a token is ignored.
        In training mode with labels, logits are left out, because the model's own loss needs none.
        output_hidden_states: also return a tuple with the states before the head, (B, T, C). With
        decode=True, which `generate` sets, return only the last tokens' logits (B, 1, V).
        """
        self.check_adapters()
        tokens, shift, back = aligned(input_ids, attention_mask)
        if decode:
            return CausalLMOutput(logits=self._next_logits(input_ids, tokens, shift[:, 0])[:, None])
        loss = logits = states = None
        if labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=-100).gather(1, shift.clamp(max=labels.shape[1] - 1))
            loss = self.model(tokens, targets.masked_fill(targets < 0, -1))['loss']
        if labels is None or not self.training:
            logits = take(self.model.logits(tokens)[..., :self.config.vocab_size], back)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if wants_states:
            states = take(self.model.final_hidden(tokens), back),
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=states)

    # ---- generate ----

    def generate(self, *args, **kwargs):
        """Generate as with any Hugging Face model. The cache is freed after the call."""
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.decoding = None

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, use_cache=True, **kwargs):
        return {'input_ids': input_ids, 'attention_mask': attention_mask, 'decode': use_cache}

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def _next_logits(self, input_ids, tokens, n_pads):
        """Return the last tokens' logits (B, V), feeding only tokens that are not in the cache yet.

        input_ids (B, T): left-padded by n_pads (B,); tokens: the same without left padding. The
        cache is refilled if its texts changed, for example by beam search.
        """
        B, T = input_ids.shape
        if not getattr(self.model, 'new_cache', None):
            return self.model.logits(tokens)[torch.arange(B), T - n_pads - 1, :self.config.vocab_size]
        cache, held, held_pads, size = self.decoding or (None, input_ids[:, :0], n_pads, 0)
        n = held.shape[1]
        is_same = len(held) == B and n < T <= size and held.equal(input_ids[:, :n]) and held_pads.equal(n_pads)
        if is_same:
            logits = self.model.extend(input_ids[:, n:], cache)
        else:
            size = 2 * T + 64
            cache = self.model.new_cache(B, size)
            logits = self.model.extend(tokens, cache, T - n_pads)
        self.decoding = cache, input_ids, n_pads, size
        return logits[..., :self.config.vocab_size]
