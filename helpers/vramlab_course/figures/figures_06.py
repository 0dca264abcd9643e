"""The drawings of chapter 06."""

from collections.abc import Mapping, Sequence

import numpy as np
from vramlab import Report
from vramlab.interfaces.plot import canvas, style
from vramlab.report.report import MiB


def over_a_step(steps: Mapping[str, Report], full: int, title: str, about: str):
    """Draw what is there over forward and backward, a line for each step.

    Both phases get the same width, however many allocations they have. `full` is the bytes of the
    unpacked weights, a dashed line.
    """
    rows = [("MiB", "highest in forward", "at its end", "highest in backward")]
    for name, report in steps.items():
        forward = report.phases["forward"]
        sizes = (forward.peak, forward.end, report.phases["backward"].peak)
        rows.append((name, *(f"{size.total / MiB:.1f}" for size in sizes)))
    alt = f"Lines over forward and backward. {title}. " + "; ".join(map(", ".join, rows)) + "."
    with canvas(title, alt, about, rows) as ax:
        for name, report in steps.items():
            moments = [m for m in report.timeline if m.phase in ("forward", "backward")]
            count = len(moments)
            begin = sum(m.phase == "forward" for m in moments)
            x = np.interp(range(count), [0, begin, count], [0, 1, 2])
            ax.step(x, [m.bytes.total / MiB for m in moments], where="post", label=name)
        ax.axhline(full / MiB, linestyle="--", color=style.INK, label="the weights, unpacked")
        ax.axvline(1, color=style.INK, linestyle=":")
        ax.set_xticks([0.5, 1.5], ["forward", "backward"])
        ax.set(xlim=(0, 2), ylim=(0, None), xlabel="allocations, in their order", ylabel="MiB")
    return ax.figure


def by_length(
    lengths: Sequence[int],
    sizes: Mapping[tuple[str, bool], Sequence[float]],
    title: str,
    about: str,
):
    """Draw GiB over the sample's tokens: a colour for each way, dashed without checkpointing.

    `sizes` is by a way's name and whether it checkpoints.
    """
    rows = [("tokens of one sample, GiB", *(f"{length:,}" for length in lengths))]
    for (name, checkpoints), line in sizes.items():
        words = "" if checkpoints else ", no checkpointing"
        rows.append((name + words, *(f"{size:.1f}" for size in line)))
    alt = f"Lines that rise with the length. {title}. " + "; ".join(map(", ".join, rows)) + "."
    names = dict.fromkeys(name for name, _ in sizes)
    # A way has one colour with and without checkpointing.
    looks = dict(zip(names, style.LINES, strict=False))
    with canvas(title, alt, about, rows) as ax:
        for (name, checkpoints), line in sizes.items():
            colour, mark, _ = looks[name]
            dash = "-" if checkpoints else "--"
            label = name if checkpoints else f"_{name}"
            ax.plot(
                lengths,
                line,
                dash,
                marker=mark,
                markersize=5,
                color=colour,
                label=label,
            )
        # An empty line that explains the dashes in the legend.
        ax.plot([], [], "--", color=style.INK, label="dashed: no checkpointing")
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.set(xlabel="tokens of one sample", ylabel="peak, GiB", ylim=(0, None))
    return ax.figure
