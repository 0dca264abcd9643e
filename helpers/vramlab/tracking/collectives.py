"""Which collectives a piece of code issues, and how many bytes they move."""

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(NamedTuple):
    """Collectives of one kind.

    Attributes:
        calls: how many this rank took part in.
        bytes: their payload, the tensor as it is whole: what is reduced, gathered (all shards together), scattered
            (before it is divided), sent. So a step's figure is the same whether N is 2 or 1,024.
        sent: what this rank sends by a ring, the least for large tensors (Rajbhandari et al. 2020, section 7.1, whose
            2Ψ and 3Ψ leave the (N−1)/N out): (N−1)/N of what is gathered or scattered, twice that of what is
            all-reduced.
    """

    calls: int = 0
    bytes: int = 0
    sent: float = 0.0


# Operator to kind, and which of its arguments is the whole tensor. `c10d` is what process groups are called by, from
# Python and by C++ alike (ProcessGroup.hpp goes through the dispatcher), `_c10d_functional` what DTensor issues.
KINDS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 0),
    "c10d::scatter_": ("scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::recv_any_source_": ("recv", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),  # None: the result
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", None),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::isend": ("send", 0),
    "_c10d_functional::irecv": ("recv", 0),
}


def ring_share(kind: str, ranks: int) -> float:
    """What a rank sends by a ring, as a part of the payload; the average rank's where they differ."""
    part = (ranks - 1) / ranks
    return {"all_reduce": 2 * part, "send": 1.0, "recv": 0.0}.get(kind, part)


class Collectives(TorchDispatchMode):
    """While entered, counts what this thread's process groups are asked for; `seen` is kind to `Traffic`.

    Collectives of the backward pass are counted too, those that DDP's reducer issues in C++ included.
    """

    def __init__(self):
        super().__init__()
        self.seen: dict[str, Traffic] = {}
        self.sizes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if any(kind is DTensor for kind in types):
            return NotImplemented  # what it is made of comes here next
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in KINDS:
            kind, where = KINDS[name]
            self.add(kind, _bytes(result if where is None else args[where]), ranks_of(args))
        return result

    def add(self, kind: str, size: int, ranks: int) -> None:
        """Count a collective of `size` bytes among `ranks`."""
        before = self.seen.get(kind, Traffic())
        sent = before.sent + size * ring_share(kind, ranks)
        self.seen[kind] = Traffic(before.calls + 1, before.bytes + size, sent)
        self.sizes[kind].append(size)


def _bytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))


def ranks_of(args: tuple) -> int:
    """The size of the group that an operator is called on."""
    return group_of(args).size()


def group_of(args: tuple) -> "torch.distributed.ProcessGroup":
    """The group that an operator is called on: it is told by object or by name."""
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
