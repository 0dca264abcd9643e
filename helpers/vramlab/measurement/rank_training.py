"""What each rank does for `sharding.run_ranks`: a few steps for the values, and a few under the tracker for the bytes."""

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..hardware.nvml import nvml_snapshot
from ..recipe.recipe import Recipe
from ..report.report import format_bytes
from ..tracking.collectives import Collectives
from ..tracking.history import History
from ..tracking.reporting import to_report
from ..tracking.tracked import run_tracked
from ..tracking.tracker import Tracker
from ..training import process_group as world
from ..training.engine import Training
from ..training.models import build_model
from ..training.training import build, train_step
from .measurement_passes import clean_pass, host_bytes, tracked_pass
from .resident import limited, rss
from .worker import import_all, machine

SEED = 0  # of the weights, equal on all ranks, and of the batch
STEADY = 2  # steps before collectives are counted: in the second, DDP tells all ranks its new buckets
DIGEST_BYTES = 64 * 2**20  # gradients of more bytes than that are given as their norms


def train(
    recipe: dict[str, Any],
    steps: int,
    device: str,
    events: bool = False,
    memory_limit: dict[str, int] | None = None,
) -> dict[str, Any]:
    """A rank's losses, collectives and report; its gradients go to a file in the launch's folder.

    torchrun's environment says which rank. `memory_limit` is by rank.
    """
    with world.real_rank(device) as rank:
        here = on_rank(Recipe(**recipe), rank)
        import_all(here)
        with limited((memory_limit or {}).get(str(rank)), device):
            answer = values(here, steps, device, Path(os.environ["VRAMLAB_FOLDER"]))
            report, log = split(here, device, steps)
    answer["report"] = report.to_dict()
    if events:
        answer["events"] = log
    return answer


def measure(
    recipe: dict[str, Any], repeats: int, warmup: int, device: str, memory_limit: int | None = None
) -> dict[str, Any]:
    """A rank's report of both passes (`passes.py`), for `vramlab.measure`. Running out of memory raises."""
    before = nvml_snapshot(int(os.environ["LOCAL_RANK"])) if device == "cuda" else None
    with world.real_rank(device) as rank:
        here = on_rank(Recipe(**recipe), rank)
        torch.manual_seed(SEED)
        import_all(here)
        held = rss()
        with limited(memory_limit, device):
            truth = clean_pass(here, repeats, warmup, device, before)
            report = tracked_pass(here, device, truth)
    report.environment = machine(device, before, memory_limit)
    if device == "cpu":
        report.notes.append(f"the process held {format_bytes(held)} before the model was built")
    return report.to_dict()


def on_rank(recipe: Recipe, rank: int) -> Recipe:
    """`recipe` as rank `rank` runs it."""
    return recipe.replace(sharding=dataclasses.replace(recipe.sharding, rank=rank))


def alone(recipe: Recipe) -> Recipe:
    """What one process trains that has all rows of the global batch."""
    return recipe.replace(sharding=None, batch_size=recipe.batch_size * replicas(recipe))


def preload(recipe: dict[str, Any], **others: Any) -> None:
    """Import what `train` will need. One layer of the model on no device: its class is looked up when it is built."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    found = Recipe(**recipe)
    import_all(found)
    importlib.import_module(f"vramlab.training.engines.{found.sharding.engine}")
    build_model(found.replace(num_layers=1, sharding=None), "meta")


def values(recipe: Recipe, steps: int, device: str, folder: Path) -> dict[str, Any]:
    """Train `steps` steps: each one's loss and the last one's gradients; and one more for its collectives."""
    training = prepare(recipe, device)
    losses: list[list[float]] = []
    names: list[str] = []

    def on_phase(name: str) -> None:
        if name == "step":
            names.extend(save_gradients(training, folder))

    for step in range(steps):
        losses.append(losses_of_step(training, on_phase if step == steps - 1 else lambda name: None))
    for _ in range(STEADY - steps):
        train_step(training)
    with Collectives() as counting:
        train_step(training)
    return {
        "losses": [sum(step) / len(step) if step else None for step in losses],
        "gradients": names,
        "collectives": {kind: list(seen) for kind, seen in counting.seen.items()},
        "sizes": dict(counting.sizes),
    }


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


def save_gradients(training: Training, folder: Path) -> list[str]:
    """Write the whole model's gradients, as far as this rank has them whole or can gather them; returns their names."""
    from safetensors.torch import save_file

    rank = world.rank()
    with torch.utils._python_dispatch._disable_current_modes():  # what is gathered here is no part of the step
        found = {name: tensor.detach().float().cpu() for name, tensor in training.engine.gradients(training)}
        if rank and found and not _differs(training):
            return []
        if sum(t.nbytes for t in found.values()) > DIGEST_BYTES:
            found = {name: t.norm().reshape(1) for name, t in found.items()}
        save_file({name: t.contiguous() for name, t in found.items()}, folder / f"gradients-{rank}.safetensors")
    return list(found)


def _differs(training: Training) -> bool:
    """Whether each rank has gradients of its own, as stages of a pipeline do; else rank 0's are everybody's."""
    return getattr(training.engine, "ranks_differ", False)


def prepare(recipe: Recipe, device: str) -> Training:
    """The training of this rank, from the same weights on all, with its own rows of the global batch."""
    torch.manual_seed(SEED)
    training = build(recipe, device)
    fill(training, recipe, device)
    return training


def fill(training: Training, recipe: Recipe, device: str, step: int = 0) -> None:
    """Put this rank's rows of the `step`-th global batch into the batch that is there, which keeps its place in memory."""
    batches = [training.batch, *training.further]
    for batch, rows in zip(batches, global_batches(recipe, len(batches), step), strict=True):
        for name, tensor in batch.items():
            tensor.copy_(rows[name].to(device))


def global_batches(recipe: Recipe, count: int, step: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's share of a step's `count` global micro-batches: rank r has the r-th `batch_size` rows of each.

    Where all ranks work on the same batch (tensor and pipeline parallel), every rank has all of it.
    """
    from ..training.training import make_batch

    sharding, generator = recipe.sharding, torch.random.get_rng_state()
    shards = replicas(recipe)
    first = sharding.rank * recipe.batch_size if shards > 1 else 0
    try:
        for number in range(count):
            torch.manual_seed(SEED + 1 + step * count + number)
            rows = make_batch(alone(recipe), "cpu")
            yield {name: tensor[first : first + recipe.batch_size] for name, tensor in rows.items()}
    finally:
        torch.random.set_rng_state(generator)


def replicas(recipe: Recipe) -> int:
    """Among how many ranks the global batch is divided."""
    if recipe.sharding is None or recipe.sharding.engine in ("tensor", "pipeline"):
        return 1
    return recipe.sharding.world_size


def split(recipe: Recipe, device: str, steps: int) -> tuple[Any, list]:
    """This rank's report under the tracker, and every event: (bytes, category, operator, phase)."""
    training = prepare(recipe, device)
    tracker = run_tracked(training, Tracker(device), max(steps, 2), device)
    history = History(tracker.log, tracker.marks)
    report = to_report(history, "measured", recipe, device, host=host_bytes(recipe, tracker))
    phases = [""] * len(history.log)
    for name, start, end in history.stretches:
        phases[start:end] = [name] * (end - start)
    log = [
        [size, storage.category, storage.op, phase]
        for (size, storage, _), phase in zip(history.log, phases, strict=True)
    ]
    return report, log
