"""`%%watch model optimizer`: the cell magic that watches what its cell runs and prints the report."""

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from .errors import VramLabError
from .watch import watch


@magics_class
class WatchMagic(Magics):
    """Magics of VRAM Lab; load them with `%load_ext vramlab`."""

    @magic_arguments()
    @argument("model", help="name of the module to watch")
    @argument("optimizer", nargs="?", help="name of its optimizer")
    @argument("-o", "--output", help="name of a variable for the report; without it the report is printed")
    @cell_magic
    def watch(self, line: str, cell: str):
        """Watch the cell: every storage it makes, by category and phase."""
        options = parse_argstring(self.watch, line)
        objects = []
        for name in filter(None, (options.model, options.optimizer)):
            if name not in self.shell.user_ns:
                raise VramLabError(f"%%watch: there is no variable {name!r} in this notebook")
            objects.append(self.shell.user_ns[name])
        with watch(*objects) as watcher:
            result = self.shell.run_cell(cell)
        result.raise_error()
        if options.output:
            self.shell.user_ns[options.output] = watcher.report()
        else:
            print(watcher.report())
