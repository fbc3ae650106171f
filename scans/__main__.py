"""Compare a fast form with the equations of a model file and, if they agree, print its pin.

    python -m scans gpn                after an edit of model_gpn.py, or of all forms of an equation
    python -m scans gpn --model=mine   for a copy of it, model_mine.py, or the path of one

Compares the loss, all gradients and the logits of cached decoding of a small model, in float64. If
the fast form also has Triton kernels, which the same pin enables, Triton's interpreter runs them.
"""
import argparse
import importlib
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch

from attn_kernels import digest
from scans import KERNELS_ON_CPU, triton

NAMES = sorted(path.stem for path in Path(__file__).parent.glob('[a-z]*.py') if 'PINS = {' in path.read_text())


def compare(file, fast) -> float:
    """Return the largest difference between both forms, relative to each tensor's largest value."""
    results = []
    for scan in ('loop', 'fast'):
        torch.manual_seed(0)
        model = file.Model(file.Config(**fast.SMALL, scan=scan)).double()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.2 if p.dim() == 2 else 0.7)
        idx = torch.randint(0, 60, (2, 12)).masked_fill(torch.rand(2, 12) < 0.15, fast.SMALL['eos_id'])
        loss = model(idx, idx.roll(-1, 1))['loss']
        with torch.no_grad():
            cache = model.new_cache(*idx.shape, max_call=3)
            *parts, last = idx.split([5, 1, 2, 4], 1)
            decoded = [model.extend(part, cache, all_positions=True) for part in parts]
            decoded.append(model.extend(last, cache, torch.tensor([4, 2])).unsqueeze(1))  # rows of unequal lengths
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters())), torch.cat(decoded, 1)[..., :60]])
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-300)).item() for a, b in zip(*results))


def compare_kernels(argv) -> None:
    """Run this program again with the kernels. Exits if they differ from the equations."""
    if triton is None:
        return print('The Triton kernels were not compared, because there is no Triton here.')
    environment = os.environ | {'TRITON_INTERPRET': '1', 'PYTHONPATH': os.pathsep.join(sys.path)}
    if subprocess.run([sys.executable, '-m', 'scans', *argv, '--kernels'], env=environment).returncode:
        sys.exit('scans: the comparison of the Triton kernels failed (above), and the pin would enable them')


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', choices=NAMES, help='the fast form, a file of this folder')
    parser.add_argument('--model', help='name or path of the file with the equations; default: the same name')
    parser.add_argument('--kernels', action='store_true', help='only the Triton kernels; needs TRITON_INTERPRET=1')
    s = parser.parse_args(argv)
    if s.kernels != KERNELS_ON_CPU:
        parser.error('TRITON_INTERPRET=1 is for --kernels, and --kernels needs it')
    path = Path(s.model or s.name)
    if path.suffix == '.py':
        sys.path.insert(0, str(path.parent))
    fast, file = importlib.import_module(f'scans.{s.name}'), importlib.import_module(
        path.stem if path.suffix == '.py' else f'model_{path.name}')
    if not getattr(fast, 'runs_on', lambda device: True)(torch.device('cpu')):
        sys.exit(f'scans: {s.name} cannot run here, so there is nothing to compare')
    difference = compare(file, fast)
    if not difference < 1e-9:
        sys.exit(f'scans: {fast.__name__} and {file.__name__} differ by {difference:.1e} (relative, float64): the '
                 'equations stay step by step')
    print(f'{fast.__name__} and {file.__name__} agree within {difference:.1e} (relative, float64)'
          + (', in Triton' if s.kernels else ''), flush=True)
    if s.kernels:
        return
    if getattr(fast, 'HAS_KERNELS', False):
        compare_kernels(argv)
    original = importlib.import_module(f'model_{s.name}')
    if new := {f.name for f in fields(file.Config)} - {f.name for f in fields(original.Config)}:
        print(f'They were compared with {", ".join(sorted(new))} at the default. The fast form ignores such settings:\n'
              'use it only if they do not change these equations.\n')
    print(f'To use the fast form, add this to PINS in scans/{s.name}.py. If you changed what is computed, remove the\n'
          'other pins: with them, copies of the old equations would run the new ones.\n\n'
          f'    {digest(*fast.implements(file))!r}')


if __name__ == '__main__':
    main()
