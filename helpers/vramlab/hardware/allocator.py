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

import bisect
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from ..report.errors import VramLabError
from ..report.report import format_bytes
from .overhead import SMALL_BLOCK, SMALL_SEGMENT, UNIT, segment


class AllocatorError(VramLabError, MemoryError):
    """The card has no room for a segment, even after all unused ones were released.

    Sizes in bytes; `event` is the request's index in a log that was replayed.
    """

    def __init__(self, segment: int, allocated: int, reserved: int, limit: int):
        self.allocated, self.reserved, self.limit, self.event = allocated, reserved, limit, -1
        held, most = format_bytes(allocated), format_bytes(limit)
        super().__init__(f"out of memory: {format_bytes(segment)} more beside {held} allocated, of {most}.")


Pool = tuple[bool, int]  # (holds small blocks, stream)


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, between its neighbours there."""

    address: int
    size: int
    pool: Pool
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = True


@dataclass
class Allocator:
    """The state of the allocator in bytes; `peak_…` are maxima so far.

    `limit`: bytes of segments that the card can hold; None: no limit. `mallocs` and `given_back` count calls of
    cudaMalloc and cudaFree, which are slow; requests served from cached segments need none.
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
        """Allocate a block from the stream's cached segments or a new one. Raises AllocatorError beyond `limit`."""
        size = -(-size // UNIT) * UNIT or UNIT
        pool = size <= SMALL_BLOCK, stream
        free = self._pools[pool]
        index = self._best_fit(free, size)
        block = free.pop(index)[2] if index < len(free) else self._segment(size, pool)
        left = block.size - size
        if self._splits(left, pool[0]):
            rest = Block(block.address + size, left, pool, block, block.after)
            if block.after:
                block.after.before = rest
            block.size, block.after = size, rest
            bisect.insort(free, (left, rest.address, rest))
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Return `block` to its pool, merged with free neighbours."""
        self.allocated -= block.size
        self._release(block)

    def empty_cache(self) -> None:
        """Release every segment without a living block, as `torch.cuda.empty_cache()` does."""
        for pool in self._pools.values():
            whole = [item for item in pool if not item[2].before and not item[2].after]
            pool[:] = [item for item in pool if item[2].before or item[2].after]
            self.reserved -= sum(size for size, _, _ in whole)
            self.given_back += len(whole)

    def _release(self, block: Block) -> Block:
        """Merge `block` with free neighbours and put the result into its pool."""
        for side in (block.before, block.after):
            if side and side.free:
                self._take(side)
                block, gone = (side, block) if side is block.before else (block, side)
                block.size, block.after = block.size + gone.size, gone.after
                if gone.after:
                    gone.after.before = block
        block.free = True
        self._keep(block)
        return block

    def _keep(self, block: Block) -> None:
        bisect.insort(self._pools[block.pool], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        pool = self._pools[block.pool]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]

    def _best_fit(self, free: list[tuple[int, int, Block]], size: int) -> int:
        """Return the index in `free` of the smallest block that holds `size`; its length when none does."""
        return bisect.bisect_left(free, (size, 0))

    def _splits(self, left: int, small: bool) -> bool:
        """Tell whether the rest of a block becomes a block of its own."""
        return left >= UNIT if small else left > SMALL_BLOCK

    def _segment(self, size: int, pool: Pool) -> Block:
        """Reserve a segment; return its only block, which is in no pool."""
        block = Block(self._next, SMALL_SEGMENT if pool[0] else segment(size), pool)
        self._reserve(block.size)
        self._next += block.size
        return block

    def _reserve(self, total: int) -> None:
        """Take `total` bytes more from the card."""
        self._make_room(total)
        self.mallocs += 1
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _make_room(self, total: int) -> None:
        """Release what is unused if the card could not hold `total` bytes more."""
        if self.limit is None or self.reserved + total <= self.limit:
            return
        self.empty_cache()
        if self.reserved + total > self.limit:
            raise AllocatorError(total, self.allocated, self.reserved, self.limit)


@dataclass(frozen=True)
class Replayed:
    """Peaks of the allocator over a log, in bytes.

    `internal_fragmentation[p]`: what the blocks alive after the first p events hold beyond the rounded requests.
    `failed`: the error of the request that the card had no room for; None where its memory was enough.
    """

    requested: int
    allocated: int
    reserved: int
    internal_fragmentation: list[int]
    failed: AllocatorError | None = None


def replay(log: list[tuple[int, Any, str]], limit: int | None = None) -> Replayed:
    """Run a log, (+size or -size, `tracking.tracker.Storage`, operator), through the allocator.

    Args:
        limit: bytes of segments that the card can hold. If they do not suffice, the replay is that without a limit, and
            `failed` says where it was not enough.
    """
    try:
        return _replay(log, Allocator(limit=limit))
    except AllocatorError as error:
        return replace(_replay(log, Allocator()), failed=error)


def _replay(log: list[tuple[int, Any, str]], allocator: Allocator) -> Replayed:
    blocks: dict[Any, Block] = {}
    malloc, free, requested, most, alive, beyond = allocator.malloc, allocator.free, 0, 0, 0, [0]
    try:
        for size, storage, _ in log:
            if size > 0:
                requested += storage.asked
                if requested > most:
                    most = requested
                blocks[storage] = malloc(size, storage.stream)
            else:
                requested -= storage.asked
                free(blocks.pop(storage))
            alive += size
            beyond.append(allocator.allocated - alive)
    except AllocatorError as error:
        error.event = len(beyond) - 1
        raise
    return Replayed(most, allocator.peak_allocated, allocator.peak_reserved, beyond)
