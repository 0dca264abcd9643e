"""How long one thing takes beside another, on a machine that does other things too.

    from vramlab_course.pace import pace, stepper
    live(pace(stepper(recipe.replace(gradient_checkpointing=True)), stepper(recipe)))

Seconds differ from machine to machine and from minute to minute; a ratio of two things that run in turn much less.
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
    """How many times as long as another thing one thing takes: the median of the rounds, the lowest and the highest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} × as long ({self.low:.2f} to {self.high:.2f})"

    def per(self, times: float) -> "Pace":
        """The same for a thing that does `times` as much: 2 for a batch twice as large."""
        return Pace(self.median / times, self.low / times, self.high / times)


def pace(function: Callable[[], Any], against: Callable[[], Any], rounds: int = 5) -> Pace:
    """Time both in turn, `rounds` times after one call of each that is not counted. Raises ValueError without rounds."""
    if rounds < 1:
        raise ValueError(f"pace needs a round at least, not {rounds}.")
    pair = (function, against)
    for call in pair:
        call()
    ratios = []
    for turn in range(rounds):
        taken = {}
        for which in (0, 1) if turn % 2 else (1, 0):  # whoever goes first has the cooler caches
            taken[which] = seconds(pair[which])
        ratios.append(taken[0] / taken[1])
    return Pace(statistics.median(ratios), min(ratios), max(ratios))


def seconds(function: Callable[[], Any]) -> float:
    """What one call takes, until the GPU too has done it."""
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def stepper(recipe: Recipe) -> Callable[[], Any]:
    """A function that trains one step of `recipe` on this machine's device each time it is called."""
    from vramlab.training.training import build, train_step

    training = build(recipe, current_device().kind)
    if recipe.torch_compile:
        training.model.compile()
    return lambda: train_step(training)
