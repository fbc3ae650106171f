"""Judges trained runs: validation loss, other corpora, and zero-shot tasks through lm-eval.

    python eval.py RUN [RUN ...] --val                          on the runs' own validation data, or on --data=FOLDER; a task's scores
    python eval.py RUN --corpus=wikitext,c4,books3,govreport    nats per word and bits per byte
    python eval.py RUN --tasks=arc_easy,lambada_openai          zero-shot accuracy
    python eval.py RUN --paper=sps                              the sets and averages of a paper: sps, nextlat or gpn
    torchrun --nproc_per_node=8 eval.py RUN --paper=sps         on several GPUs
    python eval.py RUN --speculative                            accepted tokens and speed-up over draft lengths; --draft=RUN drafts
    python eval.py RUN --to_llama=FOLDER                        a Standard run as a Hugging Face Llama folder
    python eval.py FOLDER --from_llama=RUN                      and back, as a new run

Several runs are shown side by side. Each run folder gets a line in eval.jsonl. With --data_dir, tasks and corpora are read from the
benchmarks' own files there (`local_records` lists them) and nothing is downloaded.

Rolling likelihood, of which corpora are made, starts each document after eos, as lm-eval does. A model trained with documents on has
never been trained to predict from eos (training leaves those positions out): the first token of a document is then scored by an
untrained position. The SPS paper's figures are made so, and these are too.
"""
import csv
import datetime
import difflib
import functools
import importlib.metadata
import json
import math
import operator
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist

from common.decoding import generate, pack_weights, roomy_cache
from common.files import UserError, friendly_errors
from common.llama import export_llama, import_llama
from common.machine import pick_device, pick_dtype
from common.runs import load_run
from common.settings import check_ranges, load_settings
from common.speculative import AutoLength, longest_draft, speculative_generate
from data import open_data
from data.tokenizers import load_tokenizer
from sample import load_draft

CORPORA = ('wikitext', 'c4', 'books3', 'govreport')
PAPERS = {  # paper: (tasks with the metric it reports, corpora)
    'sps': ({'arc_easy': 'acc_norm', 'hellaswag': 'acc_norm', 'piqa': 'acc_norm', 'sciq': 'acc_norm', 'lambada_openai': 'acc'}, CORPORA),
    'nextlat': ({'wikitext': 'word_perplexity', 'lambada_standard': 'acc', 'piqa': 'acc', 'hellaswag': 'acc_norm', 'winogrande': 'acc', 'arc_easy': 'acc',
                 'arc_challenge': 'acc_norm', 'social_iqa': 'acc', 'sciq': 'acc'}, ()),
    'gpn': ({'lambada_first_token': 'acc'}, ()),
}
TASK_FILES = Path(__file__).resolve().parent / 'config/lm_eval'  # tasks that lm-eval lacks
LOGITS = 2 ** 26  # numbers in the logits of one call, at most
SHARED = 64  # continuations of up to so many tokens share one reading of their context


@dataclass
class Settings:
    val: bool = False  # validation loss on the run's own data, or on `data`
    data: str | None = None  # data folder for --val; None: the run's
    val_tokens: int | None = None  # tokens of --val; None: all
    corpus: str = ''  # corpora, separated by commas
    tasks: str = ''  # lm-eval tasks, separated by commas
    paper: str = ''  # sps, nextlat or gpn: that paper's tasks and corpora
    data_dir: str | None = None  # folder with the benchmarks' own files; None: from the Hugging Face hub
    limit: int | None = None  # documents of each task or corpus; None: all
    speculative: bool = False  # speculative decoding over draft lengths, on prompts from the run's validation data or from `data`
    draft: str | None = None  # with --speculative: run folder of a model that drafts; None: the model itself
    draft_lens: str = '1,2,3,4,5,6,7,8,9,10,auto'  # with --speculative: lengths to compare; more than a model can draft are left out
    n_prompts: int = 1024  # with --speculative: prompts, spread evenly over the data (NextLat paper: 1024)
    prompt_tokens: int = 512  # with --speculative: tokens of each prompt (NextLat paper: 512)
    new_tokens: int = 512  # with --speculative: tokens that each prompt is continued by (NextLat paper: 512)
    temperature: float = 1.0  # with --speculative; 0: always the likeliest token
    batch_size: int | None = None  # contexts read at a time; None: as many as `batch_tokens` holds, one with --speculative
    batch_tokens: int = 16384  # tokens of a batch, padding included
    max_length: int | None = None  # tokens that the model sees at most; None: the block_size of its training
    device: str = 'auto'  # auto, cuda or cpu
    dtype: str = 'auto'  # auto, bfloat16 or float32
    to_llama: str | None = None  # write the run to this folder as a Hugging Face Llama
    from_llama: str | None = None  # make a new run folder of this name from a Hugging Face Llama folder
    tokenizer: str = 'gpt2'  # with --from_llama: its tokenizer, as in prepare_fineweb.py


# ---- log-likelihoods ----

class Scorer:
    """Log-likelihoods of continuations under a model, in batches; with several processes each takes its share."""

    def __init__(self, model, max_length, batch_tokens=16384, batch_size=None):
        self.model, self.max_length, self.batch_tokens, self.batch_size = model, max_length, batch_tokens, batch_size
        self.device = next(model.parameters()).device
        self.truncated = 0  # requests whose context lost its start

    def score(self, requests):
        """requests [(context ids, continuation ids)], neither empty -> [(log-likelihood in nats, greedy, first token greedy)].

        Requests with equal contexts are read together: one prefill, then each continuation, rolled back after it.
        """
        groups = {}
        for i, (context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise UserError(f'a continuation of {len(continuation)} tokens does not fit max_length = {self.max_length}')
            room = self.max_length + 1 - len(continuation)  # the last token is predicted, never read
            self.truncated += len(context) > room
            context = tuple(context[-room:])
            groups.setdefault((context, None if len(continuation) <= SHARED else i), []).append((i, continuation))
        groups = [(context, members) for (context, _), members in groups.items()]
        groups.sort(key=lambda g: (-max(len(c) for _, c in g[1]) if len(g[1]) == 1 else 0, -len(g[0]), -len(g[1])))
        results = {}
        for number, batch in enumerate(self.batches(groups)):
            if number % world() == rank():
                results |= self.score_batch(batch)
        if world() > 1:
            parts = [None] * world()
            dist.all_gather_object(parts, results)
            results = {i: result for part in parts for i, result in part.items()}
        return [results[i] for i in range(len(requests))]

    def batches(self, groups):
        """Cuts sorted groups into batches whose padded tokens and logits stay within bounds."""
        vocabulary, batch, longest = self.model.config.vocab_size, [], [0, 0]
        for context, members in groups:
            run = max(len(c) for _, c in members)
            wider = [max(longest[0], len(context)), max(longest[1], run)]
            rows = len(batch) + 1
            if batch and (rows * sum(wider) > self.batch_tokens or rows * wider[1] * vocabulary > LOGITS or rows > (self.batch_size or inf)):
                yield batch
                batch, wider = [], [len(context), run]
            batch.append((context, members))
            longest = wider
        if batch:
            yield batch

    def score_batch(self, batch):
        """{request: result} of groups of requests, a row each. A batch too big for the GPU is cut in two."""
        try:
            return self.score_rows(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        torch.cuda.empty_cache()
        return self.score_batch(batch[:len(batch) // 2]) | self.score_batch(batch[len(batch) // 2:])

    @torch.inference_mode()
    def score_rows(self, batch):
        contexts = [context for context, _ in batch]
        turns = max(len(members) for _, members in batch)
        longest = max(len(c) for _, members in batch for _, c in members)
        piece = max(1, LOGITS // (len(batch) * self.model.config.vocab_size)) if turns == 1 and len(batch) == 1 else longest
        cache = roomy_cache(self.model, contexts, longest, max_run=max(1, min(piece, longest)))
        tokens, lengths = self.padded(contexts)
        first = self.model.extend(tokens, cache, lengths)
        results = {}
        for turn in range(turns):
            members = [members[turn] if turn < len(members) else (None, [0]) for _, members in batch]
            targets, lengths = self.padded([c for _, c in members])
            counted = torch.arange(targets.shape[1], device=self.device) < lengths[:, None]
            nats, greedy = self.judge(first[:, None], targets[:, :1])
            nats, greedy = [nats], [greedy]
            for a in range(0, targets.shape[1] - 1, piece):  # more than one piece only where one row is alone
                run = targets[:, a:min(a + piece, targets.shape[1] - 1)]
                logits = self.model.extend(run, cache, (lengths - 1).clamp(1, run.shape[1]) if len(batch) > 1 else None, all_positions=True)
                part = self.judge(logits, targets[:, a + 1:a + 1 + run.shape[1]])
                nats.append(part[0])
                greedy.append(part[1])
            if turn + 1 < turns and targets.shape[1] > 1:
                cache.rollback((lengths - 1).clamp(1, run.shape[1]) if len(batch) > 1 else run.shape[1])
            nats, greedy = torch.cat(nats, 1), torch.cat(greedy, 1)
            rows = zip(((nats * counted).sum(1)).tolist(), (greedy | ~counted).all(1).tolist(), greedy[:, 0].tolist())
            results |= {i: row for (i, _), row in zip(members, rows) if i is not None}
        return results

    def judge(self, logits, targets):
        """Log-probabilities of targets (B, n) under logits (B, n, V), fp64 (B, n), and whether each is the likeliest."""
        chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (chosen.float() - logits.float().logsumexp(-1)).double(), logits.argmax(-1) == targets

    def padded(self, rows):
        """Lists of ids -> (B, n) right-padded, and their lengths (B,)."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for to, row in zip(ids, rows):
            to[:len(row)] = torch.tensor(row)
        return ids.to(self.device), lengths.to(self.device)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


# ---- lm-eval ----

@functools.cache
def lm_eval_class():
    """The class that lm-eval knows as 'run': lm_eval.simple_evaluate(model='run', model_args={'run': FOLDER}) after this call."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    @register_model('run')
    class RunLM(TemplateLM):
        def __init__(self, run=None, scorer=None, encoding=None, device=None, dtype='auto', batch_size=None, max_batch_size=None, max_length=None):
            """run: a run folder; or a Scorer and its Tokenizer. batch_size None or 'auto': by the scorer's bounds."""
            super().__init__()
            if run is not None:
                batch_size = None if batch_size in (None, 'auto') else int(batch_size)
                scorer, encoding, _ = load_scorer(run, Settings(device=device or 'auto', dtype=dtype, batch_size=batch_size, max_length=max_length))
            self.scorer, self.encoding = scorer, encoding

        @property
        def tokenizer_name(self):
            return self.encoding.name

        @property
        def eot_token_id(self):
            return self.encoding.eos_id

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return self.encoding.encode(string)

        def _loglikelihood_tokens(self, requests, **kwargs):
            return [(nats, greedy) for nats, greedy, _ in self.scorer.score([(context, continuation) for _, context, continuation in requests])]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            windows, owners = [], []
            for i, request in enumerate(requests):
                cut = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.scorer.max_length, 1)
                windows += map(make_disjoint_window, cut)
                owners += [i] * (len(windows) - len(owners))
            totals = [0.0] * len(requests)
            for owner, (nats, *_) in zip(owners, self.scorer.score(windows)):
                totals[owner] += nats
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            groups, texts = {}, {}
            for i, request in enumerate(requests):
                groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
            for options, members in groups.items():
                prompts = {i: self.encoding.encode(requests[i].args[0]) or [self.prefix_token_id] for i in members}
                members.sort(key=lambda i: len(prompts[i]))
                rows = self.scorer.batch_size or 16
                for a in range(0, len(members), rows):
                    texts |= self.generate_batch({i: prompts[i] for i in members[a:a + rows]}, json.loads(options))
            return [texts[i] for i in range(len(requests))]

        def generate_batch(self, prompts, options):
            """{request: ids of its prompt} -> {request: text up to the first stop string}."""
            stops = [options['until']] if isinstance(options.get('until'), str) else options.get('until') or []
            new = int(options.get('max_gen_toks', 256))
            room = max(1, self.scorer.max_length - new)
            self.scorer.truncated += sum(len(ids) > room for ids in prompts.values())
            text = lambda ids: self.encoding.decode([i for i in ids if i != self.eot_token_id]).decode(errors='replace')
            rows = generate(self.scorer.model, [ids[-room:] for ids in prompts.values()], new, top_p=options.get('top_p'), top_k=options.get('top_k'),
                            temperature=float(options.get('temperature', 1)) if options.get('do_sample') else 0, eos_id=self.eot_token_id,
                            finished=lambda row, ids: any(stop in text(ids) for stop in stops))
            cut = lambda said: said[:min((said.find(stop) for stop in stops if stop in said), default=len(said))]
            return {i: cut(text(ids)) for i, ids in zip(prompts, rows)}

    return RunLM


def local_records(folder, task):
    """A task's documents from the benchmark's own file in a folder, in the fields that lm-eval's task reads; UserError without one.

    arc_easy, arc_challenge  TASK.jsonl: question {stem, choices} and answerKey, or query, choices and gold
    piqa                     piqa.jsonl or piqa_valid.jsonl: goal, sol1, sol2, with labels beside it in ..._labels.lst or in `label`
    social_iqa, hellaswag, winogrande, sciq (or sciq_valid)   TASK.jsonl as published
    lambada_openai, lambada_standard, lambada_first_token     TASK.jsonl: text, or context and continuation
    wikitext, c4, books3, govreport                           TASK.jsonl: page or text, one document a line
    """
    names = [task, f'{task}_valid', *(['lambada_openai'] if task == 'lambada_first_token' else [])]
    path = next((p for name in names for p in (Path(folder) / f'{name}.jsonl', Path(folder) / f'{name}.json') if p.is_file()), None)
    if path is None:
        raise UserError(f'{folder} has no file for {task}: expected {names[0]}.jsonl')
    with open(path, encoding='utf-8') as file:
        records = [json.loads(line) for line in file if line.strip()]
    labels = next((p for p in (path.with_name(f'{path.stem}_labels.lst'), path.with_name(f'{path.stem}-labels.lst')) if p.is_file()), None)
    if labels:
        records = [record | {'label': int(label)} for record, label in zip(records, labels.read_text().split(), strict=True)]
    try:
        return [as_on_the_hub(record, task) for record in records]
    except (KeyError, TypeError) as error:
        raise UserError(f'{path} has a record without {error}: it is not in the form of {task}')


def as_on_the_hub(record, task):
    """One record with the fields of the Hugging Face dataset that lm-eval's task is written for."""
    if task.startswith('arc') and 'query' in record:  # question and answer already put together
        question = record['query'].removeprefix('Question:').removesuffix('Answer:').strip()
        labels = [str(i) for i in range(len(record['choices']))]
        return {'question': question, 'choices': {'text': record['choices'], 'label': labels}, 'answerKey': str(record['gold'])}
    if task.startswith('arc') and 'stem' in record['question']:
        choices = {key: [choice[key] for choice in record['question']['choices']] for key in ('text', 'label')}
        return {'question': record['question']['stem'], 'choices': choices, 'answerKey': record['answerKey']}
    if task.startswith('lambada') and 'continuation' in record:
        return {'text': f'{record["context"]} {record["continuation"].strip()}'}
    if task in ('wikitext', 'c4') and 'page' not in record:
        return record | {'page': record['text']}
    return record


def task_files(manager, tasks, data_dir, folder):
    """What lm-eval is given for tasks over local files: for each a YAML file in `folder`, its own definition but for the documents."""
    paths = []
    for task in tasks:
        records = Path(folder) / f'{task}.jsonl'
        records.write_text(''.join(json.dumps(record) + '\n' for record in local_records(data_dir, task)))
        files = {split: str(records) for split in ('train', 'validation', 'test')}
        definition = {'include': str(manager.task_index[task].yaml_path), 'task': task, 'dataset_path': 'json', 'dataset_name': None,
                      'dataset_kwargs': {'data_files': files}}
        paths.append(str(Path(folder) / f'{task}.yaml'))
        Path(paths[-1]).write_text(json.dumps(definition))  # JSON is YAML
    return paths


def run_tasks(lm, tasks, s, **options):
    """lm-eval's results of a model on tasks, zero shot; options go to lm_eval.simple_evaluate."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=str(TASK_FILES))
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, 3)
            raise UserError(f'lm-eval knows no task {task!r}: did you mean {" or ".join(near) or "another"}?')
    with tempfile.TemporaryDirectory() as folder:
        specs = task_files(manager, tasks, s.data_dir, folder) if s.data_dir else tasks
        try:
            found = [lm_eval.simple_evaluate(lm, tasks=specs, task_manager=manager, num_fewshot=0, limit=s.limit, bootstrap_iters=0,
                                             **{'log_samples': False, **options})]
        except OSError as error:
            raise UserError(f'the documents of {", ".join(tasks)} could not be had ({type(error).__name__}: {error}); offline, use --data_dir')
    if world() > 1:  # lm-eval returns them on the first process alone
        dist.broadcast_object_list(found)
    return found[0]


def task_metrics(found):
    """{task: {metric: value}} of lm-eval's results."""
    return {task: {name.removesuffix(',none'): value for name, value in values.items() if isinstance(value, float) and 'stderr' not in name}
            for task, values in found['results'].items()}


def lambada_first_token(scorer, tokenizer, s):
    """LAMBADA as the GPN paper counts it: is the last word's first sub-word the likeliest, and perplexity of the last words' sub-words."""
    if s.data_dir is None:
        import datasets
        records = list(datasets.load_dataset('EleutherAI/lambada_openai', 'default', split='test'))
    else:
        records = local_records(s.data_dir, 'lambada_first_token')
    requests = []
    for record in records[:s.limit]:
        context, word = record['text'].rsplit(' ', 1)
        context = tokenizer.encode(context)
        requests.append((context, tokenizer.encode(record['text'])[len(context):] or tokenizer.encode(' ' + word)))
    scores = scorer.score(requests)
    means = [nats / len(continuation) for (nats, *_), (_, continuation) in zip(scores, requests)]
    return {'acc': sum(first for *_, first in scores) / len(scores), 'perplexity': math.exp(-sum(means) / len(means))}


# ---- validation loss ----

def data_for(record, s):
    """--data, or the run's own data; UserError if there is none or it has another tokenizer."""
    if not (s.data or record['settings']['data']):
        raise UserError('this run has no data of its own: give --data=FOLDER')
    data = open_data(s.data or record['settings']['data'])
    if (data.n_ids, data.eos_id) != (record['data']['n_ids'], record['data']['eos_id']):
        raise UserError(f'{data.folder} has {data.n_ids} ids with eos {data.eos_id}, the run {record["data"]["n_ids"]} with {record["data"]["eos_id"]}: '
                        'they have different tokenizers')
    return data


@torch.inference_mode()
def validation(model, record, s):
    """Nats a token, perplexity and bits a byte, or a task's scores, on the validation split of the run's data or of --data."""
    data = data_for(record, s)
    T, device = min(record['settings']['block_size'], s.max_length or inf), next(model.parameters()).device
    n = data.n_windows('val', T)
    n = n if s.val_tokens is None else min(n, max(1, s.val_tokens // T))
    if n < 1:
        raise UserError(f'{data.folder} has fewer validation tokens than one window of {T}')
    rows, totals = s.batch_size or max(1, s.batch_tokens // T), torch.zeros(3, dtype=torch.float64)
    mine = range(rank(), n, world())
    for a in range(0, len(mine), rows):
        idx, targets = data.val_batch(mine[a:a + rows], T)
        counts = (targets >= 0) & (idx != (-1 if model.config.eos_id is None else model.config.eos_id))
        nll = model(idx.to(device), targets.to(device))['nll'].item()
        totals += torch.tensor([nll * counts.sum(), counts.sum(), targets.numel()], dtype=torch.float64)
    if world() > 1:
        dist.all_reduce(totals)
    nats, info = (totals[0] / totals[1]).item(), data.splits['val']
    values = {'nats_per_token': nats, 'perplexity': math.exp(nats)}
    if hasattr(data, 'score'):  # a synthetic task: exact, on all its held-out rows
        values |= data.score(model, device, rows)
    else:
        bytes_a_token = info['bytes'] / (info['tokens'] - (0 if model.config.eos_id is None else info['documents']))
        values['bits_per_byte'] = nats / math.log(2) / bytes_a_token
    return values | {'tokens': int(totals[1])}


# ---- speculative decoding ----

def speculative(folder, model, record, s):
    """{'speedup 4': ..., 'accepted 4': ...} over draft lengths; writes speculative.csv into the run folder. The NextLat paper's protocol.

    Plain decoding and all lengths take turns on each batch of prompts, none of which ends early. A speed-up is the median over the
    batches of the ratio of their times, as machines are noisy; accepted tokens are the mean over a row's rounds; cumulative acceptance
    at i is the chance that the first i tokens of a draft are all accepted, the product of the acceptance at each position.
    """
    if world() > 1:
        raise UserError('--speculative compares times within one process: start it without torchrun')
    data, T = data_for(record, s), s.prompt_tokens
    if T + s.new_tokens > record['settings']['block_size']:
        raise UserError(f'prompts of {T} tokens and {s.new_tokens} new ones do not fit the context of {record["settings"]["block_size"]} tokens that '
                        'the run was trained with: lower prompt_tokens or new_tokens')
    windows = data.n_windows('val', T)
    if windows < s.n_prompts:
        raise UserError(f'{data.folder} has {windows} validation windows of {T} tokens: lower n_prompts from {s.n_prompts}')
    prompts = data.val_batch([i * windows // s.n_prompts for i in range(s.n_prompts)], T)[0].tolist()
    draft = s.draft and load_draft(s.draft, record, next(model.parameters()).device.type, s.dtype)
    longest_draft(model, draft, 'auto')  # raises UserError where there is no draft
    lengths = [int(n) if n.strip().isdecimal() else n.strip() for n in s.draft_lens.split(',')]
    lengths = [n for n in lengths if draft or n == 'auto' or n <= model.longest_draft]
    options, auto = dict(temperature=s.temperature), AutoLength()  # which goes on learning over the batches
    sides = {n: lambda rows, n=n, **more: speculative_generate(model, rows, draft=draft, draft_len=n, auto=auto, **options, **more) for n in lengths}
    sides['plain'] = lambda rows, **more: (generate(model, rows, **options, **more), None)
    seconds, became, size = {n: [] for n in sides}, {n: [] for n in lengths}, s.batch_size or 1
    for decode in sides.values():
        decode(prompts[:size], max_new_tokens=min(32, s.new_tokens))  # what happens only once
    for a in range(0, s.n_prompts, size):
        for n, decode in sides.items():
            start = time.perf_counter()
            _, drafts = decode(prompts[a:a + size], max_new_tokens=s.new_tokens, seed=a)
            seconds[n].append(time.perf_counter() - start)
            if drafts:
                became[n].append(drafts)
    table = []
    for n, parts in became.items():
        by_position = lambda lists: [sum(column) for column in zip_longest(*lists, fillvalue=0)]
        accepted, tried = by_position(part.accepted for part in parts), by_position(part.tried for part in parts)
        survive = list(accumulate((a / t for a, t in zip(accepted, tried) if t), operator.mul))
        speedup = statistics.median(plain / own for plain, own in zip(seconds['plain'], seconds[n]))
        table.append({'draft_len': n, 'speedup': speedup, 'accepted': sum(accepted) / sum(part.rounds for part in parts),
                      'tokens_per_s': s.n_prompts * s.new_tokens / sum(seconds[n])})
        table[-1] |= {f'cumulative_{i + 1}': share for i, share in enumerate(survive)}
    with open(Path(folder) / 'speculative.csv', 'w', newline='') as file:
        writer = csv.DictWriter(file, max(table, key=len).keys(), restval='')
        writer.writeheader()
        writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in table)
    return {f'{what} {row["draft_len"]}': row[what] for what in ('speedup', 'accepted') for row in table}


def plot_speculative(runs):
    """Speed-up and cumulative acceptance over the draft length, all runs, from their speculative.csv: speculative.png in the first's folder."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout='constrained')
    for i, run in enumerate(runs):
        with open(Path(run) / 'speculative.csv', newline='') as file:
            rows = list(csv.DictReader(file))
        fixed = [row for row in rows if row['draft_len'] != 'auto']
        left.plot([int(row['draft_len']) for row in fixed], [float(row['speedup']) for row in fixed], marker='o', color=f'C{i}', label=Path(run).name)
        for row in rows:
            if row['draft_len'] == 'auto':
                left.axhline(float(row['speedup']), color=f'C{i}', linestyle='--', label=f'{Path(run).name}, auto')
        shares = [float(value) for name, value in (fixed or rows)[-1].items() if name.startswith('cumulative') and value]
        right.plot(range(1, len(shares) + 1), shares, marker='o', color=f'C{i}', label=Path(run).name)
    left.set(xlabel='draft length', ylabel='times plain decoding')
    right.set(xlabel='draft length', ylabel='cumulative acceptance', ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    path = Path(runs[0]) / 'speculative.png'
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f'written to {path}; the numbers are in speculative.csv of each run folder')


# ---- one run, several runs ----

def load_scorer(folder, s):
    """A run's Scorer, its tokenizer and its config.json."""
    device = pick_device(s.device)
    if device == 'cuda' and world() > 1:
        device = f'cuda:{os.environ["LOCAL_RANK"]}'
    model, record = load_run(folder, device, pick_dtype(s.dtype, device.split(':')[0]))
    scorer = Scorer(pack_weights(model), s.max_length or record['settings']['block_size'], s.batch_tokens, s.batch_size)
    return scorer, load_tokenizer(record['data']['tokenizer']), record


def evaluate(folder, s, tasks, corpora):
    """{row: value} for one run; also a line in its eval.jsonl."""
    scorer, tokenizer, record = load_scorer(folder, s)
    results = {'val': validation(scorer.model, record, s)} if s.val else {}
    if s.speculative:
        results['speculative'] = speculative(folder, scorer.model, record, s)
    if 'lambada_first_token' in tasks:
        results['lambada_first_token'] = lambada_first_token(scorer, tokenizer, s)
    through = [task for task in dict.fromkeys([*tasks, *corpora]) if task != 'lambada_first_token']
    if through:
        found = task_metrics(run_tasks(lm_eval_class()(scorer=scorer, encoding=tokenizer), through, s))
        for corpus in corpora:
            found[corpus]['nats_per_word'] = math.log(found[corpus]['word_perplexity'])
        results |= found
    if s.paper:
        metrics, _ = PAPERS[s.paper]
        accuracies = [results[task][metric] for task, metric in metrics.items() if metric.startswith('acc')]
        results['average'] = {'accuracy': sum(accuracies) / len(accuracies)}
        if corpora:
            results['average']['nats_per_word'] = sum(results[corpus]['nats_per_word'] for corpus in corpora) / len(corpora)
    if scorer.truncated and rank() == 0:
        print(f'{folder}: {scorer.truncated} contexts were longer than {scorer.max_length} tokens and lost their start', file=sys.stderr)
    if rank() == 0:
        versions = {'torch': torch.__version__} | ({'lm_eval': importlib.metadata.version('lm_eval')} if through else {})
        line = {'date': datetime.datetime.now().isoformat(timespec='seconds'), 'settings': vars(s),
                'dtype': str(next(scorer.model.parameters()).dtype)[6:], 'versions': versions,
                'truncated': scorer.truncated, 'results': results}
        with open(Path(folder) / 'eval.jsonl', 'a') as file:
            file.write(json.dumps(line) + '\n')
    return {f'{task} {metric}': value for task, values in results.items() for metric, value in values.items()}


def print_table(columns):
    """{run: {row: value}} as a table, a column for each run."""
    rows = list(dict.fromkeys(row for values in columns.values() for row in values))
    width = max(map(len, rows), default=0)
    print(' ' * width, *(f'{name[-20:]:>20}' for name in columns))
    for row in rows:
        print(f'{row:{width}}', *(f'{values.get(row, math.nan):20,.4f}' for values in columns.values()))


def chosen(s):
    """The tasks and corpora that the settings ask for; UserError for an unknown one or for nothing to do."""
    if s.paper and s.paper not in PAPERS:
        raise UserError(f'paper is {s.paper!r}: expected {", ".join(PAPERS)}')
    metrics, of_paper = PAPERS[s.paper] if s.paper else ({}, ())
    names = lambda text: [name.strip() for name in text.split(',') if name.strip()]
    tasks, corpora = list(dict.fromkeys([*metrics, *names(s.tasks)])), list(dict.fromkeys([*of_paper, *names(s.corpus)]))
    for corpus in corpora:
        if corpus not in CORPORA:
            raise UserError(f'unknown corpus {corpus!r}: expected {", ".join(CORPORA)}')
    if not (s.val or s.speculative or tasks or corpora):
        raise UserError('nothing to do: give --val, --speculative, --corpus=..., --tasks=... or --paper=sps|nextlat|gpn')
    return tasks, corpora


def main():
    with friendly_errors():
        s, runs, _ = load_settings(Settings, sys.argv[1:])
        if not runs:
            raise UserError('which run? python eval.py RUN_FOLDER --val')
        check_ranges(s, val_tokens=(1, inf), limit=(1, inf), batch_size=(1, inf), batch_tokens=(1, inf), max_length=(2, inf),
                     n_prompts=(1, inf), prompt_tokens=(1, inf), new_tokens=(1, inf), temperature=(0, inf))
        if s.to_llama or s.from_llama:
            return export_llama(runs[0], s.to_llama) if s.to_llama else import_llama(runs[0], s.from_llama, load_tokenizer(s.tokenizer))
        tasks, corpora = chosen(s)
        if 'RANK' in os.environ:
            dist.init_process_group('gloo')
        columns = {run: evaluate(run, s, tasks, corpora) for run in runs}
        if rank() == 0:
            print_table(columns)
            if s.speculative:
                plot_speculative(runs)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == '__main__':
    main()
