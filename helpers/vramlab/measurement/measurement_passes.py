"""The two passes of a measurement: an undisturbed one for the truth, and one under the tracker for the split.

On CUDA, in every phase and over the whole run: categories + workspace + unexplained = the allocator's own peak.
`workspace` is what cuBLAS holds (allocated falls by it when its workspaces are cleared) and internal fragmentation (the
allocator counts allocated and requested). `unexplained` is what the tracker did not see: scratch that kernels allocate.
"""

import gc
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..hardware.gpu import source_of
from ..hardware.nvml import Sensors, nvml_snapshot
from ..hardware.overhead import UNIT
from ..recipe.recipe import Recipe
from ..report.report import Bytes, Phase, Report, Speed
from ..tracking.history import History, merge, to_report
from ..tracking.tracked import run_tracked
from ..tracking.tracker import Tracker
from ..training.training import build, train_step
from .host_memory import peak_rss

TRACKED_STEPS = 2  # the second is the first in which all states exist


@dataclass(frozen=True)
class Truth:
    """The results of undisturbed steps: bytes, and seconds a step."""

    speed: Speed
    stats: dict[str, Any] | None = None  # the caching allocator's (`torch.cuda.memory_stats`); None on a CPU
    workspace: int = 0  # the part of what is allocated that cuBLAS held
    process: int | None = None  # on the device by NVML, while all segments are still reserved; None if unknown
    rss: int | None = None  # on a CPU, the process's peak resident set
    notes: tuple[str, ...] = ()


def clean_pass(recipe: Recipe, repeats: int, warmup: int, device: str, before: Sensors) -> Truth:
    """Train `warmup + repeats` steps undisturbed, then free everything. `before`: the sensors before CUDA started."""
    cuda = device == "cuda"
    training = build(recipe, device)
    if recipe.torch_compile:
        training.model.compile()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # loading is no part of training: `Trainer.train` begins so too (`free_memory`)
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(warmup + repeats):
        start = time.perf_counter()
        train_step(training)
        if cuda:
            torch.cuda.synchronize()
        if step >= warmup:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    speed = Speed(median, min(seconds), max(seconds), repeats, recipe.tokens / median)
    if not cuda:
        return Truth(speed, rss=peak_rss())
    stats = torch.cuda.memory_stats()
    process, notes = process_bytes(nvml_snapshot(torch.cuda.current_device()), before)
    workspace = clear_cublas_workspaces()
    del training
    gc.collect()
    torch.cuda.empty_cache()
    return Truth(speed, stats, workspace, process, notes=notes)


def clear_cublas_workspaces() -> int:
    """Free cuBLAS's workspaces until the next matmul; return their bytes.

    There is one for each handle and stream, and a handle for each thread, forward's and autograd's
    (`CublasHandlePool.cpp`).
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # newer releases keep none between calls
    if clear:
        clear()
    return before - torch.cuda.memory_allocated()


def process_bytes(now: Sensors, before: Sensors) -> tuple[int | None, tuple[str, ...]]:
    """Return this process's bytes on the device and, where NVML knows no processes, as in a container, a note."""
    if now.process:
        return now.process, ()
    if now.used is None or before.used is None:
        why = now.reason or now.missing.get("process", "NVML does not tell")
        return None, (f"process: not known, {why}",)
    return now.used - before.used, ("process: the device's memory in use, less what was in use before",)


def tracked_pass(recipe: Recipe, device: str, truth: Truth) -> Report:
    """Run two steps under the tracker to split `truth`. On CUDA every phase is balanced against the allocator."""
    cuda = device == "cuda"
    training = build(recipe, device)  # alive until the last reading
    tracker = Tracker(device, round_to=UNIT if cuda else 1)
    readings: list[dict[str, Any]] = []  # one at the start of each phase, of the stretch before it

    def read() -> None:
        torch.cuda.synchronize()
        readings.append(torch.cuda.memory_stats())
        torch.cuda.reset_peak_memory_stats()

    run_tracked(training, tracker, TRACKED_STEPS, device, read if cuda else None)
    history = History(tracker.log, tracker.marks)
    report = to_report(history, source_of(device), recipe, device)
    report.speed, report.rss = truth.speed, truth.rss
    report.notes += truth.notes
    if recipe.torch_compile:
        report.notes.append("torch_compile: peak and time are those of the compiled step, the split that of the eager")
    if cuda:
        read()  # the last stretch has no next one
        balance(report, history, readings, truth, clear_cublas_workspaces())
    return report


def balance(report: Report, history: History, readings: list[dict[str, Any]], truth: Truth, workspace: int) -> None:
    """Close the balance of `report`: of every phase with the tracked pass's allocator, of the peak with the clean one's.

    `readings`: one for each of the history's stretches, of which the first is loading. `workspace`: what cuBLAS held at
    the end of the tracked pass, and so throughout the last step (it has all from the first backward pass on).
    """
    rounding = np.cumsum([0, *(n - (s.asked if n > 0 else -s.asked) for n, s, _ in history.log)])

    def close(position: int, stats: dict[str, Any], moment: str, cublas: int) -> Bytes:
        """Return the split at `position` with its workspace, and what the allocator has beyond it as unexplained."""
        allocated, asked = (stats[f"{kind}_bytes.all.{moment}"] for kind in ("allocated", "requested"))
        split = history.split(position)
        fragmentation = max(0, allocated - asked - int(rounding[position])) if asked else 0  # not all count requests
        split = replace(split, workspace=split.workspace + cublas + fragmentation)
        return replace(split, unexplained=allocated - split.total)

    phases = []
    pairs = list(zip(history.stretches, readings, strict=True))
    for (name, start, end), seen in pairs[len(pairs) - len(history.last_step) :]:
        peak = close(history.highest(start, end), seen, "peak", workspace)
        phases.append((name, peak, close(end, seen, "current", workspace)))
    loaded = close(history.stretches[0][2], readings[0], "current", 0)
    report.phases = {"load": Phase(loaded, loaded), **merge(phases)}
    report.peak = close(history.highest(), truth.stats, "peak", truth.workspace)
    report.timeline = [replace(m, bytes=replace(m.bytes, workspace=workspace)) for m in report.timeline]
    for kind in ("allocated", "requested", "reserved"):
        setattr(report, kind, truth.stats[f"{kind}_bytes.all.peak"])
    report.process = truth.process
    tracked = max(seen["allocated_bytes.all.peak"] for seen in readings[1:])
    if tracked != report.allocated:
        report.notes.append(f"the tracked pass peaked at {tracked:,} bytes, the clean one at {report.allocated:,}")
