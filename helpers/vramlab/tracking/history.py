"""A tracker's log, replayed.

It gives bytes by category after every event, peaks, phases and the timeline; and the report.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ..hardware.allocator import AllocatorError, Replayed, replay, without_sharing
from ..hardware.contexts import Room, context_on
from ..hardware.overhead import TWO_STREAMS, expandable
from ..recipe.recipe import Recipe
from ..report import report
from ..report.report import (
    CATEGORIES,
    Bytes,
    Cause,
    Interval,
    MiB,
    Moment,
    Phase,
    Report,
    TensorGroup,
)
from .log import Log
from .tracker import Event, Mark, Storage

# The categories that a log knows.
ATTRIBUTED = tuple(name for name in CATEGORIES if name != "unexplained")
INDEX = {name: i for i, name in enumerate(ATTRIBUTED)}
LEAST_SPARE = 64 * MiB  # of segments, above what the allocator's model says
OF_MANY_TENSORS = ("_foreach_", "_fused_")  # operators whose results are of many parameters
BEFORE_A_STEP = ("load", "between_steps")
FIRST_OF_A_STEP = ("generate", "encode", "forward", "prefill")
# What a process reserved over the replay of its log without expandable segments, where the log is
# of the step alone: the median of 71 published runs on a T4 is 1.008, of 11 on an RTX 4080 1.005;
# loading leaves segments, and versions differ.
BEYOND = 1.01
# Peaks that a card is given where a log reserved more on a card without an end, which is never
# asked to give back what is cached.
LARGER = 2


class Stretch(NamedTuple):
    """A phase, from one position of the log to another; the first is "load"."""

    name: str
    start: int
    end: int


class History:
    """A tracker's log and marks, replayed. Position p is the moment after the first p events.

    Args:
        allocator: also run the log through the model of CUDA's caching allocator (`replayed`). What
            its blocks hold beyond the requests is then workspace, and the total is what
            `torch.cuda.memory_allocated` says.
        room: what the allocator has of a card, where the context is as usual; None: no limit.
    """

    def __init__(
        self,
        log: list[Event] | Log,
        marks: list[Mark],
        allocator: bool = False,
        room: Room | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self.log = log if isinstance(log, Log) else Log(list(log))
        self.notes = list(notes)
        self.room = room
        # The replay is BEYOND what the log alone takes, so its limit is lower by as much.
        limit = int(room.left("value") / BEYOND) if room else None
        self.replayed = self.replay(limit) if allocator else None
        # without the tracker's rounding: torch calls these the requested bytes
        # `sizes` are negative for frees, `asked` are not.
        asked = np.sign(self.log.sizes) * self.log.asked
        self.requested = int(asked.cumsum().max(initial=0))
        # bytes alive at each position: (events + 1, categories)
        self.splits = self._split_all()
        if self.replayed:
            self.splits[:, INDEX["workspace"]] += self.replayed.internal_fragmentation
        self.live = self.splits.sum(axis=1)
        self.stretches = self._stretches(marks)

    def _split_all(self) -> np.ndarray:
        log = self.log
        categories = [storage.category or "temporaries" for _, storage, _ in log.events]
        columns = np.array([INDEX[category] for category in categories], int)
        # one row more than events: at position 0 nothing is alive
        changes = np.zeros((len(log) + 1, len(ATTRIBUTED)), dtype=np.int64)
        rows = np.arange(1, len(changes))
        changes[rows, columns[log.order]] = log.sizes
        return changes.cumsum(axis=0)

    def _stretches(self, marks: list[Mark]) -> list[Stretch]:
        """Return the phases in order; each ends where the next one begins."""
        starts = [(0, "load"), *marks]
        ends = [*(position for position, _ in marks), len(self.log)]
        stretches = []
        for (start, name), end in zip(starts, ends, strict=True):
            stretches.append(Stretch(name, start, end))
        return stretches

    def replay(self, limit: int | None) -> Replayed:
        """The log in CUDA's caching allocator, which has at most `limit` bytes; None: any."""
        return replay(self.log.sizes, self.log.keys, self.log.streams, limit)

    def highest(self, start: int = 0, end: int | None = None) -> int:
        """Return the first position from `start` to `end` with the most bytes alive."""
        end = len(self.log) if end is None else end
        return start + int(np.argmax(self.live[start : end + 1]))

    def split(self, position: int) -> Bytes:
        """Return the bytes by category at `position`."""
        return Bytes(*map(int, self.splits[position]))

    def phase_at(self, position: int) -> str:
        """Return the phase whose events lead to `position`."""
        for name, start, end in self.stretches:
            # at a stretch's start the events of the one before have led there
            if position <= end and (position > start or start == 0):
                return name
        raise IndexError(f"the log ends before position {position}")

    @cached_property
    def last_step(self) -> list[Stretch]:
        """The stretches of the last optimizer step: from its first "forward" on.

        Where a trainer samples for several steps at once they are those of all.
        Of a generation they are all, from "prefill" on.
        """
        first = 0
        sampled = 0
        for i, stretch in enumerate(self.stretches):
            before = self.stretches[i - 1].name
            if stretch.name in FIRST_OF_A_STEP and before in BEFORE_A_STEP:
                first = i
            if stretch.name == "generate":
                sampled = i
        return self.stretches[min(first, sampled or first) :]

    def phases(self) -> dict[str, Phase]:
        """Return each phase of the last step (its highest micro-batch), and the end of loading.

        A generation's are "prefill" and "decode", of which the highest step counts.
        """
        load = self.split(self.stretches[0].end)
        phases = {"load": Phase(load, load), **merge(self.moments(self.last_step))}
        if "prefill" in phases:  # its end is none of its phases
            del phases["between_steps"]
        return phases

    def moments(self, stretches: Sequence[Stretch] = ()) -> list[tuple[str, Phase]]:
        """Return (name, peak and end) of each of `stretches`, by default of all."""
        moments = []
        for name, start, end in stretches or self.stretches:
            at = self.highest(start, end)
            phase = Phase(self.split(at), self.split(end), self.cause(at, start))
            moments.append((name, phase))
        return moments

    def cause(self, position: int, start: int = 0) -> Cause | None:
        """Return what led to `position` from `start` on: the last operator's results, or None.

        An operator of many tensors is one, and so are equal operators of a module in a row.
        """
        log = self.log
        made: list[Storage] = []
        last = ""
        # Backwards from the peak: a free or another operator ends what led to it.
        for at in range(position - 1, start - 1, -1):
            if log.sizes[at] < 0:
                break
            storage = log.storage(at)
            _, _, op = log.events[log.order[at]]
            many = op.startswith(OF_MANY_TENSORS)
            if made and (op != last or (storage.where != made[-1].where and not many)):
                break
            made.append(storage)
            last = op
        if not made:
            return None
        # Reversed, so that of equal ones the first that was made is named.
        largest = max(reversed(made), key=attrgetter("size"))
        places = {storage.where for storage in made}
        return Cause(
            direction="recomputation" if largest.recomputed else self.phase_at(position),
            op=last,
            where=largest.where if len(places) == 1 else "",
            size=sum(storage.size for storage in made),
            category=largest.category or "temporaries",
            count=len(made),
            shape=largest.shape,
            dtype=largest.dtype,
        )

    def largest(self, position: int, count: int = 24) -> list[TensorGroup]:
        """Return the largest groups of equal storages alive at `position`."""
        log = self.log
        alive = self._births_alive(position)
        # a storage that stands for many layers is one event, many times
        events, firsts, times = np.unique(log.order[alive], return_index=True, return_counts=True)
        groups: dict[tuple, _Group] = {}
        for event, at, number in zip(events, firsts, times, strict=True):
            _, storage, _ = log.events[event]
            category = storage.category or "temporaries"
            key = (storage.size, category, storage.shape, storage.dtype, storage.op)
            group = groups.setdefault(key, _Group(first=len(alive)))
            group.first = min(group.first, at)
            group.count += int(number)

        def rank(item: tuple[tuple, _Group]) -> tuple[int, str]:
            key, group = item
            size = key[0]
            # By bytes together, then by text, so that the order does not depend on a hash.
            return -size * group.count, str((key, [group.first, group.count]))

        ranked = sorted(groups.items(), key=rank)
        return [self._described(key, alive[group.first], group) for key, group in ranked[:count]]

    def _births_alive(self, position: int) -> np.ndarray:
        """Return the events before `position` that are births which no free follows."""
        # stable: a storage's events stay in their order
        by_key = np.argsort(self.log.keys[:position], kind="stable")
        is_birth = self.log.sizes[by_key] > 0
        # In the order of keys a birth is alive if the next event is a birth too, of another
        # storage.
        is_followed_by_birth = np.append(is_birth[1:], True)
        return np.sort(by_key[np.flatnonzero(is_birth & is_followed_by_birth)])

    def _described(self, key: tuple, at: int, group: "_Group") -> TensorGroup:
        size, category, shape, dtype, op = key
        where = self.log.storage(at).where
        return TensorGroup(size, category, shape, dtype, op, where, group.count)

    def timeline(self, points: int = 400) -> list[Moment]:
        """Return the last step in about `points` moments.

        Every high and low is among them that shows at that resolution.
        """
        step = self.last_step
        begin = step[0].start
        end = step[-1].end
        chosen = {begin, end}
        chosen.update(stretch.end for stretch in step)
        # two points of each window are kept
        width = max(1, (end - begin) * 2 // points)
        for left in range(begin, end, width):
            right = min(left + width, end)
            window = self.live[left : right + 1]
            chosen.add(left + int(np.argmax(window)))
            chosen.add(left + int(np.argmin(window)))
        moments = []
        for position in sorted(chosen):
            phase = _phase_before(position, step)
            moments.append(Moment(position - begin, phase, self.split(position)))
        return moments


@dataclasses.dataclass
class _Group:
    """Equal storages: the index of the first among those alive, and how many there are."""

    first: int
    count: int = 0


def _phase_before(position: int, step: list[Stretch]) -> str:
    """Return the last phase of a step that begins before `position`, or at the step's begin."""
    begin = step[0].start
    names = [name for name, start, _ in step if start < position or start == begin]
    return names[-1]


def merge(moments: Iterable[tuple[str, Phase]]) -> dict[str, Phase]:
    """Return one `Phase` for each name: the highest peak with its cause, and the last end."""
    phases: dict[str, Phase] = {}
    for name, phase in moments:
        highest = phases.get(name, phase)
        if phase.peak.total > highest.peak.total:
            highest = phase
        phases[name] = dataclasses.replace(highest, end=phase.end)
    return phases


def bytes_of(moments: list[tuple[str, Phase]]) -> list[tuple[str, Bytes, Bytes]]:
    """Return phase, peak and end of each, without what led to the peak."""
    return [(name, phase.peak, phase.end) for name, phase in moments]


def to_report(
    history: History,
    source: str,
    recipe: Recipe | None,
    target: str,
    since: int = 0,
    **more: Any,
) -> Report:
    """Return the report of a replayed run, with its peak from position `since` on.

    That of a simulated run also says what is reserved, of which loading left `unused` bytes. An
    evaluation has `batches`: the positions at which they begin, and how many the whole set has.
    """
    at = history.highest(since)
    room = history.room
    unused = more.pop("unused", 0)
    batches = more.pop("batches", ((), 0))
    if source == "simulated" and history.replayed:
        allocated = int(history.live.max())
        # from a later position on the allocator's own peak would be another one's
        if not since:
            more["allocated"] = allocated
            more["requested"] = history.requested
        loading = more.get("loading")
        reserved, by_default, failed = _reserved_and_process(history, allocated, loading, unused)
        more["reserved"] = reserved
        more["process"] = by_default
        offloads = bool(recipe and recipe.activation_offloading)
        grown = expandable(_highest(allocated, loading), TWO_STREAMS if offloads else 1.0)
        more["otherwise"] = grown + _context(history)
        # With expandable segments the other setting is "otherwise", and a failure of the replay
        # without them is none.
        if room and room.expandable_segments:
            failed = None
            more["expandable_segments"] = True
            more |= {"reserved": grown, "process": more["otherwise"], "otherwise": by_default}
        if room:
            more["usable"] = room.usable
            more["granted"] = str(room)
        if room and failed:
            moment = history.log.batch_at(failed.event, *batches)
            failure = _failure(history, failed, moment)
            note = f"does not fit {room.card.name}: {failure}"
            more["notes"] = [*more.get("notes", ()), note]
    return Report(
        source=source,
        recipe=recipe.to_dict() if recipe else None,
        title=more.pop("title", str(recipe) if recipe else ""),
        target=target,
        phases=history.phases(),
        peak=history.split(at),
        peak_phase=history.phase_at(at),
        cause=history.cause(at),
        largest=history.largest(at),
        timeline=history.timeline(),
        environment=report.environment(gpu=room.card.name if room else None),
        **more,
    )


def _failure(history: History, error: AllocatorError, moment: str) -> str:
    """Say which request of a run found no room, and what filled the card then.

    The words are those of PyTorch's own message. `moment` is of an evaluation, else "".
    """
    begun = [name for name, start, _ in history.stretches if start <= error.event]
    if begun == ["load"]:
        moment = "load"
    elif not moment:
        step = 1 + begun[:-1].count("between_steps")
        moment = f"step {step}, {begun[-1]},"
    asked = _in_words(history.log.storage(error.event).asked)
    free = _in_words(error.limit - error.reserved)
    limit = _in_words(error.limit)
    allocated = _in_words(error.allocated)
    cached = _in_words(error.reserved - error.allocated)
    text = (
        f"in {moment} it tries to allocate {asked}, and {free} are free. Of {limit}, {allocated} "
        f"are allocated, {cached} reserved but unallocated"
    )
    if history.live.max() > error.limit:  # then none is shown (`Report.beyond`)
        return text
    return f"{text}. The figure for reserved memory is that of a larger card"


def _in_words(size: int) -> str:
    return report.format_bytes(size, report.unit_for(size), 2)


def _apart(log: Log, end: int, left: float) -> int:
    """Return the bytes of segments if none served requests of two sizes, up to the event `end`.

    A KV cache has another size with each token, whose segments serve the next one's too: it is
    replayed by itself, and in what the others leave of `left` where it has room there, else in
    LARGER times its peak: the allocator gives back what is cached before it takes more than there
    is.
    """
    grows = np.array([storage.category == "kv_cache" for _, storage, _ in log.events], bool)
    is_cache = grows[log.order]
    others = ~is_cache
    is_cache[end:] = False
    others[end:] = False
    size = without_sharing(log.sizes[others], log.streams[others])
    if is_cache.any():
        cache = (log.sizes[is_cache], log.keys[is_cache], log.streams[is_cache])
        taken = replay(*cache, None).reserved
        if size + taken > left:
            # Where the others leave too little, the card is a larger one, but not without an end.
            for limit in (int(left) - size, LARGER * int(cache[0].cumsum().max())):
                within = replay(*cache, limit)
                if within.failed is None:
                    taken = within.reserved
                    break
        size += taken
    return size


def _highest(allocated: int, loading: Bytes | None) -> int:
    """Return the bytes allocated at the highest moment, of loading too."""
    return max(allocated, loading.total if loading else 0)


def _context(history: History) -> Interval:
    """Return the bytes of the process outside the allocator."""
    return history.room.context if history.room else context_on()


def _reserved_and_process(
    history: History,
    allocated: int,
    loading: Bytes | None,
    unused: int,
) -> tuple[Interval, Interval, AllocatorError | None]:
    """Return reserved memory, that of the process, and what failed where the context is least.

    All without expandable segments. The log is replayed in what each end of the context leaves, and
    the replay is BEYOND. The upper end is what the log takes where no segment serves requests of
    two sizes, none of those that loading left is used again, and the context is at its high end:
    all published runs that say it lie below. What does not fit is shown as on a larger card.
    """
    room = history.room
    context = _context(history)
    highest = _highest(allocated, loading)
    usual = history.replayed
    assert usual is not None  # only a log of CUDA has reserved memory
    failed = None
    most = usual
    is_enough = False
    if room and usual.failed:
        # A run fails only if it does where the context is least.
        failed = history.replay(room.left("low")).failed
        # It reserved more than a card would let it: the allocator gives back what is cached before
        # it fails.
        if failed and usual.reserved > LARGER * highest:
            larger = history.replay(LARGER * highest)
            is_enough = larger.failed is None
            if is_enough:
                usual = larger
                most = larger
    elif room and usual.reserved > room.left("high"):
        most = history.replay(room.left("high"))
    value = max(int(BEYOND * usual.reserved), highest)
    high = max(int(BEYOND * most.reserved), highest)
    # each further step of a generation asks for longer tensors, once: it has no sizes of its own
    decoding = [start for name, start, _ in history.stretches if name == "decode"]
    left = room.left("high") - unused - LEAST_SPARE if room else math.inf
    apart = _apart(history.log, min(decoding, default=len(history.log)), left) + unused
    upper = max(high + high // 10, apart + LEAST_SPARE)
    if is_enough:
        upper = high + high // 10
    inside = Interval(highest, value, upper)
    around = inside + context
    if failed:
        # the least that would have done for the request
        around = dataclasses.replace(around, low=max(around.low, failed.needed + context.low))
    return inside, around, failed
