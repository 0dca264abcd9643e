"""Make a tracker's log longer to the byte: of a shallow model for a deep one, of few micro-batches for many.

A stretch of the log, the middle group of layers (`repetition.py`) or a step's second micro-batch, is written again as
often as it is missing, with storages of its own: what it frees of the stretch before becomes, in the copy that stands for
number 7, what number 6 made. `NotRegular` is raised where a log does not have this form.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise

import numpy as np

from ..tracking.history import Log
from ..tracking.tracker import Storage, Tracker
from .repetition import NotRegular, Repetition

Events = list[tuple[int, Storage, str]]
Marks = list[tuple[int, str]]
OUTSIDE = -9  # the group of what no layer makes: no group's neighbour
Walk = list[tuple[int, int, int]]  # (group, first event, one past the last), in the log's order
# A walk up or down, by the number of groups and the middle one. A group's stretch begins with its first event; what it
# does later is in a neighbour's stretch.
WALKS = {
    (3, 1): re.compile("(0+)(1[01]*)(2[12]*)?|(2+)(1[12]*)(0[01]*)?"),
    (4, 1): re.compile("(0+)(1[01]*)(2[12]*)(3[23]*)?|(3*)(2+)(1[12]*)(0[01]*)?"),
    (4, 2): re.compile("(0*)(1+)(2[12]*)(3[23]*)?|(3*)(2+)(1[12]*)(0[01]*)?"),
    (5, 2): re.compile("(0*)(1+)(2[12]*)(3[23]*)(4[34]*)?|(4*)(3+)(2[23]*)(1[12]*)(0[01]*)?"),
}


class Writer:
    """Writes events into a longer log, in which the group `middle` comes `more` times more. `places`: the group that makes
    a storage, and its row, a number that its counterparts of other groups share."""

    def __init__(self, events: Events, middle: int, more: int):
        self.events, self.middle, self.more = list(events), middle, more
        self.places: dict[Storage, tuple[int, int]] = {}
        self.written: list[tuple[int, int, int | None, Sequence[int]]] = []
        self.span = more - 2 * OUTSIDE  # so that keys of two rows differ
        self.length = 0

    def write(self, first: int, end: int, at: int | None = None, shifts: Sequence[int] = (0,)) -> None:
        """Write the events first…end for each of the groups `shifts` above group `at`; with None each group is itself."""
        self.written.append((first, end, at, shifts))
        self.length += (end - first) * len(shifts)

    def longer(self, renamed: Callable[[str, int], str]) -> tuple[Log, np.ndarray]:
        """The log of all that was written, and the keys of what is not freed there: row × `span` + group. `renamed` gives
        a module's name so many groups further up."""
        numbered = enumerate(self.events, len(self.events))
        places = {storage: (OUTSIDE, i) for i, (_, storage, _) in numbered} | self.places
        group, row = np.array([places[storage] for _, storage, _ in self.events]).T
        own = np.where(group > self.middle, group + self.more, group)
        orders, targets = [], []
        for first, end, at, shifts in self.written:
            here = group[first:end]
            if at == self.middle and OUTSIDE in here:
                raise NotRegular("a layer frees what no layer made")
            # what is no neighbour's is the first or last layer's
            near = abs(here - at) <= 1 if at is not None else False
            target = np.where(near, here + np.array(shifts)[:, None], own[first:end])
            targets.append(target.ravel())
            orders.append(np.broadcast_to(np.arange(first, end), target.shape).ravel())
        order, target = np.concatenate(orders), np.concatenate(targets)
        log = Log(self.events, order, row[order] * self.span + target, target - group[order], renamed)
        by_key = np.argsort(log.keys, kind="stable")
        keys, sizes = log.keys[by_key], log.sizes[by_key]
        freed = np.append((keys[1:] == keys[:-1]) & (sizes[1:] == -sizes[:-1]), False)  # by the next of the same key
        lost = by_key[(sizes < 0) & ~np.roll(freed, 1)]
        if len(lost):
            storage = log.storage(min(lost))
            raise NotRegular(f"{storage.op} of {storage.where} has no counterpart further up")
        return log, np.unique(keys[(sizes > 0) & ~freed])


def deepen(tracker: Tracker, repetition: Repetition, more: int) -> tuple[Log, Marks]:
    """The log and marks of a model whose middle group comes `more` times more than in `tracker`. Raises NotRegular."""
    return _Deepener(tracker, repetition, more).deepened()


def find_walks(slots: Iterable[tuple[int, int, int | None]], groups: int, middle: int) -> Iterator[Walk]:
    """The complete walks over `groups` in a sequence of (first event, one past the last, group)."""
    slots = [slot for slot in slots if slot[2] is not None]
    for found in WALKS[groups, middle].finditer("".join(str(group) for *_, group in slots)):
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
        walks = list(find_walks(slots, self.groups, self.middle))
        for walk in walks:
            self._add(walk)
        for first, stop, _ in slots:
            if not any(walk[0][1] <= first and stop <= walk[-1][2] for walk in walks):
                for _, run in groupby(enumerate(self.events[first:stop], first), key=lambda event: event[1][0] > 0):
                    of = ((i, i + 1, self.places.get(s, [self.group(s.where)])[0]) for i, (_, s, _) in run)
                    for walk in find_walks(of, self.groups, self.middle):
                        self._add(walk)

    def _add(self, walk: Walk) -> None:
        """Note the places of what is born in `walk`, but cuBLAS's workspace: counterparts have one index in their groups."""
        self.walks.append(walk)
        born = {group: [s for size, s, _ in self.events[a:b] if size > 0 and s.op != "cublas"] for group, a, b in walk}
        alike = {*range(1, self.groups - 1), *([walk[0][0]] if self.middle == 1 else ())}
        sizes = [[storage.asked for storage in born.get(group, ())] for group in alike]
        if any(size != sizes[0] for size in sizes):
            raise NotRegular("layers of one kind do not all make the same")
        first = len(self.places)
        for group, storages in born.items():
            self.places |= {storage: (group, row) for row, storage in enumerate(storages, first)}

    def _lengthen_vectors(self, steps: list[tuple[int, int]]) -> None:
        """Lengthen the vectors of clipping, which have entries for each gradient: norms are stacked, sharded ones also
        squared and added up over ranks, and the kernel has scratch (`norms_scratch`)."""
        gradients = {s.where for _, s, _ in self.events if s.category == "gradients"}
        clipped = self.more * sum(self.group(where) == self.middle for where in gradients)
        events = (event for start, end in steps for event in self.events[start:end])
        longer = {}
        for s in [s for size, s, _ in events if size > 0 and s not in self.places]:
            of_vectors = s.op in ("stack", "cat", "pow", "all_reduce", "_foreach_norm") and len(s.shape) < 2
            if of_vectors and s.asked % len(gradients) == 0:
                vector = longer[s] = s.copy(s.where)
                vector.asked += s.asked // len(gradients) * clipped
                vector.size = -(-vector.asked // self.unit) * self.unit
                vector.shape = tuple(n + clipped for n in s.shape)
        for i, (size, s, op) in enumerate(self.events):
            if s in longer:
                self.events[i] = (longer[s].size if size > 0 else -longer[s].size, longer[s], op)

    def deepened(self) -> tuple[Log, Marks]:
        marks, position = [], 0
        for walk in [*self.walks, None]:
            start = walk[0][1] if walk else len(self.events)
            marks += [(self.length + at - position, name) for at, name in self.marks[len(marks) :] if at <= start]
            self.write(position, start)
            for group, first, position in walk or ():
                shifts = range(self.more + 1) if group == self.middle else [0 if group < self.middle else self.more]
                self.write(first, position, group, shifts if walk[0][0] < 2 else shifts[::-1])
        log, left = self.longer(self.renamed)
        rows, groups = np.divmod(left, self.span)
        between = (groups >= self.middle) & (groups <= self.middle + self.more)
        rows, counts = np.unique(rows[between], return_counts=True)
        if any(counts <= self.more):
            row = rows[np.argmin(counts)]
            storage = next(storage for storage, (_, of) in self.places.items() if of == row)
            raise NotRegular(f"{storage.op} of {storage.where} has another fate than in other layers")
        return log, marks


def repeat(log: Iterable[tuple[int, Storage, str]], marks: Marks, count: int) -> tuple[Log, Marks]:
    """The log and marks of steps of `count` micro-batches, from those of a first step of two and further steps of one.

    Raises NotRegular where the second frees or leaves other things than a third would.
    """
    writer, marked = Writer(log, 1, count - 2), []
    log, names, cuts = writer.events, ["load", *(name for _, name in marks)], [0, *(at for at, _ in marks), len(log)]
    first, second, *others = (i for i, name in enumerate(names) if name == "forward")
    repeated = log[cuts[second] : cuts[second + 2]]
    writer.places = {storage: (1, row) for row, (size, storage, _) in enumerate(repeated) if size > 0}
    left = _left(repeated)
    kinds = [_kind(storage) for storage in left]
    for batch in (first, *others):
        same = [storage for storage in _left(log[cuts[batch] : cuts[batch + 2]]) if _kind(storage) in kinds]
        if [*map(_kind, same)] != kinds:
            raise NotRegular("a micro-batch leaves other tensors than the next one frees")
        writer.places |= {s: (0, writer.places[like][1]) for s, like in zip(same, left, strict=True)}

    def write(phase: int, at: int, shift: int) -> None:
        marked.append((writer.length, names[phase]))
        writer.write(cuts[phase], cuts[phase + 1], at, [shift])

    for phase in range(len(names)):
        if phase not in (second, second + 1):
            write(phase, 2, writer.more)
        if phase - 1 in (first, *others):
            for shift in range(count - 1):
                write(second, 1, shift)
                write(second + 1, 1, shift)
    return writer.longer(lambda name, groups: name)[0], marked[1:]


def _left(events: Events) -> list[Storage]:
    """The storages that `events` make and do not free."""
    freed = {storage for size, storage, _ in events if size < 0}
    return [storage for size, storage, _ in events if size > 0 and storage not in freed]


def _kind(storage: Storage) -> tuple:
    return storage.asked, storage.op, storage.where, storage.shape, storage.dtype, storage.stream
