"""Claims of the four papers, each tried in miniature: trained, tested over seeds and given a verdict.

    python -m analysis.claims --list                                the claims, and what all of it costs
    python -m analysis.claims --out_dir=out/claims                  trains what they need and judges them
    python -m analysis.claims --only=sps,gpn_memory                 those of a paper, or by name: a part of all
    python -m analysis.claims --join=A,B --out_dir=out/claims       one table of parts that were run in folders A and B

A claim is a row of CLAIMS: what a paper says, the two runs that it compares, a statistic and a test. A run is a row of
RUNS, and is trained once for all claims that name it: its learning rate is bracketed at the first seed, then it trains
with every seed. Runs of tasks that are learned late, if at all, have tokens and a learning rate of their own, which
--max_tokens does not shorten and nothing brackets: the claim is then of the method, and not of the budget. An
interrupted one goes on by the same command: what is done is not done again. Parts can be run one after the other with
one out_dir: the table has all claims, those of earlier parts with their verdicts, and the rest as `not run`. Parts of
several machines are joined: a claim that two of them have is the first one's. One out_dir has one --max_tokens and one
--seeds.

The verdicts, at a level of 5% (but sign tests, see below):

    seen                       the test rejects in the direction of the claim
    contradicted               the same test rejects in the other direction, at the same level
    not seen at this size      neither, which says nothing about larger models
    not run                    there are no numbers yet

So one in twenty claims of two things that are alike is called seen by chance, and another one contradicted; the 95%
interval of the latter may hold zero, as its test has one side.

The tests are `t`: Welch's one-sided test over seeds, beside a fixed number the one of one sample, and for `equal` both
one-sided tests (TOST); `sign`: every seed is on one side, for scores of tasks, which are far from normal (by chance
alone three seeds agree in one of eight cases); `exact`: numbers without chance, as parameters, which every seed must
have. Parameters and bytes of state hold by construction, whatever is trained, and are counted by themselves. Each claim
is tested by itself, and nothing is corrected for their number.

Writes claims.csv (a row a claim, with the numbers of every seed, both commands, the budget), claims.md and parts.json
(where each part was run, and what it cost) in out_dir.
"""
if __name__ == '__main__':
    from common.start import quiet_start
    quiet_start()

import csv
import hashlib
import statistics
from dataclasses import dataclass
from functools import cache
from math import inf, log, log2, nan
from pathlib import Path

import torch

from analysis import a5, context_ready, gpn_state, gradient_flow, manhattan, probes, restricted_state
from analysis.figures import write_csv
from analysis.loss_curves import short_number
from analysis.outcomes import cache_bytes, core_hours, final_loss, n_parameters, settings_of
from analysis.report import logged
from analysis.scores import score_names
from analysis.seeds import difference, interval, lower_test
from analysis.shootout import n_at_inference
from analysis.sweep import is_done, loss_of, train_at_best_rates
from bench import markdown_table, one_line, where_and_when
from common.files import UserError, friendly_errors, read_json, write_file, write_json
from common.machine import pick_device
from common.run_settings import model_config, read_settings
from common.runs import blank_model, load_run, model_file, read_log, run_data, saved_config
from common.settings import check_ranges, load_settings
from common.speculative import speculative_generate
from data import open_data
from train import Settings as TrainSettings

ALPHA = 0.05  # level of the tests
EVAL_TOKENS = 500_000  # of a validation loss
SEEN, CONTRADICTED, NOT_SEEN, NOT_RUN = 'seen', 'contradicted', 'not seen at this size', 'not run'
PAPERS = {'sps': 'The State-Prediction Separation Hypothesis', 'context_ready': 'The Context-Ready Transformer',
          'nextlat': 'Next-Latent Prediction Transformers Learn Compact World Models',
          'gpn': 'A Single-Layer Model Can Do Language Modeling'}
TESTED = 'ours', 'other', 'statistic', 'direction', 'test', 'margin'  # columns that say what a claim is
COSTS = 'our_tokens', 'other_tokens', 'our_command', 'other_command'  # and what it took
BY_CONSTRUCTION = 'parameters', 'parameters at inference', 'bytes of state a token'  # of any weights
TOKENS_PER_SECOND = 10_000  # of a core, for the estimate of --list: all of RUNS on an Intel Xeon that others shared


@dataclass
class Settings:
    out_dir: str = 'out/claims'  # of the runs and of what is written
    only: str = 'all'  # papers (sps, context_ready, nextlat, gpn) and names of claims, with commas between
    list: bool = False  # print the claims and what they cost, and stop
    join: str | None = None  # folders of parts, with commas between, to make one table of, and stop
    max_tokens: int = 1_000_000  # training tokens of a run; RUNS says which take more, or their own number
    seeds: int = 3  # runs of each row of RUNS, at one learning rate
    jobs: int = 2  # runs at a time, one thread each

    def __post_init__(self):
        at_least_1 = (1, inf)
        check_ranges(self, max_tokens=at_least_1, seeds=(2, inf), jobs=at_least_1)


# ---- the runs ----

@dataclass
class Run:
    arguments: str  # of train.py
    rate: float  # learning rate to look at first
    times: float = 1  # its training tokens, over max_tokens
    tokens: int | None = None  # its training tokens whatever max_tokens is, all at `rate`; None: as `times` says


SHAPE = '--n_layer=4 --n_head=3 --n_embd=96'
SPS = f'config/quickstart.py {SHAPE}'
NEXTLAT = f'config/quickstart_nextlat.py {SHAPE}'
STAR = 'config/nextlat/path_star_small.py --warmup_tokens=600_000 --eval_interval=100'  # as the config has it
STAR_TOKENS = 2500 * 128 * 31  # steps, rows, tokens of a row
A5 = 'config/nextlat/a5_small.py'
A5_TOKENS = 20_000_000
CONTEXT_READY = 'config/context_ready_small.py --n_embd=128'
POINTER = 'config/context_ready/pointer_chasing_small.py'
POINTER_TOKENS = 1500 * 64 * 114
ROFORMER = f'{POINTER} --bptt=False --K=1 --prefill=parallel'

RUNS = {
    'standard': Run(f'{SPS} --model=standard', 1.35e-3),
    'standard_twice': Run(f'{SPS} --model=standard', 1.35e-3, 2),
    'sps': Run(SPS, 1.35e-3),
    'sps_w0': Run(f'{SPS} --window=0', 1.35e-3),
    'two_x_memory': Run(f'{SPS} --method=two_x_memory --window=None', 1.35e-3),
    'delayed_state': Run(f'{SPS} --method=delayed_state', 1.35e-3),
    'reverse_sps': Run(f'{SPS} --method=reverse_sps', 1.35e-3),
    'reverse_sps_w0': Run(f'{SPS} --method=reverse_sps --window=0', 1.35e-3),

    'cr_d2': Run(CONTEXT_READY, 1e-3),
    'cr_d2_tied': Run(f'{CONTEXT_READY} --variant=tied', 1e-3),
    'cr_d2_token_blind': Run(f'{CONTEXT_READY} --variant=token_blind', 1e-3),
    'cr_d2_block_head': Run(f'{CONTEXT_READY} --variant=block_head', 1e-3),
    'cr_d1': Run(f'{CONTEXT_READY} --n_layer=1', 1e-3),
    'cr_d1_k10': Run(f'{CONTEXT_READY} --n_layer=1 --K=10', 1e-3),
    'cr_d1_k10_fixed': Run(f'{CONTEXT_READY} --n_layer=1 --K=10 --k_min=None', 1e-3),
    'roformer_n1': Run(f'{CONTEXT_READY} --n_layer=1 --K=1', 1e-3),
    'roformer_n2': Run(f'{CONTEXT_READY} --K=1', 1e-3),
    'roformer_n2_hffn': Run(f'{CONTEXT_READY} --K=1 --variant=extra_ffn', 1e-3),
    'roformer_n3': Run(f'{CONTEXT_READY} --n_layer=3 --K=1', 1e-3),
    'pointer_d1': Run(POINTER, 1e-3, tokens=POINTER_TOKENS),
    'pointer_n1': Run(ROFORMER, 1e-3, tokens=POINTER_TOKENS),
    'pointer_n4': Run(f'{ROFORMER} --n_layer=4', 1e-3, tokens=POINTER_TOKENS),

    'ntp': Run(f'{NEXTLAT} --n_dynamics=192 --objective=ntp', 1.3e-3),
    'nextlat': Run(f'{NEXTLAT} --n_dynamics=192', 1.3e-3),
    'nextlat_2': Run(f'{NEXTLAT} --n_dynamics=192 --horizon=2', 1.3e-3),
    'mtp': Run(f'{NEXTLAT} --model=mtp', 1.3e-3),
    'mtp_2': Run(f'{NEXTLAT} --model=mtp --horizon=2', 1.3e-3),
    'jtp': Run(f'{NEXTLAT} --model=jtp', 1.3e-3),
    'bst': Run(f'{SPS} --model=bst --init_std=0.03 --pair_share=0.02', 1.3e-3),
    'star_ntp': Run(f'{STAR} --objective=ntp', 4e-3, tokens=STAR_TOKENS),
    'star_nextlat': Run(STAR, 4e-3, tokens=STAR_TOKENS),
    'a5_ntp': Run(f'{A5} --objective=ntp', 1e-3, tokens=A5_TOKENS),
    'a5_nextlat': Run(A5, 1e-3, tokens=A5_TOKENS),
    'manhattan_ntp': Run('config/nextlat/manhattan_small.py --objective=ntp', 2e-3, 3),
    'manhattan_nextlat': Run('config/nextlat/manhattan_small.py', 2e-3, 3),

    # with PyTorch's initial weights, as the config has them, it learns more slowly at this size (docs/gpn.md)
    'transformer': Run('config/gpn/gpn_quick_transformer.py --init=normal --init_std=0.06', 2e-3),
    'gdn': Run('config/gdn_quick.py', 3e-3),
    'gpn_m': Run('config/gpn_quick.py', 3e-3),
    'gpn_m_2l': Run('config/gpn_quick.py --n_layer=2 --n_embd=176 --n_ffn=496', 3e-3),
    'gpn': Run('config/gpn_quick.py --n_head=0 --n_embd=304', 3e-3),
}


def tokens_of(s: Settings, run: Run) -> int:
    return run.tokens or round(run.times * s.max_tokens)


def arguments(s: Settings, run: Run) -> list[str]:
    """All arguments of train.py but for learning rate, seed and folder."""
    tokens = tokens_of(s, run)
    config, *own = run.arguments.split()  # its own come last, so they hold
    # one dtype for all: `auto` would give large models another than small ones
    return [config, f'--max_tokens={tokens}', f'--warmup_tokens={tokens // 20}', '--dtype=float32',
            f'--eval_tokens={EVAL_TOKENS}', '--eval_interval=1_000_000', '--sample_tokens=0', *own]


# ---- the claims ----

# margins are nats of a sub-word, the losses here of a byte: tiktoken's README counts about 4 bytes a token
BYTES_OF_SUB_WORD = 4
HARDLY = 0.01 / BYTES_OF_SUB_WORD  # nats a byte
ROUNDING = 0.06  # another rounding of its products moved these scores of one run by as much (docs/nextlat.md)


@dataclass
class Claim:
    name: str
    paper: str  # of PAPERS
    section: str
    says: str
    ours: str  # of RUNS
    direction: str  # lower, higher or equal: of ours, beside other
    other: str | float  # of RUNS, or a fixed number
    statistic: str = 'loss'  # of STATISTICS
    test: str = 't'  # t, sign or exact
    margin: float = 0.0  # of equal: the largest difference; else of t: what `other` may be ahead by, of sign: the
    # smallest lead that counts


CLAIMS = [
    Claim('sps_standard', 'sps', '5, table 2',
          'SPS has a lower loss than Standard after the same tokens',
          'sps', 'lower', 'standard'),
    Claim('sps_standard_twice', 'sps', '1; 5, figure 2',
          'Twice the tokens, of about its compute, do not bring Standard to the loss of SPS (here after the decay)',
          'sps', 'lower', 'standard_twice'),
    Claim('sps_two_x_memory', 'sps', '5, table 2',
          'SPS has a lower loss than 2x Memory, so it is not capacity',
          'sps', 'lower', 'two_x_memory'),
    Claim('sps_delayed_state', 'sps', '5, table 2',
          'SPS has a lower loss than Delayed State, so it is not the step',
          'sps', 'lower', 'delayed_state'),
    Claim('delayed_state_standard', 'sps', '5, table 2',
          'Delayed State has a lower loss than Standard',
          'delayed_state', 'lower', 'standard'),
    Claim('delayed_state_two_x_memory', 'sps', 'appendix C',
          'Delayed State and 2x Memory are equal within 0.01 nats a sub-word (at S)',
          'delayed_state', 'equal', 'two_x_memory', margin=HARDLY),
    Claim('sps_window', 'sps', '5, figure 4',
          'The loss of SPS hardly depends on w: w = 0 and w = 64 within 0.01 a sub-word, a margin of ours',
          'sps_w0', 'equal', 'sps', margin=HARDLY),
    Claim('sps_reverse', 'sps', '5, figure 4',
          'SPS has a lower loss than Reverse SPS at w = 0',
          'sps_w0', 'lower', 'reverse_sps_w0'),
    Claim('reverse_window', 'sps', '5, figure 4',
          'Reverse SPS loses by a small w: w = 0 is worse than w = 64',
          'reverse_sps_w0', 'higher', 'reverse_sps'),
    Claim('sps_gradient_x', 'sps', '5, figure 5a',
          'The input stream of SPS gets more gradient of later losses than Standard',
          'sps', 'higher', 'standard', 'later gradient at x'),
    Claim('sps_gradient_rho', 'sps', '5, figure 5a',
          'The prediction stream of SPS gets less of that gradient than Standard',
          'sps', 'lower', 'standard', 'later gradient where it predicts'),
    Claim('sps_far_state', 'sps', '5, figure 5b',
          'Without the far state SPS loses more nats than Delayed State',
          'sps', 'higher', 'delayed_state', 'nats lost without the far state'),
    Claim('sps_parameters', 'sps', '4',
          'SPS has as many parameters as Standard',
          'sps', 'equal', 'standard', 'parameters', 'exact'),
    Claim('sps_state', 'sps', '3',
          'The state of SPS grows by a token as fast as that of Standard',
          'sps', 'equal', 'standard', 'bytes of state a token', 'exact'),
    Claim('sps_state_two_x', 'sps', '5',
          'The state of SPS grows by a token more slowly than that of 2x Memory',
          'sps', 'lower', 'two_x_memory', 'bytes of state a token', 'exact'),

    Claim('cr_same_width', 'context_ready', '5.4, table 3',
          'D = 2 has a lower loss than N = 2 of the same width',
          'cr_d2', 'lower', 'roformer_n2'),
    Claim('cr_one_layer', 'context_ready', '5.4',
          'D = 1 has a lower loss than N = 1 of the same width',
          'cr_d1', 'lower', 'roformer_n1'),
    Claim('cr_same_flops', 'context_ready', 'appendix C.2',
          'D = 2 has a lower loss than N = 2 of its FLOPs (hFFN)',
          'cr_d2', 'lower', 'roformer_n2_hffn'),
    Claim('cr_one_layer_more', 'context_ready', '5.3, table 2',
          'D layers have a lower loss than N = D + 1 layers',
          'cr_d2', 'lower', 'roformer_n3'),
    Claim('cr_streaming', 'context_ready', '5.8, table 6',
          'Streaming has the perplexity of K = 10 within 0.01',
          'cr_d2', 'equal', 0.0, 'perplexity of K = 10 minus streaming', 'exact', 0.01),
    Claim('cr_three_unrolls', 'context_ready', '5.8, table 6',
          'K = 3 closes 98% of the gap from K = 1 to K = 5',
          'cr_d1', 'higher', 0.98, 'gap that K = 3 closes'),
    Claim('cr_contraction', 'context_ready', '5.8',
          'With k_min = 2 corrections contract: L is below 1',
          'cr_d2', 'lower', 1.0, 'contraction L, windows pooled'),
    Claim('cr_contraction_fixed', 'context_ready', '5.8',
          'Without k_min corrections contract less',
          'cr_d1_k10_fixed', 'higher', 'cr_d1_k10', 'contraction L, windows pooled'),
    Claim('cr_random_depth', 'context_ready', '5.5, table 4',
          'After equal tokens random depth (k_min = 2) is behind fixed depth, with which it catches up later',
          'cr_d1_k10', 'higher', 'cr_d1_k10_fixed'),
    Claim('cr_block_head', 'context_ready', '5.8',
          'A correction without a network of its own gains nothing (0.01 nats a sub-word, a margin of ours)',
          'cr_d2_block_head', 'higher', 'roformer_n2', margin=HARDLY),
    Claim('cr_tied', 'context_ready', '5.8',
          "With the block's weights the correction is worse than none",
          'cr_d2_tied', 'higher', 'roformer_n2'),
    Claim('cr_token_aware', 'context_ready', '5.8',
          'A correction that sees the token is no worse, within 0.01 nats a sub-word, a margin of ours',
          'cr_d2', 'lower', 'cr_d2_token_blind', margin=HARDLY),
    Claim('cr_cache', 'context_ready', '5.4',
          'A correction adds no state: D = 2 adds fewer bytes a token than N = 3',
          'cr_d2', 'lower', 'roformer_n3', 'bytes of state a token', 'exact'),
    Claim('cr_pointer', 'context_ready', '5.6, table 5',
          'D = 1 by BPTT solves more levels than N = 1',
          'pointer_d1', 'higher', 'pointer_n1', 'levels solved', 'sign'),
    Claim('cr_pointer_depth', 'context_ready', '5.6, table 5',
          'Deeper Roformers solve more levels: N = 4 beside N = 1',
          'pointer_n4', 'higher', 'pointer_n1', 'levels solved', 'sign'),

    # in the paper by probes on TinyStories; of its models of FineWeb-Edu, NextLat is ln(10.83 / 10.52) = 0.029 behind
    Claim('nextlat_ntp', 'nextlat', '4, planning',
          'NextLat has the next-token loss of GPT, within 0.01 nats a sub-word, a margin of ours',
          'nextlat', 'equal', 'ntp', margin=HARDLY),
    Claim('nextlat_mtp', 'nextlat', '4, language modeling',
          'NextLat has a lower next-token loss than MTP',
          'nextlat', 'lower', 'mtp'),
    Claim('nextlat_jtp', 'nextlat', '4, language modeling',
          'NextLat has a lower next-token loss than JTP',
          'nextlat', 'lower', 'jtp'),
    Claim('nextlat_bst', 'nextlat', '4, planning',
          "BST's further tokens cost it next-token loss beside GPT",
          'bst', 'higher', 'ntp'),
    Claim('nextlat_probes', 'nextlat', '4, planning',
          "The states of NextLat tell more than GPT's of the token 20 ahead",
          'nextlat', 'lower', 'ntp', 'nats of a probe 20 ahead'),
    Claim('nextlat_accepted_mtp', 'nextlat', '4, table of drafts',
          'More drafted tokens are accepted of NextLat than of MTP',
          'nextlat', 'higher', 'mtp', 'tokens accepted a draft'),
    Claim('nextlat_accepted_jtp', 'nextlat', '4, table of drafts',
          'More drafted tokens are accepted of NextLat than of JTP',
          'nextlat', 'higher', 'jtp', 'tokens accepted a draft'),
    Claim('nextlat_accepted_horizon', 'nextlat', '4, table of drafts',
          'Trained 1 ahead, NextLat has more than 1 drafted token accepted',
          'nextlat', 'higher', 1.0, 'tokens accepted a draft'),
    Claim('nextlat_accepted_2', 'nextlat', '4, table of drafts',
          'Trained 2 ahead, NextLat has more accepted than trained 1 ahead',
          'nextlat_2', 'higher', 'nextlat', 'tokens accepted a draft'),
    Claim('nextlat_inference', 'nextlat', '5, table of costs',
          'At inference NextLat has as many parameters as GPT',
          'nextlat', 'equal', 'ntp', 'parameters at inference', 'exact'),
    Claim('nextlat_horizon', 'nextlat', '5, table of costs',
          'A longer horizon adds no parameters to NextLat',
          'nextlat_2', 'equal', 'nextlat', 'parameters', 'exact'),
    Claim('nextlat_mtp_horizon', 'nextlat', '5, table of costs',
          'A longer horizon adds parameters to MTP',
          'mtp_2', 'higher', 'mtp', 'parameters', 'exact'),
    Claim('nextlat_star', 'nextlat', '4, planning',
          'NextLat finds more whole paths of path-star graphs than GPT (both with Muon)',
          'star_nextlat', 'higher', 'star_ntp', 'whole paths', 'sign', 0.02),
    Claim('nextlat_a5', 'nextlat', '5, recurrent networks',
          'p_psi alone follows words three times as long as in training, GPT does not',
          'a5_nextlat', 'higher', 'a5_ntp', 'right states beyond the trained length', 'sign', 0.02),
    Claim('nextlat_detours', 'nextlat', '4, world modeling',
          'NextLat more often finds its way through a city after detours',
          'manhattan_nextlat', 'higher', 'manhattan_ntp', 'valid ways with detours', 'sign', ROUNDING),
    Claim('nextlat_compression', 'nextlat', '4, world modeling',
          'NextLat more often continues two walks to one place alike',
          'manhattan_nextlat', 'higher', 'manhattan_ntp', 'walks continued alike', 'sign', ROUNDING),
    Claim('nextlat_rank', 'nextlat', '4, world modeling',
          'After walks the states of NextLat have a lower effective rank',
          'manhattan_nextlat', 'lower', 'manhattan_ntp', 'effective rank'),

    Claim('gpn_transformer', 'gpn', '6, table 1',
          'A deep Transformer has a lower loss than one layer of GPN+M',
          'transformer', 'lower', 'gpn_m'),
    Claim('gpn_near_transformer', 'gpn', '6, table 1',
          "GPN+M's perplexity is at most 13% above the Transformer's (0.122 nats a sub-word)",
          'gpn_m', 'lower', 'transformer', margin=log(1.13) / BYTES_OF_SUB_WORD),
    Claim('gpn_near_gdn', 'gpn', '6, table 1',
          "GPN+M's perplexity is at most 18% above Gated DeltaNet's",
          'gpn_m', 'lower', 'gdn', margin=log(1.18) / BYTES_OF_SUB_WORD),
    Claim('gpn_two_near_transformer', 'gpn', '6, table 1',
          "The perplexity of two layers of GPN+M is at most 6% above the Transformer's",
          'gpn_m_2l', 'lower', 'transformer', margin=log(1.06) / BYTES_OF_SUB_WORD),
    Claim('gpn_two_near_gdn', 'gpn', '6, table 1',
          "The perplexity of two layers of GPN+M is at most 11% above Gated DeltaNet's",
          'gpn_m_2l', 'lower', 'gdn', margin=log(1.11) / BYTES_OF_SUB_WORD),
    Claim('gpn_gdn', 'gpn', '6, table 1',
          'A deep Gated DeltaNet has a lower loss than one layer of GPN+M',
          'gdn', 'lower', 'gpn_m'),
    Claim('gpn_gdn_transformer', 'gpn', '6, table 1',
          'Gated DeltaNet has a lower loss than the Transformer',
          'gdn', 'lower', 'transformer'),
    Claim('gpn_memory', 'gpn', '6, table 1',
          'GPN+M has a lower loss than GPN without memory',
          'gpn_m', 'lower', 'gpn'),
    Claim('gpn_two_layers', 'gpn', '6, table 1',
          'Two layers of GPN+M have a lower loss than one',
          'gpn_m_2l', 'lower', 'gpn_m'),
    Claim('gpn_state', 'gpn', '4, table 1',
          'The state of GPN+M does not grow with the text',
          'gpn_m', 'equal', 0.0, 'bytes of state a token', 'exact'),
    Claim('gpn_dead', 'gpn', '7.1',
          'No dimension of the state is dead',
          'gpn_m', 'equal', 0.0, 'dead dimensions', 'exact'),
    Claim('gpn_mean', 'gpn', '7.1',
          'The mean state is longer than what varies around it: over 0.71 of the length of states',
          'gpn_m', 'higher', 0.5 ** 0.5, 'length of the mean state over states'),
    Claim('gpn_mean_batches', 'gpn', '7.1',
          'Mean directions of eight batches have a cosine of over 0.95 (0.988 in the paper)',
          'gpn_m', 'higher', 0.95, 'cosine of mean states between batches'),
    Claim('gpn_unigram', 'gpn', '7.2',
          'The mean state decodes to the unigram: the rank correlation is positive',
          'gpn_m', 'higher', 0.0, 'rank correlation with the unigram'),
    Claim('gpn_content', 'gpn', '7.3, figure 5a',
          'Of the content of a state more than 0.05 is left tens of tokens later: 16 sub-words, 64 bytes',
          'gpn_m', 'higher', 0.05, 'centred cosine 64 later'),
    Claim('gpn_horizon', 'gpn', '7.3, figure 5a',
          'Of the content of a state nothing is left half a window later, within 0.05 (256 tokens in the paper)',
          'gpn_m', 'equal', 0.0, 'centred cosine 128 later', margin=0.05),
    Claim('gpn_pools', 'gpn', '7.3, figure 5b',
          'Training spreads the lifetimes of memory heads: the longest over the shortest grows',
          'gpn_m', 'higher', 0.0, 'doublings of longest over shortest lifetime'),
]


def chosen(only: str) -> list[Claim]:
    """The claims that --only names, in the order of CLAIMS."""
    names = only.split(',')
    known = {'all', *PAPERS, *(claim.name for claim in CLAIMS)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f'only has {unknown[0]!r}: expected papers ({", ".join(PAPERS)}) or names of claims, which '
                        '--list prints, with commas between')
    return [claim for claim in CLAIMS if {'all', claim.paper, claim.name} & {*names}]


def runs_of(claims: list[Claim]) -> dict[str, Run]:
    """The rows of RUNS that claims compare."""
    named = {side for claim in claims for side in (claim.ours, claim.other)}
    return {name: run for name, run in RUNS.items() if name in named}


# ---- the statistics of a run ----

GRADIENT_DOCUMENTS = 16  # for `later_gradient`; each costs some seconds
DOCUMENTS = 100  # for `far_state`
UNROLLED_TOKENS = 32_768  # for `unrolls`
PROBE_STEPS = 500  # of 20 probes
PROBE_RATE = 1e-3  # of all probes, whatever the rate of their run
PROMPTS = 16  # for `drafts`
BATCHES = 8  # of 8 windows, for `gpn_states`
WALKS = 500  # for `city`
WORDS = 2000  # for `states_beyond`


def later_gradient(run) -> dict[str, float]:
    """Gradient of a later loss over that of a position's own, the geometric mean over losses 1 to 96 steps later."""
    s = gradient_flow.fitted(gradient_flow.Settings(n_documents=GRADIENT_DOCUMENTS, block_size=256, max_k=96), [run])
    means = gradient_flow.measure(run, s)[0][:, 1:].log().mean(1).exp().tolist()  # of x and rho, or of the only stream
    return {'later gradient at x': means[0], 'later gradient where it predicts': means[-1]}


def far_state(run) -> dict[str, float]:
    s = restricted_state.fitted(restricted_state.Settings(n_documents=DOCUMENTS), [run])
    whole, cut, _ = restricted_state.measure(run, s)
    return {'nats lost without the far state': (cut - whole)[s.omega + 1:].mean().item()}


def unrolls(run) -> dict[str, float]:
    row = context_ready.analyse(run, context_ready.Settings(tokens=UNROLLED_TOKENS))
    gap = row['K=1'] - row['K=5']
    return {'contraction L, windows pooled': nan if row['L_pooled'] == '' else row['L_pooled'],
            'perplexity of K = 10 minus streaming': row['K=10'] - row['sequential'],
            'gap that K = 3 closes': (row['K=1'] - row['K=3']) / gap if gap else nan}


def drafts(run) -> dict[str, float]:
    """Sampled, 5 tokens a draft or as many as the model can, after the first halves of validation windows."""
    model, record = load_run(run, pick_device('auto'))
    data, half = run_data(record, None), settings_of(run).block_size // 2
    prompts = data.val_batch(range(min(PROMPTS, data.n_windows('val', half))), half)[0].tolist()
    _, found = speculative_generate(model, prompts, half, draft_len=min(5, model.longest_draft))
    return {'tokens accepted a draft': found.accepted_per_step}


def probed(run) -> dict[str, float]:
    *_, last = probes.measure(run, probes.Settings(offsets=20, steps=PROBE_STEPS, eval_tokens=100_000,
                                                   learning_rate=PROBE_RATE))
    return {'nats of a probe 20 ahead': last}


def city(run) -> dict[str, float]:
    row, _ = manhattan.measure(run, manhattan.Settings(n_walks=WALKS, n_prefixes=WALKS))
    return {'valid ways with detours': row['detours'], 'walks continued alike': row['same_way'],
            'effective rank': row['rank']}


def gpn_states(run) -> dict[str, float]:
    """Lifetimes beyond half the window are counted as the window; those before training are of the initial model."""
    model, record = load_run(run, pick_device('auto'))
    settings, device = settings_of(run), model.embed.weight.device
    data, T = run_data(record, None), settings.block_size
    batches = [[x.to(device) for x in data.val_batch(range(8 * i, 8 * i + 8), T)] for i in range(BATCHES)]
    counted = torch.from_numpy(data.tokens('train', 0, min(1_000_000, data.splits['train']['tokens'])))
    unigram = torch.bincount(counted, minlength=data.n_ids).to(device)
    rows = gpn_state.measure(model, batches, unigram, str)
    value = {(part, name, x): number for part, name, x, number in rows}

    torch.manual_seed(settings.seed)
    untrained = model_file(record['model']).Model(saved_config(record, run)).eval().to(device)
    spread = lifetime_ratio(rows, T) / lifetime_ratio(gpn_state.measure(untrained, batches, unigram, str), T)
    return {'dead dimensions': value['geometry', 'dead dimensions', ''],
            'length of the mean state over states':
                value['geometry', 'mean magnitude', ''] / value['geometry', 'magnitude', ''],
            'cosine of mean states between batches': value['mean direction', 'cosine between batches', ''],
            'rank correlation with the unigram': value['mean direction', 'rank correlation with the unigram', ''],
            **{f'centred cosine {k} later': value['cosine', 'centred', k] for k in (64, 128)},
            'doublings of longest over shortest lifetime': log2(spread)}


def lifetime_ratio(rows: list[tuple], T: int) -> float:
    """The longest over the shortest lifetime of memory heads, T at most, in rows of `gpn_state.measure`."""
    lives = [min(number, T) for part, _, _, number in rows if part == 'lifetime']
    return max(lives) / min(lives)


def states_beyond(run) -> dict[str, float]:
    """Of held-out words three times as long as in training, the share of right states past the trained length.

    Those of p_psi alone where the model has it (see analysis.a5), else the model's own.
    """
    device, trained = pick_device('auto'), a5.trained_length(run)
    scores = open_data(f'a5:length={3 * trained},val_rows={WORDS}').score(load_run(run, device)[0], device, 1000)
    name = 'rnn_accuracy' if 'rnn_accuracy_1' in scores else 'accuracy'
    return {'right states beyond the trained length':
            statistics.mean(scores[f'{name}_{t}'] for t in range(trained + 1, 3 * trained + 1))}


def last_score(statistic: str, prefix: str):
    """The function that gives the mean of a task's last scores, of those whose names begin with the prefix."""
    def score(run):
        log = read_log(run)
        return {statistic: statistics.mean(logged(log, name)[-1] for name in score_names([run], prefix))}
    return score


STATISTICS = {  # name: function of a run folder that gives {name: number}, maybe with others'
    'loss': lambda run: {'loss': final_loss(run)},
    'parameters': lambda run: {'parameters': n_parameters(run)},
    'parameters at inference': lambda run: {'parameters at inference': n_at_inference(run)},
    'bytes of state a token': lambda run: {
        'bytes of state a token': (cache_bytes(run, 8192) - cache_bytes(run, 4096)) / 4096},
    'later gradient at x': later_gradient,
    'later gradient where it predicts': later_gradient,
    'nats lost without the far state': far_state,
    'contraction L, windows pooled': unrolls,
    'perplexity of K = 10 minus streaming': unrolls,
    'gap that K = 3 closes': unrolls,
    'tokens accepted a draft': drafts,
    'nats of a probe 20 ahead': probed,
    'valid ways with detours': city,
    'walks continued alike': city,
    'effective rank': city,
    'levels solved': last_score('levels solved', 'levels_solved'),
    'whole paths': last_score('whole paths', 'accuracy'),
    'right states beyond the trained length': states_beyond,
    **dict.fromkeys(['dead dimensions', 'length of the mean state over states',
                     'cosine of mean states between batches', 'rank correlation with the unigram',
                     'centred cosine 64 later', 'centred cosine 128 later',
                     'doublings of longest over shortest lifetime'], gpn_states),
}


def measured_as(run) -> str:
    """Return a digest of what a run's numbers depend on: its log and the constants of the measurements."""
    constants = (GRADIENT_DOCUMENTS, DOCUMENTS, UNROLLED_TOKENS, PROBE_STEPS, PROBE_RATE, PROMPTS, BATCHES, WALKS,
                 WORDS)
    about = (run / 'log.jsonl').read_text(), constants
    return hashlib.sha256(repr(about).encode()).hexdigest()


def measure(claims: list[Claim], runs: dict[str, list[Path]], path: Path) -> dict[str, dict[str, float]]:
    """{run folder's name: {statistic: number}} of all that claims compare, the folders lying beside `path`.

    What is measured is kept at `path` and reused as long as the run does not change.
    """
    kept = read_json(path, 'remove it, and runs are measured again') if path.exists() else {}
    found = {name: of_run for name, of_run in kept.items()
             if is_done(path.parent / name) and of_run.get('measured_as') == measured_as(path.parent / name)}
    wanted = {(folder, claim.statistic): None for claim in claims for side in (claim.ours, claim.other)
              for folder in runs.get(side, [])}
    for folder, statistic in wanted:
        if statistic not in found.get(folder.name, {}):
            of_run = found.get(folder.name, {'measured_as': measured_as(folder)})
            found[folder.name] = of_run | STATISTICS[statistic](folder)
            write_json(path, found)
    return found


# ---- verdicts ----

def below(a: list[float], b: list[float]) -> float:
    """p of the one-sided test against the alternative that a has the lower mean; one number alone is fixed."""
    if min(len(a), len(b)) > 1:
        return lower_test(a, b)['p']
    from scipy.stats import ttest_1samp
    test = ttest_1samp(a, b[0], alternative='less') if len(b) == 1 else ttest_1samp(b, a[0], alternative='greater')
    return test.pvalue


def varies(ours: list[float], other: list[float]) -> bool:
    """Whether seeds differ, on one side at least."""
    return len({*ours}) > 1 or len({*other}) > 1


def t_test(ours: list[float], other: list[float], direction: str, margin: float) -> tuple[float | None, str]:
    """(p, verdict) of Welch's or the one-sample test, of TOST for `equal`; p is None where nothing varies."""
    if not varies(ours, other):
        return None, NOT_SEEN
    is_lower = below([x - margin for x in ours], other)
    is_higher = below([x - margin for x in other], ours)
    p = {'lower': is_lower, 'higher': is_higher, 'equal': max(is_lower, is_higher)}[direction]
    # 1 - p belongs to the test in the other direction; of `equal`, to two, as the difference may exceed either margin
    other_level = ALPHA / 2 if direction == 'equal' else ALPHA
    return p, SEEN if p < ALPHA else CONTRADICTED if 1 - p < other_level else NOT_SEEN


def sign_test(ours: list[float], other: list[float], direction: str, margin: float) -> tuple[float, str]:
    """(p, verdict) by how many seeds lead by more than the margin, as the claim has it; sides are paired by seed."""
    from scipy.stats import binomtest
    sign = {'lower': 1, 'higher': -1}[direction]
    leads = [sign * (b - a) for a, b in zip(ours, other, strict=True)]
    n_ahead = sum(lead > margin for lead in leads)
    verdict = SEEN if n_ahead == len(leads) else CONTRADICTED if max(leads) < -margin else NOT_SEEN
    return binomtest(n_ahead, len(leads), alternative='greater').pvalue, verdict


def exact_test(ours: list[float], other: list[float], direction: str, margin: float) -> tuple[None, str]:
    """(None, verdict) of numbers without chance: the claim holds for every seed, or it does not."""
    gaps = [a - b for a in ours for b in other]
    holds = {'lower': max(gaps) < margin, 'higher': min(gaps) > -margin,
             'equal': max(map(abs, gaps)) <= margin}[direction]
    return None, SEEN if holds else CONTRADICTED


def judge(ours: list[float], other: list[float], direction: str, test: str, margin: float) -> dict:
    """{'difference', 'low', 'high', 'p', 'verdict'} of a claim, from a number a seed on each side or a fixed one.

    Not run where a side has no numbers.
    """
    if not (ours and other):
        return {**dict.fromkeys(('difference', 'low', 'high', 'p')), 'verdict': NOT_RUN}
    p, verdict = {'t': t_test, 'sign': sign_test, 'exact': exact_test}[test](ours, other, direction, margin)
    low = high = None
    if test == 't' and varies(ours, other):
        _, low, high = difference(ours, other)
        if len(other) == 1:
            low, high = (bound - other[0] for bound in interval(ours))
    gap = statistics.mean(ours) - statistics.mean(other)
    return {'difference': gap, 'low': low, 'high': high, 'p': p, 'verdict': verdict}


def read_claims(path) -> list[dict[str, str]]:
    """The rows of a claims.csv, as text."""
    with open(path, newline='') as file:
        rows = list(csv.DictReader(file))
    if not rows or 'our_numbers' not in rows[0]:
        raise UserError(f'{path} has no column our_numbers: expected a claims.csv of python -m analysis.claims')
    return rows


# ---- what is written ----

def row_of(c: Claim, ours: list[float], other: list[float], costs: dict, part: int) -> dict:
    """A row of claims.csv: the claim, its verdict from a number a seed on each side, and `costs` in some columns.

    part: which of parts.json says where it was run, from 1.
    """
    judged = judge(ours, other, c.direction, c.test, c.margin)
    return {
        'name': c.name, 'paper': c.paper, 'section': c.section, 'says': c.says, 'ours': c.ours, 'other': c.other,
        'statistic': c.statistic, 'direction': c.direction, 'test': c.test, 'margin': c.margin,
        'seeds': len(ours), 'our_mean': statistics.mean(ours) if ours else None,
        'other_mean': statistics.mean(other) if other else None,
        **judged, 'part': '' if judged['verdict'] == NOT_RUN else part,
        'our_numbers': ' '.join(map(repr, ours)), 'other_numbers': ' '.join(map(repr, other)), **costs}


def table(runs: dict[str, list[Path]], numbers: dict, commands: dict[str, str]) -> list[dict]:
    """A row of claims.csv for each of CLAIMS. runs {name: folders, one a seed}; numbers as `measure` gives them."""
    def numbers_of(side, statistic):
        if side not in RUNS:
            return [side]
        found = [numbers.get(folder.name, {}) for folder in runs.get(side, [])]
        return [of_run[statistic] for of_run in found] if all(statistic in of_run for of_run in found) else []

    def tokens(side):
        return settings_of(runs[side][0]).max_tokens if side in runs else ''
    return [row_of(c, numbers_of(c.ours, c.statistic), numbers_of(c.other, c.statistic),
                   {'our_tokens': tokens(c.ours), 'other_tokens': tokens(c.other),
                    'our_command': commands.get(c.ours, ''), 'other_command': commands.get(c.other, '')}, 1)
            for c in CLAIMS]


def joined(folders: list[Path]) -> tuple[list[dict], list[dict]]:
    """(rows of claims.csv, parts) of all folders: each of CLAIMS with the numbers of the first that has a verdict.

    Verdicts are computed from the numbers again. Raises UserError for a part whose row has another verdict, or is of
    another claim of that name: ours, other, statistic, test or margin.
    """
    rows = {c.name: row_of(c, [], [], dict.fromkeys(COSTS, ''), 0) for c in CLAIMS}
    parts = []
    for folder in folders:
        of_folder = {row['name']: row for row in read_claims(folder / 'claims.csv')}
        for c in CLAIMS:
            found = of_folder.get(c.name, {'verdict': NOT_RUN})
            if rows[c.name]['verdict'] == NOT_RUN and found['verdict'] != NOT_RUN:
                row = row_of(c, *([*map(float, found[side].split())] for side in ('our_numbers', 'other_numbers')),
                             {name: found[name] for name in COSTS}, len(parts) + int(found['part']))
                if any(str(row[key]) != found[key] for key in TESTED):
                    raise UserError(f'{folder}/claims.csv is older than this code: its {c.name} is another claim; run '
                                    'it again, or leave that folder out')
                if row['verdict'] != found['verdict']:
                    raise UserError(f'{folder}/claims.csv calls {c.name} {found["verdict"]!r}, its numbers say '
                                    f'{row["verdict"]!r}: run it again, or leave that folder out')
                rows[c.name] = row
        parts += parts_of(folder)
    return list(rows.values()), parts


def parts_of(folder: Path) -> list[dict]:
    return read_json(folder / 'parts.json', 'run python -m analysis.claims with this out_dir again')['parts']


def markdown(rows: list[dict], parts: list[dict]) -> str:
    """claims.md. parts: those of parts.json."""
    verdicts = [row['verdict'] for row in rows]
    by_construction = sum(row['verdict'] == SEEN and row['statistic'] in BY_CONSTRUCTION for row in rows)
    lines = ['# Claims of the papers, in miniature', '',
             f'{len(rows)} claims: ' + ', '.join(f'{verdicts.count(verdict)} {verdict}' for verdict in
                                                 (SEEN, NOT_SEEN, CONTRADICTED, NOT_RUN)) +
             f'. Of those seen {by_construction} hold by construction, as parameters and bytes of state do. Level '
             f'{ALPHA}, each claim by itself: of two things that are alike one claim in twenty is called seen and one '
             'contradicted, of sign tests at three seeds one in eight each. These models are some thousand times '
             "smaller than the papers', and what is not seen here may be true there. claims.csv has the numbers of "
             'each seed and the commands; python -m analysis.claims says how the tests go.', '',
             'Where each part was run, and the core-hours of training (GPU-hours on a GPU), the runs of other learning '
             'rates among them; measuring is not counted:', '']
    lines += [f'{i}. {part["where"]}: {part["seeds"]} seeds, {part["core_hours"]:.2f} core-hours'
              for i, part in enumerate(parts, 1)]
    for paper, title in PAPERS.items():
        shown = [row for row in rows if row['paper'] == paper]
        if shown:
            lines += ['', f'## {title}', '', markdown_table([in_markdown(row) for row in shown])]
    return '\n'.join(lines) + '\n'


def write(out: Path, rows: list[dict], parts: list[dict]) -> None:
    """claims.csv, parts.json and claims.md; prints the last."""
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / 'claims.csv', rows)
    write_json(out / 'parts.json', {'parts': parts})
    text = markdown(rows, parts)
    write_file(out / 'claims.md', text.encode())
    print(f'{text}\nwritten to {out}/claims.md, claims.csv and parts.json')


def in_markdown(row: dict) -> dict[str, str]:
    """A row of claims.csv as one of claims.md."""
    def shown(mean, side):
        number = '' if mean is None else f'{mean:.5g}'
        return number if isinstance(side, float) else f'{number} ({side})'.strip()
    names = {'t': 'TOST' if row['direction'] == 'equal' else 'Welch', 'sign': 'sign', 'exact': 'exact'}
    test = names[row['test']]
    if test == 'Welch' and isinstance(row['other'], float):
        test = 'one sample'
    return {'section': row['section'], 'claim': row['says'], 'statistic': row['statistic'],
            'ours': shown(row['our_mean'], row['ours']), 'beside': shown(row['other_mean'], row['other']),
            'difference (95%)': ('' if row['difference'] is None else f'{row["difference"]:+.4g}') + (
                '' if row['low'] is None else f' ({row["low"]:+.4g} to {row["high"]:+.4g})'),
            'test': test, 'p': '' if row['p'] is None else f'{row["p"]:.2g}', 'verdict': f'**{row["verdict"]}**',
            'part': row['part']}


def cost(args: list[str], data_of) -> tuple[int, float]:
    """(training tokens, training FLOPs) of a run of train.py with these arguments."""
    t, given, record = read_settings(TrainSettings, args)
    model = blank_model(t.model, model_config(t, given, data_of(t.data), record))
    return t.max_tokens, t.max_tokens * model.flops_per_token(t.block_size)


def listing(claims: list[Claim], s: Settings) -> str:
    """What --list prints."""
    lines = []
    for c in claims:
        lines.append(f'{c.name}: {c.says} ({c.paper}, {c.section})\n'
                     f'    {c.statistic} of {c.ours} {c.direction} beside {c.other}, {c.test}')
    runs, data_of = runs_of(claims), cache(open_data)
    # where the rate is bracketed the first seed has two more, at least
    times = [s.seeds + (0 if run.tokens else 2) for run in runs.values()]
    costs = [cost(arguments(s, run), data_of) for run in runs.values()]
    tokens, flops = (sum(n * x for n, x in zip(times, column)) for column in zip(*costs))
    hours = tokens / TOKENS_PER_SECOND / 3600
    return '\n'.join([*lines, f'{len(claims)} claims, {len(runs)} models, at least {sum(times)} runs of '
                      f'training: {short_number(tokens)} tokens, {flops:.2g} FLOPs, about {hours:.1f} core-hours'])


def run_name(s: Settings, name: str, rate: str, seed: int) -> str:
    """The name of the folder of a run."""
    return f'{name}_{tokens_of(s, RUNS[name])}_lr{rate}_seed{seed}'


def trained_before(s: Settings, out: Path) -> dict[str, float]:
    """{name: learning rate} of the rows of RUNS that are trained in `out` with every seed."""
    rates = {}
    for name in RUNS:
        for last in out.glob(run_name(s, name, '*', s.seeds)):
            rate = last.name.rpartition('_lr')[2].partition('_seed')[0]
            runs = [out / run_name(s, name, rate, seed) for seed in range(1, s.seeds + 1)]
            if all(is_done(run) and loss_of(run) < inf for run in runs):
                rates[name] = float(rate)
    return rates


def train(s: Settings, claims: list[Claim], out: Path) -> tuple[dict[str, list[Path]], dict[str, str]]:
    """Trains what claims need and is not trained yet: ({name: runs, one a seed}, {name: the command of all of them}).

    What was trained before for other claims is among them.
    """
    needed = runs_of(claims)
    before = {name: rate for name, rate in trained_before(s, out).items() if name not in needed}
    first = {name: run.rate for name, run in needed.items()} | before
    args = {name: arguments(s, RUNS[name]) for name in first}
    runs = train_at_best_rates(args, first, lambda name, rate, seed: out / run_name(s, name, f'{rate:.3g}', seed),
                               s.seeds, s.jobs, fixed={name for name in first if name in before or RUNS[name].tokens})
    rates = {name: settings_of(folders[0]).learning_rate for name, folders in runs.items()}
    return runs, {name: ' '.join(['python train.py', *own, f'--learning_rate={rates[name]}'])
                  for name, own in args.items()}


def check_parts(s: Settings, out: Path) -> None:
    """Raises UserError if `out` has verdicts that would be lost: at other tokens or seeds, or of runs elsewhere."""
    if (out / 'parts.json').exists():
        parts = parts_of(out)
        if len(parts) > 1:
            raise UserError(f'{out} has a table that was joined of {len(parts)} parts, whose runs lie elsewhere: give '
                            'another --out_dir, and make one table of both with --join')
        for part in parts:
            for name in ('seeds', 'max_tokens'):
                if part.get(name) != getattr(s, name):
                    raise UserError(f'{out} has claims with {name} = {part.get(name)}, and {getattr(s, name)} is asked '
                                    'for: give another --out_dir, and make one table of both with --join')


def main(argv: list[str] | None = None) -> None:
    with friendly_errors():
        s, positional, _ = load_settings(Settings, argv)
        if positional:
            raise UserError(f'what is {positional[0]!r}? python -m analysis.claims --out_dir=NEW')
        out = Path(s.out_dir)
        if s.join:
            write(out, *joined([Path(folder) for folder in s.join.split(',')]))
            return
        claims = chosen(s.only)
        if s.list:
            print(listing(claims, s))
            return
        out.mkdir(parents=True, exist_ok=True)
        check_parts(s, out)
        runs, commands = train(s, claims, out)
        torch.set_num_threads(1)
        rows = table(runs, measure(claims, runs, out / 'measured.json'), commands)
        write(out, rows, [{'where': one_line(where_and_when()), 'seeds': s.seeds, 'max_tokens': s.max_tokens,
                           'core_hours': core_hours(out)}])


if __name__ == '__main__':
    main()
