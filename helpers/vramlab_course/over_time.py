"""Figures over time: the allocator's events, a memory history by line of code, a profiler's trace."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from vramlab.faces.plot import style
from vramlab.faces.plot.splits import amount, check_unit, draw_limit, exact, limit_of
from vramlab.report.report import format_bytes

from .fragmentation import Followed
from .memory_history import Snapshot
from .trace import LOADING, Trace

POINTS = 1500  # a figure has fewer pixels
LETTERS = 72  # of a line of code in the legend


@style.styled()
def events(followed: Followed, limit=None, title: str = "Reserved against allocated", subtitle: str = "", unit="GiB"):
    """Draw allocated (area) and reserved (line) after every event, on an axis of steps; returns the figure."""
    size = check_unit(unit)
    figure, ax = style.start(title, subtitle)
    at = _thin(followed.allocated, followed.reserved)
    steps = np.interp(at, [0, *followed.ends], range(-1, len(followed.ends)))  # loading is −1 to 0
    allocated, reserved = (np.array(line)[at] / size for line in (followed.allocated, followed.reserved))
    ax.fill_between(steps, 0, allocated, step="post", facecolor="#56B4E9", linewidth=0, label="allocated")
    ax.plot(steps, reserved, drawstyle="steps-post", color="#D55E00", linewidth=1.6, label="reserved")
    if limit is not None:
        draw_limit(ax, limit, unit)
    ax.set_xlim(-1, len(followed.mallocs))
    ax.set_ylim(0, max(reserved.max(), limit_of(limit)[0] / size if limit else 0) * 1.1)
    ax.set_xlabel("steps done (left of 0: loading, and a first step)")
    ax.set_ylabel(unit)
    rows = [("step", f"allocated, most, {unit}", f"reserved at its end, {unit}", "cudaMalloc", "cudaFree")]
    for i, (start, end) in enumerate(itertools.pairwise(followed.ends), 1):
        most = exact(max(followed.allocated[start:end]), unit)
        calls = map(str, (followed.mallocs[i - 1], followed.given_back[i - 1]))
        rows.append((str(i), most, exact(followed.reserved[end - 1], unit), *calls))
    most = f"allocated at most {amount(followed.peak_allocated, unit)}, reserved {amount(followed.peak_reserved, unit)}"
    alt = f"{title}, {subtitle}: over {len(followed.mallocs)} steps {most} {unit}."
    return style.finish(figure, rows, alt)


@style.styled()
def blocks(snapshot: Snapshot, largest: int = 4, title: str = "Memory history", subtitle: str = "", unit: str = "MiB"):
    """Draw what is allocated after every event, stacked by the line of code that allocated it; returns the figure."""
    size = check_unit(unit)
    figure, ax = style.start(title, subtitle)
    count = len(snapshot.events)
    changes: dict = {}
    for block in snapshot.blocks:
        change = changes.setdefault(block.line, np.zeros(count + 1))
        change[block.born] += block.size
        if block.freed is not None:
            change[block.freed] -= block.size
    layers = {line: change.cumsum() for line, change in changes.items()}
    shown = sorted(layers, key=lambda line: (-layers[line].max(), line))[:largest]
    at = _thin(snapshot.allocated)
    base = np.zeros(len(at))
    looks = style.look([str(line) for line in shown])
    drawn = []
    for line in shown:
        top = base + layers[line][at] / size
        drawn.append(ax.fill_between(at, base, top, step="post", **looks[str(line)]))
        base = top
    total = snapshot.allocated[at] / size
    drawn.append(ax.fill_between(at, base, total, step="post", facecolor="#DDDDDD", edgecolor=style.INK, linewidth=0.3))
    names = [*(_short(str(line)) for line in shown), "all other lines"]
    figure.legend(drawn, names, loc="outside lower left", ncols=1, handlelength=1.8)  # a line of code needs the width
    ax.set_xlim(0, count)
    ax.set_ylim(0, total.max() * 1.12)
    ax.set_xlabel(f"events of the allocator ({snapshot.source})")
    ax.set_ylabel(unit)
    rows = [("line, at the peak", "blocks", unit)]
    rows += [(str(group.line), str(group.count), exact(group.size, unit)) for group in snapshot.largest(count=largest)]
    peak = format_bytes(int(snapshot.allocated.max()), unit)
    most = "".join(f"; largest at the peak: {_short(str(group.line))}" for group in snapshot.largest(count=1))
    return style.finish(figure, rows, f"{title}, {subtitle}: highest {peak}{most}.")


@style.styled()
def trace(traces: Mapping[str, Trace], regions: Sequence[str], title: str = "Where the time goes", subtitle: str = ""):
    """Draw labelled regions of traces above their work, on one axis of time; returns the figure.

    Args:
        regions: the labels to draw, in the order of the legend; the wait for a DataLoader is always drawn.
    """
    figure, axes = style.start(title, subtitle, rows=len(traces), sharex=True)
    axes = axes if len(traces) > 1 else [axes]
    looks = style.look(["waiting", *regions])
    looks["waiting"] = {"facecolor": "#D55E00", "hatch": "xx", "edgecolor": style.INK, "linewidth": 0.5}
    rows = [("seconds", "waiting", *regions, "nothing computed")]
    for ax, (name, found) in zip(axes, traces.items(), strict=True):
        spans = {label: [] for label in ("waiting", *regions)}
        for event in found.labelled:
            label = "waiting" if event.name.startswith(LOADING) else event.name
            spans.get(label, []).append((event.start, event.seconds))
        for label, passages in spans.items():
            ax.broken_barh(passages, (1.1, 0.8), label=label, **looks[label])
        busy = [(start, end - start) for start, end in found.busy]
        ax.broken_barh(busy, (0.1, 0.8), facecolor="#777777", label="computing")
        ax.set_yticks([0.5, 1.5], ["computing", "region"])
        ax.set_title(name if len(traces) > 1 else subtitle, loc="left", color="#444444")
        ax.grid(axis="y", visible=False)
        sums = (f"{sum(n for _, n in passages):.3f}" for passages in spans.values())
        rows.append((name, *sums, f"{found.idle:.0%}"))
    axes[-1].set_xlabel("seconds")
    idle = "; ".join(f"{name}: nothing computed for {found.idle:.0%} of the time" for name, found in traces.items())
    return style.finish(figure, rows, f"{title}. Labelled regions above the computing below them. {idle}.")


def _thin(*lines: Sequence[float]) -> np.ndarray:
    """About POINTS indices: the first, the last, and of each run of neighbours every line's highest and lowest."""
    count = len(lines[0])
    width = -(-2 * len(lines) * count // POINTS)
    chosen = {0, count - 1}
    for start in range(0, count, width):
        for line in lines:
            part = np.asarray(line[start : start + width])
            chosen |= {start + int(part.argmax()), start + int(part.argmin())}
    return np.array(sorted(chosen))


def _short(text: str) -> str:
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"
