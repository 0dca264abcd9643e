"""Fake operators that allocate what real ones do, where torch's own rules do not: one table."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..private import of_distributed
from ..private.of_fake_tensors import suggest_memory_format
from ..private.of_torch import OpOverload, unset_fake_temporarily

aten = torch.ops.aten
CONTIGUOUS = torch.contiguous_format
Pair = tuple[torch.Tensor, torch.Tensor]
BY_NUMBER = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def rules_of(target: str) -> dict[Any, Callable]:
    """Return the rules that fake tensors follow for `target`, by operator."""
    if "bitsandbytes" not in sys.modules:  # which defines its operators as it is imported
        return _rules_of(target)
    operators = torch.ops.bitsandbytes
    quantize = operators.int8_vectorwise_quant.default
    multiply = operators.int8_mixed_scaled_mm.default
    return _rules_of(target) | {quantize: _int8_quant, multiply: _int8_product}


@cache
def _rules_of(target: str) -> dict[Any, Callable]:
    norms = _Norms(is_cuda=target == "cuda")
    rules: dict[Any, Callable] = {
        **of_distributed.collectives_on_meta(),
        aten.native_layer_norm.default: norms.layer_norm,
        aten.native_batch_norm.default: norms.batch_norm,
        # of which torch may make it
        aten._native_batch_norm_legit.default: norms.batch_norm,
        aten._native_batch_norm_legit.no_stats: norms.batch_norm,
    }
    if target == "cuda":
        return RULES | CUDA | rules
    rules[aten.native_group_norm.default] = norms.group_norm
    return RULES | CPU | rules


class _Norms:
    """Norms as CUDA's kernels or CPU's keep their statistics."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda

    def _statistics(self, input: torch.Tensor, shape: Sequence[int], parameters: Sequence) -> Pair:
        """Return mean and inverse deviation that a norm keeps, in the input's dtype.

        They are in fp32 if that is half precision and a parameter is not (`mixed_data_type.h`,
        param_scalar_type), or on CUDA (`layer_norm_kernel.cu`, `Normalization.cu`).
        """
        dtype = input.dtype
        if input.itemsize == 2 and (self.is_cuda or any(map(_is_fp32, parameters))):
            dtype = torch.float32
        return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)

    def layer_norm(
        self,
        input: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        """Return the normed input and its statistics, one a row."""
        outer = input.shape[: input.dim() - len(shape)]
        rows = (*outer, *(1 for _ in shape))
        result = torch.empty_like(input, memory_format=CONTIGUOUS)
        return result, *self._statistics(input, rows, (weight, bias))

    def batch_norm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *others: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return the normed input and its statistics, one a channel."""
        *running, training, _, _ = others
        # in evaluation nothing is kept for a backward pass
        columns = (input.shape[1] if training else 0,)
        parameters = (weight, bias, *running)
        return _like(input), *self._statistics(input, columns, parameters)

    def group_norm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        rows: int,
        channels: int,
        size: int,
        groups: int,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        """Return the normed input and its statistics, one a group.

        The result has the input's dtype also where the parameters are fp32, as under CPU's autocast
        (`group_norm.cpp`).
        """
        return _like(input), *self._statistics(input, (rows, groups), (weight, bias))


def _is_fp32(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.dtype == torch.float32


def _like(input: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


def _wanted(made: Sequence[torch.Tensor | None], mask: Sequence[bool]) -> tuple:
    """Return the gradients that are asked for, None for the others."""
    pairs = zip(made, mask, strict=True)
    return tuple(tensor if is_wanted else None for tensor, is_wanted in pairs)


def _layer_norm_backward(gradient: torch.Tensor, input: torch.Tensor, *others: Any) -> tuple:
    """Return gradients that are contiguous whatever the strides of their tensors are."""
    *_, weight, bias, mask = others
    gradients: list[torch.Tensor | None] = []
    for tensor, is_wanted in zip((input, weight, bias), mask, strict=True):
        if is_wanted and tensor is not None:
            gradients.append(torch.empty_like(tensor, memory_format=CONTIGUOUS))
        else:
            gradients.append(None)
    return tuple(gradients)


def _batch_norm_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    *others: Any,
) -> tuple:
    mask = others[-1]
    dtype = input.dtype if weight is None else weight.dtype
    channels = input.shape[1]
    made = (
        _like(input),
        input.new_empty(channels, dtype=dtype),
        input.new_empty(channels, dtype=dtype),
    )
    return _wanted(made, mask)


def _group_norm_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor | None,
    *others: Any,
) -> tuple:
    mask = others[-1]
    if weight is None:
        return _wanted((_like(input), None, None), mask)
    made = (_like(input), torch.empty_like(weight), torch.empty_like(weight))
    return _wanted(made, mask)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: Any = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a product of any dtype, where torch's own rule takes bf16.

    Groups run along the rows of a, or along both matrices' shared dimension (weight gradients;
    `GroupedMMUtils.h`).
    """
    size: tuple[int, ...] = (a.shape[0], b.shape[-1])
    # Groups along the dimension that both share: each has a product of its own.
    if b.dim() == 2:
        size = (offs.shape[0], a.shape[0], b.shape[1])
    return torch.empty(size, dtype=out_dtype or a.dtype, device=a.device)


def _flash_forward(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return what the package flash-attn returns as well.

    That is one fp32 number a row and the generator's state on the GPU.
    """
    # no batch where sequences are joined
    *batch, length, heads, _ = query.shape
    rows = query.new_empty((*batch, heads, length), dtype=torch.float32)
    # Seed and offset, from which backward drops the same elements again.
    rng_state = query.new_empty(2, dtype=torch.uint64)
    offset = rng_state.new_empty(0)
    no_mask = query.new_empty(0)
    return torch.empty_like(query), rows, rng_state, offset, no_mask


def _foreach_sqrt(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _foreach_norm(
    tensors: Sequence[torch.Tensor],
    ord: float = 2,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    return [tensor.new_empty((), dtype=dtype) for tensor in tensors]


def _int8_quant(tensor: torch.Tensor, threshold: float = 0.0) -> tuple:
    """Return int8 codes, a scale for each row, and the columns with outliers: none.

    Which columns have some depends on values, of which `lora_modules.OUTLIERS` says the most.
    """
    codes = torch.empty_like(tensor, dtype=torch.int8)
    rows = tensor.numel() // tensor.shape[-1]
    scales = tensor.new_empty(rows, dtype=torch.float32)
    return codes, scales, tensor.new_empty(0, dtype=torch.int64) if threshold else None


def _int8_product(
    tensor: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, *others: Any
) -> tuple:
    """Return a product of codes in the input's format, and the columns with outliers: none."""
    shape = (*codes.shape[:-1], weight.shape[0])
    return tensor.new_empty(shape), tensor.new_empty(0)


def _view(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a view with the strides that torch's own code gives it (`computeStride`).

    Its fake one gives another to a dimension of size 1 where `tensor` is not contiguous, and from
    that a norm or convolution tells the memory format.
    """
    with unset_fake_temporarily():
        alike = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(shape)
    return tensor.as_strided(alike.shape, alike.stride(), tensor.storage_offset())


def _by_number(func: OpOverload) -> Callable:
    """Return the rule of an operator of two, which may be a tensor and a number.

    The result's strides are those beside another tensor (`TensorIterator`); torch's fake operators
    give another to a dimension of size 1.
    """

    def by_number(tensor: torch.Tensor, other: Any, **options: Any) -> torch.Tensor:
        is_alike = isinstance(other, torch.Tensor) or not tensor.is_floating_point()
        if is_alike or 1 not in tensor.shape or tensor.is_contiguous():
            return NotImplemented
        return func(tensor, tensor.new_empty((1,) * tensor.dim()), **options)

    return by_number


def _wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself; torch's own rule gives another one."""
    return tensor


RULES: dict[Any, Callable] = {
    aten.view.default: _view,
    **{func: _by_number(func) for func in BY_NUMBER},
    aten._grouped_mm.default: _grouped_mm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    # of an optimizer's parameters, for each of which torch would run a decomposition
    aten._foreach_sqrt.default: _foreach_sqrt,
    aten._foreach_norm.Scalar: _foreach_norm,
    torch.ops._c10d_functional.wait_tensor.default: _wait_tensor,
}
CPU: dict[Any, Callable] = {aten.native_group_norm_backward.default: _group_norm_backward}
CUDA: dict[Any, Callable] = {aten._flash_attention_forward.default: _flash_forward}
LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
SHORTENED = (aten.im2col.default, aten.col2im.default, aten.unique_consecutive.default)


def keep_storage(
    func: OpOverload,
    args: Sequence,
    kwargs: Mapping,
    result: Any,
) -> None:
    """Give the fake `result` of `func` the storage that a real one keeps.

    `resize_` never gives memory back: elements' losses are written into a loss before it becomes
    one number (`Loss.cpp`, `Loss.cu`), and `unfold` and `fold` begin with a result of their input's
    size (`im2col_cpu`, `col2im_cpu`, `Im2Col.cu`, `Col2Im.cu`), as `unique_consecutive` does
    (`Unique.cpp`, `Unique.cu`).
    """
    if func is aten.unique_consecutive.default:
        result, *_ = result
    if func in LOSSES:
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    elif func in SHORTENED:
        elements = args[0].numel()
    else:
        return
    size = elements * result.element_size()
    storage = result.untyped_storage()
    # With reduction="none" the result is as large already.
    if size > storage.nbytes():
        storage.resize_(size)
