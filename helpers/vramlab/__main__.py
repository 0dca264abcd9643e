"""The program `vramlab`, also `python -m vramlab`. Ctrl-C ends it quietly with status 130, while it loads too."""

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def main() -> None:
    """Load and run the command line."""
    status = 0
    try:
        from .faces.cli import app

        app(prog_name="vramlab")
    except SystemExit as exiting:
        status = int(exiting.code or 0)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        status = 130
    end(status)


def end(status: int) -> NoReturn:
    """End the process without taking torch's modules apart, which takes a second or two."""
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
