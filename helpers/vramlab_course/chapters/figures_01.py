"""Drawings of chapter 01. Each function draws a figure and returns it."""

import torch
from vramlab.faces.plot import canvas

from ..numerics import FORMATS

ORANGE, SKY, BLUE, INK = "#E69F00", "#56B4E9", "#0072B2", "#222222"


def bits(number: float, title: str):
    """Draw the bits of the number nearest to `number` in every format, coloured by sign, exponent and fraction."""
    shades = {"sign": ORANGE, "exponent": SKY, "fraction": "white"}
    rows = [("format", f"bits of {number}", "value", "off by")]
    said = (
        f"The bits of {number} in seven formats, from 32 in fp32 to 4 in fp4, coloured by sign, exponent and fraction."
    )
    for f in FORMATS:
        there = f.round(number)
        rows.append((f.name, f.bits_of(number), f"{there:.9g}", f"{there / number - 1:+.2%}"))
    with canvas(title, said, f"derived: the number nearest to {number} in each format", rows) as ax:
        for row, f in enumerate(FORMATS):
            kinds = ["sign"] + ["exponent"] * f.exponent_bits + ["fraction"] * f.fraction_bits
            for column, (bit, kind) in enumerate(zip(f.bits_of(number).replace(" ", ""), kinds, strict=True)):
                label = kind if row == 0 and kinds.index(kind) == column else None
                ax.barh(row, 0.92, left=column, color=shades[kind], edgecolor=INK, label=label)
                ax.text(column + 0.46, row, bit, ha="center", va="center", fontsize=8.5)
        ax.set_yticks(range(len(FORMATS)), [f.name for f in FORMATS])
        ax.invert_yaxis()
        ax.set(xticks=[0, 8, 16, 24, 32], xlabel="bit")
        ax.grid(False)
    return ax.figure


def bell(table: torch.Tensor, deviations: float):
    """Draw a table of codes under the normal curve; 1 is so many standard deviations."""
    grid = torch.linspace(-1.3, 1.3, 300)

    def height(x):
        return torch.exp(-((x * deviations) ** 2) / 2)

    said = f"A bell curve with {len(table)} vertical lines, dense in the middle: the numbers that the codes stand for."
    rows = [("code", "number"), *((f"{code}", f"{n:+.4f}") for code, n in enumerate(table.tolist()))]
    title = "NF4's sixteen codes lie where normal weights are"
    with canvas(title, said, f"derived; 1 is {deviations:.2f} standard deviations", rows) as ax:
        ax.plot(grid, height(grid), color=INK)
        ax.vlines(table, 0, height(table), color=BLUE, linewidth=2)
        for code, n in enumerate(table.tolist()):
            ax.text(n, -0.05, f"{code}", ha="center", va="top", fontsize=8.5)
        ax.set(xlabel="weight / its block's absolute maximum; below the axis the code", yticks=[], ylim=(-0.12, 1.05))
    return ax.figure
