"""What the command line and the calculator share: options read from knobs, and whether a report fits a card."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..hardware.gpu import Gpu
from ..recipe.arguments import arguments_class
from ..recipe.knobs import Knob, options
from ..recipe.options import STAGES
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError, needing
from ..report.report import Interval, Report

LENGTHS = ("length", "input_ids")  # `TrainingArguments.length_column_name`, and what the Trainer counts without it

# Option to the field of `Recipe` or of its part, ("lora", "r"), and what the recipe says of it.
Options = dict[str, tuple[tuple[str, ...], Knob]]
OPTIONS: Options = {knob.option: (path, knob) for path, knob in options(Recipe)}


def fields_of(known: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields, those of a part in a dictionary; leave out options that are None, empty, or an unset switch."""
    fields: dict[str, Any] = {}
    for option, value in given.items():
        (*part, name), knob = known[option]
        if name == "target_modules" and value not in (None, "all-linear"):
            value = tuple(word.strip() for word in value.split(",") if word.strip()) or None
        if value is not None and value != [] and (value is not False or knob.default):
            (fields.setdefault(part[0], {}) if part else fields)[name] = value
    return fields


def recipe_of(model: str, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of `given` options. Raises RecipeError."""
    fields = fields_of(OPTIONS, given)
    sharding = fields.get("sharding", {})
    if 3 not in STAGES.get(sharding.get("engine"), (3,)):  # the default stage is none of this engine's
        sharding.setdefault("stage", 0)
    if fields.get("trainer", "transformers") != "transformers" and "quantization" in fields:
        fields["quantization"].setdefault("prepare", False)  # TRL's trainers do not call it
    return Recipe(model, **fields)


def recipe_of_arguments(model: str, given: Mapping[str, Any], values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of `TrainingArguments` that were written as JSON, with `given` options where they are no default.

    Raises RecipeError.
    """
    parts = {
        name for name, (path, _) in OPTIONS.items() if len(path) > 1
    }  # whose options are None where they are not given
    own = {name: n for name, n in given.items() if name in parts or n != OPTIONS[name][1].default}
    fields = fields_of(OPTIONS, own)
    with needing("TrainingArguments"):
        import torch

        kind = arguments_class(SimpleNamespace(trainer=fields.get("trainer", "transformers")))
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    said = {name: value for name, value in values.items() if name in known and value is not None}
    try:
        arguments = kind(**said | {"use_cpu": not torch.accelerator.is_available()})
    except (ValueError, TypeError) as error:
        raise RecipeError("training_arguments", type(error).__name__, f"{kind.__name__} refuses it: {error}") from error
    return Recipe.from_training_arguments(arguments, model, **fields)


def read_lengths(path: Path) -> list[int]:
    """Return the tokens of each sample of a JSONL file: a number, a list of ids, or an object with one of LENGTHS a line.

    Raises RecipeError for a file that does not say them.
    """
    found = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            value = json.loads(line) if line.strip() else None
            if isinstance(value, dict):
                value = next((value[name] for name in LENGTHS if name in value), f"line {number}: {', '.join(value)}")
            found += [] if value is None else [len(value) if isinstance(value, list) else value]
    except (OSError, ValueError) as error:
        raise RecipeError("lengths", str(path), f"it must be a JSONL file ({error})") from error
    if said := next((value for value in found if isinstance(value, str)), None):
        raise RecipeError("lengths", said, "each sample must say its " + " or ".join(LENGTHS))
    return found


def fits_card(report: Report, card: Gpu) -> tuple[bool | None, str]:
    """Return whether the process of `report` fits, None where the card lies within the interval; and in words."""
    needs = report.process
    low, high = (needs.low, needs.high) if isinstance(needs, Interval) else (needs, needs)
    if high <= card.total:
        return True, "fits"
    return (False, "does not fit") if low > card.total else (None, "may not fit")
