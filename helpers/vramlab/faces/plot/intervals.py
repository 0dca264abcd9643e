"""Whether runs fit: the interval of each one's process against the line of its card."""

import itertools
from collections.abc import Mapping

from ...report.compare import check_unit
from ...report.report import Interval
from . import style
from .splits import draw_limit, limit_of


@style.styled()
def fits(needs: Mapping[str, Interval], limit, title: str, subtitle: str = "", unit: str = "GiB"):
    """Return a figure of a bar from the low to the high end of each need, a dot where it is likely, and its tier.

        needs = {f"{n} texts": predict(recipe.replace(batch_size=n), gpu="T4").process for n in (1, 2, 4)}
        figure = plot.fits(needs, "T4", "Two texts are safe on a T4", f"predicted · {recipe}")
        print(plot.table(figure))
        plt.show()

    `limit` is one for all or a list with one for each need. Raises ValueError for no needs or another number of limits.
    """
    size, each = check_unit(unit), limit if isinstance(limit, list | tuple) else [limit] * len(needs)
    if not needs or len(each) != len(needs):
        raise ValueError(f"fits needs a limit for all or each of its needs, not {len(each)} for {len(needs)}.")
    figure, ax = style.start(title, subtitle)
    rows = [(unit, "at least", "likely", "at most", "card", "fits")]
    for y, ((name, need), (most, card)) in enumerate(zip(needs.items(), map(limit_of, each), strict=True)):
        tier = need.tier(most) or "too much"
        ax.barh(y, (need.high - need.low) / size, 0.45, need.low / size, color=style.PROCESS)
        ax.plot(need.value / size, y, "o", color=style.INK, markersize=5)
        look = {"color": style.INK if need.tier(most) else style.ALARM, "va": "center", "bbox": style.PATCH}
        ax.annotate(tier, (need.high / size, y), (5, 0), textcoords="offset points", gid="tier", **look)
        ends = [f"{n / size:,.2f}" for n in (need.low, need.value, need.high, most)]
        rows.append((" ".join(name.split()), *ends[:3], f"{card}: {ends[3]}", tier))
    for dash, one in zip(itertools.cycle(["--", ":", "-."]), dict.fromkeys(each), strict=False):
        draw_limit(ax.axvline, one, unit, dash)
    ax.set_yticks(range(len(needs)), needs)
    ax.set(xlim=(0, ax.dataLim.x1 * 1.2), xlabel=f"{unit} that the process takes; the dot is the likely figure")
    ax.invert_yaxis()
    return style.finish(figure, rows, f"Intervals. {title}. {subtitle}.", say_rows=True)
