"""Measure how many times as long one function takes as another.

    from vramlab_course.pace import pace, stepper
    live(pace(stepper(recipe.replace(gradient_checkpointing=True)), stepper(recipe)))

Seconds vary between machines and minutes. The ratio of two functions that run in turn varies much less.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vramlab.hardware.gpu import current_device
from vramlab.recipe.recipe import Recipe


@dataclass(frozen=True)
class Pace:
    """How many times as long one function takes as another: median, lowest and highest of the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} × as long ({self.low:.2f} to {self.high:.2f})"

    def per(self, times: float) -> "Pace":
        """The pace per unit of work when the function does `times` as much: 2 for a batch twice as large."""
        return Pace(self.median / times, self.low / times, self.high / times)


def pace(function: Callable[[], Any], against: Callable[[], Any], rounds: int = 5) -> Pace:
    """Time both functions in turn, `rounds` times after a warm-up call of each. Raises ValueError for no rounds."""
    if rounds < 1:
        raise ValueError(f"pace needs a round at least, not {rounds}.")
    pair = (function, against)
    for call in pair:
        call()
    ratios = []
    for turn in range(rounds):
        taken = {}
        for which in (0, 1) if turn % 2 else (1, 0):  # the first one may find colder caches
            taken[which] = seconds(pair[which])
        ratios.append(taken[0] / taken[1])
    return Pace(statistics.median(ratios), min(ratios), max(ratios))


def seconds(function: Callable[[], Any]) -> float:
    """Seconds of one call, until the GPU has finished too."""
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def stepper(recipe: Recipe) -> Callable[[], Any]:
    """A function that trains one step of `recipe` on this machine's device per call."""
    from vramlab.training.training import build, train_step

    training = build(recipe, current_device().kind)
    if recipe.torch_compile:
        training.model.compile()
    return lambda: train_step(training)
