"""Where CUDA differs from CPU: how `target="cuda"` is simulated on fake CPU tensors.

Fake tensors of device "cuda" need a CUDA build of PyTorch, so the step runs on fake CPU tensors, and PyTorch's
dispatcher finds here the kernels that differ, for this thread only (`own_kernels.py`): attention, dropout, softmax, RMS
norm and autocast's casts (`cuda_autocast.py`). What kernels allocate while they run is in `cuda_scratch.py`, results of
other sizes in `operators.py`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch.autograd.graph import _engine_run_backward
from torch.library import Library
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..hardware.kernels import sdp_backend
from ..hardware.overhead import efficient_takes_groups
from ..training.patched import plain, replaced
from . import cuda_autocast, own_kernels

FACTORIES = {torch.tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.linspace}
HALF = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


def attention_kernel(
    dtype: torch.dtype, head_dim: int, value_dim: int, capability: tuple[int, int] = (8, 0), **options
) -> str:
    """ "flash", "efficient" or "math": what `scaled_dot_product_attention` runs (`sdp_utils.cpp`, select_sdp_backend).

    cuDNN's kernel of Hopper and Blackwell saves what flash saves, and is counted as flash. `options`: masked, grouped,
    dropout and broadcast of `sdp_backend`; before torch 2.14 only flash takes grouped queries (pull 191085).
    """
    if dtype not in (*HALF, torch.float32):
        return "math"
    options = {"masked": False, "value_dim": value_dim, "capability": capability, **options}
    options["grouped"] = options.get("grouped", False) and not efficient_takes_groups()
    return sdp_backend(dtype.itemsize, head_dim, bf16=dtype == torch.bfloat16, **options)


class CudaKernels(TorchFunctionMode):
    """While entered, tensors that Python code makes on no device, or on "cpu" by name, are the host's, as in CUDA code."""

    def __init__(self):
        super().__init__()
        self.on_host: Callable[[list[torch.Tensor]], None] = lambda tensors: None  # called with those tensors
        self.is_on_host: Callable[[list[torch.Tensor]], bool] = lambda tensors: False
        self.notes: list[str] = []  # what is done otherwise than CUDA would

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            return self.backward(args[0])
        result = func(*args, **kwargs)
        if func in FACTORIES:
            device = kwargs.get("device")
            if device is None or (isinstance(device, str) and device == "cpu"):  # a torch.device is some tensor's
                self.on_host([result])
            elif func is torch.tensor and torch.device(device).index is not None:  # which it loses on the way
                return torch.empty(result.shape, dtype=result.dtype, device=device)
        elif func is torch.Tensor.to and result is args[0] and args[1:] and isinstance(args[1], torch.Tensor):
            # a move to the device of another, as of Adafactor's states
            return result.clone() if self.is_on_host([result]) and not self.is_on_host([args[1]]) else result
        return result

    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()` with this mode still entered, as a checkpoint recomputes in there; torch's wrapper leaves it."""
        with self:
            start = torch.ones_like(loss, memory_format=torch.preserve_format)
            _engine_run_backward((loss,), (start,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_capability = [(8, 0)]  # of the GPU that is simulated; one simulation runs at a time


@contextlib.contextmanager
def cuda_kernels(compute_capability: tuple[int, int] = (8, 0)) -> Iterator[CudaKernels]:
    """While entered, CPU tensors of this thread, and of autograd's that work for it, get what CUDA tensors of such a GPU
    would get."""
    _install()
    _capability[0] = compute_capability
    # without a device it is asked for CUDA (PEFT's 4-bit layers, Liger)
    enabled = plain(torch, "is_autocast_enabled")
    asked = replaced(torch, "is_autocast_enabled", lambda device="cpu": enabled(device))
    mode = CudaKernels()
    with asked, cuda_autocast.followed(), own_kernels.in_this_thread(own_kernels.KERNELS), mode:
        yield mode


@cache
def _install() -> list[Library]:
    """Register the kernels for the life of the process; only threads that `cuda_kernels` is entered in have them."""
    kernels = {
        "scaled_dot_product_attention": lambda *args, **kwargs: _attention(_capability[0], *args, **kwargs),
        "dropout": _dropout,
        "softmax.int": partial(_softmax, aten._softmax),
        "log_softmax.int": partial(_softmax, aten._log_softmax),
        "rms_norm": _rms_norm,
    }
    library = own_kernels.library(own_kernels.KERNELS)
    for name, kernel in kernels.items():
        own_kernels.register(library, name, kernel)
    return [library, cuda_autocast.install()]


def _attention(capability, query, key, value, *options, scale=None, enable_gqa=False):
    mask, p, causal = (*options, *(None, 0.0, False)[len(options) :])
    fewer = query.shape[-3] != key.shape[-3]
    # flash aligns a causal mask to the other corner where lengths differ
    masked = mask is not None or (causal and query.shape[-2] != key.shape[-2])
    given = {"masked": masked, "grouped": fewer and enable_gqa, "broadcast": fewer and not enable_gqa, "dropout": p}
    kernel = attention_kernel(query.dtype, query.shape[-1], value.shape[-1], capability, **given)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
    if kernel == "math" or query.dim() != 4:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return aten._scaled_dot_product_attention_math(query, key, value, mask, p, causal, **options)[0]
    if kernel == "flash":
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        padded = (pad_head(t, 8) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(*padded, p, causal, False, scale=scale)[0]
        return out[..., : value.shape[-1]]
    with_rows = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if mask is not None:  # its last dimension is padded to 16 in memory, and every head sees it (pad_bias)
        mask = pad_head(mask, 16)[..., : mask.shape[-1]].expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, with_rows, p, causal, scale=scale)[0]


def pad_head(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """The last dimension padded with zeros to `multiple` (attention.cpp, pad_last_dim)."""
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One fused kernel that returns the result and a mask of booleans (`Dropout.cpp`, is_fused_kernel_acceptable)."""
    return torch.native_dropout(input, p, True)[0] if train and p else input


def _softmax(operator, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of fp16 with an fp32 result in one kernel (`SoftMax.cpp`, half_to_float)."""
    converts = input.dtype == torch.float16 and dtype == torch.float32
    return operator(input if converts or dtype is None else input.to(dtype), dim, converts)


class FusedRMSNorm(torch.autograd.Function):
    """`_fused_rms_norm` and its backward: kept are the input, the weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx, input, shape, weight):
        rows = input.shape[: input.dim() - len(shape)]
        ctx.save_for_backward(input, input.new_empty(rows, dtype=torch.float32), weight)
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient):
        input, _, weight = ctx.saved_tensors
        return torch.empty_like(input), None, torch.empty_like(weight) if ctx.needs_input_grad[2] else None


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    return FusedRMSNorm.apply(input, normalized_shape, weight)
