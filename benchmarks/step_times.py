"""The estimate of a step's seconds against the step times that others published, and the fit of its three constants.

    python benchmarks/step_times.py

35 runs on a T4 (those of `data/published_runs.json` that state seconds and ran as `predict` describes them) give
U, the share of the peak that matrix products reach, V, that of the bandwidth, and τ, the seconds a kernel costs: least
squares of the logarithm of estimated over published seconds. To see what the fit is worth on a model that it has not
seen, it is repeated without each model in turn.
"""

import math
from collections.abc import Sequence

import numpy as np
from vramlab import find_gpu
from vramlab.planning.step_time import BANDWIDTH, LAUNCH, TRANSFERS, UTILISATION, operations, walk
from vramlab.planning.step_traffic import optimizer_traffic
from vramlab_course.published import Run, runs


def chosen() -> list[Run]:
    """The published runs that say their seconds and ran plainly."""
    return [run for run in runs() if run.seconds and not run.as_run]


def features(run: Run) -> tuple[float, float, float]:
    """Seconds at the whole peak and at the whole bandwidth, and kernels."""
    card, recipe = find_gpu(run.gpu), run.recipe
    walked = walk(recipe, card.chip)
    computing = sum(n / card.flops(form) for form, n in operations(recipe, walked).items())
    return computing, (TRANSFERS * walked.written + optimizer_traffic(recipe)) / card.bandwidth, walked.kernels


def fit(runs: Sequence[Run]) -> tuple[float, float, float]:
    """(U, V, τ), by Gauss and Newton's method on the logarithm of the ratio."""
    x = np.array([features(run) for run in runs])
    published = np.log([run.seconds for run in runs])
    rates = np.log([1 / UTILISATION, 1 / BANDWIDTH, LAUNCH])
    for _ in range(50):
        parts = x * np.exp(rates)
        total = parts.sum(axis=1)
        rates += np.linalg.lstsq(parts / total[:, None], published - np.log(total), rcond=None)[0]
    u, v, launch = np.exp(rates)
    return 1 / u, 1 / v, launch


def ratios(runs: Sequence[Run], constants: tuple[float, float, float]) -> list[float]:
    """Published over estimated seconds."""
    u, v, launch = constants
    return [run.seconds / (a / u + b / v + c * launch) for run in runs for a, b, c in [features(run)]]


def main() -> None:
    found = chosen()
    constants = fit(found)
    for label, (u, v, launch) in (("fitted", constants), ("in use", (UTILISATION, BANDWIDTH, LAUNCH))):
        print(f"{label}: U = {u:.3f}, V = {v:.3f}, τ = {launch * 1e6:.2f} µs")
    for label, errors in (("fitted", ratios(found, constants)), ("model held out", held_out(found))):
        off = math.sqrt(sum(math.log(r) ** 2 for r in errors) / len(errors))
        spread = f"published over estimated {min(errors):.2f} to {max(errors):.2f}"
        print(f"{label}: {len(errors)} runs, root mean square {off:.1%}, {spread}")


def held_out(found: Sequence[Run]) -> list[float]:
    """`ratios` of each model's runs with the constants of all the others'."""
    errors = []
    for name in sorted({run.recipe.name for run in found}):
        rest = fit([run for run in found if run.recipe.name != name])
        errors += ratios([run for run in found if run.recipe.name == name], rest)
    return errors


if __name__ == "__main__":
    main()
