"""Write the log of steps of many micro-batches from few: the second one run stands for all that follow a step's first.

Each copy has storages of its own. What a micro-batch frees of the one before it (the loss, kept outputs) is what that left.
"""

from itertools import pairwise
from typing import Any

from ..tracking.tracker import Storage
from .repetition import NotRegular

Events = list[tuple[int, Storage, str]]
Marks = list[tuple[int, str]]


def repeat(log: Events, marks: Marks, count: int) -> tuple[Events, Marks]:
    """The log and marks of steps of `count` micro-batches, from those of a first step of two and further steps of one.

    Raises NotRegular where the second frees or leaves other things than a third would.
    """
    names = ["load", *(name for _, name in marks)]
    stretches = [log[start:end] for start, end in pairwise([0, *(at for at, _ in marks), len(log)])]
    batches = {i: stretches[i] + stretches[i + 1] for i, name in enumerate(names) if name == "forward"}
    first, second = list(batches)[:2]
    freed = {id(storage) for size, storage, _ in batches[second] if size < 0}
    known = {id(storage) for i in (first, second) for size, storage, _ in batches[i] if size > 0}
    left, taken = _left(batches[second]), [storage for storage in _left(batches[first]) if id(storage) in freed]
    kinds = [_kind(storage) for storage in taken]
    if not freed <= known:
        raise NotRegular("a micro-batch frees what is older than the one before it")

    written, marked, heirs = [], [], {}
    for i, (name, events) in enumerate(zip(names, stretches, strict=True)):
        marked.append((len(written), name))
        written += [(size, heirs.get(id(storage), storage), op) for size, storage, op in events]
        if i - 1 not in batches or i - 1 == first:
            continue
        own = last = left if i - 1 == second else [s for s in _left(batches[i - 1]) if _kind(s) in kinds]
        if [*map(_kind, own)] != kinds:
            raise NotRegular("a micro-batch leaves other tensors than the next one frees")
        for _ in range(count - 2 if i - 1 == second else count - 1):
            twins = dict(zip(map(id, taken), last, strict=True))
            for phase in (second, second + 1):
                marked.append((len(written), names[phase]))
                for size, storage, op in stretches[phase]:
                    if size > 0:
                        twins[id(storage)] = storage.copy(storage.where)
                    written.append((size, twins[id(storage)], op))
            last = [twins[id(storage)] for storage in left]
        heirs |= zip(map(id, own), last, strict=True)  # what is freed later is the last one's
    return written, marked[1:]


def _left(events: Events) -> list[Storage]:
    """The storages that `events` make and do not free."""
    freed = {id(storage) for size, storage, _ in events if size < 0}
    return [storage for size, storage, _ in events if size > 0 and id(storage) not in freed]


def _kind(storage: Storage) -> tuple[Any, ...]:
    return storage.asked, storage.op, storage.where, storage.shape, storage.dtype, storage.stream
