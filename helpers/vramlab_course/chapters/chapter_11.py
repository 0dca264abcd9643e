"""What chapter 11's cells share: the kernel's count of sent bytes, and a data loader.

The loader also runs with a /dev/shm of its own, as small as in a container. And there are a card's
recorded sensors.
"""

import ctypes
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from vramlab.hardware.nvml import Sensors, nvml_snapshot
from vramlab.measurement.records import measurements_folder, read_records
from vramlab.report.report import MiB

from .chapter_01 import best_seconds
from .chapter_04 import RankFailed, apart

RECEIVED = Path("/sys/class/net/lo/statistics/rx_bytes")  # Linux: bytes to itself
SHARED = Path("/dev/shm")  # where the workers of a data loader leave batches
SETTLED = 1.0  # seconds without a change
NO_MOUNTS = "this machine allows no mounts"
APART = 0x10000000 | 0x00020000  # sched.h: CLONE_NEWUSER, CLONE_NEWNS


def loopback_bytes() -> int | None:
    """Return the bytes that this machine has sent to itself; None where no kernel counts them."""
    return int(RECEIVED.read_text()) if RECEIVED.exists() else None


def under_load(weights: torch.Tensor) -> Sensors:
    """Return what NVML reads once the card of `weights` has computed for two seconds."""
    end = time.perf_counter() + 2
    while weights.is_cuda and time.perf_counter() < end:
        best_seconds(lambda: weights @ weights, times=20)
    return nvml_snapshot()


def pixels(index: int) -> torch.Tensor:
    """Return a picture of 3 × 512 × 512 whole numbers of 0 to 255, of a byte each."""
    return torch.full((3, 512, 512), index, dtype=torch.uint8)


def shared_mib(batches: Iterable) -> float | None:
    """Return the MiB of /dev/shm that a loader fills while the first batch is held.

    None where there is no /dev/shm.
    """
    if not SHARED.exists():
        return None
    before = shutil.disk_usage(SHARED).used
    rest = iter(batches)
    held = next(rest)
    found = -1
    # The workers go on until each is as far ahead as it may be.
    while (used := shutil.disk_usage(SHARED).used) != found:
        found = used
        time.sleep(SETTLED)
    del held, rest  # ends the workers
    return (found - before) / MiB


def with_shared(mib: int, work: Callable[[], Any]) -> Any:
    """Return what `work()` returns in a process whose /dev/shm has `mib` MiB, as in a container.

    Raises RankFailed where `work` fails, and where this machine does not allow such a process:
    its text ends with NO_MOUNTS.
    """
    ids = {"uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}

    def inside() -> Any:
        kernel = ctypes.CDLL(None)
        # As its own user this process may mount, and no other sees what.
        if kernel.unshare(APART):
            raise OSError(NO_MOUNTS)
        for name, text in {"setgroups": "deny", **ids}.items():
            Path("/proc/self", name).write_text(text)
        if kernel.mount(b"tmpfs", bytes(SHARED), b"tmpfs", 0, f"size={mib}m".encode()):
            raise OSError(NO_MOUNTS)
        try:
            return work()
        finally:
            # Those of a loader that died would be waited for, ten seconds.
            for worker in multiprocessing.active_children():
                worker.terminate()

    return apart(inside)


def ending(batches: Callable[[], Iterable], mib: int) -> str:
    """Return in a line how `batches()` ends where /dev/shm has `mib` MiB."""

    def count() -> str:
        return f"all {sum(1 for _ in batches())} batches came"

    try:
        return with_shared(mib, count)
    except RankFailed as error:
        return str(error).splitlines()[-1]


class Reading(NamedTuple):
    """What a recorded run's sensors said: medians of W and MHz, and what held the clock back."""

    model: str
    speed: int  # tokens a second
    watts: int
    clock: int
    held_by: str


def recorded_sensors(gpu: str) -> list[Reading]:
    """Return the sensors of each run that was recorded on a card with `gpu` in its name, by W."""
    rows = []
    for path in sorted(measurements_folder().glob("*.json")):
        for fact in read_records(path).facts.values():
            is_plain = not fact.asked.get("expandable")
            if fact.found.get("power") and is_plain and gpu in fact.environment["gpu"]:
                recipe = fact.asked["recipe"]
                tokens = recipe["batch_size"] * recipe["seq_len"]
                speed = round(tokens / median(fact.found["seconds"]))
                watts, clock = (round(median(fact.found[name])) for name in ("power", "clock"))
                reasons = ", ".join(fact.found["throttle"]) or "nothing"
                rows.append(Reading(recipe["model"], speed, watts, clock, reasons))
    return sorted(rows, key=lambda row: row.watts)
