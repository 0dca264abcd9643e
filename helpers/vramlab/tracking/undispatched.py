"""What changes memory, or seems to, without torch's dispatcher: Python functions patched while tracking."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from ..training.patched import afterwards


def resizes(seen: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager:
    """While entered, call `seen` with each storage that Python resizes."""
    return afterwards(torch.UntypedStorage, "resize_", lambda result, storage, size: seen(storage))


def generator_states(seen: Callable[[torch.Tensor, str], None]) -> AbstractContextManager:
    """While entered, call `seen` with each copy of the CPU generator's state (a checkpoint keeps one, of 5,056 bytes)."""
    return afterwards(torch, "get_rng_state", lambda state: seen(state, "get_rng_state"))


def shape_propagation(tracker: Any) -> AbstractContextManager:
    """While entered, pause `tracker` when DTensor runs an operator on fake tensors to find out its result's shape."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if module is None:
        return nullcontext()
    name = "_propagate_tensor_meta_non_cached"
    plain = getattr(module.ShardingPropagator, name)

    def propagate(*args: Any) -> Any:
        tracker.paused = True
        try:
            return plain(*args)
        finally:
            tracker.paused = False

    return patch.object(module.ShardingPropagator, name, propagate)
