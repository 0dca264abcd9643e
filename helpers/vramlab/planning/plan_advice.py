"""What would fit when nothing does. Each sentence is the result of another search, none is a rule of thumb."""

import dataclasses
from collections.abc import Iterator

from ..hardware.gpu import find_gpu, gpu_names
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from ..report.report import format_bytes
from .search import Search
from .search_space import Question, described, method_of

SHORTEST, MOST_GPUS = 64, 1024  # tokens, GPUs


def advise(question: Question) -> Iterator[str]:
    """The first that fits of each kind: another method, offload, shorter sequences, more GPUs, another card."""
    for kind in (_methods, _offload, _shorter, _more_gpus, _cards):
        for said, changes in kind(question):
            if recipe := lightest_fit(question, **changes):
                yield f"{said} fits: {_described(recipe, question)}"
                break


def lightest_fit(question: Question, **changes) -> Recipe | None:
    """A light recipe that fits once `changes` are made to the question; None if nothing does then either."""
    try:
        return Search(dataclasses.replace(question, **changes)).any_fit()
    except RecipeError:
        return None


# Each kind of change: what it is called, and the fields of the question that it changes, the least change first.
Changes = Iterator[tuple[str, dict]]


def _methods(question: Question) -> Changes:
    if question.method != "any":
        for method in ("lora", "qlora"):
            if method != question.method:
                yield f"method={method!r}", {"method": method}


def _offload(question: Question) -> Changes:
    if not question.offload:
        yield "offload=True", {"offload": True}


def _shorter(question: Question) -> Changes:
    seq_len = question.plain.seq_len
    while question.plain.shape.task != "image-classification" and (seq_len := seq_len // 2) >= SHORTEST:
        yield f"seq_len={seq_len}", {"seq_len": seq_len}


def _more_gpus(question: Question) -> Changes:
    gpus = question.gpus
    while (gpus := 2 * gpus) <= MOST_GPUS:
        batch = gpus * max(1, question.global_batch // gpus)
        yield f"gpus={gpus} (global batch {batch})", {"gpus": gpus, "global_batch": batch}


def _cards(question: Question) -> Changes:
    """Cards with more memory that compute in the precisions asked for, the smallest first."""
    for card in sorted(map(find_gpu, gpu_names()), key=lambda card: (card.total, card.name)):
        able = card.total > question.gpu.total and all(card.supports(name) for name in question.precisions or ())
        if question.memory is None and able:
            yield f"one {card.name} ({format_bytes(card.total, digits=1)}) in place of each", {"gpu": card}


def _described(recipe: Recipe, question: Question) -> str:
    said = described(recipe)
    return said if method_of(recipe) in said.lower() or question.method != "any" else f"{said} ({method_of(recipe)})"
