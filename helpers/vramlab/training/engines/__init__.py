"""How a rank takes part in a step.

Engines for DDP, FSDP2, DeepSpeed, DTensor and torch.distributed.pipelining.
"""

import importlib

from ...recipe.recipe import Recipe
from ..engine import Engine

# Module and class of each; they are imported when they are used.
_CLASSES = {
    "ddp": "DDP",
    "fsdp": "FSDP",
    "deepspeed": "DeepSpeed",
    "tensor": "TensorParallel",
    "pipeline": "Pipeline",
}


def engine_of(recipe: Recipe) -> Engine:
    """Return the engine of `recipe.sharding`; without sharding a single process.

    An engine needs a default process group even for one rank.
    """
    if recipe.sharding is None:
        return Engine()
    name = recipe.sharding.engine
    module = importlib.import_module(f".{name}", __name__)
    return getattr(module, _CLASSES[name])(recipe)
