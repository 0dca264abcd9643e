"""The ten questions: the run that each asks about, a toy that leaks, and tables."""

from vramlab import GiB, MiB, Recipe, predict, watch
from vramlab.report.report import text_table

from vramlab_course.published import json_of


def asked(question: int) -> Recipe:
    """Print and return a question's recipe, of `data/ten_questions.json`."""
    recipe = Recipe(**json_of("ten_questions")[str(question)])
    print(recipe)
    return recipe


def peak(recipe: Recipe) -> float:
    """A recipe's peak in GiB, which `predict` adds up from formulas."""
    return predict(recipe).peak.total / GiB


def peaks(recipes: dict[str, Recipe]) -> str:
    """A table of each recipe's peak."""
    rows = [(name, peak(recipe)) for name, recipe in recipes.items()]
    return text_table([("predicted", "peak, GiB"), *rows])


def left_after(steps, keep):
    """MiB left after steps of a toy that keep something of each."""
    from torch import nn, ones

    model = nn.Linear(64, 8000)
    kept = []
    with watch(model) as watched:
        for _ in range(steps):
            logits = model(ones(256, 64))
            loss = logits.logsumexp(-1).mean()
            loss.backward()
            model.zero_grad()
            kept.append(keep(logits, loss, model(ones(256, 64)).logsumexp(-1).mean()))
    return watched.report().phases["between_steps"].end.total / MiB
