"""lm-eval for runs: `RunLM` is the model, `run_tasks` runs tasks.

With several processes, each scores a share of the requests and gathers the rest. For other lm-eval
settings, use `lm_eval.simple_evaluate(RunLM(...), ...)`.
"""
import difflib
import functools
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lm_architectures.data.text.tokenizers import Tokenizer
from lm_architectures.decode.generation import generate
from lm_architectures.files import ROOT, UserError, warn_once
from lm_architectures.machine.parallel import all_gather, first_not_none, rank, world
from lm_architectures.score.benchmarks import task_files
from lm_architectures.score.scoring import Scorer

OUR_TASKS = ROOT / 'config/lm_eval'  # tasks that are not in lm-eval


class RunLM(TemplateLM):
    """lm-eval model for a trained run. ends: ids that end an answer; None: the tokenizer's eos.

    As in lm-eval's own models, a context that is too long loses its start, bos included.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, ends: list[int] | None = None):
        super().__init__()
        self.scorer, self.encoding, self.ends = scorer, tokenizer, ends or [tokenizer.eos_id]

    @property
    def eot_token_id(self):
        return self.encoding.eos_id

    @property
    def prefix_token_id(self):
        return self.encoding.start[0] if self.encoding.start else self.eot_token_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.encoding.encode(string)

    def _loglikelihood_tokens(self, requests, **kwargs):
        start, empty = [*self.encoding.start], [self.prefix_token_id]  # empty: how lm-eval encodes an empty context
        # A context of spaces, or a continuation that merges with its context, may have no tokens.
        pairs = [(context if context == empty else start + context or empty, continuation or self.tok_encode(texts[1]))
                 for texts, context, continuation in requests]
        return [(nats, is_greedy) for nats, is_greedy, _ in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return self.rolling([self.tok_encode(request.args[0]) for request in requests])

    def rolling(self, texts: list[list[int]]) -> list[float]:
        """Return the log-likelihood of each text (a list of ids) in nats, by rolling windows."""
        windows = [(i, make_disjoint_window(window)) for i, ids in enumerate(texts)
                   for window in get_rolling_token_windows(ids, self.prefix_token_id, self.scorer.max_length, 1)]
        totals = [0.0] * len(texts)
        for (i, _), (nats, *_) in zip(windows, self.scorer.score([window for _, window in windows])):
            totals[i] += nats
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        asked, longest = [], max(1, self.scorer.max_length // 2)
        for request in requests:
            text, options = request.args
            options = normalize_gen_kwargs(options)
            if options['max_gen_toks'] > longest:
                warn_once(f'answers are cut at {longest} tokens, half of the context length')
                options['max_gen_toks'] = longest
            prompt = self.encoding.prompt(text)
            room = max(1, self.scorer.max_length - options['max_gen_toks'])
            self.scorer.truncated += len(prompt) > room
            asked.append((prompt[-room:], options))
        collator = Collator(asked, lambda pair: len(pair[0]), group_by='gen_kwargs')
        batches = list(collator.get_batched(n=max(1, self.scorer.batch_tokens // self.scorer.max_length)))
        mine = {i: self.answers(batches[i], seed=i) for i in range(rank(), len(batches), world())}
        texts = {i: found for share in all_gather(mine) for i, found in share.items()}
        return collator.get_original([text for i in range(len(batches)) for text in texts[i]])

    def answers(self, batch: list[tuple], seed: int) -> list[str]:
        """Return a continuation of each prompt, up to the first stop string.

        batch: [(prompt ids, options)], all with the same options.
        """
        options = batch[0][1]
        stops = [stop for stop in options['until'] if stop]
        filters = {name: options.get(name) or None for name in ('top_k', 'top_p', 'min_p')}  # 0: off
        temperature = float(options.get('temperature', 1)) if options['do_sample'] else 0

        def text_of(ids):
            return self.encoding.decode_text([i for i in ids if i != self.encoding.eos_id])

        def finished(_, ids):
            return any(stop in text_of(ids) for stop in stops)
        new = generate(self.scorer.model, [prompt for prompt, _ in batch], options['max_gen_toks'], eos_id=self.ends,
                       finished=finished, seed=seed, temperature=temperature, **filters)
        return [postprocess_generated_text(text_of(ids), stops, None) for ids in new]


@functools.cache
def task_manager() -> TaskManager:
    """Return lm-eval's task index, including ours. Takes seconds the first time."""
    return TaskManager(include_path=str(OUR_TASKS))


def run_tasks(lm, tasks: list[str], data_dir: str | None, limit: int | None, n_shots: int) -> dict:
    """Run lm-eval tasks with settings of eval.py. Returns {task: {metric: value}}."""
    manager = task_manager()
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, 3)
            raise UserError(f'unknown lm-eval task {task!r}: did you mean {" or ".join(near) or "another"}?')
    with tempfile.TemporaryDirectory() as folder:
        specs = tasks
        if data_dir:
            entries = {task: manager.task_index[task] for task in tasks}
            specs = task_files(entries, data_dir, Path(folder), n_shots > 0)
        found = lm_eval.simple_evaluate(lm, tasks=specs, task_manager=manager, num_fewshot=n_shots, limit=limit,
                                        bootstrap_iters=0, log_samples=False)
    found = first_not_none(found)  # lm-eval only returns them on rank 0
    return {task: {name.removesuffix(',none'): value for name, value in values.items()
                   if isinstance(value, float) and 'stderr' not in name}
            for task, values in found['results'].items()}
