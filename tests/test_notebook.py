"""docs/quickstart.ipynb runs in a fresh copy of the repository."""
import shutil

import pytest
from conftest import ROOT, TINY

nbclient = pytest.importorskip('nbclient')
pytest.importorskip('ipykernel')
nbformat = pytest.importorskip('nbformat')


def read_notebook():
    return nbformat.read(ROOT / 'docs/quickstart.ipynb', 4)


@pytest.mark.slow
def test_the_notebook_runs(tiny_data, tmp_path, monkeypatch):
    ignored = shutil.ignore_patterns('.*', 'out', 'built', 'results', 'tests')
    root, notebook = shutil.copytree(ROOT, tmp_path / 'root', ignore=ignored), read_notebook()
    cell = next(cell for cell in notebook.cells if 'options = ' in cell.source)
    tiny = [*TINY, f'--data={tiny_data}', '--block_size=256', '--max_tokens=20480', '--overwrite']
    cell.source += f'\noptions = {tiny}'
    monkeypatch.setenv('PYTHONPATH', '')
    nbclient.NotebookClient(notebook, timeout=60, resources={'metadata': {'path': root / 'docs'}}).execute()
    results = [output.get('data', {}).get('text/plain', '') for output in notebook.cells[-2].outputs]
    assert any('validation loss' in text for text in results) and (root / 'out/notebook_short/config.json').exists()


def test_the_notebook_shows_its_outputs():
    """Every code cell after the first has them, so that the page can be read on the web."""
    cells = [cell for cell in read_notebook().cells if cell.cell_type == 'code']
    assert all(cell.outputs for cell in cells[1:])
    assert not any(output.output_type == 'error' for cell in cells for output in cell.outputs)
    assert sum(output.get('data', {}).get('image/png') is not None for cell in cells for output in cell.outputs) == 2
