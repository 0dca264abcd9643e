"""A tracker's log, replayed: bytes by category after every event, peaks, phases, the timeline; and its report."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from ..hardware.allocator import AllocatorError, Replayed, replay, without_sharing
from ..hardware.contexts import Room, context_on
from ..hardware.overhead import expandable
from ..recipe.recipe import Recipe
from ..report import report
from ..report.report import CATEGORIES, Bytes, Interval, MiB, Moment, Phase, Report, TensorGroup
from .tracker import Storage

ATTRIBUTED = tuple(name for name in CATEGORIES if name != "unexplained")  # categories that a log knows
INDEX = {name: i for i, name in enumerate(ATTRIBUTED)}
# What a process reserved over the replay of its log without expandable segments, where the log is of the step alone: the
# median of 71 published runs on a T4 is 1.008, of 11 on an RTX 4080 1.005; loading leaves segments, and versions differ.
BEYOND = 1.01


class Log:
    """A tracker's events in an `order` that may repeat an event for other layers. `keys`: a number for each storage;
    `shifts`: how many groups of layers further up an event is; `renamed` gives a module's name there."""

    def __init__(self, events: list, order=None, keys=None, shifts=None, renamed: Callable | None = None):
        self.events, self.renamed = events, renamed
        if order is None:
            numbers: dict[Storage, int] = {}
            keys = np.array([numbers.setdefault(storage, len(numbers)) for _, storage, _ in events], int)
            order, shifts = np.arange(len(events)), np.zeros(len(events), int)
        self.order, self.keys, self.shifts = order, keys, shifts
        columns = np.array([(size, s.asked, s.stream) for size, s, _ in events], np.int64).reshape(-1, 3)
        self.sizes, self.asked, self.streams = columns[order].T.copy()

    def storage(self, at: int) -> Storage:
        """The storage of event `at`, with the name of the layer that it stands for."""
        storage = self.events[self.order[at]][1]
        return storage.copy(self.renamed(storage.where, int(self.shifts[at]))) if self.renamed else storage

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, Storage, str]]:
        alive: dict[int, Storage] = {}
        for at, (event, key) in enumerate(zip(self.order.tolist(), self.keys.tolist(), strict=True)):
            size, _, op = self.events[event]
            if size > 0:
                alive[key] = self.storage(at)
            yield size, alive[key], op


class History:
    """A tracker's log and marks, replayed. Position p is the moment after the first p events.

    Args:
        allocator: also run the log through the model of CUDA's caching allocator (`replayed`). What its blocks hold
            beyond the requests is then workspace, and the total is what `torch.cuda.memory_allocated` says.
        room: what the allocator has of a card, where the context is as usual; None: no limit.
    """

    def __init__(self, log: list | Log, marks: list, allocator: bool = False, room: Room | None = None, notes=()):
        self.log, self.notes = log if isinstance(log, Log) else Log(list(log)), list(notes)
        log, self.room = self.log, room
        self.replayed = self.replay(int(room.left("value") / BEYOND) if room else None) if allocator else None
        self.requested = int((np.sign(log.sizes) * log.asked).cumsum().max(initial=0))
        deltas = np.zeros((len(log) + 1, len(ATTRIBUTED)), dtype=np.int64)
        columns = np.array([INDEX[storage.category or "temporaries"] for _, storage, _ in log.events], int)
        deltas[np.arange(1, len(deltas)), columns[log.order]] = log.sizes
        self.splits = deltas.cumsum(axis=0)  # (events + 1, categories): bytes alive at each position
        if self.replayed:
            self.splits[:, INDEX["workspace"]] += self.replayed.internal_fragmentation
        self.live = self.splits.sum(axis=1)
        starts, ends = [(0, "load"), *marks], [*(position for position, _ in marks), len(self.log)]
        # (phase, first position, last position), in order; the first is "load"
        self.stretches = [(name, start, end) for (start, name), end in zip(starts, ends, strict=True)]

    def replay(self, limit: int | None) -> Replayed:
        """The log in CUDA's caching allocator, which has at most `limit` bytes; None: any."""
        return replay(self.log.sizes, self.log.keys, self.log.streams, limit)

    def highest(self, start: int = 0, end: int | None = None) -> int:
        """The first position from `start` to `end` with the most bytes alive."""
        end = len(self.log) if end is None else end
        return start + int(np.argmax(self.live[start : end + 1]))

    def split(self, position: int) -> Bytes:
        """The bytes by category at `position`."""
        return Bytes(*map(int, self.splits[position]))

    def phase_at(self, position: int) -> str:
        """The phase whose events lead to `position`."""
        return next(name for name, start, end in self.stretches if position <= end and (position > start or start == 0))

    @cached_property
    def last_step(self) -> list[tuple[str, int, int]]:
        """The stretches of the last optimizer step: from its first "forward" to its "between_steps"."""
        names = [name for name, _, _ in self.stretches]
        starts = [i for i, n in enumerate(names) if n == "forward" and names[i - 1] in ("load", "between_steps")]
        return self.stretches[max(starts, default=0) :]

    def phases(self) -> dict[str, Phase]:
        """Each phase of the last step (its highest micro-batch), and the moment after loading."""
        load = self.split(self.stretches[0][2])
        return {"load": Phase(load, load), **merge(self.moments(self.last_step))}

    def moments(self, stretches: list[tuple[str, int, int]] | None = None) -> list[tuple[str, Bytes, Bytes]]:
        """(phase, peak, end) of each of `stretches`, by default of all."""
        return [(name, self.split(self.highest(a, b)), self.split(b)) for name, a, b in stretches or self.stretches]

    def largest(self, position: int, count: int = 24) -> list[TensorGroup]:
        """The largest groups of equal storages alive at `position`."""
        log, groups = self.log, {}
        by_key = np.argsort(log.keys[:position], kind="stable")
        is_birth = log.sizes[by_key] > 0
        alive = np.sort(by_key[is_birth & np.append(is_birth[1:], True)])  # births that no free follows
        for event, at, times in zip(*np.unique(log.order[alive], return_index=True, return_counts=True), strict=True):
            s = log.events[event][1]
            group = groups.setdefault((s.size, s.category or "temporaries", s.shape, s.dtype, s.op), [len(alive), 0])
            group[:] = min(group[0], at), group[1] + int(times)
        ranked = sorted(groups.items(), key=lambda item: (-item[0][0] * item[1][1], str(item[0])))[:count]
        return [TensorGroup(*key, log.storage(alive[at]).where, times) for key, (at, times) in ranked]

    def timeline(self, points: int = 400) -> list[Moment]:
        """The last step in about `points` moments: every high and low that shows at that resolution."""
        step = self.last_step
        begin, end = step[0][1], step[-1][2]
        chosen = {begin, end, *(stop for _, _, stop in step)}
        width = max(1, (end - begin) * 2 // points)
        for left in range(begin, end, width):
            window = self.live[left : min(left + width, end) + 1]
            chosen |= {left + int(np.argmax(window)), left + int(np.argmin(window))}
        names = [(start, name) for name, start, _ in step]
        return [
            Moment(p - begin, next(n for start, n in reversed(names) if start < p or start == begin), self.split(p))
            for p in sorted(chosen)
        ]


def merge(stretches: Iterable[tuple[str, Bytes, Bytes]]) -> dict[str, Phase]:
    """One `Phase` for each name among (phase, peak, end): the highest peak, the last end."""
    phases: dict[str, Phase] = {}
    for name, peak, end in stretches:
        if name in phases and phases[name].peak.total >= peak.total:
            peak = phases[name].peak
        phases[name] = Phase(peak, end)
    return phases


def to_report(
    history: History,
    source: str,
    recipe: Recipe | None,
    target: str,
    since: int = 0,
    **more: Any,
) -> Report:
    """The report of a replayed run, with its peak from position `since` on; of a simulated one also what is reserved, of
    which loading left `unused` bytes."""
    at, room, unused = history.highest(since), history.room, more.pop("unused", 0)
    if source == "simulated" and history.replayed:
        allocated = int(history.live.max())
        more |= {"allocated": allocated, "requested": history.requested} if not since else {}
        loaded = more.get("loading"), unused
        more["reserved"], more["process"], failed = _reserved_and_process(history, allocated, *loaded)
        if room:
            more |= {"usable": room.usable, "granted": str(room)}
        if failed:
            said = f"does not fit {room.card.name}: {_failure(history, failed)}"
            more["notes"] = [*more.get("notes", ()), said]
    return Report(
        source=source,
        recipe=recipe.to_dict() if recipe else None,
        title=more.pop("title", str(recipe) if recipe else ""),
        target=target,
        phases=history.phases(),
        peak=history.split(at),
        peak_phase=history.phase_at(at),
        largest=history.largest(at),
        timeline=history.timeline(),
        environment=report.environment(gpu=room.card.name if room else None),
        **more,
    )


def _failure(history: History, error: AllocatorError) -> str:
    """Which request of a run found no room, and what filled the card then, in the words of PyTorch's own message."""
    begun = [name for name, start, _ in history.stretches if start <= error.event]
    step = 1 + begun[:-1].count("between_steps")
    asked, free = history.log.storage(error.event).asked, error.limit - error.reserved
    sizes = (asked, free, error.limit, error.allocated, error.reserved - error.allocated)
    asked, free, limit, allocated, cached = (report.format_bytes(n, report.unit_for(n), 2) for n in sizes)
    return (
        f"in {'load' if begun == ['load'] else f'step {step}, {begun[-1]},'} it tries to allocate {asked}, and {free} are "
        f"free. Of {limit}, {allocated} are allocated, {cached} reserved but unallocated. The figure for reserved "
        "memory is that of a larger card"
    )


def _reserved_and_process(
    history: History, allocated: int, loading: Bytes | None, unused: int
) -> tuple[Interval, Interval, AllocatorError | None]:
    """Reserved memory, that of the process, and what failed where the context is least.

    The log is replayed in what each end of the context leaves, and the replay is BEYOND. Without expandable segments the
    upper end is what the log takes where no segment serves requests of two sizes, none of those that loading left is used
    again, and the context is at its high end: all published runs that say it lie below. What does not fit is shown as on a
    larger card.
    """
    room, log = history.room, history.log
    held = room.context if room else context_on()
    highest = max(allocated, loading.total if loading else 0)
    if room and room.expandable_segments:
        inside = expandable(highest)
        return inside, inside + held, None
    usual, failed = history.replayed, None
    least = most = usual
    if room and usual.failed:
        least = history.replay(room.left("low"))
        failed = least.failed
    elif room and usual.reserved > room.left("high"):
        most = history.replay(room.left("high"))
    value, high = (max(int(BEYOND * each.reserved), highest) for each in (usual, most))
    apart = without_sharing(log.sizes, log.streams) + unused
    inside = Interval(highest, value, max(high + high // 10, apart + 64 * MiB))
    around = inside + held
    if failed:  # the least that would have done for the request
        around = dataclasses.replace(around, low=max(around.low, failed.needed + held.low))
    return inside, around, failed
