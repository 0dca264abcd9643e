"""Many recipes at once: predicted against measured, and the error of each."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from ...report.compare import difference
from ...report.report import Report
from . import style
from .splits import check_unit, exact, size_of

BAND = "#CCCCCC"


@style.drawn
def scatter_error(
    pairs: Sequence[tuple] | Mapping[str, Sequence[tuple]],
    band: float = 0.03,
    unit: str = "GiB",
    title: str = "Predicted against measured",
    names: tuple[str, str] = ("predicted", "measured"),
):
    """Each pair's first size over its second, and below it the relative error with a band; returns the figure.

    Args:
        pairs: (predicted, measured), reports or bytes; a mapping from names to such lists has a marker each.
        band: what is drawn as good enough, 0.03 is ±3 %.
        names: what the two of a pair are called on the axes.
    Raises:
        ValueError: no pairs, a pair without figures, or sizes of 0.
    """
    size = check_unit(unit)
    groups = dict(pairs) if isinstance(pairs, Mapping) else {"": list(pairs)}
    errors = {label: [difference(a, b) for a, b in group] for label, group in groups.items()}
    every = [size_of(n) / size for group in groups.values() for pair in group for n in pair]
    if not every or min(every) <= 0:
        raise ValueError("scatter_error needs pairs of sizes over 0, for example [(predict(recipe), measured)].")
    off = [abs(error) for group in errors.values() for error in group]
    within = sum(error <= band for error in off)
    summary = f"{within} of {len(off)} within ±{band:.0%} · median {statistics.median(off):.2%} · worst {max(off):.2%}"

    figure, (above, below) = style.start(title, summary, rows=2, sharex=True, height_ratios=(3, 2))
    ends = [min(every) / 1.3, max(every) * 1.3]
    low, high = ([end * (1 + side) for end in ends] for side in (-band, band))
    above.fill_between(ends, low, high, color=BAND, linewidth=0, label=f"±{band:.0%}")
    above.plot(ends, ends, color=style.INK, linewidth=0.8)
    below.axhspan(-band * 100, band * 100, color=BAND, linewidth=0)
    below.axhline(0, color=style.INK, linewidth=0.8)
    rows = [(unit, *names, "error")]
    for (label, group), (colour, marker, _) in zip(groups.items(), itertools.cycle(style.LINES), strict=False):
        look = {"marker": marker, "linestyle": "", "color": colour, "markersize": 6, "alpha": 0.85, "gid": "points"}
        x, y = ([size_of(pair[i]) / size for pair in group] for i in (1, 0))
        above.plot(x, y, label=label or None, **look)
        below.plot(x, [error * 100 for error in errors[label]], **look)
        for i, ((a, b), error) in enumerate(zip(group, errors[label], strict=True), 1):
            which = b.title if isinstance(b, Report) else str(i)
            cells = (exact(size_of(n), unit) for n in (a, b))
            rows.append((f"{label}: {which}" if label else which, *cells, f"{error:+.2%}"))
    reach = 100 * max(band * 1.5, max(off) * 1.2)
    for axis, scale in ((above.xaxis, above.set_xscale), (above.yaxis, above.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter("{x:,.6g}")  # 0.5, 1, 2, 4 and not powers
    above.set(xlim=ends, ylim=ends, ylabel=f"{names[0]}, {unit}")
    below.set(ylim=(-reach, reach), xlabel=f"{names[1]}, {unit}", ylabel="error, %")
    span = f"{min(every):.3g} to {max(every):.3g} {unit}"
    return style.finish(figure, rows, f"Scatter of {names[0]} over {names[1]} sizes, {span}: {summary}.")
