"""Work in place of a card's (`vramlab.measurement.card_work`), for tests without one: some of it ends badly."""

import os
import signal

from vramlab.measurement.facts import Fact
from vramlab.report.errors import MeasurementError
from vramlab.report.report import MiB, environment

TOTAL = 14912 * MiB
T4 = {"gpu": "Tesla T4", "compute_capability": "7.5", "multiprocessors": 40, "total_memory": TOTAL}
BASE, CONTEXT = 3 * MiB, 141 * MiB


def versions() -> dict:
    return {**environment(), "cuda": "13.0", "driver": "580.1"}


def context(loaded: str, source: str = "measured", **changes) -> Fact:
    """What a T4 shows of a bare context."""
    found = {
        "used_before": BASE,
        "used_after": BASE + CONTEXT + 2 * MiB,
        "smi_used": None,
        "process": None,
        "allocated": 512,
        "reserved": 2 * MiB,
    }
    return Fact("context", {"loaded": loaded}, found | changes, source, versions() | T4)


def find(kind: str, asked: dict) -> Fact:
    """Killed while it loads cuBLAS, out of memory with cuDNN, as any card otherwise."""
    if asked["loaded"] == "cuBLAS":
        os.kill(os.getpid(), signal.SIGKILL)
    if asked["loaded"] == "cuDNN":
        raise MeasurementError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return context(asked["loaded"])
