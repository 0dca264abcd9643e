"""Drawings of chapter 01. Each function draws a figure and returns it."""

from collections.abc import Mapping, Sequence

import numpy as np
from vramlab.interfaces.plot import canvas

from ..number_formats import BF16, FP16, FP32

SKY = "#56B4E9"
PALE = "#CFE8F7"
BLUE = "#0072B2"
GREY = "#BBBBBB"
INK = "#222222"


def ranges():
    """Draw how far three formats reach, from the smallest positive number to the largest.

    The label is its gap at 1.
    """
    formats = FP32, FP16, BF16
    rows = [("format", "smallest", "largest", "gap at 1")]
    for f in formats:
        largest = f"{f.max:,.0f}" if f.max < 1e6 else f"{f.max:.1e}"
        rows.append(
            (
                f.name,
                f"{f.smallest:.1e}",
                largest,
                f"1/{1 / f.epsilon:,.0f}",
            )
        )
    title = "Exponent bits buy range, fraction bits buy precision"
    said = "Bars on a logarithmic axis: those of fp32 and bf16 end together, fp16's far earlier."
    about = "derived: positive numbers of each format; the label is its gap at 1"
    with canvas(title, said, about, rows) as ax:
        for row, f in enumerate(formats):
            parts = (
                (f.smallest, f.smallest_normal, PALE, "subnormal"),
                (f.smallest_normal, f.max, SKY, "full precision"),
            )
            for low, high, colour, name in parts:
                label = name if row == 0 else None
                ax.barh(
                    row,
                    high - low,
                    0.6,
                    left=low,
                    color=colour,
                    edgecolor=INK,
                    linewidth=0.5,
                    label=label,
                )
            ax.annotate(
                f" {rows[row + 1][-1]}",
                (f.max, row),
                (3, 0),
                textcoords="offset points",
                va="center",
            )
        ax.axvline(1, color=INK, linewidth=0.8)
        ax.grid(visible=False)
        ax.set(xscale="log", xlim=(1e-46, 1e52), xlabel="number")
        ax.set_xticks([1e-40, 1e-30, 1e-20, 1e-10, 1, 1e10, 1e20, 1e30, 1e40])
        ax.set_yticks(range(3), [f.name for f in formats])
        ax.invert_yaxis()
    return ax.figure


def levels(ways: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, about: str):
    """Draw by way the levels that numbers can come back as, and the numbers below them.

    An arrow leads from each number to its level.
    """
    said = "Strokes are levels, and an arrow leads from each number to the nearest."
    rows = _spacings({name: marks for name, (marks, _) in ways.items()})
    with canvas(title, said, about, rows) as ax:
        for row, (marks, numbers) in enumerate(ways.values()):
            ax.plot(marks, [row - 0.12] * len(marks), "|", color=INK, markersize=22)
            ax.plot(numbers, [row + 0.25] * len(numbers), "o", color=BLUE)
            for number in numbers:
                nearest = min(marks, key=lambda mark: abs(mark - number))
                ends = (nearest, row), (number, row + 0.25)
                ax.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": BLUE})
        ax.set_yticks(range(len(ways)), list(ways))
        ax.set_ylim(len(ways) - 0.4, -0.6)
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
    with canvas(title, said, about, _spacings(ways)) as ax:
        for row, marks in enumerate(ways.values()):
            ax.plot(marks, [row] * len(marks), "|", color=INK, markersize=22)
        # The axis points down.
        ax.bar(edges[:-1], -1.6 * counts / counts.max(), 0.025, 3.2, align="edge", color=colours)
        ax.set_yticks([0, 1, 2.6], [*names, below])
        ax.set_ylim(3.2, -0.5)
        ax.grid(visible=False)
    return ax.figure


def _spacings(ways: Mapping[str, Sequence[float]]) -> list[tuple[str, ...]]:
    rows = [("way", "levels", "closest two", "widest two")]
    for name, marks in ways.items():
        apart = np.diff(marks)
        rows.append((name, str(len(marks)), f"{apart.min():.2f}", f"{apart.max():.2f}"))
    return rows
