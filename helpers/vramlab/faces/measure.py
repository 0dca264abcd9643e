"""`measure` as `vramlab` offers it: a CPU is not asked for more memory than `predict` says is there."""

import functools
from typing import Any

from ..formulas.model_states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from ..formulas.predict import predict
from ..measurement.measure import measure as _measure
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, needing
from ..report.report import Report


@needing("measure")
@functools.wraps(_measure)
def measure(recipe: Recipe | Any, *args: Any, **options: Any) -> Report:
    return _measure(recipe, *args, **{"estimate": peak_bytes, **options})


def peak_bytes(recipe: Recipe) -> int:
    """The predicted peak, or what stays where predict refuses; a process alone needs no less than any rank does."""
    try:
        return predict(recipe).peak.total
    except RecipeError:
        if recipe.sharding is None:
            return parameter_bytes(recipe) + gradient_bytes(recipe) + optimizer_state_bytes(recipe)
        return peak_bytes(recipe.replace(sharding=None))
