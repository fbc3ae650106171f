"""Generate text from a trained run.

    python sample.py out/quickstart "Return the" "Raised when" --max_new_tokens=100
    python sample.py out/quickstart --temperature=0 -- "--all"    greedy; a prompt starting with -
    python sample.py out/quickstart --file=prompts.txt            one prompt per line
    python sample.py out/nextlat "Return the" --draft_len=auto    speculative: self-drafting
    python sample.py out/big "Return the" --draft=out/small       speculative: another run drafts

An empty prompt "" starts a new document: generation continues after eos. If the training data was
prepared with --bos, every prompt starts with bos, and an empty prompt is bos alone.

In Python, import `generate` and `speculative_generate`. Both batch prompts of different lengths.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import codecs
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.decoding import SAMPLING, allocate_cache, generate
from common.files import UserError, friendly_errors
from common.machine import Device, DType, decoding_dtype, pick_device
from common.models import add_file
from common.runs import load_run, same_vocabulary
from common.settings import check_ranges, load_settings
from common.speculative import DraftLen, longest_draft, speculative_generate
from data.tokenizers import load_tokenizer


@dataclass
class Settings:
    max_new_tokens: int | None = None  # tokens to generate per prompt; None: 200, or what fits the context
    temperature: float = 1.0  # divides the logits; 0: greedy decoding
    top_k: int | None = None  # sample from the k most likely tokens (and ties with the last of them)
    top_p: float | None = None  # nucleus sampling: the smallest set of tokens with this total probability
    min_p: float | None = None  # drop tokens below this fraction of the top token's probability
    seed: int = 0  # random seed
    stop: str | None = None  # stop a text before this string; \n means a newline
    file: str | None = None  # read prompts from this file, one per line
    ignore_eos: bool = False  # continue after the end of a document
    draft_len: DraftLen | None = None  # speculative: tokens per draft, or auto; None: auto with --draft, else off
    draft: str | None = None  # run folder of the draft model; None: the model drafts for itself
    code: Literal['run'] | None = None  # run: the model's code as stored in the run, not as it is now
    model: str | None = None  # path of the model's file, if it is not in this repository
    device: Device = 'auto'  # auto: cuda if available, else cpu
    dtype: DType = 'auto'  # dtype of weights and cache; auto: bfloat16 on GPUs, float32 elsewhere

    def __post_init__(self):
        check_ranges(self, max_new_tokens=1, seed=0, **SAMPLING)


def read_prompts(s: Settings, texts: list[str]) -> list[str]:
    """Return the prompts from the command line and --file. UserError if there is none."""
    if s.file:
        lines = Path(s.file).read_text(encoding='utf-8-sig', errors='replace').split('\n')
        texts = texts + [line for line in lines if line.strip()]
    if not texts:
        raise UserError('no prompt: give text after the run folder, or --file=FILE')
    return texts


def encode_prompts(s: Settings, tokenizer, record: dict, texts: list[str]) -> tuple[list[list[int]], int]:
    """Return the prompts' ids and the number of new tokens. UserError if they do not fit."""
    block_size, eos_id = record['settings']['block_size'], record['data']['eos_id']
    prompts = [[*tokenizer.start, *tokenizer.encode(text)] if text else [*tokenizer.start] or [eos_id]
               for text in texts]
    longest, n_new = max(map(len, prompts)), s.max_new_tokens
    room = block_size + 1 - longest  # the last new token is never fed back
    if n_new is None:
        n_new = min(200, max(room, 1))
    if n_new > room:
        raise UserError(f'a prompt of {longest} tokens plus {n_new} new tokens exceeds the context of {block_size}: '
                        'lower --max_new_tokens or shorten the prompt')
    return prompts, n_new


def load_draft(folder, record: dict, device, dtype, code: str | None = None):
    """Load the draft model from a run folder. UserError if its tokenizer is not `record`'s."""
    draft, draft_record = load_run(folder, device, dtype, code)
    if not same_vocabulary(draft_record['data'], record['data']):
        raise UserError(f'the draft run {folder} has tokenizer {draft_record["data"]["tokenizer"]}, but the run has '
                        f'{record["data"]["tokenizer"]}: choose a draft run with the same tokenizer')
    return draft


class Output:
    """The generated texts, cut at the stop string. A single text is streamed."""

    def __init__(self, tokenizer, n: int, stop: str | None):
        self.tokenizer = tokenizer
        self.stop = (stop or '').replace('\\n', '\n').encode(errors='replace')
        self.texts = [b''] * n
        self.utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # buffers incomplete characters
        self.n_shown = 0

    def finished(self, i: int, ids: list[int]) -> bool:
        """Receive the new ids of text i so far. Returns True if they contain the stop string."""
        text = self.tokenizer.decode(ids)
        is_stopped = bool(self.stop) and self.stop in text
        self.texts[i] = text.partition(self.stop)[0] if is_stopped else text
        if len(self.texts) == 1:
            self.show(len(text) - max(0, len(self.stop) - 1))  # hold back what may begin the stop string
        return is_stopped

    def show(self, end: int, final: bool = False) -> None:
        """Print the first text up to byte `end`, without the part already printed."""
        print(self.utf8.decode(self.texts[0][self.n_shown:max(end, self.n_shown)], final), end='', flush=True)
        self.n_shown = max(end, self.n_shown)


def write_texts(s: Settings, model, tokenizer, record: dict, texts: list[str], drafting: dict | None = None) -> None:
    """Generate and print the texts: a single one is streamed, several are printed at the end.

    drafting: `draft` and `draft_len` for `speculative_generate`; None: plain decoding.
    """
    texts = [text.encode(errors='replace').decode() for text in texts]
    prompts, n_new = encode_prompts(s, tokenizer, record, texts)
    output, is_alone = Output(tokenizer, len(prompts), s.stop), len(prompts) == 1
    if is_alone:
        print(texts[0], end='', flush=True)
    ends = record['data'].get('ends', record['data']['eos_id'])
    options = dict(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed,
                   eos_id=None if s.ignore_eos else ends, finished=output.finished)
    start = time.perf_counter()
    if drafting:
        new, statistics = speculative_generate(model, prompts, n_new, **options, **drafting)
        report = f'accepted {statistics.accepted_per_step:.2f} tokens per step'
    else:
        cache = allocate_cache(model, prompts, n_new)
        new = generate(model, prompts, n_new, cache=cache, **options)
        report = f'cache {cache.nbytes / 2**20:.1f} MiB'
    seconds = time.perf_counter() - start
    if is_alone:
        output.show(len(output.texts[0]), final=True)
        print()
    else:
        for i, (prompt, text) in enumerate(zip(texts, output.texts)):
            print(f'--- {i + 1}\n{prompt}{text.decode(errors="replace")}')
    count = sum(map(len, new))
    print(f'{count} tokens in {seconds:.2f} s, {count / seconds:,.1f} tokens/s; {report}', file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        if not positional:
            raise UserError('no run given. Usage: python sample.py RUN_FOLDER "a prompt" --max_new_tokens=100')
        run, *given = positional
        device = pick_device(s.device)
        dtype = decoding_dtype(s.dtype, device)
        add_file(s.model)
        model, record = load_run(run, device, dtype, s.code)
        tokenizer = load_tokenizer(record['data']['tokenizer'], record['data']['bos'])
        drafting = None
        if s.draft or s.draft_len is not None:
            drafting = dict(draft=load_draft(s.draft, record, device, dtype, s.code) if s.draft else None,
                            draft_len='auto' if s.draft_len is None else s.draft_len)
            longest_draft(model, **drafting)  # checks draft_len before anything is printed
            if getattr(model, 'sequential', False):
                print('speculative decoding saves no time here: this model reads tokens one by one', file=sys.stderr)
        write_texts(s, model, tokenizer, record, read_prompts(s, given), drafting)


if __name__ == '__main__':
    main()
