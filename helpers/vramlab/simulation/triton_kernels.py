"""Libraries with Triton kernels on fake tensors as on a GPU: their own host code runs, and no kernel is launched.

Those of TRL's head (`trl/kernels/chunked_logprob.py`), Liger and flash-linear-attention allocate nothing themselves.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_impls

from ..hardware.gpu import Chip
from ..training.liger import restore

aten = torch.ops.aten
# Liger counts labels for its kernel, and multiplies in place unless a gradient is one: no size depends on either.
READ = {
    aten._local_scalar_dense.default: lambda mode, func, *args, **kwargs: 1,
    aten.equal.default: lambda mode, func, *args, **kwargs: False,
}


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
            stack.callback(restore)
        yield


def _liger(chip: Chip | None) -> Iterator[contextlib.AbstractContextManager]:
    from liger_kernel.ops import fused_linear_cross_entropy, rms_norm

    head = ((f"fused_linear_cross_entropy_{way}", fused_linear_cross_entropy) for way in ("forward", "backward"))
    for name, home in (*head, ("rms_norm_backward", rms_norm)):
        theirs = SimpleNamespace(**vars(torch) | (_on_cuda(name, chip) if chip else {}))
        yield patch.object(home, name, partial(_hosted, getattr(home, name), home, theirs))
    if chip:
        yield patch.object(fused_linear_cross_entropy, "_can_use_mm_out", _can_use_mm_out)


def _linear_attention(chip: Chip | None) -> Iterator[contextlib.AbstractContextManager]:
    """Its tiles, and with them how many partial sums of a gradient there are, depend on a block's shared memory."""
    if chip:
        from fla.ops.common import chunk_o
        from fla.utils.hardware import Backend

        size = 1024 * chip.shared_memory
        asked = {"check_shared_mem": lambda arch="none", index=0: size >= Backend.get_shared_memory(arch)}
        yield patch.multiple(chunk_o, **asked)


def _hosted(function: Callable, home: Any, theirs: SimpleNamespace, *args: Any, **kwargs: Any) -> Any:
    """`function` of Liger's module `home`, which reads values, with `theirs` as its torch."""
    with patch.dict(fake_impls.op_implementations_dict, READ), patch.object(home, "torch", theirs):
        return function(*args, **kwargs)


def _can_use_mm_out(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Liger's own question, with CPU's autocast, which stands for CUDA's, in the place of that."""
    wanted = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
    return hidden.dtype == weight.dtype == wanted and not torch.is_grad_enabled()


def _on_cuda(name: str, chip: Chip) -> dict[str, Callable]:
    """What torch's functions give there where Liger's `name` takes another branch on CUDA."""

    def empty(size: tuple[int, ...], **kwargs: Any) -> torch.Tensor:
        return torch.empty((chip.multiprocessors, *size[1:]), **kwargs)  # of which each sums up a row of the gradient

    def mm(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs or a.itemsize != 2 or chip.capability < (8, 0):
            return torch.mm(a, b, **kwargs)
        b.to(a.dtype)
        return SimpleNamespace(float=lambda: 0)  # added where the sum is (`addmm(out=…)`)

    return {"empty": empty} if name == "rms_norm_backward" else {"mm": mm}
