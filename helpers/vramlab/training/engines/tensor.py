"""Tensor parallel (Shoeybi et al. 2019): every rank holds a slice of every matrix and all work on the same batch.

DTensor's `parallelize_module` slices the model by transformers' own plan (`model.tp_plan`): the first matrix of attention
and MLP by columns, the second by rows, so that a layer all-reduces after each of the two in the forward pass, and before
each in the backward pass. The embedding is sliced by rows for all models, as in newer plans (5.15's not for Llama). Norms
are whole on every rank. Each rank computes the loss on whole logits, gathered from the slices of the head.
"""

from fnmatch import fnmatchcase

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...recipe.families import FAMILIES
from ..engine import Engine
from ..models import real_tensors


class TensorParallel(Engine):
    """A slice of every layer on each rank. All parameters are DTensors, sliced or whole, as optimizers want them."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        embedding, plan = model.get_input_embeddings(), dict(model.tp_plan)
        if not FAMILIES[model.config.model_type].whole_embedding:
            plan[next(name for name, module in model.named_modules() if module is embedding)] = "embedding_rowwise"
        tied = model.get_output_embeddings().weight is embedding.weight
        with real_tensors():
            mesh = init_device_mesh(model.device.type, (torch.distributed.get_world_size(),))
        parallelize_module(model, mesh, styles(model, plan))
        if tied:  # the two have been sliced separately, in the same way
            model.get_output_embeddings().weight = embedding.weight
        return model


def styles(model: torch.nn.Module, plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """`plan` as DTensor's styles, and a style for every other module with its own parameters."""
    made = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": Whole(Shard(2)),  # of (batch, tokens, heads, width)
    }
    result = {pattern: made[kind] for pattern, kind in plan.items()}
    result |= {pattern.rpartition(".")[0]: SharedInput() for pattern, kind in plan.items() if kind == "colwise"}
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if own and not any(fnmatchcase(name, pattern) for pattern in plan):  # "*" stands for a layer's number
            result[name] = Whole(Replicate())
    return result


class SharedInput(ParallelStyle):
    """The module's first tensor argument becomes a DTensor, the same on all ranks.

    In the backward pass the gradients of all that read it are added up and all-reduced once, Megatron-LM's f (Shoeybi et
    al. 2019, section 3). Otherwise every matrix would all-reduce a gradient of its own.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def before(module, args, kwargs):
            first, *others = args or (kwargs.pop("hidden_states"),)
            return (DTensor.from_local(first, device_mesh, (Replicate(),), run_check=False), *others), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class Whole(ParallelStyle):
    """A module, such as a norm, that is whole on every rank. Its input has `placement`: the same on all, or, for a norm over
    one head's width (Qwen3), this rank's heads; then its weight's gradient is summed over all ranks."""

    def __init__(self, placement: Placement):
        self.placement = placement

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(module, inputs, mesh):
            return (DTensor.from_local(inputs[0], mesh, (self.placement,), run_check=False), *inputs[1:])

        distribute_module(module, device_mesh, None, enter, lambda module, output, mesh: output.to_local())
        for parameter in module.parameters() if self.placement.is_shard() else ():
            parameter.register_hook(lambda gradient: gradient.redistribute(placements=(Replicate(),)))
        return module
