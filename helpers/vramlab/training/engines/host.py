"""FSDP's offloading where host and device are one: on CPU tensors its copies between the two would be left out.

On CUDA a shard lives in host memory, is copied to the device before its unit is gathered, and the reduced gradient is
copied back. `Host` has the same copies made between CPU tensors, fake and real ones, and knows which side each is on, so
that the device's bytes are a GPU's and can be followed without one.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from ..engine import Follower


class Host(TorchFunctionMode):
    """While entered, `.cpu()` and `.to(device)` are copies; `told` hears of those that are the host's from then on.

    Calls that gather (`FSDPParamGroup.unshard`) copy to the device, all others (`fully_shard`, `post_backward`) away
    from it.
    """

    def __init__(self):
        super().__init__()
        self.to_device = False
        self.told: Callable[[list[torch.Tensor]], None] = _nobody

    def __torch_function__(self, func, types, args=(), kwargs=None):
        moves = func is torch.Tensor.cpu or (func is torch.Tensor.to and isinstance(args[1], torch.device))
        if not moves:
            return func(*args, **(kwargs or {}))
        copied = args[0].clone(memory_format=torch.contiguous_format)
        if not self.to_device:
            self.told([copied])
        return copied

    def serve(self, model: torch.nn.Module) -> None:
        """Have the units of `model`, which was sharded while this was entered, copy from now on."""
        for group in groups(model):
            group.unshard = self._while_entered(group, "unshard", True)
            group.post_backward = self._while_entered(group, "post_backward", False)

    def _while_entered(self, group: Any, name: str, to_device: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.to_device = to_device
            with self:
                return getattr(type(group), name)(group, *args, **kwargs)

        return call

    @contextlib.contextmanager
    def follow(self, model: torch.nn.Module, tracker: "Follower") -> Iterator[None]:
        """While entered, `tracker` leaves out what the host holds, and what is computed from that alone."""
        tracker.mark_on_host(part._sharded_param_data for group in groups(model) for part in group.fsdp_params)
        self.told, tracker.host_computes = tracker.mark_on_host, True
        try:
            yield
        finally:
            self.told = _nobody


def _nobody(tensors: list[torch.Tensor]) -> None:
    """Hears of copies while no tracker follows."""


def groups(model: torch.nn.Module) -> Iterator[Any]:
    """The parameter group of each unit of `model`."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        # a unit has one at most, as all its parameters share a mesh
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            yield group
