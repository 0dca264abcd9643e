"""Windows of a tower's attention that are alike, run as one kernel and written down one by one.

Qwen2.5-VL attends within windows of the image, each in a call of its own: a photograph's layer has
a thousand. Those of one length are here the batch of one call. Its log is that of one window, with
`MARK` in the module's name, until all else is repeated (`deepen.py`); then `unfold` writes it for
each.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ..recipe.images import windows_of
from ..recipe.recipe import Recipe
from ..tracking.history import Log
from ..tracking.tracker import Event, Mark, Tracker
from .cuda import CudaKernels, takes_windows
from .repetition import NotRegular

MARK = re.compile(r"\.(\d+) windows of \d+")
LEAST = 3  # so many windows are run as one: the state of a kernel's generator has two numbers
Attend = Callable[..., torch.Tensor]


@contextlib.contextmanager
def joined_windows(tracker: Tracker, kernels: CudaKernels, recipe: Recipe) -> Iterator[None]:
    """While entered, run windows that are alike as one, where the model of `recipe` has any.

    `tracker` is finished then. Raises NotRegular.
    """
    tower = windows_of(recipe.shape)
    if tower is None or recipe.attn_implementation != "sdpa":
        yield
        return
    windows = Windows(tracker, tower)
    kernels.split = windows.split
    yield
    windows.close()


class Windows:
    """Joins the windows that the modules of a tower attend to, while `tracker` follows them.

    The names of those modules end with `tower`.
    """

    def __init__(self, tracker: Tracker, tower: str) -> None:
        self.tracker = tracker
        self.tower = tower
        self.joined = 0
        self.attended = 0

    def split(
        self,
        split: Callable[..., tuple[torch.Tensor, ...]],
        tensor: torch.Tensor,
        sizes: object,
        dim: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        """Return what `torch.split` does, with the windows of one length as one."""
        is_tower = self.tracker.where_now().endswith(self.tower)
        if not is_tower or not isinstance(sizes, list) or dim != 2 or not takes_windows(tensor):
            return split(tensor, sizes, dim)
        runs = []
        # tensors have no content, so that all of a length may stand in a row
        for length, count in Counter(sizes).items():
            if count >= LEAST:
                runs.append((count, length))
            else:
                runs += [(1, length)] * count
        pieces = split(tensor, [count * length for count, length in runs], dim)
        for piece, (count, length) in zip(pieces, runs, strict=True):
            if count > 1:
                self.joined += 1
                piece.windows = Joined(self, count, length)  # type: ignore[attr-defined]
        return pieces

    def close(self) -> None:
        """Give what was made of joined windows the sizes of one. Raises NotRegular."""
        if self.joined != 3 * self.attended:  # queries, keys and values
            raise NotRegular("windows were joined that no kernel attended to")
        tracker = self.tracker
        events: list[Event] = []
        divided = set()
        for size, storage, op in tracker.log:
            count = windows_in(storage.where)
            # scratch of a kernel has no dtype; scalars are the kernel's, and not the windows'
            is_batch = storage.shape[:1] == (count,) or not storage.dtype
            if count > 1 and is_batch and storage not in divided:
                divided.add(storage)
                storage.asked //= count
                storage.size = -(-storage.asked // tracker.round_to) * tracker.round_to
                storage.shape = (1, *storage.shape[1:]) if storage.shape else ()
            events.append((storage.size if size > 0 else -storage.size, storage, op))
        tracker.log = events


class Joined(NamedTuple):
    """So many windows of one length, which a piece of queries is."""

    windows: Windows
    times: int
    length: int

    def attend(
        self,
        kernel: Attend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *options: object,
    ) -> torch.Tensor:
        """Return the windows' results in a row: (1, heads, all positions, channels)."""
        tracker = self.windows.tracker
        self.windows.attended += 1
        where = f"{tracker.where_now()}.{self.times} windows of {self.length}"
        with tracker.inside(where):
            batches = [self._batch(tensor) for tensor in (query, key, value)]
            out = kernel(*batches, *options)
            _, heads, _, channels = out.shape
            return out.permute(1, 0, 2, 3).reshape(1, heads, -1, channels)

    def _batch(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.unflatten(2, (self.times, self.length))
        return rows.squeeze(0).permute(1, 0, 2, 3)


def windows_in(where: str) -> int:
    """Return how many windows the events of such a name stand for."""
    found = MARK.search(where)
    return int(found[1]) if found else 1


class Run(NamedTuple):
    """Events in a row that are of the same windows, or of none."""

    first: int
    end: int  # one past the last event
    times: int  # windows
    once: np.ndarray  # which of the events are no window's: what the last one frees

    def written(self, log: Log) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each window's number, in the order in which they come, and its events."""
        events = np.arange(self.first, self.end)
        born = events[log.sizes[events] > 0]
        freed = events[(log.sizes[events] < 0) & ~self.once]
        # in backward, which frees what forward has kept, the last window comes first
        is_backward = len(born) > 0 and not np.isin(log.keys[freed], log.keys[born]).all()
        numbers = list(range(self.times))
        if is_backward:
            numbers.reverse()
        *others, last = numbers
        for number in others:
            yield number, events[~self.once]
        yield last, events


def unfold(log: Log | list[Event], marks: list[Mark]) -> tuple[Log, list[Mark]]:
    """Return the log and marks in which each window has events of its own."""
    log = log if isinstance(log, Log) else Log(log)
    counts = {storage.where: windows_in(storage.where) for _, storage, _ in log.events}
    most = max(counts.values(), default=1)
    if most == 1:
        return log, marks
    orders = []
    windows = []
    for run in _runs(log, counts, marks):
        for number, events in run.written(log):
            orders.append(events)
            windows.append(np.where(run.once[events - run.first], 0, number))
    order = np.concatenate(orders)
    before = log.renamed

    def renamed(name: str, groups: int) -> str:
        return MARK.sub("", before(name, groups) if before else name)

    longer = Log(
        log.events,
        log.order[order],
        log.keys[order] * most + np.concatenate(windows),
        log.shifts[order],
        renamed,
    )
    # an event's place is that of its first window
    reached = np.maximum.accumulate(order)
    return longer, [(int(np.searchsorted(reached, at)), name) for at, name in marks]


def _runs(log: Log, counts: dict[str, int], marks: list[Mark]) -> Iterator[Run]:
    """Yield the runs of a log in their order."""
    names = [storage.where for _, storage, _ in log.events]
    places = {name: place for place, name in enumerate(counts)}
    of_event = np.array([places[name] if counts[name] > 1 else -1 for name in names], int)
    place = of_event[log.order]
    many = np.flatnonzero(place >= 0)
    # what windows free together with what is no window's is one run
    bridged = place.copy()
    for last, following in pairwise(many):
        between = slice(last + 1, following)
        if place[last] == place[following] and (log.sizes[between] < 0).all():
            bridged[between] = place[last]
    cuts = np.flatnonzero(np.diff(bridged)) + 1
    ends = [position for position, _ in marks if 0 < position < len(log)]
    edges = np.unique(np.concatenate([[0], cuts, ends, [len(log)]]).astype(int))
    widths = list(counts.values())
    for first, end in pairwise(edges):
        count = widths[bridged[first]] if bridged[first] >= 0 else 1
        yield Run(first, end, count, place[first:end] != bridged[first])
