"""The two passes of a measured generation: an undisturbed one, and one under the tracker."""

import functools
import statistics
import time
from itertools import pairwise
from typing import Any

import torch

from ..hardware.gpu import source_of
from ..hardware.nvml import Sensors
from ..hardware.overhead import UNIT
from ..recipe.generation import Generation
from ..recipe.recipe import Recipe
from ..report.report import Report, Speed
from ..tracking.history import History, to_report
from ..tracking.tracked import run_tracked_generation
from ..tracking.tracker import Tracker
from ..training.fixed_generation import build_generation
from .measurement_passes import (
    Stats,
    Truth,
    balance,
    clear_cublas_workspaces,
    read_peaks,
    take_truth,
    truth_of,
)


def clean_generation(
    recipe: Recipe,
    generation: Generation,
    device: str,
    before: Sensors,
) -> Truth:
    """Generate undisturbed, then free everything.

    `before`: the sensors before CUDA started.
    """
    is_cuda = device == "cuda"
    started = build_generation(recipe, generation, device=device)
    times: list[float] = []

    def on_step(made: int, cache: Any) -> None:
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    if is_cuda:
        torch.cuda.synchronize()
        # loading is no part of it
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    started.run(generation.new_tokens, on_step)
    # Differences between steps, so that loading the kernels of the first is in none of them.
    seconds = [later - earlier for earlier, later in pairwise(times)]
    made = recipe.batch_size * generation.num_return_sequences * generation.new_tokens
    speed = Speed(
        median=statistics.median(seconds),
        low=min(seconds),
        high=max(seconds),
        repeats=len(seconds),
        tokens_per_second=made / (times[-1] - begin),
    )
    truth = truth_of(speed, device, before)
    if is_cuda:
        # The tracked pass builds a model of its own.
        del started
        torch.cuda.empty_cache()
    return truth


def tracked_generation(
    recipe: Recipe,
    generation: Generation,
    device: str,
    truth: Truth,
) -> Report:
    """Generate under the tracker to split `truth`.

    On CUDA both phases are balanced against the allocator.
    """
    is_cuda = device == "cuda"
    started = build_generation(recipe, generation, device=device)  # alive until the last reading
    tracker = Tracker(device, round_to=UNIT if is_cuda else 1)
    readings: list[Stats] = []  # one at the start of each phase, of the stretch before it
    read = functools.partial(read_peaks, readings)
    at_phase = read if is_cuda else None
    run_tracked_generation(started, tracker, generation.new_tokens, at_phase)
    history = History(tracker.log, tracker.marks)
    report = to_report(
        history,
        source_of(device),
        recipe,
        device,
        title=generation.title(recipe),
    )
    take_truth(report, truth)
    if is_cuda:
        read()  # the last stretch has no next one
        balance(report, history, readings, truth, clear_cublas_workspaces())
        del report.phases["between_steps"]
    return report
