"""Expandable segments (`expandable_segments:True`), modelled on `c10/cuda/CUDACachingAllocator.cpp`.

Instead of a segment a request, each pool has one stretch of addresses, longer than any card's memory, and puts memory
behind its pages (2 MiB in the small pool, 20 MiB in the large one) as far as it is needed. A request that finds no
block extends the free block at the end of what is mapped, so the remainders of different shapes are not stranded in
segments of their own. What is left of a block is split off from 512 bytes on. Giving back takes the memory from behind
every page that lies whole in a free block.
"""

import bisect
from dataclasses import dataclass, field

from .allocator import Allocator, Block, Pool
from .overhead import LARGE_SEGMENT, SMALL_SEGMENT, UNIT

START, LENGTH = LARGE_SEGMENT << 30, LARGE_SEGMENT << 20  # of a stretch, in whole pages of both kinds


class Hole(Block):
    """Addresses with no memory behind them; never `free`, so that no block merges with them."""

    __slots__ = ()

    def __init__(self, address: int, size: int, pool: Pool):
        super().__init__(address, size, pool)
        self.free = False


@dataclass
class ExpandableAllocator(Allocator):
    """The allocator with expandable segments. `mallocs` and `given_back` count stretches of pages mapped, unmapped."""

    _holes: dict[Pool, list[Hole]] = field(default_factory=dict)

    def _holes_of(self, pool: Pool) -> list[Hole]:
        """The pool's addresses without memory: at first all of a stretch that is its own."""
        return self._holes.setdefault(pool, [Hole(START + LENGTH * len(self._holes), LENGTH, pool)])

    def empty_cache(self) -> None:
        """Take the memory from behind every page that lies whole in a free block."""
        for pool, kept in self._pools.items():
            page = _page(pool)
            for item in list(kept):
                block = item[2]
                start = -(-block.address // page) * page
                end = (block.address + block.size) // page * page
                if start < end:
                    kept.remove(item)
                    self._unmap(block, start, end)

    def _fitting(self, free: list[tuple[int, int, Block]], size: int) -> int:
        """As ever, but a block that can grow counts as large as it can become, so that it is taken last."""
        index = super()._fitting(free, size)
        while index + 1 < len(free) and _could_be(free[index + 1][2]) < _could_be(free[index][2]):
            index += 1
        return index

    def _splits(self, left: int, small: bool) -> bool:
        return left >= UNIT

    def _segment(self, size: int, pool: Pool) -> Block:
        """The lowest run of free blocks and holes with room for `size`, mapped and merged; taken out of its pool."""
        self._make_room(self._run(size, pool)[1])
        block = self._run(size, pool)[0]
        while isinstance(block, Hole) or block.size < size:
            hole, have = (block, 0) if isinstance(block, Hole) else (block.after, block.size)
            block = self._map(hole, size - have)
        free = self._pools[pool]
        del free[bisect.bisect_left(free, (block.size, block.address), key=lambda item: item[:2])]
        return block

    def _run(self, size: int, pool: Pool) -> tuple[Block, int]:
        """Where to begin, and how many bytes have to be mapped from there on."""
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
        raise MemoryError("a stretch of addresses is used up")  # pragma: no cover (20 TiB)

    def _map(self, hole: Hole, size: int) -> Block:
        """Put memory behind the first pages of `hole`, as many as `size` bytes need; the free block it belongs to."""
        page, holes = _page(hole.pool), self._holes[hole.pool]
        mapped = min(-(-size // page) * page, hole.size)
        self._reserve(mapped)
        block = Block(hole.address, mapped, hole.pool)
        block.free, block.before, block.after = False, hole.before, hole.after
        if mapped < hole.size:
            hole.address, hole.size = hole.address + mapped, hole.size - mapped
            hole.before, block.after = block, hole
        else:
            holes.remove(hole)
            if block.after:
                block.after.before = block
        if block.before:
            block.before.after = block
        return self._settle(block)

    def _unmap(self, block: Block, start: int, end: int) -> None:
        """Make a hole from `start` to `end` in a free block that is in no pool any more."""
        pieces = [
            Block(block.address, start - block.address, block.pool),
            Hole(start, end - start, block.pool),
            Block(end, block.address + block.size - end, block.pool),
        ]
        before = block.before
        for piece in (piece for piece in pieces if piece.size):
            piece.before = before
            if before:
                before.after = piece
            if not isinstance(piece, Hole):
                self._keep(piece)
            before = piece
        before.after = block.after
        if block.after:
            block.after.before = before
        self.reserved -= end - start
        self.given_back += 1
        hole, holes = pieces[1], self._holes[block.pool]
        for side in (hole.before, hole.after):
            if isinstance(side, Hole):  # holes that touch are one
                holes.remove(side)
                hole.address, hole.size = min(hole.address, side.address), hole.size + side.size
                if side is hole.before:
                    hole.before = side.before
                    if hole.before:
                        hole.before.after = hole
                else:
                    hole.after = side.after
                    if hole.after:
                        hole.after.before = hole
        bisect.insort(holes, hole, key=lambda hole: hole.address)


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT if pool[0] else LARGE_SEGMENT


def _could_be(block: Block) -> int:
    """What the block would hold if the hole behind it were mapped."""
    return block.size + (block.after.size if isinstance(block.after, Hole) else 0)
