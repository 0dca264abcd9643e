"""How a rank takes part in a step: engines for DDP, FSDP2, DeepSpeed, DTensor and torch.distributed.pipelining."""

import importlib

from ...recipe.recipe import Recipe
from ..engine import Engine

_CLASSES = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed", "tensor": "TensorParallel", "pipeline": "Pipeline"}


def engine_of(recipe: Recipe) -> Engine:
    """The engine of `recipe.sharding`, which needs a default process group even for one rank; else a single process."""
    if recipe.sharding is None:
        return Engine()
    name = recipe.sharding.engine
    return getattr(importlib.import_module(f".{name}", __name__), _CLASSES[name])(recipe)
