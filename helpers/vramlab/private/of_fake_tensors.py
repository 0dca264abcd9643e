"""Private parts of torch that only a simulation needs: fake tensors, the dispatcher, modes."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from .of_torch import OpOverload

__all__ = [
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "custom_function_call",
    "suggest_memory_format",
]

# Raised for operators whose result depends on content that a fake tensor lacks.
UNFAKED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
backward_hooks: Callable[[torch.Tensor], Mapping[int, Any] | None] = attrgetter("_backward_hooks")
run_backward: Callable = torch.autograd.graph._engine_run_backward
schema_of: Callable[[OpOverload], Any] = attrgetter("_schema")

# Modes.
meta_kernels: Callable[[Any], Any] = fake_tensor.in_kernel_invocation_manager
pop_function_mode: Callable[[], Any] = torch.overrides._pop_mode
push_function_mode: Callable[[Any], None] = torch.overrides._push_mode
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
without_functions = torch._C.DisableTorchFunction
is_of_functorch: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

# The dispatcher's keys (`c10/core/DispatchKey.h`).
DispatchKey: Any = torch._C.DispatchKey
DispatchKeySet: Any = torch._C.DispatchKeySet
dispatch_key: Callable[[str], Any] = torch._C._dispatch_key_parse
keys_below: Callable[[Any], Any] = torch._C._dispatch_keyset_full_after
with_key: Callable = torch._C._IncludeDispatchKeyGuard
without_keys: Callable = torch._C._ExcludeDispatchKeyGuard
switch_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names


def run_fake(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return what the entered fake mode makes of an operator, without the dispatcher's way there.

    Where the mode is switched off, as in FSDP's hooks, the operator is called.
    """
    key = torch._C._TorchDispatchModeKey.FAKE
    # an operator of higher order has no other way
    mode = torch._C._unset_dispatch_mode(key) if isinstance(func, OpOverload) else None
    if mode is None:
        return func(*args, **kwargs)
    try:
        return mode.__torch_dispatch__(func, (FakeTensor,), args, kwargs)
    finally:
        torch._C._set_dispatch_mode(mode)


def new_cache_entry(mode: Any, *call: Any) -> Any:
    """Return what torch's cache would keep of a fake result; None where it would keep nothing.

    `call` is the operator, its arguments and keyword arguments, and the result.
    """
    try:
        return mode._make_cache_entry(fake_tensor._CacheKeyState(), None, *call)
    except fake_tensor._BypassDispatchCache:
        return None


def new_fake(meta: torch.Tensor, requires_grad: bool, attributes: Mapping) -> torch.Tensor:
    """Return a fake tensor with these of `FakeTensor`'s attributes over a meta tensor."""
    make: Any = torch.Tensor._make_subclass
    fake = make(
        FakeTensor,
        meta,
        requires_grad,
        dispatch_device=True,
        device_for_backend_keys=attributes["_fake_device"],
    )
    vars(fake).update(attributes)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    return fake
