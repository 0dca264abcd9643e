"""Kernels for CPU tensors that one thread has and the others have not.

A kernel of the key AutogradCPU or AutocastCPU would be everybody's, and could not be taken away
while another thread is in it. So they are registered once, under two dispatch keys that nothing
else in PyTorch uses (`c10/core/DispatchKey.h`), which come before those two. Only a thread that
includes such a key meets its kernels, and so do autograd's threads for it. Where an operator would
not have come to the key that is stood for, its kernel hands it on.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from ..private import of_fake_tensors, of_torch

KERNELS = "DeferredInit"  # comes before AutogradCPU
RULES = "TESTING_ONLY_GenericMode"  # comes before AutocastCPU
AUTOGRAD = of_fake_tensors.DispatchKey.AutogradCPU
AUTOCAST = of_fake_tensors.DispatchKey.AutocastCPU


def key_of(name: str) -> Any:
    """Return the dispatch key of that name; Python has no names for these."""
    return of_fake_tensors.dispatch_key(name)


def library(name: str) -> Library:
    """Return a library for kernels of the key of that name; all other operators pass it."""
    _let_pass(name)
    return Library("aten", "IMPL", name)


@cache
def _let_pass(name: str) -> Library:
    """Register that operators without a kernel pass the key, for the process's life.

    There can be one such rule for a key.
    """
    fallback = Library("_", "IMPL")
    fallback.fallback(fallthrough_kernel, name)
    return fallback


@contextlib.contextmanager
def in_this_thread(name: str) -> Iterator[None]:
    """While entered, this thread has the kernels of that key."""
    with of_fake_tensors.with_key(key_of(name)):
        yield


def left() -> contextlib.AbstractContextManager:
    """While entered, this thread meets none of the kernels: of a graph all are chosen."""
    kernels = of_fake_tensors.DispatchKeySet(key_of(KERNELS))
    rules = of_fake_tensors.DispatchKeySet(key_of(RULES))
    return of_fake_tensors.without_keys(kernels | rules)


def register(library: Library, name: str, kernel: Callable) -> None:
    """Register `kernel` of an operator of aten for what AutogradCPU's would get."""
    operator = operator_of(name)
    below = of_fake_tensors.keys_below(key_of(KERNELS))
    is_cast = of_fake_tensors.has_kernel(f"aten::{name}", "AutocastCPU")

    def at_key(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # autocast's kernel calls it once more
        comes_again = is_cast and keys.has(AUTOCAST)
        if not keys.has(AUTOGRAD) or comes_again:
            return operator.redispatch(keys & below, *args, **kwargs)
        return kernel(*args, **kwargs)

    library.impl(name, at_key, KERNELS, with_keyset=True)


def register_cast(library: Library, name: str, rule: Callable | None) -> None:
    """Register the `rule` for an operator of aten under autocast, in the place of AutocastCPU's.

    The rule None casts nothing.
    """
    operator = operator_of(name)
    below = of_fake_tensors.keys_below(key_of(RULES))
    is_off = of_fake_tensors.is_excluded
    without_cast = below - of_fake_tensors.DispatchKeySet(AUTOCAST)

    def at_key(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # `keys` lack those that the operator has no kernel for, as AutocastCPU often: the thread's
        # own say if it is on
        if rule is None or is_off(AUTOCAST) or not keys.has(of_fake_tensors.DispatchKey.CPU):
            rest = keys & (below if rule else without_cast)
            return operator.redispatch(rest, *args, **kwargs)
        return rule(*args, **kwargs)

    library.impl(name, at_key, RULES, with_keyset=True)


def operator_of(name: str) -> of_torch.OpOverload:
    """Return the operator of aten with that name, "name" or "name.overload"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
