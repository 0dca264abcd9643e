"""Tensor parallel (Shoeybi et al. 2019).

Every rank holds a slice of every matrix and all work on the same batch. DTensor's
`parallelize_module` slices the model by transformers' own plan (`model.tp_plan`): the first matrix
of attention and MLP by columns, the second by rows, so that a layer all-reduces after each of the
two in the forward pass, and before each in the backward pass. The embedding is sliced by rows for
all models, as in newer plans (5.15's not for Llama). Norms are whole on every rank. Each rank
computes the loss on whole logits, gathered from the slices of the head.
"""

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ...private.of_torch import parameters_of
from ...recipe.families import FAMILIES
from ..engine import Model, ShardedEngine
from ..models import real_tensors

HEADS = 2  # the dimension of heads in (batch, tokens, heads, width)


class TensorParallel(ShardedEngine):
    """A slice of every layer on each rank.

    All parameters are DTensors, sliced or whole, as optimizers want them.
    """

    def wrap(self, model: Model) -> Model:
        """Return `model`, sliced in place."""
        embedding = model.get_input_embeddings()
        plan = dict(model.tp_plan)
        if not FAMILIES[model.config.model_type].whole_embedding:
            names = [name for name, module in model.named_modules() if module is embedding]
            plan[names[0]] = "embedding_rowwise"
        is_tied = model.get_output_embeddings().weight is embedding.weight
        # A mesh keeps its ranks in a tensor, which must have values where the model's have none.
        with real_tensors():
            mesh = init_device_mesh(model.device.type, (torch.distributed.get_world_size(),))
        parallelize_module(model, mesh, styles(model, plan))
        if is_tied:
            # the two have been sliced separately, in the same way
            model.get_output_embeddings().weight = embedding.weight
        return model


def styles(model: Model, plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """Return `plan` as DTensor's styles, and a style for every other module with parameters."""
    made: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": Whole(Shard(HEADS)),
    }
    result = {pattern: made[kind] for pattern, kind in plan.items()}
    # the matrices of one module read one input
    for pattern, kind in plan.items():
        if kind == "colwise":
            module_pattern = pattern.rpartition(".")[0]
            result[module_pattern] = SharedInput()
    for name, module in model.named_modules():
        own = [each for each in parameters_of(module).values() if each is not None]
        # "*" stands for a layer's number
        is_planned = any(fnmatchcase(name, pattern) for pattern in plan)
        if own and not is_planned:
            result[name] = Whole(Replicate())
    return result


class SharedInput(ParallelStyle):
    """The module's first tensor argument becomes a DTensor, the same on all ranks.

    In the backward pass the gradients of all that read it are added up and all-reduced once,
    Megatron-LM's f (Shoeybi et al. 2019, section 3). Otherwise every matrix would all-reduce a
    gradient of its own.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            first, *others = args or (kwargs.pop("hidden_states"),)
            whole = DTensor.from_local(first, device_mesh, (Replicate(),), run_check=False)
            return (whole, *others), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class Whole(ParallelStyle):
    """A module, such as a norm, that is whole on every rank.

    Its input has `placement`: the same on all, or, for a norm over one head's width (Qwen3), this
    rank's heads; then its weight's gradient is summed over all ranks.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(module: torch.nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
            first, *others = inputs
            whole = DTensor.from_local(first, mesh, (self.placement,), run_check=False)
            return (whole, *others)

        def leave(module: torch.nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
            return output.to_local()

        distribute: Any = distribute_module
        distribute(module, device_mesh, None, enter, leave)
        if self.placement.is_shard():
            for parameter in module.parameters():
                parameter.register_hook(_summed)
        return module


def _summed(gradient: Any) -> torch.Tensor:
    return gradient.redistribute(placements=(Replicate(),))
