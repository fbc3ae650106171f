"""Export runs to Hugging Face format.

    python -m common.export RUN --to_hf=FOLDER           write any run as a new Hugging Face folder
    python -m common.export RUN --to_hf=FOLDER --exact   with the model's code, whatever its shape

`--to_hf` writes a Standard run as the family that has its shape: Llama, Mistral (with a window),
Qwen2 (with biases) or Qwen3 (with norms of queries and keys). Other runs, and all with `--exact`,
get the model's code, so load them with
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import dataclasses
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from common import checkpoint, runs
from common.families import FAMILIES, family_of, to_family
from common.files import ROOT, UserError, friendly_errors, write_file
from common.hf_tokenizer import save_tokenizer
from common.settings import load_settings


@dataclass
class Settings:
    to_hf: str | None = None  # new folder to write
    exact: bool = False  # include the model's code even if a family has its shape: logits equal the run's everywhere


def export_run(run, folder, exact: bool = False) -> None:
    """Write a run as a new Hugging Face folder, in its checkpoint's dtype, with its tokenizer.

    exact: with the model's code, even if a family of transformers has its shape.
    """
    from transformers import GenerationConfig
    run, folder = Path(run), Path(folder)
    if folder.exists():
        raise UserError(f'{folder} already exists: choose a new folder')
    record = runs.read_run(run)
    c, data, block_size = runs.portable_config(record, run), record['data'], record['settings']['block_size']
    family, reason = (None, '--exact is set') if exact else family_of(record, c)
    tensors = checkpoint.load_checkpoint(run)[1]
    n_rows, ends = data.get('n_rows', c.n_ids), data.get('ends', data['eos_id'])
    if family:
        to_family(c, tensors, n_rows, block_size, ends, family).save_pretrained(folder, max_shard_size='1TB')
    else:
        save_with_code(record, c, tensors, n_rows, ends, folder)
    with suppress(OSError):  # some file systems have no modes; safetensors makes files owner-only
        (folder / 'model.safetensors').chmod((folder / 'config.json').stat().st_mode)
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    save_tokenizer(folder, data['tokenizer'], data['bos'], block_size)
    if (run / runs.CHAT_TEMPLATE).is_file():
        shutil.copy(run / runs.CHAT_TEMPLATE, folder)
    print(f'{folder} is a Hugging Face folder, {FAMILIES[family] if family else "with the model code"}, because '
          f'{reason}: load it with AutoModelForCausalLM.from_pretrained({str(folder)!r}'
          f'{"" if family else ", trust_remote_code=True"})')
    if family and c.eos_id is not None:
        print(f'A {FAMILIES[family]} does not mask attention between documents: its logits differ from this run after '
              'an end-of-text token, as in rolling likelihoods of lm-eval, which start with one. --exact keeps the '
              'mask')


def save_with_code(record: dict, c, tensors: dict, n_rows: int, ends: int | list[int], folder: Path) -> None:
    """Write weights, model file and the wrapper common/hf_model.py as a Hugging Face folder."""
    from common.hf_model import RunConfig
    name = f'model_{record["model"]}'
    if not (ROOT / f'{name}.py').is_file():
        raise UserError(f'{record["model"]} is a subclass: only a model file can be exported')
    folder.mkdir(parents=True)
    RunConfig(
        model_config=dataclasses.asdict(c), vocab_size=n_rows,
        hidden_size=getattr(c, 'n_embd', None), num_hidden_layers=getattr(c, 'n_layer', None),
        max_position_embeddings=record['settings']['block_size'], eos_token_id=ends,
        architectures=['RunForCausalLM'], dtype=next(iter(tensors.values())).dtype, auto_map={
            'AutoConfig': 'hf_model.RunConfig', 'AutoModel': 'hf_model.RunModel',
            'AutoModelForCausalLM': 'hf_model.RunForCausalLM'},
    ).save_pretrained(folder)
    save_file({f'model.{ours}': tensor for ours, tensor in tensors.items()}, folder / 'model.safetensors',
              {'format': 'pt'})
    imports, sources = re.compile(r'^from (attn_kernels|model_\w+) import', re.MULTILINE), ['common/hf_model.py']
    for source in sources:  # and all files that these import
        code = (ROOT / source).read_text(encoding='utf-8')
        if source == 'common/hf_model.py':
            code = code.replace('from model_standard import', f'from {name} import')
        sources += {f'{other}.py' for other in imports.findall(code)} - {*sources}
        code = re.sub('^( +)from scans import .*$', r'\1raise ModuleNotFoundError  # scans/ is not exported', code,
                      flags=re.MULTILINE)  # it reads weights itself and would not see adapters
        write_file(folder / Path(source).name, imports.sub(r'from .\1 import', code).encode())


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        if len(positional) != 1 or s.to_hf is None:
            raise UserError('expected one run and --to_hf. Usage: python -m common.export RUN --to_hf=FOLDER')
        from transformers.utils import logging
        logging.disable_progress_bar()
        export_run(positional[0], s.to_hf, s.exact)


if __name__ == '__main__':
    main()
