"""Fake tensors that libraries treat as real ones: what torch and transformers do otherwise when they see one."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .cuda import CudaKernels
from .gpu import Gpu


@contextlib.contextmanager
def fake_world(target: str, card: Gpu | None = None) -> Iterator[tuple[FakeTensorMode, CudaKernels | None]]:
    """A FakeTensorMode with the kernels of `target` in place, in which models take the branches of real tensors.

    transformers takes a fake tensor for a sign of tracing and then builds causal masks that it skips otherwise
    (`masking_utils._ignore_causal_mask_sdpa`), which changes the attention kernel too.
    """
    from transformers.utils import generic, import_utils

    saved = {module: module.is_fake_tensor for module in (generic, import_utils) if hasattr(module, "is_fake_tensor")}
    capability = {"compute_capability": card.compute_capability} if card else {}
    kernels = CudaKernels(**capability) if target == "cuda" else None
    try:
        for module in saved:
            module.is_fake_tensor = lambda tensor: False
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with grouped_mm_of_any_dtype(), fakes as mode, kernels or contextlib.nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
            yield mode, kernels
    finally:
        for module, function in saved.items():
            module.is_fake_tensor = function


@contextlib.contextmanager
def grouped_mm_of_any_dtype() -> Iterator[None]:
    """torch's fake kernel of `_grouped_mm` (mixture of experts) refuses all but bf16; its real ones take any dtype."""
    operator = torch.ops.aten._grouped_mm.default
    if operator in fake_impls.op_implementations_dict:
        yield
        return
    fake_impls.op_implementations_dict[operator] = _grouped_mm
    try:
        yield
    finally:
        fake_impls.op_implementations_dict.pop(operator, None)


def _grouped_mm(mode: FakeTensorMode, func, a, b, offs=None, bias=None, out_dtype=None) -> FakeTensor:
    """Shapes as in aten/src/ATen/native/GroupedMMUtils.h: groups run along the rows of a, along both matrices'
    shared dimension (weight gradients), along the columns of b, or there is a plain batch."""
    rows = a.dim() == 2
    if rows and b.dim() == 2:
        size = (offs.shape[0], a.shape[0], b.shape[1])
    elif rows:
        size = (a.shape[0], b.shape[-1])
    else:
        size = (a.shape[1], b.shape[1]) if b.dim() == 2 else (a.shape[0], a.shape[1], b.shape[-1])
    with mode:
        return torch.empty(size, dtype=out_dtype or a.dtype, device=a.device)
