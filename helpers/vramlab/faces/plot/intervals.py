"""Whether runs fit: the interval of each one's process against the line of its card."""

import itertools
import math
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

    `limit` is one for all or a list with one for each need, which its label then names. Raises ValueError for no needs
    or another number of limits.
    """
    size, each = check_unit(unit), limit if isinstance(limit, list | tuple) else [limit] * len(needs)
    if not needs or len(each) != len(needs):
        raise ValueError(f"fits needs a limit for all or each of its needs, not {len(each)} for {len(needs)}.")
    figure, ax = style.start(title, subtitle)
    rows = [(unit, "at least", "likely", "at most", "card", "fits")]
    dashes = dict(zip(dict.fromkeys(each), itertools.cycle(["--", ":", "-."]), strict=False))
    said = [_said(need, one, len(dashes) > 1) for need, one in zip(needs.values(), each, strict=True)]
    widths = [0.02 * (1 + max(map(len, words.split("\n")))) for words in said]  # a letter is 1/50 of the axes, about
    ends = [need.high for need in needs.values()] + [most for most, _ in map(limit_of, each) if most < math.inf]
    right = max(ends) / (1 - max(widths))
    for y, ((name, need), one) in enumerate(zip(needs.items(), each, strict=True)):
        most, card = limit_of(one)
        ax.barh(y, (need.high - need.low) / size, 0.45, need.low / size, color=style.PROCESS)
        ax.plot(need.value / size, y, "o", color=style.INK, markersize=5)
        draw_limit(lambda x, y=y, **look: ax.plot([x, x], [y - 0.5, y + 0.5], **look), one, unit, dashes[one])
        clear = most if need.high <= most <= need.high + widths[y] * right else need.high
        look = {"color": style.INK if need.tier(most) else style.ALARM, "va": "center", "bbox": style.PATCH}
        ax.annotate(said[y], (clear / size, y), (5, 0), textcoords="offset points", gid="tier", **look)
        bounds = [f"{n / size:,.2f}" for n in (need.low, need.value, need.high, most)]
        rows.append((" ".join(name.split()), *bounds[:3], f"{card}: {bounds[3]}", said[y].split("\n")[0]))
    ax.set_yticks(range(len(needs)), needs)
    words = f"{unit} that the process takes; the dot is the likely figure"
    ax.set(xlim=(0, right / size), ylim=(len(needs) - 0.5, -0.5), xlabel=words)
    return style.finish(figure, rows, f"Intervals. {title}. {subtitle}.", say_rows=True)


def _said(need: Interval, limit, named: bool) -> str:
    most, card = limit_of(limit)
    return (need.tier(most) or "too much") + f"\non {card}" * named
