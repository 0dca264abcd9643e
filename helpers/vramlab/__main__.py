"""The program `vramlab`, also `python -m vramlab`. Ctrl-C ends it quietly with status 130, while it loads too."""

import sys


def main() -> None:
    """Load and run the command line."""
    try:
        from .faces.cli import app

        app(prog_name="vramlab")
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
