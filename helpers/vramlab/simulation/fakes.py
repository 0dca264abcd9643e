"""Fake tensors that libraries treat as real ones: what torch and transformers do otherwise when they see one."""

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..hardware.gpu import Gpu
from . import flash_attn, recurrent
from .cuda import CudaKernels, cuda_kernels

# What is put in place below is the process's, so one simulation runs at a time; `_seen` is the last one's target.
_lock, _seen = threading.RLock(), ["cpu"]


@contextlib.contextmanager
def fake_world(target: str, card: Gpu | None = None) -> Iterator[tuple[FakeTensorMode, CudaKernels | None]]:
    """A FakeTensorMode with the kernels of `target` in place, in which models take the branches of real tensors.

    transformers takes a fake tensor for a sign of tracing and then builds causal masks that it skips otherwise
    (`masking_utils._ignore_causal_mask_sdpa`), which changes the attention kernel too. bitsandbytes takes seconds to
    load, so its functions are replaced only if it is loaded: import it before, if the model is going to need it.
    """
    from transformers.utils import generic, import_utils

    with _lock, contextlib.ExitStack() as stack:
        for module in (generic, import_utils):
            if hasattr(module, "is_fake_tensor"):
                stack.callback(setattr, module, "is_fake_tensor", module.is_fake_tensor)
                module.is_fake_tensor = lambda tensor: False
        stack.enter_context(fake_kernels(target))
        stack.enter_context(_nothing_to_compare())
        stack.enter_context(_plain_codes())
        log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints a traceback of what a sentence says later
        stack.enter_context(patch.object(log, "disabled", True))
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        kernels = None
        if target == "cuda":
            capability = card.compute_capability if card else (8, 0)
            kernels = stack.enter_context(cuda_kernels(capability))
            stack.enter_context(flash_attn.flash_attention(capability))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        yield mode, kernels


@contextlib.contextmanager
def _nothing_to_compare() -> Iterator[None]:
    """While entered, `DistributedDataParallel` does not send the parameters' shapes and values around when it is made.

    Both would read values that fake tensors have not, and leave no storage behind.
    """
    from torch.nn.parallel import distributed

    names = ("_verify_param_shape_across_processes", "_sync_module_states")
    before = {name: getattr(distributed, name) for name in names}
    for name in names:
        setattr(distributed, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(distributed, name, function)


@contextlib.contextmanager
def _plain_codes() -> Iterator[None]:
    """While entered, 4-bit weights that FSDP has gathered stay plain parameters, which fake ones are (`models.py`).

    bitsandbytes makes them its own class again, of the same storage, and gives them their statistics.
    """
    if not sys.modules.get("bitsandbytes"):
        yield
        return
    from bitsandbytes.nn import modules

    def give_back(module: torch.nn.Module) -> None:
        if getattr(module.weight, "quant_state", None) is None:
            module.weight.quant_state = module.quant_state

    with patch.object(modules, "fix_4bit_weight_quant_state_from_module", give_back):
        yield


def described() -> str:
    """Whose kernels and memory the fake tensors of the simulation that runs stand for, "cuda" or "cpu"."""
    return _seen[0]


@contextlib.contextmanager
def fake_kernels(target: str) -> Iterator[None]:
    """While entered, fake operators whose own rules do not describe `target` have others."""
    rules = {torch.ops.aten._grouped_mm.default: _grouped_mm}
    if hasattr(torch.ops._c10d_functional, "wait_tensor"):
        rules[torch.ops._c10d_functional.wait_tensor.default] = _wait
    rules |= _norms(target == "cuda")
    if target == "cuda":
        rules |= {torch.ops.aten._embedding_bag.default: _embedding_bag, **recurrent.FAKE_CUDA, **flash_attn.FAKE}
    else:
        rules |= recurrent.FAKE_CPU
    if _seen[0] != target:  # results are cached by operator and shapes
        FakeTensorMode.cache_clear()
        _seen[0] = target
    with patch.dict(fake_impls.op_implementations_dict, rules), patch.dict(decomposition_table):
        for operator in rules:
            decomposition_table.pop(operator, None)  # which would be preferred
        yield


def _wait(mode: FakeTensorMode, func, tensor: FakeTensor) -> FakeTensor:
    """Waiting for a collective gives the tensor itself; torch's own rule gives another one."""
    return tensor


def _norms(cuda: bool) -> dict[torch._ops.OpOverload, Callable[..., tuple]]:
    """Rules for norms, by the dtype of the statistics that they keep.

    Layer and batch norm on CUDA keep them in fp32 for half precision too (`layer_norm_kernel.cu`, `Normalization.cu`,
    acc_type). Otherwise they have the input's dtype, and fp32 if the input is half precision and a parameter is not
    (`mixed_data_type.h`, param_scalar_type; group norm on both devices).
    """

    def kept_in(input, parameters, fused):
        mixed = any(p is not None and p.dtype == torch.float32 for p in parameters)
        return torch.float32 if input.itemsize == 2 and (fused or mixed) else input.dtype

    def layer_norm(mode, func, input, shape, weight, bias, eps):
        rows = (*input.shape[: input.dim() - len(shape)], *(1 for _ in shape))
        dtype = kept_in(input, (weight, bias), cuda)
        with mode:
            return torch.empty_like(input, memory_format=torch.contiguous_format), *_pair(input, rows, dtype)

    def layer_norm_backward(mode, func, gradient, input, shape, mean, rstd, weight, bias, mask):
        with mode:  # contiguous whatever the strides of `input` and `gradient` are
            return tuple(
                torch.empty_like(tensor, memory_format=torch.contiguous_format)
                if wanted and tensor is not None
                else None
                for tensor, wanted in zip((input, weight, bias), mask, strict=True)
            )

    def batch_norm(mode, func, input, weight, bias, mean, var, training, momentum, eps):
        dtype = kept_in(input, (weight, bias, mean, var), cuda)
        with mode:
            return _like(input), *_pair(input, (input.shape[1] if training else 0,), dtype)

    def group_norm(mode, func, input, weight, bias, n, c, size, groups, eps):
        with mode:
            return _like(input), *_pair(input, (n, groups), kept_in(input, (weight, bias), False))

    def group_norm_backward(mode, func, gradient, input, mean, rstd, weight, n, c, size, groups, mask):
        with mode:
            of_weight = (input.new_empty(c, dtype=mean.dtype if weight is None else weight.dtype) for _ in range(2))
            made = (_like(input), *of_weight)
            return tuple(tensor if wanted else None for tensor, wanted in zip(made, mask, strict=True))

    aten = torch.ops.aten
    return {
        aten.native_layer_norm.default: layer_norm,
        aten.native_layer_norm_backward.default: layer_norm_backward,
        aten.native_batch_norm.default: batch_norm,
        aten._native_batch_norm_legit.default: batch_norm,  # of which torch may make it
        aten._native_batch_norm_legit.no_stats: lambda mode, func, input, weight, bias, *others: batch_norm(
            mode, func, input, weight, bias, None, None, *others
        ),
        aten.native_group_norm.default: group_norm,
        aten.native_group_norm_backward.default: group_norm_backward,
    }


def _like(input: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(input, memory_format=suggest_memory_format(input))


def _pair(input: torch.Tensor, shape: tuple, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


def _embedding_bag(
    mode: FakeTensorMode,
    func,
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    kind=0,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
) -> tuple[FakeTensor, ...]:
    """CUDA keeps the bag of every index and, for maxima, where they were (`EmbeddingBag.cu`, _embedding_bag_cuda)."""
    bags, width = offsets.shape[0] - include_last_offset, weight.shape[1]
    with mode:
        bag_sizes, found = indices.new_empty(offsets.shape), indices.new_empty((bags, width) if kind == 2 else 0)
        return weight.new_empty(bags, width), indices.new_empty(indices.shape), bag_sizes, found


def _grouped_mm(mode: FakeTensorMode, func, a, b, offs=None, bias=None, out_dtype=None) -> FakeTensor:
    """torch's own rule (mixture of experts) refuses all but bf16; its real kernels take any dtype.

    Shapes as in aten/src/ATen/native/GroupedMMUtils.h: groups run along the rows of a, along both matrices' shared
    dimension (weight gradients), along the columns of b, or there is a plain batch.
    """
    rows = a.dim() == 2
    if rows and b.dim() == 2:
        size = (offs.shape[0], a.shape[0], b.shape[1])
    elif rows:
        size = (a.shape[0], b.shape[-1])
    else:
        size = (a.shape[1], b.shape[1]) if b.dim() == 2 else (a.shape[0], a.shape[1], b.shape[-1])
    with mode:
        return torch.empty(size, dtype=out_dtype or a.dtype, device=a.device)
