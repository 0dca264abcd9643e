"""Drawings of chapter 01. Each function draws a figure and returns it."""

from collections.abc import Mapping, Sequence

import torch
from vramlab.faces.plot import canvas

from ..numerics import FORMATS, FP16

ORANGE, SKY, YELLOW, BLUE = "#E69F00", "#56B4E9", "#F0E442", "#0072B2"
RED, ALARM, INK = "#D55E00", "#B00020", "#222222"


def network():
    """Draw source B's network of ten parameters: two inputs, two hidden units with a bias each, two outputs."""
    place = {f"{'XHY'[n // 2]}{n % 2 + 1}": (2.2 * (n // 2), -1.2 * (n % 2)) for n in range(6)}
    arrows = [(a + i, b + j) for a, b in ("XH", "HY") for i in "12" for j in "12"]  # w1 and w2 leave X1
    boxes = {"B1": (2.2, 0.55), "B2": (2.2, -1.75)}
    said = "Two inputs, two hidden units, two outputs. Eight arrows between them are weights, two boxes are biases."
    with canvas("Ten parameters", said, "8 weights (arrows) and 2 biases (boxes)") as ax:
        for n, (a, b) in enumerate(arrows, 1):
            look = {"arrowstyle": "->", "color": BLUE, "shrinkA": 16, "shrinkB": 16}
            ax.annotate("", place[b], place[a], arrowprops=look)
            x, y = (0.7 * u + 0.3 * v for u, v in zip(place[a], place[b], strict=True))
            patch = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            ax.text(x, y, f"w{n}", ha="center", va="center", bbox=patch)
        for name, (x, y) in {**place, **boxes}.items():
            frame = {"facecolor": YELLOW, "pad": 4} if name in boxes else {"facecolor": "white", "boxstyle": "circle"}
            ax.text(x, y, name, ha="center", va="center", bbox=frame)
        ax.set(xlim=(-0.5, 4.9), ylim=(-2.1, 0.9))
        ax.axis("off")
    return ax.figure


def bits(number: float):
    """Draw the bits of the number nearest to `number` in every format, coloured by sign, exponent and fraction."""
    shades = {"sign": ORANGE, "exponent": SKY, "fraction": "white"}
    rows = [("format", f"bits of {number}", "value", "off by")]
    said = (
        f"The bits of {number} in seven formats, from 32 in fp32 to 4 in fp4, coloured by sign, exponent and fraction."
    )
    for f in FORMATS:
        there = f.round(number)
        rows.append((f.name, f.bits_of(number), f"{there:.9g}", f"{there / number - 1:+.2%}"))
    with canvas(f"{number}, bit by bit", said, "sign, exponent and fraction of the nearest number", rows) as ax:
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


def vanished(sizes: Sequence[float], lost: Mapping[str, Sequence[float]]):
    """Draw each layer's median gradient with fp16's limits, and below it the share that became zero in each try."""
    layers = range(len(sizes))
    ends = f"{sizes[-1]:.0e} in the last layer to {sizes[0]:.0e} in the first"
    first = ", ".join(f"{name} {shares[0]:.0%}" for name, shares in lost.items())
    said = f"Gradients shrink from {ends}. Of the first layer's, so many became zero: {first}."
    rows = [("layer", "median size", *(f"{name}, became zero" for name in lost))]
    for i in layers[::4]:  # to tens: CPUs differ in the order of their sums
        rows.append((f"{i}", f"{sizes[i]:.0e}", *(f"{10 * round(10 * shares[i])} %" for shares in lost.values())))
    about = f"{len(sizes) - 1} hidden layers of 32, 256 points, cross-entropy, at the first step"
    with canvas("Where gradients become zero", said, about, rows, panels=2, sharex=True) as (above, below):
        above.semilogy(layers, sizes, color=INK, marker="o", markersize=4, label="median gradient, fp32")
        limits = {"smallest normal": (FP16.smallest_normal, "--"), "smallest number": (FP16.smallest, "-")}
        for name, (limit, dash) in limits.items():
            above.axhline(limit, color=ALARM, linestyle=dash, label=f"fp16's {name}")
        for (name, shares), (colour, look) in zip(lost.items(), ((RED, "s-"), (BLUE, "^--"), (INK, "o:")), strict=True):
            below.plot(layers, [100 * share for share in shares], look, color=colour, markersize=4, label=name)
        above.set_ylabel("size")
        below.set(ylabel="became zero, %", xlabel="layer, the first one at 0", ylim=(-5, 105), xticks=layers[::4])
    return above.figure


def bell(table: torch.Tensor, deviations: float):
    """Draw a table of codes under the normal curve; 1 is so many standard deviations."""
    grid = torch.linspace(-1.3, 1.3, 300)

    def height(x):
        return torch.exp(-((x * deviations) ** 2) / 2)

    said = f"A bell curve with {len(table)} vertical lines, dense in the middle: the numbers that the codes stand for."
    rows = [("code", "number"), *((f"{code}", f"{n:+.4f}") for code, n in enumerate(table.tolist()))]
    with canvas("NF4 on the bell curve", said, f"1 is {deviations:.2f} standard deviations here", rows) as ax:
        ax.plot(grid, height(grid), color=INK)
        ax.vlines(table, 0, height(table), color=BLUE, linewidth=2)
        for code, n in enumerate(table.tolist()):
            ax.text(n, -0.05, f"{code}", ha="center", va="top", fontsize=8.5)
        ax.set(xlabel="number / the block's absolute maximum, and its code", yticks=[], ylim=(-0.12, 1.05))
    return ax.figure


def worth(scores: Mapping[str, tuple[float, float]], tokens_per_byte: float, about: str):
    """Draw bits per byte of each way to store a model over its bits a number; `scores` begins with the reference."""
    base, worst = next(iter(scores.values()))[1], max(score for _, score in scores.values())
    rows = [("matrices in", "bits a number", "bits per byte", "more", "perplexity")]
    for name, (width, score) in scores.items():
        more = round(100 * (score / base - 1), 1) + 0.0  # no "-0.0"
        perplexity = 2 ** (score / tokens_per_byte)
        rows.append((name, f"{width:.3f}", f"{score:.3f}", f"{more:+.1f} %", f"{perplexity:.1f}"))
    said = "; ".join(f"{name}: {row[2]} at {row[1]} bits" for name, row in zip(scores, rows[1:], strict=True))
    with canvas("What precision is worth", f"Bits per byte over bits a number. {said}.", about, rows) as ax:
        for blocked, look, label in ((False, "o", "as it is, or one scale a matrix"), (True, "s", "blocks of 64")):
            found = [pair for name, pair in scores.items() if (name.endswith(("blocks", "double"))) is blocked]
            ax.semilogx(*zip(*found, strict=True), look, color=RED if blocked else BLUE, label=label)
        for name in ("int2, blocks", "int3, blocks", "int4, one scale", "int8, blocks", "bf16", "fp32"):
            ax.annotate(name, scores[name], xytext=(-2, 8), textcoords="offset points", rotation=60, fontsize=9)
        ax.annotate("NF4, double", scores["NF4, double"], xytext=(0, -16), textcoords="offset points", fontsize=9)
        ax.axhline(base, color="#999999", linewidth=1)
        ax.set_xticks([2, 3, 4, 6, 8, 16, 32], ["2", "3", "4", "6", "8", "16", "32"])
        ax.minorticks_off()
        room = worst - base
        ax.set(xlim=(1.9, 48), ylim=(base - 0.15 * room, worst + 0.35 * room))
        ax.set(xlabel="bits a number, with scales", ylabel="bits per byte")
    return ax.figure
