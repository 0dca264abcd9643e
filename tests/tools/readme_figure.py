"""Draw the stored figures: the README's (one step byte by byte, its peaks by every witness, simulated against published
peaks) and the cheat sheet that ends the course.

Run `make figure` after a change to the predictor or after new records; it picks the records up by itself.
"""

from pathlib import Path

from vramlab import Recipe, RecordError, find_record, plot, predict, simulate
from vramlab_course.chapters import cheat_sheet
from vramlab_course.published import runs, scatter_error

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "figures"
RECIPE = Recipe("polyglot-ko-1.3b", batch_size=16, seq_len=256, precision="fp16-true")


def witnesses(recipe: Recipe) -> list:
    """Predicted, simulated and, where there is one, recorded."""
    reports = [predict(recipe), simulate(recipe)]
    try:
        return [*reports, find_record(recipe)]
    except RecordError:
        return reports


def published() -> dict[str, list[tuple[int, int]]]:
    """GPU to (simulated, measured) peaks in bytes of the runs that others published."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for run in runs():
        simulated = simulate(run.recipe, gpu=run.gpu, as_run=run.as_run)
        pairs.setdefault(run.gpu, []).append((simulated.peak.total, run.allocated))
    return pairs


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    plot.timeline(simulate(RECIPE)).savefig(FOLDER / "timeline.png", dpi=110, bbox_inches="tight")
    batches = [(f"batch {size}", witnesses(RECIPE.replace(batch_size=size))) for size in (4, 8, 16)]
    plot.compare_many(batches).savefig(FOLDER / "peaks.png", dpi=110, bbox_inches="tight")
    look = dict(band=0.01, title="95 published runs, 42 of them simulated with as_run", names=("simulated", "measured"))
    scatter_error(published(), **look).savefig(FOLDER / "published.png", dpi=110, bbox_inches="tight")
    sheet = cheat_sheet.draw()
    sheet.savefig(FOLDER / "cheat_sheet.png", dpi=130)
    sheet.savefig(FOLDER / "cheat_sheet.pdf", metadata={"CreationDate": None})
