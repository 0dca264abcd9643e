"""A tracker's events in an order, which may repeat them for layers that were not run."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .tracker import Event, Storage


class Log:
    """A tracker's events in an `order` that may repeat an event for other layers.

    `keys` is a number for each storage, `shifts` says how many groups of layers further up an
    event is, `renamed` gives a module's name there. Without an order the events are as they came.
    """

    def __init__(
        self,
        events: list[Event],
        order: np.ndarray | None = None,
        keys: np.ndarray | None = None,
        shifts: np.ndarray | None = None,
        renamed: Callable[[str, int], str] | None = None,
    ) -> None:
        self.events = events
        self.renamed = renamed
        if order is None or keys is None or shifts is None:
            order = np.arange(len(events))
            keys = _numbered([storage for _, storage, _ in events])
            shifts = np.zeros(len(events), int)
        self.order = order
        self.keys = keys
        self.shifts = shifts
        rows = [(size, storage.asked, storage.stream) for size, storage, _ in events]
        columns = np.array(rows, np.int64).reshape(-1, 3)
        # copied, so that each column is contiguous for what is summed over it
        self.sizes, self.asked, self.streams = columns[order].T.copy()

    def storage(self, at: int) -> Storage:
        """Return the storage of event `at`, with the name of the layer that it stands for."""
        _, storage, _ = self.events[self.order[at]]
        if self.renamed is None:
            return storage
        return storage.copy(self.renamed(storage.where, int(self.shifts[at])))

    def batch_at(self, at: int, batches: Sequence[int], count: int) -> str:
        """Return in which of an evaluation's `count` batches event `at` is; "" if in none.

        The Trainer joins the outputs of all batches (`EvalLoopContainer.add` of transformers).
        """
        number = sum(start <= at for start in batches)
        if not number:
            return ""
        storage = self.storage(at)
        words = ""
        if storage.op == "cat" and not storage.where:
            words = " joining all outputs until then, of which the old copy is still there,"
        return f"evaluation batch {number:,} of {count:,},{words}"

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Event]:
        alive: dict[int, Storage] = {}
        # As Python's integers: indexing arrays one by one is slow over millions of events.
        pairs = zip(self.order.tolist(), self.keys.tolist(), strict=True)
        for at, (event, key) in enumerate(pairs):
            size, _, op = self.events[event]
            # a free is of the very object that was born, under the name that it had then
            if size > 0:
                alive[key] = self.storage(at)
            yield size, alive[key], op


def _numbered(storages: list[Storage]) -> np.ndarray:
    """Return a number for each storage, in the order of first appearance."""
    numbers: dict[Storage, int] = {}
    for storage in storages:
        numbers.setdefault(storage, len(numbers))
    return np.array([numbers[storage] for storage in storages], int)
