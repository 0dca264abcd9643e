"""Parallel styles beside DTensor's own ColwiseParallel and RowwiseParallel, for what lies around the sliced matrices."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class Once(ParallelStyle):
    """The module's first tensor argument becomes a DTensor, the same on all ranks.

    In the backward pass the gradients of all that read it are added up, and then all-reduced once: what Megatron-LM
    calls f (Shoeybi et al. 2019, section 3). Without this, every matrix would all-reduce a gradient of its own.
    """

    def _apply(self, module: torch.nn.Module, device_mesh) -> torch.nn.Module:
        def wrapped(tensor: torch.Tensor) -> DTensor:
            return DTensor.from_local(tensor, device_mesh, (Replicate(),), run_check=False)

        def before(module, args, kwargs):
            if args:
                return (wrapped(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": wrapped(kwargs["hidden_states"])}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class Whole(ParallelStyle):
    """A module (a norm, an embedding) that every rank holds whole and feeds with the same."""

    placement = Replicate()

    def _apply(self, module: torch.nn.Module, device_mesh) -> torch.nn.Module:
        def enter(module, inputs, mesh):
            return (DTensor.from_local(inputs[0], mesh, (self.placement,), run_check=False), *inputs[1:])

        def leave(module, output, mesh):
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class AllHeads(Whole):
    """A norm over the width of one head (Qwen3): whole weights, fed with this rank's heads.

    The weight's gradient is the sum over all heads, so over all ranks.
    """

    placement = Shard(2)  # (batch, tokens, heads, width)

    def _apply(self, module: torch.nn.Module, device_mesh) -> torch.nn.Module:
        super()._apply(module, device_mesh)
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient.redistribute(placements=(Replicate(),)))
        return module
