"""Autograd with sizes instead of numbers: what a step allocates, keeps for backward and frees.

A `Tensor` has a shape, a width (bytes an element) and a block of memory, but no content. An
operator enters its result in the ledger and keeps what its backward formula needs.

The backward pass follows `torch/csrc/autograd/engine.cpp`: operators in reverse order; gradients
for the inputs are computed while the incoming one and the saved tensors live, then summed or cast
to the input's shape and dtype (`validate_outputs`), then those are freed; a second gradient is
added in place; a parameter keeps its gradient.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from ..hardware.gpu import Chip
from .memory import Block, Entry, Memory

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

    def receive(self, ledger: "Ledger", gradient: Block) -> bool:
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

    def receive(self, ledger: "Ledger", gradient: Block) -> None:
        """Add up the gradients of all uses, in place; those of a split's pieces are joined."""
        # A split waits for the gradients of its pieces, and joins them when it runs.
        if self.op == "split":
            self.gradient = [*(self.gradient or ()), gradient]
        elif self.gradient is None:
            self.gradient = gradient

    def run(
        self,
        ledger: "Ledger",
        complete: Callable[[Parameter], None],
        recomputed: bool = False,
    ) -> None:
        """Make the gradients for the inputs, free what that took, and hand them on.

        Args:
            complete: called with a parameter whose gradient is complete.
            recomputed: what was saved comes from a checkpoint, and goes when the formula has run.
        """
        ledger.where = self.where
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

    def _gradients(self, ledger: "Ledger", recomputed: bool) -> list[Block]:
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
        ledger: "Ledger",
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
            # A cast comes last: the sum is in the incoming gradient's dtype.
            if width != own_width:
                made[place] = ledger.block("to", shape, own_width)


class Leaf:
    """A tensor made to require a gradient (`requires_grad_()`).

    The graph holds its block and its gradient.
    """

    def __init__(self, block: Block | None):
        self.block = block
        self.gradient: Block | None = None
        self.keeps = block is not None

    def receive(self, ledger: "Ledger", gradient: Block) -> None:
        """Keep the first part; others are added in place."""
        if self.keeps:
            self.gradient = self.gradient or gradient


class Replay:
    """A checkpointed piece of the forward pass.

    `function(x)` runs again when backward needs what it saves.

    Attributes:
        count: how many of its operators save something.
        filled: what each of them saved when it ran again.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor):
        self.function = function
        self.x = x
        self.count = 0
        self.filled: list[Saved] | None = None

    def give(self, ledger: "Ledger") -> Saved:
        """Return what the next operator saved, the last one's first."""
        if self.filled is None:
            self.filled = ledger.recompute(self)
        return self.filled.pop()


class Stop(Exception):
    """A recomputation has everything it needs (`torch.utils.checkpoint`, early stop)."""


class Ledger(Memory):
    """Memory and the backward pass.

    Attributes:
        nodes: operators in order, and between them functions that backward calls.
        no_grad: nothing is kept for a backward pass.
        adds_linear_in_place: linear layers' gradients are no views where DeepSpeed puts in its own.
        casts: autocast's cache of half-precision weights, which lives until its context ends.
        cast_entries: entries of the copies that it ever held.
        layer_holds: what modules return or name: it lives to the end of the layer.
        replay: that of the checkpointed piece that runs.
        refilled: what a recomputation has saved so far.
        recomputed: (first event, one past the last) of each recomputation.
        leaves: which the graph holds, and so the loss, as long as the loop keeps that.
    """

    def __init__(self, chip: Chip, events: list[Entry] | None = None, no_grad: bool = False):
        super().__init__(chip, events)
        self.nodes: list[Node | Callable[[], None]] = []
        self.no_grad = no_grad
        self.adds_linear_in_place = False
        self.casts: dict[str, Tensor] = {}
        self.cast_entries: list[Entry] = []
        self.layer_holds: list[Tensor] = []
        self.replay: Replay | None = None
        self.refilled: list[Saved] | None = None
        self.recomputed: list[tuple[int, int]] = []
        self.leaves: list[Leaf] = []

    def require_gradient(self, x: Tensor) -> None:
        """Make `x` a leaf that requires a gradient (`requires_grad_()`)."""
        leaf = Leaf(x.block)
        x.needs = True
        x.node = leaf
        self.leaves.append(leaf)

    def tensor(self, op: str, shape: tuple[int, ...], width: int) -> Tensor:
        """Return a new tensor that requires no gradient."""
        return Tensor(self.block(op, shape, width), shape, width)

    def op(
        self,
        name: str,
        inputs: Sequence[Tensor],
        shape: tuple[int, ...],
        width: int,
        *,
        saves: Sequence[Tensor | bool] = (),
        grads: tuple[str | int, ...] = ALL_OWN,
        extra: int | Sequence[int] = 0,
        spike: int | Sequence[int] = 0,
        view: Tensor | None = None,
    ) -> Tensor:
        """Run one operator on `inputs`; return its result, a new block or a `view` of an input's.

        Args:
            saves: tensors that the backward formula needs, and True for the result.
            grads: how each input's gradient is made, see OWN.
            extra: bytes that the backward formula needs besides the gradients it makes.
            spike: bytes that it needs before it makes them.
        """
        refilled = self.refilled
        is_last = (
            refilled is not None
            and self.replay is not None
            and len(refilled) + 1 == self.replay.count
        )
        if refilled is not None and is_last and name == "linear" and saves:
            # Autograd saves a product's inputs, and the checkpoint ends, before it is made.
            refilled.append([None if isinstance(x, bool) else x.block for x in saves])
            raise Stop
        block = self.block(name, shape, width) if view is None else view.block
        out = Tensor(block, shape, width)
        if refilled is not None or self.no_grad:
            return self._without_node(out, inputs, saves)
        edges = []
        for x, how in zip(inputs, grads, strict=False):
            if x.needs:
                receiver: Node | Leaf | Parameter | None = x.node
                # What no operator made is a parameter, which counts its uses.
                if receiver is None:
                    assert isinstance(x, Parameter)
                    receiver = x
                    x.uses += 1
                edges.append((receiver, x.shape, x.width, how))
        # Nothing before it requires a gradient, so backward never comes here.
        if not edges:
            return out
        node = Node()
        node.op = name
        node.where = self.where
        node.shape = shape
        node.edges = edges
        node.extra = extra
        node.spike = spike
        node.gradient = None
        node.saved = self._saved(block, saves)
        out.node = node
        out.needs = True
        self.nodes.append(node)
        return out

    def _saved(
        self,
        block: Block | None,
        saves: Sequence[Tensor | bool],
    ) -> "Saved | Replay | None":
        """Return what a node keeps: blocks of `saves`, or the checkpoint that makes them again."""
        if not saves:
            return None
        # A checkpoint keeps its input alone, and counts what it will have to make again.
        if self.replay is not None:
            self.replay.count += 1
            return self.replay
        return [block if isinstance(x, bool) else x.block for x in saves]

    def _without_node(
        self,
        out: Tensor,
        inputs: Sequence[Tensor],
        saves: Sequence[Tensor | bool],
    ) -> Tensor:
        """Finish an operator without gradients; or one that runs again, for what it saved."""
        out.needs = not self.no_grad and any(x.needs for x in inputs)
        if saves and out.needs:
            assert self.refilled is not None and self.replay is not None
            self.refilled.append([out.block if isinstance(x, bool) else x.block for x in saves])
            # That was the last operator whose inputs backward needs.
            if len(self.refilled) == self.replay.count:
                raise Stop
        return out

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `function(x)` without keeping what its operators save.

        Backward runs it again (Chen et al. 2016).
        """
        self.replay = Replay(function, x)
        out = function(x)
        self.replay = None
        return out

    def recompute(self, replay: Replay) -> list[Saved]:
        """Run `replay` again; return what its operators save."""
        # Autocast keeps copies of weights for each run of its context, and a recomputation is one.
        casts = self.casts
        self.casts = {}
        self.replay = replay
        self.refilled = []
        first = len(self.events)
        with suppress(Stop):
            replay.function(replay.x)
        self.layer_holds.clear()
        self.recomputed.append((first, len(self.events)))
        refilled = self.refilled
        self.casts = casts
        self.replay = None
        self.refilled = None
        # They live into backward, as what a forward pass saves does.
        for blocks in refilled:
            for block in blocks:
                if block is not None and block.entry.category == "temporaries":
                    block.entry.category = "activations"
        return refilled

    def keep(self, parameter: Parameter) -> None:
        """Keep a complete gradient, unless it is added to one that the parameter has."""
        block = parameter.partial
        assert block is not None
        parameter.partial = None
        # Else it is added in place to the one that is there, and freed.
        if parameter.gradient is None:
            block.entry.category = "gradients"
            parameter.gradient = block

    def backward(self, tensor: Tensor, complete: Callable[[Parameter], None]) -> None:
        """Run all operators in reverse, from a gradient for `tensor`; see `Node.run`."""
        loss = tensor.node
        assert isinstance(loss, Node)
        loss.gradient = self.block("ones_like", tensor.shape, tensor.width)
        # The loss lives as long as the caller names it.
        del tensor, loss
        nodes = self.nodes
        while nodes:
            node = nodes.pop()
            # An engine's hook, or a note of where a layer begins or ends.
            if not isinstance(node, Node):
                node()
                continue
            # The loss does not depend on its result.
            if node.gradient is None:
                continue
            recomputed = type(node.saved) is Replay
            if recomputed:
                node.saved = node.saved.give(self)
            node.run(self, complete, recomputed)
