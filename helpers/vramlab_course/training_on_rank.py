"""This rank's training and its rows of the global batch.

Together they equal those of one process that has all rows.
"""

from collections.abc import Iterator

import torch
from vramlab.recipe.recipe import Recipe
from vramlab.training.engine import Training
from vramlab.training.engines.ulysses import part_of_rows
from vramlab.training.training import build, make_batch

SEED = 0  # of the weights, equal on all ranks, and of the batch


def build_on_rank(recipe: Recipe, device: str) -> Training:
    """Build this rank's training, with its own rows of the global batch.

    All ranks have the same weights.
    """
    torch.manual_seed(SEED)
    training = build(recipe, device)
    fill_batch(training, recipe, device)
    return training


def fill_batch(
    training: Training,
    recipe: Recipe,
    device: str,
    step: int = 0,
) -> None:
    """Copy this rank's rows of the `step`-th global batch into the batch that is there.

    That keeps its place in memory.
    """
    # Accumulation has further micro-batches beside the first.
    batches = [training.batch, *training.further]
    for batch, rows in zip(batches, _rows(recipe, len(batches), step), strict=True):
        for name, tensor in batch.items():
            if name in rows:  # where ranks have a sample together there is a mask too, of ones
                tensor.copy_(rows[name].to(device))


def _rows(recipe: Recipe, count: int, step: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's rows of a step's `count` global micro-batches.

    Rank r has the r-th `batch_size` rows of each.
    """
    first = 0
    if replicas(recipe) > 1:
        # Ranks that have one sample's tokens together have the same rows.
        first = recipe.sharding.rank // recipe.ranks_of_sample * recipe.batch_size
    # The global generator is as it was afterwards: dropout must not depend on how rows are drawn.
    with torch.random.fork_rng(devices=[]):
        for number in range(count):
            # A seed for each micro-batch of each step, never that of the weights.
            torch.manual_seed(SEED + 1 + step * count + number)
            rows = make_batch(alone(recipe), "cpu")
            mine = slice(first, first + recipe.batch_size)
            own = {name: tensor[mine] for name, tensor in rows.items()}
            is_cut = recipe.sharding is not None and recipe.sharding.sp_size > 1
            yield part_of_rows(own, recipe) if is_cut else own


def alone(recipe: Recipe) -> Recipe:
    """Return what one process trains that has all rows of the global batch."""
    return recipe.replace(sharding=None, batch_size=recipe.batch_size * replicas(recipe))


def replicas(recipe: Recipe) -> int:
    """Among how many ranks the global batch is divided.

    That is all, or as many groups as have a sample together; with tensor and pipeline parallel it
    is not divided.
    """
    if recipe.sharding is None or recipe.sharding.engine in ("tensor", "pipeline"):
        return 1
    return recipe.sharding.world_size // recipe.ranks_of_sample
