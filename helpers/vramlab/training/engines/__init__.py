"""How a rank takes part in a step: one engine for each way of dividing the work among processes.

Each calls the library's own DDP, FSDP2, DeepSpeed, DTensor or torch.distributed.pipelining, as its users do.
"""

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
