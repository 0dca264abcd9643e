"""From bytes that are asked for to bytes that are taken from the card: rests, segments, and what lies outside.

PyTorch's allocator takes segments from the driver and keeps them: 2 MiB for requests up to 1 MiB, 20 MiB for those up to
10 MiB, and above that the request rounded up to 2 MiB (`c10/cuda/CUDACachingAllocator.cpp`, see `vramlab.hardware.overhead`).
`reserved` is their sum; the process holds CUDA's context and the libraries' code besides.
"""

import bisect
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from ..report.report import Interval
from .gpu import Gpu
from .overhead import CONTEXT, LARGE_REQUEST, LARGE_SEGMENT, ROUND_LARGE, SMALL_BLOCK, SMALL_SEGMENT, UNIT

# Reserved over the segments that the blocks alive at the peak need, in 300 simulated steps (the grid of the tests) whose
# every block went through a model of the allocator: half lie under the first figure, all but one in a hundred under the
# second. Small models on few layers fragment most, so for large ones the upper end is generous.
TYPICAL, WORST = 1.05, 1.40
EXACT, UNKNOWN = 0.97, 0.95  # the peak is known to 3 %; that of an architecture nobody wrote out to 5 %


@lru_cache(maxsize=4096)
def internal_fragmentation(size: int) -> int:
    """Bytes that a block of `size` bytes holds beyond that, because the allocator does not split off 1 MiB or less.

    Over 10 MiB a request has a segment of its own. Below, equal requests share a segment and leave a rest that the last
    of them holds, counted here in equal parts. Up to 1 MiB nothing is left.
    """
    if size <= SMALL_BLOCK:
        return 0
    fit = LARGE_SEGMENT // size if size < LARGE_REQUEST else 1
    rest = segment(size) - fit * size
    return rest // fit // UNIT * UNIT if rest <= SMALL_BLOCK else 0


def segment(size: int) -> int:
    """Bytes of the segment that a request of over 1 MiB gets where no free block fits."""
    return LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // ROUND_LARGE) * ROUND_LARGE


def pack(sizes: Iterable[int]) -> int:
    """Bytes that blocks of `sizes` hold when they are asked for one after the other and none is freed.

    The smallest rest that fits is taken; no more than 1 MiB is never split off, so it counts as allocated.
    """
    total, rests = 0, []
    for size in sizes:
        if size > SMALL_BLOCK:
            i = bisect.bisect_left(rests, size)
            block = rests.pop(i) if i < len(rests) else segment(size)
            if block - size > SMALL_BLOCK:
                bisect.insort(rests, block - size)
            else:
                size = block
        total += size
    return total


def reserved(blocks: Counter, peak: int, approximate: bool = False) -> Interval:
    """What `torch.cuda.memory_reserved` peaks at, given the blocks (sizes to how many) that make up a peak of `peak` bytes.

    At least those; usually a few hundredths more, because blocks freed in other phases do not fit the requests of this
    one. Confidence: see TYPICAL and WORST. Sequences of varying length fragment further and are not counted.
    """
    small = total = 0
    for size, count in blocks.items():
        if size <= SMALL_BLOCK:
            small += size * count
        else:
            shared = LARGE_SEGMENT // size if size < LARGE_REQUEST else 1
            total += -(-count // shared) * segment(size)
    low = max(peak, total + -(-small // SMALL_SEGMENT) * SMALL_SEGMENT)
    sure, doubt = (UNKNOWN, 1 / UNKNOWN) if approximate else (EXACT, 1.0)
    return Interval(int(peak * sure), int(low * TYPICAL), int(low * WORST * doubt) + LARGE_SEGMENT)


def process(inside: Interval, card: Gpu | None) -> Interval:
    """What the driver (NVML) sees: the reserved segments and the context, which differs by card and driver."""
    context = card.context_interval if card else CONTEXT
    return Interval(inside.low + context.low, inside.value + context.value, inside.high + context.high)
