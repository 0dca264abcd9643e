"""`measure` and `record` as `vramlab` offers them.

With the other two witnesses, which `measurement` does not know.
"""

import functools
from typing import Any

from ..base.errors import RecipeError, needing
from ..formulas.model_states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from ..formulas.predict import predict
from ..hardware.gpu import Gpu, seen_gpu
from ..hardware.overhead import rules_of
from ..measurement.card import CardRun
from ..measurement.card import run_card as _run_card
from ..measurement.measure import measure as _measure
from ..measurement.record import Outcome
from ..measurement.record import record as _record
from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe
from ..report.report import Report, format_bytes


@needing("measure")
@functools.wraps(_measure)
def measure(recipe: Recipe | Any, *args: Any, **options: Any) -> Report:
    # An `estimate` that the caller gives counts.
    return _measure(recipe, *args, **{"estimate": peak_bytes, **options})


@needing("record")
@functools.wraps(_record)
def record(*args: Any, **options: Any) -> Outcome:
    """As `measurement.record.record`, with predict's peaks and what simulate says beside each."""
    return _record(*args, **{"estimate": peak_bytes, "beside": simulated_beside, **options})


@needing("card")
@functools.wraps(_run_card)
def run_card(*args: Any, compare: bool = False, **options: Any) -> CardRun:
    """As `measurement.card.run_card`.

    `compare` prints beside each report what simulate says, which takes some seconds.
    """
    beside = simulated_beside if compare else None
    return _run_card(*args, **{"estimate": peak_bytes, "beside": beside, **options})


def peak_bytes(recipe: Recipe) -> int:
    """Return the predicted peak.

    Where predict refuses, parameters, gradients and states of one process alone.
    """
    try:
        return predict(recipe).peak.total
    except RecipeError:
        # States alone are a lower bound, enough to refuse what could never run here.
        if recipe.sharding is None:
            return parameter_bytes(recipe) + gradient_bytes(recipe) + optimizer_state_bytes(recipe)
        return peak_bytes(recipe.replace(sharding=None))


def card_of(environment: dict[str, Any]) -> Gpu | None:
    """Return the card on which a report was measured, by what it says of itself; None on a CPU."""
    if not environment.get("gpu"):
        return None
    major, minor = environment["compute_capability"].split(".")
    return seen_gpu(
        environment["gpu"],
        environment["total_memory"],
        (int(major), int(minor)),
        environment["multiprocessors"],
    )


def simulated_beside(report: Report) -> str:
    """Say what `simulate` says of a measured report: ", simulated 5.120 GiB (+0.02 %)"."""
    from ..simulation.simulate import simulate

    recipe = rebuild(Recipe, "recipe", report.recipe or {})
    card = card_of(report.environment)
    try:
        # A record of an older torch is held against the workspaces that its version had.
        with rules_of(report.environment["torch"]):
            said = simulate(recipe, report.target, card).allocated
    except RecipeError:
        return ", not simulated"
    if said is None or not report.allocated:
        return ""
    return f", simulated {format_bytes(said)} ({said / report.allocated - 1:+.2%})"
