"""What a process holds on a GPU outside torch's allocator, from the readings in `data/contexts.json`.

CUDA's context, the code of kernels that ran (torch sets CUDA_MODULE_LOADING=LAZY), handles of libraries, NCCL's buffers.
It differs by card and driver, so it is read, not derived: *low* is the least reading of the card, *value* the middle of
the usual ones, *high* the highest for what is loaded.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import NamedTuple

from ..report.data import data_path
from ..report.report import UNITS, GiB, Interval, MiB
from .gpu import Gpu, find_gpu

BARE, CONVOLUTIONS, TRAINING = "bare", "convolutions", "training"
LESS = (BARE, "part")  # than a training process loads
ENOUGH = 3  # readings of a card that say by themselves how far its figures spread
ALIKE = 1.5  # the most that memory may differ by, as a factor, among cards of one class
ROUNDED = 0.01 * GiB  # how far off a message's figures may be together: each of two is rounded to hundredths of a GiB


class Reading(NamedTuple):
    """One reading in bytes, `off` by as much at most. `loaded`, `ranks` as in the file."""

    gpu: str
    capability: tuple[int, int]
    memory_gb: int
    loaded: str
    ranks: int
    size: int
    off: int
    source: str


@dataclass(frozen=True)
class Room:
    """What a process may have of `card`: `usable` bytes, of which it holds `context` outside torch's allocator."""

    card: Gpu
    usable: int
    context: Interval
    expandable_segments: bool = False

    def left(self, end: str) -> int:
        """Return the bytes that the allocator has where the context is at its `end`: "low", "value" or "high"."""
        return self.usable - getattr(self.context, end)

    def __str__(self) -> str:
        rooms = ", ".join(f"{self.left(end) / UNITS['GiB']:.2f}" for end in ("high", "value", "low"))
        setting = "with" if self.expandable_segments else "without"
        return f"granted to the allocator, {setting} expandable segments: {rooms} GiB (safe, likely, tight)"


@cache
def readings() -> tuple[Reading, ...]:
    """Return all readings."""
    found = []
    for row in json.loads(data_path("contexts.json").read_text(encoding="utf-8"))["readings"]:
        if "compute_capability" in row:  # a card that the table of GPUs lacks
            capability, memory = tuple(row["compute_capability"]), row["memory_gb"]
        else:
            card = find_gpu(row["gpu"])
            capability, memory = card.compute_capability, card.memory_gb
        off = 0 if "mib" in row else int(ROUNDED)
        rest = (row["loaded"], row.get("ranks", 1), _size(row), off, row["source"])
        found.append(Reading(row["gpu"], capability, memory, *rest))
    return tuple(found)


def _size(row: dict) -> int:
    """Return the bytes of a reading: its `mib`, or what its message leaves."""
    if "mib" in row:
        return int(row["mib"] * MiB)
    process, *held = (_bytes(row[name]) for name in ("process", "allocated", "unallocated"))
    return process - sum(held)


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+) (\w+)", text).groups()
    return int(float(number) * UNITS[unit])


@cache
def context_on(card: Gpu | None = None, loaded: str = TRAINING, ranks: int = 1) -> Interval:
    """Return what a process holds outside torch's allocator on `card`, in bytes; None: on any card.

    Args:
        loaded: "cublas", "flash" or "bitsandbytes" where it is known, "training" for matmuls and attention,
            "convolutions" for cuDNN too.
        ranks: processes that talk through NCCL.

    Where a card has not enough readings, those of its like count too (same compute capability, memory within ALIKE);
    where these do not suffice either, the high end is that of any card. Low end and middle are those of the nearest kin.
    """
    several = ranks > 1
    every = [one for one in readings() if (one.ranks > 1) == several and one.loaded not in LESS]
    every = [one for one in every if one.loaded != CONVOLUTIONS or loaded == CONVOLUTIONS]
    pools = _pools(every, card)
    spread = next((pool for pool in pools[:2] if len(pool) >= ENOUGH), every)
    usual = _middle(next(filter(None, pools)), loaded)
    low = min(one.size - one.off for one in [*next(filter(None, [*pools[1:], every])), *_bare(card)])
    high = max(one.size + one.off for one in spread)
    if several:  # NCCL's buffers are on top of what one rank has
        alone = context_on(card, loaded)
        return Interval(low, usual, high).at_least(alone)
    return Interval(min(low, usual), usual, high)


def nearest(card: Gpu) -> list[Reading]:
    """Return the readings of one rank's training on `card` and its like, or on its nearest kin."""
    every = [one for one in readings() if one.ranks == 1 and one.loaded not in (*LESS, CONVOLUTIONS)]
    return next(filter(None, _pools(every, card)[1:]))


def _pools(every: list[Reading], card: Gpu | None) -> list[list[Reading]]:
    """Return the readings of `card`, with its like, of its compute capability, of its class of memory, all."""
    if card is None:
        return [every]
    class_of_memory = [one for one in every if 1 / ALIKE <= one.memory_gb / card.memory_gb <= ALIKE]
    capability = [one for one in every if one.capability == card.compute_capability]
    like = [one for one in capability if one in class_of_memory]
    own = [one for one in every if one.gpu == card.name]
    return [own, like, capability, class_of_memory, every]


def _middle(pool: list[Reading], loaded: str) -> int:
    """Return the middle of the readings with the same loaded, or of all; those that convolve are for the high end."""
    plain = [one for one in pool if one.loaded != CONVOLUTIONS] or pool
    same = [one for one in plain if one.loaded == loaded] or plain
    return int(median(one.size for one in same))


def _bare(card: Gpu | None) -> list[Reading]:
    """Return the contexts of `card`, or of all, without a training process's libraries."""
    return [one for one in readings() if one.loaded in LESS and (card is None or one.gpu == card.name)]
