"""Lists of recipes to be recorded; `data/wanted.json` is the course's own."""

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from ..recipe.knobs import rebuild
from ..recipe.recipe import Recipe
from ..report.data import data_path
from ..report.errors import RecipeError, RecordError


def course_list() -> Path:
    """Return the course's list: what its notebooks look up, and what is measured for comparison."""
    return data_path("wanted.json")


def wanted(paths: Iterable[Path]) -> list[Recipe]:
    """Return the recipes of some lists, each once. Raises RecordError for what cannot be read."""
    return list(dict.fromkeys(recipe for path in paths for recipe in read_list(path)))


def read_list(path: Path) -> list[Recipe]:
    """Return the recipes of a JSON list of objects with the fields of `Recipe`; a list as a field takes each of its values.

    `{"model": "gpt2", "batch_size": [4, 8], "optim": ["sgd", "adafactor"]}` stands for four recipes.

    Raises RecordError, which names the entry, if it is no such list.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise ValueError("it is not a list")
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"{path.name} is no list of recipes: {why}.") from error
    recipes = []
    for number, entry in enumerate(entries, 1):
        try:
            if not isinstance(entry, dict) or "model" not in entry:
                raise RecipeError("recipe", entry, "it must be an object with a model and the fields of Recipe")
            choices = [value if isinstance(value, list) else [value] for value in entry.values()]
            for chosen in product(*choices):
                recipes.append(rebuild(Recipe, "recipe", dict(zip(entry, chosen, strict=True))))
        except RecipeError as error:
            raise RecordError(f"{path.name}, entry {number}: {error}") from error
    return recipes
