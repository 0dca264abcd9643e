"""How much memory this process holds, and how to hold it to less."""

import contextlib
import sys
from collections.abc import Iterator

from ..report.errors import MeasurementError


def rss() -> int:
    """Bytes of this process in RAM now."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_rss() -> int:
    """The most bytes of RAM that this process has held.

    Linux tells the program's own in /proc. `getrusage` would not do there: a process that is started from a large one
    inherits the large one's peak (fs/exec.c, exec_mmap, carries the old memory's high-water mark over).
    """
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        import psutil

        return getattr(psutil.Process().memory_info(), "peak_wset", rss())  # Windows tells the peak, macOS does not


@contextlib.contextmanager
def limited(limit: int | None, device: str) -> Iterator[None]:
    """While entered, training may take `limit` bytes: of the device on CUDA, else of RAM beyond what is held already.

    On CUDA it is torch's allocator that stops (`set_per_process_memory_fraction`), on Linux the kernel (RLIMIT_DATA,
    which counts a process's private writable memory; setrlimit(2)). None does nothing.

    Raises:
        MeasurementError: this system has no such limit.
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
