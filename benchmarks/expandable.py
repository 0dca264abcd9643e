"""The least memory that holds a training step, with default segments and with expandable ones.

    python benchmarks/expandable.py [EVERY]

It needs no GPU: recipes of published runs and of those on the stand-in for a GPU are simulated,
some 20 minutes of one core for all of them, and their requests run through the models of both
allocators (`hardware/allocator.py`, `vramlab_course/expandable.py`, after PyTorch's source) with
less and less memory. No published run says that it had expandable segments. `formulas/reserved.py`
has the result as PAGES and MOST_PAGES.
"""

import json
import statistics
import sys
from pathlib import Path

from vramlab import MiB, Recipe
from vramlab.hardware.allocator import Allocator, AllocatorError
from vramlab.hardware.gpu import find_gpu
from vramlab.simulation.simulate import trace
from vramlab_course import published
from vramlab_course.expandable import ExpandableAllocator

ROOT = Path(__file__).parent.parent
CARDS = {"h200": "H200", "rtx-3090": "RTX 3090", "t4": "T4"}
STEP = 16 * MiB  # to which the least memory is found


def runs() -> list[tuple[Recipe, str]]:
    """Recipe and card of each run, every one once."""
    pairs = [(run.recipe, run.gpu) for run in published.runs()]
    for name, card in CARDS.items():
        stand_in = json.loads((ROOT / "tests" / "stand_in" / f"{name}.json").read_text())["runs"]
        pairs += [(Recipe(**run["recipe"]), card) for run in stand_in]
    # Several runs of one recipe on one card have one log of requests.
    return list({(recipe.key, card): (recipe, card) for recipe, card in pairs}.values())


def run(log: list, allocator: Allocator) -> Allocator:
    """Run `log` through `allocator`. Raises AllocatorError beyond its limit."""
    blocks = {}
    for size, storage, _ in log:
        if size > 0:
            blocks[storage] = allocator.malloc(size, storage.stream)
        else:
            allocator.free(blocks.pop(storage))
    return allocator


def least(log: list, kind: type) -> tuple[int, int]:
    """(bytes allocated at the peak, least limit in which `log` runs)."""
    # Without a limit, which says between which sizes to search.
    free = run(log, kind())
    low = free.peak_allocated
    high = free.peak_reserved
    # A search by halves: `high` always ran, and `low` is the peak or failed.
    while high - low > STEP:
        middle = (low + high) // 2
        try:
            run(log, kind(limit=middle))
            high = middle
        except AllocatorError:
            low = middle
    return free.peak_allocated, high


def main(every: int = 1) -> None:
    beyond = {"default": [], "expandable": []}
    # One trace for both allocators: what is asked for does not depend on who gives it.
    for recipe, card in runs()[::every]:
        log = trace(recipe, "cuda", find_gpu(card)).log
        for name, kind in (("default", Allocator), ("expandable", ExpandableAllocator)):
            allocated, limit = least(log, kind)
            beyond[name].append((limit - allocated, limit / allocated))
    for name, rows in beyond.items():
        sizes, shares = zip(*rows, strict=True)
        print(
            f"{name}: {len(rows)} runs, beyond the peak: median "
            f"{statistics.median(sizes) / MiB:.0f} MiB, "
            f"at most {max(sizes) / MiB:.0f} MiB; {statistics.median(shares) - 1:.1%}, at most "
            f"{max(shares) - 1:.1%}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
