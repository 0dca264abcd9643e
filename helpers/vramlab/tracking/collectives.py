"""Which collectives run, how many bytes they move, and what gloo allocates for them."""

from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(NamedTuple):
    """Collectives of one kind.

    Attributes:
        calls: how many this rank took part in.
        bytes: their payload: the whole tensor that is reduced, gathered (all shards together), scattered (before it is
            divided) or sent. It does not depend on the number of ranks.
        sent: bytes that this rank sends by a ring, the least for large tensors (Rajbhandari et al. 2020, section 7.1,
            whose 2Ψ and 3Ψ leave out the factor (N−1)/N).
    """

    calls: int = 0
    bytes: int = 0
    sent: float = 0.0


# Kind of collective to the index of the argument that is the whole tensor (None: the result) and its operators: `c10d`
# is called by process groups, from Python and C++ alike, `_c10d_functional` by DTensor.
C10D = {
    "all_reduce": (0, "allreduce_ allreduce_coalesced_"),
    "all_gather": (0, "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_"),
    "reduce_scatter": (1, "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_"),
    "broadcast": (0, "broadcast_"),
    "reduce": (0, "reduce_"),
    "gather": (0, "gather_"),
    "scatter": (1, "scatter_"),
    "all_to_all": (1, "alltoall_ alltoall_base_"),
    "send": (0, "send"),
    "recv": (0, "recv_ recv_any_source_"),
}
FUNCTIONAL = {
    "all_reduce": (0, "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_"),
    "all_gather": (None, "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced"),
    "reduce_scatter": (0, "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced"),
    "all_to_all": (0, "all_to_all_single"),
    "broadcast": (0, "broadcast broadcast_"),
    "send": (0, "isend"),
    "recv": (0, "irecv"),
}


@cache
def _kind(operator: str) -> tuple[str, int | None] | None:
    """(kind, index of the payload) of an operator such as "c10d::allreduce_"; None if it is no collective."""
    namespace, _, name = operator.partition("::")
    for kind, (payload, names) in {"c10d": C10D, "_c10d_functional": FUNCTIONAL}.get(namespace, {}).items():
        if name in names.split():
            return kind, payload
    return None


def ring_share(kind: str, ranks: int) -> float:
    """Share of the payload that a rank sends by a ring; the mean over ranks where they differ."""
    part = (ranks - 1) / ranks
    return {"all_reduce": 2 * part, "send": 1.0, "recv": 0.0}.get(kind, part)


class Collectives(TorchDispatchMode):
    """While entered, counts this thread's collectives, also those that autograd and DDP's reducer issue.

    Attributes:
        seen: kind to `Traffic`.
        sizes: kind to the payload of each call in bytes.
    """

    def __init__(self):
        super().__init__()
        self.seen: dict[str, Traffic] = {}
        self.sizes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if any(kind is DTensor for kind in types):
            return NotImplemented  # the operators that it is made of come here next
        result = func(*args, **(kwargs or {}))
        if found := _kind(func.name().split(".")[0]):
            kind, payload = found
            self.add(kind, _bytes(result if payload is None else args[payload]), group_of(args).size())
        return result

    def add(self, kind: str, size: int, ranks: int) -> None:
        """Count a collective of `size` bytes among `ranks`."""
        before = self.seen.get(kind, Traffic())
        sent = before.sent + size * ring_share(kind, ranks)
        self.seen[kind] = Traffic(before.calls + 1, before.bytes + size, sent)
        self.sizes[kind].append(size)


def gloo_scratch(name: str, args: tuple[Any, ...]) -> int:
    """Bytes that gloo takes from torch's CPU allocator while the collective `name` runs; NCCL has its own memory.

    Gathering receives into one flat tensor and copies it to the outputs (`AsyncAllgatherWork::allgather`); a
    reduce-scatter is an all-reduce of a copy of the input, of which the rank's part is kept
    (`ProcessGroupGloo::reduce_scatter_tensor_coalesced`). Reducing and broadcasting work in place.
    """
    place = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}.get(name)
    return 0 if place is None else _bytes(args[place])


def _bytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))


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
