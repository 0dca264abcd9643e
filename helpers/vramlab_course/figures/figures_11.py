"""Drawing of chapter 11: the ways from card to card."""

import itertools
from collections.abc import Mapping, Sequence

from vramlab.interfaces.plot import canvas, style

BOX = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": style.INK}
ARROW = {
    "arrowstyle": "->",
    "linewidth": 2.5,
    "shrinkA": 28,
    "shrinkB": 28,
}
PLACES = {"GPU 0": (0, 1), "GPU 1": (2, 1), "host bridge": (1, 0.5), "CPU's memory": (1, -0.4)}
COLOURS = ("#009E73", "#0072B2", "#D55E00")
LINES = ("solid", "dashed", "dotted")


def routes(ways: Mapping[str, Sequence[str]], title: str):
    """Return a figure of `ways`, from name to the stops of a message, in one drawing.

    The stops are those of PLACES, and the ways three at most.
    """
    rows = [("way", "stops"), *((name, " → ".join(stops)) for name, stops in ways.items())]
    said = "; ".join(": ".join(row) for row in rows[1:])
    with canvas(title, said, rows=rows) as ax:
        looks = zip(ways.items(), COLOURS, LINES, strict=False)
        for number, ((name, stops), colour, line) in enumerate(looks):
            ax.plot([], [], color=colour, linestyle=line, linewidth=2.5, label=name)
            for before, after in itertools.pairwise(stops):
                (x0, y0), (x1, y1) = PLACES[before], PLACES[after]
                # Down on the left and up on the right, where a way returns as it came.
                is_return = x0 == x1
                aside = 0.13 * (y1 - y0) if is_return else 0
                lower = 0 if is_return else 0.09 * number
                look = {"color": colour, "linestyle": line}
                ax.annotate(
                    "",
                    xy=(x1 + aside, y1 - lower),
                    xytext=(x0 + aside, y0 - lower),
                    arrowprops=ARROW | look,
                )
        for stop, (x, y) in PLACES.items():
            ax.text(
                x,
                y,
                stop,
                ha="center",
                va="center",
                bbox=BOX,
            )
        ax.set(xlim=(-0.3, 2.3), ylim=(-0.55, 1.15))
        ax.set_axis_off()
    return ax.figure
