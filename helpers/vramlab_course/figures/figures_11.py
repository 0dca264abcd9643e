"""Drawings of chapter 11: the ways from card to card, and when a run over each would end."""

import textwrap
from collections.abc import Mapping, Sequence

from vramlab.interfaces.plot import canvas, style

BOX = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": style.INK}
ARROW = {"arrowstyle": "-|>", "linewidth": 2.5, "shrinkA": 0, "shrinkB": 0}
COLOURS = ("#009E73", "#0072B2", "#D55E00")
WIDTH = 4  # of a way


def routes(ways: Mapping[str, Sequence[str]], title: str):
    """Return a figure of `ways`, from name to the stops of a message; a line for each.

    The ways are three at most.
    """
    rows = [(name, " → ".join(stops)) for name, stops in ways.items()]
    said = "; ".join(map(": ".join, rows))
    with canvas(title, said, rows=[("way", "stops"), *rows]) as ax:
        for (name, stops), colour, y in zip(ways.items(), COLOURS, (2, 1, 0), strict=False):
            ax.text(-0.3, y + 0.33, name, color=colour, fontweight="bold")
            step = WIDTH / (len(stops) - 1)
            look = {"ha": "center", "va": "center", "bbox": BOX}
            box = ax.annotate(stops[-1], (WIDTH, y), **look)
            # Towards the first stop, because an arrow needs the box at which it ends.
            for number in reversed(range(len(stops) - 1)):
                arrow = ARROW | {"color": colour, "patchB": box.get_bbox_patch()}
                here = (number * step, y)
                box = ax.annotate(
                    stops[number],
                    box.xyann,
                    here,
                    arrowprops=arrow,
                    **look,
                )
        ax.set(xlim=(-0.4, WIDTH + 0.4), ylim=(-0.3, 2.6))
        ax.set_axis_off()
    return ax.figure


def ends(
    ranges: Mapping[str, tuple[float, float]],
    measured: float,
    title: str,
    subtitle: str,
):
    """Return a figure of the seconds in which a run ends, least and most, and what it took."""
    rows = [(name, f"{least:.0f}–{most:.0f}") for name, (least, most) in ranges.items()]
    rows.append(("measured", f"{measured:.1f}"))
    said = "Seconds. " + "; ".join(map(": ".join, rows))
    with canvas(title, said, subtitle, rows=[("over", "seconds"), *rows]) as ax:
        for (name, text), (least, most) in zip(rows, ranges.values(), strict=False):
            place = textwrap.fill(name, 10)
            ax.bar(place, most - least, bottom=least, color=COLOURS[1])
            ax.text(place, most + 0.4, text, ha="center", bbox=style.PATCH)
        ax.axhline(
            measured,
            color=style.ALARM,
            linestyle="--",
            label=f"the slow run, measured: {measured:.1f} s",
        )
        ax.set(ylabel="seconds", ylim=(95, 146))
    return ax.figure
