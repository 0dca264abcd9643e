"""What chapter 10's cells share.

That is what a call makes, bytes of tensors and of a cache, a cache beside transformers' own, the
bytes of one width at a peak, and who holds memory in GRPO.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vramlab import Recipe
from vramlab.hardware.gpu import Gpu
from vramlab.report.report import Bytes, Report
from vramlab.simulation.colocated import colocated, with_vllm

from ..made_tensors import MadeTensors


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
    bytes = 0

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


def holders(split: Bytes, own: int) -> dict[str, int]:
    """Return who holds the bytes of a moment of GRPO, of which `own` are the model's weights.

    The weights beyond these are vLLM's.
    """
    named = {
        "model and optimizer": own + split.optimizer_states,
        "vLLM's weights": split.parameters - own,
        "KV cache": split.kv_cache,
        "for a moment": split.gradients + split.activations + split.temporaries,
    }
    return named | {"work memory": split.total - sum(named.values())}


def beside_vllm(
    alone: Report, recipe: Recipe, card: Gpu, share: float, *, sleeps: bool = False
) -> Report:
    """Return the report of `recipe` with vLLM on its card, which takes `share` of it.

    `alone` is the report with vLLM on another card. `simulate` says the same where the card has
    room for both.
    """
    assert recipe.rollouts
    rollouts = replace(
        recipe.rollouts,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=share,
        vllm_enable_sleep_mode=sleeps,
    )
    vllm = colocated(recipe.replace(rollouts=rollouts), card)
    assert vllm
    # `simulate` takes the share from the card first, and `with_vllm` adds it again.
    return replace(with_vllm(alone, vllm), usable=alone.usable)
