"""Evaluate trained runs: validation loss, other corpora, and zero-shot tasks through lm-eval.

    python eval.py RUN [RUN ...] --val                         on the runs' own validation data, or on --data=FOLDER
    python eval.py RUN --corpus=wikitext,c4,books3,govreport   nats per word and bits per byte
    python eval.py RUN --tasks=arc_easy,lambada_openai         zero-shot accuracy
    python eval.py RUN --paper=sps                             the tasks and averages of a paper: sps, nextlat or gpn
    torchrun --nproc_per_node=8 eval.py RUN --paper=sps        on several GPUs
    python eval.py RUN --speculative                           drafting: accepted tokens, speed-up; --draft=RUN drafts
    python eval.py RUN --to_llama=FOLDER                       export a Standard run as a Hugging Face Llama folder
    python eval.py FOLDER --from_llama=RUN                     import a Llama, Mistral or Qwen folder as a new run

Several runs are shown side by side, each with the step of its newest checkpoint. Each run folder gets a line in
eval.jsonl. With --data_dir, tasks and corpora are read from local benchmark files (common/benchmarks.py lists them) and
nothing is downloaded.

If the documents of a run's training data start with bos (prepare_fineweb.py --bos), so do the texts of tasks and
corpora; --bos=False leaves it out.

Corpora are scored by rolling likelihood, which starts each document after bos, or without one after eos, as lm-eval
does. A model trained with documents on was never trained to predict the token after eos (training leaves those
positions out), so the first token of a document is scored by an untrained position. The SPS paper's figures are
computed in the same way.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import contextlib
import csv
import datetime
import difflib
import functools
import importlib.metadata
import io
import json
import math
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist

from common.benchmarks import local_records, task_files
from common.decoding import check_sampling, generate
from common.files import UserError, first_line, friendly_errors, say_once, write_file
from common.machine import (
    Device,
    DType,
    decoding_dtype,
    join_processes,
    pick_device,
    pick_dtype,
    take_gpu,
    torchrun_ranks,
)
from common.parallel import all_gather, first_given, rank, world
from common.runs import load_run, run_data
from common.scoring import Scorer
from common.settings import check_ranges, load_settings
from common.speculative import AutoLength, longest_draft, read_length, speculative_generate
from common.validation import perplexity, validation_loss
from data.tokenizers import Tokenizer, load_tokenizer
from sample import load_draft

CORPORA = ('wikitext', 'c4', 'books3', 'govreport')
PAPERS = {  # paper: (tasks with the metric it reports, corpora)
    'sps': ({'arc_easy': 'acc_norm', 'hellaswag': 'acc_norm', 'piqa': 'acc_norm', 'sciq': 'acc_norm',
             'lambada_openai': 'acc'}, CORPORA),
    'nextlat': ({'wikitext': 'word_perplexity', 'lambada_standard': 'acc', 'piqa': 'acc', 'hellaswag': 'acc_norm',
                 'winogrande': 'acc', 'arc_easy': 'acc', 'arc_challenge': 'acc_norm', 'social_iqa': 'acc',
                 'sciq': 'acc'}, ()),
    'gpn': ({'lambada_first_token': 'acc'}, ()),
}
TASK_FILES = Path(__file__).resolve().parent / 'config/lm_eval'  # tasks that lm-eval lacks


@dataclass
class Settings:
    val: bool = False  # validation loss on the run's own data, or on `data`
    data: str | None = None  # data folder for --val and for the prompts of --speculative; None: the run's
    val_tokens: int | None = None  # tokens of --val, in the windows that training uses; None: all
    corpus: str = ''  # corpora, separated by commas
    tasks: str = ''  # lm-eval tasks, separated by commas
    paper: str = ''  # sps, nextlat or gpn: that paper's tasks and corpora
    data_dir: str | None = None  # folder with local benchmark files; None: download from the Hugging Face hub
    bos: bool | None = None  # start the texts of tasks and corpora with bos; None: as in the run's training data
    limit: int | None = None  # documents of each task or corpus; None: all
    speculative: bool = False  # speculative decoding over draft lengths, on prompts from validation data
    draft: str | None = None  # with --speculative: run folder of a model that drafts; None: the model itself
    draft_lens: str = '1,2,3,4,5,6,7,8,9,10,auto'  # with --speculative: lengths to compare, if the model can draft them
    n_prompts: int = 1024  # with --speculative: prompts, spread evenly over the data (NextLat paper: 1024)
    prompt_tokens: int = 512  # with --speculative: tokens of each prompt (NextLat paper: 512)
    new_tokens: int = 512  # with --speculative: tokens generated after each prompt (NextLat paper: 512)
    temperature: float = 1.0  # with --speculative; 0: always the likeliest token
    batch_size: int | None = None  # contexts per batch; None: by batch_tokens; 16 for answers, 1 for --speculative
    batch_tokens: int = 16384  # tokens of a batch, padding included
    max_length: int | None = None  # most tokens that the model reads; None: the block_size of its training
    device: Device = 'auto'  # auto: cuda if there is a GPU, else cpu
    dtype: DType = 'auto'  # of weights and cache; auto: bfloat16 on GPUs, float32 elsewhere
    to_llama: str | None = None  # write the run to this folder as a Hugging Face Llama
    from_llama: str | None = None  # make a new run of this name from a Llama, Mistral or Qwen folder
    tokenizer: str | None = None  # with --from_llama: its tokenizer, as in prepare_fineweb.py; None: the folder's own

    def __post_init__(self):
        at_least_1 = (1, inf)
        check_ranges(self, val_tokens=at_least_1, limit=at_least_1, n_prompts=at_least_1, prompt_tokens=at_least_1,
                     new_tokens=(2, inf), batch_size=at_least_1, batch_tokens=at_least_1, max_length=(2, inf))
        check_sampling(self.temperature)


# ---- lm-eval ----

@functools.cache
def lm_eval_class() -> type:
    """The class that lm-eval knows as 'run': lm_eval.simple_evaluate(model='run', model_args={'run': FOLDER})."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    @register_model('run')
    class RunLM(TemplateLM):
        def __init__(self, run=None, scorer=None, encoding=None, device=None, dtype='auto', batch_size=None,
                     max_batch_size=None, max_length=None):
            """run: a run folder; or a Scorer and its Tokenizer. batch_size None or 'auto': by the scorer's bounds."""
            super().__init__()
            if run is not None:
                batch_size = None if batch_size in (None, 'auto') else int(batch_size)
                s = Settings(device=device or 'auto', dtype=dtype, batch_size=batch_size, max_length=max_length)
                scorer, encoding, _ = load_scorer(run, s)
            self.scorer, self.encoding = scorer, encoding

        @property
        def tokenizer_name(self):
            return self.encoding.name

        @property
        def eot_token_id(self):
            return self.encoding.eos_id

        @property
        def prefix_token_id(self):
            return self.encoding.start[0] if self.encoding.start else self.eot_token_id

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return self.encoding.encode(string)

        def loglikelihood(self, requests, disable_tqdm=False):
            return super().loglikelihood(requests, disable_tqdm or not sys.stderr.isatty())  # no bars in a log file

        def _loglikelihood_tokens(self, requests, **kwargs):
            start, empty = [*self.encoding.start], [self.prefix_token_id]  # what lm-eval makes of an empty context
            # a context of blanks may have no token, nor a continuation that a token has joined with its context
            pairs = [(context if context == empty else start + context or empty,
                      continuation or self.tok_encode(texts[1])) for texts, context, continuation in requests]
            return [(nats, is_greedy) for nats, is_greedy, _ in self.scorer.score(pairs)]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            windows, owners = [], []
            for i, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                cut = get_rolling_token_windows(ids, self.prefix_token_id, self.scorer.max_length, 1)
                windows += map(make_disjoint_window, cut)
                owners += [i] * (len(windows) - len(owners))
            totals = [0.0] * len(requests)
            for owner, (nats, *_) in zip(owners, self.scorer.score(windows)):
                totals[owner] += nats
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            groups, batches = {}, []
            for i, request in enumerate(requests):
                groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
            for options, members in groups.items():
                prompts = {i: [*self.encoding.start, *self.encoding.encode(requests[i].args[0])]
                           or [self.prefix_token_id] for i in members}
                members.sort(key=lambda i: len(prompts[i]))
                size = 16 if self.scorer.batch_size == inf else self.scorer.batch_size
                batches += [({i: prompts[i] for i in members[start:start + size]}, json.loads(options), start)
                            for start in range(0, len(members), size)]
            texts, before = {}, self.scorer.truncated
            for batch in batches[rank()::world()]:
                texts |= generate_texts(self.scorer, self.encoding, *batch)
            shares = all_gather((texts, self.scorer.truncated - before))
            self.scorer.truncated = before + sum(n for _, n in shares)
            texts = {i: text for share, _ in shares for i, text in share.items()}
            return [texts[i] for i in range(len(requests))]

    return RunLM


LENGTHS = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')  # lm-eval's names for one option


def generate_texts(scorer: Scorer, encoding: Tokenizer, prompts: dict, options: dict, seed: int) -> dict[int, str]:
    """{request: ids of its prompt} -> {request: its text up to the first stop string}; options are lm-eval's.

    At least half of the model's window is left to the prompt. seed: of sampling, another one for each batch.
    """
    until = options.get('until') or []
    stops = [until] if isinstance(until, str) else until
    asked = int(next((options[name] for name in LENGTHS if options.get(name) is not None), 256))
    max_new_tokens = min(asked, max(1, scorer.max_length // 2))
    if max_new_tokens < asked:
        say_once(f'answers end after {max_new_tokens} tokens, half of what the model reads, not after {asked}')
    room = max(1, scorer.max_length - max_new_tokens)
    scorer.truncated += sum(len(ids) > room for ids in prompts.values())

    def text_of(ids):
        return encoding.decode([i for i in ids if i != encoding.eos_id]).decode(errors='replace')

    def finished(_, ids):
        text = text_of(ids)
        return any(stop in text for stop in stops)

    def cut(text):
        return text[:min((text.find(stop) for stop in stops if stop in text), default=len(text))]
    sampling, temperature = {'temperature': 0}, options.get('temperature')
    if options.get('do_sample', bool(temperature)):
        sampling = {'temperature': 1.0 if temperature is None else float(temperature), 'top_p': options.get('top_p'),
                    'top_k': options.get('top_k') or None, 'min_p': options.get('min_p')}  # top_k 0: all
    new = generate(scorer.model, [ids[-room:] for ids in prompts.values()], max_new_tokens, eos_id=encoding.eos_id,
                   finished=finished, seed=seed, **sampling)
    return {i: cut(text_of(ids)) for i, ids in zip(prompts, new)}


@functools.cache
def task_manager():
    """lm-eval's index of its tasks and of ours. It takes seconds to make."""
    from lm_eval.tasks import TaskManager
    return TaskManager(include_path=str(TASK_FILES))


def run_tasks(lm, tasks: list[str], s: Settings, **options) -> dict:
    """lm-eval's results of a model on tasks, zero shot; options go to lm_eval.simple_evaluate."""
    import lm_eval
    manager = task_manager()
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, 3)
            raise UserError(f'lm-eval knows no task {task!r}: did you mean {" or ".join(near) or "another"}?')
    options = {'log_samples': False, **options}
    with tempfile.TemporaryDirectory() as folder:
        specs = tasks
        if s.data_dir:
            specs = task_files({task: manager.task_index[task] for task in tasks}, s.data_dir, folder)
        try:
            found = lm_eval.simple_evaluate(lm, tasks=specs, task_manager=manager, num_fewshot=0, limit=s.limit,
                                            bootstrap_iters=0, **options)
        except OSError as error:
            raise UserError(f'the documents of {", ".join(tasks)} could not be had ({type(error).__name__}: {error}); '
                            'offline, use --data_dir')
        except OverflowError as error:
            raise UserError(f'a perplexity of {", ".join(tasks)} is beyond the largest number ({first_line(error)}): '
                            'the model knows nothing of these texts')
    return first_given(found)  # lm-eval only returns them on rank 0


def task_metrics(found: dict) -> dict[str, dict[str, float]]:
    """{task: {metric: value}} of lm-eval's results."""
    def metrics(values):
        return {name.removesuffix(',none'): value for name, value in values.items()
                if isinstance(value, float) and 'stderr' not in name}
    return {task: metrics(values) for task, values in found['results'].items()}


def lambada_first_token(scorer: Scorer, tokenizer: Tokenizer, s: Settings) -> dict[str, float]:
    """LAMBADA as the GPN paper counts it, by the sub-words of the last word.

    acc: is the first of them the likeliest. The paper's perplexity is exp of a mean over them, which may be
    perplexity_of_examples: each example's mean counts alike; or perplexity_pooled: each sub-word does.
    """
    if s.data_dir is None:
        import datasets
        records = list(datasets.load_dataset('EleutherAI/lambada_openai', 'default', split='test'))
    else:
        records = local_records(s.data_dir, 'lambada_first_token')
    requests = []
    for record in records[:s.limit]:
        text = record['text'].rstrip()
        context, word = text.rsplit(' ', 1)
        context = tokenizer.encode(context)
        continuation = tokenizer.encode(text)[len(context):] or tokenizer.encode(' ' + word)
        requests.append(([*tokenizer.start, *context], continuation))
    scores = scorer.score(requests)
    nats, lengths = [nats for nats, *_ in scores], [len(continuation) for _, continuation in requests]
    mean = statistics.fmean(n / length for n, length in zip(nats, lengths))
    n_right = sum(is_first_greedy for *_, is_first_greedy in scores)
    return {'acc': n_right / len(scores), 'perplexity_of_examples': perplexity(-mean),
            'perplexity_pooled': perplexity(-sum(nats) / sum(lengths))}


# ---- validation loss ----

@torch.inference_mode()
def validation(model, record: dict, s: Settings) -> dict[str, float]:
    """Return nats per token, perplexity and bits per byte, or a task's scores, on the run's validation data or --data.

    On a CPU, matrix products are in bf16 where training has them in bf16, so the loss is that of the run's log.
    """
    data = run_data(record, s.data)
    is_task, device = hasattr(data, 'score'), next(model.parameters()).device
    T = data.T if is_task else min(record['settings']['block_size'], s.max_length or inf)
    if data.n_windows('val', T) < 1:
        raise UserError(f'{data.folder} has fewer validation tokens than one window of {T}')
    batch_size = s.batch_size or max(1, s.batch_tokens // T)
    products = pick_dtype(s.dtype, device.type, big_enough=record['settings'].get('dtype') == 'bfloat16')
    with torch.autocast('cpu', products, enabled=products == torch.bfloat16):
        parts, n_counted = validation_loss(model, data, T, s.val_tokens, record['settings']['eval_seed'], batch_size,
                                           device)
    nats = parts['nll']
    values = {'nats_per_token': nats, 'perplexity': perplexity(nats)}
    values |= {name: mean for name, mean in parts.items() if name not in ('loss', 'nll')}
    if is_task:  # exact, on all its held-out rows
        values |= data.score(model, device, batch_size)
    else:
        info = data.splits['val']
        n_eos = 0 if model.config.eos_id is None else info['documents']  # what follows eos does not count
        values['bits_per_byte'] = nats / math.log(2) * (info['tokens'] - n_eos) / info['bytes']
    return values | {'tokens': n_counted}


# ---- speculative decoding ----

def speculative(model, record: dict, s: Settings) -> list[dict]:
    """The table of speculative.csv: a row for each draft length.

    The NextLat paper's protocol. Plain decoding and all lengths take turns on each batch of prompts, none of which ends
    early. A speed-up is the median over the batches of the ratio of their times, as machines are noisy; accepted tokens
    are the mean over a row's rounds; cumulative acceptance at i is the chance that the first i tokens of a draft are
    all accepted, the product of the acceptance at each position.
    """
    if world() > 1:
        raise UserError('--speculative compares times within one process: start it without torchrun')
    prompts = speculative_prompts(record, s)
    draft = None
    if s.draft is not None:
        draft = load_draft(s.draft, record, next(model.parameters()).device.type, s.dtype)
    lengths = draft_lengths(s.draft_lens, model, draft)
    seconds, statistics_of = time_decoding(decoders(model, draft, lengths, s), prompts, s)
    table = []
    for n in lengths:
        table.append({'draft_len': n, **acceptance(statistics_of[n])})
        ratios = [plain / own for plain, own in zip(seconds['plain'], seconds[n])]
        speed = s.n_prompts * s.new_tokens / sum(seconds[n])
        table[-1] |= {'speedup': statistics.median(ratios), 'tokens_per_s': speed}
    return table


def draft_lengths(text: str, model, draft) -> list:
    """The lengths of --draft_lens, each once, but for those beyond what the model drafts; UserError for a bad one."""
    longest = inf if draft is not None else getattr(model, 'longest_draft', 0)
    asked = dict.fromkeys(read_length(part.strip()) for part in text.split(','))
    lengths = [n for n in asked if isinstance(n, str) or n <= longest]
    try:
        for n in ('auto', *lengths):
            longest_draft(model, draft, n)
    except ValueError as error:
        raise UserError(str(error))
    if not lengths:
        raise UserError(f'draft_lens is {text}: this model drafts up to {longest} tokens')
    return lengths


def speculative_prompts(record, s):
    """Prompts spread evenly over the validation data; UserError if they do not fit the context or are too few."""
    data, T, block_size = run_data(record, s.data), s.prompt_tokens, record['settings']['block_size']
    if hasattr(data, 'score'):
        raise UserError(f'--speculative takes its prompts from texts, and {data.folder} is a synthetic task: give '
                        '--data=FOLDER')
    if T + s.new_tokens > block_size:
        raise UserError(f'prompts of {T} tokens and {s.new_tokens} new ones do not fit the context of {block_size} '
                        'tokens that the run was trained with: lower prompt_tokens or new_tokens')
    n_windows = data.n_windows('val', T)
    if n_windows < s.n_prompts:
        raise UserError(f'{data.folder} has {n_windows} validation windows of {T} tokens: lower n_prompts from '
                        f'{s.n_prompts}')
    return data.val_batch([i * n_windows // s.n_prompts for i in range(s.n_prompts)], T)[0].tolist()


def decoders(model, draft, lengths, s) -> dict[object, Callable]:
    """{draft length, or 'plain': a function that decodes prompts and returns its DraftStatistics, None for plain}."""
    auto = AutoLength()  # which goes on learning over the batches

    def make(n):
        def decode(prompts, **options):
            if n == 'plain':
                generate(model, prompts, temperature=s.temperature, **options)
                return None
            return speculative_generate(model, prompts, draft=draft, draft_len=n, auto=auto, temperature=s.temperature,
                                        **options)[1]
        return decode
    return {n: make(n) for n in (*lengths, 'plain')}


def time_decoding(sides, prompts, s) -> tuple[dict, dict]:
    """({side: seconds of each batch of prompts}, {side: DraftStatistics of each}), the sides taking turns."""
    size = s.batch_size or 1
    for decode in sides.values():
        decode(prompts[:size], max_new_tokens=min(32, s.new_tokens))  # what happens only once
    seconds, statistics_of = {n: [] for n in sides}, {n: [] for n in sides}
    for start in range(0, len(prompts), size):
        for n, decode in sides.items():
            before = time.perf_counter()
            statistics_of[n].append(decode(prompts[start:start + size], max_new_tokens=s.new_tokens, seed=start))
            seconds[n].append(time.perf_counter() - before)
    return seconds, statistics_of


def acceptance(parts) -> dict[str, float]:
    """'accepted' tokens a round and 'cumulative_1', ... of several DraftStatistics."""
    def by_position(lists):
        return [sum(column) for column in zip_longest(*lists, fillvalue=0)]
    accepted, tried = by_position(part.accepted for part in parts), by_position(part.tried for part in parts)
    survive = accumulate((a / t for a, t in zip(accepted, tried) if t), operator.mul)
    return {'accepted': sum(accepted) / sum(part.rounds for part in parts),
            **{f'cumulative_{i + 1}': share for i, share in enumerate(survive)}}


def write_speculative(folder, table: list[dict]) -> None:
    """Writes speculative.csv."""
    columns = ['draft_len', 'speedup', 'accepted', 'tokens_per_s']
    columns += [name for name in max(table, key=len) if name.startswith('cumulative')]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval='')
    writer.writeheader()
    writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in table)
    write_file(Path(folder) / 'speculative.csv', text.getvalue().encode())


def plot_speculative(tables: dict[str, list[dict]], path) -> None:
    """Speed-up and cumulative acceptance over the draft length as a picture, from {run: table of `speculative`}."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout='constrained')
    for i, (run, rows) in enumerate(tables.items()):
        fixed = [row for row in rows if row['draft_len'] != 'auto']
        x, y = [row['draft_len'] for row in fixed], [row['speedup'] for row in fixed]
        left.plot(x, y, marker='o', color=f'C{i}', label=Path(run).name)
        for row in rows:
            if row['draft_len'] == 'auto':
                left.axhline(row['speedup'], color=f'C{i}', linestyle='--', label=f'{Path(run).name}, auto')
        longest = max(fixed or rows, key=len)  # it has the most columns of acceptance
        shares = [value for name, value in longest.items() if name.startswith('cumulative')]
        right.plot(range(1, len(shares) + 1), shares, marker='o', color=f'C{i}', label=Path(run).name)
    left.set(xlabel='draft length', ylabel='times plain decoding')
    right.set(xlabel='draft length', ylabel='cumulative acceptance', ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---- one run, several runs ----

def load_scorer(folder, s: Settings) -> tuple[Scorer, Tokenizer, dict]:
    """Load a run: its Scorer, its tokenizer and its config.json."""
    device = pick_device(s.device)
    dtype = decoding_dtype(s.dtype, device)
    if device == 'cuda' and world() > 1:
        local = torchrun_ranks()[2]
        take_gpu(local)
        device = f'cuda:{local}'
    model, record = load_run(folder, device, dtype)
    scorer = Scorer(model, s.max_length or record['settings']['block_size'], s.batch_tokens, s.batch_size)
    bos = record['data']['bos'] if s.bos is None else s.bos
    return scorer, load_tokenizer(record['data']['tokenizer'], bos), record


def evaluate(folder, s: Settings, tasks: list[str], corpora: list[str]) -> tuple[dict, list[dict]]:
    """The line for eval.jsonl of one run, {task: {metric: value}} in its 'results'; and its table of `speculative`."""
    scorer, tokenizer, record = load_scorer(folder, s)
    model, results, table = scorer.model, {}, []
    if s.val:
        results['val'] = validation(model, record, s)
    if s.speculative:
        table = speculative(model, record, s)
        results['speculative'] = {f'{what} {row["draft_len"]}': row[what] for what in ('speedup', 'accepted')
                                  for row in table}
    if 'lambada_first_token' in tasks:
        results['lambada_first_token'] = lambada_first_token(scorer, tokenizer, s)
    of_lm_eval = [task for task in dict.fromkeys([*tasks, *corpora]) if task != 'lambada_first_token']
    if of_lm_eval:
        found = task_metrics(run_tasks(lm_eval_class()(scorer=scorer, encoding=tokenizer), of_lm_eval, s))
        for corpus in corpora:
            found[corpus]['nats_per_word'] = math.log(found[corpus]['word_perplexity'])
        results |= found
    if s.paper:
        results['average'] = averages(results, s.paper, corpora)
    if scorer.truncated and rank() == 0:
        print(f'{folder}: {scorer.truncated} contexts were longer than {scorer.max_length} tokens and lost their '
              'start', file=sys.stderr)
    versions = {'torch': torch.__version__}
    if of_lm_eval:
        versions['lm_eval'] = importlib.metadata.version('lm_eval')
    line = {'date': datetime.datetime.now().isoformat(timespec='seconds'), 'settings': vars(s),
            'step': record['step'], 'of_steps': planned_steps(record['settings']),
            'dtype': str(next(model.parameters()).dtype)[6:], 'versions': versions,
            'truncated': scorer.truncated, 'results': results}
    return line, table


def planned_steps(settings: dict) -> int | None:
    """The steps of a whole run by its settings; None for an imported one."""
    if not {'max_tokens', 'batch_size', 'block_size'} <= settings.keys():
        return None
    return math.ceil(settings['max_tokens'] / (settings['batch_size'] * settings['block_size']))


@contextlib.contextmanager
def lenient_writes():
    """What cannot be written costs a line on stderr, not the results, which are printed by then."""
    try:
        yield
    except OSError as error:
        print(f'eval.py: not written: {error}', file=sys.stderr)


def write_records(folder, line: dict, table: list[dict]) -> None:
    """Appends the line to eval.jsonl, what is not finite as null, and writes speculative.csv."""
    results = {task: {metric: value if math.isfinite(value) else None for metric, value in values.items()}
               for task, values in line['results'].items()}
    with lenient_writes(), open(Path(folder) / 'eval.jsonl', 'ab', buffering=0) as file:
        file.write(json.dumps({**line, 'results': results}).encode() + b'\n')  # in one write, so that none is cut
    if table:
        with lenient_writes():
            write_speculative(folder, table)


def averages(results, paper, corpora) -> dict[str, float]:
    """The mean of a paper's accuracies and, where corpora are asked for, of their nats per word."""
    metrics, _ = PAPERS[paper]
    accuracies = [results[task][metric] for task, metric in metrics.items() if metric.startswith('acc')]
    means = {'accuracy': sum(accuracies) / len(accuracies)}
    if corpora:
        means['nats_per_word'] = sum(results[corpus]['nats_per_word'] for corpus in corpora) / len(corpora)
    return means


def print_table(columns: dict[str, dict[str, float]]) -> None:
    """{run: {row: value}} as a table, a column for each run."""
    rows = list(dict.fromkeys(row for values in columns.values() for row in values))
    width = max(map(len, rows), default=0)
    print(' ' * width, *(f'{name[-20:]:>20}' for name in columns))
    for row in rows:
        print(f'{row:{width}}', *(f'{values[row]:20,.4f}' if row in values else f'{"-":>20}'
                                  for values in columns.values()))


def chosen(s: Settings) -> tuple[list[str], list[str]]:
    """The tasks and corpora that the settings ask for; UserError for an unknown one or for nothing to do."""
    if s.paper and s.paper not in PAPERS:
        raise UserError(f'paper is {s.paper!r}: expected {", ".join(PAPERS)}')
    metrics, of_paper = PAPERS[s.paper] if s.paper else ({}, ())
    tasks, corpora = ([name.strip() for name in text.split(',') if name.strip()] for text in (s.tasks, s.corpus))
    tasks, corpora = list(dict.fromkeys([*metrics, *tasks])), list(dict.fromkeys([*of_paper, *corpora]))
    for corpus in corpora:
        if corpus not in CORPORA:
            raise UserError(f'unknown corpus {corpus!r}: expected {", ".join(CORPORA)}')
    if not (s.val or s.speculative or tasks or corpora):
        raise UserError('nothing to do: give --val, --speculative, --corpus=..., --tasks=... or '
                        '--paper=sps|nextlat|gpn')
    return tasks, corpora


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, runs, _ = load_settings(Settings, argv)
        if not runs:
            raise UserError('which run? python eval.py RUN_FOLDER --val')
        if (s.to_llama or s.from_llama) and len(runs) > 1:
            raise UserError(f'{" ".join(runs)}: --to_llama and --from_llama take one run at a time')
        if s.to_llama or s.from_llama:
            from common.llama import export_llama, import_llama
        if s.to_llama:
            return export_llama(runs[0], s.to_llama)
        if s.from_llama:
            return import_llama(runs[0], s.from_llama, s.tokenizer and load_tokenizer(s.tokenizer))
        tasks, corpora = chosen(s)
        if torchrun_ranks()[1] > 1:
            join_processes('gloo')
        columns, tables = {}, {}
        for run in runs:
            line, tables[run] = evaluate(run, s, tasks, corpora)
            columns[run] = {f'{task} {metric}': value
                            for task, values in line['results'].items() for metric, value in values.items()}
            if rank() == 0:
                of_steps = f' of {line["of_steps"]:,}' if line['of_steps'] else ''
                print_table({run: columns[run]})
                print(f'by the checkpoint of step {line["step"]:,}{of_steps}')
                write_records(run, line, tables[run])
        if rank() == 0:
            if len(runs) > 1:
                print_table(columns)
            if s.speculative:
                path = Path(runs[0]) / 'speculative.png'
                with lenient_writes():
                    plot_speculative(tables, path)
                    print(f'written to {path}; the numbers are in speculative.csv of each run folder')
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == '__main__':
    main()
