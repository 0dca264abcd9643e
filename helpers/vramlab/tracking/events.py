"""What a tracker logs: births and frees of storages, phases that begin, operators that ran."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch

# Category of what is in host or unified memory: seen, and left out of the finished log.
ON_HOST = "on host"


@dataclass(slots=True, eq=False)
class Storage:
    """One block of memory: what it holds, what made it and where, and whether it is alive."""

    size: int  # bytes that it takes, rounded
    asked: int  # bytes that were asked for
    category: str | None
    op: str  # the operator that made it
    where: str = ""  # the module or parameter that it belongs to
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stream: int = 0  # the index of the stream on which it was made
    recomputed: bool = False  # made when a checkpoint's forward pass ran again in backward
    alive: bool = True
    ref: weakref.ref | None = None

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        size: int,
        asked: int,
        op: str,
        where: str,
    ) -> "Storage":
        """Return the storage of `tensor`, which operator `op` has made, without a category."""
        shape = tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(size, asked, None, op, where, shape, dtype)

    def copy(self, where: str) -> "Storage":
        """Return the same storage for another layer."""
        return Storage(
            size=self.size,
            asked=self.asked,
            category=self.category,
            op=self.op,
            where=where,
            shape=self.shape,
            dtype=self.dtype,
            stream=self.stream,
            recomputed=self.recomputed,
        )


Event = tuple[int, Storage, str]  # +size or -size, storage, operator
Mark = tuple[int, str]  # a position in the log, and the phase that begins there


class Call(NamedTuple):
    """An operator that ran."""

    position: int  # in the log, at its begin
    op: str
    where: str  # the module
    marks: int  # phases that had begun


class EventLog:
    """Events in their order, and what stands between them."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Event] = []
        self.marks: list[Mark] = []
        self.calls: list[Call] = []
        # positions at which an evaluation's batches begin
        self.batches: list[int] = []
        # met in the step and made before it: they are there from the start
        self.given: list[Storage] = []

    def close_log(self) -> None:
        """Put what was given first, leave out the host's storages, and sort frees.

        Consecutive frees, whose order may be a hash table's, are sorted by birth.
        """
        self._put_given_first()
        self._leave_out_host()
        self._sort_frees()

    def _put_given_first(self) -> None:
        """Log the births of what a step was given before all others."""
        if not self.given:
            return
        births = [(storage.size, storage, storage.op) for storage in self.given]
        self.log[:0] = births
        self._move(lambda position: position + len(births))
        self.given = []

    def _leave_out_host(self) -> None:
        is_kept = [storage.category != ON_HOST for _, storage, _ in self.log]
        # A position moves by as many events as were left out before it.
        moved = [0, *accumulate(is_kept)]  # new positions by old ones
        self.log = [event for event, kept in zip(self.log, is_kept, strict=True) if kept]
        self._move(moved.__getitem__)

    def _move(self, moved: Callable[[int], int]) -> None:
        """Move the positions of marks, calls and batches as the log's events have moved."""
        self.marks = [(moved(position), phase) for position, phase in self.marks]
        self.calls = [call._replace(position=moved(call.position)) for call in self.calls]
        self.batches = list(map(moved, self.batches))

    def _sort_frees(self) -> None:
        births = {}
        for position, (size, storage, _) in enumerate(self.log):
            if size > 0:
                births[storage] = position
        # Frees are sorted between these positions alone: an operator or a phase in between is an
        # order.
        cuts = {0, len(self.log)}
        cuts.update(call.position for call in self.calls)
        cuts.update(position for position, _ in self.marks)
        # only frees between two operators have no order of their own
        for first, last in pairwise(sorted(cuts)):
            in_order: list[Event] = []
            for is_birth, run in groupby(self.log[first:last], key=lambda event: event[0] > 0):
                if is_birth:
                    in_order += run
                else:
                    in_order += sorted(run, key=lambda event: births[event[1]])
            self.log[first:last] = in_order
