"""Drawings of chapter 11: the ways from card to card, and which GPUs of a server NVLink joins."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import cos, pi, sin

from vramlab.interfaces.plot import canvas, style

from ..topology import Topology

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


@style.styled()
def mesh(topology: Topology, ring: Sequence[str], title: str):
    """Return a figure of GPUs on a circle in the order of `ring`.

    It has the NVLinks along the ring and all others.
    """
    figure, ax = style.start(title, "a DGX-1 by its matrix; a thick line is two links, bonded")
    place = {}
    for i, gpu in enumerate(ring):
        # Half a step off the top, so that no GPU stands on the line between the NUMA nodes.
        angle = pi * (0.5 + (2 * i + 1) / len(ring))
        place[gpu] = (1.35 * cos(angle), sin(angle))
    rows = [("pair", "NVLinks", "in the ring")]
    for (i, a), (j, b) in combinations(enumerate(ring), 2):
        links = topology.nvlinks(a, b)
        around = j - i in (1, len(ring) - 1)  # the ring is closed
        # What is in the ring is drawn over other links, and those over pairs without any.
        look = {"color": "#BBBBBB", "linestyle": ":", "label": "no NVLink: through both CPUs"}
        if links:
            look = {"color": "#888888", "label": "NVLinks", "zorder": 2}
        if around:
            look = {"color": "#0072B2", "label": "NVLinks of the ring", "zorder": 3}
        ends = zip(place[a], place[b], strict=True)
        ax.plot(*ends, linewidth=1 + 1.5 * links, **look)
        rows.append((f"{a}, {b}", str(links), "yes" if around else "no"))
    for gpu, (x, y) in place.items():
        number = gpu.removeprefix("GPU")
        circle = {"boxstyle": "circle", "facecolor": "white", "edgecolor": style.INK}
        ax.text(x, y, number, ha="center", va="center", size=13, bbox=circle, zorder=5)
    ax.axvline(0, color="#888888", linestyle="--", linewidth=0.8, zorder=0)
    for x, node in ((-0.75, 0), (0.75, 1)):
        ax.text(x, 1.22, f"NUMA node {node}", ha="center", color="#444444")
    ax.set(xlim=(-1.7, 1.7), ylim=(-1.2, 1.35))
    ax.set_axis_off()
    alt = f"{title}. Numbered circles, lines between them; the blue ones form a ring through all."
    return style.finish(figure, rows, alt)
