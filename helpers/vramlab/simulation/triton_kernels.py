"""Libraries with Triton kernels on fake tensors as on a GPU: their own host code runs, and no kernel is launched.

Those of TRL's head (`trl/kernels/chunked_logprob.py`), Liger and flash-linear-attention allocate nothing themselves.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from ..hardware.gpu import Chip
from ..training.models import restore_after_liger


class NotLaunched:
    """A Triton kernel: `kernel[grid](…)` does nothing."""

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def fused_head() -> Iterator[None]:
    """While entered, TRL's head takes the path that it takes on CUDA; TRL has to be loaded before."""
    if "trl.trainer.utils" not in sys.modules:
        yield
        return
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    add_up = chunked_logprob._addmm_fp32

    def addmm_fp32(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == torch.float32:
            add_up(acc, a, b)  # CUDA adds half-precision products into fp32 where it is (`addmm(out_dtype=…, out=acc)`)

    on_gpu = {"_use_triton": lambda device: True}
    kernels = {"_forward_kernel": NotLaunched(), "_backward_kernel": NotLaunched(), "_addmm_fp32": addmm_fp32}
    grids = SimpleNamespace(cdiv=lambda a, b: -(-a // b))  # triton may not be installed
    with (
        patch.multiple(utils, **on_gpu),
        patch.multiple(chunked_logprob, **on_gpu, **kernels),
        patch.object(chunked_logprob, "triton", grids, create=True),
    ):
        yield


@contextlib.contextmanager
def unlaunched(chip: Chip | None) -> Iterator[None]:
    """While entered, Triton's kernels do nothing; Liger and flash-linear-attention, if loaded before, take the branches of
    CUDA on `chip`. Afterwards the modules that Liger changed are as before."""
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.jit import KernelInterface

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(KernelInterface, "__getitem__", NotLaunched.__getitem__))
        for package, contexts in (("liger_kernel.ops", _liger), ("fla.ops.common.chunk_o", _linear_attention)):
            if package in sys.modules:
                for context in contexts(chip):
                    stack.enter_context(context)
        if "liger_kernel.ops" in sys.modules:
            stack.callback(restore_after_liger)
        yield


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
        yield patch.object(rms_norm, "torch", SimpleNamespace(**vars(torch) | {"empty": empty}))
        yield patch.object(fused_linear_cross_entropy, "_can_use_mm_out", can_use_mm_out)
    yield patch.object(fused_linear_cross_entropy, "torch", SimpleNamespace(**vars(torch) | head))


def _linear_attention(chip: Chip | None) -> Iterator[contextlib.AbstractContextManager]:
    """Its tiles, and with them how many partial sums of a gradient there are, depend on a block's shared memory."""
    if chip:
        from fla.ops.common import chunk_o
        from fla.utils.hardware import Backend

        size = 1024 * chip.shared_memory
        asked = {"check_shared_mem": lambda arch="none", index=0: size >= Backend.get_shared_memory(arch)}
        yield patch.multiple(chunk_o, **asked)
