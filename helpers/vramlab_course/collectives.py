"""Which collectives a step runs, and how many bytes they move."""

from collections import defaultdict
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vramlab.training.process_group import group_of


class Traffic(NamedTuple):
    """Collectives of one kind.

    Attributes:
        calls: how many this rank took part in.
        bytes: their payload: the whole tensor that is reduced, gathered (all shards together),
            scattered (before it is divided) or sent. It does not depend on the number of ranks.
        sent: bytes that this rank sends by a ring, the least for large tensors (Rajbhandari et al.
            2020, section 7.1, whose 2Ψ and 3Ψ leave out the factor (N−1)/N).
    """

    calls: int = 0
    bytes: int = 0
    sent: float = 0.0


KINDS = (
    "reduce_scatter",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "broadcast",
    "scatter",
    "gather",
    "reduce",
)
C10D_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


@cache
def _kind(operator: str) -> tuple[str, int | None] | None:
    """What an operator is as a collective: (kind, index of its payload); None if it is none.

    The index is that of an argument; None stands for the result.

    `c10d::allreduce_` and its like are called by process groups, from Python and C++ alike,
    `_c10d_functional::all_reduce` and its like by DTensor.
    """
    namespace, _, name = operator.partition("::")
    for short, long in C10D_NAMES.items():
        # c10d writes kinds as one word, DTensor's operators with underscores.
        name = name.replace(short, long)
    # reduce_scatter stands before reduce in KINDS, since its name begins with it.
    kind = next(
        (kind for kind in (*KINDS, "send", "recv") if name.lstrip("_i").startswith(kind)),
        None,
    )
    if kind is None or namespace not in ("c10d", "_c10d_functional"):
        return None
    if namespace == "c10d":
        # These take the output first and what is sent second.
        return kind, 1 if kind in ("reduce_scatter", "scatter", "all_to_all") else 0
    # An all_gather of DTensor gets a shard and returns the whole.
    return kind, None if kind == "all_gather" else 0


def ring_share(kind: str, ranks: int) -> float:
    """Share of the payload that a rank sends by a ring; the mean over ranks where they differ."""
    # Of N equal pieces a ring passes on all but one.
    part = (ranks - 1) / ranks
    return {"all_reduce": 2 * part, "send": 1.0, "recv": 0.0}.get(kind, part)


class Collectives(TorchDispatchMode):
    """While entered, counts this thread's collectives.

    Also those that autograd and DDP's reducer issue count.

    Attributes:
        seen: kind to `Traffic`.
        sizes: kind to the payload of each call in bytes.
    """

    def __init__(self):
        super().__init__()
        self.seen: dict[str, Traffic] = {}
        self.sizes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(
        self,
        func,
        types,
        args=(),
        kwargs=None,
    ):
        from torch.distributed.tensor import DTensor

        if any(kind is DTensor for kind in types):
            return NotImplemented  # the operators that it is made of come here next
        result = func(*args, **(kwargs or {}))
        # The overload behind the dot, such as .default, does not matter.
        found = _kind(func.name().split(".")[0])
        if found:
            kind, payload = found
            self.add(
                kind,
                _bytes(result if payload is None else args[payload]),
                group_of(args).size(),
            )
        return result

    def add(self, kind: str, size: int, ranks: int) -> None:
        """Count a collective of `size` bytes among `ranks`."""
        before = self.seen.get(kind, Traffic())
        sent = before.sent + size * ring_share(kind, ranks)
        self.seen[kind] = Traffic(
            before.calls + 1,
            before.bytes + size,
            sent,
        )
        self.sizes[kind].append(size)


def _bytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))
