"""Chapter 05: small frozen layers with PEFT's adapters."""

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Beside(nn.ModuleDict):
    """Linear layers that all get one input, like queries, keys and values; their sum."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__({name: nn.Linear(1024, 1024, dtype=torch.bfloat16) for name in names})

    def forward(self, x: torch.Tensor) -> Any:
        """Return the sum of what the layers make of `x`."""
        return sum(layer(x) for layer in self.values())


def adapted(*names: str, r: int = 8) -> Any:
    """Frozen bf16 layers of 1,024 × 1,024 beside one another, with PEFT's adapters."""
    return get_peft_model(Beside(names), LoraConfig(r=r, target_modules=list(names)))
