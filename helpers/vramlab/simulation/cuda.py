"""Where CUDA differs from CPU: how `target="cuda"` is simulated on fake CPU tensors.

Fake tensors of device "cuda" need a CUDA build of PyTorch, so the step runs on fake CPU tensors,
and PyTorch's dispatcher finds here the kernels that differ, for this thread only
(`own_kernels.py`): attention, dropout, softmax, RMS norm and autocast's casts (`cuda_autocast.py`).
What kernels allocate while they run is in `cuda_scratch.py`, results of other sizes in
`fake_operators.py`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch.library import Library
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..hardware.kernels import sdp_backend
from ..hardware.overhead import efficient_takes_groups
from ..private import of_fake_tensors
from ..private.patched import plain, replaced
from . import cuda_autocast, own_kernels

# What makes a tensor of Python numbers: on the host, unless a device is named.
FACTORIES = {
    torch.tensor,
    torch.arange,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.empty,
    torch.linspace,
}
# What `CudaKernels` does not only call.
FOLLOWED = {
    *FACTORIES,
    of_fake_tensors.custom_function_call,
    torch.Tensor.backward,
    torch.Tensor.to,
    torch.split,
}
HALF = (torch.float16, torch.bfloat16)
AMPERE = (8, 0)  # compute capability of the card where none is named
FLASH_MULTIPLE = 8  # channels of a head that the flash kernel takes
MASK_MULTIPLE = 16  # keys of a row of a mask that the efficient kernel takes
aten = torch.ops.aten
# What of the card the kernels read: `cuda_kernels` replaces it for one thread.
_SIMULATED: dict[str, Any] = {"capability": AMPERE}


def attention_kernel(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    capability: tuple[int, int] = AMPERE,
    *,
    masked: bool = False,
    grouped: bool = False,
    **options: Any,
) -> str:
    """Return what `scaled_dot_product_attention` runs: "flash", "efficient" or "math".

    Source: `sdp_utils.cpp`, select_sdp_backend. cuDNN's kernel of Hopper and Blackwell saves what
    flash saves, and is counted as flash. `options`: dropout and broadcast of `sdp_backend`; before
    torch 2.14 only flash takes grouped queries (pull 191085).
    """
    if dtype not in (*HALF, torch.float32):
        return "math"
    return sdp_backend(
        dtype.itemsize,
        head_dim,
        bf16=dtype == torch.bfloat16,
        masked=masked,
        value_dim=value_dim,
        capability=capability,
        grouped=grouped and not efficient_takes_groups(),
        **options,
    )


class CudaKernels(TorchFunctionMode):
    """While entered, tensors that Python code makes on no device, or on "cpu" by name, are host's.

    A step that runs on CUDA has them in host memory.
    """

    def __init__(self) -> None:
        super().__init__()
        # called with tensors that are the host's
        self.on_host: Callable[[list[torch.Tensor]], None] = lambda tensors: None
        self.is_on_host: Callable[[list[torch.Tensor]], bool] = lambda tensors: False
        self.notes: list[str] = []  # what is done otherwise than CUDA would
        # called in the place of `torch.split` with it and its arguments (`windows.py`)
        self.split: Callable | None = None

    def note(self, text: str) -> None:
        """Keep a note for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # nearly all are others: each attribute of a tensor that is asked for is a call
        return self._follow(func, args, kwargs) if func in FOLLOWED else func(*args, **kwargs)

    def _follow(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is torch.Tensor.backward:
            return self.backward(args[0])
        if func is of_fake_tensors.custom_function_call:
            # a higher-order operator: it has no kernel for the rules' key
            with cuda_autocast.left():
                return func(*args, **kwargs)
        if func is torch.split and self.split:
            return self.split(func, *args, **kwargs)
        # What follows decides whether the result is on the host; its bytes are settled by now.
        result = func(*args, **kwargs)
        if func in FACTORIES:
            device = kwargs.get("device")
            # a torch.device is some tensor's
            if device is None or (isinstance(device, str) and device == "cpu"):
                self.on_host([result])
            elif func is torch.tensor and torch.device(device).index is not None:
                # it loses the index on the way
                return torch.empty(result.shape, dtype=result.dtype, device=device)
        elif func is torch.Tensor.to and result is args[0] and len(args) > 1:
            # a move to the device of another tensor: as of Adafactor's states, or a cache's counter
            if of_fake_tensors.is_of_functorch(result):
                return result  # of a mask that `vmap` makes on the device that it is for
            to = args[1]
            is_tensor = isinstance(to, torch.Tensor) and not self.is_on_host([to])
            if (is_tensor or isinstance(to, torch.device)) and self.is_on_host([result]):
                return result.clone()
        return result

    def backward(self, loss: torch.Tensor) -> None:
        """Run `loss.backward()` with this mode still entered, which torch's wrapper leaves.

        A checkpoint recomputes inside, and has to find the mode.
        """
        with self:
            start = torch.ones_like(loss, memory_format=torch.preserve_format)
            of_fake_tensors.run_backward(
                (loss,),
                (start,),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


@contextlib.contextmanager
def cuda_kernels(compute_capability: tuple[int, int] = AMPERE) -> Iterator[CudaKernels]:
    """While entered, CPU tensors of this thread get what CUDA tensors of such a GPU would get.

    Autograd's threads that work for this one get the same.
    """
    _install()
    enabled = plain(torch, "is_autocast_enabled")

    def is_autocast_enabled(device: str = "cpu") -> bool:
        # without a device it is asked for CUDA (PEFT's 4-bit layers, Liger)
        return enabled(device)

    mode = CudaKernels()
    with (
        replaced(_SIMULATED, "capability", compute_capability),
        replaced(torch, "is_autocast_enabled", is_autocast_enabled),
        cuda_autocast.followed(),
        own_kernels.in_this_thread(own_kernels.KERNELS),
        mode,
    ):
        yield mode


@cache
def _install() -> list[Library]:
    """Register the kernels for the life of the process.

    Only threads that `cuda_kernels` is entered in have them.
    """
    kernels: dict[str, Callable] = {
        "scaled_dot_product_attention": _attention,
        "dropout": _dropout,
        "softmax.int": partial(_softmax, aten._softmax),
        "log_softmax.int": partial(_softmax, aten._log_softmax),
        "rms_norm": _rms_norm,
    }
    library = own_kernels.library(own_kernels.KERNELS)
    for name, kernel in kernels.items():
        own_kernels.register(library, name, kernel)
    return [library, cuda_autocast.install()]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run the kernel of `scaled_dot_product_attention` that CUDA would choose."""
    joined = getattr(query, "windows", None)
    if joined is not None:
        return joined.attend(_fused, query, key, value, dropout, causal, scale)
    has_fewer_key_heads = query.shape[-3] != key.shape[-3]
    # flash aligns a causal mask to the other corner where lengths differ
    is_masked = mask is not None or (causal and query.shape[-2] != key.shape[-2])
    kernel = attention_kernel(
        query.dtype,
        query.shape[-1],
        value.shape[-1],
        plain(_SIMULATED, "capability"),
        masked=is_masked,
        grouped=has_fewer_key_heads and enable_gqa,
        broadcast=has_fewer_key_heads and not enable_gqa,
        dropout=dropout,
    )
    if mask is not None and mask.dtype == torch.bool:
        # As `convert_boolean_attn_mask`: every call makes a bias of its own.
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
    # Fused kernels take four dimensions (`sdp_utils.cpp`, check_tensor_shapes).
    if kernel == "math" or query.dim() != 4:
        math_attention = aten._scaled_dot_product_attention_math
        return math_attention(
            query,
            key,
            value,
            mask,
            dropout,
            causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
    if kernel == "flash":
        return _flash(query, key, value, dropout, causal, scale)
    if mask is not None:
        mask = _padded_mask(mask, query, key)
    return _efficient(query, key, value, mask, dropout, causal, scale)


def takes_windows(tensor: torch.Tensor) -> bool:
    """Tell whether a fused kernel runs on such queries, as they are, and takes any batch."""
    channels = tensor.shape[-1]
    half = tensor.dtype in HALF and channels % FLASH_MULTIPLE == 0
    cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != tensor.dtype
    if not half or cast:
        return False
    return _kernel_of(tensor) in ("flash", "efficient")


def _kernel_of(query: torch.Tensor) -> str:
    """Return the kernel that attends without a mask to keys and values like `query`."""
    channels = query.shape[-1]
    capability = plain(_SIMULATED, "capability")
    return attention_kernel(query.dtype, channels, channels, capability)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Run the fused kernel that attends without a mask."""
    if _kernel_of(query) == "flash":
        return _flash(query, key, value, dropout, causal, scale)
    return _efficient(query, key, value, None, dropout, causal, scale)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Run flash attention, which takes heads of whole multiples of channels."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # the padded copies die with the call's arguments, as they do in C++
    out = aten._scaled_dot_product_flash_attention(
        pad_last(query, FLASH_MULTIPLE),
        pad_last(key, FLASH_MULTIPLE),
        pad_last(value, FLASH_MULTIPLE),
        dropout,
        causal,
        False,
        scale=scale,
    )[0]
    return out[..., : value.shape[-1]]


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Run memory-efficient attention, which keeps a number a row where there is a backward pass."""
    is_trained = any(tensor.requires_grad for tensor in (query, key, value))
    with_rows = torch.is_grad_enabled() and is_trained
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, mask, with_rows, dropout, causal, scale=scale)[0]


def _padded_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return `mask`, padded in memory alone, for every head (attention.cpp, pad_bias)."""
    keys = mask.shape[-1]
    return pad_last(mask, MASK_MULTIPLE)[..., :keys].expand(*query.shape[:-1], key.shape[-2])


def pad_last(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return `tensor`, its last dimension padded with zeros (attention.cpp, pad_last_dim)."""
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Run one fused kernel that returns the result and a mask of booleans.

    Source: `Dropout.cpp`, is_fused_kernel_acceptable.
    """
    return torch.native_dropout(input, p, True)[0] if train and p else input


def _softmax(
    operator: Callable,
    input: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run it in one kernel of fp16 with an fp32 result (`SoftMax.cpp`, half_to_float)."""
    converts = input.dtype == torch.float16 and dtype == torch.float32
    if converts or dtype is None:
        return operator(input, dim, converts)
    return operator(input.to(dtype), dim, converts)


class FusedRMSNorm(torch.autograd.Function):
    """`_fused_rms_norm` and its backward: kept are the input, the weight and one fp32 a row."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the normed input."""
        rows = input.shape[: input.dim() - len(shape)]
        ctx.save_for_backward(input, input.new_empty(rows, dtype=torch.float32), weight)
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of input and weight."""
        input, _, weight = ctx.saved_tensors
        of_input = torch.empty_like(input)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return of_input, None, of_weight


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return FusedRMSNorm.apply(input, normalized_shape, weight)
