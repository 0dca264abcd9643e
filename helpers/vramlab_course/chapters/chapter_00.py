"""Chapter 00: a table of what recipes take of a card."""

from collections.abc import Mapping

from vramlab import predict, step_time
from vramlab.hardware.gpu import Gpu
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, text_table


def budget(ways: Mapping[str, Recipe], gpu: Gpu, expandable_segments: bool = True) -> str:
    """Return a table: the GiB of each recipe's process, whether it fits, and seconds a step."""
    rows = [(f"on {gpu.name}", "likely, GiB", "at most", "verdict", "s a step")]
    for name, recipe in ways.items():
        need = predict(recipe, gpu=gpu, expandable_segments=expandable_segments).process
        verdict = need.verdict(gpu.total)
        seconds = "–"
        if verdict != "does not fit":
            step = step_time(recipe, gpu)
            seconds = f"{step.low:.1f} – {step.high:.1f}"
        rows.append((name, need.value / GiB, need.high / GiB, verdict, seconds))
    return text_table(rows, ".1f")
