"""Chapter 07's pictures.

They show traces of a loop, a layer's times, a memory history, and the allocator's segments.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
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
BANDS = (BLUE, RED, GREEN, "#CC79A7", "#E69F00", "#BBBBBB")
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

    def computing(self, label: str) -> float:
        """The seconds under a label in which an operator ran on the host."""
        seconds = 0.0
        for start, length in self.labels[label]:
            for begin, took in self.lanes.get(OPERATORS, ()):
                # The overlap of two spans, 0 where they do not touch.
                first = max(start, begin)
                last = min(start + length, begin + took)
                seconds += max(0.0, last - first)
        return seconds


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


def layer_times(
    line: Mapping[int, float],
    measured: Mapping[int, float],
    title: str,
    subtitle: str,
):
    """Return a figure of a layer's seconds by tokens.

    The least ones are a line, the measured ones dots.
    """
    rows = [("tokens", "least, ms", "measured, ms")]
    for tokens, took in measured.items():
        least = line[tokens]
        rows.append((f"{tokens:,}", f"{1e3 * least:.2f}", f"{1e3 * took:.2f}"))
    alt = (
        "A line of the least time is flat for few tokens and then rises. The measured dots rise "
        "with it."
    )
    with canvas(title, alt, subtitle, rows) as ax:
        ax.plot(
            list(line),
            [1e3 * seconds for seconds in line.values()],
            label="the roofline: least time",
        )
        dots = [1e3 * seconds for seconds in measured.values()]
        ax.plot(
            list(measured),
            dots,
            "o",
            color=style.INK,
            markersize=8,
            label="measured",
        )
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
        ax.set_xticks(list(measured), [f"{n:,}" for n in measured])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    return ax.figure


def histories(
    snapshots: Mapping[str, "Snapshot"],
    batches: int,
    title: str,
    subtitle: str,
):
    """Return a figure of two histories, "leaking" and then another: what is new and alive.

    The bands are the lines that asked. A dotted line ends each of a history's `batches`, which
    make as many blocks as one another.
    """
    # The lines that hold most, in the order of the legend.
    lines = [group.line for group in snapshots["leaking"].largest(count=len(BANDS) - 1)]
    labels = [*(f"{line.file}:{line.number}" for line in lines), "all other lines"]
    alt = (
        f"{title}. Coloured bands over time, a band for each line of code, climb while leaking and "
        f"come down to zero when cured. Dotted lines are where a batch ends."
    )
    rows = [("MiB at the end of each batch",)]
    with canvas(title, alt, subtitle, rows) as ax:
        ax.margins(x=0, y=0.12)
        start = 0
        for name, snapshot in snapshots.items():
            count = len(snapshot.allocated)
            alive = np.zeros((len(labels), count))
            made = [block for block in snapshot.blocks if block.born]
            for block in made:
                # What no line of the legend asked for goes into the last band.
                band = lines.index(block.line) if block.line in lines else -1
                alive[band, block.born : block.freed] += block.size / MiB
            ax.stackplot(
                range(start, start + count),
                alive,
                colors=BANDS,
                labels=labels,
                step="post",
                linewidth=0,
            )
            each = len(made) // batches
            for end in [*(block.born - 1 for block in made[each::each]), count - 1]:
                ax.axvline(start + end, color=style.INK, linestyle=":")
                rows.append((f"{name}: {alive[:, end].sum():.1f}",))
            ax.text(start, ax.get_ylim()[1], f" {name}", va="top")
            start += count
        ax.set(xlabel="allocations and releases, in their order", ylabel="MiB alive")
    return ax.figure


def segments(
    held: Sequence[Sequence[tuple[int, int]]],
    request: int,
    title: str,
    subtitle: str,
):
    """Return a figure of segments, and the `request` of bytes above them.

    A segment is its pieces in the order of their addresses: (bytes, 1 if it is free).
    """
    rows = [("segment", "GiB", "largest free piece, GiB")]
    alt = (
        f"{title}. Bars of segments, most of them white, which is free; the request on top is "
        f"longer than any white part."
    )
    with canvas(title, alt, subtitle, rows) as ax:
        # Above the first segment, as the axis grows downwards.
        ax.barh(
            -1.2,
            request / GiB,
            0.8,
            color=style.ALARM,
            label="the next request",
        )
        for y, segment in enumerate(held):
            start = 0.0
            for size, free in segment:
                look = {"color": "white", "edgecolor": style.INK, "linewidth": 0.6, "label": "free"}
                if not free:
                    look = {"color": BLUE, "linewidth": 0, "label": "in use"}
                ax.barh(y, size / GiB, 0.8, left=start, **look)
                start += size / GiB
            # The largest alone counts: a request needs one block.
            largest = max((size for size, free in segment if free), default=0)
            rows.append((str(y + 1), f"{start:.2f}", f"{largest / GiB:.2f}"))
        ax.axvline(request / GiB, color=style.ALARM, linestyle=":")
        ax.set(
            xlabel="GiB; each bar is a segment, its blocks in the order of their addresses",
            yticks=[],
            ylim=(len(held) - 0.3, -2),
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
