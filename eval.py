"""Evaluate trained runs: validation loss, other corpora, and zero-shot tasks through lm-eval.

    python eval.py RUN [RUN ...] --val                         loss on validation data, or --data
    python eval.py RUN --corpus=wikitext,c4,books3,govreport   nats per word and bits per byte
    python eval.py RUN --tasks=arc_easy,lambada_openai         accuracy, also with --num_fewshot=5
    python eval.py RUN --paper=sps                             tasks and averages of a paper
    torchrun --nproc_per_node=8 eval.py RUN --paper=sps        on several GPUs

Evaluates the newest checkpoint of each run folder RUN, adds a line to its eval.jsonl, and prints
the runs side by side. With --data_dir, tasks and corpora come from local files and nothing is
downloaded. Corpora are scored by rolling likelihood, as in the SPS paper (docs/evaluation.md).
"""
if __name__ == '__main__':
    from lm_architectures.start import quiet_start
    quiet_start()

import datetime
import importlib.metadata
import json
import logging
import math
import statistics
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal, get_args

import torch

from lm_architectures.data.text.tokenizers import Tokenizer, load_tokenizer
from lm_architectures.files import UserError, friendly_errors, open_lines, warn_once
from lm_architectures.machine.devices import Device, DType, local_device, pick_dtype
from lm_architectures.machine.parallel import init_distributed, rank
from lm_architectures.run.folders import load_run, read_run, report_edits, run_data
from lm_architectures.run.models import given_model
from lm_architectures.score.benchmarks import local_records
from lm_architectures.score.scoring import Scorer, perplexity
from lm_architectures.score.validation import validation_loss
from lm_architectures.settings import check_ranges, load_settings

Corpus = Literal['wikitext', 'c4', 'books3', 'govreport']
PAPERS = {  # paper: ({task: metric}, corpora). acc or acc_norm is inferred: the papers say "accuracy"
    'sps': ({'arc_easy': 'acc_norm', 'hellaswag': 'acc_norm', 'piqa': 'acc_norm', 'sciq': 'acc_norm',
             'lambada_openai': 'acc'}, get_args(Corpus)),
    'nextlat': ({'wikitext': 'word_perplexity', 'lambada_standard': 'acc', 'piqa': 'acc', 'hellaswag': 'acc_norm',
                 'winogrande': 'acc', 'arc_easy': 'acc', 'arc_challenge': 'acc_norm', 'social_iqa': 'acc',
                 'sciq': 'acc'}, ()),
    'gpn': ({'lambada_first_token': 'acc'}, ()),
}


@dataclass
class Settings:
    val: bool = False  # validation loss on the run's own validation data, or on `data`
    data: str | None = None  # data folder for --val; None: the run's own data
    val_tokens: int | None = None  # tokens for --val, in the same windows as in training; None: all
    corpus: tuple[Corpus, ...] = ()  # rolling log-likelihood on these
    tasks: tuple[str, ...] = ()  # lm-eval tasks
    paper: Literal['sps', 'nextlat', 'gpn'] | None = None  # run the tasks and corpora of this paper
    data_dir: str | None = None  # folder with local benchmark files; None: download from the Hugging Face hub
    bos: bool | None = None  # start texts of tasks and corpora with bos; None: if the training data has bos
    num_fewshot: int = 0  # examples before each question of an lm-eval task; 0 in the papers
    limit: int | None = None  # number of documents per task or corpus; None: all
    batch_tokens: int = 16384  # tokens per batch, including padding
    max_length: int | None = None  # maximum context in tokens; None: the run's block_size
    code: Literal['run'] | None = None  # run: the model's code as stored in the run, not as it is now
    model: str | None = None  # path of the model's file, if it is not in this repository
    device: Device = 'auto'  # auto: cuda if available, else cpu
    dtype: DType = 'auto'  # dtype of weights and cache; auto: bfloat16 on CUDA, float32 elsewhere
    verbose: bool = False  # show lm-eval's own warnings

    def __post_init__(self):
        check_ranges(self, val_tokens=1, num_fewshot=0, limit=1, batch_tokens=1, max_length=2)


def lambada_first_token(scorer: Scorer, tokenizer: Tokenizer, s: Settings) -> dict[str, float]:
    """Return LAMBADA's metrics as in the GPN paper, over the sub-words of the last word.

    acc: how often the first sub-word is the argmax. The paper's perplexity is exp of a mean over
    sub-words, and it does not define the mean: perplexity_of_examples weights examples equally,
    perplexity_pooled weights sub-words equally.
    """
    if s.data_dir is None:
        import datasets
        records = list(datasets.load_dataset('EleutherAI/lambada_openai', 'default', split='test'))
    else:
        records = local_records(s.data_dir, 'lambada_openai')
    requests = []
    for record in records[:s.limit]:
        text = record['text'].rstrip()
        context, _, word = text.rpartition(' ')
        context = tokenizer.encode(context)
        continuation = tokenizer.encode(text)[len(context):] or tokenizer.encode(' ' + word)
        requests.append(([*tokenizer.start, *context], continuation))
    if not any(tokenizer.decode(continuation[:1]).strip() for _, continuation in requests):
        warn_once('lambada_first_token: with this tokenizer, the first token of every answer is a blank')
    scores = scorer.score(requests)
    nats, lengths = [nats for nats, *_ in scores], [len(continuation) for _, continuation in requests]
    mean = statistics.fmean(n / length for n, length in zip(nats, lengths))
    n_right = sum(is_first_greedy for *_, is_first_greedy in scores)
    return {'acc': n_right / len(scores), 'perplexity_of_examples': perplexity(-mean),
            'perplexity_pooled': perplexity(-sum(nats) / sum(lengths))}


@torch.inference_mode()
def validation(folder, model, record: dict, s: Settings) -> dict[str, float]:
    """Return the metrics of --val: loss, perplexity and bits per byte, or a task's scores.

    On a CPU, matrix products use bf16 if the run was trained with it, so the loss matches its log.
    """
    data = run_data(record, s.data, folder)
    device = next(model.parameters()).device
    T = data.T or min(record['settings']['block_size'], s.max_length or inf)
    data.n_rows('val', T)  # an error if it is too short
    batch_size = max(1, s.batch_tokens // T)
    products = pick_dtype(s.dtype, device.type, bf16_on_cpu=record['settings'].get('dtype') == 'bfloat16')
    with torch.autocast('cpu', products, enabled=products == torch.bfloat16):
        parts, n_counted = validation_loss(model, data, T, s.val_tokens, record['settings']['eval_seed'], batch_size,
                                           device)
    nats = parts.pop('nll')
    parts.pop('loss', None)
    values = {'nats_per_token': nats, 'perplexity': perplexity(nats), **parts}
    if data.T:  # a task: exact scores on all held-out rows
        values |= data.score(model, device, batch_size)
    else:
        has_eos = model.config.eos_id is not None  # tokens after eos are not counted
        n_bytes = sum(share * info['bytes'] / (info['tokens'] - has_eos * info['documents'])  # per token
                      for share, source in data.sources.values() for info in [source.splits['val']])
        values['bits_per_byte'] = nats / math.log(2) / n_bytes
    return values | {'tokens': n_counted}


def load_scorer(folder, s: Settings) -> tuple[Scorer, Tokenizer, dict]:
    """Load a run. Returns its Scorer, tokenizer and config.json."""
    device = local_device(s.device)
    model, record = load_run(folder, device, pick_dtype(s.dtype, device.type), s.code)
    scorer = Scorer(model, s.max_length or record['settings']['block_size'], s.batch_tokens)
    bos = record['data']['bos'] if s.bos is None else s.bos
    return scorer, load_tokenizer(record['data']['tokenizer'], bos), record


def evaluate(folder, s: Settings, tasks: list[str], corpora: list[str]) -> dict:
    """Evaluate one run. Returns a record for eval.jsonl; 'results' is {task: {metric: value}}."""
    scorer, tokenizer, record = load_scorer(folder, s)
    model, results, versions = scorer.model, {}, {'torch': torch.__version__}
    if s.val:
        results['val'] = validation(folder, model, record, s)
    try:
        if 'lambada_first_token' in tasks:
            results['lambada_first_token'] = lambada_first_token(scorer, tokenizer, s)
        few_shot = [task for task in tasks if task != 'lambada_first_token']
        if few_shot or corpora:
            warn_once('loading lm-eval and its index of tasks, which takes minutes the first time on a slow disk')
            from lm_architectures.score.lm_eval_adapter import RunLM, run_tasks
            lm = RunLM(scorer, tokenizer, record['data'].get('ends'))
            for names, n_shots in ((few_shot, s.num_fewshot), ([name for name in corpora if name not in tasks], 0)):
                if names:
                    results |= run_tasks(lm, names, s.data_dir, s.limit, n_shots)
            versions['lm_eval'] = importlib.metadata.version('lm_eval')
    except (OSError, ImportError) as error:  # ImportError: no support for a socks proxy
        raise UserError(f'{", ".join([*tasks, *corpora])} could not be loaded ({type(error).__name__}: {error}): check '
                        'the network and the variables *_proxy, or use --data_dir offline')
    for corpus in corpora:
        results[corpus]['nats_per_word'] = math.log(results[corpus]['word_perplexity'])
    if s.paper:
        accuracies = [(task, metric) for task, metric in PAPERS[s.paper][0].items() if metric.startswith('acc')]
        results['average'] = {'accuracy': statistics.fmean(results[task][metric] for task, metric in accuracies)}
        if corpora:
            results['average']['nats_per_word'] = statistics.fmean(results[name]['nats_per_word'] for name in corpora)
    if scorer.truncated and rank() == 0:
        print(f'{folder}: the start of {scorer.truncated} contexts longer than {scorer.max_length} tokens was '
              'cut off', file=sys.stderr)
    planned = record['settings']  # an imported run has no max_tokens
    of_steps = math.ceil(planned.get('max_tokens', 0) / (planned.get('batch_size', 1) * planned['block_size'])) or None
    return {'date': datetime.datetime.now().isoformat(timespec='seconds'), 'settings': vars(s), 'step': record['step'],
            'of_steps': of_steps, 'dtype': str(next(model.parameters()).dtype)[6:],
            'edited': report_edits(record['model'], record['code'], folder), 'versions': versions,
            'truncated': scorer.truncated, 'results': results}


def append_line(folder, line: dict) -> None:
    """Append a line to eval.jsonl. Non-finite numbers become null."""
    results = {task: {metric: value if math.isfinite(value) else None for metric, value in values.items()}
               for task, values in line['results'].items()}
    with open_lines(Path(folder) / 'eval.jsonl') as file:
        file.write(json.dumps({**line, 'results': results}) + '\n')


def print_table(columns: dict[str, dict[str, float]]) -> None:
    """Print {run: {row: value}} as a table with one column per run."""
    rows = list(dict.fromkeys(row for values in columns.values() for row in values))
    width = max(map(len, rows), default=0)
    print(' ' * width, *(f'{name[-20:]:>20}' for name in columns))
    for row in rows:
        print(f'{row:{width}}', *(f'{values[row]:20,.4f}' if row in values else f'{"-":>20}'
                                  for values in columns.values()))


def chosen(s: Settings) -> tuple[list[str], list[str]]:
    """Return (tasks, corpora) to evaluate. UserError if there is nothing to do."""
    metrics, paper_corpora = PAPERS.get(s.paper, ({}, ()))
    tasks, corpora = list(dict.fromkeys([*metrics, *s.tasks])), list(dict.fromkeys([*paper_corpora, *s.corpus]))
    if not (s.val or tasks or corpora):
        raise UserError('nothing to do: give --val, --corpus=..., --tasks=... or --paper=sps|nextlat|gpn')
    if s.num_fewshot and not set(tasks) - {'lambada_first_token'}:
        raise UserError(f'num_fewshot is {s.num_fewshot}, but there are no tasks of lm-eval: give --tasks')
    return tasks, corpora


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, runs, _ = load_settings(Settings, argv)
        if not runs:
            raise UserError('no run given. Usage: python eval.py RUN_FOLDER --val')
        tasks, corpora = chosen(s)
        if s.model and given_model(s.model) not in [read_run(run)['model'] for run in runs]:
            raise UserError(f'model is {s.model}, but none of these runs has it: leave it out')
        init_distributed('gloo')
        columns = {}
        logging.getLogger('lm_eval').setLevel(logging.WARNING if s.verbose else logging.ERROR)
        try:
            for run in dict.fromkeys(runs):
                line = evaluate(run, s, tasks, corpora)
                columns[run] = {f'{task} {metric}': value
                                for task, values in line['results'].items() for metric, value in values.items()}
                if rank() == 0:
                    of_steps = f' of {line["of_steps"]:,}' if line['of_steps'] else ''
                    print(f'{run}: checkpoint of step {line["step"]:,}{of_steps}')
                    append_line(run, line)
        finally:  # also if a later run fails
            if rank() == 0 and columns:
                print_table(columns)


if __name__ == '__main__':
    main()
