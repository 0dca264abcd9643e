"""`measure` as `vramlab` offers it: with the predicted peak, so that a CPU run that cannot fit is not tried."""

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
    """Return the predicted peak; where predict refuses, parameters, gradients and states of one process alone."""
    try:
        return predict(recipe).peak.total
    except RecipeError:
        if recipe.sharding is None:
            return parameter_bytes(recipe) + gradient_bytes(recipe) + optimizer_state_bytes(recipe)
        return peak_bytes(recipe.replace(sharding=None))
