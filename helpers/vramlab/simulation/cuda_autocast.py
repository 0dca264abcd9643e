"""CUDA's autocast rules in the place of CPU's.

These are the lists of `ATen/autocast_mode.h` where they differ (`data/cuda_autocast.json`).
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.library import Library

from ..base.data import data_path
from ..private import of_fake_tensors
from ..private.of_torch import tree_leaves, tree_map
from ..private.patched import plain, replaced
from . import own_kernels
from .own_kernels import operator_of

AUTOCAST = of_fake_tensors.DispatchKeySet(of_fake_tensors.DispatchKey.AutocastCPU)
LISTS = json.loads(data_path("cuda_autocast.json").read_text())
FP32 = frozenset(LISTS["fp32"])
FP32_BY_DTYPE = frozenset(LISTS["fp32_by_dtype"])
LOWER = frozenset(LISTS["lower"])
PROMOTE = frozenset(LISTS["promote"])
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: fp32 by the overload that takes a dtype
WITH_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}


def install() -> Library:
    """Register the rules for the threads of `followed`; they go with what is returned."""
    library = own_kernels.library(own_kernels.RULES)
    for name, rule in _rules().items():
        own_kernels.register_cast(library, name, rule)
    return library


def _rules() -> dict[str, Callable | None]:
    """Return the rule of each operator; None for one that CUDA's autocast leaves alone."""
    rules: dict[str, Callable | None] = {}
    for name in FP32:
        if on_cuda(name):  # torch 2.11 has no rms_norm
            rules[name] = _cast(operator_of(name), torch.float32)
    for name in LOWER:
        rules[name] = _cast(operator_of(name), None)
    for name in PROMOTE:
        rules[name] = _cast(operator_of(name), torch.float32, only_mixed=True)
    for name in (*FP32_BY_DTYPE, *WITH_DTYPE):
        rules[name] = _ask_for_fp32(name, WITH_DTYPE.get(name, name))
    for name in cpu_only():
        rules[name] = None
    return rules


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """While entered, this thread's autocast on CPUs follows CUDA's rules.

    No operator meets the rules while autocast is off.
    """
    key = own_kernels.key_of(own_kernels.RULES)
    switch = plain(torch, "set_autocast_enabled")
    include = of_fake_tensors.switch_key

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


def left() -> contextlib.AbstractContextManager:
    """While entered, this thread's autocast follows none of the rules."""
    key = own_kernels.key_of(own_kernels.RULES)
    return of_fake_tensors.without_keys(of_fake_tensors.DispatchKeySet(key))


@cache
def cpu_only() -> tuple[str, ...]:
    """Return the operators that autocast casts on CPU and leaves alone on CUDA."""
    names = []
    for qualified in of_fake_tensors.operator_names():
        name = qualified.removeprefix("aten::")
        is_of_aten = qualified.startswith("aten::")
        if is_of_aten and on_cuda(name, "AutocastCPU") and not on_cuda(name):
            names.append(name)
    return tuple(names)


def on_cuda(name: str, key: str = "AutocastCUDA") -> bool:
    """Tell whether the installed torch has a rule for this operator under CUDA's autocast.

    A CPU build of torch has these rules too.
    """
    return of_fake_tensors.has_kernel(f"aten::{name}", key)


def _eligible(value: Any) -> bool:
    """Tell whether autocast casts `value`."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() and value.dtype != torch.float64


def _cast(operator: Callable, dtype: torch.dtype | None, only_mixed: bool = False) -> Callable:
    """Return `operator` on arguments cast to `dtype`; None is autocast's own.

    With `only_mixed` they are cast if one of them has that dtype already.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype or torch.get_autocast_dtype("cpu")

        def cast(value: Any) -> Any:
            return value.to(wanted) if _eligible(value) else value

        if not only_mixed or _has_dtype((args, kwargs), wanted):
            args, kwargs = tree_map(cast, (args, kwargs))
        # As `ExcludeDispatchKeyGuard` in the C++ rules: what the operator calls inside is not cast
        # again.
        with of_fake_tensors.without_keys(AUTOCAST):
            return operator(*args, **kwargs)

    return kernel


def _has_dtype(arguments: tuple, dtype: torch.dtype) -> bool:
    """Tell whether one of the tensors that autocast casts has `dtype`."""
    return any(_eligible(leaf) and leaf.dtype == dtype for leaf in tree_leaves(arguments))


def _ask_for_fp32(name: str, overload: str) -> Callable:
    """Return operator `name`, run by the `overload` that takes a dtype.

    It is asked for fp32 unless the caller asks for another.
    """
    # Passed by name, since the overload with a dtype may take its arguments in other places.
    operator = operator_of(overload)
    _, *arguments = of_fake_tensors.schema_of(operator_of(name)).arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        named = {"dtype": tensor.dtype, **defaults}
        named.update(zip(defaults, args, strict=False))
        named.update(kwargs)
        if _eligible(tensor):
            named["dtype"] = named.get("dtype") or torch.float32
        with of_fake_tensors.without_keys(AUTOCAST):
            return operator(tensor, **named)

    return kernel
