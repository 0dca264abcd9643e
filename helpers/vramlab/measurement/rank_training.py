"""What each rank does for `sharding.run_ranks`: a few steps for the values, and a few under the tracker for the bytes."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..recipe.recipe import Recipe
from ..report.report import Report
from ..tracking.collectives import Collectives
from ..tracking.history import History
from ..tracking.reporting import to_report
from ..tracking.tracked import run_tracked
from ..tracking.tracker import Tracker
from ..training import process_group
from ..training.engine import Training
from ..training.models import build_model
from ..training.training import build, make_batch, train_step
from .measurement_passes import host_bytes
from .sharding import Ranks
from .worker import import_libraries, on_rank

SEED = 0  # of the weights, equal on all ranks, and of the batch
STEADY = 2  # steps before collectives are counted: in the second, DDP sends all ranks its new buckets


def train(recipe: Recipe, steps: int, device: str) -> Ranks:
    """Train as the rank that torchrun's environment says; return its values and its report."""
    with process_group.real_rank(device) as rank:
        here = on_rank(recipe, rank)
        import_libraries(here)
        found = values(here, steps, device)
        found.reports = [tracked_report(here, device, steps)]
    return found


def preload(recipe: Recipe, **others: Any) -> None:
    """Import what `train` will need. One layer of the model on no device: its class is looked up when it is built."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import_libraries(recipe)
    importlib.import_module(f"vramlab.training.engines.{recipe.sharding.engine}")
    build_model(recipe.replace(num_layers=1, sharding=None), "meta")


def values(recipe: Recipe, steps: int, device: str) -> Ranks:
    """Train `steps` steps: each one's loss, the last one's gradients, and one further step's collectives."""
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


def losses_of_step(training: Training, on_phase: Callable[[str], None] = lambda name: None) -> list[float]:
    """Train a step: each micro-batch's loss, or of a pipeline's whole batch one on the last rank and none on the others."""
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
    """Gather the model's gradients: all of them on rank 0, and on another only those that no other rank has."""
    with torch.utils._python_dispatch._disable_current_modes():  # what is gathered here is no part of the step
        found = {
            name: t.detach().to("cpu", torch.float32, copy=True) for name, t in training.engine.gradients(training)
        }
    return found if process_group.rank() == 0 or training.engine.ranks_differ else {}


def build_on_rank(recipe: Recipe, device: str) -> Training:
    """Build this rank's training, from the same weights on all, with its own rows of the global batch."""
    torch.manual_seed(SEED)
    training = build(recipe, device)
    fill_batch(training, recipe, device)
    return training


def fill_batch(training: Training, recipe: Recipe, device: str, step: int = 0) -> None:
    """Copy this rank's rows of the `step`-th global batch into the batch that is there, which keeps its place in memory."""
    batches = [training.batch, *training.further]
    for batch, rows in zip(batches, _rows(recipe, len(batches), step), strict=True):
        for name, tensor in batch.items():
            tensor.copy_(rows[name].to(device))


def _rows(recipe: Recipe, count: int, step: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's rows of a step's `count` global micro-batches: rank r has the r-th `batch_size` rows of each."""
    first = recipe.sharding.rank * recipe.batch_size if replicas(recipe) > 1 else 0
    with torch.random.fork_rng(devices=[]):
        for number in range(count):
            torch.manual_seed(SEED + 1 + step * count + number)
            rows = make_batch(alone(recipe), "cpu")
            yield {name: tensor[first : first + recipe.batch_size] for name, tensor in rows.items()}


def alone(recipe: Recipe) -> Recipe:
    """Return what one process trains that has all rows of the global batch."""
    return recipe.replace(sharding=None, batch_size=recipe.batch_size * replicas(recipe))


def replicas(recipe: Recipe) -> int:
    """Among how many ranks the global batch is divided: all, or with tensor and pipeline parallel none."""
    if recipe.sharding is None or recipe.sharding.engine in ("tensor", "pipeline"):
        return 1
    return recipe.sharding.world_size


def tracked_report(recipe: Recipe, device: str, steps: int) -> Report:
    """Train some more steps under the tracker; return the report of the last."""
    tracker = run_tracked(build_on_rank(recipe, device), Tracker(device), max(steps, 2), device)
    history = History(tracker.log, tracker.marks)
    return to_report(history, "measured", recipe, device, host=host_bytes(recipe, tracker))
