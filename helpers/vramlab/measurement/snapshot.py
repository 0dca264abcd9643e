"""Memory history: every block with the line of code that asked for it, read and drawn without uploading anything.

    with record() as memory:
        train_one_step()
    print(memory.snapshot.largest())    # what was alive at the peak, line by line
    print(memory.snapshot.left())       # what is still alive: after a whole step, nothing should be

On a GPU the history is PyTorch's own (`torch.cuda.memory._record_memory_history`). Without one the tensors' storages are
followed on the CPU, and the addresses and segments are those of the allocator's model: simulated. Both are the same
dictionaries (`torch.cuda.memory._snapshot`), so a file of one reads like a file of the other. Files are JSON. A pickle,
which is what `_dump_snapshot` writes, can run code when it is opened, so none is read here; on the machine that has it,
`json.dump(torch.cuda.memory._snapshot(), file)` writes the same as JSON.
"""

import json
import linecache
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..hardware.allocator import Allocator
from ..report.errors import VramLabError
from ..report.report import format_bytes

DEPTH = 60  # frames that are kept of a stack
LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}torch{os.sep}", f"lib{os.sep}python3", "<frozen", "<string>")


COURSE = f"{os.sep}vramlab_course{os.sep}"  # the course's own models count as its readers' code


class SnapshotError(VramLabError, ValueError):
    """Something that is no memory snapshot, or is one in a form that is not safe to open."""


@dataclass(frozen=True, order=True)
class Line:
    """A line of code: the file's name (without its folder), the number, the function, and the text where it is known.

    Cells of a notebook have no file; they are called "cell".
    """

    file: str
    number: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.text or self.function}".strip()


@dataclass(frozen=True)
class Block:
    """One allocation: bytes, the event that made it, the one that freed it (None: still alive), and its line."""

    size: int
    born: int
    freed: int | None
    line: Line


@dataclass(frozen=True)
class Group:
    """The blocks that one line asked for: their bytes and how many they are."""

    line: Line
    size: int
    count: int

    def __str__(self) -> str:
        return f"{format_bytes(self.size, 'MiB'):>12} in {self.count:>3} from {self.line}"


class Groups(tuple):
    """Groups, largest first; prints as a line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing"

    __repr__ = __str__

    def __getitem__(self, key):
        found = super().__getitem__(key)
        return Groups(found) if isinstance(key, slice) else found


class Snapshot:
    """A memory history.

    Args:
        content: what `torch.cuda.memory._snapshot()` returns (or JSON of it).
        device: which of its devices.
        source: "measured" for a GPU's own, "simulated" for one that `record` made without a GPU.
    Raises:
        SnapshotError: it is none, or its history is empty.
    """

    def __init__(self, content: Mapping[str, Any], device: int = 0, source: str = "measured"):
        try:
            self.events = list(content["device_traces"][device])
            segments = content.get("segments") or []
            self.segments = [segment for segment in segments if segment.get("device", device) == device]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise SnapshotError(f"this is no memory snapshot ({type(error).__name__}: {error}).") from error
        if not any(event.get("action") == "alloc" for event in self.events):
            raise SnapshotError("the snapshot has no history: record before what you want to see (record_history).")
        self.content, self.device, self.source = content, device, source

    @classmethod
    def load(cls, path: str | os.PathLike, device: int = 0, source: str = "measured") -> "Snapshot":
        """A snapshot from a JSON file. Raises SnapshotError for a pickle or anything else."""
        path = Path(path)
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")), device, source)
        except UnicodeDecodeError:
            why = "is no JSON; a pickle can run code when it is opened, so write it as JSON where it was made."
            raise SnapshotError(f"{path.name} {why}") from None
        except (OSError, ValueError) as error:
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"{path.name} cannot be read ({type(error).__name__}: {error}).") from error

    def save(self, path: str | os.PathLike) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.content, default=str), encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        """Every block that was asked for in the history, in order of birth."""
        made: dict[int, tuple[int, int, Line]] = {}
        blocks = []
        for i, event in enumerate(self.events, 1):
            if event["action"] == "alloc":
                made[event["addr"]] = (event["size"], i, user_line(event.get("frames") or ()))
            elif event["action"] == "free_completed" and event["addr"] in made:
                size, born, line = made.pop(event["addr"])
                blocks.append(Block(size, born, i, line))
        blocks += [Block(size, born, None, line) for size, born, line in made.values()]
        return sorted(blocks, key=lambda block: block.born)

    @cached_property
    def allocated(self) -> np.ndarray:
        """Bytes in blocks, before the first event and after each. What was alive before counts where segments tell."""
        return self._over_time({"alloc": 1, "free_completed": -1}, "allocated_size")

    @cached_property
    def reserved(self) -> np.ndarray:
        """Bytes in segments, before the first event and after each."""
        signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
        return self._over_time(signs, "total_size")

    def _over_time(self, signs: Mapping[str, int], field: str) -> np.ndarray:
        changes = [0, *(signs.get(event["action"], 0) * event.get("size", 0) for event in self.events)]
        line = np.cumsum(np.array(changes, dtype=np.int64))
        return line + max(self._now(field) - line[-1], 0)

    def _now(self, field: str) -> int:
        return sum(segment.get(field, 0) for segment in self.segments)

    @property
    def peak(self) -> int:
        """The event after which most is allocated."""
        return int(np.argmax(self.allocated))

    def alive(self, event: int | None = None) -> list[Block]:
        """The blocks that live after an event; at the peak when none is named."""
        at = self.peak if event is None else event
        return [block for block in self.blocks if block.born <= at and (block.freed is None or block.freed > at)]

    def largest(self, event: int | None = None, count: int = 6) -> Groups:
        """The lines that hold most after an event (at the peak when none is named)."""
        return grouped(self.alive(event))[:count]

    def left(self, count: int = 6) -> Groups:
        """The lines whose blocks were never freed: leaks, if the history ends where a step does."""
        return grouped(self.alive(len(self.events)))[:count]

    def spikes(self, share: float = 0.1, events: int | None = None) -> list[Block]:
        """Blocks of at least `share` of the peak that live for at most `events` events (a twentieth), largest first."""
        limit, least = events or max(len(self.events) // 20, 8), share * self.allocated[self.peak]
        short = [b for b in self.blocks if b.freed is not None and b.freed - b.born <= limit and b.size >= least]
        return sorted(short, key=lambda block: (-block.size, block.born))


def grouped(blocks: list[Block]) -> Groups:
    """Blocks by line, the largest sum first."""
    sums: dict[Line, list[int]] = {}
    for block in blocks:
        sums.setdefault(block.line, []).append(block.size)
    groups = [Group(line, sum(sizes), len(sizes)) for line, sizes in sums.items()]
    return Groups(sorted(groups, key=lambda group: (-group.size, group.line)))


def user_line(frames: Iterator[Mapping[str, Any]] | list | tuple) -> Line:
    """The innermost line of a stack (innermost first) that is nobody's library; the innermost of all if all are."""
    frames = list(frames)
    own = [frame for frame in frames if COURSE in frame["filename"] or not _of_a_library(frame["filename"])]
    if not frames:
        return Line("unknown", 0, "")
    frame = (own or frames)[0]
    name, number = frame["filename"], int(frame["line"])
    text = frame.get("text") or linecache.getline(name, number).strip()
    cell = "ipykernel" in name or name.startswith("<ipython")
    return Line("cell" if cell else Path(name).name, number, frame["name"], text)


def _of_a_library(filename: str) -> bool:
    return any(word in filename for word in LIBRARIES)


class record:
    """Record the memory history of what runs inside; afterwards it is `snapshot`.

    On the CPU, what was made before is not in it, as on a GPU.

    Args:
        device: "cuda" or "cpu"; CUDA where there is one when left out.
        max_entries: how many events PyTorch keeps on a GPU; the oldest go first.
    """

    def __init__(self, device: str | None = None, max_entries: int = 100_000):
        import torch

        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.max_entries = max_entries
        self.snapshot: Snapshot | None = None

    def __enter__(self) -> "record":
        import torch

        self.snapshot = None
        if self.device == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=self.max_entries, stacks="python")
        else:
            self._tracker = _tracker()
            self._tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            content, source = torch.cuda.memory._snapshot(), "measured"
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            self._tracker.__exit__(*error)
            content, source = _as_torch_tells_it(list(self._tracker.log), self._tracker.frames), "simulated"
        device = torch.cuda.current_device() if self.device == "cuda" else 0
        try:
            self.snapshot = Snapshot(content, device, source)
        except SnapshotError:
            if error[0] is None:  # else what went wrong inside is what there is to say
                raise


def _tracker():
    """A tracker that keeps the stack of every birth. (A function, so that importing this file needs no torch.)"""
    import torch

    from ..tracking.tracker import Tracker

    class Recorder(Tracker):
        def __init__(self):
            super().__init__("cpu")
            self.frames: dict[int, list[dict[str, Any]]] = {}
            self.older: dict[int, weakref.ref] = {}  # storages that were there before

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    handle = tensor.untyped_storage()
                    key = handle._cdata
                    if key not in self.live and key not in self.older:
                        self.older[key] = weakref.ref(handle, lambda _, key=key: self.older.pop(key, None))
            return super().__torch_dispatch__(func, types, args, kwargs)

        def _born(self, tensor, op, where=""):
            storage = None if tensor.untyped_storage()._cdata in self.older else super()._born(tensor, op, where)
            if storage:
                self.frames[id(storage)] = _stack()
            return storage

    return Recorder()


def _stack() -> list[dict[str, Any]]:
    """The frames of the running code, innermost first, without the tracker's own."""
    frame, frames = sys._getframe(1), []
    while frame is not None and len(frames) < DEPTH:
        code = frame.f_code
        if os.path.basename(code.co_filename) not in ("snapshot.py", "tracker.py"):
            frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return frames


def _as_torch_tells_it(log: list, frames: Mapping[int, list]) -> dict[str, Any]:
    """A tracker's log as `torch.cuda.memory._snapshot()` would tell it, addresses and segments by the model."""
    allocator, blocks, events = Allocator(), {}, []
    for size, storage, _ in log:
        if size > 0:
            before = allocator.reserved
            block = blocks[id(storage)] = allocator.malloc(storage.asked)
            if allocator.reserved > before:
                more = {"addr": block.address, "size": allocator.reserved - before, "frames": frames[id(storage)]}
                events.append({"action": "segment_alloc", "stream": 0, **more})
            events.append({"action": "alloc", "addr": block.address, "size": block.size, "stream": 0})
            events[-1]["frames"] = frames[id(storage)]
        elif id(storage) in blocks:
            block = blocks.pop(id(storage))
            gone = {"addr": block.address, "size": block.size, "stream": 0, "frames": []}
            events += [{"action": "free_requested", **gone}, {"action": "free_completed", **gone}]
            allocator.free(block)
    return {"device_traces": [events], "segments": []}
