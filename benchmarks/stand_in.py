"""simulate and predict against PyTorch's own CUDA allocator on a stand-in for a GPU.

    python benchmarks/stand_in.py [EVERY]

No GPU computed anything: the steps are those of PyTorch's CUDA build, its allocator and its
kernels' host code, and the kernels were left out. With EVERY, one run in so many is simulated, and
all of those with a "row": what came later.
"""

import json
import sys
from pathlib import Path

from error_summary import summary
from vramlab import Recipe, RecipeError, predict, simulate, simulate_evaluation
from vramlab.recipe.evaluation import Evaluation

FOLDER = Path(__file__).parent.parent / "tests" / "stand_in"
CARDS = {
    "h200": "H200",
    "rtx-3090": "RTX 3090",
    "t4": "T4",
    "rtx-4090": "RTX 4090",
    "h100": "H100 SXM",
}
WHAT = ("simulate, asked for", "simulate, allocated", "simulate, reserved", "predict, allocated")


def errors(run: dict, card: str) -> list[float | None]:
    """The errors of simulate and predict, by WHAT.

    None stands for what predict does not know or loading does not say.
    """
    recipe = Recipe(**run["recipe"])
    held = run["allocated"]
    # Those runs only loaded the model, so there is no step to compare.
    if "loading" in run:
        return [None, simulate(recipe, gpu=card).loading.total / held - 1, None, None]
    if "evaluation" in run:
        simulated = simulate_evaluation(recipe, Evaluation(**run["evaluation"]), gpu=card)
        predicted = None
    else:
        simulated = simulate(recipe, gpu=card)
        try:
            predicted = predict(recipe, gpu=card).peak.total / held - 1
        except RecipeError:
            predicted = None
    said = simulated.requested, simulated.allocated, simulated.reserved.value
    truth = run["requested"], held, run["reserved"]
    # 0 or None where a simulation does not say the figure.
    return [*(a and a / b - 1 for a, b in zip(said, truth, strict=True)), predicted]


def main(every: int = 1) -> None:
    groups: dict[str, list] = {}
    for name, card in CARDS.items():
        found = json.loads((FOLDER / f"{name}.json").read_text())
        print(
            f"{card}, torch {found['torch']}, transformers {found['transformers']}, {found['date']}"
        )
        # Those that died have no peak.
        runs = [run for run in found["runs"] if run["allocated"]]
        for run in [run for run in runs if "row" not in run][::every] + [
            run for run in runs if "row" in run
        ]:
            # What came later has a name of its own, so that earlier figures stay comparable.
            group = groups.setdefault(run.get("row", card), [])
            group.append((errors(run, card), f"{card}, {Recipe(**run['recipe'])}"))
    for group, rows in groups.items():
        print(group)
        for i, what in enumerate(WHAT):
            if not (
                found := [(error[i], recipe) for error, recipe in rows if error[i] is not None]
            ):
                continue
            print(f"  {what}: {summary(found)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
