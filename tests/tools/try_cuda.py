"""Run notebooks as if this machine had a GPU.

It is PyTorch's CUDA build on the stand-in for NVIDIA's libraries.

What is looked for is code that only runs where there is a GPU. No kernel computes anything
(`data/stand_in/README.md`), so outputs are neither compared nor kept.
"""

import argparse
import os
import sys
from pathlib import Path

import execute
import settings
from rich.console import Console
from vramlab.base.errors import VramLabError
from vramlab.hardware.gpu import find_gpu
from vramlab.measurement import stand_in

SITE = Path(__file__).with_name("stand_in_site")  # its `sitecustomize.py` runs in each process
CARDS = {"T4": 1, "RTX 4090": 1, "H100": 2}  # and how many of them


def surroundings(card: str) -> dict[str, str]:
    """What makes the stand-in that card, for the processes started from here.

    There are as many of it as CARDS says, one if it says nothing.
    """
    variables = stand_in.variables(find_gpu(card), CARDS.get(card, 1))
    libraries = stand_in.libraries()
    paths = [str(SITE), os.environ.get("PYTHONPATH", "")]
    own = {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_LIBCUDA_PATH": str(libraries[0].parent),
    }
    return own | variables


def without_records() -> list[Path]:
    """All notebooks but the one that records: what the stand-in says is no record."""
    return [path for path in settings.all_notebooks() if path.stem != "record_on_your_gpu"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "notebooks", nargs="*", type=settings.notebook_path, help="all when none is named"
    )
    parser.add_argument(
        "--card", action="append", help=f"may be given more than once; else {', '.join(CARDS)}"
    )
    given = parser.parse_args()
    settings.apply(deterministic=True)
    wrong = []
    for card in given.card or CARDS:
        try:
            os.environ.update(surroundings(card))
        except VramLabError as error:  # no such card, or a part of the stand-in is missing
            sys.exit(str(error))
        Console().print(card)
        runs = execute.run_all(given.notebooks or without_records(), Console(), lambda run: None)
        wrong += [f"{card}: {line}" for line in execute.failures(runs)]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    execute.exit_with(main)
