"""FSDP's offloading on a machine whose device is the host, where the copies between the two would be left out.

On CUDA a shard lives in host memory, is copied to the device before its unit is gathered, and the reduced gradient is
copied back. `Host` makes the same copies between CPU tensors, fake or real, and knows which side each is on, so that the
device's bytes are those of a GPU.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from ..engine import Follower


class Host(TorchFunctionMode):
    """While entered, `.cpu()` and `.to(device)` copy: to the device in `unshard`, else to the host (`on_host`)."""

    def __init__(self):
        super().__init__()
        self.to_device = False
        self.on_host: Callable[[Iterable[torch.Tensor]], Any] = list  # nobody listens

    def __torch_function__(self, func, types, args=(), kwargs=None):
        moves = func is torch.Tensor.cpu or (func is torch.Tensor.to and isinstance(args[1], torch.device))
        if not moves:
            return func(*args, **(kwargs or {}))
        copied = args[0].clone(memory_format=torch.contiguous_format)
        if not self.to_device:
            self.on_host([copied])
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
    def follow(self, model: torch.nn.Module, tracker: Follower) -> Iterator[None]:
        """While entered, `tracker` leaves out what the host holds and computes."""
        tracker.mark_on_host(part._sharded_param_data for group in groups(model) for part in group.fsdp_params)
        self.on_host, tracker.host_computes = tracker.mark_on_host, True
        try:
            yield
        finally:
            self.on_host = list


def groups(model: torch.nn.Module) -> Iterator[Any]:
    """The parameter group of each unit of `model`; at most one, as all parameters of a unit share a mesh."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            yield group
