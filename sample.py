"""Generate text from a trained run.

    python sample.py out/quickstart "Return the" "Raised when" --max_new_tokens=100
    python sample.py out/quickstart --temperature=0 -- "--all"    greedy; a prompt starting with -
    python sample.py out/quickstart --file=prompts.txt            one prompt per line
    python sample.py out/nextlat "Return the" --draft_len=auto    speculative: self-drafting
    python sample.py out/big "Return the" --draft=out/small       speculative: another run drafts

An empty prompt "" starts a new document: generation continues after eos. If the training data was
prepared with --bos, every prompt starts with bos, and an empty prompt is bos alone.

In Python: `load` and `Run.generate` (lm_architectures/run/load.py).
"""
if __name__ == '__main__':
    from lm_architectures.start import quiet_start
    quiet_start()

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lm_architectures.files import UserError, friendly_errors, without_surrogates
from lm_architectures.machine.devices import Device, DType
from lm_architectures.run.load import Generation, Options, load
from lm_architectures.run.models import add_file
from lm_architectures.settings import load_settings


@dataclass
class Settings(Options):
    file: str | None = None  # read prompts from this file, one per line
    code: Literal['run'] | None = None  # run: the model's code as stored in the run, not as it is now
    model: str | None = None  # path of the model's file, if it is not in this repository
    device: Device = 'auto'  # auto: cuda if available, else cpu
    dtype: DType = 'auto'  # dtype of weights and cache; auto: bfloat16 on CUDA, float32 elsewhere


def read_prompts(s: Settings, texts: list[str]) -> list[str]:
    """Return the prompts from the command line and --file. UserError if there is none."""
    if s.file:
        try:
            lines = Path(s.file).read_text(encoding='utf-8-sig').split('\n')
        except UnicodeDecodeError as error:
            raise UserError(f'{s.file} is not UTF-8 ({error}): convert it with iconv')
        texts = texts + [line for line in lines if line.strip()]
    if not texts:
        raise UserError('no prompt: give text after the run folder, or --file=FILE')
    return [without_surrogates(text) for text in texts]


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        if not positional:
            raise UserError('no run given. Usage: python sample.py RUN_FOLDER "a prompt" --max_new_tokens=100')
        folder, *given = positional
        if s.model and s.draft:
            add_file(s.model)  # of either run
        run = load(folder, s.device, s.dtype, s.code, None if s.draft else s.model)
        prompts = read_prompts(s, given)
        generation, is_alone = Generation(run, prompts, s), len(prompts) == 1
        if generation.is_drafted and getattr(run.model, 'sequential', False):
            print('speculative decoding saves no time here: this model reads tokens one by one', file=sys.stderr)
        if is_alone:
            print(prompts[0], end='', flush=True)
        start = time.perf_counter()
        for piece in generation:
            if is_alone:
                print(piece, end='', flush=True)
        seconds = time.perf_counter() - start
        if is_alone:
            print()
        else:
            for i, (prompt, text) in enumerate(zip(prompts, generation.texts)):
                print(f'--- {i + 1}\n{prompt}{text}')
        print(f'{generation.n_tokens} tokens in {seconds:.2f} s, {generation.n_tokens / seconds:,.1f} tokens/s; '
              f'{generation.report}', file=sys.stderr)


if __name__ == '__main__':
    main()
