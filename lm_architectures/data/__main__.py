"""Print a row of a synthetic task, and its targets. `_` marks targets that do not count.

python -m lm_architectures.data pointer_chasing:hops=2,keys=3,values=10
"""
import sys

from lm_architectures.data import open_data
from lm_architectures.data.tasks import builtin_data, task_class
from lm_architectures.files import UserError, friendly_errors


def main(argv: list[str] | None = None) -> None:
    with friendly_errors(argv):
        argv = sys.argv[1:] if argv is None else argv
        if len(argv) != 1 or not task_class(argv[0]):
            tasks = ', '.join(filter(task_class, builtin_data()))
            raise UserError(f'expected one of {tasks}. Usage: python -m lm_architectures.data TASK:option=value,...')
        data = open_data(argv[0])
        idx, targets = data.train_batch(0, 1, data.T, seed=0)
        names = [*data.task.symbols, 'eos']
        inputs, wanted = [names[i] for i in idx[0]], [names[i] if i >= 0 else '_' for i in targets[0]]
        width = max(map(len, [*inputs, *wanted])) + 1
        per_line = max(1, 100 // width)
        for start in range(0, data.T, per_line):
            for title, row in (('input', inputs), ('target', wanted)):
                print(f'{title:8}' + ''.join(f'{name:{width}}' for name in row[start:start + per_line]).rstrip())
        print(f'block_size = {data.T}; {data.n_ids} ids, including eos')


if __name__ == '__main__':
    main()
