"""This process's RAM, and processes that the kernel killed for lack of it."""

import contextlib
import re
from pathlib import Path

VMSTAT = Path("/proc/vmstat")  # proc(5)


def rss() -> int:
    """Return the resident set of this process in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_rss() -> int:
    """Return the largest resident set that this process has had, in bytes.

    On Linux `getrusage` is wrong: a process that a large one started inherits its peak (fs/exec.c,
    exec_mmap).
    """
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM"):
                    _, kibibytes, _ = line.split()
                    return int(kibibytes) * 1024
    except OSError:
        pass
    import psutil

    # Windows has a peak, macOS has not.
    return getattr(psutil.Process().memory_info(), "peak_wset", rss())


def oom_kills() -> int:
    """Return how many processes the kernel has killed for their memory.

    0 where it does not count them.
    """
    with contextlib.suppress(OSError):
        counted = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
        if counted:
            return int(counted[1])
    return 0
