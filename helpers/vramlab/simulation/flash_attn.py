"""The package flash-attn on fake tensors: torch's copy of its host code (`flash_api.cpp`) runs in its place."""

import contextlib
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from ..report.errors import RecipeError
from ..training.patched import plain, replaced
from .cuda import HALF, pad_head

NAME = "flash_attention_2"


@contextlib.contextmanager
def flash_attention(capability: tuple[int, int]) -> Iterator[None]:
    """While entered, transformers finds flash-attn in this thread; `capability` is the GPU's."""
    from transformers import PreTrainedModel, modeling_utils
    from transformers import modeling_flash_attention_utils as utils

    check, imports = PreTrainedModel._flash_attn_can_dispatch, plain(utils, "_lazy_imports")
    find = plain(utils, "lazy_import_flash_attention")

    def can_dispatch(model, flash_attn_version, **kwargs):
        return (flash_attn_version == 2 and model._supports_flash_attn) or check(model, flash_attn_version, **kwargs)

    def lazy_imports(implementation, *args, **kwargs):
        if implementation != NAME:
            return imports(implementation, *args, **kwargs)
        if capability < (8, 0):
            raise RecipeError("attn_implementation", NAME, "flash-attn 2 needs a GPU of Ampere or newer: take 'sdpa'")
        return flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    @cache
    def found() -> Any:
        """What transformers finds, without what it keeps of that: the implementation that it loaded last."""
        kept = {name: value for name, value in vars(utils).items() if name.endswith(("_fn", "_loaded_implementation"))}
        utils._loaded_implementation = None
        try:
            return find(NAME)
        finally:
            vars(utils).update(kept)

    def lazy_import(implementation, *args, **kwargs):
        return found() if implementation == NAME else find(implementation, *args, **kwargs)

    installed = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    with (
        replaced(PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch),
        replaced(installed, "general_availability_check", lambda: True),
        replaced(utils, "_lazy_imports", lazy_imports),
        replaced(utils, "lazy_import_flash_attention", lazy_import),
        replaced(modeling_utils, "lazy_import_flash_attention", lazy_import),
    ):
        yield


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **unused):
    """The package's function: batch × tokens × heads × channels."""
    return _forward((q, k, v), None, (q.shape[1], k.shape[1]), dropout_p, causal, softmax_scale)


# transformers reads from the signature what it can pass
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                           deterministic=False):  # fmt: skip
    """The package's function for sequences that are joined to one row: tokens × heads × channels."""
    return _forward((q, k, v), cu_seqlens_q, (int(max_seqlen_q), int(max_seqlen_k)), dropout_p, causal, softmax_scale)


def _forward(tensors, ends, lengths, dropout_p, causal, scale):
    """Attention over whole rows, or over the sequences of one row, which `ends` divides."""
    q = tensors[0]
    if q.dtype not in HALF:
        raise RecipeError("attn_implementation", NAME, f"flash-attn takes fp16 and bf16, not {q.dtype}: take 'sdpa'")
    width, scale = q.shape[-1], scale or 1 / math.sqrt(q.shape[-1])
    q, k, v = (pad_head(t if t.stride(-1) == 1 else t.contiguous(), 8) for t in tensors)
    options = *lengths, dropout_p, causal, False
    out = torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, *options, scale=scale)[0]
    return out[..., :width]
