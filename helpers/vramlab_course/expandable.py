"""Model of expandable segments (`expandable_segments:True`), after `c10/cuda/CUDACachingAllocator.cpp`.

Each pool has one range of addresses, longer than any card's memory, and maps memory to its pages (2 MiB in the small
pool, 20 MiB in the large one) as far as needed. A request that finds no block extends the free block at the end of the
mapped part, so remainders of different sizes are not stranded in segments of their own. Blocks are split from 512 bytes
on. `empty_cache` unmaps every page that lies wholly in a free block.
"""

import bisect
from dataclasses import dataclass, field
from itertools import pairwise

from vramlab.hardware.allocator import Allocator, Block, Pool
from vramlab.hardware.overhead import LARGE_SEGMENT, SMALL_SEGMENT, UNIT

START, LENGTH = LARGE_SEGMENT << 30, LARGE_SEGMENT << 20  # of a range, in whole pages of both kinds


def link(*blocks: Block | None) -> None:
    """Make each of `blocks` the neighbour of the next; None is the end of a segment."""
    for left, right in pairwise(blocks):
        if left:
            left.after = right
        if right:
            right.before = left


class Hole(Block):
    """Addresses without memory; never `free`, so that no block merges with them."""

    __slots__ = ()

    def __init__(self, address: int, size: int, pool: Pool):
        super().__init__(address, size, pool, free=False)


@dataclass
class ExpandableAllocator(Allocator):
    """The allocator with expandable segments. `mallocs` and `given_back` count ranges of pages mapped and unmapped."""

    _holes: dict[Pool, list[Hole]] = field(default_factory=dict)

    def empty_cache(self) -> None:
        """Unmap every page that lies wholly in a free block."""
        for pool, kept in self._pools.items():
            page = _page(pool)
            for item in list(kept):
                block = item[2]
                start = -(-block.address // page) * page
                end = (block.address + block.size) // page * page
                if start < end:
                    kept.remove(item)
                    self._unmap(block, start, end)

    def _holes_of(self, pool: Pool) -> list[Hole]:
        return self._holes.setdefault(pool, [Hole(START + LENGTH * len(self._holes), LENGTH, pool)])

    def _best_fit(self, free: list[tuple[int, int, Block]], size: int) -> int:
        """As without expandable segments, but a block that can grow counts with its hole, so that it is taken last."""
        index = super()._best_fit(free, size)
        while index + 1 < len(free) and _grown(free[index + 1][2]) < _grown(free[index][2]):
            index += 1
        return index

    def _splits(self, left: int, small: bool) -> bool:
        return left >= UNIT

    def _segment(self, size: int, pool: Pool) -> Block:
        """The lowest run of free blocks and holes with room for `size`, mapped and merged, in no pool."""
        self._make_room(self._run(size, pool)[1])
        block = self._run(size, pool)[0]
        while isinstance(block, Hole) or block.size < size:
            hole, have = (block, 0) if isinstance(block, Hole) else (block.after, block.size)
            block = self._map(hole, size - have)
        self._take(block)
        return block

    def _run(self, size: int, pool: Pool) -> tuple[Block, int]:
        """The first block of the run, and how many bytes have to be mapped from there on."""
        page = _page(pool)
        for hole in self._holes_of(pool):
            first = hole.before if hole.before and hole.before.free else hole
            have, missing, block = 0, 0, first
            while block and (block.free or isinstance(block, Hole)) and have < size:
                if block.free:
                    have += block.size
                else:
                    mapped = min(-(-(size - have) // page) * page, block.size)
                    have, missing = have + mapped, missing + mapped
                block = block.after
            if have >= size:
                return first, missing
        raise MemoryError("a range of addresses is used up")  # pragma: no cover (20 TiB)

    def _map(self, hole: Hole, size: int) -> Block:
        """Map as many pages at the start of `hole` as `size` bytes need; the free block they belong to."""
        page = _page(hole.pool)
        mapped = min(-(-size // page) * page, hole.size)
        self._reserve(mapped)
        block = Block(hole.address, mapped, hole.pool)
        block.free = False
        if mapped < hole.size:
            hole.address, hole.size = hole.address + mapped, hole.size - mapped
            link(hole.before, block, hole)
        else:
            self._holes[hole.pool].remove(hole)
            link(hole.before, block, hole.after)
        return self._release(block)

    def _unmap(self, block: Block, start: int, end: int) -> None:
        """Make a hole from `start` to `end` in a free block that was taken out of its pool."""
        hole, holes = Hole(start, end - start, block.pool), self._holes[block.pool]
        left = Block(block.address, start - block.address, block.pool)
        right = Block(end, block.address + block.size - end, block.pool)
        link(block.before, *(piece for piece in (left, hole, right) if piece.size), block.after)
        for rest in (left, right):
            if rest.size:
                self._keep(rest)
        self.reserved -= hole.size
        self.given_back += 1
        for side in (hole.before, hole.after):
            if isinstance(side, Hole):  # holes that touch are one
                holes.remove(side)
                hole.size += side.size
                if side is hole.before:
                    hole.address = side.address
                    link(side.before, hole)
                else:
                    link(hole, side.after)
        bisect.insort(holes, hole, key=lambda hole: hole.address)


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT if pool[0] else LARGE_SEGMENT


def _grown(block: Block) -> int:
    """Size of the block with the hole behind it."""
    return block.size + (block.after.size if isinstance(block.after, Hole) else 0)
