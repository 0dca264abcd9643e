"""Libraries with Triton kernels on fake tensors as on a GPU: their own host code runs, and no kernel is launched.

Those of TRL's head (`trl/kernels/chunked_logprob.py`), Liger and flash-linear-attention allocate nothing themselves.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from ..hardware.gpu import Chip
from ..training.patched import plain, replaced


class NotLaunched:
    """A Triton kernel: `kernel[grid](…)` does nothing."""

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def fused_head() -> Iterator[contextlib.AbstractContextManager]:
    """Contexts in which TRL's head, if loaded before, takes the path that it takes on CUDA."""
    if "trl.trainer.utils" not in sys.modules:
        return
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    add_up = plain(chunked_logprob, "_addmm_fp32")

    def addmm_fp32(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == torch.float32:
            add_up(acc, a, b)  # CUDA adds half-precision products into fp32 where it is (`addmm(out_dtype=…, out=acc)`)

    kernels = {"_forward_kernel": NotLaunched(), "_backward_kernel": NotLaunched(), "_addmm_fp32": addmm_fp32}
    kernels["triton"] = SimpleNamespace(cdiv=lambda a, b: -(-a // b))  # which may not be installed
    for owner in (utils, chunked_logprob):
        yield replaced(owner, "_use_triton", lambda device: True)
    for name, kernel in kernels.items():
        yield replaced(chunked_logprob, name, kernel)


def unlaunched(chip: Chip | None) -> Iterator[contextlib.AbstractContextManager]:
    """Contexts in which Triton's kernels do nothing, and Liger, if loaded before, takes the branches of CUDA on `chip`."""
    if "triton" not in sys.modules:
        return
    from triton.runtime.jit import KernelInterface

    yield replaced(KernelInterface, "__getitem__", NotLaunched.__getitem__)
    if "liger_kernel.ops" in sys.modules:
        yield from _liger(chip)


def _liger(chip: Chip | None) -> Iterator[contextlib.AbstractContextManager]:
    """Liger's modules get a torch of their own, which answers as on CUDA where they take another branch there."""
    from liger_kernel.ops import fused_linear_cross_entropy, rms_norm

    def empty(size: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(size, tuple) and size[0] == 1:  # of the rows each multiprocessor sums up one of the gradient
            size = chip.multiprocessors, *size[1:]
        return torch.empty(size, **kwargs)

    def mm(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs or a.itemsize != 2 or chip.capability < (8, 0):
            return torch.mm(a, b, **kwargs)
        b.to(a.dtype)
        return SimpleNamespace(float=lambda: 0)  # added where the sum is (`addmm(out=…)`)

    def can_use_mm_out(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
        """Liger's own question, with CPU's autocast, which stands for CUDA's, in the place of that."""
        wanted = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        return hidden.dtype == weight.dtype == wanted and not torch.is_grad_enabled()

    head = {"equal": lambda a, b: False}  # it multiplies in place unless a gradient is one: no size depends on that
    if chip:
        head["mm"] = mm
        backward = plain(rms_norm, "rms_norm_backward")  # in forward one row is a token
        own = vars(rms_norm) | {"torch": SimpleNamespace(**vars(torch) | {"empty": empty})}
        on_gpu = FunctionType(backward.__code__, own, argdefs=backward.__defaults__)
        yield replaced(rms_norm, "rms_norm_backward", on_gpu)
        yield replaced(fused_linear_cross_entropy, "_can_use_mm_out", can_use_mm_out)
    yield replaced(fused_linear_cross_entropy, "torch", SimpleNamespace(**vars(torch) | head))
