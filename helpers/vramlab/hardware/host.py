"""The host's memory and CPU cores."""

import os

from ..base.errors import needing

CGROUP = "/sys/fs/cgroup"  # of this process's container


def memory() -> tuple[int, int]:
    """Return (total, available) bytes of RAM.

    Both are within the container's limit if there is one (cgroup version 2).
    """
    with needing("The host's memory"):
        import psutil

    host = psutil.virtual_memory()
    try:
        limit = _number(f"{CGROUP}/memory.max")
        used = _number(f"{CGROUP}/memory.current")
    except (OSError, ValueError):  # no container, or "max": no limit
        return host.total, host.available
    return min(host.total, limit), min(host.available, limit - used)


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def cores() -> int:
    """Count the CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows cannot say which
