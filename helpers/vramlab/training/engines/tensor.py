"""Tensor parallel (Shoeybi et al. 2019): every rank holds a slice of every matrix and all work on the same batch.

DTensor's `parallelize_module` cuts the model as the plan says that transformers keeps with it (`model.tp_plan`): the first
matrix of attention and MLP by columns, the second by rows, so that a layer needs one all-reduce after each of the two in
the forward pass, and one before each in the backward pass. The embedding is cut by rows, as newer releases' plans have
it for more models (5.15's not for Llama). Norms are whole on every rank. Each rank computes the loss on whole logits,
gathered from the slices of the head.
"""

from typing import TYPE_CHECKING, Any

from ...recipe.parallel_limits import WHOLE_EMBEDDING
from ...recipe.recipe import Recipe
from ..engine import Engine

if TYPE_CHECKING:
    import torch


class TensorParallel(Engine):
    """A slice of every layer on each rank. All parameters are DTensors, sliced or whole, as optimizers want them."""

    def wrap(self, model: "torch.nn.Module") -> "torch.nn.Module":
        from torch.distributed.tensor.parallel import parallelize_module

        embedding, plan = model.get_input_embeddings(), dict(model.tp_plan)
        if model.config.model_type not in WHOLE_EMBEDDING:
            plan[next(name for name, module in model.named_modules() if module is embedding)] = "embedding_rowwise"
        tied = model.get_output_embeddings().weight is embedding.weight
        parallelize_module(model, mesh(model.device.type), styles(model, plan))
        if tied:  # each of the two has been cut for itself, in the same way
            model.get_output_embeddings().weight = embedding.weight
        return model


def mesh(device: str) -> Any:
    """All ranks in a row, each with a `device`. It has to be made of real tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ..models import real_tensors

    with real_tensors():
        return init_device_mesh(device, (dist.get_world_size(),))


def styles(model: "torch.nn.Module", plan: dict[str, str]) -> dict[str, Any]:
    """`plan` in DTensor's words, and a style for every other module that has parameters of its own.

    What reads a sliced matrix's input turns it into a DTensor once, so that the gradients of all its readers are added
    up before they are all-reduced.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from .styles import AllHeads, Once, Whole

    made = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": AllHeads(),
    }
    result = {pattern: made[kind] for pattern, kind in plan.items()}
    for pattern in [name for name, kind in plan.items() if kind == "colwise"]:
        result[pattern.rpartition(".")[0]] = Once()
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if own and not any(fits(name, pattern) for pattern in plan):
            result[name] = Whole()
    return result


def fits(name: str, pattern: str) -> bool:
    """Whether the module `name` is one of `pattern`, in which "*" stands for one part of a name."""
    ours, wanted = name.split("."), pattern.split(".")
    return len(ours) == len(wanted) and all(w in ("*", o) for o, w in zip(ours, wanted, strict=True))


def make(recipe: Recipe) -> Engine:
    return TensorParallel()
