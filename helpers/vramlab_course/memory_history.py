"""Memory history: every block with the line of code that asked for it.

    with record() as memory:
        train_one_step()
    print(memory.snapshot.largest())    # what was alive at the peak, line by line
    print(memory.snapshot.left())       # what is still alive: after a whole step, nothing should be

On a GPU the history is PyTorch's own (`torch.cuda.memory._record_memory_history`). Without one the tensors' storages are
followed on the CPU, and addresses and segments are simulated by the model of the allocator. Both are dictionaries of the
same form (`torch.cuda.memory._snapshot`).
"""

import contextlib
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from vramlab.hardware.allocator import Allocator
from vramlab.report.errors import VramLabError
from vramlab.report.report import format_bytes

DEPTH = 60  # frames that are kept of a stack
LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}torch{os.sep}", f"lib{os.sep}python3", "<frozen", "<string>")
COURSE = f"{os.sep}vramlab_course{os.sep}"  # the course's own models count as its readers' code


class SnapshotError(VramLabError, ValueError):
    """Something that is no memory snapshot, or one without a history."""


@dataclass(frozen=True, order=True)
class Line:
    """A line of code: file name without folder ("cell" in a notebook), number, function, and text where known."""

    file: str
    number: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.text or self.function}".strip()


@dataclass(frozen=True)
class Block:
    """One allocation: bytes, the index of the event that made it and of the one that freed it (or None), and its line."""

    size: int
    born: int
    freed: int | None
    line: Line


@dataclass(frozen=True)
class Group:
    """The blocks that one line asked for: their bytes and their number."""

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


class Snapshot:
    """A memory history.

    Args:
        content: what `torch.cuda.memory._snapshot()` returns, or the same read from JSON.
        device: which of its devices.
        source: "measured" for a GPU's own, "simulated" for one that `record` made without a GPU.
    Raises:
        SnapshotError: it is none, or its history is empty.
    """

    def __init__(self, content: Mapping[str, Any], device: int = 0, source: str = "measured"):
        try:
            self.events = list(content["device_traces"][device])
            segments = [each for each in content.get("segments") or [] if each.get("device", device) == device]
            allocations = [event for event in self.events if event["action"] == "alloc"]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise SnapshotError(f"this is no memory snapshot ({type(error).__name__}: {error}).") from error
        if not allocations:
            raise SnapshotError("the snapshot has no history: record before what you want to see (record_history).")
        self.source = source
        self._at_the_end = sum(segment.get("allocated_size", 0) for segment in segments)

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks that were asked for in the history, in order of birth."""
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
        """Bytes in blocks, before the first event and after each; with what was alive before, if segments show it."""
        signs = {"alloc": 1, "free_completed": -1}
        changes = [0, *(signs.get(event["action"], 0) * event.get("size", 0) for event in self.events)]
        sums = np.cumsum(np.array(changes, dtype=np.int64))
        return sums + max(self._at_the_end - sums[-1], 0)

    @property
    def peak(self) -> int:
        """Index of the event after which most is allocated."""
        return int(np.argmax(self.allocated))

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

    def left(self, count: int = 6) -> Groups:
        """Return the lines whose blocks were never freed: leaks, if the history ends where a step does."""
        return self.largest(len(self.events), count)

    def spikes(self, share: float = 0.1, events: int | None = None) -> list[Block]:
        """Return blocks of at least `share` of the peak that live for at most `events` (a twentieth), largest first."""
        limit, least = events or max(len(self.events) // 20, 8), share * self.allocated[self.peak]
        short = [b for b in self.blocks if b.freed is not None and b.freed - b.born <= limit and b.size >= least]
        return sorted(short, key=lambda block: (-block.size, block.born))


def user_line(frames: Sequence[Mapping[str, Any]]) -> Line:
    """Return the innermost line of a stack (innermost first) outside of libraries; the innermost of all if there is none."""
    if not frames:
        return Line("unknown", 0, "")
    frame = next((frame for frame in frames if _is_users(frame["filename"])), frames[0])
    name, number = frame["filename"], int(frame["line"])
    text = frame.get("text") or linecache.getline(name, number).strip()
    cell = "ipykernel" in name or name.startswith("<ipython")
    return Line("cell" if cell else Path(name).name, number, frame["name"], text)


def _is_users(filename: str) -> bool:
    return COURSE in filename or not any(word in filename for word in LIBRARIES)


@dataclass
class Recording:
    """What `record` gives: `snapshot` is None until the with-block is left."""

    snapshot: Snapshot | None = None


@contextlib.contextmanager
def record(device: str | None = None, max_entries: int = 100_000) -> Iterator[Recording]:
    """Record the memory history of what runs inside; afterwards it is `snapshot`, also if an error ended it.

    What was made before is not in it.

    Args:
        device: "cuda" or "cpu"; None takes CUDA where there is one.
        max_entries: how many events PyTorch keeps on a GPU; the oldest go first.
    """
    import torch

    memory = Recording()
    cuda = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    stop = _start_on_cuda(max_entries) if cuda else _start_on_cpu()
    try:
        yield memory
    except BaseException:
        with contextlib.suppress(SnapshotError):  # the error inside is the one to see
            memory.snapshot = stop()
        raise
    memory.snapshot = stop()


def _start_on_cuda(max_entries: int) -> Callable[[], Snapshot]:
    """Start PyTorch's own recording; the returned function stops it and returns the snapshot."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")

    def stop() -> Snapshot:
        torch.cuda.synchronize()
        content = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        return Snapshot(content, torch.cuda.current_device())

    return stop


def _start_on_cpu() -> Callable[[], Snapshot]:
    """Start a tracker that keeps the stack of every birth; the returned function stops it and returns the snapshot."""
    import torch
    from vramlab.tracking.tracker import Tracker

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

        def log_birth(self, tensor, op, where=""):
            storage = None if tensor.untyped_storage()._cdata in self.older else super().log_birth(tensor, op, where)
            if storage:
                self.frames[id(storage)] = _stack()
            return storage

    recorder = Recorder()
    recorder.__enter__()

    def stop() -> Snapshot:
        recorder.__exit__(None, None, None)
        events = _simulated_events(list(recorder.log), recorder.frames)
        return Snapshot({"device_traces": [events]}, source="simulated")

    return stop


def _stack() -> list[dict[str, Any]]:
    """The frames of the running code, innermost first, without the tracker's own."""
    frame, frames = sys._getframe(1), []
    while frame is not None and len(frames) < DEPTH:
        code = frame.f_code
        if os.path.basename(code.co_filename) not in (os.path.basename(__file__), "tracker.py"):
            frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return frames


def _simulated_events(log: list, frames: Mapping[int, list]) -> list[dict[str, Any]]:
    """A tracker's log in the form of `torch.cuda.memory._snapshot()`; the model of the allocator gives addresses."""
    allocator, blocks, events = Allocator(), {}, []
    for size, storage, _ in log:
        if size > 0:
            before = allocator.reserved
            block = blocks[id(storage)] = allocator.malloc(storage.asked)
            more = {"addr": block.address, "stream": 0, "frames": frames[id(storage)]}
            if allocator.reserved > before:
                events.append({"action": "segment_alloc", "size": allocator.reserved - before, **more})
            events.append({"action": "alloc", "size": block.size, **more})
        elif id(storage) in blocks:
            block = blocks.pop(id(storage))
            gone = {"addr": block.address, "size": block.size, "stream": 0, "frames": []}
            events += [{"action": "free_requested", **gone}, {"action": "free_completed", **gone}]
            allocator.free(block)
    return events
