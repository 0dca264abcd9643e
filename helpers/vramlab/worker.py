"""The child process of `measure`: `python -m vramlab.worker ORDER ANSWER` runs one recipe and writes one report."""

import contextlib
import gc
import json
import resource
import statistics
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .cuda import ALLOCATION_UNIT
from .errors import RecipeError
from .history import History
from .nvml import nvml_snapshot
from .recipe import Recipe
from .records import write_atomically
from .report import Bytes, Phase, Report, Speed, environment
from .simulate import to_report
from .tracked import run_tracked
from .tracker import Tracker
from .training import build, train_step


def main(order_file: str, answer_file: str) -> None:
    """Run the order and write the answer: a report, or the error that stopped it."""
    order = json.loads(Path(order_file).read_text())
    try:
        recipe = Recipe(**order["recipe"])
        answer = run(recipe, order["repeats"], order["warmup"], order["device"]).to_dict()
    except RecipeError as error:
        answer = {"error": "RecipeError", "args": [error.field, str(error.value), error.allowed]}
    except Exception as error:
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} (at {Path(where.filename).name}:{where.lineno})"
        answer = {"error": type(error).__name__, "message": message}
    write_atomically(Path(answer_file), json.dumps(answer))


def run(recipe: Recipe, repeats: int, warmup: int, device: str) -> Report:
    """Both passes of `recipe` on `device`; out of memory comes back as a report with status "oom"."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        truth = clean_pass(recipe, repeats, warmup, device)
        report = tracked_pass(recipe, device, truth)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        message = f"{str(error).split('. See')[0].strip()} Free now: {free:,} of {total:,} bytes."
        more = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return Report.failed("measured", recipe, device, "oom", message, **more)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        return Report.failed("measured", recipe, device, "oom", str(error).split("\n")[0])
    report.rss = truth.get("rss")
    if device == "cpu":
        report.notes.append(f"the process held {started:,} bytes before the model was built")
    return report


def clean_pass(recipe: Recipe, repeats: int, warmup: int, device: str) -> dict[str, Any]:
    """Undisturbed steps: the allocator's peaks, the device's own figure, seconds a step. Frees all it made."""
    cuda = device == "cuda"
    training = build(recipe, device)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for i in range(warmup + repeats):
        start = time.perf_counter()
        train_step(training)
        if cuda:
            torch.cuda.synchronize()
        if i >= warmup:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    truth: dict[str, Any] = {"speed": Speed(median, min(seconds), max(seconds), repeats, recipe.tokens / median)}
    if cuda:
        statistics_ = torch.cuda.memory_stats()
        sensors = nvml_snapshot()
        truth |= {
            "allocated": statistics_["allocated_bytes.all.peak"],
            "requested": statistics_["requested_bytes.all.peak"],
            "reserved": statistics_["reserved_bytes.all.peak"],
            "process": sensors.process or sensors.used,
            "sensors": sensors,
        }
        del training
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        truth["workspace"] = before - torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
    else:
        truth["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return truth


class AllocatorPhases:
    """The allocator's own peak and end of every stretch, read as each phase begins. Bytes."""

    def __init__(self):
        self.stretches: list[tuple[int, int]] = []

    def __call__(self) -> None:
        torch.cuda.synchronize()
        self.stretches.append((torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()))
        torch.cuda.reset_peak_memory_stats()


def tracked_pass(recipe: Recipe, device: str, truth: dict[str, Any]) -> Report:
    """Two steps under the tracker; on CUDA every phase is balanced against the allocator."""
    tracker = Tracker(device, round_to=ALLOCATION_UNIT if device == "cuda" else 1)
    allocator = AllocatorPhases() if device == "cuda" else None
    if allocator:
        torch.cuda.reset_peak_memory_stats()
    training = build(recipe, device)
    run_tracked(training, tracker, 2, device, allocator)
    history = History(tracker.log, tracker.marks, allocator=device == "cuda")
    report = to_report(history, "measured", recipe, device)
    report.speed = truth["speed"]
    if allocator:
        allocator()
        balance(report, history, allocator, truth)
    return report


def balance(report: Report, history: History, allocator: AllocatorPhases, truth: dict[str, Any]) -> None:
    """Close the balance: categories + workspace + unexplained = the allocator's peak, phase by phase and over all."""
    workspace = truth["workspace"]
    steps = len(history.stretches) - len(history.last_step)
    phases: dict[str, Phase] = {}
    for (name, start, end), (peak, after) in list(zip(history.stretches, allocator.stretches, strict=True))[steps:]:
        highest = _close(history.split(history.highest(start, end)), peak, workspace)
        if name in phases and phases[name].peak.total >= highest.total:
            highest = phases[name].peak
        phases[name] = Phase(highest, _close(history.split(end), after, workspace))
    report.phases = {"load": report.phases["load"], **phases}
    report.allocated, report.requested = truth["allocated"], truth["requested"]
    report.reserved, report.process = truth["reserved"], truth["process"]
    report.peak = _close(report.peak, truth["allocated"], workspace)
    sensors = truth["sensors"]
    properties = torch.cuda.get_device_properties(0)
    report.environment = environment(
        gpu=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        total_memory=properties.total_memory,
        driver=sensors.driver,
        cuda=torch.version.cuda,
    )


def _close(split: Bytes, allocated: int, workspace: int) -> Bytes:
    split = replace(split, workspace=split.workspace + workspace)
    return replace(split, unexplained=allocated - split.total)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(*sys.argv[1:3])
