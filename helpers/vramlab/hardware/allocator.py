"""Model of PyTorch's CUDA caching allocator: the bytes of segments that requests reserve.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default settings. A request is
rounded up to 512 bytes (kMinBlockSize). Requests of up to 1 MiB (kSmallSize) come from the small
pool, whose segments are 2 MiB (kSmallBuffer); larger ones from the large pool, whose segments are
20 MiB (kLargeBuffer) for requests under 10 MiB (kMinLargeAlloc) and otherwise the request rounded
up to 2 MiB (kRoundLarge). The smallest free block that fits is taken; what is left of it becomes a
free block if it is at least 512 bytes (small pool) or over 1 MiB (large pool), else it stays part
of the allocation, which is why `allocated` can exceed the requests. Freed blocks merge with free
neighbours and stay cached. Where the card has no room for a segment, every segment without a living
block is released, and it is tried again (`release_cached_blocks`).
"""

import weakref
from bisect import bisect_right, insort
from collections import namedtuple
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from ..base.errors import VramLabError
from ..report.report import format_bytes
from .overhead import (
    LARGE_REQUEST,
    LARGE_SEGMENT,
    ROUND_LARGE,
    SMALL_BLOCK,
    SMALL_SEGMENT,
    UNIT,
    segment,
)

# Of a pool: more than any card has, in whole segments of both kinds.
ADDRESSES = LARGE_SEGMENT << 30
Block = namedtuple("Block", "address size pool")  # what `malloc` returns, in bytes


class AllocatorError(VramLabError, MemoryError):
    """The card has no room for a segment, even after all unused ones were released.

    `event`: the index in a replayed log; `needed`: bytes of segments with which there would have
    been.
    """

    def __init__(
        self,
        segment: int,
        allocated: int,
        reserved: int,
        limit: int,
    ) -> None:
        self.allocated = allocated
        self.reserved = reserved
        self.limit = limit
        self.event = -1
        self.needed = reserved + segment
        beside = f"{format_bytes(allocated)} allocated, of {format_bytes(limit)}"
        super().__init__(f"out of memory: {format_bytes(segment)} more beside {beside}.")


class Pool:
    """One stream's segments for small requests (odd `number`) or for large ones.

    A pool also knows the free blocks in its segments.
    """

    def __init__(self, number: int, allocator: "Allocator") -> None:
        self.small = number % 2 == 1
        self.allocator = allocator
        # Each pool has addresses of its own, so that blocks of two pools never touch and a block's
        # address says which it is in.
        self._next = ADDRESSES * (number + 1)
        self.segments: dict[int, int] = {}  # start to end
        self.free: dict[int, int] = {}  # start to end of each free block
        self.starts: dict[int, int] = {}  # end to start, also of blocks that are not free any more
        self.buckets: dict[int, list[int]] = {}  # size to starts of the free blocks, lowest first
        # Of the buckets, in order; an empty one goes when a best fit meets it.
        self.sizes: list[int] = []

    def take(self, size: int) -> tuple[int, int]:
        """Return (start, end) of the smallest free block for `size` or a new segment, split.

        `should_split` decides whether it is.
        """
        free = self.free
        buckets = self.buckets
        sizes = self.sizes
        same = buckets.get(size)
        if same:
            # Among blocks of one size the lowest address comes first (`BlockComparatorSize`).
            start = same.pop(0)
            return start, free.pop(start)
        # No free block has exactly this size, so the search begins above it.
        index = bisect_right(sizes, size)
        while index < len(sizes):
            same = buckets[sizes[index]]
            if same:
                start = same.pop(0)
                end = free.pop(start)
                break
            del buckets[sizes.pop(index)]
        else:
            start, end = self._new_segment(size)
        rest = end - start - size
        if rest > SMALL_BLOCK or (rest and self.small):
            # As `give`, without a free neighbour. Written out, for a replay takes many blocks.
            cut = start + size
            free[cut] = end
            self.starts[end] = cut
            if rest in buckets:
                insort(buckets[rest], cut)
            else:
                buckets[rest] = [cut]
                insort(sizes, rest)
            end = cut
        return start, end

    def _new_segment(self, size: int) -> tuple[int, int]:
        """Return (start, end) of a new segment for `size`."""
        start = self._next
        end = start + (SMALL_SEGMENT if self.small else segment(size))
        self.allocator.reserve(end - start)
        self.segments[start] = end
        self._next = end + UNIT  # blocks of two segments do not touch
        return start, end

    def give(self, block: tuple[int, int]) -> None:
        """Make a block free, merged with free neighbours (`try_merge_blocks`)."""
        start, end = block
        free = self.free
        starts = self.starts
        buckets = self.buckets
        # `starts` keeps what is not free any more, so the block before has to end here still.
        if start in starts and free.get(starts[start]) == start:
            start = starts[start]
            buckets[free[start] - start].remove(start)
        if end in free:
            end = self.remove(end)
        free[start] = end
        starts[end] = start
        size = end - start
        if size in buckets:
            insort(buckets[size], start)
        else:
            buckets[size] = [start]
            insort(self.sizes, size)

    def remove(self, start: int) -> int:
        """Take the free block at `start` out of the pool; return its end."""
        end = self.free.pop(start)
        self.buckets[end - start].remove(start)
        return end

    def release(self) -> list[int]:
        """Release the segments without a living block; return their sizes."""
        # Free neighbours are merged, so an unused segment is one free block from its start to its
        # end.
        unused = [start for start, end in self.segments.items() if self.free.get(start) == end]
        for start in unused:
            self.remove(start)
        return [self.segments.pop(start) - start for start in unused]


@dataclass
class Allocator:
    """The state of the allocator in bytes; `peak_…` are maxima so far.

    `limit`: bytes of segments that the card can hold; None: no limit. `mallocs` and `given_back`
    count calls of cudaMalloc and cudaFree, which are slow; requests served from cached segments
    need none.
    """

    kind = Pool
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    limit: int | None = None
    mallocs: int = 0
    given_back: int = 0
    pools: dict[int, Pool] = field(default_factory=dict)

    def pool(self, number: int) -> Pool:
        """Return the pool for small requests (odd `number`) or large ones on `number // 2`.

        `number // 2` is the stream's index.
        """
        if number not in self.pools:
            # No cycle: simulate runs without the collector.
            self.pools[number] = self.kind(number, weakref.proxy(self))
        return self.pools[number]

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate a block from the stream's cached segments or a new one.

        Raises AllocatorError beyond `limit`.
        """
        size = -(-size // UNIT) * UNIT or UNIT
        is_small = size <= SMALL_BLOCK
        pool = self.pool(2 * stream + is_small)
        start, end = pool.take(size)
        self.allocated += end - start
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return Block(start, end - start, pool)

    def free(self, block: Block) -> None:
        """Return `block` to its pool, merged with free neighbours."""
        self.allocated -= block.size
        block.pool.give((block.address, block.address + block.size))

    def empty_cache(self) -> None:
        """Release every segment without a living block, as `torch.cuda.empty_cache()` does."""
        for pool in self.pools.values():
            for size in pool.release():
                self.reserved -= size
                self.given_back += 1

    def reserve(self, total: int) -> None:
        """Take `total` bytes more from the card.

        The card may have to release what is unused first (`release_cached_blocks`). Raises
        AllocatorError where that is not enough.
        """
        if self.limit is not None and self.reserved + total > self.limit:
            self.empty_cache()
            if self.reserved + total > self.limit:
                living = self.reserved - self._cached()
                raise AllocatorError(total, living, self.reserved, self.limit)
        self.mallocs += 1
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _cached(self) -> int:
        """Return the bytes of all free blocks."""
        cached = 0
        for pool in self.pools.values():
            cached += sum(end - start for start, end in pool.free.items())
        return cached


@dataclass(frozen=True)
class Replayed:
    """What a log takes of the card.

    Attributes:
        reserved: the most bytes of segments over the log.
        internal_fragmentation: at index p, what the blocks alive after the first p events hold
            beyond the requests.
        failed: the error of the request that the card had no room for, if there is one.
    """

    reserved: int
    internal_fragmentation: np.ndarray
    failed: AllocatorError | None = None


def replay(
    sizes: np.ndarray,
    keys: np.ndarray,
    streams: np.ndarray,
    limit: int | None = None,
) -> Replayed:
    """Run a log of births and frees.

    Args:
        sizes: of each event +bytes at a birth or -bytes at its free (multiples of 512; each free
            has a birth before it).
        keys: the number of its storage, which may be used again then.
        streams: its stream's index.
        limit: the card's bytes for segments. Where these do not suffice, `failed` says where, and
            the rest is the replay without a limit.
    """
    allocator = Allocator(limit=limit)
    births = sizes > 0
    numbers = _block_numbers(births, keys)
    # An event is the size of a block to take, or ~number of one to give back.
    events = np.where(births, sizes, ~numbers)
    pools = _pools_of(allocator, sizes, streams)
    blocks: list[tuple[int, int]] = []
    try:
        for pool, event in zip(pools.tolist(), events.tolist(), strict=True):
            if event > 0:
                blocks.append(pool.take(event))
            else:
                pool.give(blocks[~event])
    except AllocatorError as error:
        # The request that failed is the birth after those that have a block.
        error.event = int(np.flatnonzero(births)[len(blocks)])
        return replace(replay(sizes, keys, streams), failed=error)
    bounds = np.fromiter(
        chain.from_iterable(blocks),
        np.int64,
        2 * len(blocks),
    )
    # What a block has beyond its request is lost from its birth to its free.
    taken = bounds[1::2] - bounds[::2]
    requested = np.compress(births, sizes)
    rests = np.take(taken - requested, numbers)
    fragmentation = np.where(births, rests, -rests).cumsum()
    return Replayed(allocator.peak_reserved, np.concatenate([[0], fragmentation]))


def _block_numbers(births: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the number of each event's block, in the order of births."""
    numbers = np.cumsum(births) - 1
    # Sorted by storage, and by time within each, a free stands right behind its birth.
    order = np.argsort(keys, kind="stable")
    frees = np.flatnonzero(~births[order])
    numbers[order[frees]] = numbers[order[frees - 1]]
    return numbers


def _pools_of(
    allocator: Allocator,
    sizes: np.ndarray,
    streams: np.ndarray,
) -> np.ndarray:
    """Return the pool of each event."""
    count = 2 * (streams.max(initial=0) + 1)
    pools = np.array([allocator.pool(number) for number in range(count)], dtype=object)
    is_small = abs(sizes) <= SMALL_BLOCK
    return pools[2 * streams + is_small]


def without_sharing(sizes: np.ndarray, streams: np.ndarray) -> int:
    """Return the bytes of a log's segments if none served requests of two sizes.

    The log is as for `replay`.

    Each size then has the segments of its own most blocks at a time. Reuse across sizes depends on
    which block is free at which moment, which a step that differs a little from the log decides
    otherwise; reuse within a size does not. Requests of 10 MiB and more whose segments are equal
    are of one size, as are all of up to 1 MiB.
    """
    size = abs(sizes)
    in_steps = -(-size // ROUND_LARGE) * ROUND_LARGE
    exact = np.where(size < LARGE_REQUEST, size, in_steps)
    # 0 stands for all small requests, whose bytes fill segments of 2 MiB together.
    kind = np.where(size <= SMALL_BLOCK, 0, exact)
    order = np.lexsort((kind, streams))  # stable: within a kind as in the log
    changes = np.diff(kind[order]) | np.diff(streams[order])
    starts = np.flatnonzero(changes) + 1
    total = 0
    for group in np.split(order, starts):
        one = int(kind[group[0]])
        if one == 0:
            most = int(sizes[group].cumsum().max())
            total += -(-most // SMALL_SEGMENT) * SMALL_SEGMENT
        else:
            # The most blocks of this size that are alive at a time.
            most = int(np.sign(sizes[group]).cumsum().max())
            shared = LARGE_SEGMENT // one if one < LARGE_REQUEST else 1
            total += -(-most // shared) * segment(one)
    return total
