"""A deep model's log from a shallow one, to the byte: write the shallow log down again with its middle layer repeated.

A transformer is the same layer again and again, so a deeper model's step is the shallow one's with more repetitions.
The shallow run has five groups of layers (`repetition.py`: the first layers, three periods, the last layers).
Wherever the log walks over the groups, upwards or downwards, the middle group's events are written again, once for each
group that the deep model has more. The copies get storages of their own: what the walk frees of group 1 while it is in
group 2 becomes, in the copy that stands for group 7, what group 6 made. The result is an ordinary log: peaks, timeline
and the allocator's segments follow from it as from a run. Where the log is not regular in this sense, `NotRegular` is
raised and the caller runs the full depth.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ..tracking.tracker import Storage, Tracker
from .repetition import GROUPS, MIDDLE, NotRegular, Repetition

REPEATED = (MIDDLE - 1, MIDDLE, MIDDLE + 1)  # the groups that are alike
PER_PARAMETER = ("stack", "cat")  # results with one entry a parameter: the gradients' norms, in clipping
OF_THEM = ("pow", "all_reduce")  # made of those with as many entries, where shards' norms are added up over ranks
WHILE_MADE = ("_foreach_norm",)  # whose kernel's scratch has several entries a parameter (`cuda_reductions.py`)
HALF = ("float16", "bfloat16")  # a norm has its gradient's dtype

Event = tuple[int, Storage, str]
Marks = list[tuple[int, str]]


@dataclass(frozen=True)
class Walk:
    """One walk over the groups, of the first and last only where they have a part in it: where each group's events
    begin in the log, in the order of the walk, and where it ends."""

    starts: dict[int, int]  # by group
    end: int
    upwards: bool

    @property
    def first(self) -> int:
        """The position of its first event."""
        return min(self.starts.values())

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """(group, first event, one past the last), in the log's order."""
        ends = [*list(self.starts.values())[1:], self.end]
        return [(g, start, end) for (g, start), end in zip(self.starts.items(), ends, strict=True)]


@dataclass(frozen=True)
class Place:
    """Where a layer's storage was born: in which walk, and its index within the group."""

    walk: int
    ordinal: int
    group: int


def deepen(tracker: Tracker, repetition: Repetition, more: int) -> tuple[list[Event], Marks]:
    """The log and marks of a model whose middle group comes `more` times more than in `tracker`. Raises NotRegular."""
    return _Deepener(tracker, repetition, more).write()


def find_walks(items: Iterable[tuple[int, int, int | None]]) -> list[Walk]:
    """The complete walks in a sequence of (first event, one past the last, group).

    A group's events begin where it first occurs; later occurrences are neighbours' business and belong to their block.
    """
    walks: list[Walk] = []
    starts: dict[int, int] = {}
    previous = last = end = 0

    def is_complete() -> bool:
        return all(group in starts for group in REPEATED)

    def close() -> None:
        if is_complete():
            walks.append(Walk(dict(starts), end, starts[MIDDLE - 1] < starts[MIDDLE]))
        starts.clear()

    for first, stop, group in items:
        if group is None:
            continue
        if is_complete() and abs(group - last) >= MIDDLE:
            close()
        if group not in starts:
            turned = len(starts) > 1 and group - last != last - previous
            outwards = len(starts) == 1 and last in REPEATED and abs(group - MIDDLE) > 1
            if starts and (abs(group - last) != 1 or turned or outwards):
                close()
            if not starts and group == MIDDLE:
                continue
            starts[group] = first
            previous, last = last, group
        end = stop
    close()
    return walks


class _Deepener:
    def __init__(self, tracker: Tracker, repetition: Repetition, more: int):
        self.events: list[Event] = list(tracker.log)
        self.repetition, self.more, self.unit = repetition, more, tracker.round_to
        self._group = cache(repetition.group)
        self._renumbered = cache(self._renumber)
        self.marks: Marks = list(tracker.marks)
        self.places: dict[int, Place] = {}
        self.walks: list[Walk] = []
        bounds = [0, *(position for position, _ in self.marks), len(self.events)]
        calls: list[list[tuple[int, str]]] = [[] for _ in bounds[1:]]
        for position, _, where, stretch in tracker.calls:
            calls[stretch].append((position, where))
        for index, (start, end) in enumerate(pairwise(bounds)):
            self._find(start, end, calls[index])
        self.walks.sort(key=lambda walk: walk.first)
        self._vectors(bounds)

    def _vectors(self, bounds: list[int]) -> None:
        """Find the vectors with one entry a clipped gradient, and how many gradients the middle group has."""
        phases = ["load", *(name for _, name in self.marks)]
        made = [
            s
            for name, start, end in zip(phases, bounds[:-1], bounds[1:], strict=True)
            for _, s, _ in self.events[start:end]
            if name == "step" and s.op in (*PER_PARAMETER, *OF_THEM, *WHILE_MADE) and id(s) not in self.places
        ]
        entries = {s.asked: 2 if s.dtype in HALF else 4 for s in made if s.op in PER_PARAMETER}
        self.vectors = {id(s): entries[s.asked] for s in made if s.asked in entries}  # to bytes a parameter
        if entries:
            count = max(asked // entry for asked, entry in entries.items())
            self.vectors |= {id(s): s.asked // count for s in made if s.op in WHILE_MADE and s.asked % count == 0}
        gradients = (s for _, s, _ in self.events if s.category == "gradients")
        self.clipped = len({s.where for s in gradients if self._group(s.where) == MIDDLE})
        self.longer: dict[int, Storage] = {}
        for storage in {id(s): s for s in made}.values():
            if id(storage) not in self.vectors:
                continue
            longer = self.longer[id(storage)] = storage.copy(storage.where)
            longer.asked += self.vectors[id(storage)] * self.clipped * self.more
            longer.size = -(-longer.asked // self.unit) * self.unit
            if storage.shape and len(storage.shape) == 1:
                longer.shape = (storage.shape[0] + self.clipped * self.more,)

    def _find(self, start: int, end: int, calls: list[tuple[int, str]]) -> None:
        """The walks of one phase: over calls made in layers, and over what other calls make or free of layers."""
        cuts = [start, *(position for position, _ in calls), end]
        groups = [None, *(self._group(where) for _, where in calls)]
        slots = list(zip(cuts[:-1], cuts[1:], groups, strict=True))
        walks = find_walks(slots)
        for walk in walks:
            self._settle(walk)
        covered = [(walk.first, walk.end) for walk in walks]
        for first, stop, _ in slots:
            if any(a <= first and stop <= b for a, b in covered):
                continue
            for run in _runs(self.events, first, stop):
                for walk in find_walks((i, i + 1, self._group_of(self.events[i][1])) for i in run):
                    self._settle(walk)

    def _group_of(self, storage: Storage) -> int | None:
        place = self.places.get(id(storage))
        return place.group if place else self._group(storage.where)

    def _settle(self, walk: Walk) -> None:
        """Note the places of what is born in `walk`."""
        number = len(self.walks)
        self.walks.append(walk)
        made: list[list[int]] = [[] for _ in range(GROUPS)]
        for group, first, stop in walk.blocks:
            born = [storage for size, storage, _ in self.events[first:stop] if size > 0]
            made[group] = [storage.asked for storage in born]
            for ordinal, storage in enumerate(born):
                self.places[id(storage)] = Place(number, ordinal, group)
        if not made[MIDDLE - 1] == made[MIDDLE] == made[MIDDLE + 1]:
            raise NotRegular("layers of one kind do not all make the same")

    def write(self) -> tuple[list[Event], Marks]:
        self.log: list[Event] = []
        self.at: int | None = None  # the group that is being written
        self.copies: dict[tuple[int, int, int], Storage] = {}
        self.freed: set[tuple[int, int, int]] = set()
        marks: Marks = []
        position, pending = 0, list(self.marks)

        def up_to(end: int, shift: int | None) -> None:
            nonlocal position
            while position < end:
                while pending and pending[0][0] == position:
                    marks.append((len(self.log), pending.pop(0)[1]))
                self._write(self.events[position], shift)
                position += 1

        for walk in self.walks:
            self.at = None
            up_to(walk.first, None)
            for group, first, end in walk.blocks:
                self.at = group
                if group == MIDDLE and not walk.upwards:
                    self._repeat(first, end, range(self.more, 0, -1))
                up_to(end, 0 if group <= MIDDLE else self.more)
                if group == MIDDLE and walk.upwards:
                    self._repeat(first, end, range(1, self.more + 1))
        self.at = None
        up_to(len(self.events), None)
        marks += [(len(self.log), name) for _, name in pending]
        self._check()
        return self.log, marks

    def _repeat(self, first: int, end: int, shifts: Iterable[int]) -> None:
        block = self.events[first:end]
        if any(id(storage) not in self.places for _, storage, _ in block):
            raise NotRegular("a layer frees what no layer made")
        for shift in shifts:
            for event in block:
                self._write(event, shift)

    def _write(self, event: Event, shift: int | None) -> None:
        """Write `event` for the layer `shift` groups further up; None is outside the walks, where a group is itself."""
        size, storage, op = event
        place = self.places.get(id(storage))
        if place is None:
            storage = self.longer.get(id(storage), storage)
            self.log.append((storage.size if size > 0 else -storage.size, storage, op))
            return
        if shift is None:
            shift = 0 if place.group <= MIDDLE else self.more
        key = (place.walk, place.ordinal, place.group + shift)
        if size > 0:
            if key in self.copies:
                raise NotRegular(f"{storage.op} is made twice in {storage.where}")
            copy = self.copies[key] = storage.copy(self._renumbered(storage.where, shift))
        else:
            far = (
                self.at is not None and abs(place.group - self.at) > 1
            )  # not a neighbour's: the first or last layer's own
            if far or key not in self.copies or key in self.freed:  # or a leftover of the last layer of an earlier walk
                key = (place.walk, place.ordinal, place.group + (0 if place.group <= MIDDLE else self.more))
            copy = self.copies.get(key)
            if copy is None or copy.size != -size or key in self.freed:
                raise NotRegular(f"{storage.op} of {storage.where} has no counterpart further up")
            self.freed.add(key)
        self.log.append((size, copy, op))

    def _renumber(self, where: str, shift: int) -> str:
        if not shift or self._group(where) is None:
            return where
        further = shift * self.repetition.period
        return self.repetition.number.sub(lambda found: f"{found[1]}{int(found[2]) + further}", where, count=1)

    def _check(self) -> None:
        """What the middle group keeps to the end its copies keep, and what it frees they free."""
        for (walk, ordinal, group), _ in self.copies.items():
            if MIDDLE < group <= MIDDLE + self.more:
                original = (walk, ordinal, MIDDLE)
                if (original in self.freed) != ((walk, ordinal, group) in self.freed):
                    storage = self.copies[original]
                    raise NotRegular(f"{storage.op} of {storage.where} has another fate than in the layers above")


def _runs(events: list[Event], start: int, end: int) -> list[list[int]]:
    """The positions start…end in runs of births and runs of frees."""
    runs: list[list[int]] = []
    for i in range(start, end):
        if not runs or (events[i][0] > 0) != (events[i - 1][0] > 0) or runs[-1][-1] != i - 1:
            runs.append([])
        runs[-1].append(i)
    return runs
