"""What the command line and the calculator share: a recipe from flat options, and whether a report fits a card."""

from collections.abc import Mapping
from typing import Any

from ..hardware.gpu import Gpu
from ..recipe.knobs import Knob, options
from ..recipe.options import STAGES
from ..recipe.recipe import Recipe
from ..report.report import Interval, Report

# Option to the field of `Recipe` or of its part, ("lora", "r"), and what the recipe says of it.
OPTIONS: dict[str, tuple[tuple[str, ...], Knob]] = {knob.option: (path, knob) for path, knob in options(Recipe)}


def recipe_of(model: str, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of `given` options; those that are None or False keep their defaults. Raises RecipeError."""
    fields: dict[str, Any] = {}
    for option, value in given.items():
        *part, name = OPTIONS[option][0]
        if name == "target_modules" and value not in (None, "all-linear"):
            value = tuple(word.strip() for word in value.split(",") if word.strip()) or None
        if value is not None and value is not False:
            (fields.setdefault(part[0], {}) if part else fields)[name] = value
    sharding = fields.get("sharding", {})
    if 3 not in STAGES.get(sharding.get("engine"), (3,)):  # the default stage is none of this engine's
        sharding.setdefault("stage", 0)
    return Recipe(model, **fields)


def fits_card(report: Report, card: Gpu) -> tuple[bool | None, str]:
    """Return whether the process of `report` fits, None where the card lies within the interval; and in words."""
    needs = report.process
    low, high = (needs.low, needs.high) if isinstance(needs, Interval) else (needs, needs)
    return (
        (True, "fits") if high <= card.total else (False, "does not fit") if low > card.total else (None, "may not fit")
    )
