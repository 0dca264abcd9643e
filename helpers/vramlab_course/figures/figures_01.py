"""Drawings of chapter 01. Each function draws a figure and returns it."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from vramlab.interfaces.plot import canvas

from ..number_formats import BF16, FP16, FP32

SKY = "#56B4E9"
PALE = "#CFE8F7"
BLUE = "#0072B2"
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
    spans = []
    for name, low, high, apart in rows[1:]:
        spans.append(f"{name}: {low} to {high}, gaps of {apart}")
    said = f"Bars on a logarithmic axis. {'; '.join(spans)}."
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
    """Draw by way the levels that numbers can come back as, and below them the numbers.

    An arrow leads from each number to its level; more than 20 numbers are a histogram.
    """
    rows = [("way", "levels", "closest two")]
    for name, (marks, _) in ways.items():
        closest = min(high - low for low, high in itertools.pairwise(marks))
        rows.append((name, str(len(marks)), f"{closest:.2f}"))
    spans = [
        f"{name}: {count} levels, the closest {apart} apart" for name, count, apart in rows[1:]
    ]
    said = f"Levels as strokes, and numbers as dots or bars below them. {'; '.join(spans)}."
    with canvas(title, said, about, rows) as ax:
        for row, (marks, numbers) in enumerate(ways.values()):
            ax.plot(marks, [row - 0.12] * len(marks), "|", color=INK, markersize=22)
            if len(numbers) > 20:
                counts, edges = np.histogram(numbers, 80)
                heights = -0.33 * counts / counts.max()  # the axis points down
                ax.bar(edges[:-1], heights, np.diff(edges), row + 0.38, align="edge", color=BLUE)
                continue
            ax.plot(numbers, [row + 0.25] * len(numbers), "o", color=BLUE)
            for number in numbers:
                nearest = min(marks, key=lambda mark: abs(mark - number))
                ends = (nearest, row), (number, row + 0.25)
                ax.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": BLUE})
        ax.set_yticks(range(len(ways)), list(ways))
        ax.set_ylim(len(ways) - 0.4, -0.6)
        ax.grid(visible=False)
    return ax.figure
