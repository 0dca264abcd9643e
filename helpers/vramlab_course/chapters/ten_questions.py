"""The ten questions: the run that each asks about, and peaks as a table."""

import json

from vramlab import GiB, Recipe, predict
from vramlab.base.data import data_path
from vramlab.report.report import text_table


def asked(question: int) -> Recipe:
    """Print and return a question's recipe, of `data/ten_questions.json`."""
    recipes = json.loads(data_path("ten_questions.json").read_text("utf-8"))
    recipe = Recipe(**recipes[str(question)])
    print(recipe)
    return recipe


def peak(recipe: Recipe) -> float:
    """A recipe's peak in GiB, which `predict` adds up from formulas."""
    return predict(recipe).peak.total / GiB


def peaks(recipes: dict[str, Recipe]) -> str:
    """A table of each recipe's peak."""
    rows = [(name, peak(recipe)) for name, recipe in recipes.items()]
    return text_table([("predicted", "peak, GiB"), *rows])
