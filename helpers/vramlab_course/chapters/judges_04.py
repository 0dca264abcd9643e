"""Judges of chapter 04's exercises: what readers' functions do, over several inputs."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from .figures_04 import most_held, pipeline_ends
from .judges_07 import judged

RINGS = [
    [[1.0, 2.0], [3.0, 4.0]],
    [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]],
    [[float(4 * r + i) for i in range(4)] for r in range(4)],
]
PIPELINES = [(1, 3), (2, 2), (2, 5), (4, 8), (3, 9), (4, 2)]  # stages, micro-batches


class Recorded(list):
    """A rank's chunks; counts what is written, and how often that was neither what `before` had nor its sum with that."""

    def __init__(self, chunks: list[float]):
        super().__init__(chunks)
        self.had = [{chunk} for chunk in chunks]  # at any time, by place
        self.written = self.strange = 0
        self.before: Recorded = self

    def __setitem__(self, index: Any, value: Any) -> None:
        places = range(len(self))[index]
        for place, new in zip(places, value, strict=True) if isinstance(index, slice) else [(places, value)]:
            self.written += 1
            self.strange += not {new, new - self[place]} & self.before.had[place]
            self.had[place].add(new)
            super().__setitem__(place, new)


def _ring(answer: Callable) -> str | None:
    for chunks in RINGS:
        ranks, n = [Recorded(each) for each in chunks], len(chunks)
        for number, rank in enumerate(ranks):
            rank.before = ranks[number - 1]
        answer(ranks)
        if all(list(rank) == each for rank, each in zip(ranks, chunks, strict=True)):
            return None
        sums = [sum(column) for column in zip(*chunks, strict=True)]
        for number, rank in enumerate(ranks):
            if list(rank) != sums:
                return f"With {n} ranks, rank {number} ends with {list(rank)}; the sums are {sums}."
        written = [rank.written for rank in ranks]
        if max(written) > 2 * (n - 1):
            return f"With {n} ranks a rank receives {max(written)} chunks; a ring needs {2 * (n - 1)}."
        if any(rank.strange for rank in ranks):
            return f"With {n} ranks a rank gets what the rank before it never had: it can hear from that one only."
    return ""


def all_reduced(ranks: list[list[float]]) -> None:
    """All-reduce in place by a ring: first each chunk's sum goes round, then its result."""
    n = len(ranks)
    for step in range(2 * (n - 1)):
        sent = [((rank - step) % n, ranks[rank][(rank - step) % n]) for rank in range(n)]
        for rank, (chunk, value) in enumerate(sent):
            after = ranks[(rank + 1) % n]
            after[chunk] = after[chunk] + value if step < n - 1 else value


def all_to_all(ranks: list[list[float]]) -> None:
    """The right sums, received from everyone."""
    given = [list(rank) for rank in ranks]
    for rank in ranks:
        for chunk in range(len(rank)):
            for other in given:
                rank[chunk] = rank[chunk] + other[chunk] if other is not given[0] else other[chunk]


def _shards(answer: Callable) -> str | None:
    torch.manual_seed(0)
    for shapes, world in (([(4, 3), (4,)], 2), ([(5, 3), (5,), (2, 2)], 4), ([(1,)], 3), ([(7,), (2, 5)], 1)):
        tensors = [torch.randn(shape) for shape in shapes]
        found = answer([tensor.clone() for tensor in tensors], world)
        if found is None or found is ...:
            return None
        if len(found) != world or len({tuple(shard.shape) for shard in found}) != 1:
            return f"{world} shards of equal shape were expected for {shapes}."
        flat, whole = (
            torch.cat([tensor.flatten() for tensor in tensors]),
            torch.cat([shard.flatten() for shard in found]),
        )
        if len(whole) - len(flat) >= world or len(whole) < len(flat):
            return f"For {shapes} on {world} ranks the shards hold {len(whole)} numbers, the tensors {len(flat)}."
        if not torch.equal(whole[: len(flat)], flat) or whole[len(flat) :].any():
            return "Laid end to end, the shards have to be the tensors' numbers in their order, and zeros behind."
    return ""


def _averaged(answer: Callable) -> str | None:
    torch.manual_seed(0)
    for counts in ((10, 10), (10, 30), (7, 1, 40), (5, 0, 3)):
        weight, rows = torch.randn(3, requires_grad=True), [torch.randn(count, 3) for count in counts]
        gradients = [
            torch.autograd.grad((row @ weight).square().mean(), weight)[0] if len(row) else torch.zeros(3)
            for row in rows
        ]
        (wanted,) = torch.autograd.grad((torch.cat(rows) @ weight).square().mean(), weight)
        found = answer([gradient.clone() for gradient in gradients], list(counts))
        if found is None or found is ...:
            return None
        if not torch.allclose(found, wanted, atol=1e-5):
            return f"With {counts} tokens on the ranks it is not the gradient of the mean over all tokens."
    return ""


def _scheduled(answer: Callable) -> str | None:
    for stages, count in PIPELINES:
        orders = [answer(stage, stages, count) for stage in range(stages)]
        if orders[0] is None or orders[0] is ...:
            return None
        orders = [[tuple(one) for one in order] for order in orders]
        case = f"With {stages} stages and {count} micro-batches"
        for stage, order in enumerate(orders):
            if sorted(order) != sorted(chain.from_iterable((("forward", m), ("backward", m)) for m in range(count))):
                return f"{case} stage {stage} does not have each micro-batch's forward and backward pass once."
            if any(order.index(("backward", m)) < order.index(("forward", m)) for m in range(count)):
                return f"{case} stage {stage} goes back through a micro-batch before it went forward."
        try:
            ends = pipeline_ends(orders)
        except RecursionError:
            return f"{case} the stages wait for each other for ever."
        if max(ends.values()) > 3 * (count + stages - 1):
            return (
                f"{case} it takes {max(ends.values()):g} forward passes of time; {3 * (count + stages - 1)} are enough."
            )
        for stage, order in enumerate(orders):
            if most_held(order) > stages - stage:
                return f"{case} stage {stage} holds {most_held(order)} micro-batches; {stages - stage} are enough."
    return ""


ring_judged = judged(_ring, "each rank sends 2 (N − 1) / N of the whole, however many there are.")
shards_judged = judged(_shards, "every number once, and less than one number a rank in vain.")
averaged_judged = judged(_averaged, "every token counts the same, wherever it was read.")
schedule_judged = judged(_scheduled, "1F1B: no stage holds more than the stages that follow it, and itself.")
