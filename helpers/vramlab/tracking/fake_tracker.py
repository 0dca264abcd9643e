"""The tracker of a simulated step.

It answers reads of values that fake tensors lack, and runs operators faster.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from ..private.of_fake_tensors import FakeTensor, run_fake, schema_of, without_functions
from ..private.of_torch import OpOverload
from .tracked_operators import VIEWS, about, is_wrapper
from .tracker import DEVICE_QUERY, Tracker, aten

# Every mask is full, every count is one, and no gradient overflowed.
ASSUMED: dict[torch.dtype, bool | float | int] = {
    torch.bool: True,
    torch.float32: 1.0,
    torch.float16: 1.0,
    torch.bfloat16: 1.0,
    torch.int64: 1,
    torch.int32: 1,
}


class KnownValues(Protocol):
    """The values of some fake tensors (`simulation.values.Values`)."""

    def stand_ins(self, arguments: tuple) -> tuple:
        """Return an operator's (arguments, keyword arguments) with fakes for real tensors."""

    def run(
        self,
        func: OpOverload,
        args: tuple,
        kwargs: dict,
        where: str,
    ) -> Any:
        """Return an operator's result, and remember its values where they are known."""

    def read(self, tensor: torch.Tensor, guess: Any, where: str) -> Any:
        """Return the value of `tensor`, or `guess` and a note."""

    def take_place(self, module: torch.nn.Module) -> None:
        """Put fake tensors in the place of a module's own."""


class FakeTracker(Tracker):
    """A `Tracker` for fake tensors.

    Its `values` know the content of some, `keep_storage` is given each operator's result.
    """

    # no guard against torch.compile around each operator
    _should_skip_dynamo = staticmethod(lambda: False)
    # torch.compile compiles inside (`simulation/compiled.py`)
    ignore_compile_internals = staticmethod(lambda: True)

    def __init__(self, keep_storage: Callable[..., None] | None = None) -> None:
        super().__init__("cpu")
        self.keep_storage = keep_storage
        self.values: KnownValues | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        # most calls are this one, from autograd's engine
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        # torch functions are the simulation's own, which would run for each size that is asked for
        with without_functions():
            kwargs = kwargs or {}
            # half of a step's operators: they make no storage, and no value is followed
            if func in VIEWS and self._is_known(args[0]):
                self._settle()
                called = self._call(about(func).name, args)
                view = run_fake(func, args, kwargs)
                self.calls.append(called)
                return view
            # of a wrapper such as DTensor what it wraps comes next
            if (
                self.values
                and func is not aten.lift_fresh.default
                and not any(map(is_wrapper, types))
            ):
                args, kwargs = self.values.stand_ins((args, kwargs))
            return self.dispatch(func, types, args, kwargs)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor` is a fake one of a logged storage, of which no value is known."""
        if type(tensor) is not FakeTensor or hasattr(tensor, "vramlab_content"):
            return False
        return self._storage(tensor) is not None

    def meet_module(self, module: torch.nn.Module) -> None:
        """Log what a module outside of the model holds, of which fake tensors take the place."""
        if self.values:
            self.values.take_place(module)
        super().meet_module(module)

    def run(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Return the fake result of an operator."""
        if self.values:
            result = self.values.run(func, args, kwargs, self.running_module())
        elif _only_writes(func):
            return None  # nothing is made; torch would look at every tensor of the model
        else:
            result = self._fake_result(func, args, kwargs)
        if self.keep_storage:
            self.keep_storage(func, args, kwargs, result)
        return result

    def _fake_result(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        if func is aten.lift_fresh.default:
            number = args[0]
            # torch would keep the number itself beside the fake scalar
            if not number.dim() and number.dtype in ASSUMED:
                return torch.empty((), dtype=number.dtype, device=number.device)
        if func is aten.nonzero.default:
            return self._nonzero(args[0])
        return unmasked(func, args, kwargs)

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the indices of half of `mask`.

        KTO asks for the answers that are desirable, half of a batch's labels rounded up, and then
        by the labels' negation for the rest.
        """
        storage = self._storage(mask)
        assert storage is not None  # every argument was born before
        half = mask.numel() // 2
        count = mask.numel() - half if storage.category == "inputs" else half
        return mask.new_empty((count, mask.dim()), dtype=torch.int64)

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return the value of `tensor` if it is known, else an assumed one.

        None stands for a dtype without an assumption.
        """
        if not self.values and tensor.dtype not in ASSUMED:
            return None
        guess = 0 if self._is_zero(tensor) else ASSUMED.get(tensor.dtype, 1)
        if self.values:
            return self.values.read(tensor, guess, self.running_module())
        return guess

    def _is_zero(self, tensor: torch.Tensor) -> bool:
        """Tell whether a number that is read is the least, or the answer to a question is no.

        A module draws a place among several, as BOFT's dropout does. It draws a number and asks if
        it is below a rate, as LayerDrop does: no layer is dropped. Or it asks if any value is
        infinite, as VB-LoRA does, or if the positions of a row are several samples' (transformers'
        `_is_packed_sequence`): rows of joined samples have values.
        """
        # The operator that made the value, and those before it.
        asked = [call.op for call in self.calls[-3:]]
        if tensor.dtype != torch.bool:
            return asked[-1:] == ["randint"]
        if asked == ["abs", "sum", "_to_copy"]:
            return True
        return asked[-1:] in (["lt"], ["le"]) or asked[-2:] == ["isinf", "any"]


def unmasked(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Return the fake result of an operator, where a mask chooses every element."""
    if func is aten.index.Tensor and _has_mask(args[1]):
        values, (*whole, mask) = args
        before = values.shape[: len(whole)]
        return values.new_empty(*before, mask.numel(), *values.shape[len(whole) + mask.dim() :])
    return run_fake(func, args, kwargs)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    *whole, last = indices
    is_last = all(index is None for index in whole)
    return last is not None and last.dtype == torch.bool and is_last


@cache
def _only_writes(func: OpOverload) -> bool:
    """Tell whether `func` is an optimizer's multi-tensor kernel, in place and without a result."""
    name = func.overloadpacket.__name__
    is_multi_tensor = name.startswith(("_foreach_", "_fused_"))
    return is_multi_tensor and name.endswith("_") and not schema_of(func).returns
