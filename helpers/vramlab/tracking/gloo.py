"""Which process group a collective runs in, and what gloo allocates for it."""

from typing import Any

import torch


def gloo_scratch(name: str, args: tuple[Any, ...]) -> int:
    """Bytes that gloo takes from torch's CPU allocator while the collective `name` runs.

    Gathering receives into one flat tensor (`AsyncAllgatherWork::allgather`), a reduce-scatter reduces a copy of its input
    (`ProcessGroupGloo::reduce_scatter_tensor_coalesced`); reducing and broadcasting work in place.
    """
    place = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}.get(name)
    return 0 if place is None else args[place].nbytes


def group_of(args: tuple) -> "torch.distributed.ProcessGroup":
    """The process group among an operator's arguments, given as an object or by name; else the default group."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    for value in reversed(args):
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str) and value not in ("sum", "avg", "min", "max", "product"):
            return _resolve_process_group(value)
    return dist.group.WORLD
