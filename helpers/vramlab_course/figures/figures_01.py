"""Drawings of chapter 01. Each function draws a figure and returns it."""

from collections.abc import Mapping, Sequence

import numpy as np
from vramlab.interfaces.plot import canvas

BLUE = "#0072B2"
GREY = "#BBBBBB"
INK = "#222222"


def levels(ways: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, about: str):
    """Draw by way the levels that numbers can come back as, and the numbers below them.

    An arrow leads from each number to its level.
    """
    said = "Strokes are levels, and an arrow leads from each number to the nearest."
    with canvas(title, said, about) as ax:
        for row, (marks, numbers) in enumerate(ways.values()):
            ax.plot(marks, [row - 0.12] * len(marks), "|", color=INK, markersize=22)
            ax.plot(numbers, [row + 0.25] * len(numbers), "o", color=BLUE)
            for number in numbers:
                nearest = min(marks, key=lambda mark: abs(mark - number))
                ax.annotate(
                    "",
                    (nearest, row),
                    (number, row + 0.25),
                    arrowprops={"arrowstyle": "->", "color": BLUE},
                )
        ax.set_yticks(range(len(ways)), list(ways))
        ax.set_ylim(len(ways) - 0.6, -0.45)
        ax.grid(visible=False)
    return ax.figure


def density(ways: Mapping[str, Sequence[float]], numbers: Sequence[float], title: str, about: str):
    """Draw the levels of two ways, from -1 to 1, and below them how often numbers lie where.

    The bars are blue where the second way's levels are closer than the first's.
    """
    counts, edges = np.histogram(numbers, 80, (-1, 1))
    gaps = []
    for marks in ways.values():
        # The two levels around the middle of each bar.
        above = np.searchsorted(marks, (edges[1:] + edges[:-1]) / 2)
        gaps.append(np.diff(marks)[above - 1])
    colours = np.where(gaps[1] < gaps[0], BLUE, GREY)
    names = list(ways)
    below = f"weights, blue where\n{names[1]}'s are closer"
    said = f"Two rows of strokes over a histogram, {below}."
    with canvas(title, said, about) as ax:
        for row, marks in enumerate(ways.values()):
            ax.plot(marks, [row] * len(marks), "|", color=INK, markersize=22)
        # The axis points down.
        ax.bar(edges[:-1], -1.6 * counts / counts.max(), 0.025, 3.2, align="edge", color=colours)
        ax.set_yticks([0, 1, 2.6], [*names, below])
        ax.set_ylim(3.2, -0.5)
        ax.grid(visible=False)
    return ax.figure
