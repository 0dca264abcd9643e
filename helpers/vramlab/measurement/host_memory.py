"""This process's RAM: what it holds, a limit on it, and processes that the kernel killed for lack of it."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ..report.errors import MeasurementError


def rss() -> int:
    """Return the resident set of this process in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_rss() -> int:
    """Return the largest resident set that this process has had, in bytes.

    Linux reports it in /proc. `getrusage` is wrong there: a process started from a large one inherits the large one's
    peak (fs/exec.c, exec_mmap).
    """
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        import psutil

        return getattr(psutil.Process().memory_info(), "peak_wset", rss())  # Windows has a peak, macOS has not


@contextlib.contextmanager
def limited(limit: int | None, device: str) -> Iterator[None]:
    """Let training take at most `limit` bytes: of the device on CUDA, else of RAM beyond what is held already.

    On CUDA torch's allocator enforces it (`set_per_process_memory_fraction`), on Linux the kernel does (RLIMIT_DATA:
    private writable memory; setrlimit(2)). None sets no limit. Raises MeasurementError on a CPU under another system.
    """
    if limit is None:
        yield
    elif device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        yield
    else:
        if sys.platform != "linux":
            raise MeasurementError("memory_limit on a CPU needs Linux, which can hold a process to it")
        import resource

        import psutil

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def oom_kills() -> int:
    """Return how many processes the kernel has killed for their memory; 0 where it does not count them."""
    for file in oom_counters():
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def oom_counters() -> list[Path]:
    """List the files in which Linux counts them, this control group's first (cgroup-v2.rst, "memory.events"; proc(5))."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = Path("/sys/fs/cgroup", next(line[4:] for line in lines if line.startswith("0::/")))
        return [*(folder / "memory.events" for folder in (group, *group.parents)), Path("/proc/vmstat")]
    return [Path("/proc/vmstat")]
