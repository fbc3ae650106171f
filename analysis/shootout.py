"""Compare all architectures: loss at equal tokens, FLOPs and time; decoding speed and state size.

    python -m analysis.shootout --n_embd=64 --head_size=16 --budget=2.5e12 --out_dir=out/shootout_64
    python -m analysis.shootout --data=FOLDER --config=config/standard_s.py --n_layer=8 \
        --n_embd=512 --head_size=64 --block_size=1024 --batch_size=32 --budget=1e17 \
        --eval_tokens=2e6 --jobs=1 --out_dir=out/shootout_gpu

The first takes two hours on two cores; the second is for a GPU, with shards of FineWeb-Edu in
FOLDER. Run the same command again to resume.

All models have as many parameters as Standard within 1%, including p_psi of NextLat. --budget is
Standard's training FLOPs. Each model's learning rate is searched with seed 0 at equal tokens; then
other seeds train for equal tokens, equal FLOPs and equal time (as long as Standard, at the fastest
seed's speed). Decoding is timed for the runs with equal FLOPs. Writes RESULTS.md, shootout.csv,
shootout.png and shootout_gaps.png to out_dir.
"""
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import torch

from analysis import compare, figures
from analysis.compare import Method, set_best_rates, train_seeds
from analysis.runs import Run
from bench import decoding_speeds, one_line, where_and_when
from lm_architectures.data import open_data
from lm_architectures.files import UserError, friendly_errors
from lm_architectures.machine.devices import decoding_dtype, pick_device
from lm_architectures.run.folders import load_run
from lm_architectures.run.models import count_parameters, meta_model
from lm_architectures.run.run_settings import model_config
from lm_architectures.settings import check_ranges, load_settings
from train import Settings as TrainSettings

BUDGETS = 'tokens', 'training FLOPs', 'wall time'
TOLERANCE = 0.01  # largest relative difference in parameters to Standard
CONTEXTS = 1024, 16384  # context lengths at which decoding is timed, in tokens
DECODED = 64  # tokens decoded in each of six rounds


@dataclass
class Settings:
    out_dir: str = 'out/shootout'  # folder of the runs and results
    config: str = 'config/quickstart.py'  # training settings that are not listed below
    data: str = 'python_docs'  # data folder or built-in data
    models: str = 'all'  # names of `sides` separated by commas, including standard
    budget: float = 8e12  # training FLOPs of Standard
    n_layer: int = 4  # layers of Standard
    n_embd: int = 128  # width of Standard
    head_size: int = 32  # head size of Standard
    block_size: int = 256  # tokens per window
    batch_size: int = 4  # windows per step
    eval_tokens: int = 500_000  # validation tokens per evaluation
    seeds: int = 5  # runs of each model and budget at its best learning rate
    jobs: int = 2  # runs trained at a time, with one thread each

    def __post_init__(self):
        check_ranges(self, budget=0, n_layer=1, n_embd=1, head_size=1, block_size=1, batch_size=1, eval_tokens=1,
                     seeds=1, jobs=1)


@dataclass
class Side:
    label: str  # name in tables and figures
    model: str  # name of the model file
    values: dict  # Config values
    free: dict  # {setting: step}: adjusted in this order to match Standard's number of parameters
    rate: float  # learning rate where the search starts


def sides(s: Settings) -> dict[str, Side]:
    """Return {name: side} of the models in s.models, in a fixed order."""
    heads = max(1, s.n_embd // s.head_size)
    shape = dict(n_layer=s.n_layer, n_head=heads, n_embd=s.n_embd)
    fork = dict(predict_input='state', predict_layers=1)  # the cheapest fork
    memory = dict(n_head=heads, d_k=s.head_size, d_v=2 * s.head_size, init_std=0.02)
    ffn, width_and_ffn = {'n_ffn': 8}, {'n_embd': 8, 'n_ffn': 8}
    known = {
        'standard': Side('Standard', 'standard', shape, {}, 1.35e-3),
        'sps': Side('SPS', 'sps', shape, ffn, 9e-4),
        'sps_token': Side('SPS, from the token', 'sps', shape | dict(predict_input='token'), ffn, 6e-4),
        'sps_fork': Side('SPS, fork, top 1', 'sps', shape | fork, ffn, 9e-4),
        'context_ready': Side('Context-Ready, D = 2', 'context_ready', shape | dict(
            n_layer=2, K=5, k_min=2, tied_head=True, init_std=0.02), width_and_ffn | {'n_embd': 2 * heads}, 1e-3),
        # p_psi as wide as the state: its share of parameters is then as in the paper, not a third
        'nextlat': Side('NextLat, d = 1', 'nextlat', shape | dict(n_dynamics=s.n_embd, tied_head=True), ffn, 1.35e-3),
        'gpn': Side('GPN+M', 'gpn', memory | dict(n_layer=1, d_emb=s.n_embd), width_and_ffn, 3e-3),
        # the head is not tied to the embedding, so with a large vocabulary the blocks are narrower
        'gdn': Side('GDN', 'gdn', memory | dict(n_layer=s.n_layer), width_and_ffn, 3e-3)}
    names = list(known) if s.models == 'all' else s.models.split(',')
    if 'standard' not in names or len(names) < 2 or not set(names) <= set(known):
        raise UserError(f'models is {s.models!r}: expected standard and some of {", ".join(list(known)[1:])}, '
                        'separated by commas')
    return {name: side for name, side in known.items() if name in names}


def blank(model: str, values: dict, data):
    """Return the model that train.py would build from these Config values, on the meta device."""
    return meta_model(model, model_config(TrainSettings(model=model), values, data, None))


def sized(side: Side, data, target: int) -> dict:
    """Return Config values that give `target` parameters within 1%, or raise UserError."""
    values = dict(side.values)
    for name, step in side.free.items():
        def parameters(n, name=name):
            return count_parameters(blank(side.model, {**values, name: n}, data))
        sizes = range(step, 2 ** 16, step)
        above = bisect_left(sizes, target, key=parameters)
        values[name] = min(sizes[max(0, above - 1):above + 1], key=lambda n: abs(parameters(n) - target))
    found = count_parameters(blank(side.model, values, data))
    if abs(found - target) > TOLERANCE * target:
        raise UserError(f'{side.label} has {found:,} parameters at best, expected {target:,} within 1%: give '
                        'another n_embd or n_layer')
    return values


def whole_steps(s: Settings, tokens: float) -> int:
    """Round a number of tokens to whole training steps, at least one."""
    per_step = s.batch_size * s.block_size
    return max(1, round(tokens / per_step)) * per_step


def arguments(s: Settings, model: str, values: dict, tokens: int) -> list[str]:
    """Return the arguments of train.py except learning rate, seed and folder."""
    own = {'model': model, **values, 'data': s.data, 'block_size': s.block_size, 'batch_size': s.batch_size,
           'micro_batch_size': s.batch_size, 'max_tokens': tokens, 'warmup_tokens': tokens // 20,
           'eval_tokens': s.eval_tokens, 'eval_interval': 1_000_000, 'sample_tokens': 0}
    return [s.config, *(f'--{name}={value}' for name, value in own.items())]


def train_cells(s: Settings, data, out: Path) -> dict[tuple[str, str], list[Path]]:
    """Train all unfinished runs. Returns {(name, budget): runs, one per seed}."""
    chosen = sides(s)
    target = count_parameters(blank('standard', chosen['standard'].values, data))
    values = {name: sized(side, data, target) for name, side in chosen.items()}
    flops = {name: blank(side.model, values[name], data).flops_per_token(s.block_size) for name, side in chosen.items()}
    out.mkdir(parents=True, exist_ok=True)

    def with_tokens(name, tokens, rate):
        tokens = whole_steps(s, tokens)
        return Method(arguments(s, chosen[name].model, values[name], tokens), f'{out}/{name}_{tokens}', rate, share=1)
    n_tokens = whole_steps(s, s.budget / flops['standard'])
    equal_tokens = {name: with_tokens(name, n_tokens, side.rate) for name, side in chosen.items()}
    set_best_rates(equal_tokens, s.jobs)
    speeds = {name: max(map(speed, runs)) for name, runs in train_seeds(equal_tokens, s.seeds, s.jobs).items()}
    cells = {}
    for name, method in equal_tokens.items():
        of_budget = n_tokens, s.budget / flops[name], n_tokens * speeds[name] / speeds['standard']
        cells |= {(name, budget): with_tokens(name, n, method.rate) for budget, n in zip(BUDGETS, of_budget)}
    return train_seeds(cells, s.seeds, s.jobs)


def speed(run: Path) -> float:
    """Return the median training tokens/s in a run's log."""
    return Run(run).median('tokens_per_s')


def measure_decoding(runs: dict[str, Path]) -> dict[str, dict]:
    """Return {name: {'tokens_per_s_1024': ..., 'state_bytes_1024': ..., ...}}."""
    device = pick_device('auto')
    dtype = decoding_dtype('auto', device)
    models, found = {name: load_run(run, device, dtype)[0] for name, run in runs.items()}, {name: {} for name in runs}
    for model in models.values():
        model.config.eos_id = None  # a generated eos would end the document and empty the context
    for (name, length), tokens_per_s in decoding_speeds(models, CONTEXTS, DECODED).items():
        found[name] |= {f'tokens_per_s_{length}': tokens_per_s,
                        f'state_bytes_{length}': models[name].new_cache(1, length).nbytes}
    return found


def table(labels: dict[str, str], runs: dict[tuple[str, str], list[Path]], decoded: dict[str, dict]) -> list[dict]:
    """Return a row for each budget and model: `compare.table` plus decoding.

    labels: {name: label}; runs: {(name, budget): runs}; decoded: result of `measure_decoding`.
    """
    rows = []
    for budget in BUDGETS:
        compared = compare.table({labels[name]: runs[name, budget] for name in labels})
        rows += [{'name': name, 'equal': budget} | row | decoded[name] for name, row in zip(labels, compared)]
    return rows


def markdown(rows: list[dict], s: Settings) -> str:
    """Return the text of RESULTS.md."""
    lines = ['# Every architecture side by side', '',
             f'{one_line(where_and_when())}. Data {s.data}, {s.batch_size} windows of {s.block_size} tokens per step, '
             f'{s.jobs} runs at a time. Losses in nats per token, with 95% intervals over {s.seeds} seeds. Standard '
             f'has {s.n_layer} layers of {s.n_embd}. Learning rates are searched at equal tokens and used for all '
             'three budgets. Speed and state of decoding are in shootout.csv: after more tokens than a window, only '
             'times and sizes mean something.', '',
             '![loss over training FLOPs, decoding time and state](shootout.png)', '',
             '![loss minus that of Standard](shootout_gaps.png)', '']
    for budget in BUDGETS:
        table = compare.loss_table([r for r in rows if r['equal'] == budget])
        lines += [f'## Equal {budget}', '', table, '']
    return '\n'.join(lines)


def limit(rows: list[dict]) -> float:
    """Return the largest |difference to Standard| to show: one model may lie far outside."""
    ends = sorted(max(abs(r['its_low'] or r['minus_first']), abs(r['its_high'] or r['minus_first']))
                  for r in rows if r['minus_first'] is not None)
    return ends[-2] if len(ends) > 1 and ends[-1] > 3 * ends[-2] else ends[-1]


def plot(rows: list[dict], unit: str):
    """Draw loss over training FLOPs (all budgets), decoding time and state size (equal FLOPs).

    unit: of the loss, 'nats per token'. A loss above the axis is a triangle with its value.
    """
    length = max(CONTEXTS)
    at_equal_flops = [r for r in rows if r['equal'] == 'training FLOPs']
    panels = [(rows, 'training TFLOPs', 'equal tokens, FLOPs, time', lambda r: r['flops'] / 1e12),
              (at_equal_flops, 'ms per decoded token', f'{length:,} tokens of context',
               lambda r: 1000 / r[f'tokens_per_s_{length}']),
              (at_equal_flops, 'decoding state, MB', f'{length:,} tokens of context',
               lambda r: r[f'state_bytes_{length}'] / 1e6)]
    figure, all_axes = figures.new_figure('', 3, (8.3 / 3, 4.6), sharey=True)
    top = at_equal_flops[0]['loss'] + 1.1 * limit(at_equal_flops)
    color_of = {label: style['color'] for label, style in figures.styles(r['model'] for r in rows).items()}
    for axes, (shown, xlabel, title, x_of) in zip(all_axes, panels):
        for label, color in color_of.items():
            points = sorted([r for r in shown if r['model'] == label], key=x_of)
            inside = [r for r in points if r['loss'] <= top]
            axes.errorbar([x_of(r) for r in inside], [r['loss'] for r in inside],
                          [0 if r['low'] is None else r['high'] - r['loss'] for r in inside], marker='o',
                          markersize=4, capsize=3, linewidth=1, label=label, color=color)
            for i, r in enumerate(r for r in points if r['loss'] > top):
                axes.plot(x_of(r), top, marker='^', color=color, clip_on=False)
                axes.annotate(f'{r["loss"]:.2f}', (x_of(r), top), (3, -14 - 12 * i), textcoords='offset points',
                              color=color)
        axes.set_xscale('log')
        axes.set(xlabel=xlabel, title=title)
    lowest = min(r['loss'] for r in rows)
    all_axes[0].set(ylabel=f'validation loss, {unit}', ylim=(lowest - 0.1 * (top - lowest), top))
    figures.add_legend(figure, 'Bars: 95% intervals. Triangles: off the scale', 'lower center', ncols=4)
    return figure


def plot_gaps(rows: list[dict], unit: str):
    """Draw each model's loss minus Standard's at equal training FLOPs, best model first."""
    style_of = figures.styles(r['model'] for r in rows)
    shown = sorted((r for r in rows if r['equal'] == 'training FLOPs' and r['minus_first'] is not None),
                   key=lambda r: -r['minus_first'])
    edge = limit(shown)
    figure, (axes,) = figures.new_figure('', size=(8.3, 0.35 * len(shown) + 1.1))
    for y, r in enumerate(shown):
        gap, low, high = r['minus_first'], r['its_low'], r['its_high']
        axes.barh(y, min(1.25 * edge, gap), color=style_of[r['model']]['color'], height=0.6)
        if abs(gap) > 1.2 * edge:
            axes.annotate(f'off the scale: {gap:+.2f} \N{RIGHTWARDS ARROW}', (1.25 * edge, y), (-5, 0), va='center',
                          ha='right', textcoords='offset points', color='white', weight='bold')
            continue
        if low is not None:
            axes.errorbar(gap, y, xerr=[[gap - low], [high - gap]], color='black', capsize=3, linewidth=1)
        axes.annotate(f'{gap:+.2f}', (max(0, high or gap), y), (5, 0), textcoords='offset points', va='center')
    axes.axvline(0, color='black', linewidth=1)
    axes.set_yticks(range(len(shown)), [r['model'] for r in shown])
    axes.set(xlabel=f"loss minus Standard's, {unit}, equal training FLOPs (negative is better; 95% intervals)",
             xlim=(-1.3 * max(0, *(-r['minus_first'] for r in shown)), 1.25 * edge))
    axes.grid(False, axis='y')
    return figure


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        s, positional, _ = load_settings(Settings, argv)
        if positional:
            raise UserError(f'unexpected {positional[0]!r}: python -m analysis.shootout --data=FOLDER --out_dir=NEW')
        out, data = Path(s.out_dir), open_data(s.data)
        labels = {name: side.label for name, side in sides(s).items()}
        runs = train_cells(s, data, out)
        torch.set_num_threads(1)
        decoded = measure_decoding({name: runs[name, 'training FLOPs'][0] for name in labels})
        rows = table(labels, runs, decoded)
        unit = 'nats per byte' if data.tokenizer == 'byte' else 'nats per token'
        text = markdown(rows, s)
        print(text)
        figures.write(out / 'shootout', {'.csv': rows, '.png': plot(rows, unit), '_gaps.png': plot_gaps(rows, unit)})
        figures.write(out / 'RESULTS', {'.md': text})


if __name__ == '__main__':
    main()
