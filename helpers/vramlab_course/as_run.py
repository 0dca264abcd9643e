"""Simulate what a run did in attention that the installed transformers does not do: an older version's ways, or a script's.

Real CPU steps of 4.56.2 and 4.57.6 equal `simulate_as_run(recipe, "transformers 4.57")` to the byte for FAMILIES, with sdpa
and eager, checkpointing and caches, but for what transformers 5 adds: a second copy of the rotary frequencies (2 bytes a
rotated channel), a scalar of a sliding cache. 4.53 to 4.55 make the same masks, but also copy queries and keys and keep other
caches: they are not known.

Real CPU steps of 4.48.3 equal `simulate_as_run(recipe, "transformers 4.48")` to the byte, forward, backward and step, for
FAMILIES_4_48 with sdpa, with and without checkpointing, less that second copy of the rotary frequencies. Up to that version
the loss shifted the logits and not the labels, which takes one more fp32 copy of them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils, modeling_utils
from transformers.loss import loss_utils
from vramlab import Recipe, RecipeError, Report, simulate
from vramlab.simulation.fakes import lock

REPEATED = "repeated keys"
_MASKS = (
    "a batch without attention_mask gets a causal mask where no cache is kept; with an all-ones one leave as_run out"
)
BEFORE_4_49 = "transformers 4.48"
AS_RUN = {
    BEFORE_4_49: "the loss copies the shifted logits in fp32, sdpa gets contiguous copies of query, repeated keys and "
    "values, and checkpointing is re-entrant",
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
FAMILIES_4_48 = ("llama", "mistral", "phi", "qwen2")


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
    known = FAMILIES_4_48 if as_run == BEFORE_4_49 else FAMILIES
    if as_run != REPEATED and (shape.family not in known or shape.task != "causal-lm"):
        allowed = f"it is known for causal-lm of {', '.join(known)}, not for {shape.task} of {shape.family}"
        raise RecipeError("as_run", as_run, allowed)
    if as_run == BEFORE_4_49:
        _check_4_48(recipe)
    with lock, as_it_ran(as_run):
        report = simulate(recipe, **options)
    report.notes.insert(0, f"as_run {as_run!r}: {AS_RUN[as_run]}")
    return report


def _check_4_48(recipe: Recipe) -> None:
    """Refuse what no real step of 4.48 was compared with."""
    if recipe.attn_implementation != "sdpa":
        why = f"it is known for attn_implementation 'sdpa', not for {recipe.attn_implementation!r}"
        raise RecipeError("as_run", BEFORE_4_49, why)
    if recipe.trainer != "transformers" or recipe.use_liger_kernel:
        raise RecipeError("as_run", BEFORE_4_49, "it is known for transformers' own loss: leave trainer and Liger out")
    if recipe.loop.use_cache is not False and not recipe.gradient_checkpointing:
        raise RecipeError("as_run", BEFORE_4_49, "it keeps other caches: take a loop with use_cache=False")


def as_it_ran(as_run: str) -> contextlib.AbstractContextManager:
    """While entered, attention does what AS_RUN says."""
    if as_run == REPEATED:
        return patch.object(F, "scaled_dot_product_attention", _repeating(F.scaled_dot_product_attention))
    if as_run == BEFORE_4_49:
        return _as_4_48()
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


@contextlib.contextmanager
def _as_4_48() -> Iterator[None]:
    with (
        patch.dict(loss_utils.LOSS_MAPPING, {"ForCausalLM": _shifted_loss}),
        patch.object(F, "scaled_dot_product_attention", _contiguous(F.scaled_dot_product_attention)),
        patch.object(modeling_utils, "checkpoint", _reentrant),
    ):
        yield


def _shifted_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    """`ForCausalLMLoss` of 4.48 (transformers/loss/loss_utils.py): the shifted logits are a copy."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    labels = labels[..., 1:].contiguous().view(-1)
    return loss_utils.fixed_cross_entropy(shifted, labels, num_items_in_batch, ignore_index, **kwargs)


def _contiguous(original: Any) -> Any:
    """`sdpa_attention_forward` of 4.48 (transformers/integrations/sdpa_attention.py)."""

    def attention(query, key, value, *args, **kwargs):
        return original(query.contiguous(), key.contiguous(), value.contiguous(), *args, **kwargs)

    return _repeating(attention)


def _reentrant(function: Any, *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """The default of `gradient_checkpointing_enable` before transformers 5, whatever is asked for."""
    return checkpoint(function, *args, use_reentrant=True, **kwargs)


def _find(position_ids: torch.Tensor) -> torch.Tensor:
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)
