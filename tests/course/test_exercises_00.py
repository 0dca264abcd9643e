"""Chapter 00's exercises: right answers in other words are accepted, and what readers get wrong is
told apart.
"""

import re

import pytest
from vramlab import Recipe, find_gpu, predict
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("00")
SIZE = {"K": 2**-10, "M": 1, "G": 2**10}


def test_there_are_five_with_two_hints_each():
    assert list(FOUND) == [f"00.{i}" for i in range(1, 6)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


def missing(message, units=SIZE):
    number = r"([\d.]+) (\w)iB"
    found = re.search(f"allocate {number}.*of which {number} is free", message)
    return float(found[1]) * units[found[2]] - float(found[3]) * units[found[4]]


def halves(model, gpu, seq_len, told=True):
    """Another way to the same batch: a bisection from a batch that is surely too large."""
    low, high = 0, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        need = predict(
            Recipe(model, middle, seq_len, "fp16-mixed"), gpu=gpu if told else None
        ).process
        fits = need.value <= find_gpu(gpu).total
        low, high = (middle, high) if fits else (low, middle)
    return low


@pytest.mark.parametrize(
    "name, answer",
    [
        ("00.1", missing),
        (
            "00.2",
            Recipe(
                "qwen3-0.6b",
                1,
                512,
                "fp16-mixed",
                gradient_accumulation_steps=4,
                gradient_checkpointing=True,
            ),
        ),
        ("00.2", Recipe("qwen3-0.6b", 4, 512, "fp16-mixed", gradient_checkpointing=True)),
        ("00.3", "Gradients"),
        (
            "00.4",
            lambda parameters, tokens, peak, bandwidth: (
                parameters * (6 * tokens / peak + 28 / bandwidth)
            ),
        ),
        ("00.5", halves),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer)


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("00.1", lambda message: missing(message, dict.fromkeys("KMG", 1)), "1 of 3 are right"),
        ("00.1", lambda message: -missing(message), "sign"),
        (
            "00.2",
            Recipe("qwen3-0.6b", 2, 512, "fp16-mixed", gradient_accumulation_steps=2),
            "likely to take",
        ),
        ("00.2", Recipe("qwen3-0.6b", 2, 512, "fp16-mixed"), "has to see 4 texts"),
        ("00.3", "states", "there was none"),
        (
            "00.4",
            lambda parameters, tokens, peak, bandwidth: 6 * parameters * tokens / peak,
            "update is missing",
        ),
        (
            "00.5",
            lambda model, gpu, seq_len: halves(model, gpu, seq_len) + 1,
            "first that does not fit",
        ),
        ("00.5", lambda model, gpu, seq_len: halves(model, gpu, seq_len, told=False), "gpu=gpu"),
        ("00.5", lambda model, gpu, seq_len: max(1, halves(model, gpu, seq_len)), "not even one"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict
