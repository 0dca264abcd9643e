"""Run notebooks as if this machine had a GPU: PyTorch's CUDA build on the stand-in for NVIDIA's libraries.

What is looked for is code that only runs where there is a GPU. No kernel computes anything (`data/stand_in/README.md`), so
outputs are neither compared nor kept.
"""

import argparse
import os
import sys
from pathlib import Path

import execute
import settings
from rich.console import Console
from vramlab.hardware.gpu import Gpu, find_gpu
from vramlab.measurement import stand_in

CARDS = {"T4": 1, "RTX 4090": 1, "H100": 2}  # and how many of them


def surroundings(card: Gpu, count: int, libraries: list[Path]) -> dict[str, str]:
    """What makes the stand-in `count` such cards, for the processes started from here."""
    return {
        "STAND_IN_NAME": card.name,
        "STAND_IN_CAPABILITY": "".join(map(str, card.compute_capability)),
        "STAND_IN_MULTIPROCESSORS": str(card.multiprocessors),
        "STAND_IN_BYTES": str(card.total),
        "STAND_IN_CONTEXT": str(card.context_interval.value),
        "STAND_IN_COUNT": str(count),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "TRITON_LIBCUDA_PATH": str(libraries[0].parent),
    }


def without_records() -> list[Path]:
    """All notebooks but the one that records: what the stand-in says is no record."""
    return [path for path in settings.all_notebooks() if path.stem != "record_on_your_gpu"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=settings.notebook_path, help="all when none is named")
    parser.add_argument("--card", action="append", help=f"may be given more than once; else {', '.join(CARDS)}")
    given = parser.parse_args()
    settings.apply(deterministic=True)
    libraries = stand_in.build(settings.ROOT / "build" / "stand_in")
    wrong = []
    for card in given.card or CARDS:
        os.environ.update(surroundings(find_gpu(card), CARDS.get(card, 1), libraries))
        Console().print(card)
        runs = execute.run_all(given.notebooks or without_records(), Console(), lambda run: None)
        wrong += [f"{card}: {line}" for line in execute.failures(runs)]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    execute.exit_with(main)
