"""Drawing of chapter 11: the ways from card to card."""

from collections.abc import Mapping, Sequence

from vramlab.interfaces.plot import canvas, style

BOX = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": style.INK}
ARROW = {"arrowstyle": "->", "shrinkA": 28, "shrinkB": 28, "linewidth": 2}


def routes(ways: Mapping[str, Sequence[str]], title: str):
    """Return a figure of `ways`, from name to the stops of a message, one below the other."""
    rows = [("way", "stops"), *((name, " → ".join(stops)) for name, stops in ways.items())]
    said = "; ".join(": ".join(row) for row in rows[1:])
    with canvas(title, said, rows=rows) as ax:
        for y, (name, stops) in enumerate(ways.items()):
            ax.text(-0.05, y - 0.32, name, fontweight="bold")
            apart = 1 / (len(stops) - 1)
            for i, stop in enumerate(stops):
                here = (i * apart, y)
                ax.text(*here, stop.replace(" ", "\n"), ha="center", va="center", bbox=BOX)
                if i:
                    ax.annotate("", here, ((i - 1) * apart, y), arrowprops=ARROW)
        ax.set(xlim=(-0.12, 1.12), ylim=(len(ways) - 0.6, -0.6))
        ax.set_axis_off()
    return ax.figure
