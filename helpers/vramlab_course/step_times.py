"""The fit of `step_time`'s constants, and each model's step times by a fit that has not seen it.

`benchmarks/step_times.py` prints both and says where the runs and the constants are from.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from vramlab import Recipe, find_gpu
from vramlab.planning.step_time import (
    RATES,
    TRANSFERS,
    USUAL,
    attention_operations,
    form_of,
    operations,
    timed_records,
    walk,
)
from vramlab.planning.step_traffic import (
    optimizer_traffic,
    searched_states,
    updating_calls,
    waiting_tensors,
)
from vramlab.recipe.optimizers import MODELLED
from vramlab.recipe.options import REPEATED

from .published import runs

AS_RUN = "repeated keys"  # which is a kernel of the recipe
CARDS = ("T4", "H100 SXM", "H200")
UNLIKE = CARDS[:2]  # each of which stands for a card without runs of its own
OUTSIDE = 20  # one part in so many on either side is left out of an interval
ROUNDS = 60  # of Levenberg and Marquardt's method
DAMPING = 1e-2  # of Levenberg and Marquardt's method
STEP = 1e-5


@dataclass(frozen=True)
class Timed:
    """A run whose step was timed on `card`."""

    card: str
    recipe: Recipe
    seconds: float


@cache
def chosen(card: str) -> tuple[Timed, ...]:
    """The runs on a card that say their seconds and ran plainly."""
    found = []
    for run in runs():
        is_plain = run.as_run in (None, AS_RUN)
        if run.seconds and is_plain and find_gpu(run.gpu).name == card:
            # Runs with repeated keys had a kernel that recipes name themselves.
            kernel = REPEATED if run.as_run else run.recipe.attn_implementation
            recipe = run.recipe.replace(attn_implementation=kernel)
            found.append(Timed(card, recipe, run.seconds))
    for recipe, seconds in timed_records(card):
        found.append(Timed(card, recipe, seconds))
    return tuple(found)


@cache
def features(run: Timed) -> tuple[float, ...]:
    """What the time of a run's step is made of, before the fit.

    Seconds at the whole peak, in fused attention too, and at the whole bandwidth, of the passes and
    of the update; calls of both; tensors waited for; 8-bit states, by the peak of fp32.
    """
    card = find_gpu(run.card)
    recipe = run.recipe
    walked = walk(recipe, card.chip)
    times = recipe.gradient_accumulation_steps
    by_form = operations(recipe, walked)
    computing = times * sum(count / card.flops(form) for form, count in by_form.items())
    fused = 0.0
    if walked.fused:
        fused = times * attention_operations(recipe, walked) / card.flops(form_of(recipe))
    return (
        computing - fused,
        fused,
        times * TRANSFERS * walked.written / card.bandwidth,
        optimizer_traffic(recipe) / card.bandwidth,
        times * walked.calls,
        updating_calls(recipe),
        waiting_tensors(recipe),
        searched_states(recipe) / card.flops("fp32"),
    )


def estimated(x: np.ndarray, constants: Sequence[float]) -> np.ndarray:
    """Seconds by (U, W, V, τ, σ, ρ): the longer of computing and issuing, with what waits."""
    *shares, issue, waiting, searching = constants
    # Three parts that follow one another, each at its share of the peak.
    passes = (x[:, :3] / np.array(shares)).sum(axis=1)
    issuing = x[:, 4] * issue
    update = np.maximum(x[:, 3] / shares[-1], x[:, 5] * issue)
    return np.maximum(passes, issuing) + update + x[:, 6] * waiting + x[:, 7] * searching


def in_use(card: str) -> tuple[float, ...]:
    """The constants that `step_time` has for a card."""
    return RATES.get(card, USUAL)


def fit(found: Sequence[Timed]) -> tuple[float, ...]:
    """(U, W, V, τ, σ, ρ), the first four by `least_squares`, the others by `least_deviations`.

    σ and ρ stay as they are where no pair tells them.
    """
    x = np.array([features(run) for run in found])
    seconds = np.array([run.seconds for run in found])
    *shares, waiting, searching = in_use(found[0].card)
    waits = x[:, 6] > 0
    shares = least_squares(x[~waits], seconds[~waits], shares)
    # What is off without σ and ρ; what a pair shares drops out of its difference.
    off = seconds - estimated(x, (*shares, 0.0, 0.0))
    rows = []
    for place, others in twins(found).items():
        beyond = off[place] - np.mean(off[others])
        rows.append(np.array((*x[place, 6:8], beyond)) / seconds[place])
    return (*shares, *least_deviations(np.array(rows), (waiting, searching)))


def least_squares(
    x: np.ndarray,
    seconds: np.ndarray,
    start: Sequence[float],
) -> tuple[float, ...]:
    """(U, W, V, τ), by Levenberg and Marquardt's method on the logarithm of the ratio."""
    measured = np.log(seconds)

    def off(logarithms: np.ndarray) -> np.ndarray:
        return np.log(estimated(x, (*np.exp(logarithms), 0.0, 0.0))) - measured

    # Logarithms keep all constants positive.
    at = np.log(start)
    damping = DAMPING
    errors = off(at)
    for _ in range(ROUNDS):
        unit = np.eye(len(at))
        # The derivative by each constant, by a small difference.
        slopes = np.stack([(off(at + STEP * one) - errors) / STEP for one in unit], axis=1)
        # The normal equations; damping shortens the step and turns it downhill.
        change = np.linalg.solve(slopes.T @ slopes + damping * unit, -slopes.T @ errors)
        tried = off(at + change)
        # a step that helps is taken, and the next one trusts the slopes more
        if tried @ tried < errors @ errors:
            at = at + change
            errors = tried
            damping /= 3
        else:
            damping *= 4
    return tuple(np.exp(at))


def least_deviations(
    rows: np.ndarray,
    otherwise: tuple[float, float],
) -> tuple[float, float]:
    """(σ, ρ) of the least sum of |tensors × σ + states × ρ − seconds|, of rows of these three.

    Two of thirteen pairs had another load on the host in one run, which squares would follow. The
    least sum is where two rows are met exactly (Boscovich 1757), so each two are tried.
    """
    best = otherwise
    least = np.inf
    for pair in itertools.combinations(rows, 2):
        two = np.array(pair)
        if not two[:, 1].any() or not np.linalg.det(two[:, :2]):
            continue
        found = np.linalg.solve(two[:, :2], two[:, 2])
        total = np.abs(rows[:, :2] @ found - rows[:, 2]).sum()
        if found.min() > 0 and total < least:
            best = tuple(found)
            least = total
    return best


def twins(found: Sequence[Timed]) -> dict[int, list[int]]:
    """Places of runs with bitsandbytes' optimizers, and of those that differ by PyTorch's alone."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(found):
        fields = run.recipe.to_dict()
        # The arguments are the optimizer's own.
        del fields["optim"], fields["optim_args"]
        groups.setdefault(str(fields), []).append(place)
    pairs = {}
    for places in groups.values():
        by_library: dict[str, list[int]] = {}
        for place in places:
            library = MODELLED[found[place].recipe.optim].library
            by_library.setdefault(library, []).append(place)
        plain = by_library.get("torch")
        if plain:
            pairs.update(dict.fromkeys(by_library.get("bitsandbytes", ()), plain))
    return pairs


def ratios(found: Sequence[Timed], constants: Sequence[float]) -> list[float]:
    """Measured over estimated seconds."""
    said = estimated(np.array([features(run) for run in found]), constants)
    return [run.seconds / seconds for run, seconds in zip(found, said, strict=True)]


@cache
def held_out(card: str) -> tuple[tuple[Timed, float], ...]:
    """Each run with measured over estimated seconds.

    The constants are those of all other models' runs on its card.
    """
    found = chosen(card)
    pairs = []
    for name in sorted({run.recipe.name for run in found}):
        rest = fit([run for run in found if run.recipe.name != name])
        own = [run for run in found if run.recipe.name == name]
        pairs += zip(own, ratios(own, rest), strict=True)
    return tuple(pairs)


def spread(found: Sequence[float]) -> tuple[float, float]:
    """(least, most) of all but the outermost twentieth on either side."""
    ordered = sorted(found)
    out = len(found) // OUTSIDE
    return ordered[out], ordered[-1 - out]


def elsewhere() -> list[float]:
    """`ratios` of each of `UNLIKE`'s runs by the constants of the other, as of an unseen card."""
    one, other = UNLIKE
    found = []
    for card, rates in ((one, other), (other, one)):
        found += ratios(chosen(card), in_use(rates))
    return found
