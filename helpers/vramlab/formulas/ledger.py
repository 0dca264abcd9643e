"""Autograd with sizes instead of numbers: what a step allocates, keeps for backward and frees.

An operator enters its result in the ledger and keeps what its backward formula needs
(`graph.py`).

The backward pass follows `torch/csrc/autograd/engine.cpp`: operators in reverse order; gradients
for the inputs are computed while the incoming one and the saved tensors live, then summed or cast
to the input's shape and dtype (`validate_outputs`), then those are freed; a second gradient is
added in place; a parameter keeps its gradient.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from ..hardware.gpu import Chip
from .graph import (
    ALL_OWN,
    Leaf,
    Node,
    Parameter,
    Saved,
    Tensor,
)
from .memory import Block, Entry, Memory


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
        # Backward asks for the last operator's first. What is popped is freed when that operator
        # has run backward, as a recomputed tensor is in PyTorch.
        return self.filled.pop()


class Stop(Exception):
    """A recomputation has everything it needs (`torch.utils.checkpoint`, early stop)."""


class Ledger(Memory):
    """Memory and the backward pass.

    Attributes:
        nodes: operators in order, and between them functions that backward calls.
        no_grad: nothing is kept for a backward pass.
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
        Raises:
            Stop: in a recomputation that now has all it needs.
        """
        # The forward pass counted what is saved (`_saved`), so a recomputation knows the operator
        # whose inputs complete it.
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
        self.calls += self.forward_calls.get(name, 1)
        # The result is allocated while all inputs live. A view is one more reference to its base's
        # block, which lives as long as the longer of the two.
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
        # Saved blocks are references of the node alone, so an activation that no name holds any
        # more lives until backward pops the node.
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
            self.calls += len(saves)  # each is detached (torch.utils.checkpoint, pack_hook)
            self.refilled.append([out.block if isinstance(x, bool) else x.block for x in saves])
            # That was the last operator whose inputs backward needs.
            if len(self.refilled) == self.replay.count:
                raise Stop
        return out

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `function(x)` without keeping what its operators save.

        Backward runs it again (Chen et al. 2016).
        """
        # While this is set, operators count what they save instead of keeping it. The replay
        # itself keeps `x`, the only tensor that a checkpoint saves.
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
        # `Stop` ends it in the middle of a layer, as `_StopRecomputationError` does in
        # torch.utils.checkpoint, so what follows has to put back what the layer's end would have.
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
        self.calls += 1  # it is taken over, or added
        # Else it is added in place to the one that is there, and freed.
        if parameter.gradient is None:
            block.entry.category = "gradients"
            parameter.gradient = block

    def backward(self, tensor: Tensor, complete: Callable[[Parameter], None]) -> None:
        """Run all operators in reverse, from a gradient for `tensor`; see `Node.run`."""
        loss = tensor.node
        assert isinstance(loss, Node)
        # `torch.autograd.backward` starts from ones of the loss's shape (`_make_grads`).
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
            # The first node that backward meets of a checkpointed piece runs the piece again; the
            # others find it filled. Backward then handles what was recomputed like saved tensors.
            if recomputed:
                node.saved = node.saved.give(self)
            node.run(self, complete, recomputed)
