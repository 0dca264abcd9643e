"""Data parallel: `DistributedDataParallel`, and with it ZeRO stage 1 by `ZeroRedundancyOptimizer`."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..recipe import Recipe
from .alone import Engine

if TYPE_CHECKING:
    import torch

    from ..training import Training


class DDP(Engine):
    """A replica on each rank; gradients are averaged in buckets while the backward pass runs (Li et al. 2020)."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.stage = recipe, recipe.sharding.stage

    def wrap(self, model: "torch.nn.Module") -> "torch.nn.Module":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, find_unused_parameters=self._finds_unused())

    def _finds_unused(self) -> bool:
        """The Trainer looks for parameters without gradients unless layers are recomputed (and with PEFT always).

        `transformers.Trainer._build_accelerator_args`. It costs a copy of the outputs, and the buckets stay as they
        were first made instead of being made anew in the order of the first backward pass.
        """
        trainer, checkpointing = self.recipe.loop.name == "trainer", self.recipe.gradient_checkpointing
        return trainer and (not checkpointing or self.recipe.lora is not None)

    def optimizer(self, parameters: list, make: Callable[[list], Any]) -> Any:
        if self.stage == 0:
            return make(parameters)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # it makes the optimizer of its own share by a class and its arguments; ours is made by a function
        return ZeroRedundancyOptimizer(parameters, optimizer_class=lambda params, **_: make(params))

    def micro_batch(self, training: "Training", last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else training.model.no_sync()


def make(recipe: Recipe) -> Engine:
    return DDP(recipe)
