"""Generates text from a trained run.

    python sample.py out/quickstart "Return the" "Raised when" --max_new_tokens=100
    python sample.py out/quickstart --file=prompts.txt --temperature=0        one prompt a line, greedy
    echo -n "Return the" | python sample.py out/quickstart                    a prompt from standard input
    python sample.py out/nextlat "Return the" --draft_len=auto                speculative: the model drafts for itself
    python sample.py out/big "Return the" --draft=out/small --draft_len=4     or another run does

`generate` and `speculative_generate` are the functions to import: prompts of different lengths in one batch, texts of the same law.
"""
import codecs
import os
import sys
import time
from dataclasses import dataclass
from math import inf

os.environ.setdefault('GOMP_SPINCOUNT', '1000')  # before torch: threads that wait longer leave the core to other programs


from common.decoding import generate, pack_weights, roomy_cache
from common.files import UserError, friendly_errors
from common.machine import pick_device, pick_dtype
from common.runs import load_run
from common.settings import check_ranges, load_settings
from common.speculative import longest_draft, speculative_generate
from data.tokenizers import load_tokenizer


@dataclass
class Settings:
    max_new_tokens: int = 200  # tokens to generate for each prompt
    temperature: float = 1.0  # logits are divided by it; 0: always the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens that together reach this probability
    min_p: float | None = None  # keep tokens at least this fraction as likely as the likeliest
    seed: int = 0  # of the random numbers
    stop: str | None = None  # end a text where this string appears; \n means a line end
    file: str | None = None  # read prompts from this file, one a line
    truncate: bool = False  # keep the end of a prompt that is too long, instead of an error
    ignore_eos: bool = False  # go on after the end of a document
    draft_len: str | None = None  # tokens to draft before each verification, or auto; None: plain decoding, with --draft auto
    draft: str | None = None  # run folder of a model that drafts; None: the model itself, if it can
    device: str = 'auto'  # auto (cuda where there is one), cuda or cpu
    dtype: str = 'auto'  # float32, bfloat16; auto: bfloat16 on GPUs and on CPUs with bf16 units


# ---- sampling ----


# ---- speculative decoding ----
#
# A round: draft n tokens, append the last token and the draft to the cache in one `extend`, keep what the rule below accepts, and
# draw one token more. The rule makes the law of the text that of plain decoding, whatever drafts.


# ---- a model made ready for decoding on CPU ----


# ---- the command line ----

def read_prompts(s, texts):
    if s.file:
        if not os.path.isfile(s.file):
            raise UserError(f'there is no prompt file {s.file}')
        with open(s.file, encoding='utf-8', errors='replace') as file:
            texts = texts + [line.rstrip('\n') for line in file if line.strip()]
    elif not texts and not sys.stdin.isatty():
        texts = [sys.stdin.buffer.read().decode(errors='replace')]
    if not texts or not all(texts):
        raise UserError('a prompt is empty: give text after the run folder, with --file or on standard input')
    return [text.encode(errors='replace').decode() for text in texts]


def fit(ids, s, block_size):
    """The prompt's ids if prompt and new tokens fit the context, its end with --truncate, else a UserError."""
    room = block_size + 1 - s.max_new_tokens  # the last new token is not read
    if room < 1:
        raise UserError(f'max_new_tokens = {s.max_new_tokens} leaves no room for a prompt in the context of {block_size} tokens: lower it')
    if len(ids) > room and not s.truncate:
        raise UserError(f'a prompt of {len(ids)} tokens and {s.max_new_tokens} new ones do not fit the context of {block_size}: '
                        'lower max_new_tokens, or use --truncate to keep the end of the prompt')
    return ids[-room:]


def write_texts(s, model, tokenizer, record, texts, prompts, options=None):
    """Generates and prints: one prompt as its tokens arrive, several one after the other. options: `speculation`."""
    pack_weights(model)
    stop = s.stop and s.stop.replace('\\n', '\n').encode()
    ends = [None] * len(prompts)  # where the stop string starts, in bytes

    def finished(row, ids):
        at = tokenizer.decode(ids).find(stop) if stop else -1
        ends[row] = at if at >= 0 else None
        return at >= 0

    def text_of(row, ids):
        return tokenizer.decode(ids)[:ends[row]]

    utf8 = codecs.getincrementaldecoder('utf-8')('replace')
    shown = 0

    def stream(rows):
        nonlocal shown
        safe = text_of(0, rows[0])
        if stop and ends[0] is None:  # the stop string may have begun
            safe = safe[:max(shown, len(safe) - len(stop) + 1)]
        print(utf8.decode(safe[shown:]), end='', flush=True)
        shown = max(shown, len(safe))

    one = len(prompts) == 1
    if one:
        print(texts[0], end='', flush=True)
    sampling = dict(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed,
                    eos_id=None if s.ignore_eos else record['data']['eos_id'], finished=finished if stop else None)
    start = time.perf_counter()
    if options:
        new, statistics = speculative_generate(model, prompts, s.max_new_tokens, on_tokens=stream if one else None, **sampling, **options)
    else:
        cache = roomy_cache(model, prompts, s.max_new_tokens)
        new = generate(model, prompts, s.max_new_tokens, on_tokens=stream if one else None, cache=cache, **sampling)
    seconds = time.perf_counter() - start
    if one:
        print(utf8.decode(text_of(0, new[0])[shown:], final=True))
    else:
        for row, text in enumerate(texts):
            print(f'--- {row + 1}\n{text}{text_of(row, new[row]).decode(errors="replace")}')
    count = sum(map(len, new))
    speed = f'{count} tokens in {seconds:.2f} s, {count / seconds:,.1f} tokens/s'
    if not options:
        return print(f'{speed}; cache {cache.nbytes / 2**20:.1f} MiB', file=sys.stderr)
    start = time.perf_counter()
    plain = sum(map(len, generate(model, prompts, s.max_new_tokens, **sampling))) / (time.perf_counter() - start)
    print(f'{speed}, {count / seconds / plain:.2f} times plain decoding; accepted {statistics.accepted_per_step:.2f} tokens a step\n'
          f'acceptance by position: {" ".join(f"{share:.2f}" for share in statistics.by_position)}', file=sys.stderr)


def load_draft(folder, record, device, dtype):
    """The model of a run folder, to draft for the run of this record; UserError if it has another tokenizer."""
    draft, of_draft = load_run(folder, device, pick_dtype(dtype, device))
    for key in ('tokenizer', 'n_ids'):
        if of_draft['data'][key] != record['data'][key]:
            raise UserError(f'the draft run {folder} has {key} {of_draft["data"][key]!r}, the run {record["data"][key]!r}: '
                            'they must have one tokenizer')
    return pack_weights(draft)


def speculation(s, model, record, device):
    """`speculative_generate`'s options from the settings, None for plain decoding; UserError for a draft that does not fit."""
    if s.draft is None and s.draft_len is None:
        return None
    draft = s.draft and load_draft(s.draft, record, device, s.dtype)
    draft_len = s.draft_len or 'auto'
    draft_len = int(draft_len) if draft_len.isdecimal() else draft_len
    try:
        longest_draft(model, draft, draft_len)
    except ValueError as error:
        raise UserError(str(error))
    if getattr(model, 'sequential', False):
        print(f'model_{record["model"]} reads tokens one after the other: verifying a draft saves it no time', file=sys.stderr)
    return dict(draft=draft, draft_len=draft_len)


def main():
    with friendly_errors():
        s, positional, _ = load_settings(Settings, sys.argv[1:])
        if not positional:
            raise UserError('which run? python sample.py RUN_FOLDER "a prompt" --max_new_tokens=100')
        check_ranges(s, seed=(0, 2 ** 63), temperature=(0, inf), max_new_tokens=(1, inf), top_k=(1, inf), top_p=(1e-9, 1), min_p=(0, 1))
        texts = read_prompts(s, positional[1:])
        device = pick_device(s.device)
        model, record = load_run(positional[0], device, pick_dtype(s.dtype, device))
        tokenizer = load_tokenizer(record['data']['tokenizer'])
        prompts = [fit(tokenizer.encode(text), s, record['settings']['block_size']) for text in texts]
        write_texts(s, model, tokenizer, record, texts, prompts, speculation(s, model, record, device))


if __name__ == '__main__':
    main()
