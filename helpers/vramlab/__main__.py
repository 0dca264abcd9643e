"""The program `vramlab`, also `python -m vramlab`. Ctrl-C ends it quietly with status 130, while it loads too."""

import sys


def main() -> None:
    """Load and run the command line."""
    try:
        from .faces.cli import main

        main()
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
