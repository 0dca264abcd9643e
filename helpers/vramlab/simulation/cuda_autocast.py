"""CUDA's autocast rules put in the place of CPU's: the operators of `ATen/autocast_mode.h`, by that file's lists.

Those that CPU treats alike need nothing; those that CPU casts and CUDA does not are left alone. The dispatcher finds
the rules however an operator is called: as a function, a method, `x ** 3`, or from within another operator.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# AT_FORALL_FP32: half-precision arguments are cast up
FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""")
# AT_FORALL_FP32_SET_OPT_DTYPE: the result is asked for in fp32 unless the caller asked for a dtype
FP32_BY_DTYPE = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: the overload that takes a dtype is called instead
WITH_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
# Of AT_FORALL_LOWER_PRECISION_FP, what CPU's list lacks and models call
LOWER = _names("""
    addmv addr mv chain_matmul einsum linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _thnn_fused_lstm_cell _thnn_fused_gru_cell
""")
# AT_FORALL_PROMOTE: mixed arguments are cast to the widest dtype among them
PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")


def install(library: Library) -> None:
    """Register the rules in `library`; they go with it."""
    for name in filter(on_cuda, FP32):  # torch 2.11 does not cast rms_norm
        library.impl(name, _cast(_operator(name), torch.float32), "AutocastCPU")
    for name in FP32_BY_DTYPE:
        library.impl(name, _ask_for_fp32(_operator(name)), "AutocastCPU")
    for name, overload in WITH_DTYPE.items():
        library.impl(name, _append_fp32(getattr(torch.ops.aten.norm, overload)), "AutocastCPU")
    for name in LOWER:
        library.impl(name, _cast(_operator(name), None), "AutocastCPU")
    for name in PROMOTE:
        library.impl(name, _promote(_operator(name)), "AutocastCPU")
    for name in cpu_only():
        library.impl(name, fallthrough_kernel, "AutocastCPU")


@cache
def cpu_only() -> tuple[str, ...]:
    """Operators that autocast casts on CPU and leaves alone on CUDA."""
    names = torch._C._dispatch_get_all_op_names()
    ours = (name.removeprefix("aten::") for name in names if name.startswith("aten::"))
    return tuple(name for name in ours if _has_rule(name, "AutocastCPU") and not on_cuda(name))


def on_cuda(name: str) -> bool:
    """Whether the installed torch has a rule for this operator under CUDA's autocast; its CPU builds know too."""
    return _has_rule(name, "AutocastCUDA")


def _has_rule(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _operator(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list | tuple) else (value,)


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple) and any(map(_eligible, value)):
        return [_to(item, dtype) for item in value]
    return value.to(dtype) if _eligible(value) else value


def _cast(operator: Callable, dtype: torch.dtype | None) -> Callable:
    """`operator` on arguments cast to `dtype`; None is autocast's own."""

    def kernel(*args, **kwargs):
        wanted = dtype or torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return operator(*(_to(a, wanted) for a in args), **{k: _to(v, wanted) for k, v in kwargs.items()})

    return kernel


def _promote(operator: Callable) -> Callable:
    def kernel(*args, **kwargs):
        tensors = [t for a in (*args, *kwargs.values()) for t in _each(a) if _eligible(t)]
        if not any(t.dtype == torch.float32 for t in tensors):
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
                return operator(*args, **kwargs)
        return _cast(operator, torch.float32)(*args, **kwargs)

    return kernel


def _ask_for_fp32(operator: torch._ops.OpOverload) -> Callable:
    arguments = {a.name: (i, a.kwarg_only) for i, a in enumerate(operator._schema.arguments)}
    place, by_keyword = arguments["dtype"]

    def kernel(*args, **kwargs):
        if _eligible(args[0]):
            if by_keyword or "dtype" in kwargs or len(args) <= place:
                kwargs["dtype"] = kwargs.get("dtype") or torch.float32
            else:
                args = (*args[:place], args[place] or torch.float32, *args[place + 1 :])
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return operator(*args, **kwargs)

    return kernel


def _append_fp32(operator: torch._ops.OpOverload) -> Callable:
    def kernel(tensor, p=2, dim=None, keepdim=False):
        where = () if dim is None else (dim, keepdim)
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return operator(tensor, p, *where, dtype=torch.float32 if _eligible(tensor) else tensor.dtype)

    return kernel
