"""Liger's kernels in the ledger: gradients written over what is not needed any more, and a head that makes no logits.

After `liger_kernel/ops` of liger-kernel 0.8.5 (rms_norm, rope, swiglu, geglu, fused_linear_cross_entropy). With T tokens,
hidden size h, vocabulary V and w bytes a number that is computed, the head keeps w·T·h and, where it is trained, V·h
numbers of its weight's format: its gradients, made going forward. Besides it takes w·C·V for C tokens at once, the power
of two from T / ⌈V/h⌉ up: about w·T·h, or twice that.
"""

from math import prod

from ..recipe.liger import FAMILIES, HEAD, kernels  # noqa: F401 — HEAD is the model's
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from .ledger import OWN, PASS, Block, Parameter, Tensor
from .model_states import FP32, HALF
from .operators import BOOL, INT64, Operators

HEADS_LAST = ("flash_attention", "efficient_attention")  # what makes a gradient in the order of the projections


def known(recipe: Recipe) -> frozenset[str]:
    """Return the switches that are on. Raises RecipeError for a family in which predict does not know what they do."""
    on = kernels(recipe)
    if on and FAMILIES[recipe.shape.family] is None:
        allowed = f"the formulas do not know what Liger does in a {recipe.shape.family}: ask simulate"
        raise RecipeError("use_liger_kernel", True, allowed)
    return on


def rms_norm(m: Operators, x: Tensor, name: str, in_place: bool) -> Tensor:
    """Keep the input and one number a row; sum the weight's gradient up in a row for each multiprocessor."""
    weight, rows = m.parameters[f"{name}.weight"], m.tensor("empty", (prod(x.shape[:-1]),), FP32)
    sums = m.chip.multiprocessors * x.shape[-1] * FP32 if weight.needs else 0
    ways = (PASS if in_place else OWN, OWN)
    return m.op("liger_rms_norm", [x, weight], x.shape, x.width, saves=[x, rows], grads=ways, extra=sums)


def gated(m: Operators, gate: Tensor, up: Tensor) -> Tensor:
    """Compute act(gate) · up; its gradients are written over both."""
    return m.op("liger_glu", [gate, up], gate.shape, gate.width, saves=[gate, up], grads=(0, 1))


def turned(m: Operators, q: Tensor, k: Tensor, cached: bool) -> list[Tensor]:
    """Turn queries and keys where they lie; `cached`: keys go to a cache, which copies them."""
    needs, results = q.needs or k.needs, [q.view(*q.shape), k.view(*k.shape)]
    node = _Rotary(m, q, k, cached) if needs and m.refilled is None else None
    for i, x in enumerate(results):
        x.needs, x.node = needs, node and _Part(node, i)
    if node:
        m.nodes.append(node)
    return results


class _Rotary:
    """Turns the gradients of queries and keys back; it waits for both, and copies those that lie head by head."""

    def __init__(self, m: Operators, q: Tensor, k: Tensor, cached: bool):
        self.m, self.where, self.given, self.heads = m, m.where, (q.node, k.node), (q.shape[1], k.shape[1])
        self.cached, self.gradients = cached, [None, None]

    def __call__(self) -> None:
        self.m.where = self.where
        turned = [self._turned(i) for i in (0, 1)]
        results = [(node, block) for node, block in zip(self.given, turned, strict=True) if node and block][::-1]
        self.gradients = turned = None
        self.m.deliver(results)

    def _turned(self, i: int) -> Block | None:
        gradient = self.gradients[i]
        if gradient is None or self.heads[i] == 1:
            return gradient
        entry = gradient.entry
        in_order = entry.op in HEADS_LAST and not (i and self.cached and entry.op == "flash_attention")
        return gradient if in_order else self.m.block("clone", entry.shape, entry.width)


class _Part:
    """Receives the gradient of the turned queries (0) or keys (1)."""

    def __init__(self, rotary: _Rotary, i: int):
        self.rotary, self.i = rotary, i

    def receive(self, ledger: Operators, gradient: Block) -> None:
        if self.rotary.gradients[self.i] is None:
            self.rotary.gradients[self.i] = gradient


class Head:
    """Liger's head of one micro-batch: it makes its gradients going forward, and hands them on as backward calls it."""

    def __init__(self, m: Operators, x: Tensor, weight: Parameter):
        self.m, self.weight, self.where, self.node = m, weight, m.where, x.node
        b, n, h = x.shape
        rows, vocabulary = b * n, weight.shape[0]
        labels = [m.tensor("constant_pad_nd", (b, n + 1), INT64), m.tensor("clone", (b, n), INT64)]
        self.gradients = [m.block("zeros_like", (rows, h), x.width)]
        if weight.needs:
            self.gradients.append(m.block("zeros_like", weight.shape, weight.width))
            weight.uses += 1
        losses, mask = m.tensor("zeros", (rows,), FP32), m.tensor("ne", (rows,), BOOL)
        chunk = -(-rows // -(-vocabulary // h))
        self.chunks(x, min(rows, 1 << (chunk - 1).bit_length()))
        m.nodes.append(self)
        del labels, mask, losses

    def loss(self) -> Tensor:
        """Return the sum of the losses, one number."""
        block = self.m.block("sum", (), FP32)
        return Tensor(block, (), FP32, self, True)

    def chunks(self, x: Tensor, chunk: int) -> None:
        """Make the logits of `chunk` tokens at a time and, in their place, the gradients; all chunks are like the first."""
        m, weight, h, vocabulary = self.m, self.weight, x.shape[-1], self.weight.shape[0]
        width, size = m.autocast or x.width, prod(weight.shape)
        in_place = x.width == weight.width == width  # products write where there is room (`out=`)
        tensor_cores = width == HALF and m.chip.capability >= (8, 0)
        for _ in range(2):
            casts = [
                m.tensor("to", s, width) for s, w in (((chunk, h), x.width), (weight.shape, weight.width)) if w != width
            ]
            logits = m.block("mm", (chunk, vocabulary), width)
            del casts
            if not in_place:
                if weight.needs and weight.width != width and weight.name not in m.casts:  # which autocast keeps
                    m.casts[weight.name] = m.tensor("to", weight.shape, width)
                cast = None if weight.needs or weight.width == width else m.tensor("to", weight.shape, width)
                m.scratch(chunk * h * width, "mm")
                del cast
            if weight.needs and tensor_cores:
                m.scratch(chunk * h * width if x.width != width else 0, "to")
            elif weight.needs:
                product = m.block("mm", weight.shape, width)
                m.scratch(size * FP32 if width != FP32 else 0, "to")
                del product
            del logits

    def receive(self, ledger: Operators, gradient: Block) -> None:
        """The loss's gradient, one number, is multiplied into what is there."""

    def __call__(self) -> None:
        m = self.m
        m.where, receivers = self.where, [self.node, self.weight]
        results = [*zip(receivers, self.gradients, strict=False)][::-1]
        self.gradients = None
        m.deliver(results)
