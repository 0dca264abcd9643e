"""Which recipes the course asks for: what the code of its notebooks measures or looks up, and lists of recipes."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from .apart import Apart
from .data import data_folder, data_path
from .errors import RecipeError, RecordError
from .recipe import Recipe
from .records import WANTED

COLLECTOR = [sys.executable, "-P", "-m", "vramlab.collector"]
COLLECT_SECONDS = 900  # for one notebook


def course_paths() -> list[Path]:
    """The course's list and, in a checkout, its notebooks."""
    notebooks = data_folder().parent / "notebooks"
    found = [*sorted(notebooks.glob("[0-9]*.ipynb")), *sorted((notebooks / "solutions").glob("*.ipynb"))]
    return [path for path in (Path(data_path("wanted.json")), *found) if path.exists()]


def wanted(paths: Iterable[Path]) -> list[Recipe]:
    """The recipes that notebooks and lists ask for, each once. Raises RecordError for what cannot be read."""
    found: dict[str, Recipe] = {}
    for path in paths:
        for recipe in collect(path) if path.suffix == ".ipynb" else read_list(path):
            found.setdefault(recipe.key, recipe)
    return list(found.values())


def read_list(path: Path) -> list[Recipe]:
    """The recipes of a JSON list of objects with the fields of `Recipe`; a list as a field takes each of its values.

    `{"model": "gpt2", "batch_size": [4, 8], "optim": ["sgd", "adafactor"]}` stands for four recipes.

    Raises:
        RecordError: it is no such list; the message names the entry.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise ValueError("it is not a list")
    except (OSError, ValueError) as error:
        raise RecordError(f"{path.name} is no list of recipes: {error}.") from error
    recipes = []
    for number, entry in enumerate(entries, 1):
        try:
            recipes += [Recipe(**fields) for fields in _combinations(entry)]
        except (RecipeError, TypeError, AttributeError) as error:
            raise RecordError(f"{path.name}, entry {number}: {error}") from error
    return recipes


def _combinations(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = [value if isinstance(value, list) else [value] for value in entry.values()]
    return (dict(zip(entry, chosen, strict=True)) for chosen in product(*choices))


def collect(notebook: Path) -> list[Recipe]:
    """The recipes that a notebook measures or looks up, in its order: its code is run apart, where nothing is measured.

    Raises:
        RecordError: there is no such notebook, or its code does not come to an end.
    """
    if not notebook.is_file():
        raise RecordError(f"there is no notebook {notebook}.")
    with tempfile.TemporaryDirectory(prefix="vramlab-") as folder:
        found = Path(folder, "wanted")
        surroundings = {WANTED: str(found), "MPLBACKEND": "Agg"}
        try:
            with Apart([*COLLECTOR, notebook.name], cwd=notebook.resolve().parent, **surroundings) as child:
                code, words = child.wait(COLLECT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RecordError(f"the code of {notebook.name} ran for over {COLLECT_SECONDS / 60:.0f} minutes.") from None
        if code:
            last = words[-1] if words else "nothing was printed"
            raise RecordError(f"the code of {notebook.name} could not be run to its end (exit status {code}): {last}.")
        lines = found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    return [Recipe.from_json(line) for line in dict.fromkeys(lines)]
