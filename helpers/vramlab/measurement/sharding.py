"""Training on real ranks, from a notebook: what each of them held, what they computed, and what they said to each other.

`run_ranks(recipe)` starts `recipe.sharding.world_size` processes, over gloo on CPUs and NCCL on GPUs; `run_alone(recipe)`
trains the same on one, on the whole global batch, to compare with.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..recipe.recipe import Recipe
from ..report.errors import MeasurementError, RankError, RecipeError
from ..report.report import Report
from ..tracking.collectives import Traffic
from .launch import Launcher, _launcher, launch

__all__ = ["Launcher", "Ranks", "launch", "run_alone", "run_ranks"]

TRAIN, PRELOAD = "vramlab.measurement.rank_training:train", "vramlab.measurement.rank_training:preload"


@dataclass
class Ranks:
    """What a run on several ranks showed.

    Attributes:
        reports: each rank's report (source "measured"), the split under the tracker; status "oom" where memory ran out.
        losses: of each step, the mean over the global batch, before its update.
        gradients: of the last step, averaged over ranks and not yet clipped: parameter's name to the whole fp32 tensor,
            or to its norm alone (one element) if all together exceed 64 MiB.
        collectives: kind to (calls, bytes, sent) of rank 0 in one further, steady step; `by_rank` has every rank's.
        sizes: kind to the payload of each call of rank 0 in order, in bytes.
        events: each rank's allocations and frees in order, as (bytes, category, operator, phase), if asked for.
    """

    reports: list[Report]
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict, repr=False)
    collectives: dict[str, Traffic] = field(default_factory=dict)
    by_rank: list[dict[str, Traffic]] = field(default_factory=list, repr=False)
    sizes: dict[str, list[int]] = field(default_factory=dict, repr=False)
    events: list[list[tuple[int, str | None, str, str]]] = field(default_factory=list, repr=False)

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
    events: bool = False,
    memory_limit: int | Mapping[int, int] | None = None,
    port: int | None = None,
    launcher: Launcher | None = None,
) -> Ranks:
    """Train `recipe` for `steps` steps on `recipe.sharding.world_size` real processes of this machine.

    All ranks start from equal weights; rank r of N has its own `batch_size` rows of a global batch of N times as many
    (tensor and pipeline parallel: all have the same ones). A world larger than the machine has cores takes turns.

    Args:
        device: "cuda" needs a GPU for each rank; None takes CUDA where there are enough, else the CPU.
        timeout: seconds after which all ranks are ended.
        events: also return every allocation and free.
        memory_limit: bytes that training may take, of every rank or by rank.
        port: of the rendezvous; None takes a free one.
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
    limits = memory_limit if isinstance(memory_limit, Mapping) else dict.fromkeys(range(world), memory_limit)
    order = {"recipe": recipe.to_dict(), "steps": steps, "device": device, "events": events}
    order["memory_limit"] = {str(rank): limit for rank, limit in limits.items() if limit is not None}
    with _launcher(launcher) as it:
        try:
            with it.run(TRAIN, order, world, device, timeout, port, PRELOAD) as folder:
                return _collect(folder, world)
        except RankError as error:
            if error.oom:
                return Ranks(_out_of_memory(recipe, device, error))
            raise


def _device(recipe: Recipe, device: str | None) -> str:
    from ..hardware.gpu import current_device

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


def _collect(folder: Path, world: int) -> Ranks:
    """What the ranks left in `folder`."""
    from safetensors.torch import load_file

    answers = [json.loads((folder / f"{rank}.json").read_text())["answer"] for rank in range(world)]
    by_rank = [{kind: Traffic(*seen) for kind, seen in a["collectives"].items()} for a in answers]
    gradients: dict[str, Any] = {}
    for file in sorted(folder.glob("gradients-*.safetensors")):
        gradients |= load_file(file)
    steps = zip(*(a["losses"] for a in answers), strict=True)
    return Ranks(
        reports=[Report.from_dict(a["report"]) for a in answers],
        losses=[_mean([loss for loss in step if loss is not None]) for step in steps],
        gradients=gradients,
        collectives=by_rank[0],
        by_rank=by_rank,
        sizes=answers[0]["sizes"],
        events=[[tuple(event) for event in a["events"]] for a in answers if "events" in a],
    )


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def _out_of_memory(recipe: Recipe, device: str, error: RankError) -> list[Report]:
    """A report a rank: "oom" for the one that ran out, "error" for those that were ended because of it."""
    world = recipe.sharding.world_size
    told = [
        ("oom", f"Rank {rank} of {world}: {error.oom}")
        if rank == error.rank
        else ("error", f"Rank {rank} was ended because rank {error.rank} ran out of memory.")
        for rank in range(world)
    ]
    return [Report.failed("measured", recipe, device, status, message) for status, message in told]


def run_alone(recipe: Recipe, *, steps: int = 2) -> Ranks:
    """The same training in this process alone, on the CPU and on the whole global batch: what the ranks must equal."""
    import tempfile

    import torch

    from . import rank_training

    whole = rank_training.alone(recipe)
    with tempfile.TemporaryDirectory(prefix="vramlab-") as folder, torch.random.fork_rng():
        answer = rank_training.values(whole, steps, "cpu", Path(folder))
        (Path(folder) / "0.json").write_text(json.dumps({"answer": {**answer, "report": None}}))
        found = _collect_alone(Path(folder), answer)
    return found


def _collect_alone(folder: Path, answer: dict[str, Any]) -> Ranks:
    from safetensors.torch import load_file

    return Ranks([], losses=answer["losses"], gradients=load_file(folder / "gradients-0.safetensors"))
