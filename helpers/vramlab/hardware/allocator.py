"""Model of PyTorch's CUDA caching allocator: how many bytes of segments a sequence of requests reserves.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default settings. A request is rounded up to 512 bytes
(kMinBlockSize). Requests of up to 1 MiB (kSmallSize) come from the small pool, whose segments are 2 MiB (kSmallBuffer);
larger ones from the large pool, whose segments are 20 MiB (kLargeBuffer) for requests under 10 MiB (kMinLargeAlloc) and
otherwise the request rounded up to 2 MiB (kRoundLarge). The smallest free block that fits is taken; what is left of it
becomes a free block if it is at least 512 bytes (small pool) or over 1 MiB (large pool), else it stays part of the
allocation, which is why `allocated` can exceed the requests. Freed blocks merge with free neighbours and stay cached.
Where the card has no room for a segment, every segment without a living block is released, and it is tried again
(`release_cached_blocks`).
"""

import weakref
from bisect import bisect_right, insort
from collections import namedtuple
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from ..report.errors import VramLabError
from ..report.report import format_bytes
from .overhead import LARGE_REQUEST, LARGE_SEGMENT, ROUND_LARGE, SMALL_BLOCK, SMALL_SEGMENT, UNIT, segment

ADDRESSES = LARGE_SEGMENT << 30  # of a pool: more than any card has, in whole segments of both kinds
Block = namedtuple("Block", "address size pool")  # what `malloc` returns, in bytes


class AllocatorError(VramLabError, MemoryError):
    """The card has no room for a segment, even after all unused ones were released. `event`: the index in a replayed log;
    `needed`: bytes of segments with which there would have been."""

    def __init__(self, segment: int, allocated: int, reserved: int, limit: int):
        self.allocated, self.reserved, self.limit, self.event = allocated, reserved, limit, -1
        self.needed = reserved + segment
        held, most = format_bytes(allocated), format_bytes(limit)
        super().__init__(f"out of memory: {format_bytes(segment)} more beside {held} allocated, of {most}.")


class Pool:
    """One stream's segments for small requests (odd `number`) or for large ones, and the free blocks in them."""

    def __init__(self, number: int, allocator: "Allocator"):
        self.small, self.allocator, self._next = number % 2 == 1, allocator, ADDRESSES * (number + 1)
        self.segments: dict[int, int] = {}  # start to end
        self.free: dict[int, int] = {}  # start to end of each free block
        self.starts: dict[int, int] = {}  # end to start, also of blocks that are not free any more
        self.buckets: dict[int, list[int]] = {}  # size to starts of the free blocks, lowest first
        self.sizes: list[int] = []  # of the buckets, in order; an empty one goes when a best fit meets it

    def take(self, size: int) -> tuple[int, int]:
        """Return (start, end) of the smallest free block for `size` or a new segment, split (`should_split`)."""
        free, buckets, sizes = self.free, self.buckets, self.sizes
        if same := buckets.get(size):
            start = same.pop(0)
            return start, free.pop(start)
        index = bisect_right(sizes, size)
        while index < len(sizes):
            if same := buckets[sizes[index]]:
                start = same.pop(0)
                end = free.pop(start)
                break
            del buckets[sizes.pop(index)]
        else:
            start, end = self._next, self._next + (SMALL_SEGMENT if self.small else segment(size))
            self.allocator.reserve(end - start)
            self.segments[start], self._next = end, end + UNIT  # blocks of two segments do not touch
        rest = end - start - size
        if rest > SMALL_BLOCK or (rest and self.small):  # as `give`, without a free neighbour
            cut = start + size
            free[cut], self.starts[end] = end, cut
            if rest in buckets:
                insort(buckets[rest], cut)
            else:
                buckets[rest] = [cut]
                insort(sizes, rest)
            end = cut
        return start, end

    def give(self, block: tuple[int, int]) -> None:
        """Make a block free, merged with free neighbours (`try_merge_blocks`)."""
        start, end = block
        free, starts, buckets = self.free, self.starts, self.buckets
        if start in starts and free.get(starts[start]) == start:
            start = starts[start]
            buckets[free[start] - start].remove(start)
        if end in free:
            end = self.remove(end)
        free[start], starts[end] = end, start
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
        unused = [start for start, end in self.segments.items() if self.free.get(start) == end]
        for start in unused:
            self.remove(start)
        return [self.segments.pop(start) - start for start in unused]


@dataclass
class Allocator:
    """The state of the allocator in bytes; `peak_…` are maxima so far.

    `limit`: bytes of segments that the card can hold; None: no limit. `mallocs` and `given_back` count calls of
    cudaMalloc and cudaFree, which are slow; requests served from cached segments need none.
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
        """Return the pool for small requests (odd `number`) or large ones on stream `number // 2`."""
        if number not in self.pools:
            self.pools[number] = self.kind(number, weakref.proxy(self))  # no cycle: simulate runs without the collector
        return self.pools[number]

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate a block from the stream's cached segments or a new one. Raises AllocatorError beyond `limit`."""
        size = -(-size // UNIT) * UNIT or UNIT
        pool = self.pool(2 * stream + (size <= SMALL_BLOCK))
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
        for size in chain.from_iterable(pool.release() for pool in self.pools.values()):
            self.reserved -= size
            self.given_back += 1

    def reserve(self, total: int) -> None:
        """Take `total` bytes more from the card, which may release what is unused (`release_cached_blocks`)."""
        if self.limit is not None and self.reserved + total > self.limit:
            self.empty_cache()
            if self.reserved + total > self.limit:
                cached = sum(end - start for pool in self.pools.values() for start, end in pool.free.items())
                raise AllocatorError(total, self.reserved - cached, self.reserved, self.limit)
        self.mallocs += 1
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)


@dataclass(frozen=True)
class Replayed:
    """The most bytes of segments over a log; `internal_fragmentation[p]`: what the blocks alive after the first p events
    hold beyond the requests; `failed`: the error of the request that the card had no room for, if there is one."""

    reserved: int
    internal_fragmentation: np.ndarray
    failed: AllocatorError | None = None


def replay(sizes: np.ndarray, keys: np.ndarray, streams: np.ndarray, limit: int | None = None) -> Replayed:
    """Run a log: of each event +bytes at a birth or -bytes at its free (multiples of 512; each free has a birth before it),
    the number of its storage, which may be used again then, and its stream's index. Where `limit`, the card's bytes for
    segments, does not suffice, `failed` says where, and the rest is the replay without a limit."""
    allocator, births = Allocator(limit=limit), sizes > 0
    pools = np.array([allocator.pool(number) for number in range(2 * streams.max(initial=0) + 2)], dtype=object)
    pools = pools[2 * streams + (abs(sizes) <= SMALL_BLOCK)]
    numbers = np.cumsum(births) - 1  # of each event's block, in the order of births
    order = np.argsort(keys, kind="stable")
    frees = np.flatnonzero(~births[order])  # each right behind its birth
    numbers[order[frees]] = numbers[order[frees - 1]]
    blocks: list[tuple[int, int]] = []
    try:
        for pool, event in zip(pools.tolist(), np.where(births, sizes, ~numbers).tolist(), strict=True):
            if event > 0:
                blocks.append(pool.take(event))
            else:
                pool.give(blocks[~event])
    except AllocatorError as error:
        error.event = int(np.flatnonzero(births)[len(blocks)])
        return replace(replay(sizes, keys, streams), failed=error)
    ends = np.fromiter(chain.from_iterable(blocks), np.int64, 2 * len(blocks))
    rests = (ends[1::2] - ends[::2] - sizes[births])[numbers]
    return Replayed(allocator.peak_reserved, np.concatenate([[0], np.where(births, rests, -rests).cumsum()]))


def without_sharing(sizes: np.ndarray, streams: np.ndarray) -> int:
    """Return the bytes of segments for a log (as for `replay`) if none served requests of two sizes.

    Each size then has the segments of its own most blocks at a time. Reuse across sizes depends on which block is free at
    which moment, which a step that differs a little from the log decides otherwise; reuse within a size does not. Requests
    of 10 MiB and more whose segments are equal are of one size, as are all of up to 1 MiB.
    """
    size = abs(sizes)
    exact = np.where(size < LARGE_REQUEST, size, -(-size // ROUND_LARGE) * ROUND_LARGE)
    kind = np.where(size <= SMALL_BLOCK, 0, exact)
    order = np.lexsort((kind, streams))  # stable: within a kind as in the log
    changes = np.diff(kind[order]) | np.diff(streams[order])
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    total = 0
    for group in np.split(order, starts[1:]):
        is_small = kind[group[0]] == 0
        counted = sizes[group] if is_small else np.sign(sizes[group])
        most, one = int(counted.cumsum().max()), int(kind[group[0]])
        if is_small:
            total += -(-most // SMALL_SEGMENT) * SMALL_SEGMENT
        else:
            shared = LARGE_SEGMENT // one if one < LARGE_REQUEST else 1
            total += -(-most // shared) * segment(one)
    return total
