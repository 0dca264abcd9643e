"""Drawings of chapter 01. Each function draws a figure and returns it."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from vramlab.interfaces.plot import canvas

from ..number_formats import FORMATS

SKY = "#56B4E9"
PALE = "#CFE8F7"
BLUE = "#0072B2"
RED = "#D55E00"
INK = "#222222"


def ranges():
    """Draw how far each format reaches, from its smallest positive number to its largest, with its
    step at 1.
    """
    rows = [("format", "bits", "smallest", "largest", "step at 1")]
    for f in FORMATS:
        fields = f"1 + {f.exponent_bits} + {f.fraction_bits}"
        rows.append(
            (f.name, fields, f"{f.smallest:.1e}", f"{f.max:.3g}", f"1/{1 / f.epsilon:,.0f}")
        )
    title = "Exponent bits buy range, fraction bits buy precision"
    spans = [f"{name}: {low} to {high}, steps of {step}" for name, _, low, high, step in rows[1:]]
    said = f"Bars on a logarithmic axis. {'; '.join(spans)}."
    about = "derived: positive numbers of each format; the label is its step at 1"
    with canvas(title, said, about, rows) as ax:
        for row, f in enumerate(FORMATS):
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
                f" {rows[row + 1][4]}",
                (f.max, row),
                (3, 0),
                textcoords="offset points",
                va="center",
            )
        ax.axvline(1, color=INK, linewidth=0.8)
        ax.set(xscale="log", xlim=(1e-46, 1e52), xlabel="number")
        ax.set_xticks([1e-40, 1e-30, 1e-20, 1e-10, 1, 1e10, 1e20, 1e30, 1e40])
        ax.set_yticks(range(len(FORMATS)), [f.name for f in FORMATS])
        ax.invert_yaxis()
    return ax.figure


def bell(table: Sequence[float], deviations: float):
    """Draw the share of normal numbers between neighbouring codes; 1 is so many standard
    deviations.
    """
    normal = NormalDist(0, 1 / deviations)
    rows = [("from", "to", "share of the numbers")]
    title = "Between two NF4 levels lies about the same share of the numbers"
    said = (
        f"A bell curve, cut by {len(table)} levels into slices of 6 to 7 %. Dotted lines halfway "
        f"between two levels: what lies between two of these gets one code. Below it int4's "
        f"codes, in even steps."
    )
    about = f"derived: normal numbers, 1 is {deviations:.2f} deviations; dotted: the next code"
    with canvas(title, said, about, rows) as ax:
        for i, (a, b) in enumerate(itertools.pairwise(table)):
            share = normal.cdf(b) - normal.cdf(a)
            rows.append((f"{a:+.4f}", f"{b:+.4f}", f"{share:.1%}"))
            x = [a + (b - a) * k / 20 for k in range(21)]
            height = [normal.pdf(n) for n in x]
            colour = (SKY, PALE)[i % 2]
            ax.fill_between(x, height, color=colour, linewidth=0)
        borders = [(a + b) / 2 for a, b in itertools.pairwise(table)]
        heights = [normal.pdf(border) for border in borders]
        ax.vlines(borders, 0, heights, colors=INK, linestyles=":", linewidth=1)
        even = [k / 7 for k in range(-7, 8)]
        for y, codes in ((-0.06, table), (-0.14, even)):
            ax.plot(codes, [y] * len(codes), "|", color=INK, markersize=15, markeredgewidth=2)
        ax.set_yticks([-0.06, -0.14], ["NF4", "int4"])
        ax.set(xlabel="number / absolute maximum of its block", ylim=(-0.2, None))
        ax.grid(False)
    return ax.figure


def costs(stores: Mapping[str, tuple[float, float]], title: str):
    """Draw what each way to store the base model costs: (bits a number, % more bits per byte) by
    name.
    """
    ways = sorted(stores.items(), key=lambda way: way[1][1])
    rows = [("matrices in", "bits a number", "more bits per byte")]
    costs_said = []
    labels = []
    for name, (bits, cost) in ways:
        percent = f"{round(cost, 1) + 0.0:.1f} %"
        rows.append((name, f"{bits:g}", percent))
        costs_said.append(f"{name}: {percent}")
        labels.append(f"{name}: {bits:g} bits")
    said = f"Dots on a logarithmic axis. {'; '.join(costs_said)}."
    about = "measured: base model, all matrices rounded, 12,000 bytes of programs"
    looks = {"one scale": ("^", RED), "blocks": ("o", BLUE), "no scale": ("s", INK)}
    with canvas(title, said, about, rows) as ax:
        for y, (name, (_, cost)) in enumerate(ways):
            kind = next((k for k in looks if k in name), "no scale")
            place = (max(cost, 0.1), y)
            marker, colour = looks[kind]
            ax.plot(*place, marker, color=colour, markersize=9, label=kind)
            ax.annotate(rows[y + 1][2], place, (9, 0), textcoords="offset points", va="center")
        ax.set_yticks(range(len(ways)), labels)
        ax.set(
            xscale="log",
            xlim=(0.085, 300),
            xlabel="more bits per byte (up to 0.1 % at the left edge)",
        )
        ax.set_xticks([0.1, 1, 10, 100], ["0.1 %", "1 %", "10 %", "100 %"])
        ax.tick_params(axis="x", which="minor", length=0)
        ax.invert_yaxis()
    return ax.figure
