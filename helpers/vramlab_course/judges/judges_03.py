"""Judges of chapter 03's exercises, and right answers to test them.

Each judges by what a function does over several inputs.
"""

import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..answers import NOT_ANSWERED, BrokenPiece, Feedback
from ..made_tensors import MadeTensors

MICRO_BATCHES = [(4, 4), (5, 2, 1), (1, 7), (6,)]  # rows of each
STACKS = [
    (6, 1, True),
    (5, 2, True),
    (7, 3, False),
    (4, 4, True),
]  # layers, every, whether the input needs a gradient
VOCABULARY = 7


_wrong = partial(Feedback, False)


def by_rows(model: nn.Module, parts: Sequence[tuple]) -> float:
    """A right answer to 03.1."""
    model.zero_grad()
    loss = 0.0
    rows = sum(len(x) for x, _ in parts)
    for x, y in parts:
        part = F.mse_loss(model(x), y) * len(x) / rows
        part.backward()
        loss += part.item()
    return loss


def all_graphs(model: nn.Module, parts: Sequence[tuple]) -> float:
    """A wrong answer to 03.1: right in its numbers, and with all parts' graphs alive at once."""
    model.zero_grad()
    rows = sum(len(x) for x, _ in parts)
    loss = sum(F.mse_loss(model(x), y) * len(x) / rows for x, y in parts)
    loss.backward()
    return loss.item()


def by_segments(layers: Sequence[nn.Module], x: torch.Tensor, every: int) -> torch.Tensor:
    """A right answer to 03.2."""
    for start in range(0, len(layers), every):
        x = checkpoint(
            nn.Sequential(*layers[start : start + every]),
            x,
            use_reentrant=False,
        )
    return x


def accumulated(answer: Any) -> Feedback:
    """Whether `answer(model, parts)` leaves the gradients of the mean over all rows.

    It has to return that mean.
    """
    for sizes in MICRO_BATCHES:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        parts = [(torch.randn(n, 3), torch.randn(n, 2)) for n in sizes]
        x, y = (torch.cat(side) for side in zip(*parts, strict=True))
        mean = F.mse_loss(model(x), y)
        # Without touching .grad, which the answer has to fill.
        exact = torch.cat(
            [g.flatten() for g in torch.autograd.grad(mean, list(model.parameters()))]
        )
        for parameter in model.parameters():
            # Gradients of a step before, which an answer has to clear.
            parameter.grad = torch.full_like(parameter, 9.0)
        rows: list[int] = []
        gradients: list[torch.Tensor | None] = []

        def seen(module, given, rows=rows, gradients=gradients) -> None:
            # What passes through the model at once is seen here, whatever the answer does.
            rows.append(len(given[0]))
            there = module.weight.grad
            gradients.append(None if there is None else there.clone())

        model.register_forward_pre_hook(seen)
        returned = answer(model, parts)
        if returned is None or returned is ...:
            return NOT_ANSWERED
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        said = _wrong_sum(found, exact, returned, mean.item(), rows, sizes)
        if not said and _piled_up(gradients):
            said = "a part goes into the model before backward() has run for the one before it"
        if said:
            return _wrong(f"Micro-batches of {', '.join(map(str, sizes))} rows: {said}.")
    return Feedback(
        True,
        "Right: the gradients of one large batch, whatever the sizes of its parts.",
    )


def _piled_up(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether a forward pass found the gradients as the one before it had found them.

    Then no backward pass ran in between, and the graphs of both parts are alive.
    """
    for before, after in itertools.pairwise(gradients):
        if before is None or after is None:
            if before is after:
                return True
        elif torch.equal(before, after):
            return True
    return False


def _wrong_sum(
    gradient,
    exact,
    returned: Any,
    mean: float,
    rows: list[int],
    sizes: Sequence[int],
) -> str:
    # Whoever joins all parts gets the right gradients and saves nothing.
    if rows and max(rows) > max(sizes):
        return (
            "more than one of them was in the model at once, which is what accumulation is to avoid"
        )
    if torch.allclose(gradient - 9, exact, atol=1e-5):
        return "gradients that were there before the call are still in .grad"
    if not torch.allclose(gradient, exact, atol=1e-5):
        return (
            "the gradients are not those of the mean over all rows, in which each row counts alike"
        )
    if isinstance(returned, torch.Tensor) and returned.requires_grad:
        return (
            "the loss that is returned still holds its graph, and with it each part's activations"
        )
    return (
        ""
        if abs(float(returned) - mean) < 1e-5
        else f"the loss returned is {float(returned):.4f}, not {mean:.4f}"
    )


def recomputed(answer: Any) -> Feedback:
    """Whether `answer(layers, x, every)` gives the layers' result.

    Segments of `every` layers have to run again in backward.
    """
    for count, every, needs in STACKS:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]
        weights = [p for layer in layers for p in layer.parameters()]
        x = torch.randn(3, 4, requires_grad=needs)
        exact = nn.Sequential(*layers)(x)
        gradients = torch.autograd.grad(exact.sum(), weights)
        ran: list[int] = []
        for index, layer in enumerate(layers):
            # Defaults bind this layer's number now.
            layer.register_forward_pre_hook(lambda *_, ran=ran, index=index: ran.append(index))
        result = answer(list(layers), x, every)
        if result is None or result is ...:
            return NOT_ANSWERED
        case = (
            f"With {count} layers, "
            f"every={every}{'' if needs else ' and an input that needs no gradient'}: "
        )
        if not isinstance(result, torch.Tensor) or not torch.allclose(result, exact, atol=1e-6):
            return _wrong(case + "the result is not that of the layers, one after the other.")
        forward = list(ran)
        if not result.requires_grad:
            return _wrong(case + "the result has no gradient, so nothing would be trained.")
        result.sum().backward()
        for p, gradient in zip(weights, gradients, strict=True):
            if p.grad is None or not torch.allclose(p.grad, gradient, atol=1e-5):
                return _wrong(case + "the weights' gradients are missing or wrong.")
        expected: list[int] = []
        # Backward meets the last segment first, and runs each from its first layer.
        for start in reversed(range(0, count, every)):
            expected += range(start, min(start + every, count))
        again = ran[len(forward) :]
        if forward != list(range(count)) or again != expected:
            return _wrong(
                f"{case}the layers that ran again in backward are {again or 'none'}, in this order."
            )
    return Feedback(
        True,
        "Right: what a segment was given is kept, and the segment runs again when backward gets "
        "there.",
    )


class Rows(MadeTensors):
    """What is made while it is entered: rows of logits, and matrices as large as the weight.

    Attributes:
        most: the most rows of any matrix with VOCABULARY columns.
        weights: how many matrices of the weight's shape.
    """

    sees_views = False

    def __init__(self):
        super().__init__()
        self.most = 0
        self.weights = 0

    def see(self, tensor: torch.Tensor) -> None:
        if tensor.shape[-1:] == (VOCABULARY,):
            self.most = max(self.most, tensor.numel() // VOCABULARY)
        self.weights += tensor.shape == (VOCABULARY, 4)


def _problem(
    rows: int = 10,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of numbers, a matrix for their logits, and the right entry of each row."""
    draw = torch.Generator().manual_seed(0)
    # By default in fp64, so that rounding cannot pass for a mistake, nor a mistake for rounding.
    x = torch.randn(rows, 4, generator=draw, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 4, generator=draw, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (rows,), generator=draw)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _told(answer: Any) -> Any:
    """A reader's FusedLoss that says so where its forward returns no tensor.

    Of a number autograd itself says that it "is not iterable".
    """

    class Told(answer):
        @staticmethod
        def forward(ctx, *given):
            loss = answer.forward(ctx, *given)
            if not isinstance(loss, torch.Tensor):
                raise BrokenPiece("Your forward returns no tensor: sum without .item().")
            return loss

    return Told


def fused(answer: Any) -> dict[str, Any]:
    """A reader's FusedLoss: its loss, how far gradients are off, what it makes.

    In fp32, because a right answer takes its sums there; in bf16 over many pieces of 4 rows, with
    the errors as shares; and with a head that needs no gradient.
    """
    told = _told(answer)
    x, weight, targets = _problem(dtype=torch.float32)
    exact = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    # Three times the loss: a backward pass that ignores what comes from above is found out.
    wanted = torch.autograd.grad(3 * exact, (x, weight))
    with Rows() as seen:
        loss = told.apply(x, weight, targets, 4)
        found = torch.autograd.grad(3 * loss, (x, weight))
    off = [float((mine - right).abs().max()) for mine, right in zip(found, wanted, strict=True)]
    with Rows() as frozen:
        told.apply(x, weight.detach(), targets, 4).backward()
    half, half_weight, targets = _problem(2048, torch.bfloat16)
    # The same rounded numbers, in fp64.
    total = F.cross_entropy(half.double() @ half_weight.double().T, targets, reduction="sum")
    summed = told.apply(half, half_weight, targets, 4)
    (slope,) = torch.autograd.grad(total, half_weight)
    (mine,) = torch.autograd.grad(summed, half_weight)
    return {
        "loss": loss.item(),
        "off": loss.item() - exact.item(),
        "x": off[0],
        "weight": off[1],
        "rows": seen.most,
        "wasted": frozen.weights,
        "sum": summed.item() / total.item() - 1,
        "slope": float((mine - slope).float().norm() / slope.float().norm()),
    }


def pieces(answer: Any, parts: int = 2) -> dict[str, Any]:
    """What a reader's accumulate does with samples of different lengths."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, (4, 6), generator=draw)
    labels = ids.clone()
    for row, length in enumerate((2, 3, 6, 5)):
        labels[row, length:] = -100
    table = nn.Parameter(torch.randn(5, 5, generator=draw, dtype=torch.float64))
    rows: list[int] = []
    gradients: list[torch.Tensor | None] = []

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows.append(len(ids))
        gradients.append(None if table.grad is None else table.grad.clone())
        # Labels are shifted by one, as a causal model does inside.
        known = labels[:, 1:] != -100
        return F.cross_entropy(
            table[ids[:, :-1]][known],
            labels[:, 1:][known],
            reduction="sum",
        )

    # Over all tokens of the batch, not over its samples.
    tokens = (labels[:, 1:] != -100).sum()
    mean = loss_of(ids, labels) / tokens
    (exact,) = torch.autograd.grad(mean, table)
    # Two wrong answers: each part's own mean, and the labels of first tokens counted too.
    of_means = torch.zeros_like(exact)
    for few, right in zip(ids.chunk(parts), labels.chunk(parts), strict=True):
        own = loss_of(few, right) / (right[:, 1:] != -100).sum() / parts
        of_means += torch.autograd.grad(own, table)[0]
    with_firsts = exact * tokens / (labels != -100).sum()
    rows.clear()
    gradients.clear()
    loss = answer(loss_of, ids, labels, parts)
    gradient = torch.zeros_like(exact) if table.grad is None else table.grad
    # Gradients that point the right way and have another length: a wrong number divides them.
    times = float((gradient * exact).sum() / exact.square().sum())
    return {
        "times": times,
        "divided": times > 0 and abs(times - 1) > 1e-6 and torch.allclose(gradient, times * exact),
        "loss": loss,
        "off": torch.as_tensor(loss, dtype=torch.float64).item() - mean.item(),
        "gradient": float((gradient - exact).norm() / exact.norm()),
        "means": torch.allclose(gradient, of_means),
        "firsts": torch.allclose(gradient, with_firsts),
        "rows": list(rows),
        "piled": _piled_up(gradients),
    }


def formats(answer: Any) -> list[torch.dtype]:
    """The formats in which a reader's Recompute runs a block under autocast, run by run."""
    made: list[torch.dtype] = []
    block = nn.Linear(4, 4)
    block.register_forward_hook(lambda module, given, result: made.append(result.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = answer.apply(block, torch.randn(3, 4, requires_grad=True))
    result.float().sum().backward()
    return made


def again(answer: Any) -> dict[str, Any]:
    """What a reader's Recompute does for a block of two layers, once and twice in a row."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = list(block.parameters())
    # The block twice, so that a piece which forgets the gradient of its input is wrong.
    exact = torch.autograd.grad(
        (block(block(x)) ** 2).sum(),
        [x, *weights],
    )
    ran: list[bool] = []  # each time whether autograd recorded it
    block.register_forward_hook(lambda module, given, result: ran.append(result.requires_grad))
    result = answer.apply(block, answer.apply(block, x))
    recorded = True
    detached = True
    paired = True
    try:
        (result**2).sum().backward()
    except RuntimeError as error:
        # PyTorch's words where a piece returned something outside the graph, where the input still
        # hangs on the graph that made it, and where the results don't go with the arguments.
        recorded = "does not require grad" not in str(error)
        detached = "a second time" not in str(error)
        paired = not re.search("returned an? (incorrect|gradient different)", str(error))
        if recorded and detached and paired:
            raise
    off = []
    for tensor, right in zip((x, *weights), exact, strict=True):
        mine = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        off.append(float((mine - right).abs().max()))
    return {
        "x": off[0],
        "weights": max(off[1:]),
        "runs": len(ran),
        "recorded": recorded,
        "outside": not recorded and any(ran),
        "missing": x.grad is None,
        "detached": detached,
        "paired": paired,
    }


def in_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    rows: int,
) -> Any:
    """A right answer to 03.4."""

    scores = []
    for few, right in zip(x.split(rows), targets.split(rows), strict=True):
        scores.append(checkpoint(_scores, few, weight, right, use_reentrant=False))
    return torch.cat(scores)


def _scores(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's word, from all logits of all rows."""
    logits = x @ weight.T
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def one_by_one(answer: Any) -> Feedback:
    """Whether `answer(x, weight, targets, rows)` gives log-probabilities from few logits."""
    x, weight, targets = _problem()
    exact = _scores(x, weight, targets)
    # Different weights for rows, so that rows which are mixed up are found.
    scale = torch.arange(1.0, 11, dtype=torch.float64)
    wanted = torch.autograd.grad((scale * exact).sum(), (x, weight))
    saved: list[int] = []

    # Logits that are kept for backward would be as wide as the vocabulary.
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] == (VOCABULARY,):
            saved.append(tensor.numel())
        return tensor

    with Rows() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        returned = answer(x, weight, targets, 4)
    if returned is None or returned is ...:
        return NOT_ANSWERED
    said = _wrong_scores(returned, exact, seen.most, saved)
    if said:
        return _wrong(said)
    with Rows() as seen:
        gradients = torch.autograd.grad((scale * returned).sum(), (x, weight))
    if seen.most > 4:
        return _wrong(f"With rows=4 there were {seen.most} rows of logits at once in backward.")
    if not all(torch.allclose(*pair) for pair in zip(gradients, wanted, strict=True)):
        return _wrong("The gradients of x or of weight are not those of the plain computation.")
    return Feedback(True, "Right: this is how DPO and GRPO score tokens without all logits.")


def _wrong_scores(
    returned: Any,
    exact: torch.Tensor,
    rows: int,
    saved: list[int],
) -> str:
    """What is wrong with `returned` before backward, "" if nothing."""
    if not isinstance(returned, torch.Tensor) or returned.shape != exact.shape:
        return "A tensor with a number for each row of x was expected."
    if not torch.allclose(returned, exact):
        return "The log-probabilities are others. Are they negative, and in their order?"
    if rows > 4:
        return f"With rows=4 there were {rows} rows of logits at once in forward."
    if not returned.requires_grad:
        return "The result has no gradient, so nothing would be trained."
    return "Tensors as wide as the vocabulary are kept for backward." if saved else ""
