"""TRL's fused head on fake tensors as on a GPU: its own host code runs, and its Triton kernels are not launched.

The kernels (`trl/kernels/chunked_logprob.py`) write into tensors that the host code has allocated, and allocate nothing.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import patch

import torch


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
