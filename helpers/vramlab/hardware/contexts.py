"""What a process holds on a GPU outside torch's allocator, from `data/contexts.json`.

CUDA's context, the code of kernels that ran (torch sets CUDA_MODULE_LOADING=LAZY), handles of
libraries, NCCL's buffers. It differs by card and driver, so it is read, not derived: *low* is the
least reading of the card, *value* the middle of the usual ones, *high* the highest for what is
loaded.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from ..base.data import data_path
from ..report.report import UNITS, GiB, Interval, MiB
from .gpu import Gpu, find_gpu

BARE = "bare"
CONVOLUTIONS = "convolutions"
TRAINING = "training"
LESS = (BARE, "part")  # than a training process loads
ENOUGH = 3  # readings of a card that say by themselves how far its figures spread
ALIKE = 1.5  # the most that memory may differ by, as a factor, among cards of one class
# How far off a message's figures may be together: each of two is rounded to hundredths of a GiB.
ROUNDED = 0.01 * GiB


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
    """What a process may have of `card`.

    Attributes:
        usable: bytes.
        context: of these, what it holds outside torch's allocator.
    """

    card: Gpu
    usable: int
    context: Interval
    expandable_segments: bool = False

    def left(self, end: str) -> int:
        """Return the bytes that the allocator has.

        `end`: the end that the context is at, "low", "value" or "high".
        """
        return self.usable - getattr(self.context, end)

    def __str__(self) -> str:
        # The highest context leaves the least: "safe".
        rooms = [f"{self.left(end) / GiB:.2f}" for end in ("high", "value", "low")]
        setting = "with" if self.expandable_segments else "without"
        sizes = f"{', '.join(rooms)} GiB (safe, likely, tight)"
        return f"granted to the allocator, {setting} expandable segments: {sizes}"


@cache
def readings() -> tuple[Reading, ...]:
    """Return all readings."""
    table = json.loads(data_path("contexts.json").read_text(encoding="utf-8"))
    return tuple(map(_reading, table["readings"]))


def _reading(row: dict[str, Any]) -> Reading:
    """Return a row of the file."""
    if "compute_capability" in row:  # a card that the table of GPUs lacks
        major, minor = row["compute_capability"]
        capability = (major, minor)
        memory = row["memory_gb"]
    else:
        card = find_gpu(row["gpu"])
        capability = card.compute_capability
        memory = card.memory_gb
    return Reading(
        gpu=row["gpu"],
        capability=capability,
        memory_gb=memory,
        loaded=row["loaded"],
        ranks=row.get("ranks", 1),
        size=_size(row),
        off=0 if "mib" in row else int(ROUNDED),
        source=row["source"],
    )


def _size(row: dict[str, Any]) -> int:
    """Return the bytes of a reading: its `mib`, or what its message leaves."""
    if "mib" in row:
        return int(row["mib"] * MiB)
    return _bytes(row["process"]) - _bytes(row["allocated"]) - _bytes(row["unallocated"])


def _bytes(text: str) -> int:
    """Return the bytes of a size as torch writes it, "1.25 GiB"."""
    parts = re.fullmatch(r"([\d.]+) (\w+)", text)
    if parts is None:
        raise ValueError(f"{text!r} is no size")
    number, unit = parts.groups()
    return int(float(number) * UNITS[unit])


@cache
def context_on(
    card: Gpu | None = None,
    loaded: str = TRAINING,
    ranks: int = 1,
) -> Interval:
    """Return what a process holds outside torch's allocator on `card`, in bytes.

    Args:
        card: None: any.
        loaded: "cublas", "flash" or "bitsandbytes" where it is known, "training" for matmuls and
            attention, "convolutions" for cuDNN too.
        ranks: processes that talk through NCCL.

    Where a card has not enough readings, those of its like count too (same compute capability,
    memory within ALIKE); where these do not suffice either, the high end is that of any card. Low
    end and middle are those of the nearest kin.
    """
    is_several = ranks > 1
    # Readings of a bare context, or of less than training loads, would make the middle too low.
    left_out = {*LESS}
    if loaded != CONVOLUTIONS:
        left_out.add(CONVOLUTIONS)
    every = []
    for reading in readings():
        if (reading.ranks > 1) == is_several and reading.loaded not in left_out:
            every.append(reading)
    pools = _pools(every, card)
    usual = _middle(_first(pools), loaded)
    # Its like include the card itself; one card's readings seldom show the least.
    nearest_kin = [*_first([*pools[1:], every]), *_bare(card)]
    low = min(reading.size - reading.off for reading in nearest_kin)
    # The card's own readings where there are enough of them, else those of its like, else all.
    spread = next((pool for pool in pools[:2] if len(pool) >= ENOUGH), every)
    high = max(reading.size + reading.off for reading in spread)
    if is_several:  # NCCL's buffers are on top of what one rank has
        alone = context_on(card, loaded)
        return Interval(low, usual, high).at_least(alone)
    return Interval(min(low, usual), usual, high)


def nearest(card: Gpu) -> list[Reading]:
    """Return the readings of one rank's training on `card` and its like, or on its nearest kin."""
    every = []
    for reading in readings():
        if reading.ranks == 1 and reading.loaded not in (*LESS, CONVOLUTIONS):
            every.append(reading)
    return _first(_pools(every, card)[1:])


def _first(pools: list[list[Reading]]) -> list[Reading]:
    """Return the first that is not empty."""
    return next(pool for pool in pools if pool)


def _pools(
    every: list[Reading],
    card: Gpu | None,
) -> list[list[Reading]]:
    """Return the readings of `card`, and of ever wider kin.

    These are its like, its compute capability, its class of memory, all.
    """
    if card is None:
        return [every]
    own = []
    like = []
    capability = []
    memory = []
    for reading in every:
        is_own = reading.gpu == card.name
        has_capability = reading.capability == card.compute_capability
        has_memory = 1 / ALIKE <= reading.memory_gb / card.memory_gb <= ALIKE
        if is_own:
            own.append(reading)
        if has_capability and has_memory:
            like.append(reading)
        if has_capability:
            capability.append(reading)
        if has_memory:
            memory.append(reading)
    return [own, like, capability, memory, every]


def _middle(pool: list[Reading], loaded: str) -> int:
    """Return the middle of the readings with the same loaded, or of all.

    Those that convolve are for the high end.
    """
    plain = [reading for reading in pool if reading.loaded != CONVOLUTIONS] or pool
    same = [reading for reading in plain if reading.loaded == loaded] or plain
    return int(median(reading.size for reading in same))


def _bare(card: Gpu | None) -> list[Reading]:
    """Return contexts without all of a training process's libraries, of `card` or of all."""
    bare = [reading for reading in readings() if reading.loaded in LESS]
    if card is None:
        return bare
    return [reading for reading in bare if reading.gpu == card.name]
