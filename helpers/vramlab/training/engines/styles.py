"""Parallel styles for what lies around the sliced matrices, in addition to DTensor's ColwiseParallel and RowwiseParallel."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class SharedInput(ParallelStyle):
    """The module's first tensor argument becomes a DTensor, the same on all ranks.

    In the backward pass the gradients of all that read it are added up and all-reduced once, Megatron-LM's f (Shoeybi et
    al. 2019, section 3). Otherwise every matrix would all-reduce a gradient of its own.
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


class Replicated(ParallelStyle):
    """A module, such as a norm, that is whole on every rank and gets the same input there."""

    placement = Replicate()

    def _apply(self, module: torch.nn.Module, device_mesh) -> torch.nn.Module:
        def enter(module, inputs, mesh):
            return (DTensor.from_local(inputs[0], mesh, (self.placement,), run_check=False), *inputs[1:])

        def leave(module, output, mesh):
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class HeadNorm(Replicated):
    """A norm over one head's width (Qwen3), of this rank's heads; its weight's gradient is summed over all ranks."""

    placement = Shard(2)  # (batch, tokens, heads, width)

    def _apply(self, module: torch.nn.Module, device_mesh) -> torch.nn.Module:
        super()._apply(module, device_mesh)
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient.redistribute(placements=(Replicate(),)))
        return module
