"""Make a tracker's log longer to the byte.

That is of a shallow model for a deep one, and of few micro-batches for many. A stretch of the log,
the middle group of layers (`repetition.py`) or a step's second micro-batch, is written again as
often as it is missing, with storages of its own: what it frees of the stretch before becomes, in
the copy that stands for number 7, what number 6 made. `NotRegular` is raised where a log does not
have this form.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise
from operator import attrgetter
from string import ascii_letters, digits
from typing import NamedTuple

import numpy as np

from ..tracking.history import Log
from ..tracking.tracker import Event, Mark, Storage, Tracker
from .repetition import NotRegular, Repetition

OUTSIDE = -9  # the group of what no layer makes: no group's neighbour
# Operators that make the vectors of clipping, with an entry for each gradient.
OF_VECTORS = ("stack", "cat", "pow", "all_reduce", "_foreach_norm")
# Walks up or down where the first layer is like the others, by the number of groups. A group's
# stretch begins with its first event; what it does later is in a neighbour's stretch.
WALKS = {
    3: re.compile("(0+)(1[01]*)(2[12]*)?|(2+)(1[12]*)(0[01]*)?"),
    4: re.compile("(0+)(1[01]*)(2[12]*)(3[23]*)?|(3*)(2+)(1[12]*)(0[01]*)?"),
}
LETTERS = digits + ascii_letters  # of the groups in a walk


class Slot(NamedTuple):
    """Some events in a row, of one group of layers or of none."""

    first: int
    end: int  # one past the last event
    group: int | None


class Part(NamedTuple):
    """A group's events in a walk."""

    group: int
    first: int
    end: int  # one past the last event


Walk = list[Part]  # in the log's order


class Place(NamedTuple):
    """What a storage is a counterpart of."""

    group: int  # that makes it
    row: int  # a number that its counterparts of other groups share


class Written(NamedTuple):
    """Events that are written, once for each of the groups `shifts` above group `at`."""

    first: int
    end: int
    at: int | None  # with None each group is itself
    shifts: Sequence[int]


class Writer:
    """Writes events into a longer log, in which the group `middle` comes `more` times more."""

    def __init__(self, events: list[Event], middle: int, more: int, reach: int = 1) -> None:
        self.events = list(events)
        self.middle = middle
        self.reach = reach
        self.more = more
        self.places: dict[Storage, Place] = {}
        self.written: list[Written] = []
        self.span = more - 2 * OUTSIDE  # so that keys of two rows differ
        self.length = 0

    def write(
        self,
        first: int,
        end: int,
        at: int | None = None,
        shifts: Sequence[int] = (0,),
    ) -> None:
        """Write the events first…end for each of the groups `shifts` above group `at`.

        With None each group is itself.
        """
        self.written.append(Written(first, end, at, shifts))
        self.length += (end - first) * len(shifts)

    def longer(self, renamed: Callable[[str, int], str]) -> tuple[Log, np.ndarray]:
        """Return the log of all that was written, and the keys of what is not freed there.

        A key is row × `span` + group. `renamed` gives a module's name so many groups further up.
        """
        group, row = self._groups_and_rows()
        orders = []
        targets = []
        for written in self.written:
            target = self._targets(written, group)
            events = np.arange(written.first, written.end)
            orders.append(np.broadcast_to(events, target.shape).ravel())
            targets.append(target.ravel())
        order = np.concatenate(orders)
        target = np.concatenate(targets)
        # One integer for row and group, so that numpy can compare and sort millions of storages.
        keys = row[order] * self.span + target
        log = Log(self.events, order, keys, target - group[order], renamed)
        return log, _never_freed(log)

    def _groups_and_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the group and the row of each event's storage.

        One without a place is of no group, and in a row of its own.
        """
        places: dict[Storage, Place] = {}
        for number, (_, storage, _) in enumerate(self.events, len(self.events)):
            places[storage] = Place(OUTSIDE, number)
        places.update(self.places)
        group, row = np.array([places[storage] for _, storage, _ in self.events]).T
        return group, row

    def _targets(self, written: Written, group: np.ndarray) -> np.ndarray:
        """Return the groups that written events are of in the longer log: (shifts, events)."""
        here = group[written.first : written.end]
        if written.at == self.middle and OUTSIDE in here:
            raise NotRegular("a layer frees what no layer made")
        # a layer frees what its neighbours made: what is no neighbour's is the first or last one's
        own = np.where(here > self.middle, here + self.more, here)
        shifts = np.array(written.shifts)
        if written.at is None:
            return np.broadcast_to(own, (len(shifts), len(own)))
        # a layer reads what its neighbours made, and so do its copies of theirs
        is_near = abs(here - written.at) <= self.reach
        return np.where(is_near, here + shifts[:, None], own)


def _never_freed(log: Log) -> np.ndarray:
    """Return the keys of births that no free follows.

    Raises NotRegular where a free follows no birth, or one of another category.
    """
    # stable: events of one storage stay in the log's order, a birth before its free
    by_key = np.argsort(log.keys, kind="stable")
    keys = log.keys[by_key]
    sizes = log.sizes[by_key]
    names = [storage.category or "" for _, storage, _ in log.events]
    _, numbers = np.unique(names, return_inverse=True)
    categories = numbers[log.order[by_key]]
    is_of_one = (keys[1:] == keys[:-1]) & (categories[1:] == categories[:-1])
    is_freed_next = is_of_one & (sizes[1:] == -sizes[:-1])
    is_freed = np.append(is_freed_next, False)
    follows_birth = np.roll(is_freed, 1)
    lost = by_key[np.flatnonzero((sizes < 0) & ~follows_birth)]
    if len(lost):
        storage = log.storage(min(lost))
        raise NotRegular(f"{storage.op} of {storage.where} has no counterpart further up")
    return np.unique(keys[np.flatnonzero((sizes > 0) & ~is_freed)])


def deepen(tracker: Tracker, repetition: Repetition, more: int) -> tuple[Log, list[Mark]]:
    """Return the log and marks of a model whose middle group comes `more` times more.

    Raises NotRegular.
    """
    return _Deepener(tracker, repetition, more).deepened()


def find_walks(slots: Iterable[Slot], groups: int, middle: int) -> Iterator[Walk]:
    """Yield the complete walks over `groups` in a sequence of slots."""
    # slots of one group in a row are one: patterns of many groups would try each way to divide them
    in_layers = []
    letters = ""  # a letter for each
    with_group = (slot for slot in slots if slot.group is not None)
    for group, run in groupby(with_group, key=attrgetter("group")):
        assert group is not None  # left out above
        first, *others = run
        in_layers.append(Slot(first.first, others[-1].end if others else first.end, group))
        letters += LETTERS[group]
    pattern = WALKS[groups] if middle == 1 else _walk(groups)
    for match in pattern.finditer(letters):
        # a part of the pattern that has matched begins a group's stretch
        begins = [in_layers[match.start(part)] for part in range(1, 2 * groups + 1) if match[part]]
        ends = [*(slot.first for slot in begins[1:]), in_layers[match.end() - 1].end]
        walk = []
        for slot, end in zip(begins, ends, strict=True):
            assert slot.group is not None  # left out above
            walk.append(Part(slot.group, slot.first, end))
        yield walk


@cache
def _walk(groups: int) -> re.Pattern:
    """Return the pattern of a walk up or down over `groups`, whose ends may be missing."""
    ways = []
    for letters in (LETTERS[:groups], LETTERS[:groups][::-1]):
        ways.append(f"({letters[0]}*)({letters[1]}+)")
        for before, letter in pairwise(letters[1:]):
            ways[-1] += f"({letter}[{before}{letter}]*)"
    return re.compile("|".join(f"{way}?" for way in ways))


class _Deepener(Writer):
    def __init__(self, tracker: Tracker, repetition: Repetition, more: int) -> None:
        super().__init__(tracker.log, repetition.middle, more, repetition.reach)
        self.fetches_ahead = repetition.fetches_ahead
        self.marks = tracker.marks
        self.unit = tracker.round_to
        self.groups = repetition.groups
        # asked for every event, and there are few names
        self.group = cache(repetition.group)
        self.renamed = cache(repetition.renumbered)
        self.walks: list[Walk] = []
        self.rows = 0  # numbers that are taken
        calls = _calls_by_phase(tracker)
        starts = [(0, "load"), *self.marks, (len(self.events), "")]
        steps = []
        for phase, ((start, name), (end, _)) in enumerate(pairwise(starts)):
            self._find_walks(start, end, calls.get(phase, []))
            if name == "step":
                steps.append((start, end))
        # They were found call by call, and are written in the log's order.
        self.walks.sort(key=lambda walk: walk[0].first)
        self._lengthen_vectors(steps)

    def _find_walks(self, start: int, end: int, calls: list[tuple[int, str]]) -> None:
        """Find the walks of one phase.

        They are over calls made in layers, and over what other calls make or free of layers.
        """
        cuts = [start, *(position for position, _ in calls), end]
        groups = [None, *(self.group(where) for _, where in calls)]
        slots = []
        for (first, stop), group in zip(pairwise(cuts), groups, strict=True):
            slots.append(Slot(first, stop, group))
        walks = list(find_walks(slots, self.groups, self.middle))
        # before the other calls, whose frees are of what these have made
        for walk in walks:
            self._add(walk)
        others: list[Slot] = []
        joins = False  # the last of the others makes one storage, and does no more
        for slot in slots:
            in_walk = any(w[0].first <= slot.first and slot.end <= w[-1].end for w in walks)
            if in_walk or slot.first == slot.end:
                continue
            # So weights are fetched outside of layers: one by one, each in a call of its own.
            makes_one = slot.end == slot.first + 1 and self.events[slot.first][0] > 0
            if joins and makes_one and others[-1].end == slot.first:
                others[-1] = Slot(others[-1].first, slot.end, None)
            else:
                others.append(slot)
            joins = makes_one
        for slot in others:
            self._find_walks_within(slot)

    def _find_walks_within(self, slot: Slot) -> None:
        """Find the walks over the births, or over the frees, of calls outside the layers."""
        numbered = enumerate(self.events[slot.first : slot.end], slot.first)
        for _, run in groupby(numbered, key=_is_birth):
            slots = []
            for i, (_, storage, _) in run:
                slots.append(Slot(i, i + 1, self._group_of(storage)))
            for walk in find_walks(slots, self.groups, self.middle):
                self._add(walk)

    def _group_of(self, storage: Storage) -> int | None:
        place = self.places.get(storage)
        return place.group if place else self.group(storage.where)

    def _add(self, walk: Walk) -> None:
        """Note the places of what is born in `walk`, but cuBLAS's workspace.

        Counterparts have one index in their groups.
        """
        self.walks.append(walk)
        born = {part.group: self._born(part) for part in walk}
        sizes = {}
        for group, storages in born.items():
            sizes[group] = [storage.asked for storage in storages]
        if any(sizes.get(group, []) != sizes[self.middle] for group in self._alike(walk)):
            raise NotRegular("layers of one kind do not all make the same")
        others = []
        longest = 0
        for group, storages in born.items():
            is_end = group in (0, self.groups - 1)
            if is_end or sizes[group] == sizes[self.middle]:
                self._place(group, storages)
                longest = max(longest, len(storages))
            else:
                others.append(group)
        self.rows += longest
        # What these make has no counterparts, so nothing that is repeated may free it.
        for group in others:
            self._place(group, born[group])
            self.rows += len(born[group])

    def _place(self, group: int, storages: list[Storage]) -> None:
        for row, storage in enumerate(storages, self.rows):
            self.places[storage] = Place(group, row)

    def _alike(self, walk: Walk) -> set[int]:
        """Return the groups that have to make the same in `walk`: all that are not at the ends.

        Where weights are fetched ahead those that come after the middle one in the walk may not.
        """
        if self.fetches_ahead:
            is_up = _is_up(walk)
            return set(range(1, self.middle + 1) if is_up else range(self.middle, self.groups - 1))
        alike = set(range(1, self.groups - 1))
        if self.middle == 1:  # then the first layer is like the others
            alike.add(walk[0].group)
        return alike

    def _born(self, part: Part) -> list[Storage]:
        storages = []
        for size, storage, _ in self.events[part.first : part.end]:
            if size > 0 and storage.op != "cublas":
                storages.append(storage)
        return storages

    def _lengthen_vectors(self, steps: list[tuple[int, int]]) -> None:
        """Lengthen the vectors of clipping, which have entries for each gradient.

        Norms are stacked, sharded ones also squared and added up over ranks, and the kernel has
        scratch (`norms_scratch`).
        """
        gradients = set()
        for _, storage, _ in self.events:
            if storage.category == "gradients":
                gradients.add(storage.where)
        clipped = self.more * sum(self.group(where) == self.middle for where in gradients)
        longer = {}
        for start, end in steps:
            for size, storage, _ in self.events[start:end]:
                is_vector = storage.op in OF_VECTORS and len(storage.shape) < 2
                if size <= 0 or storage in self.places or not is_vector:
                    continue
                # an entry for each gradient, or it is another vector
                if storage.asked % len(gradients) == 0:
                    entry = storage.asked // len(gradients)
                    longer[storage] = self._longer_vector(storage, entry, clipped)
        for i, (size, storage, op) in enumerate(self.events):
            vector = longer.get(storage)
            if vector is not None:
                self.events[i] = (vector.size if size > 0 else -vector.size, vector, op)

    def _longer_vector(self, storage: Storage, entry: int, clipped: int) -> Storage:
        """Return `storage` with as many entries more, of `entry` bytes each."""
        vector = storage.copy(storage.where)
        vector.asked += entry * clipped
        vector.size = -(-vector.asked // self.unit) * self.unit
        vector.shape = tuple(length + clipped for length in storage.shape)
        return vector

    def deepened(self) -> tuple[Log, list[Mark]]:
        """Return the longer log and its marks."""
        marks: list[Mark] = []
        position = 0
        for walk in self.walks:
            self._write_until(walk[0].first, position, marks)
            if self.fetches_ahead:
                self._check_steady(walk)
            for part in walk:
                shifts = self._shifts(part.group)
                # a walk down comes to the uppermost copy first
                is_up = _is_up(walk)
                self.write(part.first, part.end, part.group, shifts if is_up else shifts[::-1])
            position = walk[-1].end
        self._write_until(len(self.events), position, marks)
        log, left = self.longer(self.renamed)
        self._check_left(left)
        return log, marks

    def _check_steady(self, walk: Walk) -> None:
        """Raise NotRegular unless the group after the middle one does the same, one further."""
        after = self.middle + (1 if _is_up(walk) else -1)
        stretches = {part.group: self._stretch(part) for part in walk}
        if stretches[self.middle] != stretches[after]:
            raise NotRegular("layers of one kind do not all do the same")

    def _stretch(self, part: Part) -> list[tuple]:
        """Return what happens in a group's part of a walk, and to whose storages."""
        stretch = []
        for size, storage, op in self.events[part.first : part.end]:
            place = self.places.get(storage)
            away = place and place.group - part.group
            stretch.append((size, op, away))
        return stretch

    def _write_until(self, end: int, position: int, marks: list[Mark]) -> None:
        """Write what is outside of walks, and the `marks` on the way."""
        for at, name in self.marks[len(marks) :]:
            if at <= end:
                marks.append((self.length + at - position, name))
        self.write(position, end)

    def _shifts(self, group: int) -> Sequence[int]:
        """Return how far up a group's events are written."""
        if group == self.middle:
            return range(self.more + 1)
        return [0 if group < self.middle else self.more]

    def _check_left(self, left: np.ndarray) -> None:
        """Raise NotRegular where not all copies of a storage are left, or none of them."""
        rows, groups = np.divmod(left, self.span)
        # A storage of the middle group has `more` + 1 copies, and either all of them outlive the
        # log or none.
        is_middle = (groups >= self.middle) & (groups <= self.middle + self.more)
        middle_rows, counts = np.unique(rows[np.flatnonzero(is_middle)], return_counts=True)
        if any(counts <= self.more):
            row = middle_rows[np.argmin(counts)]
            of_row = [storage for storage, place in self.places.items() if place.row == row]
            storage = of_row[0]
            what = f"{storage.op} of {storage.where}"
            raise NotRegular(f"{what} has another fate than in other layers")


def _calls_by_phase(tracker: Tracker) -> dict[int, list[tuple[int, str]]]:
    """Return position and module of each call, by the number of phases that had begun."""
    calls: dict[int, list[tuple[int, str]]] = {}
    for call in tracker.calls:
        calls.setdefault(call.marks, []).append((call.position, call.where))
    return calls


def _is_up(walk: Walk) -> bool:
    return walk[0].group < 2


def _is_birth(numbered: tuple[int, Event]) -> bool:
    _, (size, _, _) = numbered
    return size > 0
