"""Fake tensors that libraries treat as real ones: what torch and transformers do otherwise when they see one."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .cuda import CudaKernels, cuda_kernels
from .gpu import Gpu

# What is put in place below is the process's, so one simulation runs at a time; `_seen` is the last one's target.
_lock, _seen = threading.RLock(), ["cpu"]


@contextlib.contextmanager
def fake_world(target: str, card: Gpu | None = None) -> Iterator[tuple[FakeTensorMode, CudaKernels | None]]:
    """A FakeTensorMode with the kernels of `target` in place, in which models take the branches of real tensors.

    transformers takes a fake tensor for a sign of tracing and then builds causal masks that it skips otherwise
    (`masking_utils._ignore_causal_mask_sdpa`), which changes the attention kernel too.
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
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        kernels = None
        if target == "cuda":
            kernels = stack.enter_context(cuda_kernels(card.compute_capability if card else (8, 0)))
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
    try:
        from bitsandbytes.nn import modules
    except ImportError:
        yield
        return

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
    rules = {torch.ops.aten._grouped_mm.default: _grouped_mm, torch.ops.aten.native_layer_norm.default: _layer_norm}
    if hasattr(torch.ops._c10d_functional, "wait_tensor"):
        rules[torch.ops._c10d_functional.wait_tensor.default] = _wait
    if _seen[0] != target:  # results are cached by operator and shapes
        FakeTensorMode.cache_clear()
        _seen[0] = target
    registered = fake_impls.op_implementations_dict
    before = {operator: registered[operator] for operator in rules if operator in registered}
    registered.update(rules)
    try:
        yield
    finally:
        for operator in rules:
            del registered[operator]
        registered.update(before)


def _wait(mode: FakeTensorMode, func, tensor: FakeTensor) -> FakeTensor:
    """Waiting for a collective gives the tensor itself; torch's own rule gives another one."""
    return tensor


def _layer_norm(mode: FakeTensorMode, func, input, shape, weight, bias, eps) -> tuple[FakeTensor, ...]:
    """The mean and reciprocal deviation of each row are fp32 for half precision too: on CUDA always
    (`layer_norm_kernel.cu`), on a CPU where the weights are fp32 (`param_scalar_type` in `mixed_data_type.h`).
    """
    rows = (*input.shape[: input.dim() - len(shape)], *(1 for _ in shape))
    mixed = weight is not None and weight.dtype == torch.float32
    half = input.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half and (mixed or described() == "cuda") else input.dtype
    with mode:
        out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        return out, *(torch.empty(rows, dtype=dtype, device=input.device) for _ in range(2))


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
