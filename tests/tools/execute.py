"""Run notebooks top to bottom in a fresh kernel of this very interpreter.

As a script, re-runs notebooks in place (`make notebooks`): a notebook that fails stays as it was,
and the rest go on.

It loads without the package, as `try_colab.py` runs a notebook whose first cell installs that.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import canonical
import nbformat
import settings
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

CELL_TIMEOUT = 1800  # seconds; a GPU chapter may train for minutes in one cell
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels of the running interpreter.

    It does so whatever "python3" means in the user's own Jupyter settings.
    """

    def __init__(self, **options):
        super().__init__(**options)
        if self.has_trait(
            "transport_encryption"
        ):  # newer kernels warn on stderr when they talk in the clear
            self.transport_encryption = "auto"

    @property
    # jupyter_client would look "python3" up among the installed kernels.
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


@dataclass
class Run:
    """One notebook's run: the executed notebook, seconds, and where and why it stopped.

    Cell 0 means that it ended well.
    """

    path: Path
    notebook: nbformat.NotebookNode
    seconds: float
    failed_cell: int = 0
    error: str = ""

    @property
    def title(self) -> str:
        """The notebook's own title, or its file name when it has none."""
        heading = re.search(
            r"^# (.+)$", self.notebook.cells[0].source if self.notebook.cells else "", re.MULTILINE
        )
        return heading[1] if heading else self.path.stem


def run(path: Path, on_cell: Callable[[], None] = lambda: None, timeout: int = CELL_TIMEOUT) -> Run:
    """Execute a copy of the notebook at `path`, in its own folder.

    `on_cell` is called after each cell that ran.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # Of a cell that does not run, no earlier output may stay.
            cell.outputs = []
            cell.execution_count = None
    result = Run(path, notebook, 0.0)
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisInterpreter,
        resources={"metadata": {"path": str(path.parent)}},
        timeout=timeout,
        startup_timeout=300,
        record_timing=False,
        coalesce_streams=True,
        # Counted from 1 as in messages; it stays at the cell in which the run stopped.
        on_cell_execute=lambda cell, cell_index: setattr(result, "failed_cell", cell_index + 1),
        on_cell_executed=lambda **_: on_cell(),
    )
    start = time.monotonic()
    with (
        tempfile.TemporaryFile() as said
    ):  # what native code prints would run through the progress bar
        try:
            client.execute(stderr=said)
        except Exception as error:
            if not interrupted(client):
                result.error = explain(error, said, timeout)
    if interrupted(client):
        raise KeyboardInterrupt
    result.seconds = time.monotonic() - start
    # `failed_cell` was the last cell that was begun.
    if not result.error:
        result.failed_cell = 0
    return result


def interrupted(client: NotebookClient) -> bool:
    """Whether Ctrl-C came.

    nbclient answers it by ending the kernel, and fails then in one of several ways, or not.
    """
    return hasattr(client, "_async_cleanup_kernel_future")


def explain(error: Exception, said: BinaryIO, timeout: int) -> str:
    """Why a notebook stopped, in a line; `said` is what its kernel printed.

    Raises what is no notebook's fault.
    """
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: {error.evalue}"
    if isinstance(error, CellTimeoutError):
        return f"the cell took longer than {timeout} s"
    if isinstance(error, DeadKernelError):
        # The file stands at its end, where the kernel wrote last.
        said.seek(0)
        last = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()][
            -1:
        ]
        return " ".join(["the kernel died (was it killed for its memory?)", *last])
    raise error


def run_all(paths: list[Path], console: Console, done: Callable[[Run], None]) -> list[Run]:
    """Run every notebook under one progress bar that counts cells.

    Where nobody watches, it is one plain line a notebook.
    """
    counts = {path: _code_cells(path) for path in paths}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("cells", total=sum(counts.values()))
        before = 0
        for path in paths:
            progress.update(bar, description=path.stem, completed=before)
            result = run(path, on_cell=lambda: progress.advance(bar))
            before += counts[path]
            runs.append(result)
            done(result)
            mark = f"failed in cell {result.failed_cell}" if result.error else "ok"
            progress.console.print(
                f"{path.stem}  {result.seconds:.0f} s  {mark}", highlight=False, markup=False
            )
        # A notebook that failed has cells that never ran, and the bar counts them as done.
        progress.update(bar, completed=before)
    return runs


def _code_cells(path: Path) -> int:
    notebook = nbformat.read(path, as_version=4)
    return sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in notebook.cells)


def failures(runs: list[Run]) -> list[str]:
    """One line for each notebook that stopped.

    It has the notebook's name, the cell, that cell's first line, and the error.
    """
    lines = []
    for result in runs:
        if result.error:
            first = result.notebook.cells[result.failed_cell - 1].source.strip().split("\n", 1)[0]
            lines.append(
                f"{result.path.name}, cell {result.failed_cell} ({first}): "
                f"{ANSI.sub('', result.error)}"
            )
    return lines


def main() -> int:
    from vramlab.hardware.nvml import nvml_snapshot

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "notebooks", nargs="*", type=settings.notebook_path, help="all when none is named"
    )
    paths = parser.parse_args().notebooks or settings.all_notebooks()
    if nvml_snapshot().available:
        print(
            "This machine's GPU is hidden, since stored outputs are those of a CPU. `make "
            "course` uses it."
        )
    settings.apply(deterministic=True)
    for path in paths:  # the set-up cell and the badge first, so that what runs is what is stored
        canonical.write(path)

    # `canonical.write` works on a file, so the outputs have to be in it first.
    def keep(result: Run) -> None:
        if not result.error:
            result.path.write_text(canonical.text(result.notebook), encoding="utf-8")
            canonical.write(result.path)

    wrong = failures(run_all(paths, Console(), keep))
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


def exit_with(program: Callable[[], int]) -> None:
    """End this process with what `program` returns, and quietly after Ctrl-C.

    What was written by then stays.
    """
    try:
        sys.exit(program())
    except KeyboardInterrupt:
        from vramlab.__main__ import end

        print("\nStopped.", file=sys.stderr)
        end(
            130
            # nbclient ends the kernel twice under load, and asyncio would print that the second
            # time failed
        )


if __name__ == "__main__":
    exit_with(main)
