"""Simulate what a run did in attention that the installed transformers does not do: an older version's ways, or a script's.

Real CPU steps of 4.56.2 and 4.57.6 equal `simulate_as_run(recipe, "transformers 4.57")` to the byte for FAMILIES, with sdpa
and eager, checkpointing and caches, but for what transformers 5 adds: a second copy of the rotary frequencies (2 bytes a
rotated channel), a scalar of a sliding cache. 4.53 to 4.55 make the same masks, but also copy queries and keys and keep other
caches: they are not known.
"""

import contextlib
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F
from transformers import masking_utils
from vramlab import Recipe, RecipeError, Report, simulate
from vramlab.simulation.fakes import lock

REPEATED = "repeated keys"
_MASKS = (
    "a batch without attention_mask gets a causal mask where no cache is kept; with an all-ones one leave as_run out"
)
AS_RUN = {
    REPEATED: "keys and values that query heads share are repeated before sdpa, so that every kernel takes them",
    **dict.fromkeys(("transformers 4.56", "transformers 4.57"), _MASKS),
}
FAMILIES = (
    "gpt_neox",
    "llama",
    "mistral",
    "phi",
    "qwen2",
    "qwen3",
)  # whose real steps under 4.56 and 4.57 were compared


def simulate_as_run(recipe: Recipe, as_run: str | None, **options: Any) -> Report:
    """Return `simulate(recipe, **options)` as it ran: `as_run` is a name in AS_RUN, or None for the installed library.

    Raises RecipeError where the name is unknown, or was not compared for such a recipe.
    """
    if as_run is None:
        return simulate(recipe, **options)
    if as_run not in AS_RUN:
        raise RecipeError("as_run", as_run, "known are " + ", ".join(map(repr, AS_RUN)) + ", and None, as installed")
    shape, kind = recipe.shape, recipe.attn_implementation
    if kind not in ("sdpa", "eager"):
        raise RecipeError("as_run", as_run, f"it is known for attn_implementation 'sdpa' and 'eager', not for {kind!r}")
    if as_run != REPEATED and (shape.family not in FAMILIES or shape.task != "causal-lm"):
        allowed = f"it is known for causal-lm of {', '.join(FAMILIES)}, not for {shape.task} of {shape.family}"
        raise RecipeError("as_run", as_run, allowed)
    with lock, as_it_ran(as_run):
        report = simulate(recipe, **options)
    report.notes.insert(0, f"as_run {as_run!r}: {AS_RUN[as_run]}")
    return report


def as_it_ran(as_run: str) -> contextlib.AbstractContextManager:
    """While entered, attention does what AS_RUN says."""
    if as_run == REPEATED:
        return patch.object(F, "scaled_dot_product_attention", _repeating(F.scaled_dot_product_attention))
    # `masking_utils` of transformers 4.53 to 4.57 kept the mask once it had looked for packed sequences; shared keys and
    # values are repeated then, and the kernel keeps mask and copies for its backward pass
    return patch.object(masking_utils, "find_packed_sequence_indices", _find)


def _repeating(original: Any) -> Any:
    def attention(query, key, value, *args, enable_gqa=False, **kwargs):
        groups = query.shape[-3] // key.shape[-3]
        if enable_gqa and groups > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        return original(query, key, value, *args, **kwargs)

    return attention


def _find(position_ids: torch.Tensor) -> torch.Tensor:
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)
