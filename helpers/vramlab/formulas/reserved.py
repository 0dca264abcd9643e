"""Formulas for the caching allocator: internal fragmentation and reserved memory.

`hardware/allocator.py` has the rules, and runs sequences of requests that are known.
"""

import bisect
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..hardware.overhead import (
    EXACT,
    LARGE_REQUEST,
    LARGE_SEGMENT,
    SMALL_BLOCK,
    SMALL_SEGMENT,
    UNIT,
    segment,
)
from ..report.report import Interval

# Reserved memory over the segments that the blocks alive at the peak need, of 625 steps that
# PyTorch's own allocator ran on the stand-in and 52 published ones (`benchmarks/tiers.py`). TYPICAL
# is above four fifths of the 601 that are not sharded, 71 to 95 % of each card's or source's: cards
# between it and the upper end hold nine in ten. The upper ends are above all, also of the 76 that
# are sharded, whose units come and go in segments of other sizes (2.54 times).
TYPICAL = 1.18
WORST = 1.5
WORST_SHARDED = 2.6


@lru_cache(maxsize=4096)
def internal_fragmentation(size: int) -> int:
    """Return the bytes that a block holds beyond `size`, of a rest that is not split off.

    A rest of 1 MiB or less is not.

    From 10 MiB on a request has a segment of its own. Below, equal requests share a segment, and
    the rest that the last of them holds is divided among them. Up to 1 MiB there is none.
    """
    if size <= SMALL_BLOCK:
        return 0
    fit = LARGE_SEGMENT // size if size < LARGE_REQUEST else 1
    rest = segment(size) - fit * size
    return rest // fit // UNIT * UNIT if rest <= SMALL_BLOCK else 0


def pack(sizes: Iterable[int]) -> int:
    """Return the bytes allocated for requests of `sizes` in turn, none of which is freed."""
    total = 0
    rests: list[int] = []
    for size in sizes:
        if size > SMALL_BLOCK:
            # Free blocks are sorted by size, and the allocator takes the smallest that is large
            # enough (`get_free_block`).
            i = bisect.bisect_left(rests, size)
            block = rests.pop(i) if i < len(rests) else segment(size)
            # What is left over is a free block if it is larger than 1 MiB; otherwise the request
            # keeps it (`should_split`).
            if block - size > SMALL_BLOCK:
                bisect.insort(rests, block - size)
            else:
                size = block
        total += size
    return total


def reserved(blocks: Mapping[int, int], peak: int, sharded: bool = False) -> Interval:
    """Estimate the peak of reserved memory from a peak's blocks (size to count) and bytes.

    Reserved is what `torch.cuda.memory_reserved` returns.

    Blocks freed in other phases do not fit the requests of this one: see TYPICAL and WORST.
    Sequences of varying length fragment further.
    """
    small = total = 0
    for size, count in blocks.items():
        if size <= SMALL_BLOCK:
            small += size * count
        else:
            shared = LARGE_SEGMENT // size if size < LARGE_REQUEST else 1
            total += -(-count // shared) * segment(size)
    # Requests of up to 1 MiB share segments of 2 MiB; up to 10 MiB they share segments of 20 MiB,
    # and above each has one of its own.
    low = max(peak, total + -(-small // SMALL_SEGMENT) * SMALL_SEGMENT)
    worst = WORST_SHARDED if sharded else WORST
    return Interval(int(peak * EXACT), int(low * TYPICAL), int(low * worst) + LARGE_SEGMENT)
