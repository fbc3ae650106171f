"""What all scripts share, and the Python interface: `from lm_architectures import load, train`.

    run = load('out/quickstart')
    run.generate(['Return the'], max_new_tokens=50, temperature=0.8)
    folder = train.main(['config/quickstart.py', '--max_tokens=1e5'])   # train.py as a module
    read_log(folder)                                                    # its logged steps

Works in any folder after `pip install -e .`, if configs have their full path.
"""
import importlib.util
import sys
from pathlib import Path

__all__ = ['Run', 'load', 'read_log', 'train']


def __getattr__(name: str):
    """Import what is asked for at first use, because scripts set up the process before torch."""
    if name in ('Run', 'load'):
        from lm_architectures.run import load
        return getattr(load, name)
    if name == 'read_log':
        from lm_architectures.run.folders import read_log
        return read_log
    if name == 'train':
        spec = importlib.util.spec_from_file_location(f'{__name__}.train', Path(__file__).parent.parent / 'train.py')
        module = sys.modules[spec.name] = globals()['train'] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
