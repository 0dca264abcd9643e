"""Judges of chapter 08: points that no other beats, and planners of the readers' own."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from vramlab import Recipe, find_gpu, format_bytes, predict, step_time
from vramlab.planning.question import METHODS, RANK, Question, usable_memory
from vramlab.planning.search import Search

from ..answers import NOT_ANSWERED, Feedback, kind_of

ASKED = [  # model, gpu, tokens, global batch
    ("llama-3.2-1b", "RTX 4070", 1024, 32),
    ("qwen2.5-7b", "RTX 4090", 2048, 8),
    ("llama-3.1-8b", "T4", 1024, 16),
    ("llama-3.1-70b", "T4", 1024, 8),
]
SLOWER = 1.25  # times the plan's seconds


def front(points: Sequence[tuple]) -> list[tuple]:
    """The points that no other beats.

    A point is beaten by less memory at no less speed, or more speed at no more memory.
    """
    unbeaten = []
    # Once each: of two equal points neither beats the other.
    for point in set(points):
        memory, speed, *_ = point
        beats = [
            other for other in points if other != point and other[0] <= memory and other[1] >= speed
        ]
        if not beats:
            unbeaten.append(point)
    return unbeaten


@cache
def best_seconds(
    model: str,
    gpu: str,
    seq_len: int,
    global_batch: int,
) -> float | None:
    """Seconds of a step of the fastest recipe that is safe; None where none is."""
    # What the exercise lets the reader use, so that the plan has no other means.
    question = Question(
        model,
        gpu,
        seq_len=seq_len,
        global_batch=global_batch,
        tier="safe",
        expandable_segments=False,
        offload=False,
        packing=True,
        liger=False,
        attention=("sdpa", "eager"),
    )
    search = Search(question)
    seconds = []
    for method in METHODS:
        best, *_ = search.answer(method)
        if best:
            seconds.append(best.choice().time.seconds)
    return min(seconds, default=None)


def planned(answer: Callable[..., Any]) -> Feedback:
    """Whether `answer(model, gpu, seq_len, global_batch)` is safe and nearly the fastest.

    Where nothing is safe it has to be None.
    """
    for asked in ASKED:
        model, gpu, *_ = asked
        returned = answer(*asked)
        # The first has an answer, so None there means that nothing was written.
        if returned is ... or (returned is None and asked is ASKED[0]):
            return NOT_ANSWERED
        best = best_seconds(*asked)
        what = f"{model}, {gpu}: "
        if returned:
            wrong = _wrong(returned, asked, best)
        elif best:
            wrong = "there is a recipe that is safe."
        else:
            wrong = ""
        if wrong:
            return Feedback(False, what + wrong)
    return Feedback(True, "Right: a planner. Ask it for your own model and card.")


def _wrong(recipe: Any, asked: tuple, best: float | None) -> str:
    model, gpu, seq_len, batch = asked
    if not isinstance(recipe, Recipe):
        return f"a Recipe or None was expected, not {kind_of(recipe)}."
    step = recipe.batch_size * recipe.gradient_accumulation_steps
    given = (recipe.name, recipe.num_layers, recipe.seq_len, step)
    if given != (model, None, seq_len, batch):
        return f"it has to be the whole model, {seq_len} tokens, and {batch} samples a step."
    adapters = recipe.lora
    # A weaker adapter would fit more easily and is another training.
    if recipe.sharding or (
        adapters and (adapters.r < RANK.r or adapters.target_modules != RANK.target_modules)
    ):
        return (
            "one card, nothing offloaded; adapters of rank 16 or more on all linear layers, "
            "or none."
        )
    card = find_gpu(gpu)
    why = card.why_not(recipe.precision)
    if why:
        return f"{why}."
    # "safe" is the upper end of the interval.
    over = predict(recipe, gpu=card).process.high - usable_memory(card)
    if over > 0:
        return (
            f"your recipe is not safe: its process may take {format_bytes(over)} more than "
            f"there is."
        )
    ratio = step_time(recipe, card).seconds / best
    return (
        f"it takes {ratio:.2f} times as long as the fastest that is safe." if ratio > SLOWER else ""
    )
