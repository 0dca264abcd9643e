"""What the ledger is written in: blocks of memory, tensors and weights that refer to them, operators that wait.

Whatever refers to a block keeps it alive, so the classes here say who holds what in the forward pass's graph, and
`Node.run` says in which order an operator of the backward pass makes gradients and lets go.
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ledger import Ledger

# The gradient for an operator's input: a new block of the input's own shape (OWN) or of the result's (FULL), to be
# summed over what was broadcast; the incoming gradient itself, summed likewise (PASS), or a view of a part of it
# (PART); or a copy in the input's dtype (CAST).
OWN, FULL, PASS, PART, CAST = "own", "full", "pass", "part", "cast"
PRODUCTS = ("linear", "gemm_4bit", "matmul_8bit")
NEVER = 1 << 60  # the death of what is still there


class Entry:
    """One line of the ledger: a block's size in bytes, what it is, and the events at which it came and went.

    `held` is what the allocator gives for it: the size and its `slack`.
    """

    __slots__ = ("birth", "category", "death", "held", "op", "shape", "size", "where", "width")

    def alive(self, event: int) -> bool:
        """Whether the block exists after so many events."""
        return self.birth < event <= self.death


class Block:
    """A hold on an entry: the memory is freed when the last hold goes.

    It knows the ledger's lists and not the ledger, which holds blocks: no cycle is left to the garbage collector.
    """

    __slots__ = ("changes", "entry", "lines")

    def __del__(self):
        entry, changes = self.entry, self.changes
        entry.death = len(changes)
        changes.append(-entry.held)
        self.lines.append(entry)


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


class Parameter:
    """A weight of the model, whose own memory is counted elsewhere. `uses` are the gradients it still waits for."""

    __slots__ = ("block", "gradient", "name", "needs", "partial", "quantized", "shape", "uses", "width")

    def __init__(self, name: str, shape: tuple[int, ...], width: int, needs: bool = True, quantized: str | None = None):
        self.name, self.shape, self.width, self.needs, self.quantized = name, shape, width, needs, quantized
        self.uses, self.block, self.partial, self.gradient = 0, None, None, None

    @property
    def node(self) -> "Parameter":
        """Who receives the gradient."""
        return self

    def receive(self, ledger: "Ledger", gradient: Tensor) -> bool:
        """Gradients of all uses are added up first (the engine's input buffer); returns whether that was the last.

        In place, but for the first one from a linear layer: that is a transposed view, so the sum is new. DeepSpeed's
        linear layer of stage 3 computes it the other way round (`LinearFunctionForZeroStage3`), and the sum is in place.
        """
        if self.partial is None:
            self.partial = gradient
        elif self.partial.block.entry.op == "linear" and not ledger.own_linear:
            sliced = prod(gradient.block.entry.shape) > prod(self.shape)  # of the whole table, under tensor parallel
            part = ledger.tensor("clone", self.shape, self.width) if sliced else None
            self.partial = ledger.tensor("add", self.shape, self.width)
            del part
        self.uses -= 1
        return self.uses <= 0


class Node:
    """One operator of the forward pass as the backward pass sees it."""

    __slots__ = ("edges", "extra", "gradient", "held", "op", "saved", "shape", "spike", "where")

    def receive(self, ledger: "Ledger", gradient: Tensor) -> None:
        """Waits for the gradients of all uses; those of a split's pieces are joined."""
        if self.op == "split":
            self.gradient = [*(self.gradient or ()), gradient]
        elif self.gradient is None:
            self.gradient = gradient
        else:
            self.gradient = ledger.accumulate(self.gradient, gradient, self.shape)

    def run(self, ledger: "Ledger") -> list[tuple]:
        """The gradients for the inputs, as (who receives it, Tensor)."""
        if type(self.saved) is Replay:
            self.saved = self.saved.give(ledger)
        gradient, ledger.where, op, results = self.gradient, self.where, self.op, []
        if self.spike:
            ledger.spend(self.spike, op)
        extra = ledger.block(op, (self.extra,), 1) if self.extra else None
        width = (gradient[0] if op == "split" else gradient).width
        for receiver, shape, own_width, how in self.edges:
            if how is OWN:
                results.append((receiver, ledger.tensor(op, shape, width)))
            elif how is CAST:
                results.append((receiver, ledger.tensor("to", shape, own_width)))
            elif how is FULL:
                results.append((receiver, ledger.tensor(op, self.shape, width)))
            else:
                results.append((receiver, Tensor(gradient.block, shape, width)))
        del extra
        for i, (receiver, shape, own_width, how) in enumerate(self.edges):
            if how is OWN and len(shape) == 1 and op in PRODUCTS:  # a bias
                ledger.add_up(self.shape, shape, width)
            if how is PASS or how is FULL:
                if shape != self.shape and prod(shape) != prod(self.shape):
                    ledger.add_up(self.shape, shape, width)
                    results[i] = receiver, ledger.tensor("sum", shape, width)
                elif how is PASS and type(receiver) is Parameter:  # it keeps no gradient that others use
                    results[i] = receiver, ledger.tensor("clone", shape, width)
            if width != own_width and how is not CAST:
                results[i] = receiver, ledger.tensor("to", shape, own_width)
        del gradient
        self.gradient = self.saved = self.held = None
        return results


class Leaf:
    """What stands for a tensor that was told to need a gradient: the graph holds it, and the gradient's first part.

    Without a `block` it holds neither.
    """

    def __init__(self, block: Block):
        self.block, self.gradient = block, None

    def receive(self, ledger: "Ledger", gradient: Tensor) -> None:
        """The gradient's parts are not added up here."""
        if self.block:
            self.gradient = self.gradient or gradient


class Hook:
    """Something that backward does when it gets here."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]):
        self.call = call


class Replay:
    """A checkpointed piece of the forward pass: `function(x)` runs again when its first saved tensor is needed."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor):
        self.function, self.x, self.count, self.filled = function, x, 0, None

    def give(self, ledger: "Ledger") -> list[Block]:
        """The saved tensors of the next operator, last one first."""
        if self.filled is None:
            self.filled = ledger.refill(self)[: self.count]
        return self.filled.pop()

    def skip(self) -> None:
        """The next operator, last one first, got no gradient."""
        if self.filled is None:
            self.count -= 1
        else:
            self.filled.pop()


class Stop(Exception):
    """A recomputation has everything it needs (`torch.utils.checkpoint`, early stop)."""
