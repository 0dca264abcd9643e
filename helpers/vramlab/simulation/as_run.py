"""Simulate what a run did that the installed transformers does not do.

An older version's ways, or a script's.

Held against real CPU steps of the Trainer's loop under each version, forward and backward to the
byte, less a second copy of the rotary frequencies (2 bytes a rotated channel), which transformers 5
adds:

    4.48.3              FAMILIES_4_48 with sdpa. The loss shifted the logits and not the labels, one
                        more fp32 copy of them.
    4.56.2, 4.57.6      FAMILIES with sdpa and eager. 4.53 to 4.55 make the same masks, but also
                        copy queries and keys and keep other caches: they are not known.
    5.12.0, 5.16.0      DELTA_NETS without flash-linear-attention, qwen3_next to 320 bytes. The
                        delta rule solved triangles row by row, and autograd kept the rows; since
                        5.17.0 `torch.linalg.solve_triangular` does it.

Before transformers 5 checkpointing was re-entrant where a script did not say otherwise
(`gradient_checkpointing_enable`).
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils, modeling_utils
from transformers.loss import loss_utils

from ..base.errors import RecipeError
from ..private.patched import plain, replaced
from ..recipe.recipe import Recipe
from ..report.report import Report
from .delta_rule import gated_delta_rule
from .fakes import lock
from .simulate import simulate

REPEATED = "repeated keys"
FAMILIES = ("gpt_neox", "llama", "mistral", "phi", "qwen2", "qwen3")
FAMILIES_4_48 = ("llama", "mistral", "phi", "qwen2")
DELTA_NETS = ("qwen3_next", "qwen3_5_text")
_ALL = ("sdpa", "eager")
_MASKS = (
    "a batch without attention_mask gets a causal mask where no cache is kept; with an "
    "all-ones one leave as_run out"
)


@dataclass(frozen=True)
class Ways:
    """What ran otherwise, in words, and for which recipes real steps were compared.

    `reentrant` says how the version checkpoints by default.
    """

    words: str
    enter: Callable[[], contextlib.AbstractContextManager]
    families: tuple[str, ...] = ()
    kernels: tuple[str, ...] = _ALL
    reentrant: bool = False


@contextlib.contextmanager
def _as_4_48() -> Iterator[None]:
    with (
        # Models look their loss up in this table, and call attention by its module's name.
        replaced(loss_utils.LOSS_MAPPING, "ForCausalLM", _shifted_loss),
        replaced(
            F,
            "scaled_dot_product_attention",
            _contiguous(plain(F, "scaled_dot_product_attention")),
        ),
    ):
        yield


def _as_4_57() -> contextlib.AbstractContextManager:
    # `masking_utils` of transformers 4.53 to 4.57 kept the mask once it had looked for packed
    # sequences; shared keys and values are repeated then, and the kernel keeps mask and copies for
    # its backward pass
    return replaced(masking_utils, "find_packed_sequence_indices", _find)


def _repeated_keys() -> contextlib.AbstractContextManager:
    return replaced(
        F,
        "scaled_dot_product_attention",
        _repeating(plain(F, "scaled_dot_product_attention")),
    )


@contextlib.contextmanager
def _as_5_16() -> Iterator[None]:
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_next import modeling_qwen3_next

    with contextlib.ExitStack() as stack:
        # Each model's file has a copy of the function.
        for module in (modeling_qwen3_5, modeling_qwen3_next):
            stack.enter_context(replaced(module, "torch_chunk_gated_delta_rule", gated_delta_rule))
        yield


_SHIFTED = (
    "the loss copies the shifted logits in fp32, sdpa gets contiguous copies of query, "
    "repeated keys and values"
)
_SHARED = (
    "keys and values that query heads share are repeated before sdpa, so that every kernel "
    "takes them"
)
_ROWS = "the delta rule solves its triangles row by row, and autograd keeps the rows"
WAYS = {
    "transformers 4.48": Ways(_SHIFTED, _as_4_48, FAMILIES_4_48, ("sdpa",), reentrant=True),
    REPEATED: Ways(_SHARED, _repeated_keys),
    **{
        f"transformers {v}": Ways(_MASKS, _as_4_57, FAMILIES, reentrant=True)
        for v in ("4.56", "4.57")
    },
    **{f"transformers 5.{minor}": Ways(_ROWS, _as_5_16, DELTA_NETS) for minor in range(12, 17)},
}
AS_RUN = {name: ways.words for name, ways in WAYS.items()}


def simulate_as_run(
    recipe: Recipe, as_run: str | None, use_reentrant: bool | None = None, **options: Any
) -> Report:
    """Return `simulate(recipe, **options)` as it ran.

    Args:
        as_run: a name in AS_RUN, or None for the installed library.
        use_reentrant: what the script asked of checkpointing; None: nothing, so the version's
            default.
    Raises:
        RecipeError: the name is unknown, or was not compared for such a recipe.
    """
    if as_run is None:
        return simulate(recipe, **options)
    if as_run not in WAYS:
        raise RecipeError(
            "as_run",
            as_run,
            "known are " + ", ".join(map(repr, WAYS)) + ", and None, as installed",
        )
    ways = WAYS[as_run]
    _check(recipe, as_run, ways)
    reentrant = ways.reentrant if use_reentrant is None else use_reentrant
    # What is replaced is so for the whole process, and no other simulation may run meanwhile.
    with lock, as_it_ran(as_run, reentrant):
        report = simulate(recipe, **options)
    words = ways.words
    if recipe.gradient_checkpointing and reentrant:
        words += ", and checkpointing is re-entrant"
    report.notes.insert(0, f"as_run {as_run!r}: {words}")
    return report


def of_release(text: str) -> str | None:
    """Return the name in AS_RUN of a version such as "4.48" or "4.48.3".

    It is None for the installed version. Raises RecipeError for one that is neither.
    """
    installed = version("transformers")
    found = re.match(r"(\d+\.\d+)(\.|$)", text)
    name = f"transformers {found[1]}" if found else ""
    if found and installed.startswith(f"{found[1]}."):
        return None
    if name in WAYS:
        return name
    known = ", ".join(key.removeprefix("transformers ") for key in WAYS if key != REPEATED)
    raise RecipeError("transformers", text, f"known are {known} and the installed {installed}")


def _check(recipe: Recipe, as_run: str, ways: Ways) -> None:
    """Refuse what no real step was compared with."""
    shape = recipe.shape
    kind = recipe.attn_implementation
    if kind not in ways.kernels:
        known = " and ".join(map(repr, ways.kernels))
        raise RecipeError(
            "as_run",
            as_run,
            f"it is known for attn_implementation {known}, not for {kind!r}",
        )
    if ways.families and (shape.family not in ways.families or shape.task != "causal-lm"):
        known = ", ".join(ways.families)
        what = f"{shape.task} of {shape.family}"
        allowed = f"it is known for causal-lm of {known}, not for {what}"
        raise RecipeError("as_run", as_run, allowed)
    if ways.enter is _as_4_48:
        if recipe.trainer != "transformers" or recipe.use_liger_kernel:
            raise RecipeError(
                "as_run",
                as_run,
                "it is known for transformers' own loss: leave trainer and Liger out",
            )
        if recipe.loop.use_cache is not False and not recipe.gradient_checkpointing:
            raise RecipeError(
                "as_run",
                as_run,
                "it keeps other caches: take a loop with use_cache=False",
            )


@contextlib.contextmanager
def as_it_ran(as_run: str, reentrant: bool = False) -> Iterator[None]:
    """While entered, transformers does what AS_RUN says.

    It checkpoints re-entrantly if asked to.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(WAYS[as_run].enter())
        if reentrant:
            # What `gradient_checkpointing_enable` hands to the layers.
            stack.enter_context(replaced(modeling_utils, "checkpoint", _reentrant))
        yield


def _repeating(original: Any) -> Any:
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> Any:
        # With as many heads of keys as of queries every kernel will do, and none needs
        # `enable_gqa`.
        groups = query.shape[-3] // key.shape[-3]
        if enable_gqa and groups > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        return original(query, key, value, *args, **kwargs)

    return attention


def _shifted_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Any:
    """Compute `ForCausalLMLoss` of 4.48 (transformers/loss/loss_utils.py): it copies the logits."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    labels = labels[..., 1:].contiguous().view(-1)
    return loss_utils.fixed_cross_entropy(
        shifted,
        labels,
        num_items_in_batch,
        ignore_index,
        **kwargs,
    )


def _contiguous(original: Any) -> Any:
    """Attend as `sdpa_attention_forward` of 4.48 (transformers/integrations/sdpa_attention.py)."""

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        return original(query.contiguous(), key.contiguous(), value.contiguous(), *args, **kwargs)

    return _repeating(attention)


def _reentrant(function: Any, *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Checkpoint re-entrantly, whatever the installed version asks for."""
    return checkpoint(function, *args, use_reentrant=True, **kwargs)


def _find(position_ids: torch.Tensor) -> torch.Tensor:
    # The installed function goes on to return None where nothing is packed, and then no mask is
    # made.
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)
