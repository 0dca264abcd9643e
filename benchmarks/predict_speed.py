"""How long predict takes.

    python benchmarks/predict_speed.py

Milliseconds of processor time a recipe, over the grid on which the tests hold predict against
simulate:

    first    the first time in this process: the model's weights are listed too
    sweep    the model is known and the recipe is not, as at each point of a sweep over batches
    again    only what activations do not depend on (optimizer, accumulation, sharding) is new

and what one simulate takes on some of the same recipes, as a multiple of their sweep.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vramlab import predict, simulate
from vramlab.formulas.account import cached_account

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from predict_grid import grid

REPEATS = 5
SIMULATED = 6


def milliseconds(
    call: Callable[[], object], repeats: int = REPEATS, before: Callable[[], object] = int
) -> float:
    """The least of `repeats` calls; `before` runs before each and is not timed."""
    took = []
    for _ in range(repeats):
        before()
        start = time.process_time()
        call()
        took.append(1e3 * (time.process_time() - start))
    return min(took)


def main() -> None:
    # What is forgotten is the account of the layers; the list of the model's weights stays.
    recipes = grid()
    forget = cached_account.cache_clear
    found = {
        "first": [milliseconds(lambda r=recipe: predict(r), 1) for recipe in recipes],
        "sweep": [milliseconds(lambda r=recipe: predict(r), before=forget) for recipe in recipes],
        "again": [milliseconds(lambda r=recipe: predict(r)) for recipe in recipes],
    }
    print(
        f"{len(recipes)} recipes, milliseconds of processor time; first is one call, the others "
        f"the least of {REPEATS}"
    )
    for name, took in found.items():
        worst, slowest = max(zip(took, map(str, recipes), strict=True))
        print(
            f"{name}: mean {statistics.mean(took):.2f}, median {statistics.median(took):.2f}, "
            f"worst {worst:.2f}: {slowest}"
        )
    simulate(recipes[0])  # loads torch and transformers
    # Evenly through the grid, since one simulation takes as long as hundreds of predictions.
    some = range(0, len(recipes), len(recipes) // SIMULATED)
    ratios = [milliseconds(lambda r=recipes[i]: simulate(r), 1) / found["sweep"][i] for i in some]
    print(
        f"simulate takes {statistics.median(ratios):,.0f} times as long (median of {len(ratios)} "
        f"recipes)"
    )


if __name__ == "__main__":
    main()
