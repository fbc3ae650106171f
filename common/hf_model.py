"""Hugging Face wrapper for a run of this repository.

`python -m common.export RUN --to_hf=FOLDER` copies this file, the model file and attn_kernels.py
next to the weights. The folder then works with only torch and transformers installed:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Batches may be padded on either side. `generate` uses the model's own cache.
"""
import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from model_standard import Config, Model  # in the exported copy: the run's model


class RunConfig(PretrainedConfig):
    """Config with `model_config`: the fields of the model's own `Config`."""

    model_type = 'language-model-architectures'

    def __init__(self, model_config: dict | None = None, **kwargs):
        self.model_config = model_config or {}
        super().__init__(**{'tie_word_embeddings': True, **kwargs})


class RunForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = RunConfig

    def __init__(self, config: RunConfig):
        super().__init__(config)
        with torch.device('cpu'):  # not on transformers' meta device, which would lose the rotary tables
            self.model = Model(Config(**config.model_config))
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        own = dict(self.model.named_parameters())
        self._tied_weights_keys = {
            f'model.{name}': next(f'model.{o}' for o in own if own[o] is self.model.get_parameter(name))
            for name in names if name not in own}
        self.decoding = None  # during `generate`: (cache, its tokens, their padding, its size)
        self.post_init()

    def _init_weights(self, module):
        """Do nothing: the model initializes its own weights."""

    def forward(self, input_ids, attention_mask=None, labels=None, decode=False, **kwargs):
        """Return logits (B, T, V) for input_ids (B, T), and the loss if there are labels.

        attention_mask, labels: (B, T); labels equal input_ids, with -100 where a token is ignored.
        With decode=True, which `generate` sets, return only the last tokens' logits (B, 1, V).
        """
        B, T = input_ids.shape
        n_pads = input_ids.new_zeros(B)
        if attention_mask is not None:
            n_pads = (attention_mask.cumsum(1) == 0).sum(1)  # left padding; right padding has no effect
        shift = torch.arange(T, device=input_ids.device) + n_pads[:, None]
        tokens = input_ids.gather(1, shift.clamp(max=T - 1))  # every text starts at position 0
        if decode:
            return CausalLMOutput(logits=self._next_logits(input_ids, tokens, n_pads)[:, None])
        logits = self.model.logits(tokens)[..., :self.config.vocab_size]
        back = (shift - 2 * n_pads[:, None]).clamp(min=0)[..., None]
        logits = logits.gather(1, back.expand_as(logits))
        if labels is None:
            return CausalLMOutput(logits=logits)
        targets = torch.cat([labels[:, 1:], labels.new_full((B, 1), -100)], 1)
        targets = targets.gather(1, shift.clamp(max=T - 1)).masked_fill(shift >= T, -1)
        loss = self.model(tokens, targets.masked_fill(targets < 0, -1))['loss']
        return CausalLMOutput(loss=loss, logits=logits)

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
