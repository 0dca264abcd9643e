"""Which process group a collective runs in, and what gloo allocates for it."""

from typing import Any

import torch


def gloo_scratch(name: str, args: tuple[Any, ...]) -> int:
    """Bytes of torch's CPU allocator that gloo takes for a collective: a flat result when it gathers
    (`AsyncAllgatherWork::allgather`), a copy of what it reduces and scatters (`reduce_scatter_tensor_coalesced`)."""
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
