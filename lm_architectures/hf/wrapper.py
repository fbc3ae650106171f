"""Hugging Face wrapper for a run of this repository.

lm_architectures/hf/export.py writes this file next to the weights, with imports of the run's model
in place of model_standard. The folder then works with only torch and transformers installed:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Batches may be padded on either side, or packed. `generate` uses the model's own cache. `AutoModel`
gives the states before the output head. Trainer, TRL's SFTTrainer, PEFT and gradient checkpointing
work (docs/pretrained.md). An input that the model cannot use is a ValueError.
"""
import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.utils import can_return_tuple

from model_standard import Config, Model

PACKED = 'cu_seq_lens_q', 'cu_seq_lens_k', 'max_length_q', 'max_length_k', 'seq_idx'  # repeat position_ids for kernels


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
        self.decoding = None  # during `generate`: (cache, its tokens, their lengths, its size)
        self.has_loss_parts = True  # until a loss has shown that it is the next-token loss alone
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

    def check(self, position_ids, others):
        """Raise ValueError for inputs that would be ignored, or an adapter in one of two places."""
        known = ('use_cache', *(() if position_ids is None else PACKED))
        for name, value in ('output_attentions', self.config.output_attentions), *others.items():
            if value is not None and value is not False and name not in known:
                raise ValueError(f'{name} is not supported: this model takes input_ids, attention_mask, position_ids, '
                                 'labels, logits_to_keep and output_hidden_states')
        for name, other in self.shared:
            if self.get_submodule(name) is not self.get_submodule(other):
                raise ValueError(f'{other} and {name} are one module, but only one of them was replaced, for example '
                                 'by an adapter: leave both out of target_modules')

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, output_hidden_states=None, **kwargs):
        """Return the states before the output head, (B, T, C), for input_ids (B, T)."""
        self.check(position_ids, kwargs)
        place, lengths = own_rows(input_ids, attention_mask, position_ids)
        states = back(self.model.final_hidden(move(input_ids, place, lengths)), place)
        return BaseModelOutput(states, hidden_states=(states,) if output_hidden_states else None)


def repeated(named) -> list[tuple[str, str]]:
    """Return (name, first name) of parameters or modules that occur under several names."""
    first = {}
    return [(name, first[x]) for name, x in named if first.setdefault(x, name) != name]


# ---- texts in rows of their own ----

def own_rows(input_ids, attention_mask, position_ids):
    """Give each text of a batch (B, T), padded or packed, a row (N, L) that starts with it.

    position_ids: (B, T) or (1, T), 0 where a text starts. With an attention_mask, each row of the
    batch has one text. Returns place (B, T), the index of each token in the flattened rows, -1 for
    padding, and lengths (N,).
    """
    position = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if is_token.shape != input_ids.shape:
        raise ValueError(f'attention_mask has shape {[*is_token.shape]}: expected {[*position.shape]}, as input_ids')
    is_token = is_token.bool()
    starts = is_token & ~F.pad(is_token[:, :-1], (1, 0))
    if (starts.sum(1) > 1).any():
        raise ValueError('attention_mask has a hole: only padding before and after a text is supported')
    if position_ids is not None and attention_mask is None:
        starts = starts | (position_ids == 0)
    position = position - torch.where(starts, position, 0).cummax(1).values
    if position_ids is not None and (position_ids != position)[is_token].any():
        raise ValueError('position_ids must count from 0 in each text. Packed texts need them without attention_mask')
    text = starts.flatten().cumsum(0).view_as(starts) - 1
    lengths = text[is_token].bincount()
    return (text * lengths.max() + position).masked_fill(~is_token, -1), lengths


def move(x, place, lengths, fill=0):
    """Return x (B, T) in the rows (N, L) of `own_rows`, padded with `fill`."""
    rows = x.new_full((len(lengths) * int(lengths.max()),), fill)
    rows[place[place >= 0]] = x[place >= 0]
    return rows.view(len(lengths), -1)


def back(x, place):
    """Return x (N, L, C) at the tokens' places: (B, T, C)."""
    return x.flatten(0, 1)[place.clamp(min=0)]


class RunForCausalLM(RunModel, GenerationMixin):
    accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides by the number of micro-batches

    @property
    def base_model(self):
        """Return the function that libraries call which apply the head themselves, such as TRL."""
        return self._head_inputs

    def _head_inputs(self, *args, **kwargs):
        h = torch.ones_like(self.model.head.weight[:1])
        with torch.no_grad():
            if not self.model._logits(h).equal(self.model.head(h)):
                raise ValueError("this model's logits are more than its head's output, so they cannot be computed from "
                                 'the head alone: train it with Trainer')
        return RunModel.forward(self, *args, **kwargs)

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, output_hidden_states=None,
                logits_to_keep=0, decode=False, **kwargs):
        """Return logits (B, T, V) for input_ids (B, T), and the loss if there are labels.

        attention_mask, position_ids: see `own_rows`. labels: (B, T), input_ids with -100 where a
        token is ignored. In training mode with labels, logits are left out, because the model's own
        loss needs none. output_hidden_states: also return a tuple with the states before the head,
        (B, T, C). logits_to_keep: return the last n logits only, or those at positions (n,). With
        decode=True, which `generate` sets, return only the last tokens' logits (B, 1, V).
        """
        self.check(position_ids, kwargs)
        place, lengths = own_rows(input_ids, attention_mask, position_ids)
        tokens = move(input_ids, place, lengths)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if decode:
            if output_hidden_states or len(lengths) != len(input_ids):
                raise ValueError('generate takes one text per row, and returns no hidden states')
            return CausalLMOutput(logits=self._next_logits(input_ids, tokens, lengths)[:, None])
        loss = logits = states = None
        if labels is not None:
            targets = move(F.pad(labels[:, 1:], (0, 1), value=-100), place, lengths, -100)
            loss = self._loss(tokens, targets.masked_fill(targets < 0, -1), lengths)
        if labels is None or not self.training:
            keep = logits_to_keep if torch.is_tensor(logits_to_keep) else slice(-logits_to_keep, None)
            logits = back(self.model.logits(tokens)[..., :self.config.vocab_size], place[:, keep])
        if output_hidden_states:
            states = back(self.model.final_hidden(tokens), place),
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=states)

    def _loss(self, tokens, targets, lengths):
        """Return the model's loss of texts (N, L).

        Parts other than the next-token loss may read padding: then, the texts of each length are a
        batch of their own, and these are weighted as train.py weights micro-batches.
        """
        losses, counts = [], []
        batch_of = lengths if self.has_loss_parts else lengths.max().expand_as(lengths)
        for length in batch_of.unique():
            x, y = (rows[batch_of == length, :length] for rows in (tokens, targets))
            n_targets = ((y >= 0) & (x != self.model.config.eos_id)).sum()
            counts.append(self.model.loss_count(x, y) if hasattr(self.model, 'loss_count') else n_targets)
            losses.append(self.model(x, y))
        self.has_loss_parts = len(losses[0]) > 2  # 'loss' and 'nll'
        return sum(found['loss'] * (n / max(1, sum(counts))) for found, n in zip(losses, counts))

    # ---- generate ----

    def generate(self, *args, **kwargs):
        """Generate as with any Hugging Face model. The cache is freed after the call."""
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.decoding = None

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, use_cache=True, is_first_iteration=None,
                                      next_sequence_length=None, tokenizer=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() == 2 and not attention_mask[:, -1].all():
            raise ValueError("a text to generate from ends with padding: set the tokenizer's padding_side to 'left'")
        return {'input_ids': input_ids, 'attention_mask': attention_mask, 'decode': use_cache, **kwargs}

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def _next_logits(self, input_ids, tokens, lengths):
        """Return the last tokens' logits (B, V), feeding only tokens that are not in the cache yet.

        input_ids (B, T): left-padded texts of these lengths (B,); tokens (B, L): the same without
        left padding. The cache is refilled if its texts changed, for example by beam search.
        """
        B, T = input_ids.shape
        if not getattr(self.model, 'new_cache', None):
            return self.model.logits(tokens)[torch.arange(B), lengths - 1, :self.config.vocab_size]
        cache, held, held_lengths, size = self.decoding or (None, input_ids[:, :0], lengths, 0)
        n = held.shape[1]
        is_same = (len(held) == B and n < T <= size and held.equal(input_ids[:, :n])
                   and lengths.equal(held_lengths + T - n))
        if is_same:
            logits = self.model.extend(input_ids[:, n:], cache)
        else:
            size = 2 * T + 64
            cache = self.model.new_cache(B, size)
            logits = self.model.extend(tokens, cache, lengths)
        self.decoding = cache, input_ids, lengths, size
        return logits[..., :self.config.vocab_size]
