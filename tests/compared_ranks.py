"""Train a recipe on real ranks and alone, for tests to compare: what each rank held, computed and
sent.

`run_ranks(recipe)` starts `recipe.sharding.world_size` processes, over gloo on CPUs and NCCL on
GPUs; `run_alone(recipe)` trains the same in this process, on the whole global batch. A few steps
give the values, and a few more under the tracker the bytes.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vramlab.base.errors import MeasurementError, RecipeError
from vramlab.hardware.gpu import current_device
from vramlab.measurement.launch import Launcher
from vramlab.measurement.worker import import_libraries, on_rank
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import Report
from vramlab.tracking.history import History, to_report
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training import process_group
from vramlab.training.engine import Training
from vramlab.training.engines.pipeline import Pipeline
from vramlab.training.training import train_step
from vramlab_course.collectives import Collectives, Traffic
from vramlab_course.training_on_rank import alone, build_on_rank

STEADY = (
    2  # steps before collectives are counted: in the second, DDP sends all ranks its new buckets
)


@dataclass
class Ranks:
    """The results of a run on several ranks.

    Attributes:
        reports: each rank's report (source "measured"): the split under the tracker.
        losses: of each step, the mean over the global batch, before its update.
        gradients: of the last step, averaged over ranks and not yet clipped: parameter's name to
            the whole fp32 tensor.
        collectives: kind to (calls, bytes, sent) of rank 0 in one further, steady step.
    """

    reports: list[Report]
    losses: list[float]
    gradients: dict[str, Any] = field(repr=False)
    collectives: dict[str, Traffic]

    @property
    def volume(self) -> int:
        """Bytes per rank and step as the ZeRO paper counts them: gathered and scattered once,
        all-reduced twice.
        """
        twice = {"all_reduce": 2}
        return sum(
            twice.get(kind, 1) * seen.bytes
            for kind, seen in self.collectives.items()
            if kind != "recv"
        )


def run_ranks(
    recipe: Recipe,
    *,
    steps: int = 2,
    device: str | None = None,
    timeout: float = 300,
    launcher: Launcher | None = None,
) -> Ranks:
    """Train `recipe` for `steps` steps on `recipe.sharding.world_size` real processes of this
    machine.

    All ranks start from equal weights; rank r of N has its own `batch_size` rows of a global batch
    of N times as many (tensor and pipeline parallel: all have the same ones). A world larger than
    the machine has cores takes turns.

    Args:
        device: "cuda" needs a GPU for each rank; None takes CUDA where there are enough, else the
            CPU.
        timeout: seconds after which all ranks are ended.
        launcher: one that was started before (`Launcher().start()`): the second run on it starts in
            about a second.
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
    with contextlib.nullcontext(launcher) if launcher else Launcher() as used:
        ranks = used.run(
            f"{__name__}:train",
            arguments,
            world,
            device,
            timeout,
            "vramlab.measurement.worker:preload",
        )
    losses = [
        [loss for loss in step if loss is not None]
        for step in zip(*(r.losses for r in ranks), strict=True)
    ]
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
    count, wanted = torch.cuda.device_count(), recipe.sharding.world_size
    if count >= wanted:
        return "cuda"
    if device is None:
        return "cpu"
    raise MeasurementError(
        f"{wanted} ranks need as many GPUs and {count} are here: take device='cpu'."
    )


def run_alone(recipe: Recipe, *, steps: int = 2) -> Ranks:
    """Train the same in this process, on the CPU and on the whole global batch: the ranks must give
    equal values.
    """
    with torch.random.fork_rng():
        return values(alone(recipe), steps, "cpu")


# --- on each rank ---


def train(recipe: Recipe, steps: int, device: str) -> Ranks:
    """Train as the rank that torchrun's environment says; return its values and its report."""
    with process_group.real_rank(device) as rank:
        here = on_rank(recipe, rank)
        import_libraries(here)
        found = values(here, steps, device)
        found.reports = [tracked_report(here, device, steps)]
    return found


def values(recipe: Recipe, steps: int, device: str) -> Ranks:
    """Train `steps` steps: each one's loss, the last one's gradients, and one further step's
    collectives.
    """
    training = build_on_rank(recipe, device)
    losses: list[list[float]] = []
    gradients: dict[str, torch.Tensor] = {}

    def on_phase(name: str) -> None:
        if name == "step" and len(losses) == steps - 1:
            gradients.update(whole_gradients(training))

    for _ in range(steps):
        losses.append(losses_of_step(training, on_phase))
    for _ in range(STEADY - steps):
        train_step(training)
    with Collectives() as counting:
        train_step(training)
    means = [sum(step) / len(step) if step else None for step in losses]
    return Ranks([], means, gradients, dict(counting.seen))


def losses_of_step(
    training: Training, on_phase: Callable[[str], None] = lambda name: None
) -> list[float]:
    """Train a step: each micro-batch's loss, or of a pipeline's whole batch one on the last rank
    and none on the others.
    """
    losses: list[float] = []
    plain = training.loss_of

    def loss_of(outputs: Any, batch: Any) -> torch.Tensor:
        loss = plain(outputs, batch)
        losses.append(loss.detach().item())
        return loss

    training.loss_of = loss_of
    last = train_step(training, on_phase)
    training.loss_of = plain
    return losses or ([] if last is None else [float(last)])


def whole_gradients(training: Training) -> dict[str, torch.Tensor]:
    """Gather the model's gradients: all of them on rank 0, and on another only those that no other
    rank has.
    """
    with (
        torch.utils._python_dispatch._disable_current_modes()
    ):  # what is gathered here is no part of the step
        found = {
            name: t.detach().to("cpu", torch.float32, copy=True) for name, t in gradients(training)
        }
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return found if first or isinstance(training.engine, Pipeline) else {}


def gradients(training: Training) -> Iterator[tuple[str, torch.Tensor]]:
    """(name as in the whole model, whole gradient) before the update.

    All ranks have to ask: shards are gathered.
    """
    recipe = getattr(training.engine, "recipe", None)  # of one rank alone there is none

    def whole(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    if recipe and recipe.sharding.engine == "deepspeed" and recipe.sharding.stage:
        from deepspeed.utils import safe_get_full_grad as whole

    for name, parameter in training.model.named_parameters():
        if parameter.requires_grad and (gradient := whole(parameter)) is not None:
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            yield name.removeprefix("module."), gradient  # DDP's and DeepSpeed's


def tracked_report(recipe: Recipe, device: str, steps: int) -> Report:
    """Train some more steps under the tracker; return the report of the last."""
    tracker = run_tracked(build_on_rank(recipe, device), Tracker(device), max(steps, 2), device)
    history = History(tracker.log, tracker.marks)
    return to_report(history, "measured", recipe, device)
