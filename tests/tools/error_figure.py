"""The figure of how far predictions are from measurements, for the README."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from vramlab.interfaces.plot import style
from vramlab.report.report import GiB, in_unit


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
