"""Nothing fits: what would. Each sentence is a plan that was searched, none is a rule of thumb."""

import dataclasses
from collections.abc import Iterator

from ..hardware.gpu import Gpu, find_gpu, gpu_names
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from ..report.report import format_bytes
from .search_space import MOST_GPUS, Question, described, method_of

SHORTEST = 64  # tokens


def advise(question: Question) -> Iterator[str]:
    """What would make something fit: another method, offload, shorter sequences, more GPUs, another card."""
    if question.method != "any":
        for method in ("lora", "qlora"):
            if method != question.method and (found := lightest_fit(question, method=method)):
                yield f"method={method!r} fits: {_said(found, question)}"
                break
    if not question.offload and (found := lightest_fit(question, offload=True)):
        yield f"offload=True fits: {_said(found, question)}"
    seq_len = question.plain.seq_len
    if question.plain.shape.task != "image-classification":
        while (seq_len := seq_len // 2) >= SHORTEST:
            if found := lightest_fit(question, seq_len=seq_len):
                yield f"seq_len={seq_len} fits: {_said(found, question)}"
                break
    gpus = question.gpus
    while (gpus := 2 * gpus) <= MOST_GPUS:
        batch = (
            question.global_batch if question.global_batch % gpus == 0 else gpus * max(1, question.global_batch // gpus)
        )
        if found := lightest_fit(question, gpus=gpus, global_batch=batch):
            yield f"gpus={gpus} (global batch {batch}) fits: {_said(found, question)}"
            break
    if question.memory is None and (found := next(_cards(question), None)):
        card, recipe = found
        yield f"one {card.name} ({format_bytes(card.total, digits=1)}) in place of each fits: {_said(recipe, question)}"


def lightest_fit(question: Question, **changes) -> Recipe | None:
    """A light recipe that fits once `changes` are made to the question; None if nothing does then either."""
    from .search import Search

    asked = {f.name: getattr(question, f.name) for f in dataclasses.fields(Question) if f.init}
    try:
        return Search(Question(**{**asked, **changes})).any_fit()
    except RecipeError:
        return None


def _cards(question: Question) -> Iterator[tuple[Gpu, Recipe]]:
    """Cards with more memory on which something fits, the smallest first."""
    cards = sorted(map(find_gpu, gpu_names()), key=lambda card: (card.total, card.name))
    for card in cards:
        able = card.total > question.gpu.total and all(card.supports(p) for p in question.precisions or ())
        if able and (recipe := lightest_fit(question, gpu=card)):
            yield card, recipe


def _said(recipe: Recipe, question: Question) -> str:
    said = described(recipe)
    return said if method_of(recipe) in said.lower() or question.method != "any" else f"{said} ({method_of(recipe)})"
