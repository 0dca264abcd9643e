"""Chapter 09's exercises: right answers in other words are accepted, and what readers get wrong is
told apart.
"""

import math
from itertools import pairwise, permutations

import pytest
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("09")


def test_there_are_seven_with_two_hints_each():
    assert list(FOUND) == [f"09.{i}" for i in range(1, 8)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 70


def by_ring(rates, size, closed=True):
    orders = [(0, *rest) + (0,) * closed for rest in permutations(range(1, len(rates)))]
    slowest = max(min(rates[a][b] for a, b in pairwise(ring)) for ring in orders)
    return size * (2 - 2 / len(rates)) / slowest


def greedy(rates, size):
    ring = [0]
    while left := set(range(len(rates))) - set(ring):
        ring.append(max(left, key=rates[ring[-1]].__getitem__))
    return size * (2 - 2 / len(rates)) / min(rates[a][b] for a, b in pairwise([*ring, 0]))


@pytest.mark.parametrize(
    "name, answer",
    [
        ("09.1", lambda rank, step, gpus: (rank + gpus - step) % gpus),
        ("09.2", 112.5 / 2),
        ("09.3", {"pairs of GPUs": 6, "pairs with NVLink": 1, "pairs across NUMA nodes": 3}),
        ("09.4", lambda watts: -(-max(0, watts - 75) // 150)),
        ("09.5", lambda parameters, read, write: 8 * parameters * (1 / read + 1 / write)),
        ("09.6", "Four micro-batches a step"),
        ("09.7", by_ring),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer)


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("09.1", lambda rank, step, gpus: (rank + step) % gpus, "from a lower one"),
        ("09.2", 112.5, "both directions"),
        (
            "09.3",
            {"pairs of GPUs": 12, "pairs with NVLink": 1, "pairs across NUMA nodes": 3},
            "counted twice",
        ),
        ("09.4", lambda watts: math.ceil(watts / 150), "slot gives 75 W"),
        ("09.5", lambda parameters, read, write: 8 * parameters / read, "go back too"),
        ("09.6", "ZeRO-1", "as many bytes as DDP"),
        ("09.7", lambda rates, size: by_ring(rates, size) / 2, "half the right amount"),
        (
            "09.7",
            lambda rates, size: 1.5 * size / min(rates[a][a - 1] for a in range(len(rates))),
            "",
        ),
        ("09.7", greedy, ""),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text
