"""Draw the stored figures: the README's, and the cheat sheet that ends the course.

The README's are one step byte by byte, its peaks by every witness, and simulated against published
peaks.

Run `make figure` after a change to the predictor or after new records, which it picks up by itself;
the published peaks' simulations are those that `benchmarks/published_runs.py --write` stored.
"""

from pathlib import Path

from error_figure import scatter_error
from PIL import Image
from vramlab import Recipe, RecordError, find_record, plot, predict, simulate
from vramlab.interfaces.measure_and_record import card_of
from vramlab.interfaces.plot.splits import shared_title
from vramlab_course.chapters import cheat_sheet
from vramlab_course.published import json_of, runs

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "figures"
RECIPE = Recipe("polyglot-ko-1.3b", batch_size=16, seq_len=256, precision="fp16-true")
SHORT = {"predicted": "pred.", "simulated": "sim.", "recorded": "rec."}


def witnesses(recipe: Recipe) -> list:
    """Predicted, simulated and recorded, for the card of the record; without one the first two."""
    try:
        found = find_record(recipe)
    except RecordError:
        return [predict(recipe), simulate(recipe)]
    card = card_of(found.environment)
    return [predict(recipe, gpu=card), simulate(recipe, gpu=card), found]


def published() -> dict[str, list[tuple[int, int]]]:
    """GPU to (simulated, measured) peaks in bytes of the runs that others published."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for run, found in zip(runs(), json_of("published_results")["runs"], strict=True):
        pairs.setdefault(run.gpu, []).append((found["simulated"], run.allocated))
    return pairs


def save(figure, name: str, dpi: int = 220, bbox_inches: str | None = "tight") -> None:
    """Store the picture at about 2 × the pixels it is shown with.

    It has 256 colours, which take a third of the bytes.
    """
    path = FOLDER / name
    figure.savefig(path, dpi=dpi, bbox_inches=bbox_inches)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True, dpi=(dpi, dpi))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    _, simulated, *_ = witnesses(RECIPE)  # on the card of the record, as in the next figure
    save(plot.timeline(simulated), "timeline.png")
    shown = [report for size in (4, 8, 16) for report in witnesses(RECIPE.replace(batch_size=size))]
    labels = [f"{SHORT[report.source]} at\u00a0{report.recipe['batch_size']}" for report in shown]
    title = "Memory at the peak by category, at batch 4, 8 and 16"
    save(
        plot.bars(labels, shown, "peak, GiB", title=title, subtitle=shared_title(shown)),
        "peaks.png",
    )
    look = dict(
        band=0.01,
        title="95 published runs, 42 of them simulated with as_run",
        names=("simulated", "measured"),
    )
    save(scatter_error(published(), **look), "published.png")
    sheet = cheat_sheet.draw()
    save(sheet, "cheat_sheet.png", dpi=200, bbox_inches=None)
    sheet.savefig(FOLDER / "cheat_sheet.pdf", metadata={"CreationDate": None})
