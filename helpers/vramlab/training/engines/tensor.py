"""Tensor parallel (Shoeybi et al. 2019): every rank holds a slice of every matrix and all work on the same batch.

DTensor's `parallelize_module` slices the model by transformers' own plan (`model.tp_plan`): the first matrix of attention
and MLP by columns, the second by rows, so that a layer all-reduces after each of the two in the forward pass, and before
each in the backward pass. The embedding is sliced by rows for all models, as in newer plans (5.15's not for Llama). Norms
are whole on every rank. Each rank computes the loss on whole logits, gathered from the slices of the head.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ...recipe.parallel_limits import WHOLE_EMBEDDING
from ..engine import Engine
from ..models import real_tensors
from .styles import HeadNorm, Replicated, SharedInput


class TensorParallel(Engine):
    """A slice of every layer on each rank. All parameters are DTensors, sliced or whole, as optimizers want them."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        embedding, plan = model.get_input_embeddings(), dict(model.tp_plan)
        if model.config.model_type not in WHOLE_EMBEDDING:
            plan[next(name for name, module in model.named_modules() if module is embedding)] = "embedding_rowwise"
        tied = model.get_output_embeddings().weight is embedding.weight
        with real_tensors():
            mesh = init_device_mesh(model.device.type, (torch.distributed.get_world_size(),))
        parallelize_module(model, mesh, styles(model, plan))
        if tied:  # the two have been sliced separately, in the same way
            model.get_output_embeddings().weight = embedding.weight
        return model


def styles(model: torch.nn.Module, plan: dict[str, str]) -> dict[str, Any]:
    """`plan` as DTensor's styles, and a style for every other module with its own parameters."""
    made = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": HeadNorm(),
    }
    result = {pattern: made[kind] for pattern, kind in plan.items()}
    result |= {pattern.rpartition(".")[0]: SharedInput() for pattern, kind in plan.items() if kind == "colwise"}
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if own and not any(fits(name, pattern) for pattern in plan):
            result[name] = Replicated()
    return result


def fits(name: str, pattern: str) -> bool:
    """Whether the module `name` matches `pattern`, in which "*" stands for one part of a name."""
    ours, wanted = name.split("."), pattern.split(".")
    return len(ours) == len(wanted) and all(w in ("*", o) for o, w in zip(ours, wanted, strict=True))
