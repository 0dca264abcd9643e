"""Chapter 07's pictures.

They show traces of a loop, a memory history, and where reserved memory climbs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from vramlab.interfaces.plot import canvas, style
from vramlab.report.report import GiB, MiB

if TYPE_CHECKING:
    from torch.profiler import profile

    from ..memory_history import Snapshot

# Labels of a loop and their colours; PyTorch itself labels the first, under another name.
WAITING = "waiting for data"
TOKENIZING = "tokenize"  # a label within the waiting
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
GREY = "#999999"
COLOURS = {WAITING: GREY, "forward": BLUE, "backward": RED, "update": GREEN}
OPERATORS = "operators"
KERNELS = "GPU kernels"
# How the names begin that PyTorch gives to the parts of a loop without labels of its own.
LOADING = "enumerate(DataLoader)"
PYTORCH_LABELS = {
    LOADING: GREY,
    "aten::": style.INK,
    "autograd::engine": RED,
    "Optimizer.step": GREEN,
    "cudaStreamSynchronize": "#CC79A7",
}
Span = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """What a profiler saw: (start, length) in seconds.

    Attributes:
        labels: each passage through a label, by label.
        lanes: when any operator ran on the host, and any kernel on the GPU, overlaps merged.
    """

    labels: Mapping[str, list[Span]]
    lanes: Mapping[str, list[Span]]

    @property
    def seconds(self) -> float:
        """From the first label's start to the last one's end."""
        spans = [span for found in self.labels.values() for span in found]
        return max(start + length for start, length in spans) - self.start

    @property
    def start(self) -> float:
        """When the first label began."""
        return min(start for found in self.labels.values() for start, _ in found)

    def total(self, label: str) -> float:
        """The seconds that a label covers."""
        return sum(length for _, length in self.labels[label])

    def share(self, label: str) -> float:
        """The part of the time that a label covers."""
        return self.total(label) / self.seconds


def traced(profiler: "profile") -> Trace:
    """What `profiler` saw of a loop over a DataLoader whose parts are labelled as in COLOURS."""
    labels: dict[str, list[Span]] = {label: [] for label in (*COLOURS, TOKENIZING)}
    lanes: dict[str, list[Span]] = {OPERATORS: [], KERNELS: []}
    for event in profiler.events():
        # The DataLoader's label ends with a # and its class.
        name = event.name.replace(LOADING, WAITING).split("#")[0]
        span = (event.time_range.start / 1e6, event.time_range.elapsed_us() / 1e6)
        on_host = event.device_type.name == "CPU"
        if name in labels:  # a GPU's side has the labels again
            if on_host:
                labels[name].append(span)
        elif not on_host:
            lanes[KERNELS].append(span)
        elif name.startswith("aten::"):
            lanes[OPERATORS].append(span)
    labels[WAITING].pop()  # the last finds no batch
    return Trace(labels, {name: merged(spans) for name, spans in lanes.items() if spans})


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
    """Return a figure of a trace: the loop's labels in a row, and under it what ran meanwhile."""
    rows = [("label", "seconds", "share")]
    lanes = ["labels", *seen.lanes]
    alt = (
        f"Rows over time: {', '.join(lanes)}. Where the labels say {WAITING}, the rows below "
        f"are nearly empty."
    )
    with canvas(title, alt, subtitle, rows) as ax:
        for label, colour in COLOURS.items():
            bars = [(start - seen.start, length) for start, length in seen.labels[label]]
            ax.broken_barh(bars, (-0.3, 0.6), facecolor=colour, label=label)
            seconds = sum(length for _, length in bars)
            rows.append((label, f"{seconds:.2f}", f"{seen.share(label):.0%}"))
        for y, spans in enumerate(seen.lanes.values(), 1):
            bars = [(start - seen.start, length) for start, length in spans]
            ax.broken_barh(bars, (y - 0.3, 0.6), facecolor=style.INK)
        ax.set(
            xlabel="seconds",
            xlim=(0, seen.seconds),
            ylim=(len(lanes) - 0.5, -0.6),
        )
        ax.set_yticks(range(len(lanes)), lanes)
        ax.grid(False)
    return ax.figure


def trainer_trace(path: Path, title: str, subtitle: str):
    """Return a figure of a trace file of a `Trainer`, a row for each of PYTORCH_LABELS found.

    On a GPU the last row has its kernels.
    """
    events = json.loads(path.read_text())["traceEvents"]
    lanes: dict[str, list[Span]] = {}
    for event in events:
        kind = event.get("cat")
        if event["ph"] != "X" or kind == "gpu_user_annotation":  # no span, or a label again
            continue
        span = (event["ts"] / 1e3, event["dur"] / 1e3)
        if kind == "kernel":
            lanes.setdefault(KERNELS, []).append(span)
        for label in PYTORCH_LABELS:
            if event["name"].startswith(label):
                lanes.setdefault(label, []).append(span)
    shown = [label for label in (*PYTORCH_LABELS, KERNELS) if label in lanes]
    start = min(begin for spans in lanes.values() for begin, _ in spans)
    end = max(sum(span) for spans in lanes.values() for span in spans)
    rows = [("label", "ms", "share")]
    alt = f"{title}. Rows over time: {', '.join(shown)}."
    with canvas(title, alt, subtitle, rows) as ax:
        for y, label in enumerate(shown):
            spans = merged(lanes[label])
            bars = [(begin - start, length) for begin, length in spans]
            ax.broken_barh(bars, (y - 0.3, 0.6), facecolor=PYTORCH_LABELS.get(label, style.INK))
            covered = sum(length for _, length in spans)
            rows.append((label, f"{covered:.1f}", f"{covered / (end - start):.0%}"))
        ax.set(
            xlabel="milliseconds",
            xlim=(0, end - start),
            ylim=(len(shown) - 0.5, -0.6),
        )
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


def climb(
    run: Mapping[str, Sequence[int]],
    lengths: Sequence[int],
    room: int,
    title: str,
    subtitle: str,
):
    """Return a figure of steps of `lengths`: bytes "allocated" at most, and "reserved" afterwards.

    A line shows the card's `room` in bytes.
    """
    steps = range(1, len(lengths) + 1)
    held = [size / GiB for size in run["reserved"]]
    alt = (
        "Allocated goes up and down. Reserved only rises, at the samples longer than all "
        "before, in the end past the line."
    )
    with canvas(title, alt, subtitle) as ax:
        ax.bar(
            steps,
            held,
            width=1,
            color=style.PROCESS,
            label="reserved after the step",
        )
        peaks = [size / GiB for size in run["allocated"]]
        ax.bar(steps, peaks, color=BLUE, label="allocated at most")
        ax.axhline(
            room / GiB,
            color=style.ALARM,
            linestyle="--",
            label="what the card has for them",
        )
        for step, (before, after) in enumerate(pairwise(held), 2):
            if after > before + 0.1:  # a small segment of 2 MiB is not to be seen
                ax.text(step - 0.4, after + 0.2, f"{lengths[step - 1]:,}")
        ax.set(
            xlabel="step; where reserved climbs, the tokens of the step's samples",
            ylabel="GiB",
            ylim=(0, 1.15 * held[-1]),
        )
    return ax.figure
