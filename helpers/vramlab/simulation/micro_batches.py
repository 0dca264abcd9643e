"""Make the log of a step of few micro-batches that of many, to the byte (`deepen.py`)."""

from collections.abc import Iterable

from ..tracking.history import Log
from ..tracking.tracker import Event, Mark, Storage
from .deepen import Place, Writer
from .repetition import NotRegular


def repeat(log: Iterable[Event], marks: list[Mark], count: int) -> tuple[Log, list[Mark]]:
    """Return the log and marks of steps of `count` micro-batches.

    They are made from those of a first step of two and further steps of one. Raises NotRegular
    where the second frees or leaves other things than a third would.
    """
    return _Repeater(log, marks, count).repeated()


class _Repeater(Writer):
    """Writes a first step's second micro-batch again, for all that are missing."""

    def __init__(self, log: Iterable[Event], marks: list[Mark], count: int) -> None:
        # The log has a first and a second micro-batch; the second, group 1, stands for all that
        # follow.
        super().__init__(list(log), 1, count - 2)
        self.count = count
        self.names = ["load", *(name for _, name in marks)]
        self.cuts = [0, *(position for position, _ in marks), len(self.events)]
        self.marks: list[Mark] = []
        forwards = [phase for phase, name in enumerate(self.names) if name == "forward"]
        # The first step's two micro-batches, then one of each further step.
        first, self.second, *others = forwards
        self.others = [first, *others]
        self._note_counterparts()

    def _micro_batch(self, forward: int) -> list[Event]:
        """Return the events of a micro-batch: those of the phase `forward` and its backward."""
        return self.events[self.cuts[forward] : self.cuts[forward + 2]]

    def _note_counterparts(self) -> None:
        """Note the places of what the second micro-batch makes, and of what others leave for it."""
        repeated = self._micro_batch(self.second)
        for row, (size, storage, _) in enumerate(repeated):
            if size > 0:
                self.places[storage] = Place(1, row)
        left = _left(repeated)
        kinds = [_kind(storage) for storage in left]
        for forward in self.others:
            left_alike = []
            for storage in _left(self._micro_batch(forward)):
                if _kind(storage) in kinds:
                    left_alike.append(storage)
            if [_kind(storage) for storage in left_alike] != kinds:
                raise NotRegular("a micro-batch leaves other tensors than the next one frees")
            for storage, counterpart in zip(left_alike, left, strict=True):
                self.places[storage] = Place(0, self.places[counterpart].row)

    def repeated(self) -> tuple[Log, list[Mark]]:
        """Return the longer log and its marks."""
        for phase in range(len(self.names)):
            if phase not in (self.second, self.second + 1):
                self._write_phase(phase, 2, self.more)
            # a micro-batch has just ended
            if phase - 1 in self.others:
                for shift in range(self.count - 1):
                    self._write_phase(self.second, 1, shift)
                    self._write_phase(self.second + 1, 1, shift)
        log, _ = self.longer(lambda name, groups: name)
        return log, self.marks[1:]

    def _write_phase(self, phase: int, at: int, shift: int) -> None:
        self.marks.append((self.length, self.names[phase]))
        self.write(self.cuts[phase], self.cuts[phase + 1], at, [shift])


def _left(events: list[Event]) -> list[Storage]:
    """Return the storages that `events` make and do not free."""
    freed = {storage for size, storage, _ in events if size < 0}
    return [storage for size, storage, _ in events if size > 0 and storage not in freed]


def _kind(storage: Storage) -> tuple:
    """Return what is equal of counterparts."""
    return (
        storage.asked,
        storage.op,
        storage.where,
        storage.shape,
        storage.dtype,
        storage.stream,
    )
