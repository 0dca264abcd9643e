"""A memory snapshot of PyTorch: every block with the line of code that asked for it.

torch.cuda.memory._record_memory_history()           # before what you want to see
torch.cuda.memory._dump_snapshot("memory.pickle")    # after it, or when memory ran out
print(read_snapshot("memory.pickle"))
"""

import io
import linecache
import os
import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import VramLabError
from ..base.files import read_bytes, read_text
from ..base.text import one_line
from ..report.report import format_bytes, unit_for

TORCH = f"{os.sep}torch{os.sep}"
PYTHON = f"lib{os.sep}python3"
INSTALLED = ("site-packages", "dist-packages")
OURS = str(Path(__file__).parents[1]) + os.sep
MOST_CODE = 4 * 1024**2  # bytes of a Python file that are read to show a line
MOST_SNAPSHOT = 2 * 1024**3  # bytes of a snapshot: 100,000 events with their lines are some 100 MiB
MOST_LETTERS = 200  # of a name or a line that is shown
BLOCKS = {"alloc": 1, "free_completed": -1}
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class SnapshotError(VramLabError, ValueError):
    """Something that is no memory snapshot, or one without a history."""


class Line(NamedTuple):
    """A line of code: file, number, function, and text where known.

    The file's name is without folder, "cell" in a notebook.
    """

    file: str
    number: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        if not self.number:
            return self.file
        return f"{self.file}:{self.number} {self.text or self.function}".strip()


BEFORE = Line("before the history began", 0, "")
UNKNOWN = Line("no line of Python, as in autograd's own thread", 0, "")


class Block(NamedTuple):
    """One allocation: bytes, when it was made and freed, and the line that asked for it."""

    size: int
    born: int  # the index of the event that made it
    freed: int | None  # the index of the one that freed it, None if it is alive
    line: Line

    def is_alive(self, event: int) -> bool:
        """Tell whether it is there after an event."""
        if self.born > event:
            return False
        return self.freed is None or self.freed > event


class Group(NamedTuple):
    """The blocks that one line asked for: their bytes and their number."""

    line: Line
    size: int
    count: int  # type: ignore[assignment]  # in place of the method of tuples

    def __str__(self) -> str:
        return f"{format_bytes(self.size, 'MiB'):>12} in {self.count:>3} from {self.line}"


class Groups(tuple):
    """Groups, largest first."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing"


class Snapshot:
    """A memory history, and the segments at its end.

    `allocated` and `reserved` are bytes before the first event and after each.

    Args:
        content: what `torch.cuda.memory._snapshot()` returns.
        device: which of its devices; None: the one with the longest history.
    Raises:
        SnapshotError: its history is empty.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        device: int | None = None,
    ) -> None:
        traces = content["device_traces"]
        if device is None:
            device = max(range(len(traces)), key=lambda number: len(traces[number]))
        self.events = list(traces[device])
        every = content.get("segments", ())
        self.segments = [segment for segment in every if segment["device"] == device]
        if not any(event["action"] == "alloc" for event in self.events):
            rest = "record before what you want to see (record_history)"
            raise SnapshotError(f"the snapshot has no history: {rest}.")
        self.allocated: Sequence[int] = self._over_time(BLOCKS, "allocated_size")
        self.reserved: Sequence[int] = self._over_time(SEGMENTS, "total_size")

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks that were asked for in the history, in order of birth.

        Older blocks of the segments come first.
        """
        # An address is used again once its block is freed, so blocks move from this table to the
        # list then.
        living: dict[int, Block] = {}  # by address
        freed = []
        for number, event in enumerate(self.events, 1):
            if event["action"] == "alloc":
                line = user_line(event.get("frames") or ())
                living[event["addr"]] = Block(
                    event["size"],
                    number,
                    None,
                    line,
                )
            elif event["action"] == "free_completed" and event["addr"] in living:
                block = living.pop(event["addr"])
                freed.append(block._replace(freed=number))
        self._add_older(living)
        return sorted([*freed, *living.values()], key=lambda block: block.born)

    def _add_older(self, living: dict[int, Block]) -> None:
        """Add the blocks of the segments that were there before the history began."""
        for segment in self.segments:
            for block in segment["blocks"]:
                if block["state"] != "active_allocated" or block["address"] in living:
                    continue
                frames = block.get("frames")
                line = user_line(frames) if frames else BEFORE
                living[block["address"]] = Block(
                    block["size"],
                    0,
                    None,
                    line,
                )

    def _over_time(
        self,
        signs: Mapping[str, int],
        at_the_end: str,
    ) -> list[int]:
        """Return the bytes before the first event and after each.

        What was there before the history counts, if segments show it.
        """
        changes = []
        for event in self.events:
            changes.append(signs.get(event["action"], 0) * event.get("size", 0))
        sums = list(accumulate(changes, initial=0))
        # What the segments hold at the end and the events do not explain is older than these.
        end = sum(segment[at_the_end] for segment in self.segments)
        before = max(end - sums[-1], 0)
        return [size + before for size in sums]

    @cached_property
    def peak(self) -> int:
        """Index of the event after which most is allocated."""
        return max(range(len(self.allocated)), key=self.allocated.__getitem__)

    @property
    def scattered(self) -> int:
        """Bytes of free blocks, at the end, in segments that also hold living ones."""
        scattered = 0
        for segment in self.segments:
            if segment["allocated_size"]:
                scattered += segment["total_size"] - segment["allocated_size"]
        return scattered

    def alive(self, event: int | None = None) -> list[Block]:
        """Return the blocks that are alive after an event; None: at the peak."""
        number = self.peak if event is None else event
        return [block for block in self.blocks if block.is_alive(number)]

    def largest(
        self,
        event: int | None = None,
        count: int = 6,
    ) -> Groups:
        """Return the `count` lines that hold most after an event; None: at the peak."""
        sizes_of: dict[Line, list[int]] = {}
        for block in self.alive(event):
            sizes_of.setdefault(block.line, []).append(block.size)
        groups = [Group(line, sum(sizes), len(sizes)) for line, sizes in sizes_of.items()]
        groups.sort(key=lambda group: (-group.size, group.line))
        return Groups(groups[:count])

    def __str__(self) -> str:
        """Return what was alive at the peak, by line, and what is reserved beyond it."""
        unit = unit_for(max(max(self.allocated), max(self.reserved)))

        def shown(size: int) -> str:
            return format_bytes(size, unit)

        end = len(self.events)
        sizes = f"{shown(self.allocated[self.peak])} allocated, {shown(self.reserved[self.peak])}"
        when = f"after event {self.peak} of {end}"
        lines = [f"peak: {sizes} reserved, {when}; alive there, by line:", str(self.largest())]
        if self.segments:
            allocated = self.allocated[end]
            reserved = self.reserved[end]
            whole = reserved - allocated - self.scattered
            lines.append(f"at the end: {shown(allocated)} allocated, {shown(reserved)} reserved")
            among = f"{shown(self.scattered)} free among living blocks"
            lines.append(f"fragmentation: {among}; {shown(whole)} in segments that are all free")
        for event in self.events:
            if event["action"] == "oom":
                asked = shown(event.get("size", 0))
                free = shown(event.get("device_free", 0))
                lines.append(f"out of memory: {asked} asked for, {free} free on the device")
        return "\n".join(lines)


def user_line(frames: Sequence[Mapping[str, Any]]) -> Line:
    """Return the innermost line of a stack (innermost first) that is the user's.

    That is outside of torch and Python's own library, or else the innermost of all; UNKNOWN where
    there is none, or none but those of a watch.
    """
    users = (frame for frame in frames if is_users(frame["filename"]))
    frame = next(users, None)
    if frame is None:
        is_ours = any(frame["filename"].startswith(OURS) for frame in frames)
        if is_ours or not frames:
            return UNKNOWN
        frame = frames[0]
    name = frame["filename"]
    number = int(frame["line"])
    is_cell = "ipykernel" in name or name.startswith("<ipython")
    text = frame.get("text")  # the source's line, where a snapshot has it; torch's own have not
    if not text:
        text = "".join(source_lines(name)[number - 1 : number])
    return Line(
        file=_shortened("cell" if is_cell else Path(name).name),
        number=number,
        function=_shortened(frame["name"]),
        text=_shortened(text),
    )


def _shortened(text: str) -> str:
    """Return text that may be shown: in one line, and no longer than one reads."""
    return one_line(text)[:MOST_LETTERS]


def source_lines(name: str) -> list[str]:
    """Return the lines of a Python file or a notebook's cell, which is in the cache alone."""
    return linecache.getlines(name) if name in linecache.cache else _lines(name)


@lru_cache
def _lines(name: str) -> list[str]:
    """Return the lines of a Python file.

    There are none where no such file can be read: a snapshot may name anything.
    """
    if not name.endswith(".py"):
        return []
    try:
        return read_text(name, MOST_CODE).splitlines()
    except (OSError, ValueError):
        return []


def is_users(name: str) -> bool:
    """Tell whether a frame is Python code, and neither torch's nor ours nor Python's own."""
    is_installed = any(word in name for word in INSTALLED)
    is_pythons = PYTHON in name and not is_installed
    is_outside = TORCH in name or name.startswith(("<frozen", "<string", OURS))
    return name.endswith((".py", ">")) and not is_pythons and not is_outside


class PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, text and numbers, and runs nothing.

    A snapshot has no classes or functions.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Refuse whatever the file names."""
        rest = "and a memory snapshot names no code: it was not read"
        raise SnapshotError(f"the file names {module}.{name}, {rest}.")


def read_snapshot(path: str | os.PathLike) -> Snapshot:
    """Return the snapshot in a `.pickle` of `_dump_snapshot`; raise SnapshotError for all else."""
    try:
        file = io.BytesIO(read_bytes(path, MOST_SNAPSHOT))
        snapshot = Snapshot(PlainUnpickler(file).load())
        str(snapshot)  # what is wrong in an event or a frame shows here, and not later
        return snapshot
    except SnapshotError:
        raise
    except Exception as error:  # whatever broken bytes make of it
        why = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise SnapshotError(f"{path} is no memory snapshot ({why}).") from error
