"""A default dtype for one thread.

`torch.set_default_dtype`, which transformers calls to build a model in half precision, is for the
whole process: what another thread makes in the meantime would be in half precision too.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..private.of_torch import tree_leaves
from ..private.patched import replaced

# Functions whose result has the dtype that they were asked for.
CASTS = {
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
    torch.Tensor.type,
    torch.Tensor.view,
}


class _Default(TorchFunctionMode):
    """Gives `dtype` to floating tensors that would have the process's default.

    Those are the ones that nothing says a dtype for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_process = torch.get_default_dtype()
        self.dtype = self.of_process

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.dtype == self.of_process or not isinstance(result, torch.Tensor) or func in CASTS:
            return result
        # What was given a floating tensor or a dtype follows that, as torch does.
        is_said = any(map(_says_dtype, tree_leaves((args, kwargs))))
        if result.dtype != self.of_process or is_said:
            return result
        # `to` of a parameter is no parameter, which a module would not register.
        if isinstance(result, torch.nn.Parameter):
            return torch.nn.Parameter(result.to(self.dtype), result.requires_grad)
        return result.to(self.dtype)


def _says_dtype(value: Any) -> bool:
    """Tell whether an argument decides on the dtype: a floating tensor, or a dtype itself."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, torch.dtype)


@contextlib.contextmanager
def own_default_dtype() -> Iterator[None]:
    """While entered, `torch.set_default_dtype` sets this thread's default for what Python makes."""
    mode = _Default()

    def set_default_dtype(dtype: torch.dtype) -> None:
        mode.dtype = dtype

    with (
        replaced(torch, "set_default_dtype", set_default_dtype),
        replaced(torch, "get_default_dtype", lambda: mode.dtype),
        mode,
    ):
        yield
