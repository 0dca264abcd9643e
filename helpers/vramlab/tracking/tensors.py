"""The tensors in what an operator or a module is given."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..report.errors import VramLabError


def plain_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`tensors`, with what a wrapper such as DTensor wraps in its place."""
    found = []
    for tensor in tensors:
        if tensor.layout not in (torch.strided, torch.jagged):
            raise VramLabError(f"neither simulate nor watch follows {tensor.layout} tensors")
        if is_traceable_wrapper_subclass(tensor):
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # a mesh is no tensor
            found += plain_tensors(part for part in inner if isinstance(part, torch.Tensor))
        else:
            found.append(tensor)
    return found


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in nested mappings, sequences and dataclasses."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif is_dataclass(values) and not isinstance(values, type):
        values = vars(values).values()
    elif not isinstance(values, list | tuple | set | frozenset | deque):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]
