"""Train a recipe on real ranks, from a notebook, and see what each held, computed and sent.

`run_ranks(recipe)` starts `recipe.sharding.world_size` processes, over gloo on CPUs and NCCL on GPUs; `run_alone(recipe)`
trains the same in this process, on the whole global batch, to compare with.
"""

from dataclasses import dataclass, field
from typing import Any

from ..hardware.gpu import current_device
from ..recipe.recipe import Recipe
from ..report.errors import MeasurementError, RecipeError
from ..report.report import Report
from ..tracking.collectives import Traffic
from .launch import Launcher, launch, opened

__all__ = ["Launcher", "Ranks", "launch", "run_alone", "run_ranks"]

TRAINING = "vramlab.measurement.rank_training"


@dataclass
class Ranks:
    """The results of a run on several ranks.

    Attributes:
        reports: each rank's report (source "measured"): the split under the tracker.
        losses: of each step, the mean over the global batch, before its update.
        gradients: of the last step, averaged over ranks and not yet clipped: parameter's name to the whole fp32 tensor.
        collectives: kind to (calls, bytes, sent) of rank 0 in one further, steady step.
    """

    reports: list[Report]
    losses: list[float]
    gradients: dict[str, Any] = field(repr=False)
    collectives: dict[str, Traffic]

    @property
    def volume(self) -> int:
        """Bytes per rank and step as the ZeRO paper counts them: gathered and scattered once, all-reduced twice."""
        twice = {"all_reduce": 2}
        return sum(twice.get(kind, 1) * seen.bytes for kind, seen in self.collectives.items() if kind != "recv")


def run_ranks(
    recipe: Recipe,
    *,
    steps: int = 2,
    device: str | None = None,
    timeout: float = 300,
    launcher: Launcher | None = None,
) -> Ranks:
    """Train `recipe` for `steps` steps on `recipe.sharding.world_size` real processes of this machine.

    All ranks start from equal weights; rank r of N has its own `batch_size` rows of a global batch of N times as many
    (tensor and pipeline parallel: all have the same ones). A world larger than the machine has cores takes turns.

    Args:
        device: "cuda" needs a GPU for each rank; None takes CUDA where there are enough, else the CPU.
        timeout: seconds after which all ranks are ended.
        launcher: one that was started before (`Launcher().start()`): the second run on it starts in about a second.
    Raises:
        RecipeError: the recipe has no sharding, or something does not divide.
        RankError: a rank failed, with its number and its own traceback.
        MeasurementError: they took over `timeout`, or there are too few GPUs.
    """
    if recipe.sharding is None:
        raise RecipeError("sharding", None, "run_ranks needs one: Sharding(world_size=2, …)")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise RecipeError("steps", steps, "it must be a whole number of at least 1")
    world, device = recipe.sharding.world_size, _device(recipe, device)
    arguments = {"recipe": recipe, "steps": steps, "device": device}
    with opened(launcher) as used:
        ranks = used.run(f"{TRAINING}:train", arguments, world, device, timeout, f"{TRAINING}:preload")
    losses = [[loss for loss in step if loss is not None] for step in zip(*(r.losses for r in ranks), strict=True)]
    return Ranks(
        reports=[report for rank in ranks for report in rank.reports],
        losses=[sum(step) / len(step) for step in losses],
        gradients={name: tensor for rank in ranks for name, tensor in rank.gradients.items()},
        collectives=ranks[0].collectives,
    )


def _device(recipe: Recipe, device: str | None) -> str:
    if device not in (None, "cpu", "cuda"):
        raise RecipeError("device", device, "allowed are 'cuda', 'cpu' and None")
    if device == "cpu" or (device is None and current_device().kind != "cuda"):
        return "cpu"
    import torch

    count, wanted = torch.cuda.device_count(), recipe.sharding.world_size
    if count >= wanted:
        return "cuda"
    if device is None:
        return "cpu"
    raise MeasurementError(f"{wanted} ranks need as many GPUs and {count} are here: take device='cpu'.")


def run_alone(recipe: Recipe, *, steps: int = 2) -> Ranks:
    """Train the same in this process, on the CPU and on the whole global batch: the ranks must give equal values."""
    import torch

    from . import rank_training

    with torch.random.fork_rng():
        return rank_training.values(rank_training.alone(recipe), steps, "cpu")
