"""The tensors in what an operator or a module is given."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from ..base.errors import VramLabError
from ..private.of_torch import is_traceable_wrapper_subclass

WITH_STORAGE = (torch.strided, torch.jagged)  # layouts of tensors that lie in one storage


def plain_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return `tensors`, with what a wrapper such as DTensor wraps in its place."""
    unwrapped = []
    for tensor in tensors:
        if tensor.layout not in WITH_STORAGE:
            raise VramLabError(f"neither simulate nor watch follows {tensor.layout} tensors")
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            wrapped = [getattr(tensor, name) for name in names]
            # a wrapper also names what is no tensor, such as DTensor's mesh
            unwrapped += plain_tensors(part for part in wrapped if isinstance(part, torch.Tensor))
        else:
            unwrapped.append(tensor)
    return unwrapped


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested mappings, sequences and dataclasses."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif is_dataclass(values) and not isinstance(values, type):
        values = vars(values).values()
    elif not isinstance(values, list | tuple | set | frozenset | deque):
        return []
    tensors = []
    for value in values:
        tensors += tensors_in(value)
    return tensors
