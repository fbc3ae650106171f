"""Code that all scripts share. The Python interface: `from lm_architectures import load, train`.

    run = load('out/quickstart')
    run.generate(['Return the'], max_new_tokens=50, temperature=0.8)
    folder = train.main(['config/quickstart.py', '--max_tokens=1e5'])   # train.py as a module
    read_log(folder)                                                    # its logged steps
    save('out/mine', model, data, step=500, block_size=256)             # trained in your own loop

Works in any folder after `pip install -e .`, if configs have their full path. Your own train.py,
config.py or scans/ are never mistaken for the repository's.
"""
import importlib
import os

__all__ = ['Run', 'load', 'read_log', 'save', 'train']
__path__.append(os.path.dirname(__path__[0]))  # train.py and scans/ are lm_architectures.train and .scans in Python


def __getattr__(name: str):
    """Import what is asked for at first use, because scripts set up the process before torch."""
    modules = {'Run': 'run.load', 'load': 'run.load', 'save': 'run.load', 'read_log': 'run.records', 'train': 'train'}
    if name not in modules:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module = importlib.import_module(f'{__name__}.{modules[name]}')
    return module if name == 'train' else getattr(module, name)
