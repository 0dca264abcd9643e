"""How a rank takes its part in a step: one engine for each way of dividing the work among processes.

`engine_of(recipe)` gives the one that `training.build` and `training.train_step` ask wherever a world of many differs
from a process alone. Each engine is the library's own (DDP, FSDP2, DeepSpeed, DTensor, torch.distributed.pipelining);
what stands here only calls it as its users do.
"""

import importlib

from ...recipe.recipe import Recipe
from ..engine import Engine

_HOME = {"ddp": "ddp", "fsdp": "fsdp", "deepspeed": "deepspeed", "tensor": "tensor", "pipeline": "pipeline"}


def engine_of(recipe: Recipe) -> Engine:
    """The engine of `recipe.sharding` (a world of one included, where it is asked for), else a process alone.

    All but the last need a default process group (`world.py` makes them).
    """
    if recipe.sharding is None:
        return Engine()
    module = importlib.import_module(f".{_HOME[recipe.sharding.engine]}", __name__)
    return module.make(recipe)
