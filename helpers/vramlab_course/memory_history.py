"""Memory history: every block with the line of code that asked for it.

    with record() as memory:
        train_one_step()
    print(memory.snapshot.largest())    # what was alive at the peak, line by line
    print(memory.snapshot.left())       # what is still alive: after a whole step, nothing should be

On a GPU the history is PyTorch's own (`torch.cuda.memory._record_memory_history`). Without one the
tensors' storages are followed on the CPU. The sizes are their own bytes, which an allocator would
round up, and its model simulates the addresses and segments. Both are dictionaries of the same form
(`torch.cuda.memory._snapshot`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from vramlab.hardware import snapshot
from vramlab.hardware.allocator import Allocator
from vramlab.hardware.snapshot import SnapshotError


class Snapshot(snapshot.Snapshot):
    """A memory history whose sums over time are arrays.

    `source`: "measured" for a GPU's own, "simulated" for one that was made without a GPU.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        device: int | None = 0,
        source: str = "measured",
    ):
        super().__init__(content, device)
        self.source = source
        self.allocated = np.array(self.allocated, dtype=np.int64)

    def left(self, count: int = 6) -> snapshot.Groups:
        """Return the lines whose blocks were never freed.

        They are leaks, if the history ends where a step does.
        """
        return self.largest(len(self.events), count)


@dataclass
class Recording:
    """What `record` gives: `snapshot` is None until the with-block is left."""

    snapshot: Snapshot | None = None


@contextlib.contextmanager
def record(device: str | None = None, max_entries: int = 100_000) -> Iterator[Recording]:
    """Record the memory history of what runs inside.

    Afterwards it is `snapshot`, also if an error ended it.

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
        # Frees that wait for the GPU are in the history then.
        torch.cuda.synchronize()
        content = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        return Snapshot(content, torch.cuda.current_device())

    return stop


def _start_on_cpu() -> Callable[[], Snapshot]:
    """Start a tracker that keeps the stack of every birth.

    The returned function stops it and returns the snapshot.
    """
    from vramlab.tracking.recorder import Recorder

    # Entered by hand, because the with-block that it follows is the caller's.
    recorder = Recorder()
    recorder.__enter__()

    def stop() -> Snapshot:
        recorder.__exit__(None, None, None)
        events = _simulated_events(list(recorder.log), recorder.frames)
        return Snapshot({"device_traces": [events]}, source="simulated")

    return stop


def _simulated_events(log: list, frames: Mapping[int, list]) -> list[dict[str, Any]]:
    """A tracker's log in the form of `torch.cuda.memory._snapshot()`.

    The model of the allocator gives addresses.
    """
    allocator = Allocator()
    blocks = {}
    events = []
    for size, storage, _ in log:
        if size > 0:
            before = allocator.reserved
            block = allocator.malloc(storage.asked)
            blocks[id(storage)] = block
            more = {"addr": block.address, "stream": 0, "frames": frames[id(storage)]}
            added = allocator.reserved - before
            # The request made a segment, which PyTorch's history has as an event of its own.
            if added > 0:
                events.append({"action": "segment_alloc", "size": added, **more})
            events.append({"action": "alloc", "size": storage.asked, **more})
        # What was made before the recording is freed without having been seen.
        elif id(storage) in blocks:
            block = blocks.pop(id(storage))
            gone = {"addr": block.address, "size": storage.asked, "stream": 0, "frames": []}
            # PyTorch has two events of a free: asked for, and done once no stream uses it.
            events += [{"action": "free_requested", **gone}, {"action": "free_completed", **gone}]
            allocator.free(block)
    return events
