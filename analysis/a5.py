"""A5 state tracking: accuracy by position on words longer than in training (NextLat paper).

    python -m analysis.a5 RUN RUN ... --length=36 --out=NAME

Runs trained on `a5` predict the state after each element of the same held-out words. For NextLat
runs, p_psi is also evaluated alone, as an RNN that starts from the Transformer's first state.
Writes NAME.csv and NAME.png: accuracy over position for each configuration, averaged over seeds.
"""
from dataclasses import dataclass

from analysis import figures
from analysis.runs import curves_of, finished, spread
from lm_architectures.data import open_data
from lm_architectures.data.generated import make_task
from lm_architectures.data.names import task_class
from lm_architectures.data.tasks.a5 import Task
from lm_architectures.files import UserError
from lm_architectures.machine.devices import Device, pick_device
from lm_architectures.run.folders import load_run

WHO = {'accuracy': '', 'rnn_accuracy': ', p_psi as an RNN'}  # score: suffix of the label


@dataclass
class Settings(figures.Settings):
    length: int = 36  # elements per word
    words: int = 10_000  # number of held-out words, the same for all runs (paper: about 100,000)
    batch_size: int = 1000  # words evaluated at a time
    device: Device = 'auto'  # auto, cuda, cpu or mps


def trained_length(run) -> int:
    """Return the word length that a run was trained on. Raises UserError for runs on other data."""
    name = run.record['settings'].get('data')
    if task_class(name) is not Task:
        raise UserError(f'{run} was trained on {name}: expected a run of a5')
    return make_task(name).length


def measure(runs: list, s: Settings) -> list[dict]:
    """Return the CSV rows, without labels, for runs that differ only in the seed."""
    length, device = trained_length(runs[0]), pick_device(s.device)
    data = open_data(f'a5:length={s.length},val_rows={s.words}')
    trained = [load_run(run.folder, device, code=s.code)[0] for run in finished(runs)]
    found = [data.score(model, device, s.batch_size) for model in trained]
    return [{'who': who, 'trained': length, 'position': t}
            | spread([scores[f'{score}_{t}'] for scores in found])
            for score, who in WHO.items() if f'{score}_1' in found[0] for t in range(1, s.length + 1)]


def plot(rows: list[dict]):
    figure, (axes,) = figures.new_figure('A5: accuracy of the predicted state, by position')
    figures.draw(axes, rows, 'position')
    for length in {row['trained'] for row in rows}:
        axes.axvline(length, color='gray', linestyle=':', label=f'word length in training: {length}')
    axes.set(xlabel='position in the word, elements read', ylabel='accuracy (fraction of words)', ylim=(0, 1.02))
    figures.add_legend(figure, figures.BAND)
    return figure


@figures.script(Settings)
def main(runs: list, s: Settings) -> dict:
    measured = curves_of(runs, lambda own: measure(own, s), labels=s.labels)
    rows = [row | {'label': row['label'] + row['who']} for row in figures.labeled(measured)]
    figures.show([row for row in rows if row['position'] in (row['trained'], s.length)],
                 'label', 'position', 'mean', 'lowest', 'highest', 'seeds')
    return {'.csv': rows, '.png': plot(rows)}


if __name__ == '__main__':
    main()
