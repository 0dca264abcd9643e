"""From bytes that are allocated to bytes that are taken from the card: segments, and what lies outside the allocator.

PyTorch's allocator takes segments from the driver and keeps them: 2 MiB for requests up to 1 MiB, 20 MiB for those up to
10 MiB, and above that the request rounded up to 2 MiB (`c10/cuda/CUDACachingAllocator.cpp`). `reserved` is their sum; the
process holds CUDA's context and the libraries' code besides.
"""

import bisect
from collections import Counter
from collections.abc import Iterable

from .blocks import OWN_SEGMENT, ROUND_LARGE, SEGMENT, SMALL
from .gpu import Gpu
from .overhead import CONTEXT
from .report import Interval

SMALL_SEGMENT = 2 << 20
# Reserved over the segments that the blocks alive at the peak need, in 300 simulated steps (the grid of the tests) whose
# every block went through a model of the allocator: half lie under the first figure, all but one in a hundred under the
# second. Small models on few layers fragment most, so for large ones the upper end is generous.
TYPICAL, WORST = 1.05, 1.40
UNKNOWN = 1.25  # and an architecture nobody wrote out may keep that much more or less


def pack(sizes: Iterable[int]) -> int:
    """Bytes that blocks of `sizes` hold when they are asked for one after the other and none is freed.

    The smallest rest that fits is taken; no more than 1 MiB is never split off, so it counts as allocated.
    """
    held, rests = 0, []
    for size in sizes:
        if size <= SMALL:
            held += size
            continue
        i = bisect.bisect_left(rests, size)
        segment = SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_LARGE) * ROUND_LARGE
        block = rests.pop(i) if i < len(rests) else segment
        if block - size > SMALL:
            bisect.insort(rests, block - size)
            block = size
        held += block
    return held


def segments(blocks: Counter) -> int:
    """Bytes of segments for `blocks`, sizes to how many: small ones share 2 MiB, middling ones 20 MiB, large ones nothing."""
    small = total = 0
    for size, count in blocks.items():
        if size <= SMALL:
            small += size * count
        elif size < OWN_SEGMENT:
            total += -(-count // (SEGMENT // size)) * SEGMENT
        else:
            total += count * -(-size // ROUND_LARGE) * ROUND_LARGE
    return total + -(-small // SMALL_SEGMENT) * SMALL_SEGMENT


def reserved(blocks: Counter, peak: int, approximate: bool = False) -> Interval:
    """What `torch.cuda.memory_reserved` peaks at, given the blocks alive when `peak` bytes are allocated.

    At least those; usually a few hundredths more, because blocks freed in other phases do not fit the requests of this
    one. Confidence: see TYPICAL and WORST. Sequences of varying length fragment further and are not counted.
    """
    low = max(peak, segments(blocks))
    doubt = UNKNOWN if approximate else 1.0
    return Interval(int(peak / doubt), int(low * TYPICAL), int(low * WORST * doubt) + SEGMENT)


def process(inside: Interval, card: Gpu | None) -> Interval:
    """What the driver (NVML) sees: the reserved segments and the context, which differs by card and driver."""
    context = card.context_interval if card else CONTEXT
    return Interval(inside.low + context.low, inside.value + context.value, inside.high + context.high)
