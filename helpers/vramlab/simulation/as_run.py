"""What a run did in attention that the installed transformers does not do: an older version's ways, or a script's own.

`simulate(recipe, as_run="transformers 4.57")` puts the difference in place. Real CPU steps of 4.56.2 and 4.57.6 equal
that to the byte for the families whose record names them, with sdpa and eager, checkpointing and caches, but for what
transformers 5 adds: a second copy of the rotary frequencies (2 bytes a rotated channel), a scalar of a sliding cache.
4.53 to 4.55 make the same masks, but also copy queries and keys and keep other caches: they are not known.
"""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from ..recipe.families import FAMILIES
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError

REPEATED = "repeated keys"
_MASKS = (
    "a batch without attention_mask gets a causal mask where no cache is kept; with an all-ones one leave as_run out"
)
AS_RUN = {
    REPEATED: "keys and values that query heads share are repeated before sdpa, so that every kernel takes them",
    **dict.fromkeys(("transformers 4.56", "transformers 4.57"), _MASKS),
}


def check(as_run: str | None, recipe: Recipe | None) -> list[str]:
    """The note on `as_run`, [] for none. Raises RecipeError where it is unknown, or was not compared for the recipe."""
    if not as_run:
        return []
    if not isinstance(as_run, str) or as_run not in AS_RUN:
        raise RecipeError("as_run", as_run, "known are " + ", ".join(map(repr, AS_RUN)) + ", and None, as installed")
    if recipe is None:
        raise RecipeError("as_run", as_run, "it is for recipes: a module given as model runs as it is installed")
    shape, kind = recipe.shape, recipe.attn_implementation
    if kind not in ("sdpa", "eager"):
        raise RecipeError("as_run", as_run, f"it is known for attn_implementation 'sdpa' and 'eager', not for {kind!r}")
    known = [name for name, family in FAMILIES.items() if as_run in family.as_run]
    if as_run != REPEATED and (shape.family not in known or shape.task != "causal-lm"):
        allowed = f"it is known for causal-lm of {', '.join(known)}, not for {shape.task} of {shape.family}"
        raise RecipeError("as_run", as_run, allowed)
    return [f"as_run {as_run!r}: {AS_RUN[as_run]}"]


@contextlib.contextmanager
def as_it_ran(as_run: str | None) -> Iterator[None]:
    """While entered, attention does what AS_RUN says; nothing for None. Other threads' simulations wait."""
    from .fakes import lock

    if not as_run:
        yield
        return
    with lock, _repeated_keys() if as_run == REPEATED else _masks():
        yield


def _repeated_keys() -> contextlib.AbstractContextManager:
    from torch.nn import functional as F

    original = F.scaled_dot_product_attention

    def attention(query, key, value, *args, enable_gqa=False, **kwargs):
        groups = query.shape[-3] // key.shape[-3]
        if enable_gqa and groups > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        return original(query, key, value, *args, **kwargs)

    return patch.object(F, "scaled_dot_product_attention", attention)


def _masks() -> contextlib.AbstractContextManager:
    """`masking_utils` of transformers 4.53 to 4.57, which kept the mask once it had looked for packed sequences.

    Shared keys and values are repeated then, and the kernel keeps mask and copies for its backward pass.
    """
    import torch
    from transformers import masking_utils

    def find(position_ids: torch.Tensor) -> torch.Tensor:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    return patch.object(masking_utils, "find_packed_sequence_indices", find)
