"""The memory that a training step allocates and frees, event by event.

Blocks have sizes and no contents.

A block is freed when the last reference to it goes, by Python's own reference counting, as PyTorch
frees memory. Nobody has to say when.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from weakref import ref

from ..hardware.gpu import Chip
from ..hardware.kernels import column_sums
from ..hardware.overhead import CUBLASLT_WORKSPACE, cublas_workspace, frees_workspaces, rounded
from . import calls
from .reserved import internal_fragmentation

NEVER = 1 << 60  # death of a block that is still alive


class Entry(ref):
    """What is known of a block: a weak reference to it, which joins the events when it is freed.

    Attributes:
        size: bytes, rounded up as the allocator does; `allocated`: with its internal fragmentation.
        birth, death: numbers of the events, known when all have happened.
        op, where: the operator and the module that made it.
        shape, width: what it holds; bytes of one number.
        category: of the report that the bytes count in.
    """

    __slots__ = (
        "allocated",
        "birth",
        "category",
        "death",
        "op",
        "shape",
        "size",
        "where",
        "width",
    )
    allocated: int
    birth: int
    category: str
    death: int
    op: str
    shape: tuple[int, ...]
    size: int
    where: str
    width: int
    # A weak reference hashes what it refers to, and a freed block has no hash.
    __hash__ = object.__hash__


class Block:
    """Memory that is freed when the last reference goes."""

    __slots__ = ("__weakref__", "entry")
    entry: Entry


# Layers are alike, so the same few shapes come again and again.
@lru_cache(maxsize=1 << 14)
def _block_sizes(shape: tuple[int, ...], width: int) -> tuple[int, int]:
    """Return `Entry.size` and `Entry.allocated` of a block."""
    size = rounded(prod(shape) * width)
    return size, size + internal_fragmentation(size)


class Memory:
    """The events of one step: a block's entry when it is allocated, and again when it is freed.

    Attributes:
        chip: the processor whose kernels run.
        workspaces: bytes that a product without and one with a bias allocate while they run; ()
            where cuBLAS's workspaces last (`frees_workspaces`).
        where: the module that runs.
        adds_linear_in_place: linear layers' gradients are no views where DeepSpeed puts in its own.
        rewritten: bytes that operators write over what is there, for which there is no event.
        repeats: (first event, last event, how many more are like these) of what is entered once.
        calls: that the host has made (`calls.py`), by `forward_calls` and `backward_calls`.
    """

    def __init__(self, chip: Chip, events: list[Entry] | None = None):
        self.chip = chip
        self.workspaces: tuple[int, ...] = ()
        if frees_workspaces():
            self.workspaces = (cublas_workspace(chip.capability), CUBLASLT_WORKSPACE)
        self.events: list[Entry] = [] if events is None else events
        self.where = ""
        self.adds_linear_in_place = False
        self.rewritten = 0
        self.repeats: list[tuple[int, int, int]] = []
        self.calls = 0
        self.forward_calls = calls.FORWARD
        self.backward_calls = calls.BACKWARD

    def block(
        self,
        op: str,
        shape: tuple[int, ...],
        width: int,
        category: str = "temporaries",
    ) -> Block:
        """Return a new block of prod(shape) × width bytes, rounded up as the allocator does."""
        block = Block()
        happens = self.events.append
        # The entry is called with itself when the block goes, and so appended a second time.
        entry = Entry(block, happens)
        entry.size, entry.allocated = _block_sizes(shape, width)
        entry.op = op
        entry.where = self.where
        entry.category = category
        entry.shape = shape
        entry.width = width
        # Events are numbered when the last one has happened (`account`).
        entry.birth = NEVER
        entry.death = NEVER
        block.entry = entry
        # The list holds the entry and the entry refers to the block weakly, so the list keeps no
        # block alive.
        happens(entry)
        return block

    def group(
        self,
        op: str,
        sizes: list[tuple[int, int]],
        category: str,
        width: int = 1,
    ) -> Block:
        """Return one block for many that come and go together; `sizes`: (bytes, how many)."""
        # Bytes are added up when the step is over (`account._number`), so the entry may get its
        # size after it has joined the events.
        block = self.block(op, (0,), 1, category)
        entry = block.entry
        total = 0
        entry.size = 0
        fragments = 0
        for size, count in sizes:
            # Each is a request of its own, rounded up by itself.
            whole = rounded(size)
            total += size * count
            entry.size += whole * count
            fragments += internal_fragmentation(whole) * count
        entry.allocated = entry.size + fragments
        # A report shows the group as one row of numbers, without padding.
        entry.shape = (total // width,)
        entry.width = width
        return block

    def scratch(
        self,
        size: int | Sequence[int],
        op: str,
        category: str = "temporaries",
    ) -> Block | None:
        """Allocate `size` bytes, or several sizes at once, while the result lives."""
        if not isinstance(size, int):
            return self.group(op, [(part, 1) for part in size], category)
        # An empty tensor has no block.
        if size == 0:
            return None
        return self.block(op, (size,), 1, category)

    def product_workspace(self, with_bias: bool = False) -> None:
        """Allocate and free the workspace of one matrix product, whose result has been made."""
        if self.workspaces:
            # A product with a bias is cuBLASLt's, which has a workspace of another size.
            without, biased = self.workspaces
            self.scratch(biased if with_bias else without, "mm", "workspace")

    def column_sum_scratch(
        self,
        whole: tuple[int, ...],
        shape: tuple[int, ...],
        width: int,
    ) -> None:
        """Allocate and free the scratch of summing a gradient down to `shape`.

        `whole`: its shape, whose first dimensions are summed over.
        """
        columns = prod(shape)
        if columns > 1:
            rows = prod(whole) // columns
            self.scratch(column_sums(rows, columns, width, self.chip), "sum", "workspace")
