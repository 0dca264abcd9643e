"""What would fit when nothing does. Each sentence is the result of another search, none is a rule of thumb."""

import dataclasses
from collections.abc import Iterator

from ..hardware.gpu import find_gpu, gpu_names
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from ..report.report import format_bytes
from .question import Question
from .search import Search
from .search_space import method_of

SHORTEST, MOST_GPUS = 64, 1024  # tokens, GPUs


def advise(question: Question) -> Iterator[str]:
    """The least change of each kind that makes something fit: method, offload, sequences, GPUs, card."""
    for changes in _changes(question):
        for said, change in changes:
            if recipe := lightest_fit(question, **change):
                yield f"{said} fits: {_described(recipe, question)}"
                break


def lightest_fit(question: Question, **changes) -> Recipe | None:
    """A light recipe that fits once `changes` are made to the question; None if none does. Of two that differ in
    checkpointing or the kernel of attention alone, only the lighter is tried."""
    lighter = {"checkpointing": (max(question.checkpointing),)}
    lighter |= {"attention": ("sdpa",)} if "sdpa" in question.attention else {}
    try:
        return Search(dataclasses.replace(question, **lighter, **changes)).any_fit()
    except RecipeError:
        return None


def _changes(question: Question) -> Iterator[list[tuple[str, dict]]]:
    """For each kind of change: what it is called and the fields that it changes, the least change first."""
    methods = () if question.method == "any" else ("lora", "qlora")
    yield [(f"method={method!r}", {"method": method}) for method in methods if method != question.method]
    yield [] if question.offload else [("offload=True", {"offload": True})]
    if question.plain.shape.task != "image-classification":
        lengths = (question.plain.seq_len >> i for i in range(1, 32))
        yield [(f"seq_len={n}", {"seq_len": n}) for n in lengths if n >= SHORTEST]
    counts = [question.gpus << i for i in range(1, 11) if question.gpus << i <= MOST_GPUS]
    batches = [n * max(1, question.global_batch // n) for n in counts]
    yield [
        (f"gpus={n} (global batch {batch})", {"gpus": n, "global_batch": batch})
        for n, batch in zip(counts, batches, strict=True)
    ]
    if question.memory is None:
        yield [
            (f"one {card.name} ({format_bytes(card.total, digits=1)}) in place of each", {"gpu": card})
            for card in sorted(map(find_gpu, gpu_names()), key=lambda card: (card.total, card.name))
            if card.total > question.gpu.total and all(map(card.supports, question.precisions or ()))
        ]


def _described(recipe: Recipe, question: Question) -> str:
    said = str(recipe)
    return said if method_of(recipe) in said.lower() or question.method != "any" else f"{said} ({method_of(recipe)})"
