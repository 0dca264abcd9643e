"""What the words of `explain` and `diff` say: a recipe, or a report."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from ..base.errors import RecipeError
from ..recipe import hub_names
from ..recipe.argument_classes import DECLARED
from ..recipe.configuration import read_json_file
from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe
from ..report.report import Report
from . import configurations, script
from .configurations import (
    is_configuration,
    loaded_otherwise,
    read_configuration,
    recipe_in,
)
from .recipe_options import OPTIONS, recipe_of, recipe_of_arguments
from .script import recipe_of_script

DIFFERING = (
    "A recipe's or report's JSON file, or in quotes what predict takes: 'gpt2 --batch-size 8'."
)
ADAPTERS = ("--lora", "--peft")  # how the options of adapters begin
EXPLAINED = (
    "An out-of-memory message (its words, a file, or -) or a memory snapshot's .pickle; "
    "then or alone MODEL "
    "with options, the JSON file of a recipe or of a TrainingArguments, the YAML of axolotl, "
    "LLaMA-Factory, TRL or ms-swift, or the script that trains."
)


def words_of(text: str) -> list[str]:
    """Return the words of one argument of `diff`.

    Raises RecipeError where a quote in it has no end.
    """
    try:
        # A path may hold blanks, which a shell's rules would split at.
        return [text] if os.path.isfile(text) else shlex.split(text)
    except ValueError as error:
        raise RecipeError(
            "recipe",
            text,
            f"it must be words as a shell takes them ({error})",
        ) from None


def sets_segments(what: str) -> bool:
    """Tell whether a script or a program's YAML sets its allocator to expandable segments."""
    return script.sets_expandable_segments(what) or configurations.sets_expandable_segments(what)


def said(
    words: list[str],
    options: Callable[[list[str]], dict[str, Any]],
) -> tuple[Recipe | Report, list[str]]:
    """Return what words say, and notes on what of it is left out.

    The JSON file of a report or a recipe, or MODEL and options as of `predict`, among them the JSON
    file of a TrainingArguments or a Python script, which may name the model. `options` reads those
    of `predict`.
    """
    # A file alone may be a report or a whole recipe; with options it can only be arguments.
    if len(words) == 1 and words[0].endswith(".json") and os.path.isfile(words[0]):
        content = _object(words[0])
        if "phases" in content:
            return Report.from_dict(content), []
        found = recipe_in(words[0])
        if found:
            fields, note = found
            return rebuild(Recipe, "recipe", fields), [note] if note else []
    if "--quantization" in words and not any(each.startswith(ADAPTERS) for each in words):
        # No recipe trains quantized weights by themselves, and a message may come before adapters.
        recipe, notes = _recipe_said([*words, "--lora-r", "16"], options)
        return recipe, [*notes, "--lora-r 16 taken: quantized weights are not trained"]
    return _recipe_said(words, options)


def _recipe_said(
    words: list[str],
    options: Callable[[list[str]], dict[str, Any]],
) -> tuple[Recipe, list[str]]:
    """Return the recipe of MODEL and options, and notes, as `said` does."""
    rest = list(words)
    script = None
    arguments = None
    for word in words:
        if word.endswith(".py"):
            script = Path(word)
            rest.remove(word)
        # A model's config.json stays where it is, as MODEL.
        elif word.endswith(".json") and os.path.isfile(word):
            found = _object(word)
            if "model_type" not in found and DECLARED & found.keys():
                rest.remove(word)
                arguments = found
    # The options' reader needs a MODEL in front; an empty one leaves it to the script.
    if (script or arguments) and (not rest or rest[0].startswith("-")):
        rest.insert(0, "")
    given = _given(rest, options)
    # Before the recipe is made, which reads the model's shape.
    if given["download"]:
        hub_names.download(given["model"])
    known = {name: given[name] for name in OPTIONS}
    if script:
        return recipe_of_script(script, given["model"], known)
    if is_configuration(given["model"]):
        return read_configuration(given["model"], known)
    if arguments is None:
        recipe = recipe_of(given["model"], known)
        notes = [recipe.shape.shares] if recipe.shape.shares else []
        # of a bare MODEL a message may say how it was loaded
        return recipe, notes + (list(loaded_otherwise(recipe)) if len(words) > 1 else [])
    recipe, foreign = recipe_of_arguments(given["model"], known, arguments)
    named = (
        [f"without {', '.join(foreign)}: the arguments have no field of that name"]
        if foreign
        else []
    )
    return recipe, named


def _given(
    rest: list[str],
    options: Callable[[list[str]], dict[str, Any]],
) -> dict[str, Any]:
    """Return what `options` reads. Raises RecipeError where there is no MODEL."""
    try:
        return options(rest)
    except typer.BadParameter as error:
        if error.param is None or error.param.name != "model":
            raise
        raise RecipeError("model", "", "name one before its options") from None


def _object(path: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises RecipeError."""
    content = read_json_file("file", path)
    if not isinstance(content, dict):
        raise RecipeError(
            "file",
            path,
            "it must hold a JSON object: a report, a recipe or a TrainingArguments",
        )
    return content
