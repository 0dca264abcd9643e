"""Chapter 09's exercises: right answers in other words are accepted, and what readers get wrong is told apart."""

import math

import pytest
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("09")
GPT2 = 124_439_808


def test_there_are_six_with_two_hints_each():
    assert list(FOUND) == [f"09.{i}" for i in range(1, 7)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 45


@pytest.mark.parametrize(
    "name, answer",
    [
        ("09.1", 6 * GPT2),
        ("09.2", 112.5 / 2),
        ("09.3", {"pairs of GPUs": 6, "pairs with NVLink": 1, "pairs across NUMA nodes": 3}),
        ("09.4", lambda watts: -(-max(0, watts - 75) // 150)),
        ("09.5", 9.1774),
        ("09.6", "Four micro-batches a step"),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer)


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("09.1", 8 * GPT2, "the piece that it ends with"),
        ("09.2", 112.5, "both directions"),
        ("09.3", {"pairs of GPUs": 12, "pairs with NVLink": 1, "pairs across NUMA nodes": 3}, "counted twice"),
        ("09.4", lambda watts: math.ceil(watts / 150), "slot gives 75 W"),
        ("09.5", 4.5887, "two states"),
        ("09.6", "ZeRO-1", "as many bytes as DDP"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text
