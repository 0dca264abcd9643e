"""CUDA's autocast rules in the place of CPU's: the lists of `ATen/autocast_mode.h` where they differ
(`data/cuda_autocast.json`)."""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.library import Library
from torch.utils._pytree import tree_leaves, tree_map

from ..report.data import data_path
from ..training.patched import plain, replaced
from . import own_kernels
from .own_kernels import operator_of

AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
LISTS = json.loads(data_path("cuda_autocast.json").read_text())
FP32, FP32_BY_DTYPE, LOWER, PROMOTE = (frozenset(LISTS[key]) for key in ("fp32", "fp32_by_dtype", "lower", "promote"))
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: fp32 by the overload that takes a dtype
WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}


def install() -> Library:
    """Register the rules for the threads of `followed`; they go with what is returned."""
    rules = {name: _cast(operator_of(name), torch.float32) for name in filter(on_cuda, FP32)}  # torch 2.11: no rms_norm
    rules |= {name: _cast(operator_of(name), None) for name in LOWER}
    rules |= {name: _cast(operator_of(name), torch.float32, only_mixed=True) for name in PROMOTE}
    rules |= {name: _ask_for_fp32(name, WITH_DTYPE.get(name, name)) for name in (*FP32_BY_DTYPE, *WITH_DTYPE)}
    library = own_kernels.library(own_kernels.RULES)
    for name, rule in (rules | dict.fromkeys(cpu_only())).items():
        own_kernels.register_cast(library, name, rule)
    return library


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """While entered, this thread's autocast on CPUs follows CUDA's rules; without autocast nothing meets them."""
    key = own_kernels.key_of(own_kernels.RULES)
    switch, include = plain(torch, "set_autocast_enabled"), torch._C._dispatch_tls_set_dispatch_key_included

    def set_autocast_enabled(device: str, enabled: bool) -> None:
        switch(device, enabled)
        if device == "cpu":
            include(key, enabled)

    with replaced(torch, "set_autocast_enabled", set_autocast_enabled):
        include(key, torch.is_autocast_enabled("cpu"))
        try:
            yield
        finally:
            include(key, False)


@cache
def cpu_only() -> tuple[str, ...]:
    """Operators that autocast casts on CPU and leaves alone on CUDA."""
    names = (n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    return tuple(name for name in names if on_cuda(name, "AutocastCPU") and not on_cuda(name))


def on_cuda(name: str, key: str = "AutocastCUDA") -> bool:
    """Whether the installed torch has a rule for this operator under CUDA's autocast; its CPU builds know too."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(operator: Callable, dtype: torch.dtype | None, only_mixed: bool = False) -> Callable:
    """`operator` on arguments cast to `dtype`, None is autocast's own; `only_mixed`: if one of them has it already."""

    def kernel(*args, **kwargs):
        wanted = dtype or torch.get_autocast_dtype("cpu")
        if not only_mixed or any(_eligible(t) and t.dtype == wanted for t in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(lambda t: t.to(wanted) if _eligible(t) else t, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return operator(*args, **kwargs)

    return kernel


def _ask_for_fp32(name: str, overload: str) -> Callable:
    """Operator `name`, run by the `overload` that takes a dtype: fp32 unless the caller asks for another."""
    operator = operator_of(overload)
    defaults = {a.name: a.default_value for a in operator_of(name)._schema.arguments[1:]}

    def kernel(tensor, *args, **kwargs):
        named = defaults | dict(zip(defaults, args, strict=False)) | kwargs
        if _eligible(tensor):
            named["dtype"] = named.get("dtype") or torch.float32
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return operator(tensor, **({"dtype": tensor.dtype} | named))

    return kernel
