"""What chapter 10's cells share.

That is what a call reads or makes, bytes of tensors and of a cache, a cache beside transformers'
own, the bytes of two moments, who holds memory in GRPO, and what others published of it on a T4.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vramlab import Recipe, simulate
from vramlab.hardware.gpu import Gpu
from vramlab.report.report import Bytes, Report
from vramlab.simulation.colocated import colocated, with_vllm

from ..made_tensors import MadeTensors
from ..published import json_of


def written(model: Any, **how: Any) -> tuple[Any, int]:
    """Return what `generate` answers, and how many tokens the model read for it."""
    read = []
    first = model.get_input_embeddings()
    with first.register_forward_hook(lambda layer, given, made: read.append(given[0].numel())):
        return model.generate(**how), sum(read)


def trained_on_a_t4() -> Any:
    """Return GRPO's run in `data/elsewhere/trl_t4.json`: what was published, and a recipe."""
    return json_of("elsewhere/trl_t4")["runs"]["grpo"]


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
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


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


def cache_row(remember: Callable[..., Any], window: int | None) -> tuple[str, int, int]:
    """Return the bytes that `remember` and transformers keep of 256 tokens, one after another.

    They are the keys and the values of 4 heads; first stands the window.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    theirs = DynamicSlidingWindowLayer(window) if window else DynamicLayer()
    kept = None
    for _ in range(256):
        new = torch.randn(1, 8, 1, 32)  # keys, then values
        _, kept = remember(kept, new[0], window)
        theirs.update(*new.chunk(2, 1))
    return str(window), nbytes([kept]), nbytes([theirs.keys, theirs.values])


def two_moments(report: Report) -> dict[str, int]:
    """Return the bytes of the layers' highest moment in the backward pass, and of the loss's."""
    backward = [moment.bytes.total for moment in report.timeline if moment.phase == "backward"]
    # The loss goes backward first, and the timeline's first two points there are its own.
    return {"a layer, backward": max(backward[2:]), "the loss, backward": max(backward[:2])}


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


def grpo_memory(watched: Any) -> tuple[int, int]:
    """Return the activations in GRPO as training begins, and the most while it goes backward."""
    phases = watched.report().phases
    # "load" is what comes before the forward pass that autograd follows: sampling, too.
    return phases["load"].end.activations, phases["backward"].peak.activations


def grpo_reports(recipe: Recipe, card: Gpu, share: float) -> list[Report]:
    """Return the reports of `recipe` alone, and with vLLM awake and asleep in training.

    vLLM takes `share` of the card. `simulate` says the same where the card has room for both.
    """
    assert recipe.rollouts
    elsewhere = replace(recipe.rollouts, vllm_mode="server")
    alone = simulate(recipe.replace(rollouts=elsewhere), gpu=card)
    reports = [alone]
    for sleeps in (False, True):
        rollouts = replace(
            recipe.rollouts, vllm_gpu_memory_utilization=share, vllm_enable_sleep_mode=sleeps
        )
        vllm = colocated(recipe.replace(rollouts=rollouts), card)
        assert vllm
        # `simulate` takes the share from the card first, and `with_vllm` adds it again.
        reports.append(replace(with_vllm(alone, vllm), usable=alone.usable))
    return reports
