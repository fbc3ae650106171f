"""The results that the pages cite: which files there are, and every number of RESULTS.md again."""
import gzip
import json
import math
import re
import statistics
from operator import itemgetter

import pytest
from conftest import ROOT

from analysis import claims
from analysis.figures import by_label, mean_and_interval, paired_gaps, read_csv
from analysis.runs import group_by
from lm_architectures.machine.compiling import PEAK_FLOPS

RESULTS = ROOT / 'bench/results'
FILES = sorted(str(path.relative_to(RESULTS)) for path in RESULTS.rglob('*') if path.is_file())


def test_every_file_has_one_row_and_says_where_it_comes_from():
    rows = re.findall(r'^\| ([\w./]+\.\w+) \|', (RESULTS / 'README.md').read_text(), re.MULTILINE)
    assert sorted([*rows, 'README.md']) == FILES and len(FILES) <= 45
    for name in FILES:
        if name.endswith('.json'):
            assert measured(name).keys() >= {'command', 'device', 'date', 'commit', 'versions', 'rows'}, name


# ---- the numbers of RESULTS.md ----

class Page:
    """A page from which checked statements are struck out."""

    def __init__(self, name):
        self.rest = ' '.join((ROOT / name).read_text().split())

    def says(self, text, *values):
        """Check that the page has this text, with the values in its {}, and strike it out."""
        text = text.format(*values)
        assert text in self.rest, text
        self.rest = self.rest.replace(text, '...')

    def numbers(self):
        """Return the numbers that are left, without those in links and names."""
        text = re.sub(r'\]\([^)]*\)|`[^`]*`|N = \d|D = \d|K = \d|d = \d|w = \d+|top \d|A5|H100', '', self.rest)
        return re.findall(r'(?<![\w.])[+-]?\d[\d.,]*(?!\w)', text)


def rows(file, key='model'):
    """Return {value of the column `key`: row} of a CSV file."""
    return {row[key]: row for row in read_csv(RESULTS / file)}


def curve(file):
    """Return {label: [(tokens, mean), ...]} of an output of `analysis.loss_curves`."""
    return {label: [(int(row['tokens']), float(row['mean'])) for row in own]
            for label, own in by_label(read_csv(RESULTS / file)).items()}


def measured(file, **values):
    """Return a JSON file of a benchmark, or its only row with these values."""
    found = json.loads((RESULTS / file).read_text())
    if not values:
        return found
    row, = (row for row in found['rows'] if values.items() <= row.items())
    return row


def at(points, tokens):
    """Return the mean at the evaluation nearest to this number of tokens."""
    return min(points, key=lambda point: abs(point[0] - tokens))[1]


def drafts():
    """Return {model: [(of one token, of the best length), ...]}: (speed-up, accepted, length)."""
    fixed, found = [row for row in read_csv(RESULTS / 'domains_small.csv') if row['draft_len'] != 'auto'], {}
    for (run, _), own in group_by(fixed, itemgetter('run', 'data')).items():
        cells = [(float(row['speedup']), float(row['accepted']), row['draft_len']) for row in own]
        found.setdefault(run.removeprefix('out/domains_'), []).append((cells[0], max(cells)))
    return found


def gap(row, sign=1):
    """Format a difference with its interval; `row` is one of analysis.compare."""
    low, high = sorted(sign * float(row[key]) for key in ('its_low', 'its_high'))
    return f'{sign * float(row["minus_first"]):+.3f} ({low:+.3f} to {high:+.3f})'


def claim_gap(row, sign=1):
    return gap({'minus_first': row['difference'], 'its_low': row['low'], 'its_high': row['high']}, sign)


def mean_of(file, key, column, value):
    return statistics.mean(float(row[column]) for row in read_csv(RESULTS / file) if value in row[key])


CLAIM = rows('claims/claims.csv', 'name')
TESTS = {  # name of a claim: first cell of its row
    'sps_separation': 'SPS: SPS minus 2x Memory, both from the token',
    'reverse_sps_window': 'SPS: Reverse SPS minus Standard, both w = 16',
    'sps_window': 'SPS: SPS minus Standard, both w = 16',
    'cr_same_width': 'Context-Ready: D = 2 minus N = 2',
    'cr_tied': 'Context-Ready: `tied` minus D = 2',
    'nextlat_probes': "NextLat: loss of a probe 20 bytes ahead, minus GPT's",
    'nextlat_first_draft': "NextLat: share of first drafted bytes accepted, minus MTP's",
    'gpn_near_gdn': 'GPN+M minus Gated DeltaNet, margin 0.041',
    'gpn_memory': 'GPN+M minus GPN without memory'}


def check_tests(page):
    assert list(TESTS) == [claim.name for claim in claims.CLAIMS if claim.tested]
    for name, title in TESTS.items():
        row = {key: CLAIM[name][key] for key in ('difference', 'low', 'high', 'sd', 'smallest')}
        page.says('| {} | {:+.4f} | {:+.4f} to {:+.4f} | {:.4f} | {:.4f} | {} |', title, *map(float, row.values()),
                  CLAIM[name]['verdict'])


def check_eight_models(page):
    found = {model: {row['equal']: row for row in own}
             for model, own in group_by(read_csv(RESULTS / 'shootout_64.csv'), itemgetter('model')).items()}
    budgets = ('tokens', 'training FLOPs', 'wall time')
    for model, of_budget in found.items():
        losses = [of_budget[budget] for budget in budgets]
        if model == 'Standard':
            page.says('| Standard, its loss | {:.3f} | {:.3f} | {:.3f} |', *(float(row['loss']) for row in losses))
        else:
            page.says('| {} | {} | {} | {} |', model, *map(gap, losses))
    size = float(found['Standard']['tokens']['parameters'])
    page.says('over {} seeds. {:.2f}M parameters, `python_docs`, T = 256. Rates',
              found['SPS']['tokens']['seeds'], size / 1e6)
    page.says('were chosen on all {:.1f}M bytes', float(found['SPS']['tokens']['tokens']) / 1e6)
    page.says('| equal tokens, {:.1f}M |', float(found['SPS']['tokens']['tokens']) / 1e6)
    speed = [float(found['GPN+M']['tokens'][key]) / float(found['Standard']['tokens'][key])
             for key in ('tokens_per_s_1024', 'tokens_per_s_16384')]
    page.says('{:.1f} times as fast as Standard after 1,024 tokens and {:.0f} times as fast after 16,384', *speed)
    page.says('At equal tokens, SPS is {:.3f} behind Standard. Our variant, in which the second stream starts from the '
              'token, is {:.3f} ahead, but behind at equal FLOPs', *(
        abs(float(found[name]['tokens']['minus_first'])) for name in ('SPS', 'SPS, from the token')))
    late = [float(x) for budget in budgets[1:] for x in found['Context-Ready, D = 2'][budget]['losses'].split()]
    assert max(late) > 3.1, 'some seeds are still near the unigram loss'


def check_sps(page):
    models, found = rows('separation.csv'), ' '.join((RESULTS / 'trials.md').read_text().split())
    first = models['Standard, w = 16']
    for name, row in models.items():
        page.says('| {} | {:.3f} | {}| {:.2f} |', name, float(row['loss']), '' if row is first else gap(row) + ' ',
                  float(row['flops']) / float(first['flops']))
    losses = {name: [*map(float, row['losses'].split())] for name, row in models.items()}
    for name, log in re.findall(r'\| ([^|]+) \| ((?:\d\.\d{4} )+)\|', found):  # of a lost machine
        assert [f'{loss:.4f}' for loss in losses[name]][:len(log.split())] == log.split()
    low, high = re.search(r'Standard between ([\d.]+) and ([\d.]+)', found).groups()
    assert (f'{min(losses["Standard"]):.3f}', f'{max(losses["Standard"]):.3f}') == (low, high)
    n_logged = sum(len(loss) == 6 for row in models.values() for loss in row['losses'].split())
    assert n_logged == 11
    page.says('Eleven of the {} losses are from the log of a lost machine (seeds 2 to 5, two streams). The {} '
              'trained again equal the log', sum(map(len, losses.values())), 24 - 5 - n_logged)
    page.says('models of {:.2f}M parameters', float(first['parameters']) / 1e6)
    page.says("lowers Standard's loss by {:.3f}", float(models['Standard']['minus_first']))
    paper = {name: float(row['validation loss'] or 'nan') for name, row in rows(
        ROOT / 'analysis/papers/sps.csv', 'name').items()}
    leads = [paper[f'2x Memory {size}'] - paper[f'SPS {size}'] for size in ('XS', 'S', 'M', 'L', 'XL')]
    page.says('SPS (w = 64) is {:.3f} ahead of 2x Memory, as in the paper (there by {:.3f} to {:.3f} a sub-word)',
              -float(CLAIM['sps_separation']['difference']), min(leads), max(leads))
    best = {}
    for row in read_csv(RESULTS / 'sps_textbooks_1m_rates.csv'):
        best[row['model']] = min(best.get(row['model'], 9), float(row['loss']))
    late = [loss for model, loss in best.items() if model.startswith(('sps', 'two', 'delayed'))]
    assert len(late) == 5
    page.says('after 125,000 bytes, when SPS, 2x Memory and Delayed State had losses of {:.2f} to {:.2f}, and Standard '
              '{:.2f}', min(late), max(late), best['standard'])
    rho, x = CLAIM['sps_gradient_rho'], CLAIM['sps_gradient_x']
    page.says("stream is {:.3f} of the present loss's, at Standard's stream {:.3f}", float(rho['our_mean']),
              float(rho['other_mean']))
    page.says("input stream it is {:.3f} too", float(x['our_mean']))


def check_context_ready(page):
    file = 'context_ready_trial_2.5m.csv'
    points, flops = curve(file), {row['label']: float(row['flops']) for row in read_csv(RESULTS / file)}
    two = 'n_layer=2, variant=add, K=1'
    for name, label in (('D = 2', 'n_layer=2, variant=add, K=5'), ('N = 3', 'n_layer=3, variant=add, K=1'),
                        ('N = 2 with an extra FFN', 'n_layer=2, variant=extra_ffn, K=1')):
        page.says('| {} | {:+.3f} | {:+.3f} | {:+.3f} | {:+.3f} | {:+.3f} | {:.1f} |', name,
                  *(at(points[label], n * 1e6) for n in (0.5, 1.0, 1.5, 2.0, 2.5)), flops[label] / flops[two])
    page.says('| minus N = 2, one seed | 0.5M bytes | 1.0M | 1.5M | 2.0M | 2.5M |')
    late = rows('late.csv')
    ratio = float(late['D = 2']['flops']) / float(late['N = 2']['flops'])
    page.says('After 5M bytes of Wikipedia (h), two layers lead two of a plain Transformer by {:.3f}, at {:.1f} times '
              'the FLOPs', -float(CLAIM['cr_same_width']['difference']), ratio)
    page.says('two beat two, at {:.1f} times the FLOPs', ratio)
    losses = [float(late[name]['loss']) for name in ('D = 2', 'N = 2', 'D = 2, tied')]
    page.says('Their losses are {:.3f} and {:.3f}, over five seeds', *losses[:2])
    page.says('We expected a lead of 0 to 0.04')
    sizes = [float(late[name]['parameters']) for name in ('D = 2', 'D = 2, tied')]
    page.says('the loss is {:.3f}, from {:.0f}% fewer parameters', losses[2], 100 - 100 * sizes[1] / sizes[0])
    of_k_min = group_by(read_csv(RESULTS / 'late_depths.csv'), itemgetter('variant', 'k_min'))
    depths, always = of_k_min['add', '2'], of_k_min['add', '']
    assert (len(depths), len(always)) == (5, 5)
    pooled, half, largest = ([float(row[name]) for row in depths] for name in ('L_pooled', 'L_token_50', 'L_token'))
    page.says('It is {:.2f} to {:.2f} over the five seeds if norms are pooled over windows', min(pooled), max(pooled))
    page.says('the median ratio of a token is {:.2f} to {:.2f} and the largest {:.1f} to {:.1f}', min(half), max(half),
              min(largest), max(largest))
    ends = [end(float(row[name]) for row in always) + 1e-9 for name in ('L_pooled', 'sequential', 'K=5')
            for end in (min, max)]
    page.says('Without it (always five unrolls), L is {:.2f} to {:.2f} (paper: 0.88 to 1.20), and reading token by '
              'token has a perplexity of {:.2f} to {:.2f}, where the five unrolls of training have {:.2f} to {:.2f}',
              *ends)
    tied = CLAIM['cr_tied_early']
    page.says('After {:.1f}M bytes, the loss of `tied` is still {:.3f} ({:.3f} to {:.3f}) below',
              float(tied['our_tokens']) / 1e6, *(-float(tied[key]) for key in ('difference', 'high', 'low')))
    page.says('three unrolls close {:.1f}% of the gap in perplexity',
              100 * float(CLAIM['cr_three_unrolls']['our_mean']))
    pointer = CLAIM['cr_pointer']
    page.says('with 4 levels, D = 1 solves {:.1f} and N = 1 solves {:.1f} ({} seeds; paper: 11, 1)',
              float(pointer['our_mean']), float(pointer['other_mean']), pointer['seeds'])


def check_nextlat(page):
    columns = []
    for optimizer in ('AdamW', 'Muon'):
        short, long = rows(f'nextlat_{optimizer.lower()}_1m.csv'), curve(f'nextlat_{optimizer.lower()}_3m.csv')
        columns.append((short, long, optimizer))
    for name, label in (('NextLat', 'nextlat, objective=nextlat'), ('MTP', 'mtp'), ('JTP', 'jtp')):
        cells = [cell for short, long, optimizer in columns
                 for cell in (gap(short[f'{name}, {optimizer}']), f'{long[label][-1][1]:+.3f}')]
        short = columns[0][0]
        ratio = float(short[f'{name}, AdamW']['flops']) / float(short['GPT, AdamW']['flops'])
        page.says('| {} | {:.2f} | {} | {} | {} | {} |', name, ratio, *cells)
    page.says("GPT's loss after 1M bytes is {:.3f} and {:.3f}", float(columns[1][0]['GPT, Muon']['loss']),
              float(columns[0][0]['GPT, AdamW']['loss']))
    models = 'nextlat', 'jtp', 'mtp'
    first = [bound(one[1] for one, _ in drafts()[model]) for model in models for bound in (min, max)]
    page.says("NextLat's first drafted byte is accepted in {:.2f} to {:.2f} of the cases, JTP's in {:.2f} to {:.2f} "
              "and MTP's in {:.2f} to {:.2f}", *first)
    *speed, low, high = (bound(best[0] for _, best in drafts()[model]) for model in models for bound in (min, max))
    page.says('NextLat decodes {:.1f} to {:.1f} times as fast as without, JTP {:.1f} to {:.1f} times and MTP {:.1f} '
              'times', *speed, low)
    assert f'{low:.1f}' == f'{high:.1f}'
    star = rows('path_star_small.csv', 'label')  # the last row of each
    ours = [float(star['nextlat, objective=nextlat'][key]) for key in ('mean', 'lowest', 'highest')]
    page.says('NextLat finds {:.2f} of the paths (five seeds: {:.2f} to {:.2f}), JTP {:.2f} (one seed), and GPT {:.2f}',
              *ours, float(star['nextlat, objective=jtp']['mean']),
              float(star['nextlat, objective=ntp']['mean']))
    solved = {row['label']: float(row['mean']) for row in read_csv(RESULTS / 'countdown_small.csv')
              if row['score'] == 'solved'}
    page.says('NextLat solves {:.3f} of 500 problems and GPT {:.3f}',
              *(solved[f'nextlat, objective={name}, optimizer=muon'] for name in ('nextlat', 'ntp')))
    a5 = {(row['label'], row['who'], row['position']): float(row['mean']) for row in read_csv(RESULTS / 'a5_small.csv')}
    alone = next(value for (_, who, position), value in a5.items() if 'RNN' in who and position == '8')
    page.says('is right in {:.2f} of the cases after 8 elements, GPT in {:.2f}', alone, a5['objective=ntp', '', '8'])
    ranks = [mean_of('manhattan_small.csv', 'run', 'rank', model) for model in ('nextlat', 'ntp')]
    page.says("their effective rank is {:.1f}, GPT's {:.1f} (3 seeds", *ranks)


def check_gpn(page):
    long, short = curve('gpn_trial_8m.csv'), curve('gpn_trial_256_8m.csv')
    of_256 = rows('gpn_trial_256_2m.csv')
    for name, claim, sign, label, model in (
            ('Gated DeltaNet', 'gpn_near_gdn', -1, 'gdn', 'GDN'),
            ('Transformer', 'gpn_transformer', 1, 'standard', 'Transformer')):
        page.says('| {} | {} | {:+.3f} | {} | {:+.3f} |', name, claim_gap(CLAIM[claim], sign), long[label][-1][1],
                  gap(of_256[model]), short[label][-1][1])
    lowest = [min(points['standard'], key=lambda point: point[1]) for points in (long, short)]
    page.says('falls to {:.3f} after {:.0f}M bytes and shrinks no further', lowest[0][1], lowest[0][0] / 1e6)
    page.says('falls to {:.3f} after {:.0f}M and grows again', lowest[1][1], lowest[1][0] / 1e6)
    page.says('it lowers the loss by {:.3f}', -float(CLAIM['gpn_memory']['difference']))
    page.says('the rank correlation over bytes is {:.2f}', float(CLAIM['gpn_unigram']['our_mean']))
    page.says('Wikipedia, {:.1f}M parameters, windows of 1,024 and 256 bytes',
              float(of_256['GPN+M']['parameters']) / 1e6)


def check_baseline(page):
    points = curve('nanogpt_20m.csv')
    page.says("After 20M bytes of Wikipedia (e), Standard's loss is {:.3f} and that of a model with nanoGPT's blocks "
              '{:.3f}, one seed', points['standard'][-1][1], points['standard.NanoGPT'][-1][1])


def check_papers(page):
    """Check the papers' numbers against analysis/papers; the rest is as in the papers' text."""
    gpn, nextlat = rows(ROOT / 'analysis/papers/gpn.csv', 'name'), rows(ROOT / 'analysis/papers/nextlat.csv', 'name')
    transformer, memory, gdn, none = (float(gpn[name]['validation perplexity']) for name in (
        'Transformer++', 'GPN+M, 1 layer', 'Gated DeltaNet', 'GPN, no memory'))
    page.says('Perplexities in the paper: {:.2f}, GPN with memory {:.2f}', transformer, memory)
    page.says('It is close to Gated DeltaNet and ahead of the Transformer. In the paper, its perplexity is {:.0f}% and '
              '{:.0f}% above theirs', 100 * (memory / gdn - 1), 100 * (memory / transformer - 1))
    page.says('in the paper by {:.3f} (with 4 bytes a sub-word)', math.log(none / memory) / 4)
    page.says('there {:.3f}, with 4 bytes a sub-word', math.log(float(
        nextlat['NextLat (d = 1)']['validation perplexity']) / float(nextlat['GPT']['validation perplexity'])) / 4)
    page.says('The margin is 18% of perplexity, with 4 bytes a sub-word')
    assert claims.CLAIMS[[claim.name for claim in claims.CLAIMS].index('gpn_near_gdn')].margin == math.log(1.18) / 4
    for text in ('paper: 0.54)', 'paper: 98%)', 'paper: 0.46, sub-words', 'paper: NextLat about 1, with AdamW)',
                 'paper: 0.548 and 0.331)', 'paper, on Manhattan: 52.7 and 160.1)', 'a grid of 100 places',
                 'paper: 2.3 to 2.7, 1.5 and 1.4)', 'figure 5a'):
        page.says(text)


def check_setting(page):
    """Strike out how the runs were made."""
    total, *hours = map(float, re.findall(r'([\d.]+)\s+core-hours', (RESULTS / 'trials.md').read_text()))
    assert round(sum(hours)) == total
    page.says('All trials took about {:.0f} core-hours', total)
    sample = gzip.open(RESULTS / 'wikipedia_sample.csv.gz', 'rt').read().split()[1:]
    assert len({line.split(',')[0] for line in sample}) == len(sample)
    assert all(re.fullmatch(r'\d+,[0-9a-f]{64}', line) for line in sample)
    page.says('a sample of {:,} articles', len(sample))
    for text in ('chosen with seed 0, mostly', '15 to several thousand times smaller',
                 '95% intervals ', 'at a level of 5%', 'after 5M bytes of Wikipedia',
                 'read 4M bytes of textbooks in windows of 1,024 bytes; five seeds, rates chosen after 1M',
                 '| 95% | sd |', '| | loss | minus Standard, w = 16 (95%) | FLOPs, ratio |',
                 '| AdamW, 1M bytes (95%) | AdamW, 3M, one seed | Muon, 1M bytes (95%) | Muon, 3M, one seed |',
                 '1,024 bytes: 2M (95%) | 8M, one seed | 256 bytes: 2M (95%) | 8M, one seed', 'With windows of 256 it',
                 'higher than GPT\'s at 1M bytes', 'One seed at 3M', 'trained on words of 4,'):
        page.says(text)


def test_every_number_of_the_results_page_follows_from_the_files():
    page = Page('RESULTS.md')
    for check in (check_tests, check_eight_models, check_sps, check_context_ready, check_nextlat, check_gpn,
                  check_baseline, check_papers, check_setting):
        check(page)
    assert page.numbers() == [], page.rest


def test_intervals_and_verdicts_follow_from_the_losses_of_each_seed():
    tables = [table for path in RESULTS.glob('*.csv') if 'its_low' in (table := read_csv(path))[0]]
    assert len(tables) == 7
    for table in tables:
        losses = [[*map(float, row['losses'].split())] for row in table]
        first = {row.get('equal'): own for row, own in zip(table, losses) if not row['minus_first']}
        for row, own in zip(table, losses):
            found = mean_and_interval(own, 'loss', 'low', 'high')
            if row['minus_first']:
                gaps = paired_gaps(own, first[row.get('equal')])
                found |= mean_and_interval(gaps, 'minus_first', 'its_low', 'its_high')
            assert {key: float(row[key]) for key in found} == pytest.approx(found)
    saved = claims.add_verdicts([*claims.saved_rows(RESULTS / 'claims/claims.csv').values()])
    assert list(saved) == list(CLAIM) and (RESULTS / 'claims/claims.md').read_text() == claims.markdown(saved)


# ---- measurements on the other pages ----

def test_readme_says_what_the_results_page_says():
    def papers(page):
        rows = re.findall(r'^\| \[([\w-]+)\]\([^)]*\) \| (.*) \| (.*) \|$', (ROOT / page).read_text(), re.MULTILINE)
        return [row for row in rows if row[0] in ('SPS', 'Context-Ready', 'NextLat', 'GPN')]
    assert len(papers('README.md')) == 4 and papers('README.md') == papers('RESULTS.md')


def test_speeds_of_training_and_decoding_follow_from_the_files():
    readme, sps, terms = Page('README.md'), Page('papers/sps/README.md'), 'time over standard'
    ratios = [measured(f'train_step_{cpu}.json', terms='same', dtype=dtype)['ratio']
              for dtype in ('bfloat16', 'float32') for cpu in ('cpu', 'amx_cpu')]
    readme.says("`standard` trains {:.2f} times as fast as Hugging Face's Llama in bf16 on an AMD EPYC, and {:.2f} "
                'times on an Intel Xeon. In fp32, both are equally fast ({:.2f} and {:.2f} times)', *ratios)
    one, many = (measured('generate_gpu.json', terms='float32', batch=batch)['ratio'] for batch in (1, 16))
    readme.says("On an H100, an earlier version decodes {:.1f} to {:.1f} times as fast as Hugging Face's "
                '`generate` (both in fp32, 32 tokens after 16)', many, one)
    Page('docs/gpu.md').says("in fp32, {:.1f} times Hugging Face's `generate` in fp32 with one sequence, {:.1f} times",
                             one, many)
    step = measured('train_step_cpu.json', terms=terms, dtype='bfloat16', T=1024)
    sps.says('| a training step | {:.1f} |', step['sps'])
    one, many = (measured('generate_cpu.json', terms=terms, batch=batch, dtype='float32')['sps'] for batch in (1, 16))
    sps.says('| decoding one sequence | {:.2f} |', one)
    sps.says('| decoding 16 sequences | {:.2f} |', many)
    held = measured('inference_gpu.json', scale='s', what='memory, held')
    Page('bench/results/README.md').says("SPS {:.2f} times Standard's, 2x Memory {:.2f}", held['sps'],
                                         round(held['two_x_memory'] + 1e-9, 2))
    ours = [measured('generate_cpu.json', terms=terms, batch=batch)['ours_tokens_per_s']
            for terms in ('float32', 'best') for batch in (1, 16)]
    decoding = Page('docs/decoding.md')
    decoding.says('| 16 texts in a batch | {:.1f} times', ours[1] / ours[0])
    decoding.says('| {:.1f} times, {:.1f} for 16 texts |', ours[2] / ours[0], ours[3] / ours[1])

    def slept(key, beside):  # with idle threads that sleep, relative to the default
        short, default = (measured('spin_cpu.json', spin_count=n, beside=beside)[key] for n in (5000, 300_000))
        return short / default
    idle = [100 * (1 - slept(f'{what}_tokens_per_s', None)) for what in ('training', 'decoding_bfloat16')]
    Page('docs/runs.md').says(
        "training is then {:.1f} times as fast as with OpenMP's own default. On an idle machine, it is {:.0f}% slower, "
        'and bf16 decoding {:.0f}% slower', slept('training_tokens_per_s', 'a busy program'), *idle)
    Page('docs/evaluation.md').says('runs {:.0f} times (fp32) and {:.0f} times (bf16) as fast',
                                    *(row['ratio'] for row in measured('evaluation_cpu.json')['rows']))


def test_speeds_on_a_gpu_follow_from_the_files():
    def step(model, side='ours', scale='s'):
        return measured('training_gpu.json', model=model, side=side, scale=scale)

    def ratio(model, side):  # of the speeds of a side and of ours
        return step(model, 'ours')['ms'] / step(model, side)['ms']
    page, readme, models = Page('docs/gpu.md'), Page('README.md'), ('standard', 'sps')
    for name, model, scale in ('Standard S', 'standard', 's'), ('SPS S', 'sps', 's'), ('Standard L', 'standard', 'l'):
        row = step(model, scale=scale)
        page.says('| {} | {} | {:.1f} | {:,} | {:.2f} | {:.1f} | {} |', name, row['batch'], row['ms'],
                  round(row['tokens/s'], -3), row['tokens/s'] * row['FLOPs per token'] / PEAK_FLOPS['H200'],
                  row['peak GiB'], f'{ratio(model, "triton"):.2f} times as fast' if scale == 's' else 'not run')
    page.says("takes {:.2f} times as long as Standard's ({:.2f} with Triton). It needs {:.2f} times the FLOPs", *(
        step('sps', side)['ms'] / step('standard', side)['ms'] for side in ('ours', 'triton')),
        step('sps')['FLOPs per token'] / step('standard')['FLOPs per token'])
    page.says('Standard has become at least {:.2f} times as fast, and SPS {:.2f} times', *(
        1 / ratio(model, 'before') for model in models))
    kernels = [measured('attention_gpu.json', side=side, pattern=pattern)['time over ours'] for side, pattern in (
        ('triton', 'sps'), ('triton', 'causal'), ('cuDNN, is_causal', 'causal'))]
    page.says('take {:.2f} times as long as FlexAttention for SPS with documents, forward and backward, and {:.2f} '
              'times for plain causal attention, where cuDNN takes {:.2f} times as long', *kernels)
    less = [100 - 100 * step(model, 'triton')['peak GiB'] / step(model)['peak GiB'] for model in models]
    page.says('needs {:.0f} to {:.0f}% less memory', *less)
    shares = [row['peak over estimate'] for row in measured('training_gpu.json')['rows'] if 'estimate GiB' in row]
    Page('docs/runs.md').says('the peak was {:.2f} to {:.2f} of the estimate', min(shares), max(shares))
    readme.says('On an H200, Standard (131M) trains at {:,} tokens/s, SPS at {:,}', *(
        round(step(model)['tokens/s'], -3) for model in models))


def test_speeds_of_the_models_follow_from_the_files():
    context_ready, gpn, nextlat = (Page(f'docs/{name}.md') for name in ('context_ready', 'gpn', 'nextlat'))
    times = [row['loop_over_scan'] for row in measured('context_ready_cpu.json')['rows'] if row['what'] == 'bptt']
    context_ready.says('is {:.1f} to {:.1f} times as fast as `--scan=loop`', min(times), max(times))
    context_ready.says('has {:.2f} times the speed of N = 6',
                       measured('context_ready_cpu.json', C=2048)['speed_over_roformer'])
    plain, loop, jax = (measured('gpn_cpu.json', what=f'{name} over the scan', n_layer=1)['c']
                        for name in ('plain', 'loop', 'jax'))
    gpn.says('{:.1f} with `--scan=loop`, which recomputes activations, {:.1f} with the equations and plain autograd, '
             '{:.1f} with a jitted', loop, plain, jax)
    gpn.says('On a CPU, training is then {:.0f} times slower', loop)
    costs = [measured('objectives_cpu.json', objective=name, horizon=1)[key] for name in ('nextlat', 'bst')
             for key in ('time_over_ntp', 'peak_memory_over_ntp')]
    nextlat.says("a NextLat step takes {:.2f} times GPT's time with a byte vocabulary. With a vocabulary of 50304, it "
                 'takes {:.1f} times its memory. BST with a tenth of its pairs takes {:.1f} times the time and {:.1f} '
                 'times the memory', *costs)
    found = [row for row in measured('speculative_auto_epyc_cpu.json')['rows'] if row['auto_confidence'] == 0.02]
    means = [statistics.mean(row['auto_over_best_fixed'] for row in of_text)
             for of_text in group_by(found, itemgetter('text', 'temperature')).values()]
    Page('docs/decoding.md').says('`auto` is {:.2f} to {:.2f} times as fast as the best fixed length',
                                  min(means), max(means))
