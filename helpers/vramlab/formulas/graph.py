"""The graph of a step: tensors that say which operator made them, and how gradients go back.

A `Tensor` has a shape, a width (bytes an element) and a block of memory, but no content.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from .calls import ONE
from .memory import Block, Memory

# How an operator's backward formula makes the gradient for an input. A number instead of one of
# these names a saved tensor, which the gradient is written over.
OWN = "own"  # a new block of the input's shape
BIAS = "bias"  # a new block of the input's shape, by summing rows
FULL = "full"  # a new block of the result's shape, then summed over what was broadcast
PASS = "pass"  # the incoming gradient itself, summed over what was broadcast
PART = "part"  # a view of a part of the incoming gradient
CAST = "cast"  # a copy of the incoming gradient in the input's dtype
ALL_OWN = (OWN,) * 8
Saved = list[Block | None]  # what an operator keeps for backward
PRODUCTS = ("linear", "bmm", "gemm_4bit")  # operators that cuBLAS multiplies, backward too


class Tensor:
    """A view of a block.

    Attributes:
        node: the operator that made it. `needs`: it requires a gradient.
        packed: its numbers lie in the order of its shape; a batched product takes them without a
            copy.
    """

    __slots__ = ("block", "needs", "node", "packed", "shape", "width")
    block: Block | None
    node: "Node | Leaf | None"
    packed: bool

    def __init__(
        self,
        block: Block | None,
        shape: tuple[int, ...],
        width: int,
        node: "Node | Leaf | None" = None,
        needs: bool = False,
    ):
        self.block = block
        self.shape = shape
        self.width = width
        self.node = node
        self.needs = needs
        self.packed = False

    def view(self, *shape: int) -> "Tensor":
        """Return the same block under another shape."""
        return Tensor(self.block, shape, self.width, self.node, self.needs)


class Parameter(Tensor):
    """A weight, whose own memory is counted elsewhere.

    Attributes:
        quantized: "nf4" or "fp4" where it is stored in 4 bits.
        uses: how many gradients it still waits for. `partial`: the sum of those that came.
        gradient: the complete one, or True where an earlier micro-batch left it.
    """

    __slots__ = (
        "gradient",
        "name",
        "partial",
        "quantized",
        "uses",
    )
    # Its memory is elsewhere, and nothing made it.
    block = None
    node = None

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        width: int,
        needs: bool = True,
        quantized: str | None = None,
    ):
        self.name = name
        self.shape = shape
        self.width = width
        self.needs = needs
        self.quantized = quantized
        self.uses = 0
        self.partial: Block | None = None
        self.gradient: Block | bool | None = None

    def receive(self, ledger: Memory, gradient: Block) -> bool:
        """Add `gradient` to those of other uses; return True with the last one."""
        if self.partial is None:
            self.partial = gradient
        elif self.partial.entry.op == "linear" and not ledger.adds_linear_in_place:
            # A linear layer's gradient is a transposed view, which is not added to in place.
            self.partial = ledger.block("add", self.shape, self.width)
        self.uses -= 1
        return self.uses <= 0


class Node:
    """An operator of the forward pass, as the backward pass sees it.

    Attributes:
        edges: for each input that requires a gradient (receiver, shape, width, how it is made).
        extra, spike: as in `Ledger.op`.
        saved: blocks that backward needs, or the `Replay` that makes them.
        gradient: the incoming one; of a split a list, one for each piece.
    """

    __slots__ = ("edges", "extra", "gradient", "op", "saved", "shape", "spike", "where")
    edges: "list[tuple[Node | Leaf | Parameter, tuple[int, ...], int, str | int]]"
    extra: int | Sequence[int]
    gradient: Any
    op: str
    saved: Any
    shape: tuple[int, ...]
    spike: int | Sequence[int]
    where: str

    def receive(self, ledger: Memory, gradient: Block) -> None:
        """Add up the gradients of all uses, in place; those of a split's pieces are joined."""
        # A split waits for the gradients of its pieces, and joins them when it runs.
        if self.op == "split":
            self.gradient = [*(self.gradient or ()), gradient]
        elif self.gradient is None:
            self.gradient = gradient
        else:
            ledger.calls += 1

    def run(
        self,
        ledger: Memory,
        complete: Callable[[Parameter], None],
        recomputed: bool = False,
    ) -> None:
        """Make the gradients for the inputs, free what that took, and hand them on.

        Args:
            complete: called with a parameter whose gradient is complete.
            recomputed: what was saved comes from a checkpoint, and goes when the formula has run.
        """
        ledger.where = self.where
        once, each = ledger.backward_calls.get(self.op, ONE)
        ledger.calls += once + each * len(self.edges)
        # It comes and goes before the gradients are made.
        if self.spike:
            ledger.scratch(self.spike, self.op)
        made = self._gradients(ledger, recomputed)
        # Popped from the end, a gradient is freed as soon as its receiver has no use for it.
        made.reverse()
        self.gradient = None
        self.saved = None
        for receiver, _, _, _ in self.edges:
            if receiver.receive(ledger, made.pop()):
                assert isinstance(receiver, Parameter)  # no other is ever complete
                complete(receiver)

    def _gradients(self, ledger: Memory, recomputed: bool) -> list[Block]:
        """Make a gradient for each edge; then cast or sum what is not like the input."""
        gradient = self.gradient
        op = self.op
        # It lives until the gradients are made, and goes before they are cast.
        extra = ledger.scratch(self.extra, op) if self.extra else None
        first = gradient[0] if op == "split" else gradient
        width = first.entry.width
        made = []
        unlike = []
        for _, shape, own_width, how in self.edges:
            if how is OWN and width == own_width:  # most are, and this runs for every edge
                made.append(ledger.block(op, shape, width))
                continue
            if how is CAST:
                made.append(ledger.block("to", shape, own_width))
                continue
            if type(how) is int:
                made.append(self.saved[how])
                continue
            if width != own_width or how is BIAS or shape != self.shape:
                unlike.append((len(made), shape, own_width, how))
            if how is OWN or how is BIAS:
                made.append(ledger.block(op, shape, width))
            elif how is FULL:
                made.append(ledger.block(op, self.shape, width))
            else:
                made.append(gradient)
        if op in PRODUCTS and any(how is OWN for _, _, _, how in self.edges):
            # Only that of the last product counts: by then all results are there.
            ledger.product_workspace()
        del extra
        if recomputed:
            # Nothing else holds it (torch.utils.checkpoint, unpack_hook).
            self.saved = None
        self._fit(ledger, made, unlike, width)
        return made

    def _fit(
        self,
        ledger: Memory,
        made: list[Block],
        unlike: list[tuple],
        width: int,
    ) -> None:
        """Sum and cast those of `made` that differ from their input.

        `unlike`: of each (place in `made`, shape and width of the input, how it was made).
        """
        for place, shape, own_width, how in unlike:
            if how is BIAS:
                ledger.column_sum_scratch(self.shape, shape, width)
            elif (how is PASS or how is FULL) and prod(shape) != prod(self.shape):
                ledger.column_sum_scratch(self.shape, shape, width)
                made[place] = ledger.block("sum", shape, width)
                ledger.calls += 1
            # A cast comes last: the sum is in the incoming gradient's dtype.
            if width != own_width:
                made[place] = ledger.block("to", shape, own_width)
                ledger.calls += 1


class Leaf:
    """A tensor made to require a gradient (`requires_grad_()`).

    The graph holds its block and its gradient.
    """

    def __init__(self, block: Block | None):
        self.block = block
        self.gradient: Block | None = None
        self.keeps = block is not None

    def receive(self, ledger: Memory, gradient: Block) -> None:
        """Keep the first part; others are added in place."""
        if self.keeps:
            self.gradient = self.gradient or gradient
