"""A small notebook for the tests of the notebook tools, which ran, and passes the gate."""

from pathlib import Path

import canonical
import execute
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

URL = "https://github.com/someone/somewhere"
PLOT = """import matplotlib.pyplot as plt

plt.figure(figsize=(2, 1))
plt.plot([1, 2, 3])
plt.show()"""
CLAIM = """peak = 2_847_936_512
print(f"peak {peak / 2**30:.3f} GiB")"""
LIVE = """from vramlab.interfaces.doctor import environment_stamp
from vramlab_course.live import live

print(environment_stamp())
live("took", 1.5, "s")"""


def write(path: Path, *sources: str) -> Path:
    """A notebook at `path` with a title, badge, set-up cell and `sources` as code cells.

    Nothing has run yet.
    """
    cells = [
        new_markdown_cell("# Scratch\n\nA notebook of the tests."),
        *map(new_code_cell, sources),
    ]
    path.write_text(canonical.text(new_notebook(cells=cells)))
    canonical.write(path, URL)
    return path


def good_notebook(folder: Path) -> str:
    """The text of the good notebook."""
    path = write(folder / "99_scratch.ipynb", CLAIM, PLOT, LIVE)
    run = execute.run(path)
    assert not run.error, run.error
    figure = code(run.notebook, "plot").outputs[-1]
    # As the course's own figures have it, without which the gate refuses a picture.
    figure.metadata["image/png"] = {"alt": "A line that rises from 1 to 3"}
    path.write_text(canonical.text(run.notebook))
    canonical.write(path, URL)
    return path.read_text()


def code(notebook: nbformat.NotebookNode, which: str) -> nbformat.NotebookNode:
    """One code cell of the good notebook by its part: setup, claim, plot or live."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return cells[("setup", "claim", "plot", "live").index(which)]
