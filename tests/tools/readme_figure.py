"""Draw the stored figures: the README's, and the cheat sheet that ends the course.

The README's are one step byte by byte, its peaks by every witness, and simulated against published
peaks.

Run `make figure` after a change to the predictor or after new records, which it picks up by itself;
the published peaks' simulations are those that `benchmarks/published_runs.py --write` stored.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from error_figure import scatter_error
from PIL import Image
from vramlab import Recipe, RecordError, find_record, plot, predict, simulate
from vramlab.interfaces.measure_and_record import card_of
from vramlab.interfaces.plot import style
from vramlab.interfaces.plot.splits import shared_title
from vramlab.report.report import GiB, in_unit
from vramlab_course.chapters import cheat_sheet
from vramlab_course.published import results, runs

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
    for run, found in zip(runs(), results()["runs"], strict=True):
        pairs.setdefault(run.gpu, []).append((found["simulated"], run.allocated))
    return pairs


@style.styled()
def scatter_error(
    pairs: Mapping[str, Sequence[tuple[int, int]]],
    band: float = 0.01,
    title: str = "Predicted against measured",
    names: tuple[str, str] = ("predicted", "measured"),
):
    """Return a figure of each pair's first size over its second, and of the error.

    Sizes are in bytes, and the relative error stands below.

    Each name in `pairs` has a marker. `band` is drawn as good enough: 0.01 is ±1 %. `names` label
    the axes.
    """
    sizes = {}
    errors = {}
    every = []
    off = []
    for name, group in pairs.items():
        sizes[name] = [(a / GiB, b / GiB) for a, b in group]
        errors[name] = []
        for predicted, measured in sizes[name]:
            error = predicted / measured - 1
            errors[name].append(error)
            every += [predicted, measured]
            off.append(abs(error))
    within = sum(error <= band for error in off)
    summary = (
        f"{within} of {len(off)} within ±{band:.0%} · median {statistics.median(off):.2%} "
        f"· worst {max(off):.2%}"
    )

    figure, (above, below) = style.start(
        title,
        summary,
        rows=2,
        sharex=True,
        height_ratios=(3, 2),
    )
    ends = [min(every) / 1.3, max(every) * 1.3]
    # In a logarithmic plot a relative error is a band of one width.
    low = [end * (1 - band) for end in ends]
    high = [end * (1 + band) for end in ends]
    above.fill_between(
        ends,
        low,
        high,
        color="#CCCCCC",
        linewidth=0,
        label=f"±{band:.0%}",
    )
    above.plot(ends, ends, color=style.INK, linewidth=0.8)
    below.axhspan(
        -band * 100,
        band * 100,
        color="#CCCCCC",
        linewidth=0,
    )
    below.axhline(0, color=style.INK, linewidth=0.8)
    # The band is to be seen: what is off by more than five of it stands at the edge.
    reach = 100 * min(5 * band, max(band * 1.5, max(off) * 1.2))
    edge = f", cut at {reach:.0f}" if 100 * max(off) > reach else ""
    rows = [("GiB", *names, "error")]
    for (name, group), (colour, marker, _) in zip(
        sizes.items(),
        itertools.cycle(style.LINES),
        strict=False,
    ):
        look = {
            "marker": marker,
            "linestyle": "",
            "color": colour,
            "markersize": 6,
            "alpha": 0.85,
            "gid": "points",
        }
        y, x = zip(*group, strict=True)
        above.plot(x, y, label=name, **look)
        shown = [min(max(100 * error, -reach), reach) for error in errors[name]]
        below.plot(x, shown, **look, clip_on=False)
        together = zip(pairs[name], errors[name], strict=True)
        for i, (pair, error) in enumerate(together, 1):
            rows.append((f"{name}: {i}", *map(in_unit, pair), f"{error:+.2%}"))
    above.set_xscale("log", base=2)
    above.set_yscale("log", base=2)
    for axis in (above.xaxis, above.yaxis):
        axis.set_major_formatter("{x:,.6g}")  # 0.5, 1, 2, 4 and not powers
    above.set(xlim=ends, ylim=ends, ylabel=f"{names[0]}, GiB")
    below.set(ylim=(-reach, reach), xlabel=f"{names[1]}, GiB", ylabel=f"error, %{edge}")
    span = f"{min(every):.3g} to {max(every):.3g} GiB"
    return style.finish(
        figure,
        rows,
        f"Scatter of {names[0]} over {names[1]} sizes, {span}: {summary}.",
    )


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
