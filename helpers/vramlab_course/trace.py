"""Summarise a `torch.profiler` trace: labelled regions, gaps between work, time by kind of operator.

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train()
    trace = Trace.of(profiler)
    print(trace.regions()["forward"].seconds, trace.idle, trace.gaps(0.01))

Work is what the GPU executes (kernels and copies) if the trace has any, else PyTorch's operators on the CPU. The file is
in Chrome's trace format, which Perfetto (ui.perfetto.dev) and TensorBoard show; its times are microseconds.
"""

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from vramlab.report.errors import VramLabError

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what a GPU executes
LOADING = "enumerate(DataLoader)"  # torch.utils.data's label of the wait for a batch
# The first kind whose words are in the name of an operator or kernel counts.
KINDS = {
    "attention": ("attention", "flash", "fmha"),
    "contractions": ("mm", "matmul", "linear", "conv", "gemm", "einsum"),
    "normalizations": ("softmax", "norm"),
    "copies": ("copy", "memcpy", "_to_copy", "cat", "clone", "contiguous"),
}


class TraceError(VramLabError, ValueError):
    """A file that is no trace, or a trace that lacks what was asked for."""


@dataclass(frozen=True)
class Event:
    """One event: start and end in seconds from the trace's first event, and its thread."""

    name: str
    kind: str
    start: float
    end: float
    thread: Any

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Region:
    """A labelled region and the seconds of each passage through it."""

    label: str
    passages: tuple[float, ...]

    @property
    def count(self) -> int:
        """Number of passages."""
        return len(self.passages)

    @property
    def seconds(self) -> float:
        """Seconds of all passages."""
        return sum(self.passages)


@dataclass(frozen=True)
class Gap:
    """An interval without work, in seconds from the trace's first event, and the region that covers most of it."""

    start: float
    end: float
    region: str

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


class Trace:
    """The events of a trace, ordered by start."""

    def __init__(self, events: Iterable[Event]):
        self.events = sorted(events, key=lambda event: (event.start, -event.end))
        if not self.work:
            raise TraceError("the trace holds no work: neither a GPU's kernels nor operators of PyTorch.")

    @classmethod
    def of(cls, profiler: Any) -> "Trace":
        """The trace of a `torch.profiler.profile` after its with-block. Raises TraceError if it was saved before."""
        with tempfile.TemporaryDirectory(prefix="vramlab-") as folder:
            path = os.path.join(folder, "trace.json")
            try:
                profiler.export_chrome_trace(path)
            except RuntimeError as error:  # a profiler writes its trace once
                raise TraceError(f"the profiler gives no trace ({error}): Trace.load reads the file.") from error
            return cls.load(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Trace":
        """Read a trace from a .json or .json.gz file. Raises TraceError for anything else."""
        path = Path(path)
        try:
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
                found = [entry for entry in json.load(file)["traceEvents"] if entry.get("ph") == "X"]
            begin = min((entry["ts"] for entry in found), default=0)
            return cls(
                Event(
                    str(entry["name"]),
                    str(entry.get("cat", "")),
                    (entry["ts"] - begin) / 1e6,
                    (entry["ts"] + entry.get("dur", 0) - begin) / 1e6,
                    entry.get("tid"),
                )
                for entry in found
                if entry.get("cat") in ("cpu_op", "user_annotation", *DEVICE)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"{path.name} is no trace of torch.profiler ({type(error).__name__}: {error}).") from error

    # --- regions --------------------------------------------------------------------------------------------------

    @cached_property
    def labelled(self) -> list[Event]:
        """Events with a label, from `record_function` or from PyTorch itself."""
        return [event for event in self.events if event.kind == "user_annotation"]

    def regions(self) -> dict[str, Region]:
        """Labelled regions by label, in the order of their first passage; an outer region includes its inner ones."""
        passages: dict[str, list[float]] = {}
        for event in self.labelled:
            passages.setdefault(event.name, []).append(event.seconds)
        return {label: Region(label, tuple(found)) for label, found in passages.items()}

    def waiting(self) -> tuple[float, ...]:
        """Seconds that the loop waited for each batch of a DataLoader. Raises TraceError without a DataLoader."""
        found = tuple(event.seconds for event in self.labelled if event.name.startswith(LOADING))
        if not found:
            raise TraceError("the trace has no DataLoader in it.")
        return found

    # --- work and gaps --------------------------------------------------------------------------------------------

    @property
    def on_device(self) -> bool:
        """Whether the work is done by a GPU."""
        return any(event.kind in DEVICE for event in self.events)

    @cached_property
    def work(self) -> list[Event]:
        """Kernels and copies of the GPU, else PyTorch's operators."""
        device = [event for event in self.events if event.kind in DEVICE]
        return device or [event for event in self.events if event.kind == "cpu_op"]

    @cached_property
    def busy(self) -> list[tuple[float, float]]:
        """Intervals (start, end) with work, ordered and disjoint."""
        stretches: list[list[float]] = []
        for event in self.work:
            if stretches and event.start <= stretches[-1][1]:
                stretches[-1][1] = max(stretches[-1][1], event.end)
            else:
                stretches.append([event.start, event.end])
        return [(start, end) for start, end in stretches]

    @property
    def seconds(self) -> float:
        """From the start of the first event to the end of the last."""
        return max(event.end for event in self.events) - self.events[0].start

    @property
    def idle(self) -> float:
        """The share of the time without work."""
        return 1 - sum(end - start for start, end in self.busy) / self.seconds

    def gaps(self, least: float = 0.001) -> list[Gap]:
        """Intervals of at least `least` seconds without work, longest first."""
        borders = [self.events[0].start, *(t for stretch in self.busy for t in stretch)]
        borders.append(max(event.end for event in self.events))
        holes = [(a, b) for i, (a, b) in enumerate(pairwise(borders)) if i % 2 == 0 and b - a >= least]
        return sorted((Gap(a, b, self._region(a, b)) for a, b in holes), key=lambda gap: gap.start - gap.end)

    def _region(self, start: float, end: float) -> str:
        """The innermost label that covers over half of an interval, or ""."""
        covered = [
            (min(event.end, end) - max(event.start, start), -event.seconds, event.name) for event in self.labelled
        ]
        best = max(covered, default=(0, 0, ""))
        return best[2] if best[0] > 0.5 * (end - start) else ""

    # --- kinds ----------------------------------------------------------------------------------------------------

    def by_kind(self) -> dict[str, float]:
        """The share of the work's time by kind of operator, largest first; nested operators count by themselves."""
        own: Counter[int] = Counter()
        open_on: dict[Any, list[int]] = {}
        for i, event in enumerate(self.work):
            stack = open_on.setdefault(event.thread, [])
            while stack and self.work[stack[-1]].end <= event.start:
                stack.pop()
            own[i] += event.seconds
            if stack and not self.on_device:
                own[stack[-1]] -= event.seconds
            stack.append(i)
        shares: Counter[str] = Counter()
        for i, event in enumerate(self.work):
            shares[kind_of(event.name)] += own[i] / sum(own.values())
        return dict(shares.most_common())


def kind_of(name: str) -> str:
    """The kind of an operator or kernel by its name, "contractions" for "aten::addmm"."""
    lower = name.lower()
    return next(
        (kind for kind, words in KINDS.items() if any(word in lower for word in words)), "element-wise and other"
    )
