"""The program `vramlab`, also `python -m vramlab`. Ctrl-C ends it quietly with status 130, while it loads too."""

import atexit
import contextlib
import os
import sys


def main() -> None:
    """Load and run the command line, then end the process at once: taking torch's modules apart takes a second or two."""
    status = 0
    try:
        from .faces.cli import app

        app(prog_name="vramlab")
    except SystemExit as end:
        status = int(end.code or 0)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        status = 130
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
