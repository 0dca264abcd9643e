"""Private parts of bitsandbytes."""

from collections.abc import Callable
from typing import Any

import torch


def quantized(parameter: Any, device: torch.device) -> Any:
    """Return a 4-bit parameter with its codes on `device`, which moving it there would make."""
    return parameter._quantize(device)


def make_states_by(optimizer: Any, make: Callable[[torch.Tensor, torch.dtype], Any]) -> None:
    """Let AdEMAMix make its block of two averages by `make`."""
    optimizer._get_state_double_buffer = make


def int8_products() -> tuple[Any, Any]:
    """Return the module that multiplies by int8 weights, and what it does so with on a GPU.

    In training it takes another way on a CPU, which is called `INT8_ON_CPU` there.
    """
    from bitsandbytes.autograd import _functions

    return _functions, _functions.MatMul8bitLt


INT8_ON_CPU = "MatMul8bitFp"
