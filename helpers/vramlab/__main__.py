"""The program `vramlab`, also `python -m vramlab`.

Ctrl-C ends it quietly with status 130, while it loads too.

An output that cannot be written is a sentence and status 2; one that nobody reads any more, as of
`| head`, is quiet.
"""

import contextlib
import errno
import os
import sys
from typing import NoReturn

from .private.of_python import run_exit_functions

UNWRITABLE = (
    errno.ENOSPC,
    errno.EBADF,
    errno.EIO,
    errno.EFBIG,
    getattr(errno, "EDQUOT", errno.ENOSPC),
)


def main() -> None:
    """Load and run the command line."""
    status = 0
    try:
        _prepare_output()
        why = _refusal()
        if why:
            sys.exit(why)
        # Inside the try, so that Ctrl-C during the second that it takes to load is quiet too.
        with _loading_meanwhile(sys.argv[1:]):
            from .interfaces.cli import app

            app(prog_name="vramlab")
    except SystemExit as exiting:
        code = exiting.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 2
        status = code
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        status = 130
    except OSError as error:
        # An error with a file's name is about that file and not about the output.
        if error.filename or error.errno not in UNWRITABLE:
            raise
        print(f"The output could not be written ({error.strerror}).", file=sys.stderr)
        status = 2
    end(status)


def _loading_meanwhile(words: list[str]) -> contextlib.AbstractContextManager:
    """Return a context in which another process loads what `plan` simulates with.

    It begins before the command line is loaded and read, which takes a third of a second.
    """
    # Images and videos are simulated in this process.
    without = {"--help", "--no-confirm", "--images", "--video-frames"}
    if words[:1] != ["plan"] or without.intersection(words):
        return contextlib.nullcontext()
    from .planning.workers import loaded_early

    return loaded_early()


def _refusal() -> str:
    """Return why nothing can run here, "" where it can."""
    if sys.flags.optimize > 1:
        return (
            "python -OO strips docstrings, of which transformers makes its models' outputs: "
            "leave out -OO, or say -O."
        )
    try:
        os.getcwd()
    except OSError:
        return (
            "The working directory was removed, and torch does not load in one: change to another."
        )
    return ""


def _prepare_output() -> None:
    """Let an output whose encoding lacks a character have a plainer one.

    Raises OSError if standard output is closed.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    from .base.text import DEGRADE

    for stream in filter(None, (sys.stdout, sys.stderr)):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=DEGRADE)


def end(status: int) -> NoReturn:
    """End the process without taking torch's modules apart, which takes a second or two."""
    run_exit_functions()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):  # said before, or nobody reads it
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
