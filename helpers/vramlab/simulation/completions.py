"""What TRL reads of completions that fake tensors do not have."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..training.patched import replaced


@contextlib.contextmanager
def completions_known() -> Iterator[None]:
    """While entered, no sampled token ends a completion, and each is the same one.

    Completions are shuffled by a permutation that is known, so that masks are known behind it.
    """
    with (
        replaced(torch, "isin", _is_never_in),
        replaced(torch, "randperm", torch.arange),
        replaced(FakeTensor, "tolist", _ones),
    ):
        yield


def _is_never_in(elements: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.zeros(elements.shape, dtype=torch.bool, device=elements.device)


def _ones(tensor: torch.Tensor) -> Any:
    """Return the numbers of a vector, all one, without reading each."""
    return [1] * tensor.numel() if tensor.dim() == 1 else 1
