"""Autograd with sizes instead of numbers: a ledger of the memory that a training step allocates and frees.

A `Tensor` has a shape, a width (bytes an element) and a block of memory, but no content. An operator enters its result in
the ledger and keeps what its backward formula needs. A block is freed when the last reference to it goes, by Python's own
reference counting, as PyTorch frees memory.

The backward pass follows `torch/csrc/autograd/engine.cpp`: operators in reverse order; gradients for the inputs are
computed while the incoming one and the saved tensors live, then summed or cast to the input's shape and dtype
(`validate_outputs`), then those are freed; a second gradient is added in place; a parameter keeps its gradient.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from math import prod
from weakref import ref

from ..hardware.gpu import Chip
from ..hardware.kernels import column_sums
from ..hardware.overhead import rounded
from .reserved import internal_fragmentation

# How an operator's backward formula makes the gradient for an input: a new block of the input's shape (OWN; BIAS: by
# summing rows) or of the result's shape (FULL), then summed over what was broadcast; the incoming gradient itself, summed
# likewise (PASS), or a view of a part of it (PART); or a copy in the input's dtype (CAST); or, by its number, a saved
# tensor, which is written over.
OWN, BIAS, FULL, PASS, PART, CAST = "own", "bias", "full", "pass", "part", "cast"
ALL_OWN = (OWN,) * 8
PRODUCTS = ("linear", "bmm", "gemm_4bit")  # operators that are multiplied by cuBLAS, backward too
NEVER = 1 << 60  # death of a block that is still alive


class Entry(ref):
    """What the ledger knows of one block: a weak reference to it, which joins the events again when the block is freed.

    size: bytes, rounded up as the allocator does; `allocated`: with its internal fragmentation. `birth`, `death`: numbers of
    the events, known when all have happened. `op`, `where`: the operator and the module that made it.
    """

    __slots__ = ("allocated", "birth", "category", "death", "op", "shape", "size", "where", "width")
    __hash__ = object.__hash__  # a freed block has none


class Block:
    """Memory that is freed when the last reference goes."""

    __slots__ = ("__weakref__", "entry")


class Tensor:
    """A view of a block. `node`: the operator that made it. `needs`: it requires a gradient.

    `packed`: its numbers lie in the order of its shape, so that a batched product takes them without a copy.
    """

    __slots__ = ("block", "needs", "node", "packed", "shape", "width")

    def __init__(self, block: Block | None, shape: tuple[int, ...], width: int, node=None, needs: bool = False):
        self.block, self.shape, self.width = block, shape, width
        self.node, self.needs, self.packed = node, needs, False

    def view(self, *shape: int) -> "Tensor":
        """Return the same block under another shape."""
        return Tensor(self.block, shape, self.width, self.node, self.needs)


class Parameter:
    """A weight, whose own memory is counted elsewhere. `uses`: how many gradients it still waits for."""

    __slots__ = ("gradient", "name", "needs", "partial", "quantized", "shape", "uses", "width")
    block = node = None

    def __init__(self, name: str, shape: tuple[int, ...], width: int, needs: bool = True, quantized: str | None = None):
        self.name, self.shape, self.width, self.needs, self.quantized = name, shape, width, needs, quantized
        self.uses, self.partial, self.gradient = 0, None, None

    def receive(self, ledger: "Ledger", gradient: Block) -> bool:
        """Add up the gradients of all uses, in place but to a linear layer's transposed view; True with the last one."""
        if self.partial is None:
            self.partial = gradient
        elif self.partial.entry.op == "linear" and not ledger.zero3_linear:
            self.partial = ledger.block("add", self.shape, self.width)
        self.uses -= 1
        return self.uses <= 0


class Node:
    """An operator of the forward pass, as the backward pass sees it; `extra` and `spike` as in `Ledger.op`.

    edges: for each input that requires a gradient (who receives it, shape, width, how it is made). `saved`: blocks that
    backward needs, or the `Replay` that makes them.
    """

    __slots__ = ("edges", "extra", "gradient", "op", "saved", "shape", "spike", "where")

    def receive(self, ledger: "Ledger", gradient: Block) -> None:
        """Add up the gradients of all uses, in place; those of a split's pieces are joined."""
        if self.op == "split":
            self.gradient = [*(self.gradient or ()), gradient]
        elif self.gradient is None:
            self.gradient = gradient

    def run(self, ledger: "Ledger", recomputed: bool = False) -> None:
        """Make the gradients for the inputs, free what that took, and hand them on.

        `recomputed`: what was saved comes from a checkpoint, which keeps it no longer than the formula runs.
        """
        ledger.where = self.where
        if self.spike:
            ledger.scratch(self.spike, self.op)
        made = self._gradients(ledger, recomputed)[::-1]
        self.gradient = self.saved = None
        for receiver, _, _, _ in self.edges:
            if receiver.receive(ledger, made.pop()):
                ledger.complete(receiver)

    def _gradients(self, ledger: "Ledger", recomputed: bool) -> list[Block]:
        """Make a gradient for each edge; then cast or sum what is not like the input."""
        gradient, op, made, unlike = self.gradient, self.op, [], []
        extra = ledger.scratch(self.extra, op) if self.extra else None
        width = (gradient[0] if op == "split" else gradient).entry.width
        for _, shape, own_width, how in self.edges:
            if how is OWN and width == own_width:  # most are
                made.append(ledger.block(op, shape, width))
                continue
            if how is CAST or type(how) is int:
                made.append(ledger.block("to", shape, own_width) if how is CAST else self.saved[how])
                continue
            if width != own_width or how is BIAS or shape != self.shape:
                unlike.append((len(made), shape, own_width, how))
            if how is OWN or how is BIAS:
                made.append(ledger.block(op, shape, width))
            else:
                made.append(ledger.block(op, self.shape, width) if how is FULL else gradient)
        if op in PRODUCTS and any(how is OWN for *_, how in self.edges):
            ledger.product_workspace()  # the last one's: by then all results are there
        del extra
        if recomputed:  # nothing else holds it (torch.utils.checkpoint, unpack_hook)
            self.saved = None
        self._fit(ledger, made, unlike, width)
        return made

    def _fit(self, ledger: "Ledger", made: list[Block], unlike: list[tuple], width: int) -> None:
        """Sum and cast those of `made` that are not like their input: (place, shape and width of the input, how)."""
        for i, shape, own_width, how in unlike:
            if how is BIAS:
                ledger.column_sum_scratch(self.shape, shape, width)
            elif (how is PASS or how is FULL) and prod(shape) != prod(self.shape):
                ledger.column_sum_scratch(self.shape, shape, width)
                made[i] = ledger.block("sum", shape, width)
            if width != own_width:
                made[i] = ledger.block("to", shape, own_width)


class Leaf:
    """A tensor made to require a gradient (`requires_grad_()`): the graph holds its block and its gradient."""

    def __init__(self, block: Block | None):
        self.block, self.gradient, self.keeps = block, None, block is not None

    def receive(self, ledger: "Ledger", gradient: Block) -> None:
        """Keep the first part; others are added in place."""
        if self.keeps:
            self.gradient = self.gradient or gradient


class Replay:
    """A checkpointed piece of the forward pass: `function(x)` runs again when backward needs what it saves."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor):
        self.function, self.x, self.count, self.filled = function, x, 0, None

    def give(self, ledger: "Ledger") -> list[Block]:
        """What the next operator saved, last one first."""
        if self.filled is None:
            self.filled = ledger.recompute(self)
        return self.filled.pop()


@lru_cache(maxsize=1 << 14)
def _block_sizes(shape: tuple[int, ...], width: int) -> tuple[int, int]:
    """Return `Entry.size` and `Entry.allocated` of a block."""
    size = rounded(prod(shape) * width)
    return size, size + internal_fragmentation(size)


class Stop(Exception):
    """A recomputation has everything it needs (`torch.utils.checkpoint`, early stop)."""


class Ledger:
    """The events of one step: the entry of a block when it is allocated, and again when it is freed.

    nodes: operators in order, and between them functions that backward calls. `where`: the module that runs. `casts`:
    autocast's cache of half-precision weights. `no_grad`: nothing is kept for a backward pass. `zero3_linear`: linear layers
    are those that DeepSpeed puts into the model at stage 3. `workspaces`: bytes that a product without and one with a bias
    allocate while they run; () where cuBLAS's workspaces last (`frees_workspaces`).
    """

    chip: Chip
    workspaces: tuple[int, ...] = ()
    zero3_linear = no_grad = False

    def __init__(self):
        self.events: list[Entry] = []
        self.nodes: list[Node | Callable[[], None]] = []
        self.where = ""
        self.casts: dict[str, Tensor] = {}
        self.layer_holds: list[Tensor] = []  # what modules return or name: it lives to the end of the layer
        self.replay: Replay | None = None  # that of the checkpointed piece that runs
        self.refilled: list[list[Block]] | None = None  # what a recomputation has saved so far

    def block(self, op: str, shape: tuple[int, ...], width: int, category: str = "temporaries") -> Block:
        """A new block of prod(shape) × width bytes, rounded up as the allocator does."""
        block, happens = Block(), self.events.append
        block.entry = entry = Entry(block, happens)
        entry.size, entry.allocated = _block_sizes(shape, width)
        entry.op, entry.where, entry.category = op, self.where, category
        entry.shape, entry.width = shape, width
        entry.birth, entry.death = None, NEVER
        happens(entry)
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
        """A new tensor that requires no gradient."""
        return Tensor(self.block(op, shape, width), shape, width)

    def scratch(self, size: int | Sequence[int], op: str, category: str = "temporaries") -> Block | None:
        """Allocate `size` bytes, or several sizes that come and go together, while the result lives."""
        if type(size) is int:
            return self.block(op, (size,), 1, category) if size else None
        return self.group(op, [(n, 1) for n in size], category)

    def product_workspace(self, with_bias: bool = False) -> None:
        """Scratch memory of one matrix product, whose result has been made."""
        if self.workspaces:
            self.scratch(self.workspaces[with_bias], "mm", "workspace")

    def column_sum_scratch(self, whole: tuple[int, ...], shape: tuple[int, ...], width: int) -> None:
        """Scratch memory of the kernel that sums a gradient of shape `whole` down to `shape`, over first dimensions."""
        columns = prod(shape)
        if columns > 1:
            self.scratch(column_sums(prod(whole) // columns, columns, width, self.chip), "sum", "workspace")

    def op(self, name, inputs, shape, width, *, saves=(), grads=ALL_OWN, extra=0, spike=0, view=None) -> Tensor:
        """Run one operator on `inputs`, tensors and parameters; return its result, a new block or a `view` of one's.

        Args:
            saves: tensors that the backward formula needs, and True for the result; a checkpoint drops them.
            grads: how each input's gradient is made, see OWN.
            extra: bytes that the backward formula needs besides the gradients it makes; `spike`: before it makes them.
        """
        refilled = self.refilled
        if refilled is not None and name == "linear" and saves and len(refilled) + 1 == self.replay.count:
            refilled.append([x.block for x in saves])
            raise Stop  # autograd saves a product's inputs, and the checkpoint ends, before the product is made
        block = self.block(name, shape, width) if view is None else view.block
        out = Tensor(block, shape, width)
        if refilled is not None or self.no_grad:
            return self._without_node(out, inputs, saves)
        edges = []
        for i, x in enumerate(inputs):
            if x.needs:
                receiver = x.node
                if receiver is None:  # a parameter
                    receiver, x.uses = x, x.uses + 1
                edges.append((receiver, x.shape, x.width, grads[i]))
        if not edges:
            return out
        out.needs = True
        node = out.node = Node()
        node.op, node.where, node.shape = name, self.where, shape
        node.edges, node.extra, node.spike = edges, extra, spike
        node.gradient = node.saved = None
        if saves:
            if self.replay is None:
                node.saved = [block if x is True else x.block for x in saves]
            else:
                node.saved = self.replay
                self.replay.count += 1
        self.nodes.append(node)
        return out

    def _without_node(self, out: Tensor, inputs: list, saves: Sequence) -> Tensor:
        """Run an operator without gradients; or again, where only what it saved is missing."""
        out.needs = not self.no_grad and any(x.needs for x in inputs)
        if saves and out.needs:
            self.refilled.append([out.block if x is True else x.block for x in saves])
            if len(self.refilled) == self.replay.count:
                raise Stop
        return out

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function(x)` without keeping what its operators save; backward runs it again (Chen et al. 2016)."""
        self.replay = Replay(function, x)
        out = function(x)
        self.replay = None
        return out

    def recompute(self, replay: Replay) -> list[list[Block]]:
        """Run `replay` again; return what its operators save. Autocast's weight copies are its own."""
        casts, self.casts, self.replay, self.refilled = self.casts, {}, replay, []
        with suppress(Stop):
            replay.function(replay.x)
        self.layer_holds.clear()
        refilled, self.casts, self.replay, self.refilled = self.refilled, casts, None, None
        for block in (block for blocks in refilled for block in blocks if block is not None):
            if block.entry.category == "temporaries":
                block.entry.category = "activations"
        return refilled

    def complete(self, parameter: Parameter) -> None:
        """Keep a complete gradient, unless it is added to one that the parameter has."""
        block, parameter.partial = parameter.partial, None
        if parameter.gradient is None:
            block.entry.category = "gradients"
            parameter.gradient = block

    def backward(self, tensor: Tensor) -> None:
        """Run all operators in reverse, from a gradient for `tensor`."""
        node, nodes = tensor.node, self.nodes
        node.gradient = self.block("ones_like", tensor.shape, tensor.width)
        del tensor
        while nodes:
            node = nodes.pop()
            if type(node) is not Node:
                node()
                continue
            if node.gradient is not None:
                recomputed = type(node.saved) is Replay
                if recomputed:
                    node.saved = node.saved.give(self)
                node.run(self, recomputed)
