"""Run a notebook's code for the recipes it asks for: `python -m vramlab.collector NOTEBOOK`, with VRAMLAB_COLLECT set.

Needs no Jupyter. A cell that fails is left, and the next one tried: figures of stand-ins satisfy few assertions.
"""

import builtins
import json
import re
import sys
from pathlib import Path

from .apart import end_with_parent

THROUGH = ("%%watch", "%%time", "%%timeit", "%%capture")  # magics whose cells are Python


def cells(notebook: Path) -> list[str]:
    """The Python of the notebook's code cells, with IPython's line magics and shell commands taken out."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    return [python for source in sources if (python := to_python(source)).strip()]


def to_python(source: str) -> str:
    """`source` without what only IPython understands."""
    first, _, rest = source.lstrip().partition("\n")
    if first.startswith("%%"):
        if not first.startswith(THROUGH):
            return ""
        source = rest
    try:
        compile(source, "cell", "exec")
    except SyntaxError:
        return re.sub(r"^([ \t]*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)
    return source


def run(notebook: Path) -> None:
    """Execute the cells one after the other in one namespace."""
    builtins.display = lambda *values, **options: None
    names = {"__name__": "__main__"}
    for number, source in enumerate(cells(notebook), 1):
        try:
            exec(compile(source, f"{notebook.name}, code cell {number}", "exec"), names)
        except (Exception, SystemExit) as error:
            print(f"code cell {number}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    end_with_parent()
    sys.path.insert(0, "")  # as in a kernel
    run(Path(sys.argv[1]))
