"""Runs in Python: `load` returns a `Run` that generates, scores texts and returns its states.

`save` writes a run of a model that was trained without train.py. sample.py is a command line for
`Generation`.
"""
import codecs
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.decode import generation
from lm_architectures.files import UserError
from lm_architectures.machine.devices import Device, DType, pick_device, pick_dtype
from lm_architectures.run import checkpoint, models, records
from lm_architectures.run.folders import load_run, same_vocabulary
from lm_architectures.run.records import read_log
from lm_architectures.settings import check_ranges, make_settings


@dataclass
class Options:
    max_new_tokens: int | None = None  # tokens to generate per prompt; None: 200, or what fits the context
    temperature: float = 1.0  # divides the logits; 0: greedy decoding
    top_k: int | None = None  # sample from the k most likely tokens (and ties with the last of them)
    top_p: float | None = None  # nucleus sampling: the smallest set of tokens with this total probability
    min_p: float | None = None  # drop tokens below this fraction of the top token's probability
    seed: int = 0  # random seed
    stop: str | None = None  # stop a text before this string; \n means a newline
    ignore_eos: bool = False  # continue after the end of a document
    draft_len: int | Literal['auto'] | None = None  # speculative: tokens per draft; None: auto with --draft, else off
    draft: str | None = None  # run folder of the draft model; None: the model drafts for itself

    def __post_init__(self):
        check_ranges(self, max_new_tokens=1, seed=0, **generation.SAMPLING)


def load(folder, device: Device = 'auto', dtype: DType = 'auto', code: str | None = None,
         model: str | None = None) -> 'Run':
    """Load the newest undamaged checkpoint of a run folder.

    dtype: of weights and cache; auto: bfloat16 on CUDA, float32 elsewhere. code = 'run': import the
    model's code as stored in the run. model: path of the model's file, if it is not in this
    repository. UserError if the folder is not a run or has no undamaged checkpoint.
    """
    return Run(folder, pick_device(device), pick_dtype(dtype, pick_device(device)), code, model)


def save(folder, model: torch.nn.Module, data, step: int, block_size: int) -> None:
    """Write a new run folder for `load`, sample.py, eval.py and exports.

    model: of the class Model of a model file (docs/own_model.md). data: `open_data(...)`, on which
    it was trained for so many steps. block_size: its longest context, in tokens. UserError if the
    folder exists or the run could not be loaded.
    """
    cls = type(model)
    if cls.__name__ != 'Model' or cls.__module__ == '__main__':
        raise UserError(f'the model is a {cls.__module__}.{cls.__name__}: expected the class Model of a file '
                        'model_NAME.py, which you import, and not what torch.compile or DDP made of it')
    values = dataclasses.asdict(model.config)
    if values['n_ids'] != data.n_ids:
        raise UserError(f'the model has n_ids = {values["n_ids"]}, but {data.folder} has {data.n_ids}: give its data')
    if Path(folder).exists():
        raise UserError(f'{folder} already exists: choose a new folder')
    name = models.add_file(inspect.getfile(cls))
    models.make_config(name, values)  # as `load` will read it
    with records.locked_run(folder, is_new=True, overwrite=False):
        checkpoint.save_checkpoint(folder, step, checkpoint.checkpoint_tensors(model), {'step': step})
        records.save_run(folder, {
            'model': name, 'model_config': values, 'data': records.data_record(data),
            'settings': {'model': name, 'block_size': block_size, 'eval_seed': None, 'data': str(data.folder)},
            'versions': {'torch': torch.__version__}})


class Run:
    """A trained run: `model` in eval mode, `config`, `tokenizer`, `record` (config.json), `log`."""

    def __init__(self, folder, device, dtype: torch.dtype, code: str | None, model: str | None):
        self.folder, self.device, self.dtype, self.code = folder, device, dtype, code
        self.model, self.record = load_run(folder, device, dtype, code, model)
        self.config, data = self.model.config, self.record['data']
        self.tokenizer = load_tokenizer(data['tokenizer'], data['bos'])
        self.block_size = self.record['settings']['block_size']  # context length of training, in tokens

    @property
    def log(self) -> list[dict]:
        """Return the lines of log.jsonl, one dict per logged step."""
        return read_log(self.folder)

    def generate(self, prompts: list[str] | str, **options) -> list[str]:
        """Return the continuation of each prompt. options: the fields of `Options`.

        An empty prompt starts a new document. UserError if prompt and new tokens do not fit the
        context, or an option is out of range.
        """
        options = make_settings(Options, options, 'in generate')
        found = Generation(self, [prompts] if isinstance(prompts, str) else prompts, options)
        for _ in found:
            pass
        return found.texts

    def stream(self, prompt: str, **options) -> Iterator[str]:
        """Yield the text that `generate` returns, in pieces, while it is generated."""
        return iter(Generation(self, [prompt], make_settings(Options, options, 'in stream')))

    def encode(self, text: str) -> list[int]:
        """Return a prompt's ids, with bos if the training data have it. Empty: bos or eos."""
        return self.tokenizer.prompt(text)

    def loss(self, text: str) -> float:
        """Return the loss of a text, nats per token, by eval.py's rolling log-likelihood."""
        from lm_architectures.score.lm_eval_adapter import RunLM
        from lm_architectures.score.scoring import Scorer
        ids = self.tokenizer.encode(text)
        if not ids:
            raise UserError('the text has no tokens, so it has no loss: give a longer one')
        return -RunLM(Scorer(self.model, self.block_size), self.tokenizer).rolling([ids])[0] / len(ids)

    @torch.no_grad()
    def hidden(self, text: str) -> torch.Tensor:
        """Return the states before the output head, (T, C), one per token of `encode(text)`."""
        return self.model.final_hidden(torch.tensor([self.encode(text)], device=self.device))[0]


def load_draft(folder, record: dict, device, dtype, code: str | None = None):
    """Load the draft model from a run folder. UserError if its tokenizer is not `record`'s."""
    draft, draft_record = load_run(folder, device, dtype, code)
    if not same_vocabulary(draft_record['data'], record['data']):
        raise UserError(f'the draft run {folder} has tokenizer {draft_record["data"]["tokenizer"]}, but the run has '
                        f'{record["data"]["tokenizer"]}: choose a draft run with the same tokenizer')
    return draft


class Generation:
    """The continuations of prompts. Iterating generates them and yields the first one in pieces.

    Afterwards it has `texts`, cut at the stop string, `n_tokens`, and a `report` for sample.py.
    """

    def __init__(self, run: Run, prompts: list[str], options: Options):
        if not prompts:
            raise UserError('no prompts: expected at least one text')
        self.run, self.options = run, options
        self.prompts = [run.encode(text) for text in prompts]
        longest = max(map(len, self.prompts))
        room = run.block_size + 1 - longest  # the last new token is never fed back
        self.n_new = min(200, max(room, 1)) if options.max_new_tokens is None else options.max_new_tokens
        if self.n_new > room:
            raise UserError(f'a prompt of {longest} tokens plus {self.n_new} new tokens exceeds the context of '
                            f'{run.block_size}: lower --max_new_tokens or shorten the prompt')
        self.stop = (options.stop or '').replace('\\n', '\n').encode(errors='replace')
        self.found, self.n_read = [b''] * len(prompts), [0] * len(prompts)  # the texts so far, from so many ids
        self.draft, self.is_drafted = None, bool(options.draft) or options.draft_len is not None
        if self.is_drafted:
            from lm_architectures.decode.speculation import longest_draft
            if options.draft:
                self.draft = load_draft(options.draft, run.record, run.device, run.dtype, run.code)
            self.draft_len = 'auto' if options.draft_len is None else options.draft_len
            longest_draft(run.model, self.draft, self.draft_len)  # checks draft_len before anything is generated

    def __iter__(self) -> Iterator[str]:
        return codecs.iterdecode(self.pieces(), 'utf-8', 'replace')

    def pieces(self) -> Iterator[bytes]:
        """Generate all texts, and yield the first one in pieces."""
        s, data, n_sent, held = self.options, self.run.record['data'], 0, max(0, len(self.stop) - 1)
        options = dict(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed,
                       eos_id=None if s.ignore_eos else data.get('ends', data['eos_id']), finished=self.finished)
        if self.is_drafted:
            from lm_architectures.decode.speculation import speculative_steps
            rounds = []
            steps = speculative_steps(self.run.model, self.prompts, self.n_new, rounds, draft=self.draft,
                                      draft_len=self.draft_len, **options)
        else:
            cache = generation.allocate_cache(self.run.model, self.prompts, self.n_new)
            steps = generation.generation_steps(self.run.model, self.prompts, self.n_new, cache, **options)
        for new in steps:
            self.n_tokens = sum(map(len, new))
            ready = self.found[0][n_sent:max(n_sent, len(self.found[0]) - held)]  # the rest may begin the stop string
            n_sent += len(ready)
            yield ready
        self.report = (f'accepted {sum(n for _, n in rounds) / max(1, len(rounds)):.2f} tokens per step'
                       if self.is_drafted else f'cache {cache.nbytes / 2**20:.1f} MiB')
        yield self.found[0][n_sent:]

    @property
    def texts(self) -> list[str]:
        return [text.decode(errors='replace') for text in self.found]

    def finished(self, i: int, ids: list[int]) -> bool:
        """Receive the new ids of text i so far. Returns True if they contain the stop string."""
        text = self.found[i] + self.run.tokenizer.decode(ids[self.n_read[i]:])
        self.n_read[i] = len(ids)
        self.found[i], stop, _ = text.partition(self.stop) if self.stop else (text, b'', b'')
        return bool(stop)
