"""Chapter 03's exercises: what readers build is judged by what it does, and what goes wrong is
named.
"""

import pytest
from torch import cat, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from vramlab import LoRA, Recipe
from vramlab_course import exercises
from vramlab_course.exercises import judge
from vramlab_course.judges.judges_03 import by_rows, by_segments, in_chunks

FOUND = exercises.chapter("03")
LONG = Recipe(
    "llama-3.1-8b",
    1,
    8192,
    "bf16-mixed",
    gradient_accumulation_steps=16,
    gradient_checkpointing=True,
    lora=LoRA(r=16),
    dtype="bfloat16",
)


def accumulating(weigh=True, clear=True, graph=False, joined=False, sums=False, loss="mean"):
    """An answer to 03.1, with a reader's mistake."""

    def accumulate(model, parts):
        if clear:
            model.zero_grad()
        if joined:
            parts = [tuple(map(cat, zip(*parts, strict=True)))]
        total, rows = 0.0, sum(len(x) for x, _ in parts)
        for x, y in parts:
            part = F.mse_loss(model(x), y, reduction="sum" if sums else "mean")
            part = (
                part / (rows * y.shape[1])
                if sums
                else part * (len(x) / rows if weigh else 1 / len(parts))
            )
            part.backward(retain_graph=graph)
            total = (part if graph else part.item()) + (0 if loss == "last" else total)
        return total

    return accumulate


def checkpointing(reentrant=False, every=None, rest=True, own=False):
    """An answer to 03.2, with a reader's mistake."""

    def run(layers, x, size):
        size = size if every is None else every
        if not size:
            return nn.Sequential(*layers)(x)
        for start in range(0, len(layers) if rest else len(layers) // size * size, size):
            segment = layers[start : start + size]
            if own:
                x = checkpoint(
                    lambda x, segment=segment: nn.Sequential(*segment)(x), x, use_reentrant=False
                )
            else:
                x = checkpoint(nn.Sequential(*segment), x, use_reentrant=reentrant)
        return x

    return run


def plainly(x, weight, words):
    return (x @ weight.T).log_softmax(-1).gather(1, words[:, None])[:, 0]


def piecewise(x, weight, words, rows):
    """An answer to 03.4 that keeps each piece's probabilities."""
    pairs = zip(x.split(rows), words.split(rows), strict=True)
    return cat([plainly(few, weight, right) for few, right in pairs])


def test_there_are_four_with_two_hints_each():
    assert list(FOUND) == [f"03.{i}" for i in range(1, 5)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


@pytest.mark.parametrize("name", FOUND)
def test_the_checks_reject_their_wrong_answers(name):
    assert FOUND[name].check.problems() == []


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("03.1", accumulating(weigh=False), "each row counts alike"),
        ("03.1", accumulating(clear=False), "before the call"),
        ("03.1", accumulating(graph=True), "still holds its graph"),
        ("03.1", accumulating(joined=True), "more than one of them was in the model"),
        ("03.1", accumulating(loss="last"), "the loss returned is"),
        (
            "03.2",
            checkpointing(reentrant=True),
            "an input that needs no gradient: the result has no gradient",
        ),
        ("03.2", checkpointing(every=0), "ran again in backward are none"),
        ("03.2", checkpointing(every=1), "ran again in backward are [4, 3, 2, 1, 0]"),
        ("03.2", checkpointing(rest=False), "the result is not that of the layers"),
        ("03.3", LONG, "likely to take"),
        ("03.3", LONG.replace(use_liger_kernel=True), "does not know"),
        ("03.4", lambda x, weight, words, rows: plainly(x, weight, words), "10 rows of logits"),
        ("03.4", lambda *given: in_chunks(*given).sum(), "a number for each row"),
        ("03.4", lambda *given: -in_chunks(*given), "are others"),
        ("03.4", lambda *given: in_chunks(*given).detach(), "no gradient"),
        ("03.4", lambda *given: piecewise(*given), "wide as the vocabulary"),
        (
            "03.4",
            lambda x, weight, words, rows: in_chunks(x.detach(), weight, words, rows) + 0 * x.sum(),
            "gradients of x or of weight",
        ),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict


@pytest.mark.parametrize(
    "name, answer",
    [
        ("03.1", by_rows),
        ("03.1", accumulating(sums=True)),
        ("03.2", by_segments),
        ("03.2", checkpointing(own=True)),
        ("03.4", in_chunks),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer)


def test_a_stub_is_not_answered():
    for name in ("03.1", "03.2", "03.4"):
        assert judge(FOUND[name], lambda *_: ...).text == "not answered yet"
