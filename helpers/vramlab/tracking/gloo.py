"""What gloo holds of a CPU's memory while real ranks run."""

from typing import Any

import torch

from ..private.of_torch import without_modes
from ..training.process_group import group_of


def gloo_scratch(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes of torch's CPU allocator that gloo takes for a collective.

    It makes a flat result when it gathers (`AsyncAllgatherWork::allgather`), and a copy of what it
    reduces and scatters (`reduce_scatter_tensor_coalesced`).
    """
    if name == "_allgather_base_":
        return args[0].nbytes
    if name == "_reduce_scatter_base_":
        return args[1].nbytes
    return 0


class LastCollective:
    """The collective that was the last operator, whose tensors gloo may still hold."""

    def __init__(self) -> None:
        distributed = torch.distributed
        is_grouped = distributed.is_available() and distributed.is_initialized()
        self._is_over_gloo = is_grouped and distributed.get_backend() == "gloo"
        self._group: torch.distributed.ProcessGroup | None = None

    def begin(self, args: tuple) -> None:
        """Note a collective with these arguments."""
        if self._is_over_gloo:
            self._group = group_of(args)

    def wait(self) -> None:
        """Run another collective after the last one, so that frees are deterministic.

        By then gloo's one thread has let go of the last one's tensors.
        """
        group = self._group
        if group is not None:
            self._group = None
            with without_modes():
                # Outside of the modes, so that this collective is no part of the log.
                group.allreduce([torch.zeros(1)]).wait()
