"""Model of expandable segments (`expandable_segments:True`).

It follows `c10/cuda/CUDACachingAllocator.cpp`.

Each pool has one range of addresses, longer than any card's memory, and maps memory to its pages (2
MiB in the small pool, 20 MiB in the large one) as far as needed. A request that finds no block
extends the free block at the end of the mapped part, so remainders of different sizes are not
stranded in segments of their own. Blocks are split from 512 bytes on. `empty_cache` unmaps every
page that lies wholly in a free block.
"""

from bisect import bisect_left

from vramlab.hardware.allocator import ADDRESSES, Allocator, Pool
from vramlab.hardware.overhead import LARGE_SEGMENT, SMALL_SEGMENT


class ExpandablePool(Pool):
    """A pool with one range of addresses, of which `holes` (start to end) have no memory."""

    def __init__(self, number: int, allocator: Allocator):
        super().__init__(number, allocator)
        self.page = SMALL_SEGMENT if self.small else LARGE_SEGMENT
        # At first all of the range is one hole.
        self.holes = {self._next: self._next + ADDRESSES}

    def take(self, size: int) -> tuple[int, int]:
        """Return (start, end) of the best fit or the lowest run of free blocks and holes, split."""
        start = self._best_fit(size)
        if start is None:
            start, end = self._map(size)
        else:
            end = self.remove(start)
        # Expandable blocks are split whatever the rest, see the module's text.
        if end > start + size:
            self.give((start + size, end))
        return start, start + size

    def release(self) -> list[int]:
        """Unmap every page that lies wholly in a free block; return the sizes of the holes made."""
        made = []
        # A copy, since blocks are taken out of it.
        for start, end in list(self.free.items()):
            # Pages begin at multiples of their size, so a block's ends may lie within one.
            first = -(-start // self.page) * self.page
            last = end // self.page * self.page
            if first < last:
                made.append(last - first)
                self.remove(start)
                # What is left of the block on either side.
                if start < first:
                    self.give((start, first))
                if last < end:
                    self.give((last, end))
                # Holes that touch are one: this one begins where the hole before it does, and ends
                # where the hole behind it does.
                begin = first
                for hole, behind in self.holes.items():
                    if behind == first:
                        begin = hole
                self.holes[begin] = self.holes.pop(last, last)
        return made

    def _best_fit(self, size: int) -> int | None:
        """As without expandable segments, but a block that can grow counts with its hole.

        So it is taken last.
        """
        best = None
        least = 0
        # Sizes in rising order, from the first that is large enough.
        for have in self.sizes[bisect_left(self.sizes, size) :]:
            if not self.buckets[have]:
                # As in `Pool.take`: or thousands of empty buckets are met again and again.
                del self.buckets[have]
                self.sizes.remove(have)
                continue
            for start in self.buckets[have]:
                end = start + have
                # The block and the hole behind it, into which it could grow.
                grown = self.holes.get(end, end) - start
                if best is not None and grown >= least:
                    return best
                best = start
                least = grown
        return best

    def _run(self, size: int) -> tuple[int, list[tuple[int, int]]]:
        """Return where the lowest run with room for `size` begins, and the pages to be mapped:
        (start, end) in each hole.
        """
        for hole in sorted(self.holes):
            # A free block that ends where the hole begins is the start of the run.
            before = self.starts.get(hole)
            start = before if self.free.get(before) == hole else hole
            at = start
            pages = []
            while at < start + size and (at in self.free or at in self.holes):
                if at in self.holes:
                    missing = start + size - at
                    # Whole pages, rounded up, at most up to the hole's end.
                    mapped = -(-missing // self.page) * self.page
                    pages.append((at, min(at + mapped, self.holes[at])))
                at = self.free.get(at) or pages[-1][1]
            if at >= start + size:
                return start, pages
        raise MemoryError("a range of addresses is used up")  # pragma: no cover

    def _map(self, size: int) -> tuple[int, int]:
        """Map the pages of the lowest run; return the free block there, taken out of the pool."""
        allocator = self.allocator
        start, pages = self._run(size)
        if allocator.limit is not None and allocator.reserved + _total(pages) > allocator.limit:
            allocator.empty_cache()  # which may unmap pages of the run
            start, pages = self._run(size)
        allocator.reserve(_total(pages))
        # `reserve` has counted one.
        allocator.mallocs += len(pages) - 1
        for at, end in pages:
            behind = self.holes.pop(at)
            if behind > end:
                self.holes[end] = behind
            # Given to the pool, it joins the free block before it.
            self.give((at, end))
        return start, self.remove(start)


class ExpandableAllocator(Allocator):
    """The allocator with expandable segments.

    `mallocs` and `given_back` count ranges of pages mapped and unmapped.
    """

    kind = ExpandablePool


def _total(pages: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in pages)
