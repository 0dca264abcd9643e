"""Recipes on real ranks over gloo, by name: what each rank allocates, learns and sends, for tests
to compare.

What is allocated is held against fake ranks (`differing`), what is learned against one process that
trains all rows (`learned` of `training_on_rank.alone`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from compared_ranks import gradients, losses_of_step
from quick import params
from torch.utils._python_dispatch import _disable_current_modes
from vramlab.measurement.launch import Launcher
from vramlab.measurement.worker import on_rank
from vramlab.measurement.worker import preload as preload_rank
from vramlab.recipe.recipe import Recipe
from vramlab.simulation.simulate import trace
from vramlab.tracking.history import History
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.engines import deepspeed
from vramlab.training.training import build
from vramlab_course import training_on_rank
from vramlab_course.collectives import Collectives


def run(
    launcher: Launcher,
    recipes: Mapping[str, Recipe],
    learn: Collection[str] = (),
    witness: Collection[str] = (),
    timeout: float = 900,
) -> list[dict[str, dict[str, Any]]]:
    """By rank and name, what real ranks find of `recipes`, which are for as many; `learn` and
    `witness` say of which.
    """
    (world,) = {recipe.sharding.world_size for recipe in recipes.values()}
    order = {"recipes": dict(recipes), "learn": [*learn], "witness": [*witness]}
    return launcher.run(
        "real_ranks:work", order, world, timeout=timeout, preload="real_ranks:preload"
    )


Worlds = Mapping[int, Collection[str]]


def cases(worlds: Worlds, quick: Worlds) -> list:
    """(world size, name) of each; what is not quick is marked slow."""
    every, few = (
        [(world, name) for world, names in table.items() for name in names]
        for table in (worlds, quick)
    )
    return params(every, few)


def when_asked(
    launcher: Launcher,
    worlds: Worlds,
    quick: Worlds,
    recipe_of: Callable[[str, int], Recipe],
    **more,
):
    """A function of world size and name: what each rank found. Quick cases start all at once when
    one is first asked for, and so do slow ones. `more`: for `learn` and `witness`, names by world
    size."""

    @functools.cache
    def started(world: int, is_quick: bool) -> list[dict[str, Any]]:
        names = [name for name in worlds[world] if (name in quick[world]) == is_quick]
        chosen = {
            key: [name for name in names if name in wanted.get(world, ())]
            for key, wanted in more.items()
        }
        return run(launcher, {name: recipe_of(name, world) for name in names}, **chosen)

    return lambda world, name: [left[name] for left in started(world, name in quick[world])]


def preload(recipes: dict[str, Recipe], **others: Any) -> None:
    """Import once what the ranks need, DeepSpeed itself too; TRL would start a thread."""
    for recipe in recipes.values():
        preload_rank(recipe)
        if recipe.sharding and recipe.sharding.engine == "deepspeed":
            deepspeed.library()


def work(
    recipes: dict[str, Recipe], learn: list[str], witness: list[str]
) -> dict[str, dict[str, Any]]:
    """What this rank finds of each recipe."""
    from vramlab.training.process_group import real_rank

    torch.set_num_threads(1)
    if any(
        recipe.use_liger_kernel for recipe in recipes.values()
    ):  # kernels write where host code has allocated
        from triton.runtime.jit import KernelInterface

        KernelInterface.__getitem__ = lambda kernel, grid: lambda *args, **kwargs: None
    found = {}
    with real_rank("cpu") as rank:
        for name, recipe in recipes.items():
            here = on_rank(recipe, rank)
            found[name] = followed(here)
            # in its third step DeepSpeed's stage 3 gathers as from then on
            steps = 3 if here.sharding.engine == "deepspeed" else 2
            found[name] |= learned(here, steps) if name in learn else {}
            found[name] |= witnesses(here) if name in witness else {}
    return found


# --- what is allocated


def births(history: History) -> list[list[Any]]:
    """Every allocation in order: size, category, operator, shape, dtype, module, and what is alive
    then by category.

    Frees are left to the sums: a function's local variables go in no particular order when it
    returns.
    """
    return [
        [
            size,
            storage.category,
            storage.op,
            list(storage.shape),
            storage.dtype,
            storage.where,
            alive,
        ]
        for (size, storage, _), alive in zip(history.log, history.splits[1:].tolist(), strict=True)
        if size > 0
    ]


def allocated(history: History) -> dict[str, Any]:
    phases = {name: dataclasses.asdict(phase) for name, phase in history.phases().items()}
    return {"births": births(history), "phases": phases}


def followed(recipe: Recipe) -> dict[str, Any]:
    """What a tracker sees of two real steps."""
    rows = (
        recipe.trainer in ("transformers", "sft") and not recipe.is_ragged
    )  # which a global batch is made of
    training = training_on_rank.build_on_rank(recipe, "cpu") if rows else build(recipe, "cpu")
    tracker = run_tracked(training, Tracker("cpu"), 2, "cpu")
    return allocated(History(tracker.log, tracker.marks))


def differing(recipe: Recipe, found: list[dict[str, Any]]) -> tuple | None:
    """(rank, simulated, real) of the first allocation or phase in which a rank of `found` and its
    simulation differ.
    """
    for rank, real in enumerate(found):
        simulated = allocated(trace(on_rank(recipe, rank), "cpu", full=True))
        sides = ([*side["births"], *side["phases"].items()] for side in (simulated, real))
        for one, other in itertools.zip_longest(*sides):
            if one != other:
                return rank, one, other
    return None


def witnesses(recipe: Recipe) -> dict[str, Any]:
    """Peak and end of each phase by the allocator's own events, and by the tracker's
    (`allocator_events.py`).

    The profiler does not see what gloo's thread frees, so in each of FSDP's transfers that thread
    is waited for while the transfer's work still holds its tensors: it has let go of them when it
    is done with another, and this thread is the last to.
    """
    import torch.distributed as dist
    from allocator_events import tracked, witnessed

    another = torch.zeros(1)

    def waiting(transfer):
        def transferred(*args, **options):
            work = transfer(*args, **{**options, "async_op": True})
            dist.all_reduce(another)
            work.wait()

        return transferred

    names = ("all_gather_single", "reduce_scatter_single")
    if not hasattr(dist, names[0]):  # torch 2.11's FSDP calls them so
        names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, waiting(getattr(dist, name)))
        seen = witnessed(recipe)
    return {"witnessed": seen, "tracked": tracked(recipe)}


# --- what is computed and sent


def learned(recipe: Recipe, steps: int = 2, loss_of: Callable | None = None) -> dict[str, Any]:
    """Of each step, on rows of its own, the micro-batches' losses, whole gradients; the weights
    after the last.

    "sizes" has the bytes of every collective of the last step by kind. A recipe without sharding is
    a process's alone. `loss_of` (outputs, batch) takes the place of the model's loss.
    """
    training = training_on_rank.build_on_rank(recipe, "cpu")
    training.loss_of = loss_of or training.loss_of
    for module in training.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # ranks would drop other channels than one process
    losses, tensors, counting = [], {}, Collectives()

    def on_phase(name: str) -> None:
        if name == "step":
            with _disable_current_modes():  # what is gathered here is no part of the step
                for parameter, gradient in gradients(training):
                    tensors[f"gradient {len(losses)} {parameter}"] = (
                        gradient.detach().float().clone()
                    )

    for step in range(steps):
        training_on_rank.fill_batch(training, recipe, "cpu", step)
        counting.sizes.clear()
        with counting:
            losses.append(losses_of_step(training, on_phase))
    for name, parameter in training.model.named_parameters():
        tensors[f"weight {name.removeprefix('module.')}"] = whole(parameter).detach().clone()
    return {"losses": losses, "tensors": tensors, "sizes": dict(counting.sizes)}


def assert_learned_alike(
    recipe: Recipe, found: list[dict[str, Any]], loss_of: Callable | None = None
) -> None:
    """Ranks that have divided the rows learn what one process does of all, up to the order in which
    fp32 is summed.
    """
    one = learned(training_on_rank.alone(recipe), len(found[0]["losses"]), loss_of)
    for expected, *losses in zip(one["losses"], *(rank["losses"] for rank in found), strict=True):
        assert [sum(each) / len(found) for each in zip(*losses, strict=True)] == pytest.approx(
            expected, rel=1e-4
        )
    for rank in found:
        assert rank["tensors"].keys() == one["tensors"].keys()
        for key, tensor in one["tensors"].items():
            least = 2e-6 if key.startswith("gradient") else 5e-6
            torch.testing.assert_close(rank["tensors"][key], tensor, rtol=1e-3, atol=least)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """`parameter`, gathered if this rank has a part of it. All ranks have to ask."""
    if hasattr(parameter, "ds_tensor"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
