"""Autograd with sizes instead of numbers.

A `Tensor` has a shape, a width (bytes an element) and a block of memory, and no content. An operator enters its result
in the ledger and keeps what its backward formula will need. A block is freed when the last reference to it goes, by
Python's own reference counting, as PyTorch frees memory. So a forward pass written with these operators gives the bytes
of the real one at every moment.

The backward pass follows `torch/csrc/autograd/engine.cpp`: operators in reverse order; gradients for the inputs are
computed while the incoming one and the saved tensors live, then summed or cast to the input's shape and dtype
(`validate_outputs`), then those are freed; gradients of several uses are added up; a parameter keeps its gradient.

    >>> ledger = Ledger()
    >>> weight, x = Parameter("w", (4096, 4096), 4), ledger.tensor("input", (512, 4096), 4)
    >>> y = ledger.op("linear", [x, weight], (512, 4096), 4, saves=[x])
    >>> sum(entry.size for entry in ledger.lines) // 2**20  # MiB: the input and the result
    16
    >>> ledger.backward(y)
    >>> weight.gradient.entry.size // 2**20
    64
"""

from collections.abc import Callable
from math import prod
from sys import getrefcount

from ..hardware.gpu import Chip
from ..hardware.overhead import SMALL_BLOCK, UNIT, rounded
from ..hardware.reserved import internal_fragmentation
from ..hardware.scratch import column_sums

# The gradient for an operator's input: a new block of the input's own shape (OWN; BIAS: a sum over rows) or of the
# result's (FULL), to be summed over what was broadcast; the incoming gradient itself, summed likewise (PASS), or a view
# of a part of it (PART); or a copy in the input's dtype (CAST).
OWN, BIAS, FULL, PASS, PART, CAST = "own", "bias", "full", "pass", "part", "cast"
NEVER = 1 << 60  # the death of a block that is still alive
NEW = object()


class Entry:
    """A block: `size` bytes, `allocated` with `internal_fragmentation`, and the events of its birth and death."""

    __slots__ = ("allocated", "birth", "category", "death", "op", "shape", "size", "where", "width")

    def alive(self, event: int) -> bool:
        """Whether the block exists after so many events."""
        return self.birth < event <= self.death


class Block:
    """A reference to an entry, which dies with the last one.

    It knows the ledger's lines and not the ledger, which holds blocks: no cycle is left to the garbage collector.
    """

    __slots__ = ("entry", "lines")

    def __del__(self):
        lines = self.lines
        self.entry.death = len(lines)
        lines.append(self.entry)


class Tensor:
    """A view of a block.

    Attributes:
        node: the operator that made it. `needs`: a gradient flows to it.
        packed: its numbers lie in the order of its shape, so that a batched product takes them as they are.
    """

    __slots__ = ("block", "needs", "node", "packed", "shape", "width")

    def __init__(self, block: Block | None, shape: tuple[int, ...], width: int, node=None, needs: bool = False):
        self.block, self.shape, self.width, self.node, self.needs, self.packed = block, shape, width, node, needs, False

    def view(self, *shape: int) -> "Tensor":
        """The same block under another shape."""
        return Tensor(self.block, shape, self.width, self.node, self.needs)


class Parameter:
    """A weight, whose own memory is counted elsewhere. `uses`: the gradients it still waits for."""

    __slots__ = ("block", "gradient", "name", "needs", "partial", "quantized", "shape", "uses", "width")

    def __init__(self, name: str, shape: tuple[int, ...], width: int, needs: bool = True, quantized: str | None = None):
        self.name, self.shape, self.width, self.needs, self.quantized = name, shape, width, needs, quantized
        self.uses, self.block, self.partial, self.gradient = 0, None, None, None

    @property
    def node(self) -> "Parameter":
        """Who receives the gradient."""
        return self

    def receive(self, ledger: "Ledger", gradient: Tensor) -> bool:
        """Add up the gradients of all uses; True with the last one.

        In place, except to a linear layer's: that is a transposed view, so the sum is new. DeepSpeed's linear layer of
        stage 3 computes it the other way round (`LinearFunctionForZeroStage3`), and the sum is in place.
        """
        if self.partial is None:
            self.partial = gradient
        elif self.partial.block.entry.op == "linear" and not ledger.own_linear:
            self.partial = ledger.tensor("add", self.shape, self.width)
        self.uses -= 1
        return self.uses <= 0


class Node:
    """An operator of the forward pass, as the backward pass sees it."""

    __slots__ = ("edges", "extra", "gradient", "kept", "op", "saved", "shape", "spike", "where")

    def receive(self, ledger: "Ledger", gradient: Tensor) -> None:
        """Add up the gradients of all uses; those of a split's pieces are joined."""
        if self.op == "split":
            self.gradient = [*(self.gradient or ()), gradient]
        elif self.gradient is None:
            self.gradient = gradient
        else:
            self.gradient = ledger.accumulate(self.gradient, gradient, self.shape)

    def run(self, ledger: "Ledger") -> list[tuple]:
        """The gradients for the inputs, as (who receives it, Tensor)."""
        gradient, ledger.where, op, results = self.gradient, self.where, self.op, []
        if self.spike:
            ledger.spend(self.spike, op)
        extra = ledger.block(op, (self.extra,), 1) if self.extra else None
        width = (gradient[0] if op == "split" else gradient).width
        for receiver, shape, own_width, how in self.edges:
            if how is OWN or how is BIAS:
                result = ledger.tensor(op, shape, width)
            elif how is CAST:
                result = ledger.tensor("to", shape, own_width)
            elif how is FULL:
                result = ledger.tensor(op, self.shape, width)
            else:
                result = Tensor(gradient.block, shape, width)
            results.append((receiver, result))
        del extra, result
        for i, (receiver, shape, own_width, how) in enumerate(self.edges):
            if how is BIAS:
                ledger.add_up(self.shape, shape, width)
            elif (how is PASS or how is FULL) and shape != self.shape and prod(shape) != prod(self.shape):
                ledger.add_up(self.shape, shape, width)
                results[i] = receiver, ledger.tensor("sum", shape, width)
            if width != own_width and how is not CAST:
                results[i] = receiver, ledger.tensor("to", shape, own_width)
        del gradient
        self.gradient = self.saved = self.kept = None
        return results


class Leaf:
    """Leaf created by `requires_grad_()`: the graph holds its block, and the first part of its gradient."""

    def __init__(self, block: Block | None):
        self.block, self.gradient = block, None

    def receive(self, ledger: "Ledger", gradient: Tensor) -> None:
        """Keep the first part."""
        if self.block:
            self.gradient = self.gradient or gradient


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


class Ledger:
    """The running account of one step.

    Attributes:
        lines: one entry an event: at its birth, and again at its death.
        nodes: operators in order, and between them functions that backward calls.
        chip: the GPU's; None counts no scratch memory of kernels.
        own_linear: linear layers are those that DeepSpeed puts into the model.
    """

    chip: Chip | None = None
    own_linear = False

    def __init__(self):
        self.lines: list[Entry] = []
        self.nodes: list[Node | Callable[[], None]] = []
        self.where = ""
        self.casts: dict[str, Tensor] = {}
        self.replay: Replay | None = None
        self.refilled: list[list[Block]] | None = None

    def block(self, op: str, shape: tuple[int, ...], width: int, category: str | None = None) -> Block:
        """A new block of prod(shape) × width bytes, rounded up as the allocator does."""
        block, entry, lines = Block(), Entry(), self.lines
        block.entry, block.lines = entry, lines
        entry.size = size = -(-prod(shape) * width // UNIT) * UNIT
        entry.allocated = size if size <= SMALL_BLOCK else size + internal_fragmentation(size)
        entry.op, entry.shape, entry.width, entry.category, entry.where = op, shape, width, category, self.where
        entry.birth, entry.death = len(lines), NEVER
        lines.append(entry)
        return block

    def group(self, op: str, sizes: list[tuple[int, int]], category: str, width: int = 1) -> Block:
        """One block for many that come and go together: `sizes` are (bytes of one, how many)."""
        block = self.block(op, (0,), 1, category)
        entry, rows = block.entry, [(rounded(size), count) for size, count in sizes]
        entry.size = sum(size * count for size, count in rows)
        entry.allocated = entry.size + sum(internal_fragmentation(size) * count for size, count in rows)
        entry.shape, entry.width = (sum(size * count for size, count in sizes) // width,), width
        return block

    def tensor(self, op: str, shape: tuple[int, ...], width: int) -> Tensor:
        """A new tensor to which no gradient flows."""
        return Tensor(self.block(op, shape, width), shape, width)

    def spend(self, size: int, op: str, category: str | None = None) -> None:
        """`size` bytes that come and go at once."""
        if size:
            self.block(op, (size,), 1, category)

    def add_up(self, whole: tuple[int, ...], shape: tuple[int, ...], width: int) -> None:
        """Scratch memory of the kernel that sums a gradient of shape `whole` down to `shape`, over first dimensions."""
        columns = prod(shape)
        if self.chip and columns > 1:
            self.spend(column_sums(prod(whole) // columns, columns, width, self.chip), "sum", "workspace")

    def accumulate(self, first: Tensor, new: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The sum of a gradient's parts, in place if no other tensor shares the first one's block."""
        return first if getrefcount(first.block) == 2 else self.tensor("add", shape, new.width)

    def op(self, name, inputs, shape, width, *, saves=(), grads=None, extra=0, spike=0, block=NEW) -> Tensor:
        """One operator; returns its result.

        Args:
            inputs: tensors and parameters; those that need a gradient get one.
            shape, width: of the result; with `block` it is a view of that (None: of a parameter).
            saves: what the backward formula keeps; a checkpoint drops it.
            grads: what each input's gradient is, see OWN; None is OWN for all.
            extra: bytes that the backward formula needs besides the gradients it makes; `spike`: before it makes them.
        """
        out = Tensor(self.block(name, shape, width) if block is NEW else block, shape, width)
        edges = []
        for i, x in enumerate(inputs):
            if x.needs:
                edges.append((x.node, x.shape, x.width, grads[i] if grads else OWN))
                if type(x) is Parameter and self.refilled is None:
                    x.uses += 1
        if not edges:
            return out
        out.needs = True
        if self.refilled is not None:  # recomputing: the operators are known, only what they saved is missing
            if saves:
                self.refilled.append([x.block for x in saves])
                if len(self.refilled) == self.replay.count:
                    raise Stop
            return out
        node = out.node = Node()
        node.op, node.where, node.edges, node.extra, node.shape = name, self.where, edges, extra, shape
        node.spike, node.gradient, node.kept, node.saved = spike, None, None, None
        if saves:
            if self.replay is None:
                node.saved = [x.block for x in saves]
            else:
                node.saved = self.replay
                self.replay.count += 1
        self.nodes.append(node)
        return out

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function(x)` without keeping what its operators save; backward runs it again (Chen et al. 2016)."""
        self.replay = Replay(function, x)
        try:
            return function(x)
        finally:
            self.replay = None

    def refill(self, replay: Replay) -> list[list[Block]]:
        """Run `replay` again and collect what its operators save. Autocast's weight copies are its own."""
        casts, self.casts, self.replay, self.refilled = self.casts, {}, replay, []
        try:
            replay.function(replay.x)
        except Stop:
            pass
        finally:
            refilled = self.refilled
            for block in (block for blocks in refilled for block in blocks if block is not None):
                block.entry.category = block.entry.category or "activations"
            self.casts, self.replay, self.refilled = casts, None, None
        return refilled

    def complete(self, parameter: Parameter) -> None:
        """A gradient is complete: kept, or added to the one that the parameter has."""
        block, parameter.partial = parameter.partial.block, None
        if parameter.gradient is None:
            block.entry.category = "gradients"
            parameter.gradient = block

    def backward(self, tensor: Tensor) -> None:
        """All operators in reverse, from a gradient for `tensor`."""
        node = tensor.node
        node.gradient = self.tensor("ones_like", tensor.shape, tensor.width)
        del tensor
        nodes = self.nodes
        while nodes:
            node = nodes.pop()
            if type(node) is not Node:
                node()
                continue
            if type(node.saved) is Replay:
                node.saved = node.saved.skip() if node.gradient is None else node.saved.give(self)
            if node.gradient is not None:
                self.deliver(node.run(self))
            node = None

    def deliver(self, results: list[tuple]) -> None:
        """Hand gradients on, as (who receives it, Tensor), and empty the list."""
        while results:
            receiver, gradient = results.pop(0)
            complete = receiver.receive(self, gradient)
            del gradient
            if complete:
                self.complete(receiver)
