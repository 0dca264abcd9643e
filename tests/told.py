"""What a notebook tells in its text, for the tests that hold a sentence."""

import nbformat
from settings import NOTEBOOKS


def text_of(name: str) -> str:
    """The Markdown of the notebook whose name begins like this."""
    (path,) = NOTEBOOKS.glob(f"{name}*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
