"""What chapter 10's cells share.

That is what autograd saves, what a call makes, bytes of tensors and of a cache, a cache beside
transformers' own, and the bytes of one width at a peak.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
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


def cache_row(
    remember: Callable[..., Any],
    window: int | None,
) -> tuple[str, bool, int, int]:
    """Return how `remember` does on 256 tokens, one after another, with 4 heads.

    That is a name, whether attention gives what it gives of all tokens at once, and the bytes that
    `remember` and transformers' own cache keep.
    """
    from torch.nn.functional import scaled_dot_product_attention as attention
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    queries = torch.randn(1, 4, 256, 32)
    new = torch.randn(1, 8, 256, 32)  # keys, then values
    theirs = DynamicSlidingWindowLayer(window) if window else DynamicLayer()
    kept = None
    outputs = []
    for number in range(256):
        now = (slice(None), slice(None), slice(number, number + 1))
        seen, kept = remember(kept, new[now][0], window)
        outputs.append(attention(queries[now], *seen[None].chunk(2, 1)))
        theirs.update(*new[now].chunk(2, 1))
    # Each query sees its own token, those before it, and of these as many as the window has.
    mask = torch.ones(256, 256, dtype=torch.bool).tril().triu(1 - (window or 256))
    at_once = attention(queries, *new.chunk(2, 1), attn_mask=mask)
    name = f"{window} tokens" if window else "none"
    same = torch.allclose(torch.cat(outputs, 2), at_once, atol=1e-5)
    return name, same, nbytes([kept]), nbytes([theirs.keys, theirs.values])


def of_width(report: Report, width: int) -> int:
    """Return the bytes of activations at a report's peak whose rows have `width` numbers."""
    total = 0
    for group in report.largest:
        if group.category == "activations" and group.shape[-1] == width:
            total += group.count * group.size
    return total
