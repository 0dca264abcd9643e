"""Liger's kernels in the ledger: gradients written over what is not needed any more, and a head that makes no logits.

After `liger_kernel/ops` of liger-kernel 0.8.5. With T tokens, hidden size h, vocabulary V and w bytes a number that is
computed, the head keeps its gradients, made going forward: w·T·h and, where it is trained, V·h numbers of its weight's
format. Besides it takes w·C·V for C tokens at once, the power of two from T / ⌈V/h⌉ up.
"""

from math import prod

from ..recipe.liger import FAMILIES
from .ledger import OWN, PASS, Leaf, Parameter, Tensor
from .model_states import FP32, HALF
from .operators import BOOL, INT64, Operators


def rms_norm(m: Operators, x: Tensor, name: str) -> Tensor:
    """Keep the input and one number a row; sum the weight's gradient up in a row for each multiprocessor."""
    weight, rows = m.parameters[f"{name}.weight"], m.tensor("empty", (prod(x.shape[:-1]),), FP32)
    sums = m.chip.multiprocessors * x.shape[-1] * FP32 if weight.needs else 0
    ways = (PASS if (FAMILIES[m.shape.family] or {}).get("in_place") else OWN, OWN)
    return m.op("liger_rms_norm", [x, weight], x.shape, x.width, saves=[x, rows], grads=ways, extra=sums)


def gated(m: Operators, gate: Tensor, up: Tensor) -> Tensor:
    """Compute act(gate) · up; its gradients are written over both."""
    return m.op("liger_glu", [gate, up], gate.shape, gate.width, saves=[gate, up], grads=(0, 1))


def turned(m: Operators, q: Tensor, k: Tensor) -> list[Tensor]:
    """Turn queries and keys where they lie; their gradients are copied."""
    found = []
    for x in (q, k):
        y = m.op("liger_rope", [x], x.shape, x.width, view=x)
        if not y.needs and (q.needs or k.needs):  # a result of one function, of which the other input needs a gradient
            y.needs, y.node = True, Leaf(None)
        found.append(y)
    return found


def head_loss(m: Operators, x: Tensor, weight: Parameter) -> Tensor:
    """Return the sum of the losses. Gradients are made going forward, and handed on when backward comes."""
    b, n, h = x.shape
    rows, vocabulary = b * n, weight.shape[0]
    labels = [m.tensor("constant_pad_nd", (b, n + 1), INT64), m.tensor("clone", (b, n), INT64)]
    gradients = [m.tensor("zeros_like", (rows, h), x.width)]
    if weight.needs:
        gradients.append(m.tensor("zeros_like", weight.shape, weight.width))
    labels += m.tensor("zeros", (rows,), FP32), m.tensor("ne", (rows,), BOOL)
    chunk = -(-rows // -(-vocabulary // h))
    _chunks(m, x, weight, min(rows, 1 << (chunk - 1).bit_length()))
    del labels
    return m.op("liger_loss", [x, weight], (), FP32, saves=gradients, grads=(0, 1))


def _chunks(m: Operators, x: Tensor, weight: Parameter, chunk: int) -> None:
    """Make the logits of `chunk` tokens and, in their place, the gradients; later ones are like the second."""
    h, vocabulary, width = x.shape[-1], weight.shape[0], m.autocast or x.width
    tensor_cores = width == HALF and m.chip.capability >= (8, 0)  # then the product is added where the gradient is
    chunks = -(-prod(x.shape[:-1]) // chunk)
    if weight.needs:  # each chunk's share is added to its gradient in place
        m.rewritten += chunks * h * vocabulary * weight.width
    for i in range(min(chunks, 2)):
        begin = len(m.events)
        given = ((chunk, h), x.width), (weight.shape, weight.width)
        casts = [m.tensor("to", shape, width) for shape, own in given if own != width]
        logits = m.block("mm", (chunk, vocabulary), width)
        m.product_workspace()
        del casts
        if weight.needs and weight.width != width and weight.name not in m.casts:  # which autocast keeps
            m.casts[weight.name] = m.tensor("to", weight.shape, width)
        if weight.needs and not tensor_cores:
            m.block("mm", weight.shape, width)
        del logits
        if i:
            m.repeats.append((begin, len(m.events), chunks - 2))
