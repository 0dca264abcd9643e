"""Blocks of memory and tensors without content: what a ledger counts."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ledger import Ledger

# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kLargeBuffer, kMinLargeAlloc, kRoundLarge
ROUND, SMALL, SEGMENT, OWN_SEGMENT, ROUND_LARGE = 512, 1 << 20, 20 << 20, 10 << 20, 2 << 20


def rounded(size: int) -> int:
    """`size` bytes as the CUDA allocator hands them out."""
    return -(-size // ROUND) * ROUND


@lru_cache(maxsize=4096)
def slack(size: int) -> int:
    """Bytes that a block of `size` bytes holds beyond that, because the allocator does not split off 1 MiB or less.

    Over 10 MiB a request gets a segment of its own, a multiple of 2 MiB. Between 1 and 10 MiB requests share segments of
    20 MiB; equal ones leave a rest that the last of them holds, counted here in equal parts. Up to 1 MiB nothing is left.
    """
    if size <= SMALL:
        return 0
    if size >= OWN_SEGMENT:
        rest = -size % ROUND_LARGE
        return rest if rest <= SMALL else 0
    fit = SEGMENT // size
    rest = SEGMENT - fit * size
    return rest // fit // ROUND * ROUND if rest <= SMALL else 0


class Entry:
    """One line of the ledger: a block's size in bytes, what it is, and the events at which it came and went.

    `held` is what the allocator gives for it: the size and its `slack`.
    """

    __slots__ = ("birth", "category", "death", "held", "op", "shape", "size", "where", "width")


class Block:
    """A hold on an entry: the memory is freed when the last hold goes."""

    __slots__ = ("entry", "ledger")

    def __init__(self, ledger: "Ledger", entry: Entry):
        self.ledger, self.entry = ledger, entry

    def __del__(self):
        entry, ledger = self.entry, self.ledger
        entry.death = len(ledger.changes)
        ledger.changes.append(-entry.held)
        ledger.lines.append(entry)


class Tensor:
    """A view of a block. `needs` says whether a gradient flows to it, `node` is the operator that made it.

    `packed`: the numbers lie in the order of the shape, so that a batched product can take them as they are.
    """

    __slots__ = ("block", "needs", "node", "packed", "shape", "width")

    def __init__(self, block: Block | None, shape: tuple[int, ...], width: int, node=None, needs: bool = False):
        self.block, self.shape, self.width, self.node, self.needs = block, shape, width, node, needs
        self.packed = False

    def view(self, *shape: int) -> "Tensor":
        """The same block under another shape; its gradient is a view too."""
        return Tensor(self.block, shape, self.width, self.node, self.needs)
