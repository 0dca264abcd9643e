"""Chapter 07's timelines of a training loop and of the allocator's segments."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from vramlab.faces.plot import canvas, style
from vramlab.report.report import GiB

from ..fragmentation import Followed

if TYPE_CHECKING:
    from torch.profiler import profile

# Labels of a loop and their colours; PyTorch itself labels the first, under another name.
WAITING = "waiting for texts"
COLOURS = {WAITING: "#999999", "forward": "#0072B2", "backward": "#D55E00", "update": "#009E73"}
Spans = Mapping[str, list[tuple[float, float]]]


def labelled(profiler: "profile") -> Spans:
    """Return (start, length) in seconds of each passage through a label, by label."""
    spans: dict[str, list[tuple[float, float]]] = {label: [] for label in COLOURS}
    for event in profiler.events():
        label, span = event.name.replace("enumerate(DataLoader)", WAITING).split("#")[0], event.time_range
        if label in spans and event.device_type.name == "CPU":  # a GPU's side has the labels again
            spans[label].append((span.start / 1e6, span.elapsed_us() / 1e6))
    spans[WAITING].pop()  # the last finds no batch
    return spans


def loops(runs: Mapping[str, Spans], title: str, subtitle: str):
    """Return a figure of the labels of each run over time, the first run on top, with its length and share of waiting."""
    rows = [("loop", "seconds", "waiting")]
    alt = "Steps over time, one bar for each loop: the first waits before every step, the second for less of its time."
    with canvas(title, alt, subtitle, rows) as ax:
        for y, (name, spans) in enumerate(runs.items()):
            begin = min(start for found in spans.values() for start, _ in found)
            end = max(start + size for found in spans.values() for start, size in found) - begin
            for label, colour in COLOURS.items():
                bars = [(start - begin, size) for start, size in spans[label]]
                ax.broken_barh(bars, (y - 0.3, 0.6), facecolor=colour, label=label)
            waiting = sum(size for _, size in spans[WAITING]) / end
            ax.text(0, y - 0.35, f"{name}: {end:.1f} s, {waiting:.0%} waiting", va="bottom")
            rows.append((name, f"{end:.1f}", f"{waiting:.0%}"))
        ax.set(yticks=[], xlabel="seconds", ylim=(len(runs) - 0.5, -0.75))
    return ax.figure


def climb(run: Followed, lengths: list[int], room: int, title: str, subtitle: str):
    """Return a figure of reserved and allocated memory over steps of `lengths`, against the card's `room` in bytes."""
    steps, held = range(1, len(lengths) + 1), [size / GiB for size in run.between]
    peaks = [max(run.allocated[a:b]) / GiB for a, b in pairwise(run.ends)]
    alt = "Allocated goes up and down. Reserved only rises, at the texts longer than all before, in the end past the line."
    with canvas(title, alt, subtitle) as ax:
        ax.bar(steps, held[1:], width=1, color=style.PROCESS, label="reserved after the step")
        ax.bar(steps, peaks, color="#0072B2", label="allocated at most")
        ax.axhline(room / GiB, color=style.ALARM, linestyle="--", label="room on an RTX 4090")
        for step, length, before, after in zip(steps, lengths, held, held[1:], strict=False):
            if after > before:
                ax.text(step - 0.4, after - 0.2, f"{length:,}", va="top")
        ax.set(xlabel="step; where reserved climbs, the tokens of the step's texts", ylabel="GiB")
    return ax.figure
