"""The tracker of a simulated step: it answers reads of values that fake tensors lack, and runs operators faster."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .tracker import DEVICE_QUERY, Tracker, aten

FAKE = torch._C._TorchDispatchModeKey.FAKE
# Every mask is full, every count is one, and no gradient overflowed.
ASSUMED = {
    torch.bool: True,
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 1.0),
    **dict.fromkeys((torch.int64, torch.int32), 1),
}


class FakeTracker(Tracker):
    """A `Tracker` for fake tensors; `values` knows the content of some, `keep_storage` is given each operator's result."""

    _should_skip_dynamo = staticmethod(lambda: False)  # no guard against torch.compile around each operator

    def __init__(self, device: str = "cpu", keep_storage: Callable[..., None] | None = None):
        super().__init__(device)
        self.keep_storage, self.values = keep_storage, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):  # most calls are this, from autograd's engine
            return args[0].fake_device
        with torch._C.DisableTorchFunction():  # the simulation's, for each size that is asked for
            kwargs = kwargs or {}
            if self.values and func is not aten.lift_fresh.default:
                args, kwargs = self.values.stand_ins((args, kwargs))
            return self.dispatch(func, types, args, kwargs)

    def meet_module(self, module: torch.nn.Module) -> None:
        """Log what a module outside of the model holds, of which fake tensors take the place."""
        if self.values:
            self.values.take_place(module)
        super().meet_module(module)

    def run(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        """The fake result of an operator."""
        if self.values:
            result = self.values.run(func, args, kwargs, self.running_module())
        elif _only_writes(func):
            return None  # nothing is made; torch would look at every tensor of the model
        elif func is aten.lift_fresh.default and not args[0].dim() and args[0].dtype in ASSUMED:
            result = torch.empty((), dtype=args[0].dtype, device=args[0].device)  # torch would keep the number too
        elif func is aten.nonzero.default:  # half of a batch's labels (KTO's), rounded up; of their negation the rest
            n, given = args[0].numel(), self._storage(args[0]).category == "inputs"
            result = args[0].new_empty((n - n // 2 if given else n // 2, args[0].dim()), dtype=torch.int64)
        else:
            result = _unmasked(func, args, kwargs)
        if self.keep_storage:
            self.keep_storage(func, args, kwargs, result)
        return result

    def scalar(self, tensor: torch.Tensor) -> Any:
        """The value of `tensor` if it is known, else an assumed one; None for a dtype without."""
        if not self.values and tensor.dtype not in ASSUMED:
            return None
        # what a module draws is not below its rate: LayerDrop drops no layer
        is_draw = tensor.dtype == torch.bool and self.calls and self.calls[-1][1] in ("lt", "le")
        guess = False if is_draw else ASSUMED.get(tensor.dtype, 1)
        return self.values.read(tensor, guess, self.running_module()) if self.values else guess


def _unmasked(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """The fake result of an operator, where a mask chooses every element."""
    if func is aten.index.Tensor and any(place is not None and place.dtype == torch.bool for place in args[1]):
        (mask,), x = args[1], args[0]
        return x.new_empty(mask.numel(), *x.shape[mask.dim() :])
    mode = torch._C._unset_dispatch_mode(FAKE)
    if mode is None:  # switched off, as in FSDP's hooks
        return func(*args, **kwargs)
    try:  # what that comes to, without the way through the dispatcher
        return mode.__torch_dispatch__(func, (FakeTensor,), args, kwargs)
    finally:
        torch._C._set_dispatch_mode(mode)


@cache
def _only_writes(func: torch._ops.OpOverload) -> bool:
    """Whether `func` is an optimizer's multi-tensor kernel that works in place and returns nothing."""
    name = func.overloadpacket.__name__
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_") and not func._schema.returns
