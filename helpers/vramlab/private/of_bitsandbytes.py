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
