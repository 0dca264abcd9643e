"""Fake operators that allocate what real ones do, where torch's own rules for fake tensors do not: one table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten
CONTIGUOUS = torch.contiguous_format
_target = ["cpu"]  # target device of the simulation that runs, or ran last, in this process


def rules_of(target: str) -> dict[Any, Callable]:
    """The rules that fake tensors follow for `target`, which the simulation that runs now is for."""
    _target[0] = target
    return RULES | (CUDA if target == "cuda" else CPU)


def is_cuda() -> bool:
    """Whether the simulation that runs describes a GPU."""
    return _target[0] == "cuda"


def _statistics(input, shape, parameters) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse deviation that a norm keeps, in the input's dtype; fp32 if that is half precision and a parameter is
    not (`mixed_data_type.h`, param_scalar_type), or on CUDA (`layer_norm_kernel.cu`, `Normalization.cu`)."""
    fp32 = is_cuda() or any(p is not None and p.dtype == torch.float32 for p in parameters)
    dtype = torch.float32 if fp32 and input.itemsize == 2 else input.dtype
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


def _like(input: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


def _layer_norm(input, shape, weight, bias, eps):
    rows = (*input.shape[: input.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(input, memory_format=CONTIGUOUS), *_statistics(input, rows, (weight, bias))


def _layer_norm_backward(gradient, input, *others):
    """Contiguous whatever the strides of `input` and `gradient` are."""
    _, _, _, weight, bias, mask = others
    wanted = zip((input, weight, bias), mask, strict=True)
    return tuple(torch.empty_like(t, memory_format=CONTIGUOUS) if w and t is not None else None for t, w in wanted)


def _batch_norm(input, weight, bias, *others):
    *running, training, _, _ = others
    columns = (input.shape[1] if training else 0,)
    return _like(input), *_statistics(input, columns, (weight, bias, *running))


def _batch_norm_backward(gradient, input, weight, *others):
    dtype = input.dtype if weight is None else weight.dtype
    made = (_like(input), *(input.new_empty(input.shape[1], dtype=dtype) for _ in range(2)))
    return tuple(tensor if wanted else None for tensor, wanted in zip(made, others[-1], strict=True))


def _group_norm(input, weight, bias, rows, channels, size, groups, eps):
    """Of the input's dtype also where the parameters are fp32, as under CPU's autocast (`group_norm.cpp`)."""
    return _like(input), *_statistics(input, (rows, groups), (weight, bias))


def _group_norm_backward(gradient, input, mean, deviation, weight, *others):
    made = _like(input), *(None if weight is None else torch.empty_like(weight) for _ in range(2))
    return tuple(tensor if wanted else None for tensor, wanted in zip(made, others[-1], strict=True))


def _grouped_mm(a, b, offs=None, bias=None, out_dtype=None):
    """Of any dtype, where torch's own rule takes bf16. Groups run along the rows of a, or along both matrices' shared
    dimension (weight gradients; `GroupedMMUtils.h`)."""
    size = (offs.shape[0], a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[-1])
    return torch.empty(size, dtype=out_dtype or a.dtype, device=a.device)


def _flash_forward(query, *args, **kwargs):
    """What the package flash-attn returns as well: one fp32 number a row and the generator's state on the GPU."""
    *batch, length, heads, _ = query.shape  # no batch where sequences are joined
    rows = query.new_empty((*batch, heads, length), dtype=torch.float32)
    rng_state = query.new_empty(2, dtype=torch.uint64)
    return torch.empty_like(query), rows, rng_state, rng_state.new_empty(0), query.new_empty(0)


RULES = {
    aten._grouped_mm.default: _grouped_mm,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._native_batch_norm_legit.default: _batch_norm,  # of which torch may make it
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    # of an optimizer's parameters, for each of which torch would run a decomposition
    aten._foreach_sqrt.default: lambda tensors: [torch.empty_like(tensor) for tensor in tensors],
    aten._foreach_norm.Scalar: lambda tensors, ord=2, dtype=None: [t.new_empty((), dtype=dtype) for t in tensors],
    # gives the tensor itself; torch's own rule gives another one
    torch.ops._c10d_functional.wait_tensor.default: lambda tensor: tensor,
}
CPU = {
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
}
CUDA = {aten._flash_attention_forward.default: _flash_forward}
LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
PATCHES = (aten.im2col.default, aten.col2im.default)


def keep_storage(func: torch._ops.OpOverload, args: Sequence, kwargs: Mapping, result: Any) -> None:
    """Give the fake `result` of `func` the storage that a real one keeps, as `resize_` never gives memory back: elements'
    losses are written into it before it becomes one number (`Loss.cpp`, `Loss.cu`), and `unfold` and `fold` begin with a
    result of their input's size (`im2col_cpu`, `col2im_cpu`, `Im2Col.cu`, `Col2Im.cu`)."""
    if func in LOSSES:
        size = torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * result.element_size()
    elif func in PATCHES:
        size = args[0].numel() * result.element_size()
    else:
        return
    if size > result.untyped_storage().nbytes():
        result.untyped_storage().resize_(size)
