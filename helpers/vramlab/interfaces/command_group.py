"""The commands together: what went wrong in any of them is a sentence and an exit status."""

from typing import Any

import typer
from typer.core import TyperGroup

from ..base.errors import RecipeError, VramLabError, needing
from ..base.text import printable
from .command_options import subject_of
from .command_output import (
    STOPPED,
    WRONG,
    say,
)
from .no_such_option import instead


class Commands(TyperGroup):
    """Turns the package's own errors and Ctrl-C into a sentence and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for; what goes wrong is a sentence on stderr."""
        try:
            # A library that is missing or too old becomes one sentence here, whichever command
            # imported it.
            with needing(lambda: ctx.invoked_subcommand):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            say("Stopped.", err=True)
            raise typer.Exit(STOPPED) from None
        except Exception as error:
            why = self._sentence(error, ctx.invoked_subcommand)
            # An error that is none of ours is a defect, and its traceback is what we want to be
            # sent.
            if not why:
                raise
            say(why, err=True)
            raise typer.Exit(WRONG) from None

    def _sentence(self, error: Exception, name: str | None) -> str:
        """Return what was asked wrongly, by the option that says it.

        "" for an error that is none of the package's.
        """
        if isinstance(error, RecipeError) and name in self.commands:
            options_of = (
                "predict" if name in ("explain", "diff") else name
            )  # whose words these take
            command: Any = self.commands[options_of or ""]
            # "--batch-size is 0" helps more on a command line than "Recipe field 'batch_size'".
            subject = subject_of(error, command)
            if subject:
                return printable(subject)
        return str(error) if isinstance(error, VramLabError) else instead(error, name)
