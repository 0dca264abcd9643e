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

from ..report.errors import VramLabError
from ..report.files import read_bytes, read_text
from ..report.report import format_bytes, unit_for
from ..report.text import one_line

TORCH, PYTHON, INSTALLED = f"{os.sep}torch{os.sep}", f"lib{os.sep}python3", ("site-packages", "dist-packages")
OURS = str(Path(__file__).parents[1]) + os.sep
MOST_CODE = 4 * 1024**2  # bytes of a Python file that are read to show a line
MOST_SNAPSHOT = 2 * 1024**3  # bytes of a snapshot: 100,000 events with their lines are some 100 MiB
MOST_LETTERS = 200  # of a name or a line that is shown
BLOCKS = {"alloc": 1, "free_completed": -1}
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class SnapshotError(VramLabError, ValueError):
    """Something that is no memory snapshot, or one without a history."""


class Line(NamedTuple):
    """A line of code: file name without folder ("cell" in a notebook), number, function, and text where known."""

    file: str
    number: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.text or self.function}".strip() if self.number else self.file


BEFORE = Line("before the history began", 0, "")
UNKNOWN = Line("no line of Python, as in autograd's own thread", 0, "")


class Block(NamedTuple):
    """One allocation: bytes, the index of the event that made it and of the one that freed it (or None), and its line."""

    size: int
    born: int
    freed: int | None
    line: Line


class Group(NamedTuple):
    """The blocks that one line asked for: their bytes and their number."""

    line: Line
    size: int
    count: int

    def __str__(self) -> str:
        return f"{format_bytes(self.size, 'MiB'):>12} in {self.count:>3} from {self.line}"


class Groups(tuple):
    """Groups, largest first."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing"


class Snapshot:
    """A memory history, and the segments at its end; `allocated` and `reserved` are bytes before the first event and
    after each.

    Args:
        content: what `torch.cuda.memory._snapshot()` returns.
        device: which of its devices; None: the one with the longest history.
    Raises:
        SnapshotError: its history is empty.
    """

    def __init__(self, content: Mapping[str, Any], device: int | None = None):
        traces = content["device_traces"]
        device = max(range(len(traces)), key=lambda i: len(traces[i])) if device is None else device
        self.events = list(traces[device])
        self.segments = [segment for segment in content.get("segments", ()) if segment["device"] == device]
        if not any(event["action"] == "alloc" for event in self.events):
            raise SnapshotError("the snapshot has no history: record before what you want to see (record_history).")
        self.allocated: Sequence[int] = self._over_time(BLOCKS, "allocated_size")
        self.reserved: Sequence[int] = self._over_time(SEGMENTS, "total_size")

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks that were asked for in the history, and those of the segments that are older, in order of birth."""
        made: dict[int, Block] = {}  # those alive, by address
        blocks = []
        for i, event in enumerate(self.events, 1):
            if event["action"] == "alloc":
                made[event["addr"]] = Block(event["size"], i, None, user_line(event.get("frames") or ()))
            elif event["action"] == "free_completed" and event["addr"] in made:
                blocks.append(made.pop(event["addr"])._replace(freed=i))
        for segment in self.segments:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated" and block["address"] not in made:
                    line = user_line(block["frames"]) if block.get("frames") else BEFORE
                    made[block["address"]] = Block(block["size"], 0, None, line)
        return sorted([*blocks, *made.values()], key=lambda block: block.born)

    def _over_time(self, signs: Mapping[str, int], at_the_end: str) -> list[int]:
        """Bytes before the first event and after each; with what was there before, if segments show it."""
        changes = (signs.get(event["action"], 0) * event.get("size", 0) for event in self.events)
        sums = list(accumulate(changes, initial=0))
        before = max(sum(segment[at_the_end] for segment in self.segments) - sums[-1], 0)
        return [size + before for size in sums]

    @cached_property
    def peak(self) -> int:
        """Index of the event after which most is allocated."""
        return max(range(len(self.allocated)), key=self.allocated.__getitem__)

    @property
    def scattered(self) -> int:
        """Bytes of free blocks, at the end, in segments that also hold living ones."""
        used = (segment for segment in self.segments if segment["allocated_size"])
        return sum(segment["total_size"] - segment["allocated_size"] for segment in used)

    def alive(self, event: int | None = None) -> list[Block]:
        """Return the blocks that are alive after an event; None: at the peak."""
        at = self.peak if event is None else event
        return [block for block in self.blocks if block.born <= at and (block.freed is None or block.freed > at)]

    def largest(self, event: int | None = None, count: int = 6) -> Groups:
        """Return the `count` lines that hold most after an event; None: at the peak."""
        sums: dict[Line, list[int]] = {}
        for block in self.alive(event):
            sums.setdefault(block.line, []).append(block.size)
        groups = [Group(line, sum(sizes), len(sizes)) for line, sizes in sums.items()]
        return Groups(sorted(groups, key=lambda group: (-group.size, group.line))[:count])

    def __str__(self) -> str:
        """What was alive at the peak, by line; what is reserved beyond it, and whether that is fragmentation."""
        end, sizes = len(self.events), (self.allocated, self.reserved)
        unit = unit_for(max(map(max, sizes)))
        most, there, held, kept = (format_bytes(n[at], unit) for at in (self.peak, end) for n in sizes)
        whole = self.reserved[end] - self.allocated[end] - self.scattered
        free = [format_bytes(n, unit) for n in (self.scattered, whole)]
        lines = [f"peak: {most} allocated, {there} reserved, after event {self.peak} of {end}; alive there, by line:"]
        lines.append(str(self.largest()))
        if self.segments:
            lines.append(f"at the end: {held} allocated, {kept} reserved")
            lines.append(f"fragmentation: {free[0]} free among living blocks; {free[1]} in segments that are all free")
        for event in self.events:
            if event["action"] == "oom":
                asked, free = (format_bytes(event.get(name, 0), unit) for name in ("size", "device_free"))
                lines.append(f"out of memory: {asked} asked for, {free} free on the device")
        return "\n".join(lines)


def user_line(frames: Sequence[Mapping[str, Any]]) -> Line:
    """Return the innermost line of a stack (innermost first) outside of torch and Python's own library, or of all;
    UNKNOWN where there is none, or none but those of a watch."""
    ours = any(frame["filename"].startswith(OURS) for frame in frames)
    first = None if ours or not frames else frames[0]
    frame = next((frame for frame in frames if is_users(frame["filename"])), first)
    if frame is None:
        return UNKNOWN
    name, number = frame["filename"], int(frame["line"])
    cell = "ipykernel" in name or name.startswith("<ipython")
    known = linecache.getlines(name) if name in linecache.cache else _lines(name)  # a notebook's cells are there
    text = frame.get("text") or "".join(known[number - 1 : number])
    words = ("cell" if cell else Path(name).name, frame["name"], text)
    file, function, text = (one_line(word)[:MOST_LETTERS] for word in words)
    return Line(file, number, function, text)


@lru_cache
def _lines(name: str) -> list[str]:
    """Return the lines of a Python file, none where it is no file that can be read: a snapshot may name anything."""
    try:
        return read_text(name, MOST_CODE).splitlines() if name.endswith(".py") else []
    except (OSError, ValueError):
        return []


def is_users(name: str) -> bool:
    """Whether a frame is Python code, and neither torch's nor ours nor of Python's own library."""
    python = PYTHON in name and not any(word in name for word in INSTALLED)
    outside = TORCH in name or python or name.startswith(("<frozen", "<string", OURS))
    return name.endswith((".py", ">")) and not outside


class PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, text and numbers, and runs nothing: a snapshot has no classes or functions."""

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(f"the file names {module}.{name}, and a memory snapshot names no code: it was not read.")


def read_snapshot(path: str | os.PathLike) -> Snapshot:
    """Return the snapshot in a `.pickle` of `_dump_snapshot`; raise SnapshotError for anything else."""
    try:
        found = Snapshot(PlainUnpickler(io.BytesIO(read_bytes(path, MOST_SNAPSHOT))).load())
        str(found)  # what is wrong in an event or a frame shows here, and not later
        return found
    except SnapshotError:
        raise
    except Exception as error:  # whatever broken bytes make of it
        raise SnapshotError(
            f"{path} is no memory snapshot ({type(error).__name__}: {str(error).rstrip('.')})."
        ) from error
