"""The two passes of a measurement: an undisturbed one, and one under the tracker for the split.

On CUDA, in every phase and over the whole run: categories + workspace + unexplained = the
allocator's own peak. `workspace` is what cuBLAS holds (allocated falls by it when its workspaces
are cleared) and internal fragmentation (the allocator counts allocated and requested).
`unexplained` is what the tracker did not see: scratch that kernels allocate.
"""

import functools
import gc
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..hardware.gpu import source_of
from ..hardware.nvml import Sensors, nvml_snapshot
from ..hardware.overhead import UNIT
from ..private import of_torch
from ..recipe.recipe import Recipe
from ..report.report import Bytes, Phase, Report, Speed
from ..tracking.history import History, merge, to_report
from ..tracking.tracked import run_tracked
from ..tracking.tracker import Tracker
from ..training.training import build, train_step
from .host_memory import peak_rss

TRACKED_STEPS = 2  # the second is the first in which all states exist


Stats = dict[str, Any]  # the caching allocator's (`torch.cuda.memory_stats`)


@dataclass(frozen=True)
class Truth:
    """The results of undisturbed steps: bytes, and seconds a step."""

    speed: Speed
    stats: Stats = field(default_factory=dict)  # empty on a CPU
    workspace: int = 0  # the part of what is allocated that cuBLAS held
    # On the device by NVML, while all segments are still reserved; None if unknown.
    process: int | None = None
    rss: int | None = None  # on a CPU, the process's peak resident set
    notes: tuple[str, ...] = ()


def clean_pass(
    recipe: Recipe,
    repeats: int,
    warmup: int,
    device: str,
    before: Sensors,
) -> Truth:
    """Train `warmup + repeats` steps, or cycles of such, undisturbed, then free everything.

    `before`: the sensors before CUDA started.
    """
    is_cuda = device == "cuda"
    training = build(recipe, device)
    if recipe.torch_compile:
        training.model.compile()
    if is_cuda:
        torch.cuda.synchronize()
        # Loading is no part of training: `Trainer.train` begins so too (`free_memory`).
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(warmup + repeats):
        start = time.perf_counter()
        for _ in range(training.cycle):
            train_step(training)
        if is_cuda:
            torch.cuda.synchronize()
        if step >= warmup:
            seconds.append((time.perf_counter() - start) / training.cycle)
    median = statistics.median(seconds)
    speed = Speed(
        median=median,
        low=min(seconds),
        high=max(seconds),
        repeats=repeats,
        tokens_per_second=recipe.tokens / median,
    )
    truth = truth_of(speed, device, before)
    if is_cuda:
        # The tracked pass builds everything again, and both at once would not fit.
        del training
        gc.collect()
        torch.cuda.empty_cache()
    return truth


def truth_of(speed: Speed, device: str, before: Sensors) -> Truth:
    """Return what the allocator, the card and the host say now, at the end of a clean pass."""
    if device != "cuda":
        return Truth(speed, rss=peak_rss())
    stats = torch.cuda.memory_stats()
    process, notes = process_bytes(nvml_snapshot(torch.cuda.current_device()), before)
    workspace = clear_cublas_workspaces()
    return Truth(speed, stats, workspace, process, notes=notes)


def clear_cublas_workspaces() -> int:
    """Free cuBLAS's workspaces until the next matmul; return their bytes.

    There is one for each handle and stream, and a handle for each thread, forward's and autograd's
    (`CublasHandlePool.cpp`).
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    of_torch.clear_cublas_workspaces()
    return before - torch.cuda.memory_allocated()


def process_bytes(
    now: Sensors,
    before: Sensors,
) -> tuple[int | None, tuple[str, ...]]:
    """Return this process's bytes on the device, and notes.

    NVML may know no processes, as in a container: then it is what the whole device has more.
    """
    if now.process:
        return now.process, ()
    if now.used is None or before.used is None:
        why = now.reason or now.missing.get("process", "NVML does not tell")
        return None, (f"process: not known, {why}",)
    note = "process: the device's memory in use, less what was in use before"
    return now.used - before.used, (note,)


def tracked_pass(recipe: Recipe, device: str, truth: Truth) -> Report:
    """Run two steps under the tracker to split `truth`.

    On CUDA every phase is balanced against the allocator.
    """
    is_cuda = device == "cuda"
    training = build(recipe, device)  # alive until the last reading
    tracker = Tracker(device, round_to=UNIT if is_cuda else 1)
    readings: list[Stats] = []  # one at the start of each phase, of the stretch before it
    read = functools.partial(read_peaks, readings)
    run_tracked(training, tracker, TRACKED_STEPS, device, read if is_cuda else None)
    history = History(tracker.log, tracker.marks)
    report = to_report(
        history,
        source_of(device),
        recipe,
        device,
    )
    take_truth(report, truth)
    if recipe.torch_compile:
        split = "the split that of the eager"
        report.notes.append(f"torch_compile: peak and time are those of the compiled step, {split}")
    if is_cuda:
        read()  # the last stretch has no next one
        balance(report, history, readings, truth, clear_cublas_workspaces())
    return report


def read_peaks(readings: list[Stats]) -> None:
    """Add the allocator's statistics to `readings`, and begin a stretch with peaks of its own."""
    torch.cuda.synchronize()
    readings.append(torch.cuda.memory_stats())
    torch.cuda.reset_peak_memory_stats()


def take_truth(report: Report, truth: Truth) -> None:
    """Give the tracked pass's report the clean one's time, host memory and notes."""
    report.speed = truth.speed
    report.rss = truth.rss
    report.notes += truth.notes


def balance(
    report: Report,
    history: History,
    readings: list[Stats],
    truth: Truth,
    workspace: int,
) -> None:
    """Close the balance of `report`.

    That of every phase with the tracked pass's allocator, of the peak with the clean one's.

    Args:
        readings: one for each of the history's stretches, of which the first is loading.
        workspace: what cuBLAS held at the end of the tracked pass, and so throughout the last step
            (it has all from the first backward pass on).
    """
    rounding = _rounding(history)

    def close(
        position: int,
        stats: Stats,
        moment: str,
        cublas: int,
    ) -> Bytes:
        """Return the split at `position` with its workspace.

        What the allocator has beyond it is unexplained.
        """
        allocated = stats[f"allocated_bytes.all.{moment}"]
        requested = stats[f"requested_bytes.all.{moment}"]
        split = history.split(position)
        fragmentation = 0
        if requested:  # not all releases count requests
            fragmentation = max(0, allocated - requested - int(rounding[position]))
        split = replace(split, workspace=split.workspace + cublas + fragmentation)
        return replace(split, unexplained=allocated - split.total)

    pairs = list(zip(history.stretches, readings, strict=True))
    phases = []
    for (name, start, end), stats in pairs[len(pairs) - len(history.last_step) :]:
        at = history.highest(start, end)
        peak = close(at, stats, "peak", workspace)
        after = close(end, stats, "current", workspace)
        phases.append((name, Phase(peak, after, history.cause(at, start))))
    _, _, end_of_loading = history.stretches[0]
    loaded = close(end_of_loading, readings[0], "current", 0)
    report.phases = {"load": Phase(loaded, loaded), **merge(phases)}
    report.peak = close(
        history.highest(),
        truth.stats,
        "peak",
        truth.workspace,
    )
    _fill_in(report, truth, workspace)
    # Without the first reading, which is of loading.
    tracked = max(stats["allocated_bytes.all.peak"] for stats in readings[1:])
    # Both passes train the same, so another peak says that the tracker disturbed it.
    if tracked != report.allocated:
        peaks = f"{tracked:,} bytes, the clean one at {report.allocated:,}"
        report.notes.append(f"the tracked pass peaked at {peaks}")


def _fill_in(report: Report, truth: Truth, workspace: int) -> None:
    """Put the clean pass's figures into `report`, and cuBLAS's workspace into its timeline."""
    timeline = []
    for moment in report.timeline:
        split = replace(moment.bytes, workspace=workspace)
        timeline.append(replace(moment, bytes=split))
    report.timeline = timeline
    report.allocated = truth.stats["allocated_bytes.all.peak"]
    report.requested = truth.stats["requested_bytes.all.peak"]
    report.reserved = truth.stats["reserved_bytes.all.peak"]
    report.process = truth.process


def _rounding(history: History) -> np.ndarray:
    """Return after each event what the allocator's rounding adds to the living storages."""
    changes = [0]
    for size, storage, _ in history.log:
        requested = storage.asked if size > 0 else -storage.asked
        changes.append(size - requested)
    return np.cumsum(changes)
