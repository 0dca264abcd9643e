"""Deepen a shallow model's log to the byte: repeat its middle group of layers once for each group that is missing.

Wherever the log walks over the five groups (`repetition.py`), upwards or downwards, the events of the middle one are
written again for every further group, with storages of their own: what they free of the group below becomes, in the copy
that stands for group 7, what group 6 made. `NotRegular` is raised where a log does not have this form.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import NamedTuple

from ..tracking.tracker import Storage, Tracker
from .repetition import GROUPS, MIDDLE, NotRegular, Repetition

REPEATED = (MIDDLE - 1, MIDDLE, MIDDLE + 1)  # the groups that are alike
Event = tuple[int, Storage, str]
Marks = list[tuple[int, str]]


@dataclass(frozen=True)
class Walk:
    """One walk over the groups: where the events of each group begin in the log, in its order, and where it ends."""

    starts: dict[int, int]  # by group; the first and last have a part in it or not
    end: int

    @property
    def upwards(self) -> bool:
        """Whether it goes from the first layers to the last."""
        return self.starts[MIDDLE - 1] < self.starts[MIDDLE]

    @property
    def blocks(self) -> list[tuple[int, int, int]]:
        """(group, first event, one past the last), in the log's order."""
        cuts = [*self.starts.values(), self.end]
        return [(group, *cut) for group, cut in zip(self.starts, pairwise(cuts), strict=True)]


class Place(NamedTuple):
    """The group that makes a storage, and its counterparts of all groups that are made and not yet freed."""

    group: int
    alive: dict[int, Storage]


def deepen(tracker: Tracker, repetition: Repetition, more: int) -> tuple[list[Event], Marks]:
    """The log and marks of a model whose middle group comes `more` times more than in `tracker`. Raises NotRegular."""
    return _Deepener(tracker, repetition, more).write()


def find_walks(items: Iterable[tuple[int, int, int | None]]) -> Iterator[Walk]:
    """The complete walks in a sequence of (first event, one past the last, group).

    A group's events begin where it first occurs; later occurrences are neighbours' business and belong to their block.
    """
    starts: dict[int, int] = {}
    previous = last = end = 0

    def is_complete() -> bool:
        return all(group in starts for group in REPEATED)

    for first, stop, group in items:
        if group is None:
            continue
        far = is_complete() and abs(group - last) >= MIDDLE
        if group not in starts:
            turned = len(starts) > 1 and group - last != last - previous
            outwards = len(starts) == 1 and last in REPEATED and abs(group - MIDDLE) > 1
            far = far or (bool(starts) and (abs(group - last) != 1 or turned or outwards))
        if far:
            if is_complete():
                yield Walk(starts, end)
            starts = {}
        if group not in starts:
            if not starts and group == MIDDLE:
                continue
            starts[group] = first
            previous, last = last, group
        end = stop
    if is_complete():
        yield Walk(starts, end)


class _Deepener:
    def __init__(self, tracker: Tracker, repetition: Repetition, more: int):
        self.events: list[Event] = tracker.log
        self.marks, self.more, self.unit = tracker.marks, more, tracker.round_to
        self.period, self._group, self._numbered = repetition.period, cache(repetition.group), cache(repetition.split)
        self.places: dict[int, Place] = {}
        self.walks: list[Walk] = []
        phases = [(0, "load"), *self.marks, (len(self.events), "")]
        calls: list[list[tuple[int, str]]] = [[] for _ in phases[1:]]
        for position, _, where, phase in tracker.calls:
            calls[phase].append((position, where))
        for made_by, ((start, _), (end, _)) in zip(calls, pairwise(phases), strict=True):
            self._find_walks(start, end, made_by)
        self.walks.sort(key=lambda walk: walk.blocks[0][1])
        self.longer = self._longer_vectors([(a, b) for (a, name), (b, _) in pairwise(phases) if name == "step"])

    def _find_walks(self, start: int, end: int, calls: list[tuple[int, str]]) -> None:
        """The walks of one phase: over calls made in layers, and over what other calls make or free of layers."""
        cuts = [start, *(position for position, _ in calls), end]
        groups = [None, *(self._group(where) for _, where in calls)]
        slots = [(*cut, group) for cut, group in zip(pairwise(cuts), groups, strict=True)]
        walks = list(find_walks(slots))
        for walk in walks:
            self._add(walk)
        covered = [(walk.blocks[0][1], walk.end) for walk in walks]
        for first, stop, _ in slots:
            if not any(a <= first and stop <= b for a, b in covered):
                for _, run in groupby(range(first, stop), key=lambda i: self.events[i][0] > 0):
                    for walk in find_walks((i, i + 1, self._group_of(self.events[i][1])) for i in list(run)):
                        self._add(walk)

    def _group_of(self, storage: Storage) -> int | None:
        place = self.places.get(id(storage))
        return place.group if place else self._group(storage.where)

    def _add(self, walk: Walk) -> None:
        """Note the places of what is born in `walk`: counterparts have one index within their groups."""
        self.walks.append(walk)
        alive: list[dict[int, Storage]] = []
        sizes: list[list[int]] = [[] for _ in range(GROUPS)]
        for group, first, stop in walk.blocks:
            born = [storage for size, storage, _ in self.events[first:stop] if size > 0]
            sizes[group] = [storage.asked for storage in born]
            alive += [{} for _ in born[len(alive) :]]
            self.places |= {id(s): Place(group, dictionary) for s, dictionary in zip(born, alive, strict=False)}
        if not sizes[MIDDLE - 1] == sizes[MIDDLE] == sizes[MIDDLE + 1]:
            raise NotRegular("layers of one kind do not all make the same")

    def _longer_vectors(self, steps: list[tuple[int, int]]) -> dict[int, Storage]:
        """By id, the vectors of clipping with an entry for each gradient, for the deep model's gradients.

        Norms are stacked, sharded ones also squared and added up over ranks; the kernel's scratch (`norms_scratch`) has
        several entries a gradient.
        """
        gradients = {s.where for _, s, _ in self.events if s.category == "gradients"}
        clipped = self.more * sum(self._group(where) == MIDDLE for where in gradients)
        events = (event for start, end in steps for event in self.events[start:end])
        made = [s for size, s, _ in events if size > 0 and id(s) not in self.places]
        entries = {s.asked: 2 if "16" in s.dtype else 4 for s in made if s.op in ("stack", "cat")}
        count = max((asked // entry for asked, entry in entries.items()), default=0)
        longer = {}
        for s in made:
            entry = entries.get(s.asked, 0) if s.op in ("stack", "cat", "pow", "all_reduce") else 0
            if s.op == "_foreach_norm" and count and s.asked % count == 0:
                entry = s.asked // count
            if entry:
                vector = longer[id(s)] = s.copy(s.where)
                vector.asked += entry * clipped
                vector.size = -(-vector.asked // self.unit) * self.unit
                vector.shape = (s.shape[0] + clipped,) if len(s.shape) == 1 else s.shape
        return longer

    def write(self) -> tuple[list[Event], Marks]:
        self.log: list[Event] = []
        marks, position = [], 0
        for walk in [*self.walks, None]:
            start = walk.blocks[0][1] if walk else len(self.events)
            marks += [(len(self.log) + at - position, name) for at, name in self.marks[len(marks) :] if at <= start]
            self._write(position, start)
            if walk is None:
                break
            for group, first, end in walk.blocks:
                shifts = range(self.more + 1) if group == MIDDLE else [0 if group < MIDDLE else self.more]
                self._write(first, end, group, shifts if walk.upwards else reversed(shifts))
            position = walk.end
        for alive in {id(place.alive): place.alive for place in self.places.values()}.values():
            if len({group in alive for group in range(MIDDLE, MIDDLE + self.more + 1)}) > 1:
                storage = next(iter(alive.values()))
                raise NotRegular(f"{storage.op} of {storage.where} has another fate than in other layers")
        return self.log, marks

    def _write(self, first: int, end: int, at: int | None = None, shifts: Iterable[int] = (0,)) -> None:
        """Write the events first…end for the groups `shifts` above group `at`; outside the walks each group is itself."""
        rows = []
        for size, storage, op in self.events[first:end]:
            place = self.places.get(id(storage))
            if place is None and at == MIDDLE:
                raise NotRegular("a layer frees what no layer made")
            if place is None:
                storage = self.longer.get(id(storage), storage)
                rows.append((storage.size if size > 0 else -storage.size, storage, op, None, 0, 0, False, None))
                continue
            own = place.group if place.group <= MIDDLE else place.group + self.more
            far = at is not None and abs(place.group - at) > 1  # not a neighbour's but the first or last layer's
            rows.append((size, storage, op, place.alive, place.group, own, far, self._numbered(storage.where)))
        log = self.log.append
        for shift in shifts:
            for size, storage, op, alive, group, own, far, name in rows:
                if alive is None:
                    log((size, storage, op))
                    continue
                target = own if at is None or far else group + shift
                if size > 0:
                    before, number, after = name
                    if number is not None:
                        before = f"{before}{number + (target - group) * self.period}{after}"
                    copy = alive[target] = storage.copy(before)
                else:
                    copy = alive.pop(target, None) or alive.pop(
                        own, None
                    )  # or left by the last layer of an earlier walk
                    if copy is None or copy.size != -size:
                        raise NotRegular(f"{storage.op} of {storage.where} has no counterpart further up")
                log((size, copy, op))
