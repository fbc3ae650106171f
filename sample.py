"""Generate text from a trained run.

    python sample.py out/quickstart "Return the" "Raised when" --max_new_tokens=100
    python sample.py out/quickstart --file=prompts.txt --temperature=0        one prompt per line, greedy
    echo -n "Return the" | python sample.py out/quickstart                    a prompt from standard input
    python sample.py out/quickstart                                           type prompts, until Ctrl-D
    python sample.py out/nextlat "Return the" --draft_len=auto                speculative: the model drafts for itself
    python sample.py out/big "Return the" --draft=out/small --draft_len=4     another run drafts
    python sample.py out/big "Return the" --draft=out/small --compare         and print the speed-up over plain decoding

An empty prompt, "", is the start of a document: the text continues after eos. If the documents of the run's training
data start with bos (prepare_fineweb.py --bos), every prompt does too, and an empty one is bos alone.

`generate` and `speculative_generate` are the functions to import. They take prompts of different lengths as one batch.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import codecs
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from common.decoding import check_sampling, generate, roomy_cache
from common.files import UserError, friendly_errors
from common.machine import Device, DType, decoding_dtype, pick_device
from common.runs import load_run, read_run, same_vocabulary
from common.settings import check_ranges, load_settings
from common.speculative import longest_draft, read_length, speculative_generate
from data.tokenizers import load_tokenizer


@dataclass
class Settings:
    max_new_tokens: int | None = None  # tokens to generate per prompt; None: 200, or as many as fit the context
    temperature: float = 1.0  # logits are divided by it; 0: always the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens, and any that tie with the last of them
    top_p: float | None = None  # keep the likeliest tokens that together reach this probability
    min_p: float | None = None  # keep tokens at least this fraction as likely as the likeliest
    seed: int = 0  # random seed
    stop: str | None = None  # end a text where this string appears; \n means a newline
    file: str | None = None  # read prompts from this file, one per line
    truncate: bool = False  # keep only the end of a prompt that is too long, instead of an error
    ignore_eos: bool = False  # continue after the end of a document
    draft_len: str | None = None  # tokens to draft before each verification, or auto; None: plain, with --draft auto
    draft: str | None = None  # run folder of a model that drafts; None: the model itself, if it can
    compare: bool = False  # with drafts: also decode without them, and print both speeds
    device: Device = 'auto'  # auto: cuda if there is a GPU, else cpu
    dtype: DType = 'auto'  # of weights and cache; auto: bfloat16 on GPUs, float32 elsewhere

    def __post_init__(self):
        check_ranges(self, max_new_tokens=(1, inf), seed=(0, inf))
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        try:
            (self.stop or '').encode()
        except UnicodeEncodeError:
            raise UserError(f'stop is {self.stop!r}: expected text in UTF-8')


# ---- prompts ----

def read_prompts(s: Settings, texts: list[str]) -> list[str]:
    """Return the prompts from the command line and the file, else from standard input; UserError if there is none."""
    if s.file:
        if not os.path.isfile(s.file):
            raise UserError(f'there is no prompt file {s.file}')
        with open(s.file, encoding='utf-8', errors='replace') as file:
            texts = texts + [line.rstrip('\n') for line in file if line.strip()]
        if not texts:
            raise UserError(f'{s.file} has no prompts: expected one a line')
    elif not texts:
        texts = [sys.stdin.buffer.read().decode(errors='replace')]
        if not texts[0]:
            raise UserError('a prompt is empty: give text after the run folder, with --file or on standard input')
    return texts


def typed_prompts() -> Iterator[str]:
    """Yield the lines typed on the terminal, until end of file."""
    print('Type a prompt, then Enter; Ctrl-D ends.', file=sys.stderr)
    while True:
        print('> ', end='', file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            print(file=sys.stderr)
            return
        yield line.decode(errors='replace').rstrip('\r\n')


def encode_prompts(s: Settings, tokenizer, record: dict, texts: list[str]) -> tuple[list[list[int]], int]:
    """Return the prompts' ids and the number of tokens to generate; UserError if they do not fit the context."""
    block_size, eos_id = record['settings']['block_size'], record['data']['eos_id']
    prompts = [[*tokenizer.start, *tokenizer.encode(text)] if text else [*tokenizer.start] or [eos_id]
               for text in texts]
    if not all(prompts):
        raise UserError("a prompt has no tokens: give text that the run's tokenizer knows")
    n_new = s.max_new_tokens
    if n_new is None:
        room = block_size + 1 - max(map(len, prompts))  # the model does not read the last new token
        least = (block_size + 1) // 2 if s.truncate else 1
        n_new = min(200, max(room, least))
    return [fit(ids, n_new, s.truncate, block_size) for ids in prompts], n_new


def fit(ids: list[int], n_new: int, truncate: bool, block_size: int) -> list[int]:
    """Return a prompt's ids, or with truncate their end; UserError if they and the new tokens do not fit."""
    room = block_size + 1 - n_new
    if room < 1:
        raise UserError(f'max_new_tokens = {n_new} leaves no room for a prompt in the context of {block_size} tokens: '
                        'lower it')
    if len(ids) > room and not truncate:
        lower = 'lower max_new_tokens, or ' if len(ids) <= block_size else ''
        raise UserError(f'a prompt of {len(ids)} tokens and {n_new} new ones do not fit the context of '
                        f'{block_size}: {lower}use --truncate to keep the end of the prompt')
    return ids[-room:]


# ---- drafts ----

def load_draft(folder, record: dict, device: str, dtype: DType):
    """Load the model of a run that drafts for the run of `record`; UserError if its tokenizer differs."""
    draft, of_draft = load_run(folder, device, decoding_dtype(dtype, device))
    if not same_vocabulary(of_draft['data'], record['data']):
        drafts, own = (f'{data["tokenizer"]!r} with {data["n_ids"]} ids' for data in (of_draft['data'], record['data']))
        raise UserError(f'the draft run {folder} has tokenizer {drafts}, the run {own}: they must have one tokenizer')
    return draft


def speculation(s: Settings, model, record: dict, device: str) -> dict | None:
    """Return options for `speculative_generate`, None for plain decoding; UserError if the model cannot draft."""
    if s.draft is None and s.draft_len is None:
        if s.compare:
            raise UserError('--compare compares drafting with plain decoding: also give --draft_len or --draft')
        return None
    draft = None if s.draft is None else load_draft(s.draft, record, device, s.dtype)
    draft_len = read_length('auto' if s.draft_len is None else s.draft_len)
    try:
        longest_draft(model, draft, draft_len)
    except ValueError as error:
        raise UserError(str(error))
    if getattr(model, 'sequential', False):
        print(f'model_{record["model"]} reads tokens one after the other: verifying a draft saves no time',
              file=sys.stderr)
    return dict(draft=draft, draft_len=draft_len)


# ---- texts ----

class Texts:
    """The generated texts as they grow, each cut where the stop string starts."""

    def __init__(self, tokenizer, n: int, stop: str | None):
        self.tokenizer = tokenizer
        self.stop = stop and stop.replace('\\n', '\n').encode()
        self.ends = [None] * n  # where the stop string starts, in bytes
        self.utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # for the text that is printed as it grows
        self.shown = 0  # bytes printed so far

    def finished(self, i: int, ids: list[int]) -> bool:
        """Return True if the text of prompt i contains the stop string; for `generate`."""
        start = self.tokenizer.decode(ids).find(self.stop)
        self.ends[i] = start if start >= 0 else None
        return start >= 0

    def of(self, i: int, ids: list[int]) -> bytes:
        return self.tokenizer.decode(ids)[:self.ends[i]]

    def stream(self, new: list[list[int]]) -> None:
        """Print the new part of the first text: whole characters, and nothing that may become the stop string."""
        safe = self.of(0, new[0])
        if self.stop and self.ends[0] is None:
            safe = safe[:max(self.shown, len(safe) - len(self.stop) + 1)]
        print(self.utf8.decode(safe[self.shown:]), end='', flush=True)
        self.shown = max(self.shown, len(safe))

    def print_rest(self, new: list[list[int]]) -> None:
        print(self.utf8.decode(self.of(0, new[0])[self.shown:], final=True))


def write_texts(s: Settings, model, tokenizer, record: dict, texts: list[str], drafting: dict | None = None) -> None:
    """Generate and print: a single text as its tokens arrive, several at the end. drafting: from `speculation`."""
    texts = [text.encode(errors='replace').decode() for text in texts]
    prompts, n_new = encode_prompts(s, tokenizer, record, texts)
    grown, is_alone = Texts(tokenizer, len(prompts), s.stop), len(prompts) == 1
    if is_alone:
        print(texts[0], end='', flush=True)
    sampling = dict(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed,
                    eos_id=None if s.ignore_eos else record['data']['eos_id'],
                    finished=grown.finished if s.stop else None)
    on_tokens = grown.stream if is_alone else None
    start = time.perf_counter()
    if drafting:
        new, statistics = speculative_generate(model, prompts, n_new, on_tokens=on_tokens, **sampling, **drafting)
        report = (f'accepted {statistics.accepted_per_step:.2f} tokens per step\n'
                  f'acceptance by position: {" ".join(f"{share:.2f}" for share in statistics.by_position)}')
    else:
        cache = roomy_cache(model, prompts, n_new)
        new = generate(model, prompts, n_new, on_tokens=on_tokens, cache=cache, **sampling)
        report = f'cache {cache.nbytes / 2**20:.1f} MiB'
    seconds = time.perf_counter() - start
    if is_alone:
        grown.print_rest(new)
    else:
        for i, text in enumerate(texts):
            print(f'--- {i + 1}\n{text}{grown.of(i, new[i]).decode(errors="replace")}')
    count = sum(map(len, new))
    speed = count / seconds
    print(f'{count} tokens in {seconds:.2f} s, {speed:,.1f} tokens/s; {report}', file=sys.stderr)
    if s.compare:
        start = time.perf_counter()
        plain_count = sum(map(len, generate(model, prompts, n_new, **sampling)))
        plain_speed = plain_count / (time.perf_counter() - start)
        print(f'without drafts: {plain_speed:,.1f} tokens/s; with drafts {speed / plain_speed:.2f} times as fast',
              file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        argv = sys.argv[1:] if argv is None else argv
        if any(arg.partition('=')[0] in ('--prompt', '--prompts') for arg in argv):
            raise UserError('prompts are positional: python sample.py RUN_FOLDER "a prompt" "another"')
        s, positional, _ = load_settings(Settings, argv)
        if not positional:
            raise UserError('which run? python sample.py RUN_FOLDER "a prompt" --max_new_tokens=100')
        run, *given = positional
        read_run(run)  # fails before prompts are read
        is_typed = not given and not s.file and sys.stdin.isatty()
        texts = None if is_typed else read_prompts(s, given)
        device = pick_device(s.device)
        model, record = load_run(run, device, decoding_dtype(s.dtype, device))
        tokenizer = load_tokenizer(record['data']['tokenizer'], record['data']['bos'])
        drafting = speculation(s, model, record, device)
        if not is_typed:
            return write_texts(s, model, tokenizer, record, texts, drafting)
        for text in typed_prompts():
            try:
                write_texts(s, model, tokenizer, record, [text], drafting)
            except UserError as error:  # the next prompt may fit
                print(f'sample.py: {error}', file=sys.stderr)


if __name__ == '__main__':
    main()
