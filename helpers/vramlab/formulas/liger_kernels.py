"""Liger's kernels: gradients written over what is no more needed, and a head without logits.

After `liger_kernel/ops` of liger-kernel 0.8.5. With T tokens, hidden size h, vocabulary V and w
bytes a number that is computed, the head keeps its gradients, made going forward: w·T·h and, where
it is trained, V·h numbers of its weight's format. Besides it takes w·C·V for C tokens at once, the
power of two from T / ⌈V/h⌉ up.
"""

from math import ceil, prod

from ..recipe.liger import FAMILIES
from .calls import LIGER_CHUNK
from .graph import OWN, PASS, Leaf, Parameter, Tensor
from .numerics import BOOL, INT64
from .operators import Operators
from .tensor_sizes import FP32, HALF


def rms_norm(
    m: Operators,
    family: str,
    x: Tensor,
    name: str,
) -> Tensor:
    """Keep the input and one number a row; sum the weight's gradient in a row a multiprocessor."""
    weight = m.parameters[f"{name}.weight"]
    rows = m.ledger.tensor("empty", (prod(x.shape[:-1]),), FP32)
    sums = 0
    if weight.needs:
        sums = m.numerics.chip.multiprocessors * x.shape[-1] * FP32
    about = FAMILIES[family] or {}
    how = PASS if about.get("in_place") else OWN
    return m.op(
        "liger_rms_norm",
        [x, weight],
        x.shape,
        x.width,
        saves=[x, rows],
        grads=(how, OWN),
        extra=sums,
    )


def gated(m: Operators, gate: Tensor, up: Tensor) -> Tensor:
    """Compute act(gate) · up; its gradients are written over both."""
    inputs = [gate, up]
    return m.op(
        "liger_glu",
        inputs,
        gate.shape,
        gate.width,
        saves=inputs,
        grads=(0, 1),
    )


def turned(m: Operators, q: Tensor, k: Tensor) -> list[Tensor]:
    """Turn queries and keys where they lie; their gradients are copied."""
    results = []
    for x in (q, k):
        y = m.op(
            "liger_rope",
            [x],
            x.shape,
            x.width,
            view=x,
        )
        if not y.needs and (q.needs or k.needs):
            # Both are results of one function, so both require a gradient if an input does.
            y.needs = True
            y.node = Leaf(None)
        results.append(y)
    return results


def head_loss(m: Operators, x: Tensor, weight: Parameter) -> Tensor:
    """Return the sum of the losses.

    Gradients are made going forward, and handed on when backward comes.
    """
    b, tokens, hidden = x.shape
    rows = b * tokens
    tensor = m.ledger.tensor
    # Labels are padded by one and shifted in a copy, as in transformers' own loss.
    labels = [
        tensor("constant_pad_nd", (b, tokens + 1), INT64),
        tensor("clone", (b, tokens), INT64),
    ]
    gradients = [tensor("zeros_like", (rows, hidden), x.width)]
    if weight.needs:
        gradients.append(tensor("zeros_like", weight.shape, weight.width))
    # The loss of each row, and whether the row has a label.
    labels.append(tensor("zeros", (rows,), FP32))
    labels.append(tensor("ne", (rows,), BOOL))
    # As many chunks as the vocabulary is wider than x, so that logits take about as much as x.
    chunks = ceil(weight.shape[0] / hidden)
    chunk = ceil(rows / chunks)
    power_of_two = 1 << (chunk - 1).bit_length()
    _chunks(m, x, weight, min(rows, power_of_two))
    del labels
    return m.op(
        "liger_loss",
        [x, weight],
        (),
        FP32,
        saves=gradients,
        grads=(0, 1),
    )


def _chunks(
    m: Operators,
    x: Tensor,
    weight: Parameter,
    chunk: int,
) -> None:
    """Make the logits of `chunk` tokens and, in their place, the gradients.

    The first two chunks are entered; later ones are like the second.
    """
    ledger = m.ledger
    hidden = x.shape[-1]
    vocabulary = weight.shape[0]
    width = m.numerics.autocast or x.width
    # Tensor cores add the product where the gradient is; others need room for it.
    tensor_cores = width == HALF and ledger.chip.capability >= (8, 0)
    chunks = ceil(prod(x.shape[:-1]) / chunk)
    ledger.calls += LIGER_CHUNK * chunks
    if weight.needs:  # each chunk's share is added to its gradient in place
        ledger.rewritten += chunks * hidden * vocabulary * weight.width
    for number in range(min(chunks, 2)):
        begin = len(ledger.events)
        casts = []
        for shape, own_width in (((chunk, hidden), x.width), (weight.shape, weight.width)):
            if own_width != width:
                casts.append(ledger.tensor("to", shape, width))
        logits = ledger.block("mm", (chunk, vocabulary), width)
        ledger.product_workspace()
        del casts
        if weight.needs and weight.width != width and weight.name not in ledger.casts:
            # Autocast keeps the copy of a trained weight.
            ledger.casts[weight.name] = ledger.tensor("to", weight.shape, width)
        if weight.needs and not tensor_cores:
            ledger.block("mm", weight.shape, width)
        del logits
        if number == 1:
            ledger.repeats.append((begin, len(ledger.events), chunks - 2))
