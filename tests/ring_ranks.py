"""Ring attention on real CPU ranks over gloo: torch's own ring, around the CPU's kernel.

torch has the ring for CUDA's operators only. Here they compute on CPUs (`flash_on_cpu`), with the
results that they have on CUDA, and attention runs them, on real ranks and on fake tensors alike.
"""

import contextlib
from collections.abc import Iterator
from functools import cache, wraps
from typing import Any

import torch
from real_ranks import followed, learned
from torch.library import Library
from torch.nn import functional
from vramlab.measurement.worker import on_rank
from vramlab.recipe.recipe import Recipe

aten = torch.ops.aten


def work(recipes: dict[str, Recipe], learn: list[str]) -> dict[str, dict[str, Any]]:
    """What this rank allocates of each recipe's steps, and learns of those in `learn`."""
    from vramlab.training.process_group import real_rank

    torch.set_num_threads(1)
    found = {}
    with real_rank("cpu") as rank, flash_on_cpu():
        for name, recipe in recipes.items():
            here = on_rank(recipe, rank)
            found[name] = followed(here)
            if name in learn:
                found[name] |= learned(here, loss_of=mean_of_squares)
    return found


def mean_of_squares(outputs: Any, batch: Any) -> torch.Tensor:
    """A loss that weighs all tokens alike: of labels one rank has fewer."""
    return outputs["logits"].float().square().mean()


@contextlib.contextmanager
def flash_on_cpu() -> Iterator[None]:
    """While entered, attention on CPU tensors is CUDA's flash operator."""
    install()
    plain = functional.scaled_dot_product_attention

    @wraps(plain)  # torch replaces it by its name
    def attention(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
        causal = options["is_causal"]
        assert options["attn_mask"] is None
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, 0.0, causal, False, scale=options["scale"])[0]

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


@cache
def install() -> Library:
    """Register CPU kernels for CUDA's operators, for the life of the process."""
    library = Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_flash_attention", _forward)
    library.impl("_scaled_dot_product_flash_attention_backward", _backward)
    return library


def _forward(query, key, value, dropout=0.0, causal=False, mask=False, *, scale=None):
    forms = [each.to("meta") for each in (query, key, value)]
    made = aten._scaled_dot_product_flash_attention(*forms, dropout, causal, mask, scale=scale)
    results = [_like(each) for each in made]
    own = aten._scaled_dot_product_flash_attention_for_cpu
    out, rows = own(query, key, value, dropout, causal, scale=scale)
    results[0].copy_(out)
    results[1].copy_(rows)
    return tuple(results)


def _backward(gradient, query, key, value, out, rows, *others, scale=None):
    _, _, _, _, dropout, causal, _, _ = others
    own = aten._scaled_dot_product_flash_attention_for_cpu_backward
    computed = own(gradient, query, key, value, out, rows, dropout, causal, scale=scale)
    results = [torch.empty_like(each) for each in (query, key, value)]
    for result, each in zip(results, computed, strict=True):
        result.copy_(each)
    return tuple(results)


def _like(made: Any) -> Any:
    if not isinstance(made, torch.Tensor):
        return made
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype)
