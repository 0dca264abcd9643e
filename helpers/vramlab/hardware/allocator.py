"""PyTorch's CUDA caching allocator, modelled: how many bytes of segments a sequence of requests reserves.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default settings. A request is rounded up to 512 bytes
(kMinBlockSize). Requests of up to 1 MiB (kSmallSize) come from the small pool, whose segments are 2 MiB (kSmallBuffer);
larger ones from the large pool, whose segments are 20 MiB (kLargeBuffer) for requests under 10 MiB (kMinLargeAlloc) and
otherwise the request rounded up to 2 MiB (kRoundLarge). The smallest free block that fits is taken; what is left of it
becomes a free block if it is at least 512 bytes (small pool) or over 1 MiB (large pool), else it is part of the
allocation, which is why `allocated` can exceed what was asked for. Freed blocks merge with free neighbours and stay.
Where the card can give no further segment, every segment without a living block is given back, and it is tried again
(`release_cached_blocks`); `expandable.py` has the other kind of segments.
"""

import bisect
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..report.errors import VramLabError
from ..report.report import format_bytes
from .overhead import LARGE_REQUEST, LARGE_SEGMENT, ROUND_LARGE, SMALL_BLOCK, SMALL_SEGMENT, UNIT


class AllocatorError(VramLabError, MemoryError):
    """The card has no room for a segment, even after all unused ones were given back."""


Pool = tuple[bool, int]  # whether it is that of small blocks, and of which stream


class Block:
    """A piece of a segment: its address, size, pool, neighbours and whether it is free."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool):
        self.address, self.size, self.pool = address, size, pool
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = True


@dataclass
class Allocator:
    """The state of the allocator. All figures are bytes; `peak_…` are their maxima so far.

    `limit`: the segments that the card can hold, None for a card without end. `mallocs` and `given_back` count the
    calls to cudaMalloc and cudaFree, which are slow; a hundred tensors from cached segments need none.
    """

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    limit: int | None = None
    mallocs: int = 0
    given_back: int = 0
    _pools: dict[Pool, list[tuple[int, int, Block]]] = field(default_factory=lambda: defaultdict(list))
    _next: int = 1 << 30

    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block for `size` bytes; cached segments of the stream are searched first, else a new one is reserved.

        Raises AllocatorError where `limit` leaves no room for it.
        """
        size = max(UNIT, -(-size // UNIT) * UNIT)
        pool = (size <= SMALL_BLOCK, stream)
        free = self._pools[pool]
        index = self._fitting(free, size)
        block = free.pop(index)[2] if index < len(free) else self._segment(size, pool)
        left = block.size - size
        if self._splits(left, pool[0]):
            rest = Block(block.address + size, left, pool)
            rest.before, rest.after, block.size = block, block.after, size
            if rest.after:
                rest.after.before = rest
            block.after = rest
            self._keep(rest)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to its pool, merged with free neighbours."""
        self.allocated -= block.size
        self._settle(block)

    def _settle(self, block: Block) -> Block:
        """Make `block` one with free neighbours and put it into its pool; the block that it became."""
        if block.before and block.before.free:
            block = self._merge(block.before, block)
        if block.after and block.after.free:
            block = self._merge(block, block.after)
        block.free = True
        self._keep(block)
        return block

    def _fitting(self, free: list[tuple[int, int, Block]], size: int) -> int:
        """The place in `free` of the smallest block that holds `size`; its length when none does."""
        return bisect.bisect_left(free, (size, 0))

    def _splits(self, left: int, small: bool) -> bool:
        """Whether what is left of a block becomes a block of its own."""
        return left >= UNIT if small else left > SMALL_BLOCK

    def _segment(self, size: int, pool: Pool) -> Block:
        """A new segment's only block, taken out of its pool."""
        if pool[0]:
            total = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            total = LARGE_SEGMENT
        else:
            total = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(total)
        block = Block(self._next, total, pool)
        self._next += total
        return block

    def _make_room(self, total: int) -> None:
        """Give back what is unused if the card could not hold `total` bytes more."""
        if self.limit is None or self.reserved + total <= self.limit:
            return
        self.empty_cache()
        if self.reserved + total > self.limit:
            held, most = format_bytes(self.allocated), format_bytes(self.limit)
            raise AllocatorError(f"out of memory: {format_bytes(total)} more beside {held} allocated, of {most}.")

    def _reserve(self, total: int) -> None:
        """Ask the card for `total` bytes more."""
        self._make_room(total)
        self.mallocs += 1
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def empty_cache(self) -> None:
        """Give back every segment in which nothing lives, as `torch.cuda.empty_cache()` does."""
        for pool in self._pools.values():
            whole = [item for item in pool if not item[2].before and not item[2].after]
            pool[:] = [item for item in pool if item[2].before or item[2].after]
            self.reserved -= sum(size for size, _, _ in whole)
            self.given_back += len(whole)

    def _keep(self, block: Block) -> None:
        bisect.insort(self._pools[block.pool], (block.size, block.address, block))  # no two have one address

    def _merge(self, left: Block, right: Block) -> Block:
        for block in (left, right):
            if block.free:
                pool = self._pools[block.pool]
                del pool[bisect.bisect_left(pool, (block.size, block.address))]
                block.free = False
        left.size += right.size
        left.after = right.after
        if right.after:
            right.after.before = left
        return left


class Request(Protocol):
    """What a log says of a storage (`vramlab.tracking.tracker.Storage`): bytes asked for, and on which stream."""

    asked: int
    stream: int


@dataclass(frozen=True)
class Replayed:
    """What a log of births and frees made the allocator do. Bytes.

    `internal_fragmentation[p]`: what the blocks alive after the first p events hold beyond the rounded requests. A
    block is not split when no more than 1 MiB would be left of it, and the rest counts as allocated. `fits`: whether
    the card's memory was enough.
    """

    requested: int
    allocated: int
    reserved: int
    internal_fragmentation: list[int]
    fits: bool = True


def replay(log: list[tuple[int, Request, str]], limit: int | None = None) -> Replayed:
    """Run a tracker's log, (+size or -size, storage, operator), through the allocator.

    Args:
        limit: bytes of segments that the card can hold. Where they do not suffice even after unused segments are given
            back, the replay is that of a card without end, and `fits` is False.
    """
    if limit is not None:
        try:
            return _replay(log, Allocator(limit=limit))
        except AllocatorError:
            return replace(_replay(log, Allocator()), fits=False)
    return _replay(log, Allocator())


def _replay(log: list[tuple[int, Request, str]], allocator: Allocator) -> Replayed:
    blocks: dict[int, Block] = {}
    requested = most = alive = 0
    internal_fragmentation = [0]
    for size, storage, _ in log:
        requested += storage.asked if size > 0 else -storage.asked
        most = max(most, requested)
        if size > 0:
            blocks[id(storage)] = allocator.malloc(size, storage.stream)
        else:
            allocator.free(blocks.pop(id(storage)))
        alive += size
        internal_fragmentation.append(allocator.allocated - alive)
    return Replayed(most, allocator.peak_allocated, allocator.peak_reserved, internal_fragmentation)
