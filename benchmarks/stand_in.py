"""simulate and predict against PyTorch's own CUDA allocator, run on a stand-in for a GPU (`data/stand_in/`).

    python benchmarks/stand_in.py [EVERY]

No GPU computed anything: the steps are those of PyTorch's CUDA build, its allocator and its kernels' host code, and the
kernels were left out. With EVERY only each so-manyth run is simulated.
"""

import json
import statistics
import sys
from pathlib import Path

from vramlab import Recipe, predict, simulate

FOLDER = Path(__file__).parent.parent / "tests" / "stand_in"
CARDS = {"h200": "H200", "rtx-3090": "RTX 3090", "t4": "T4"}


def main(every: int = 1) -> None:
    for name, card in CARDS.items():
        found = json.loads((FOLDER / f"{name}.json").read_text())
        errors = {
            "simulate, asked for": [],
            "simulate, allocated": [],
            "predict, allocated": [],
            "simulate, reserved": [],
        }
        for run in found["runs"][::every]:
            recipe = Recipe(**run["recipe"])
            simulated, predicted = simulate(recipe, gpu=card), predict(recipe, gpu=card)
            pairs = zip(
                errors.values(),
                (simulated.requested, simulated.allocated, predicted.peak.total, simulated.reserved.value),
                (run["requested"], run["allocated"], run["allocated"], run["reserved"]),
                strict=True,
            )
            for all_of, said, held in pairs:
                all_of.append((said / held - 1, str(recipe)))
        print(f"{card}, torch {found['torch']}, transformers {found['transformers']}, {found['date']}")
        for what, all_of in errors.items():
            sizes = [abs(error) for error, _ in all_of]
            error, worst = max(all_of, key=lambda row: abs(row[0]))
            print(
                f"  {what}: {len(sizes)} runs, mean {statistics.mean(sizes):.3%}, median {statistics.median(sizes):.4%}, "
                f"{sum(size <= 0.01 for size in sizes) / len(sizes):.1%} within 1 %, worst {error:+.2%} ({worst})"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
