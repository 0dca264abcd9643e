"""What chapter 10's cells share.

That is what autograd saves, what a call makes, bytes of tensors and of a cache, and a step next to
vLLM.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from vramlab import Recipe, simulate
from vramlab.report.report import Report

from ..made_tensors import MadeTensors


@contextmanager
def saved_for_backward(*modules: torch.nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Yield a dictionary that fills with what autograd saves in the block, each storage once.

    Parameters and buffers of `modules` are there anyway and are left out.
    """
    there = set()
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            # `_cdata` is the address of the storage's object, the same for all views of it.
            there.add(tensor.untyped_storage()._cdata)
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in there:
            saved[storage] = tensor  # held, so that no other tensor gets its address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def cached_by(answer: Any) -> list[torch.Tensor]:
    """Return the keys and the values of each layer in what `generate` answers."""
    # transformers 5.24 calls the cache so, and warns of the older name.
    cache = answer.cache if "cache" in answer else answer.past_key_values
    tensors = []
    for layer in cache.layers:
        tensors += [layer.keys, layer.values]
    return tensors


def nbytes(tensors: Any) -> int:
    """Return the bytes of the storages of some tensors, each counted once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class _Largest(MadeTensors):
    """While entered, notes the bytes of the largest tensor that an operator makes."""

    sees_views = False

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def see(self, tensor: torch.Tensor) -> None:
        size = min(tensor.nbytes, tensor.untyped_storage().nbytes())
        self.bytes = max(self.bytes, size)


def largest_made(call: Callable[[], Any]) -> int:
    """Return the bytes of the largest tensor that a call makes; views make none."""
    with _Largest() as largest:
        call()
    return largest.bytes


def beside_vllm(
    recipe: Recipe,
    card: str,
    share: float | None,
    sleeps: bool = False,
) -> Report:
    """Simulate GRPO's step on `card`, with vLLM on a `share` of it; None: on another card."""
    if share is None:
        vllm = replace(recipe.rollouts, vllm_mode="server")
    else:
        vllm = replace(
            recipe.rollouts,
            vllm_gpu_memory_utilization=share,
            vllm_enable_sleep_mode=sleeps,
        )
    return simulate(recipe.replace(rollouts=vllm), gpu=card)
