"""PEFT's methods among fake tensors.

`get_peft_model` runs as it is. What it does that fake tensors refuse is done here: modules are
moved and cast without swapping their parameters, and values that only choose places are assumed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..private import of_torch
from ..private.patched import replaced
from ..tracking.fake_tracker import ASSUMED, unmasked
from ..training.engine import makes_fakes

aten = torch.ops.aten


@contextlib.contextmanager
def adapters_on_fakes() -> Iterator[None]:
    """While entered, PEFT makes adapters of fake tensors as of real ones."""
    if not makes_fakes():
        yield
        return
    with (
        replaced(torch.nn.Module, of_torch.APPLY, _apply),
        replaced(torch.Tensor, "__deepcopy__", _deepcopy),
        _Assumed(),
    ):
        yield


def _apply(
    module: torch.nn.Module,
    convert: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> torch.nn.Module:
    """Do what `Module._apply` does to real parameters: they stay, with other data.

    torch swaps fake ones with new ones, which their weak references forbid.
    """
    if recurse:
        for child in module.children():
            of_torch.convert(child, convert)
    for parameter in of_torch.parameters_of(module).values():
        if parameter is not None:
            with torch.no_grad():
                converted = convert(parameter)
            # A parameter keeps its identity, by which PEFT, the optimizer and tied weights know
            # it.
            if converted is not parameter:
                parameter.data = converted
    buffers = of_torch.buffers_of(module)
    for name, buffer in buffers.items():
        if buffer is not None:
            buffers[name] = convert(buffer)
    return module


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a copy of a fake tensor; torch's would belong to a copy of the mode."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied
    return memo[id(tensor)]


class _Assumed(of_torch.TorchDispatchMode):
    """Answers what depends on values: every mask is full, every number that is read is one."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return ASSUMED.get(args[0].dtype, 1)
        if func is aten.bincount.default:
            # of UniLoRA's numbers, which are all below `minlength`
            numbers, _, minlength = args
            return numbers.new_empty(minlength)
        return unmasked(func, args, kwargs)
