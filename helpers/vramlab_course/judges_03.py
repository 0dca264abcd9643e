"""Judges of chapter 03's exercises, each by what a function does over several inputs, and right
answers to test them.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from vramlab import Recipe, find_gpu, predict

from .answers import NOT_ANSWERED, Feedback, kind_of

MICRO_BATCHES = [(4, 4), (5, 2, 1), (1, 7), (6,)]  # rows of each
STACKS = [
    (6, 1, True),
    (5, 2, True),
    (7, 3, False),
    (4, 4, True),
]  # layers, every, whether the input needs a gradient
DRAW = random.Random(3)
PACKS = [([5, 4, 3, 2, 2], 8), ([7], 7), ([], 4), ([6, 5, 5, 4, 3, 3, 2], 10)]
PACKS += [([DRAW.randint(20, 900) for _ in range(200)], 1024)]
BASE = Recipe("llama-3.1-8b", 4, 2048, "bf16-mixed", dtype="bfloat16", lora={"r": 16})
SMALL = Recipe("qwen3-0.6b", 4, 512, "fp16-mixed")
TO_FIT = [
    (SMALL.replace(batch_size=2), "RTX 4090"),
    (SMALL, "RTX 4070"),
    (BASE, "RTX 4090"),
    (BASE.replace(seq_len=8192), "RTX 4090"),
    (BASE.replace(seq_len=8192), "T4"),
]


_wrong = partial(Feedback, False)


def by_rows(model: nn.Module, parts: Sequence[tuple]) -> float:
    """A right answer to 03.1."""
    model.zero_grad()
    loss = 0.0
    for x, y in parts:
        part = F.mse_loss(model(x), y) * len(x) / sum(len(x) for x, _ in parts)
        part.backward()
        loss += part.item()
    return loss


def by_segments(layers: Sequence[nn.Module], x: torch.Tensor, every: int) -> torch.Tensor:
    """A right answer to 03.2."""
    for start in range(0, len(layers), every):
        x = checkpoint(nn.Sequential(*layers[start : start + every]), x, use_reentrant=False)
    return x


def accumulated(answer: Any) -> Feedback:
    """Whether `answer(model, parts)` leaves the gradients of the mean over all rows, and returns
    that mean.
    """
    for sizes in MICRO_BATCHES:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        parts = [(torch.randn(n, 3), torch.randn(n, 2)) for n in sizes]
        x, y = (torch.cat(side) for side in zip(*parts, strict=True))
        mean = F.mse_loss(model(x), y)
        exact = torch.cat(
            [g.flatten() for g in torch.autograd.grad(mean, list(model.parameters()))]
        )
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 9.0)
        rows: list[int] = []
        model.register_forward_pre_hook(lambda module, given, rows=rows: rows.append(len(given[0])))
        returned = answer(model, parts)
        if returned is None or returned is ...:
            return NOT_ANSWERED
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        if said := _wrong_sum(found, exact, returned, mean.item(), rows, sizes):
            return _wrong(f"Micro-batches of {', '.join(map(str, sizes))} rows: {said}.")
    return Feedback(
        True, "Right: the gradients of one large batch, whatever the sizes of its parts."
    )


def _wrong_sum(
    found, exact, returned: Any, mean: float, rows: list[int], sizes: Sequence[int]
) -> str:
    if rows and max(rows) > max(sizes):
        return (
            "more than one of them was in the model at once, which is what accumulation is to avoid"
        )
    if torch.allclose(found - 9, exact, atol=1e-5):
        return "gradients that were there before the call are still in .grad"
    if not torch.allclose(found, exact, atol=1e-5):
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
    """Whether `answer(layers, x, every)` gives the layers' result and runs segments of `every`
    again in backward.
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
        pairs = zip(weights, gradients, strict=True)
        if any(p.grad is None or not torch.allclose(p.grad, g, atol=1e-5) for p, g in pairs):
            return _wrong(case + "the weights' gradients are missing or wrong.")
        segments = [
            list(range(start, min(start + every, count))) for start in range(0, count, every)
        ]
        again = ran[len(forward) :]
        if forward != list(range(count)) or again != [
            i for segment in reversed(segments) for i in segment
        ]:
            return _wrong(
                f"{case}the layers that ran again in backward are {again or 'none'}, in this order."
            )
    return Feedback(
        True,
        "Right: what a segment was given is kept, and the segment runs again when backward gets "
        "there.",
    )


def packed(answer: Any) -> Feedback:
    """Whether `answer(lengths, size)` deals all texts to rows of at most `size`, as few as best fit
    finds.
    """
    for lengths, size in PACKS:
        rows = answer(list(lengths), size)
        if rows is None or rows is ...:
            return NOT_ANSWERED
        rows, few = [list(row) for row in rows], len(best_fit(lengths, size))
        dealt, what = (
            sorted(i for row in rows for i in row),
            f"{len(lengths)} texts in rows of {size}: ",
        )
        if dealt != list(range(len(lengths))):
            return _wrong(what + "not every index from 0 stands in exactly one row.")
        if over := [row for row in rows if sum(lengths[i] for i in row) > size]:
            return _wrong(f"{what}row {over[0]} has {sum(lengths[i] for i in over[0])} tokens.")
        if len(rows) > few:
            return _wrong(
                f"{what}{len(rows)} rows, and {few} are enough. Which text is hardest to place?"
            )
    return Feedback(True, "Right: TRL's packing (strategy 'bfd') deals texts to rows in this way.")


def best_fit(lengths: Sequence[int], size: int, ordered: bool = True) -> list[list[int]]:
    """Rows of indices by best fit, the longest text first where `ordered`."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i] if ordered else i):
        room = [(size - sum(lengths[i] for i in row), row) for row in rows]
        fitting = [(left, row) for left, row in room if left >= lengths[index]]
        if fitting:
            min(fitting, key=lambda pair: pair[0])[1].append(index)
        else:
            rows.append([index])
    return rows


def is_likely(recipe: Recipe, gpu: str) -> bool:
    """Whether the likely figure of the process is within the card."""
    return predict(recipe, gpu=gpu).process.value <= find_gpu(gpu).total


def make_it_fit(
    recipe: Recipe, gpu: str, likely: Callable[[Recipe, str], bool] = is_likely
) -> Recipe | None:
    """The recipe with as few of the chapter's switches as make it likely to fit, in their order;
    None without hope.
    """
    steps = [recipe, recipe := recipe.replace(use_liger_kernel=True)]
    while recipe.batch_size > 1:
        half, twice = recipe.batch_size // 2, recipe.gradient_accumulation_steps * 2
        steps.append(recipe := recipe.replace(batch_size=half, gradient_accumulation_steps=twice))
    steps.append(recipe.replace(gradient_checkpointing=True))
    return next((step for step in steps if likely(step, gpu)), None)


def fitted(answer: Any) -> Feedback:
    """Whether `answer(recipe, gpu)` turns the switches of `make_it_fit`, and no more."""
    found = [answer(recipe, gpu) for recipe, gpu in TO_FIT]
    if found[0] is None or found[0] is ...:
        return NOT_ANSWERED
    for given, (recipe, gpu) in zip(found, TO_FIT, strict=True):
        expected, what = make_it_fit(recipe, gpu), f"{recipe}, {gpu}: "
        if given == expected:
            continue
        if given is None or expected is None:
            return _wrong(
                what
                + ("there is a way to fit." if expected else "no recipe is likely to fit: None.")
            )
        if not isinstance(given, Recipe):
            return _wrong(f"{what}a Recipe or None was expected, not {kind_of(given)}.")
        if given.tokens != recipe.tokens:
            return _wrong(what + "an update no longer sees the same tokens.")
        if not is_likely(given, gpu):
            return _wrong(what + "your recipe is not likely to fit.")
        return _wrong(
            what + "it fits, but a switch is on before its turn, or one more than needed."
        )
    return Feedback(True, "Right: a ladder for any model and card. Put in yours.")
