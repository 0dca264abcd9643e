"""ZeRO stages 2 and 3 by FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al. 2023)."""

import contextlib
from typing import TYPE_CHECKING

from ..recipe import Recipe
from .alone import Engine

if TYPE_CHECKING:
    import torch

    from ..training import Training


class FSDP(Engine):
    """Each unit (a layer, and the rest as the root) is gathered when it is needed; gradients are reduce-scattered.

    Stage 3 frees a unit after its forward pass (`reshard_after_forward`), stage 2 keeps it until its backward pass.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def wrap(self, model: "torch.nn.Module") -> "torch.nn.Module":
        from torch.distributed.fsdp import fully_shard

        raise NotImplementedError(fully_shard)

    def micro_batch(self, training: "Training", last: bool) -> contextlib.AbstractContextManager:
        training.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


def make(recipe: Recipe) -> Engine:
    return FSDP(recipe)
