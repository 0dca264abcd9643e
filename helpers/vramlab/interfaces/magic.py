"""`%%watch model optimizer`: the cell magic that watches its cell and prints the report."""

from typing import Any
from unittest import mock

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from .watch import watch

# `run_cell` would show the error of the cell inside, and `raise_error` shows it for the cell
# outside.
MUTED = ("showtraceback", "showsyntaxerror", "showindentationerror")


@magics_class
class WatchMagic(Magics):
    """Magics of VRAM Lab; load them with `%load_ext vramlab`."""

    @magic_arguments()
    @argument(
        "model",
        help="the module to watch: a variable, or an expression without spaces such as "
        "trainer.model",
    )
    @argument("optimizer", nargs="?", help="its optimizer, when that has states already")
    @cell_magic
    def watch(self, line: str, cell: str) -> None:
        """Run the cell, follow every storage it makes, and print the report.

        An error in the cell is raised as always, after the report of what ran until then.
        """
        options = parse_argstring(self.watch, line)
        shell = self.shell
        assert shell is not None  # a magic runs in one
        # Evaluated in the user's namespace, so any expression there may be the model.
        watcher = watch(*(shell.ev(text) for text in (options.model, options.optimizer) if text))
        muted: dict[str, Any] = dict.fromkeys(MUTED, lambda *args, **kwargs: None)
        with (
            watcher,
            mock.patch.multiple(shell, **muted),
        ):
            result = shell.run_cell(cell)
        # The report first: with an error it shows what was held when the cell failed.
        print(watcher.report())
        result.raise_error()
