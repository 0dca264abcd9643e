"""Make a tracker's log longer to the byte: of a shallow model for a deep one, of few micro-batches for many.

A stretch of the log, the middle group of layers (`repetition.py`) or a step's second micro-batch, is written again as
often as it is missing, with storages of its own: what it frees of the stretch before becomes, in the copy that stands for
number 7, what number 6 made. `NotRegular` is raised where a log does not have this form.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import groupby, pairwise
from typing import NamedTuple

from ..tracking.tracker import Storage, Tracker
from .repetition import NotRegular, Repetition

Events = list[tuple[int, Storage, str]]
Marks = list[tuple[int, str]]
Walk = list[tuple[int, int, int]]  # (group, first event, one past the last), in the log's order
# Up or down over the groups. A group's events begin where it first occurs; later ones are its neighbours' business.
WALKS = {
    3: re.compile("(0*)(1[01]*)(2[12]*)?|(2*)(1[12]*)(0[01]*)?"),
    4: re.compile("(0*)(1[01]*)(2[12]*)(3[23]*)?|(3*)(2+)(1[12]*)(0[01]*)?"),
    5: re.compile("(0*)(1+)(2[12]*)(3[23]*)(4[34]*)?|(4*)(3+)(2[23]*)(1[12]*)(0[01]*)?"),
}


class Place(NamedTuple):
    """The group that makes a storage, and its counterparts of all groups that are made and not yet freed."""

    group: int
    alive: dict[int, Storage]


class Writer:
    """Writes events into a longer `log`, in which the group `middle` comes `more` times more."""

    def __init__(self, events: Events, middle: int, more: int):
        self.events, self.middle, self.more = events, middle, more
        self.places: dict[Storage, Place] = {}
        self.longer: dict[Storage, Storage] = {}  # of no group, and larger in the longer log
        self.renamed: Callable[[str, int], str] = lambda name, groups: name  # so many groups further up
        self.log: Events = []

    def write(self, first: int, end: int, at: int | None = None, shift: int = 0) -> None:
        """Write the events first…end for the group `shift` above group `at`; with None each group is itself."""
        for size, storage, op in self.events[first:end]:
            place = self.places.get(storage)
            if place is None:
                if at == self.middle:
                    raise NotRegular("a layer frees what no layer made")
                storage = self.longer.get(storage, storage)
                self.log.append((storage.size if size > 0 else -storage.size, storage, op))
                continue
            group, alive = place
            own = group + self.more if group > self.middle else group
            # what is no neighbour's is the first or last layer's
            target = own if at is None or abs(group - at) > 1 else group + shift
            if size > 0:
                copy = alive[target] = storage.copy(self.renamed(storage.where, target - group))
            else:
                copy = alive.pop(target, None) or alive.pop(own, None)  # or left by the last layer of an earlier walk
                if copy is None or copy.size != -size:
                    raise NotRegular(f"{storage.op} of {storage.where} has no counterpart further up")
            self.log.append((size, copy, op))


def deepen(tracker: Tracker, repetition: Repetition, more: int) -> tuple[Events, Marks]:
    """The log and marks of a model whose middle group comes `more` times more than in `tracker`. Raises NotRegular."""
    return _Deepener(tracker, repetition, more).deepened()


def find_walks(slots: Iterable[tuple[int, int, int | None]], groups: int) -> Iterator[Walk]:
    """The complete walks over `groups` in a sequence of (first event, one past the last, group)."""
    slots = [slot for slot in slots if slot[2] is not None]
    for found in WALKS[groups].finditer("".join(str(group) for *_, group in slots)):
        starts = [found.start(part) for part in range(1, 2 * groups + 1) if found[part]]
        cuts = pairwise([*(slots[start][0] for start in starts), slots[found.end() - 1][1]])
        yield [(slots[start][2], *cut) for start, cut in zip(starts, cuts, strict=True)]


class _Deepener(Writer):
    def __init__(self, tracker: Tracker, repetition: Repetition, more: int):
        super().__init__(tracker.log, repetition.middle, more)
        self.marks, self.unit, self.groups = tracker.marks, tracker.round_to, repetition.groups
        self.group, self.renamed = cache(repetition.group), cache(repetition.renumbered)
        self.walks: list[Walk] = []
        phases = [(0, "load"), *self.marks, (len(self.events), "")]
        calls = groupby(tracker.calls, key=lambda call: call[3])
        calls = {phase: [(position, where) for position, _, where, _ in made] for phase, made in calls}
        for phase, ((start, _), (end, _)) in enumerate(pairwise(phases)):
            self._find_walks(start, end, calls.get(phase, []))
        self.walks.sort(key=lambda walk: walk[0][1])
        self._lengthen_vectors([(a, b) for (a, name), (b, _) in pairwise(phases) if name == "step"])

    def _find_walks(self, start: int, end: int, calls: list[tuple[int, str]]) -> None:
        """The walks of one phase: over calls made in layers, and over what other calls make or free of layers."""
        cuts = pairwise([start, *(position for position, _ in calls), end])
        groups = [None, *(self.group(where) for _, where in calls)]
        slots = [(*cut, group) for cut, group in zip(cuts, groups, strict=True)]
        walks = list(find_walks(slots, self.groups))
        for walk in walks:
            self._add(walk)
        for first, stop, _ in slots:
            if not any(walk[0][1] <= first and stop <= walk[-1][2] for walk in walks):
                for _, run in groupby(range(first, stop), key=lambda i: self.events[i][0] > 0):
                    for walk in find_walks(((i, i + 1, self._group_of(self.events[i][1])) for i in run), self.groups):
                        self._add(walk)

    def _group_of(self, storage: Storage) -> int | None:
        place = self.places.get(storage)
        return place.group if place else self.group(storage.where)

    def _add(self, walk: Walk) -> None:
        """Note the places of what is born in `walk`: counterparts have one index within their groups."""
        self.walks.append(walk)
        born = {group: [s for size, s, _ in self.events[a:b] if size > 0] for group, a, b in walk}
        alike = {*range(1, self.groups - 1), *([walk[0][0]] if self.middle == 1 else ())}
        sizes = [[storage.asked for storage in born.get(group, ())] for group in alike]
        if any(size != sizes[0] for size in sizes):
            raise NotRegular("layers of one kind do not all make the same")
        alive: list[dict[int, Storage]] = [{} for _ in range(max(map(len, born.values())))]
        for group, storages in born.items():
            self.places |= {s: Place(group, counterparts) for s, counterparts in zip(storages, alive, strict=False)}

    def _lengthen_vectors(self, steps: list[tuple[int, int]]) -> None:
        """Note the vectors of clipping, which have entries for each gradient: norms are stacked, sharded ones also
        squared and added up over ranks, and the kernel has scratch (`norms_scratch`)."""
        gradients = {s.where for _, s, _ in self.events if s.category == "gradients"}
        clipped = self.more * sum(self.group(where) == self.middle for where in gradients)
        events = (event for start, end in steps for event in self.events[start:end])
        for s in [s for size, s, _ in events if size > 0 and s not in self.places]:
            of_vectors = s.op in ("stack", "cat", "pow", "all_reduce", "_foreach_norm") and len(s.shape) < 2
            if of_vectors and s.asked % len(gradients) == 0:
                vector = self.longer[s] = s.copy(s.where)
                vector.asked += s.asked // len(gradients) * clipped
                vector.size = -(-vector.asked // self.unit) * self.unit
                vector.shape = tuple(n + clipped for n in s.shape)

    def deepened(self) -> tuple[Events, Marks]:
        marks, position = [], 0
        for walk in [*self.walks, None]:
            start = walk[0][1] if walk else len(self.events)
            marks += [(len(self.log) + at - position, name) for at, name in self.marks[len(marks) :] if at <= start]
            self.write(position, start)
            for group, first, position in walk or ():
                shifts = range(self.more + 1) if group == self.middle else [0 if group < self.middle else self.more]
                for shift in shifts if walk[0][0] < self.middle else reversed(shifts):
                    self.write(first, position, group, shift)
        for alive in {id(place.alive): place.alive for place in self.places.values()}.values():
            if len({group in alive for group in range(self.middle, self.middle + self.more + 1)}) > 1:
                storage = next(iter(alive.values()))
                raise NotRegular(f"{storage.op} of {storage.where} has another fate than in other layers")
        return self.log, marks


def repeat(log: Events, marks: Marks, count: int) -> tuple[Events, Marks]:
    """The log and marks of steps of `count` micro-batches, from those of a first step of two and further steps of one.

    Raises NotRegular where the second frees or leaves other things than a third would.
    """
    writer, marked = Writer(log, 1, count - 2), []
    names, cuts = ["load", *(name for _, name in marks)], [0, *(at for at, _ in marks), len(log)]
    first, second, *others = (i for i, name in enumerate(names) if name == "forward")
    left = _left(log[cuts[second] : cuts[second + 2]])
    born = [storage for size, storage, _ in log[cuts[second] : cuts[second + 2]] if size > 0]
    writer.places = {storage: Place(1, {}) for storage in born}
    kinds = [_kind(storage) for storage in left]
    for batch in (first, *others):
        same = [storage for storage in _left(log[cuts[batch] : cuts[batch + 2]]) if _kind(storage) in kinds]
        if [*map(_kind, same)] != kinds:
            raise NotRegular("a micro-batch leaves other tensors than the next one frees")
        counterparts = [writer.places[storage].alive for storage in left]
        writer.places |= {s: Place(0, alive) for s, alive in zip(same, counterparts, strict=True)}

    def write(phase: int, at: int, shift: int) -> None:
        marked.append((len(writer.log), names[phase]))
        writer.write(cuts[phase], cuts[phase + 1], at, shift)

    for phase in range(len(names)):
        if phase not in (second, second + 1):
            write(phase, 2, writer.more)
        if phase - 1 in (first, *others):
            for shift in range(count - 1):
                write(second, 1, shift)
                write(second + 1, 1, shift)
    return writer.log, marked[1:]


def _left(events: Events) -> list[Storage]:
    """The storages that `events` make and do not free."""
    freed = {storage for size, storage, _ in events if size < 0}
    return [storage for size, storage, _ in events if size > 0 and storage not in freed]


def _kind(storage: Storage) -> tuple:
    return storage.asked, storage.op, storage.where, storage.shape, storage.dtype, storage.stream
