"""Draw the README's figures: one step of polyglot-ko-1.3b byte by byte, and its peaks by every witness.

Run `make figure` after a change to the predictor or after new records; it picks the records up by itself.
"""

from pathlib import Path

from vramlab import Recipe, RecordError, find_record, plot, predict, simulate

FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "figures"
RECIPE = Recipe("polyglot-ko-1.3b", batch_size=16, seq_len=256, precision="fp16-true")


def witnesses(recipe: Recipe) -> list:
    """Predicted, simulated and, where there is one, recorded."""
    reports = [predict(recipe), simulate(recipe)]
    try:
        return [*reports, find_record(recipe)]
    except RecordError:
        return reports


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    plot.timeline(simulate(RECIPE)).savefig(FOLDER / "timeline.png", dpi=110, bbox_inches="tight")
    batches = [(f"batch {size}", witnesses(RECIPE.replace(batch_size=size))) for size in (4, 8, 16)]
    plot.compare_many(batches).savefig(FOLDER / "peaks.png", dpi=110, bbox_inches="tight")
