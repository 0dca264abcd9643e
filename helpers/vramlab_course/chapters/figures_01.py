"""Drawings of chapter 01. Each function draws a figure and returns it."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from vramlab.faces.plot import canvas

from ..numerics import FORMATS

ORANGE, SKY, PALE, BLUE, RED, INK = "#E69F00", "#56B4E9", "#CFE8F7", "#0072B2", "#D55E00", "#222222"


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


def losses(curves: Mapping[str, Sequence[float]], guess: float):
    """Draw the loss of each run over its steps, and that of guessing."""
    title = "Plain fp16 never gets past guessing; bf16 needs no help"
    about = "measured: 20 hidden layers of 32 units, 256 points, Adam, rate 0.002, autocast"
    said = f"The loss in {', '.join(curves)} over the steps. It falls in all but plain fp16, which stays at guessing."
    with canvas(title, said, about) as ax:
        ax.axhline(guess, color="#999999", linewidth=1)
        ax.text(0, guess - 0.01, "guessing by frequency", va="top", color="#555555")
        for (name, values), dash in zip(curves.items(), ("-", ":", "--", "-."), strict=True):
            ax.plot(values, linestyle=dash, linewidth=2.5, label=name)
        ax.set(xlabel="step", ylabel="loss")
    return ax.figure


def bell(table: Sequence[float], deviations: float):
    """Draw the share of normal numbers between neighbouring codes; 1 is so many standard deviations."""
    normal, rows = NormalDist(0, 1 / deviations), [("from", "to", "share of the numbers")]
    title = "Between two NF4 codes lies about the same share of the numbers"
    said = f"A bell curve, cut by {len(table)} codes into slices of 6 to 7 %. Below it int4's codes, in even steps."
    about = f"derived: normal numbers, 1 is {deviations:.2f} deviations; slices of 5.8 and 6.7 %"
    with canvas(title, said, about, rows) as ax:
        for i, (a, b) in enumerate(itertools.pairwise(table)):
            rows.append((f"{a:+.4f}", f"{b:+.4f}", f"{normal.cdf(b) - normal.cdf(a):.1%}"))
            x = [a + (b - a) * k / 20 for k in range(21)]
            ax.fill_between(x, [normal.pdf(n) for n in x], color=(SKY, PALE)[i % 2], linewidth=0)
        for y, codes in ((-0.06, table), (-0.14, [k / 7 for k in range(-7, 8)])):
            ax.plot(codes, [y] * len(codes), "|", color=INK, markersize=15, markeredgewidth=2)
        ax.set_yticks([-0.06, -0.14], ["NF4", "int4"])
        ax.set(xlabel="number / absolute maximum of its block", ylim=(-0.2, None))
        ax.grid(False)
    return ax.figure


def costs(stores: Mapping[str, tuple[float, float]]):
    """Draw what each way to store the base model costs: (bits a number, % more bits per byte) by name."""
    ways = sorted(stores.items(), key=lambda way: way[1][1])
    rows = [("matrices in", "bits a number", "more bits per byte")]
    rows += [(name, f"{bits:g}", f"{round(cost, 1) + 0.0:.1f} %") for name, (bits, cost) in ways]
    title = "3 bits with a scale for each block beat 4 bits with one scale"
    said = f"Dots on a logarithmic axis. {'; '.join(f'{row[0]}: {row[2]}' for row in rows[1:])}."
    about = "measured: base model, all matrices rounded, 12,000 bytes of programs"
    looks = {"one scale": ("^", RED), "blocks": ("o", BLUE), "no scale": ("s", INK)}
    with canvas(title, said, about, rows) as ax:
        for y, (name, (_, cost)) in enumerate(ways):
            kind, place = next((k for k in looks if k in name), "no scale"), (max(cost, 0.1), y)
            ax.plot(
                *place, looks[kind][0], color=looks[kind][1], markersize=9, label=kind.replace("blocks", "blocks of 64")
            )
            ax.annotate(rows[y + 1][2], place, (9, 0), textcoords="offset points", va="center")
        ax.set_yticks(range(len(ways)), [f"{name}: {bits:g} bits" for name, (bits, _) in ways])
        ax.set(xscale="log", xlim=(0.085, 300), xlabel="more bits per byte (up to 0.1 % at the left edge)")
        ax.set_xticks([0.1, 1, 10, 100], ["0.1 %", "1 %", "10 %", "100 %"])
        ax.tick_params(axis="x", which="minor", length=0)
        ax.invert_yaxis()
    return ax.figure
