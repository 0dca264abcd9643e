"""Libraries with Triton kernels on fake tensors as on a GPU.

Their own host code runs, and no kernel is launched. Those of TRL's head
(`trl/kernels/chunked_logprob.py`), Liger and flash-linear-attention allocate nothing themselves.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from ..hardware.gpu import Chip
from ..private import of_trl
from ..private.patched import plain, replaced
from .cuda import AMPERE


class NotLaunched:
    """A Triton kernel: `kernel[grid](…)` does nothing."""

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def fused_head() -> Iterator[contextlib.AbstractContextManager]:
    """Return contexts in which TRL's head, if loaded before, takes the path of CUDA."""
    if "trl.trainer.utils" not in sys.modules:
        return
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    add_up = plain(chunked_logprob, of_trl.ADD_PRODUCT)

    def addmm_fp32(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        # CUDA adds half-precision products into fp32 where it is (`addmm(out_dtype=…, out=acc)`)
        if a.dtype == torch.float32:
            add_up(acc, a, b)

    for owner in (utils, chunked_logprob):
        yield replaced(owner, of_trl.USE_TRITON, lambda device: True)
    kernels: dict[str, Any] = {name: NotLaunched() for name in of_trl.HEAD_KERNELS}
    kernels |= {
        of_trl.ADD_PRODUCT: addmm_fp32,
        # it may not be installed
        "triton": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
    }
    for name, kernel in kernels.items():
        yield replaced(chunked_logprob, name, kernel)


def unlaunched(chip: Chip | None) -> Iterator[contextlib.AbstractContextManager]:
    """Return contexts in which Triton's kernels do nothing.

    Liger, if loaded before, takes the branches of CUDA on `chip`.
    """
    if "triton" not in sys.modules:
        return
    from triton.runtime.jit import KernelInterface

    yield replaced(KernelInterface, "__getitem__", NotLaunched.__getitem__)
    if "liger_kernel.ops" in sys.modules:
        yield from _liger(chip)


def _liger(chip: Chip | None) -> Iterator[contextlib.AbstractContextManager]:
    """Return contexts in which Liger's modules have a torch of their own.

    It answers as on CUDA where they take another branch there.
    """
    from liger_kernel.ops import fused_linear_cross_entropy, rms_norm

    # it multiplies in place unless a gradient is one: no size depends on that
    head: dict[str, Any] = {"equal": lambda a, b: False}
    if chip:
        head["mm"] = _mm_on(chip)
        on_gpu = _backward_with(_empty_on(chip), rms_norm)
        yield replaced(rms_norm, "rms_norm_backward", on_gpu)
        yield replaced(fused_linear_cross_entropy, of_trl.CAN_MULTIPLY_IN_PLACE, _can_use_mm_out)
    own_torch = SimpleNamespace(**vars(torch) | head)
    yield replaced(fused_linear_cross_entropy, "torch", own_torch)


def _backward_with(empty: Callable, rms_norm: ModuleType) -> FunctionType:
    """Return the backward pass of RMS norm with another `torch.empty`.

    The forward pass, in which one row is a token, keeps torch's.
    """
    backward = plain(rms_norm, "rms_norm_backward")
    own_torch = SimpleNamespace(**vars(torch) | {"empty": empty})
    # The same code with globals of its own, because another `torch` in the module would reach its
    # forward pass too.
    own_globals = vars(rms_norm) | {"torch": own_torch}
    return FunctionType(backward.__code__, own_globals, argdefs=backward.__defaults__)


def _empty_on(chip: Chip) -> Callable:
    def empty(size: Any, **kwargs: Any) -> torch.Tensor:
        # each multiprocessor sums up rows into one of the gradient
        if isinstance(size, tuple) and size[0] == 1:
            size = (chip.multiprocessors, *size[1:])
        return torch.empty(size, **kwargs)

    return empty


def _mm_on(chip: Chip) -> Callable:
    def mm(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs or a.itemsize != 2 or chip.capability < AMPERE:
            return torch.mm(a, b, **kwargs)
        b.to(a.dtype)
        # added where the sum is (`addmm(out=…)`)
        return SimpleNamespace(float=lambda: 0)

    return mm


def _can_use_mm_out(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Answer Liger's own question, with CPU's autocast, which stands for CUDA's."""
    wanted = weight.dtype
    if torch.is_autocast_enabled("cpu"):
        wanted = torch.get_autocast_dtype("cpu")
    return hidden.dtype == weight.dtype == wanted and not torch.is_grad_enabled()
