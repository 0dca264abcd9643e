"""The package flash-attn on fake tensors.

torch's copy of its host code (`flash_api.cpp`) runs in its place.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from ..base.errors import RecipeError
from ..private import of_transformers
from ..private.patched import plain, replaced
from .cuda import AMPERE, FLASH_MULTIPLE, HALF, pad_last

NAME = "flash_attention_2"


@contextlib.contextmanager
def flash_attention(capability: tuple[int, int]) -> Iterator[None]:
    """While entered, transformers finds flash-attn in this thread; `capability` is the GPU's."""
    from transformers import PreTrainedModel, modeling_utils
    from transformers import modeling_flash_attention_utils as utils

    # Read before they are replaced: other implementations than flash-attn 2 still get
    # transformers' own.
    check: Any = getattr(PreTrainedModel, of_transformers.CAN_DISPATCH_FLASH)
    imports = plain(utils, of_transformers.LAZY_IMPORTS)
    find = plain(utils, "lazy_import_flash_attention")

    def can_dispatch(model: Any, flash_attn_version: int, **kwargs: Any) -> bool:
        if flash_attn_version == 2 and of_transformers.takes_flash(model):
            return True
        return check(model, flash_attn_version, **kwargs)

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> tuple:
        if implementation != NAME:
            return imports(implementation, *args, **kwargs)
        if capability < AMPERE:
            rest = "flash-attn 2 needs a GPU of Ampere or newer: take 'sdpa'"
            raise RecipeError("attn_implementation", NAME, rest)
        # transformers has functions of its own that pad and unpad rows, for packages that bring
        # none.
        padding = of_transformers.padding_functions(utils)
        return flash_attn_func, flash_attn_varlen_func, None, *padding

    # Looked for once, when a model first asks: the search imports, and changes globals of
    # transformers.
    stand_in = cache(partial(_found_by, find, utils))

    def lazy_import(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return stand_in()
        return find(implementation, *args, **kwargs)

    # Its check would ask for the package, for CUDA and for the card's compute capability.
    installed = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    with (
        replaced(PreTrainedModel, of_transformers.CAN_DISPATCH_FLASH, can_dispatch),
        replaced(installed, "general_availability_check", lambda: True),
        replaced(utils, of_transformers.LAZY_IMPORTS, lazy_imports),
        replaced(utils, "lazy_import_flash_attention", lazy_import),
        replaced(modeling_utils, "lazy_import_flash_attention", lazy_import),
    ):
        yield


def _found_by(find: Callable, utils: ModuleType) -> Any:
    """Return what transformers finds, without what it keeps of that.

    It keeps the implementation that it loaded last.
    """
    kept = {}
    for name, value in vars(utils).items():
        if name.endswith(("_fn", of_transformers.LOADED_IMPLEMENTATION)):
            kept[name] = value
    vars(utils)[of_transformers.LOADED_IMPLEMENTATION] = None
    try:
        return find(NAME)
    finally:
        vars(utils).update(kept)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **unused: Any,
) -> torch.Tensor:
    """Stand for the package's function: batch × tokens × heads × channels."""
    lengths = (q.shape[1], k.shape[1])
    return _forward((q, k, v), None, lengths, dropout_p, causal, softmax_scale)


# transformers reads from the signature what it can pass
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Stand for the package's function for sequences that are joined to one row.

    Tensors are tokens × heads × channels.
    """
    lengths = (int(max_seqlen_q), int(max_seqlen_k))
    return _forward((q, k, v), cu_seqlens_q, lengths, dropout_p, causal, softmax_scale)


def _forward(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ends: torch.Tensor | None,
    lengths: tuple[int, int],
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Run attention over whole rows, or over the sequences of one row, which `ends` divides."""
    dtype = tensors[0].dtype
    if dtype not in HALF:
        rest = f"flash-attn takes fp16 and bf16, not {dtype}: take 'sdpa'"
        raise RecipeError("attn_implementation", NAME, rest)
    width = tensors[0].shape[-1]
    # The padded copies are saved for backward, as the package's `FlashAttnFunc` saves them.
    query, key, value = map(_padded, tensors)
    # PyTorch's copy of `mha_fwd` and, with `ends`, of `mha_varlen_fwd`; what it returns beside the
    # result is in `fake_operators._flash_forward`.
    out = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        ends,
        ends,
        *lengths,
        dropout,
        causal,
        False,
        scale=scale or 1 / math.sqrt(width),
    )[0]
    return out[..., :width]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with contiguous channels, as many as the kernel takes."""
    is_contiguous = tensor.stride(-1) == 1
    return pad_last(tensor if is_contiguous else tensor.contiguous(), FLASH_MULTIPLE)
