"""Write all solutions as one notebook, build/solutions.ipynb, for `make test` to run in one kernel.

Starting a kernel and importing the libraries takes longer than most solutions do. Between two of
them the names are reset, so that none stands on another's.
"""

import nbformat
import settings

TARGET = settings.ROOT / "build" / "solutions.ipynb"
RESET = "%reset -f"


def joined() -> nbformat.NotebookNode:
    """The cells of all solutions, in order; before each notebook's a cell that resets all names."""
    cells: list[nbformat.NotebookNode] = []
    paths = sorted((settings.NOTEBOOKS / "solutions").glob("*.ipynb"))
    for number, path in enumerate(paths):
        notebook = nbformat.read(path, as_version=4)
        # Two notebooks may have a cell of the same name.
        for cell in notebook.cells:
            cell.id = f"{number}-{cell.id}"
        reset = nbformat.v4.new_code_cell(RESET, id=f"{number}-reset", execution_count=1)
        cells += [nbformat.v4.new_markdown_cell(path.stem, id=f"{number}-name"), reset]
        cells += notebook.cells
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    nbformat.write(joined(), TARGET)
