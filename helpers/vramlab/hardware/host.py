"""The host's memory and CPU cores."""

import os

from ..report.errors import needing


def memory() -> tuple[int, int]:
    """Return (total, available) bytes of RAM, within the container's limit if there is one (cgroup version 2)."""
    with needing("The host's memory"):
        import psutil

    host = psutil.virtual_memory()
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            most = int(limit.read())
            return min(host.total, most), min(host.available, most - int(used.read()))
    except (OSError, ValueError):  # no container, or "max": no limit
        return host.total, host.available


def cores() -> int:
    """Count the CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
