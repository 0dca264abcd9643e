"""Judges of chapter 07's pieces that ask what a graph keeps, and an allocator for memory."""

import random
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from vramlab.hardware.allocator import Allocator
from vramlab.report.report import MiB

from .judges_07 import judged

MOST_PADDING = 1.2  # tokens computed for each real one
FORKS = 12


def names_kept(answer: Callable[[Any, Any], Any]) -> set[str] | None:
    """Names of a small graph's tensors whose storage is in what `answer(loss, model)` returns.

    None where that is no set of storages.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    x = torch.ones(5, 4)
    hidden = model[0](x)
    bent = hidden.tanh()
    out = model[1](bent)
    raised = out.exp()
    positions = torch.tensor([0, 3])
    total = raised[positions].sum()
    loss = total.square()
    found = answer(loss, model)
    if not isinstance(found, set):
        return None
    # A product and a square keep their inputs, tanh and exp their results, an index its positions,
    # in a list; the rest nobody needs again.
    tensors = dict(x=x, hidden=hidden, bent=bent, out=out, raised=raised, total=total, loss=loss)
    tensors["positions"] = positions
    tensors["weight"] = model[1].weight
    return {name for name, tensor in tensors.items() if tensor.untyped_storage() in found}


class _Same(torch.autograd.Function):
    """The identity, whose node in the graph can be given an attribute."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def visits(answer: Callable[[Any, Any], Any]) -> float:
    """How often `answer(loss, model)` reads what a node keeps, in a graph that forks at each.

    On average, of FORKS nodes with one attribute `_saved_count` each: there are 2 ** FORKS ways.
    """
    x = torch.ones(1, requires_grad=True)
    for _ in range(FORKS):
        x = x + _Same.apply(x)
    reads = []
    # The class of these nodes is made by PyTorch, and is found at one of them.
    node = type(x.grad_fn.next_functions[1][0])
    node._saved_count = property(lambda self: reads.append(self))
    try:
        answer(x, torch.nn.Linear(1, 1))
    finally:
        del node._saved_count
    return len(reads) / FORKS


def served(kind: type, requests: Sequence[Any]) -> Any:
    """An allocator of this kind after requests: (name, bytes) to allocate, a name to free."""
    allocator = kind()
    blocks = {}
    for request in requests:
        if isinstance(request, str):
            allocator.free(blocks.pop(request))
        else:
            name, size = request
            blocks[name] = allocator.malloc(size)
    return allocator


def _texts(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    lengths = []
    for _ in range(count):
        # Log-normal, as lengths of texts are.
        length = round(draw.lognormvariate(5.5, 0.7))
        lengths.append(max(16, min(1024, length)))
    return lengths


def _reserved(lengths: Sequence[int], order: Sequence[Sequence[int]]) -> list[int]:
    """Bytes reserved after each step: three tensors that grow with the padded tokens."""
    allocator = Allocator()
    reserved = []
    for batch in order:
        # Every row is padded to the longest of its batch.
        tokens = len(batch) * max(lengths[i] for i in batch)
        # All three are alive at once, so none takes another's place.
        blocks = [allocator.malloc(tokens * MiB // share) for share in (2, 4, 8)]
        for block in blocks:
            allocator.free(block)
        reserved.append(allocator.reserved)
    return reserved


def _as_lists(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(batch) for batch in batches]


def _longest(batch: Sequence[int], lengths: Sequence[int]) -> int:
    return max(lengths[index] for index in batch)


def _calm(answer: Callable) -> str | None:
    for seed, count, size in ((0, 96, 8), (1, 210, 6), (2, 64, 4)):
        lengths = _texts(seed, count)
        # Twice with one seed and once with another.
        orders = [answer(list(lengths), size, draw) for draw in (5, 5, 6)]
        if orders[0] is None or orders[0] is ...:
            return None
        first, again, other = map(_as_lists, orders)
        if sorted(chain.from_iterable(first)) != list(range(count)):
            return "Each sample has to come once: the batches hold positions in `lengths`."
        # The smallest may be what is left over.
        _, *larger = sorted(len(batch) for batch in first)
        if any(number != size for number in larger):
            return f"Batches of {size} samples were expected; only one may have fewer."
        if first != again or first == other:
            return "The same seed has to give the same batches, another seed others."
        computed = 0
        for batch in first:
            computed += len(batch) * _longest(batch, lengths)
        padded = computed / sum(lengths)
        if padded > MOST_PADDING:
            return (
                f"{padded:.2f} tokens are computed for each real one, and {MOST_PADDING} are "
                f"allowed."
            )
        longest = [_longest(batch, lengths) for batch in first[1:]]
        pairs = list(pairwise(longest))
        # How often a batch is longer than the one before: about half of the time in a mixed order.
        rises = sum(a < b for a, b in pairs) / len(pairs)
        if not 0.2 < rises < 0.8:
            return (
                "Long and short batches have to come in a mixed order, or the model learns "
                "from one kind at a time."
            )
        reserved = _reserved(lengths, first)
        # The longest batch first makes room for all that follow.
        if reserved[-1] != reserved[0]:
            return (
                f"Reserved grows by {(reserved[-1] - reserved[0]) / MiB:,.0f} MiB after the "
                f"first step."
            )
    return ""


batches_judged = judged(
    _calm,
    "little padding, mixed lengths, and reserved stays where the first step put it.",
)
