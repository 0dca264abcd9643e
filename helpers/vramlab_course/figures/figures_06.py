"""Drawings of chapter 06."""

from collections.abc import Mapping, Sequence

import numpy as np
from vramlab import GiB, MiB, Report
from vramlab.hardware.gpu import Gpu
from vramlab.interfaces.plot import canvas, style
from vramlab.interfaces.plot.splits import draw_limit


def one_block(weights: Sequence[float], levels: Sequence[float]):
    """Draw how each weight of a block moves to the nearest level, times the block's scale."""
    scale = max(map(abs, weights))
    title = "A weight becomes the number of the nearest level"
    with canvas(title, f"Arrows from weights to levels. {title}.", "derived: one block") as ax:
        for code, level in enumerate(levels):
            ax.vlines(scale * level, -0.1, 0.1, color=style.INK, linewidth=4)
            ax.text(scale * level, -0.5, f"code {code}\n{level:g} × {scale:g}", ha="center")
        for weight in weights:
            end = scale * min(levels, key=lambda level: abs(weight - scale * level))
            ax.annotate("", (end, 0.12), (weight, 0.97), arrowprops={"arrowstyle": "-|>"})
            ax.plot(weight, 1, "o")
            ax.text(weight, 1.12, f"{weight:g}", ha="center")
        ax.set(xlabel="weight", ylim=(-0.75, 1.4), yticks=[])
        ax.margins(x=0.1)
    return ax.figure


def steps(reports: Mapping[str, Report], weights: float, title: str, about: str):
    """Draw MiB over a step, its phases equally wide: a line each, dashed the `weights`."""
    rows = [("MiB", "highest in forward", "at its end", "highest in backward")]
    alt = f"Lines over one step. {title}."
    with canvas(title, alt, about, rows) as ax:
        for name, report in reports.items():
            forward, backward = report.phases["forward"], report.phases["backward"]
            moments = (forward.peak, forward.end, backward.peak)
            rows.append((name, *(moment.total / MiB for moment in moments)))
            sizes = [moment.bytes.total / MiB for moment in report.timeline]
            turn = sum(moment.phase == "forward" for moment in report.timeline)
            places = np.interp(range(len(sizes)), (0, turn, len(sizes) - 1), (0, 1, 2))
            ax.plot(places, sizes, label=name, marker="o", markevery=[turn])
        ax.axhline(weights, ls="--", color=style.INK, label="the weights in fp32")
        ax.set(xlabel="forward ● backward", xticks=[], ylabel="MiB", ylim=(0, None))
    return ax.figure


def over_length(
    sizes: Mapping[str, Mapping[int, int]], title: str, about: str, card: Gpu | str | None = None
):
    """Draw bytes over the length in tokens: a line for each run, and where the card is full."""
    lengths = [*next(iter(sizes.values()))]
    rows = [("GiB", *(f"{tokens:,} tokens" for tokens in lengths))]
    said = f"Lines that rise with the length. {title}."
    with canvas(title, said, about, rows) as ax:
        for (name, run), (colour, mark, dash) in zip(sizes.items(), style.LINES, strict=False):
            taken = [size / GiB for size in run.values()]
            rows.append((name, *(f"{size:.1f}" for size in taken)))
            ax.plot(lengths, taken, dash, color=colour, marker=mark, label=name)
        draw_limit(ax.axhline, card, "GiB")
        ax.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        ax.set(xlabel="tokens", ylabel="GiB", ylim=(0, None))
    return ax.figure
