"""Chapter 07's pictures.

They show traces of a loop, a memory history, and where reserved memory climbs.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from vramlab.interfaces.plot import canvas, style
from vramlab.report.report import GiB, MiB

if TYPE_CHECKING:
    from ..memory_history import Snapshot

BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
GREY = "#999999"
KERNELS = "GPU kernels"
# How the names of a trace's rows begin: PyTorch's own for waiting, the labels of the chapter's
# loop, all operators, and PyTorch's own for the parts of a Trainer's steps.
COLOURS = {
    "enumerate(DataLoader)": GREY,
    "tokenize": "#56B4E9",
    "forward": BLUE,
    "backward": RED,
    "update": GREEN,
    "aten::": style.INK,
    "autograd::engine": RED,
    "Optimizer.step": GREEN,
    "cudaStreamSynchronize": "#CC79A7",
}
LOOP = tuple(COLOURS)[:6]
Span = tuple[float, float]


class Trace:
    """What a profiler's file says: spans (start, length) in ms of each of `labels` that is there.

    Spans of a row that overlap are merged. On a GPU the last row has its kernels.
    """

    def __init__(self, path: str | Path, labels: Sequence[str] = tuple(COLOURS)):
        found: dict[str, list[Span]] = {label: [] for label in (*labels, KERNELS)}
        for event in json.loads(Path(path).read_text())["traceEvents"]:
            kind = event.get("cat")
            if event["ph"] != "X" or kind == "gpu_user_annotation":  # no span, or a label again
                continue
            name = KERNELS if kind == "kernel" else event["name"]
            for label in found:
                if name.startswith(label):
                    found[label].append((event["ts"] / 1e3, event["dur"] / 1e3))
        self.rows = {label: merged(spans) for label, spans in found.items() if spans}
        self.start = min(spans[0][0] for spans in self.rows.values())
        self.length = max(sum(spans[-1]) for spans in self.rows.values()) - self.start

    def total(self, label: str) -> float:
        """The milliseconds that a row covers."""
        return sum(length for _, length in self.rows[label])

    def share(self, label: str) -> float:
        """The part of the time that a row covers."""
        return self.total(label) / self.length


def merged(spans: Sequence[Span]) -> list[Span]:
    """Spans (start, length) without overlaps, in their order."""
    apart: list[Span] = []
    for start, length in sorted(spans):
        # It begins before the last one has ended.
        if apart and start <= sum(apart[-1]):
            first = apart[-1][0]
            length = max(sum(apart[-1]), start + length) - first
            apart[-1] = (first, length)
        else:
            apart.append((start, length))
    return apart


def trace(seen: Trace, title: str, subtitle: str):
    """Return a figure of a trace, row by row."""
    rows = [("label", "ms", "share")]
    shown = list(seen.rows)
    alt = f"{title}. Rows over time: {', '.join(shown)}."
    with canvas(title, alt, subtitle, rows) as ax:
        for y, label in enumerate(shown):
            bars = [(start - seen.start, length) for start, length in seen.rows[label]]
            ax.broken_barh(bars, (y - 0.3, 0.6), facecolor=COLOURS.get(label, style.INK))
            rows.append((label, f"{seen.total(label):.1f}", f"{seen.share(label):.0%}"))
        ax.set(xlabel="milliseconds", xlim=(0, seen.length), ylim=(len(shown) - 0.5, -0.6))
        ax.set_yticks(range(len(shown)), shown)
        ax.grid(False)
    return ax.figure


def histories(
    snapshots: Mapping[str, "Snapshot"],
    batches: int,
    title: str,
    subtitle: str,
):
    """Return a figure of histories, one behind the other: what is new and alive.

    A dot with its MiB is at the end of each of a history's `batches`, which make as many blocks as
    one another.
    """
    alt = (
        f"{title}. An area over time for each of: {', '.join(snapshots)}. Dots with their MiB mark "
        f"where a batch ends."
    )
    rows = [("MiB at the end of each batch",)]
    with canvas(title, alt, subtitle, rows) as ax:
        ax.margins(x=0.03, y=0.15)
        start = 0
        for colour, (name, snapshot) in zip((RED, GREEN), snapshots.items(), strict=False):
            alive = (snapshot.allocated - snapshot.allocated[0]) / MiB
            at = range(start, start + len(alive))
            ax.fill_between(at, alive, step="post", color=colour, linewidth=0, label=name)
            made = [block for block in snapshot.blocks if block.born]
            each = len(made) // batches
            for end in [*(block.born - 1 for block in made[each::each]), len(alive) - 1]:
                ax.plot(start + end, alive[end], "o", color=style.INK, clip_on=False)
                ax.annotate(
                    f"{alive[end]:.0f}",
                    (start + end, alive[end]),
                    xytext=(-6, 8),
                    textcoords="offset points",
                    ha="right",
                )
                rows.append((f"{name}: {alive[end]:.1f}",))
            start += len(alive)
        ax.set(
            xlabel="allocations and releases, in their order",
            ylabel="MiB alive",
            ylim=(0, None),
        )
    return ax.figure


def roofline(lines: Mapping[str, Mapping[int, float]], title: str, subtitle: str):
    """Return a figure of each line's microseconds by tokens, with a dot where it turns.

    A line has three points, and the second is the turn.
    """
    alt = f"{title}. A line for each card is level up to its dot, then rises."
    with canvas(title, alt, subtitle) as ax:
        for name, line in lines.items():
            ax.loglog(line.keys(), line.values(), "o-", markevery=[1], label=name)
        ax.set(xlabel="tokens", ylabel="microseconds at least")
    return ax.figure


def climb(
    run: Mapping[str, Sequence[int]],
    lengths: Sequence[int],
    room: int,
    title: str,
    subtitle: str,
):
    """Return a figure of steps of `lengths`: bytes "allocated" at most, and "reserved" afterwards.

    A line shows the card's `room` in bytes, and another what is "reserved on the card" with it.
    """
    steps = range(1, len(lengths) + 1)
    in_gib = {name: [size / GiB for size in sizes] for name, sizes in run.items()}
    held = in_gib["reserved"]
    alt = (
        "Allocated goes up and down. Reserved only rises, at the samples longer than all before, "
        "in the end past the line. On the card itself it falls there."
    )
    with canvas(title, alt, subtitle) as ax:
        ax.bar(
            steps,
            held,
            width=1,
            color=style.PROCESS,
            label="reserved after the step, without a limit",
        )
        ax.bar(steps, in_gib["allocated"], color=BLUE, label="allocated at most")
        ax.axhline(
            room / GiB,
            color=style.ALARM,
            linestyle="--",
            label="what the card has for them",
        )
        real = in_gib["reserved on the card"]
        ax.step(steps, real, style.INK, where="mid", label="reserved on the card itself")
        for step, (before, after) in enumerate(pairwise(held), 2):
            if after > before + 0.1:  # a small segment of 2 MiB is not to be seen
                ax.text(step - 0.4, after + 0.2, f"{lengths[step - 1]:,}")
        ax.set(
            xlabel="step; where reserved climbs, the tokens of the step's samples",
            ylabel="GiB",
            ylim=(0, 1.15 * held[-1]),
        )
    return ax.figure
