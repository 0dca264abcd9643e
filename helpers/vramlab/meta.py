"""Weights and buffers of any architecture, read off its transformers model on the meta device: shapes, no storage."""

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from .errors import RecipeError

if TYPE_CHECKING:
    import torch

    from .shapes import Shape


@lru_cache(maxsize=32)
def read_off(s: "Shape") -> tuple[tuple, tuple]:
    """The fields of every `Weight`, and every buffer as (name, shape, dtype).

    Raises:
        RecipeError: transformers cannot build the model.
    """
    import torch

    model = build(s)
    owner = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    for module in model.modules():  # a shared matrix belongs to the embedding
        if isinstance(module, torch.nn.Embedding):
            owner[id(module.weight)] = module
    weights = []
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.(\d+)\.", name)
        kind = _kind(name, parameter, owner[id(parameter)])
        weights.append((name, tuple(parameter.shape), kind, int(layer.group(1)) if layer else None))
    buffers = ((name, tuple(b.shape), str(b.dtype).removeprefix("torch.")) for name, b in model.named_buffers())
    return tuple(weights), tuple(buffers)


def build(s: "Shape") -> "torch.nn.Module":
    """The transformers model of `s` in fp32 on the meta device. Raises RecipeError if transformers cannot build it."""
    import torch
    import transformers

    from .models import AUTO_CLASS

    try:
        config = transformers.AutoConfig.for_model(**s.config)
        with torch.device("meta"):
            return getattr(transformers, AUTO_CLASS[s.task]).from_config(config, dtype=torch.float32)
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RecipeError("model", s.name, f"transformers cannot build it for {s.task}: {reason}") from error


def _kind(name: str, parameter: "torch.nn.Parameter", module: "torch.nn.Module") -> str:
    from torch import nn

    if "Norm" in type(module).__name__:
        return "norm"
    if name.endswith("bias"):
        return "bias"
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for kind, classes in (("embedding", nn.Embedding), ("linear", nn.Linear), ("conv", convolutions)):
        if isinstance(module, classes):
            return kind
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    return "expert" if parameter.dim() == 3 and "expert" in name else "other"
