"""Drawings of chapter 06, and the parts of a peak."""

from collections.abc import Mapping, Sequence

from vramlab import MiB, Recipe, Report
from vramlab.hardware.gpu import Gpu
from vramlab.interfaces.plot import canvas, style

from .figures_00 import OTHERS, parts_at_peak


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
    """Draw MiB over the allocations of a step: a line for each report, dashed the `weights`."""
    rows = [("MiB", "highest in forward", "at its end", "highest in backward")]
    alt = f"Lines over one step. {title}."
    with canvas(title, alt, about, rows) as ax:
        for name, report in reports.items():
            forward, backward = report.phases["forward"], report.phases["backward"]
            moments = (forward.peak, forward.end, backward.peak)
            rows.append((name, *(moment.total / MiB for moment in moments)))
            sizes = [moment.bytes.total / MiB for moment in report.timeline]
            turn = sum(moment.phase == "forward" for moment in report.timeline)
            ax.plot(sizes, label=name, marker="o", markevery=[turn])
        ax.axhline(weights, ls="--", color=style.INK, label="the weights in fp32")
        ax.set(xlabel="allocations in order; ●: backward begins", ylabel="MiB", ylim=(0, None))
    return ax.figure


def peak_in_parts(recipe: Recipe, card: Gpu) -> dict[str, int]:
    """`parts_at_peak` and their sum, with the copies of adapters' inputs in one part."""
    parts = parts_at_peak(recipe, card)
    # It counts such copies as attention, and those that adapters share as norms.
    parts["attention, norms, adapters' inputs"] = parts.pop("attention") + parts.pop(OTHERS)
    parts["the loss, optimizer states"] = parts.pop("the loss") + parts.pop("optimizer states")
    parts["sum"] = sum(parts.values())
    return parts
