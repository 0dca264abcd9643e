"""Drawing of chapter 11: which GPUs of a server NVLink joins."""

from collections.abc import Sequence
from itertools import combinations
from math import cos, hypot, pi, sin

from vramlab.interfaces.plot import style

from ..topology import Topology


@style.styled()
def mesh(topology: Topology, ring: Sequence[str], title: str):
    """Return a figure of GPUs on a circle in the order of `ring`.

    It has the NVLinks along the ring and all others.
    """
    figure, ax = style.start(title, "a DGX-1 by its matrix; double lines are two links bonded")
    place = {}
    for i, gpu in enumerate(ring):
        # Half a step off the top, so that no GPU stands on the line between the NUMA nodes.
        angle = pi * (0.5 + (2 * i + 1) / len(ring))
        place[gpu] = (1.35 * cos(angle), sin(angle))
    following = [*ring[1:], ring[0]]
    # Without direction: a ring runs both ways.
    along = {frozenset(pair) for pair in zip(ring, following, strict=True)}
    rows = [("pair", "NVLinks", "in the ring")]
    for a, b in combinations(ring, 2):
        links = topology.nvlinks(a, b)
        around = frozenset((a, b)) in along
        x1, y1 = place[a]
        x2, y2 = place[b]
        away = 0.014 / hypot(x2 - x1, y2 - y1)  # of two lines from their middle
        look = {
            "color": "#0072B2" if around else "#888888",
            "label": "NVLinks of the ring" if around else "NVLinks",
        }
        if not links:
            look = {
                "color": "#BBBBBB",
                "linestyle": ":",
                "linewidth": 1,
                "label": "no NVLink: through both CPUs",
            }
        sides = (-away, away) if links > 1 else (0,)
        for side in sides:
            dx = side * (y1 - y2)
            dy = side * (x2 - x1)
            # What is in the ring is drawn over other links, and those over pairs without any.
            order = 2 * around + bool(links)
            ax.plot(
                [x1 + dx, x2 + dx],
                [y1 + dy, y2 + dy],
                zorder=order,
                **look,
            )
        rows.append((f"{a}, {b}", str(links), "yes" if around else "no"))
    for gpu, (x, y) in place.items():
        ax.plot(
            x,
            y,
            "o",
            markersize=30,
            color="white",
            markeredgecolor=style.INK,
            zorder=5,
        )
        ax.text(
            x,
            y,
            gpu.removeprefix("GPU"),
            ha="center",
            va="center",
            fontweight="bold",
            zorder=6,
        )
    ax.axvline(0, color="#888888", linestyle="--", linewidth=0.8, zorder=0)
    for x, node in ((-0.75, 0), (0.75, 1)):
        ax.text(x, 1.22, f"NUMA node {node}", ha="center", color="#444444")
    ax.set(
        xlim=(-1.7, 1.7),
        ylim=(-1.2, 1.35),
        xticks=[],
        yticks=[],
    )
    ax.spines[:].set_visible(False)
    alt = (
        f"{title}. Eight numbered circles, lines between them; the blue ones form a ring "
        f"through all."
    )
    return style.finish(figure, rows, alt)
