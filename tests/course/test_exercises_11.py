"""Chapter 11's exercise: right answers in other words are accepted, and what readers get wrong is
told apart.
"""

from itertools import pairwise, permutations

import pytest
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("11")


def test_there_is_one_with_two_hints():
    assert list(FOUND) == ["11.1"] and len(set(FOUND["11.1"].hints)) == 2


def by_ring(rates, size, closed=True):
    orders = [(0, *rest) + (0,) * closed for rest in permutations(range(1, len(rates)))]
    slowest = max(min(rates[a][b] for a, b in pairwise(ring)) for ring in orders)
    return size * (2 - 2 / len(rates)) / slowest


def greedy(rates, size):
    ring = [0]
    while left := set(range(len(rates))) - set(ring):
        ring.append(max(left, key=rates[ring[-1]].__getitem__))
    return size * (2 - 2 / len(rates)) / min(rates[a][b] for a, b in pairwise([*ring, 0]))


def test_a_right_answer_in_other_words():
    assert judge(FOUND["11.1"], by_ring).right


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda rates, size: by_ring(rates, size) / 2, "half the right amount"),
        (lambda rates, size: 1.5 * size / min(rates[a][a - 1] for a in range(len(rates))), ""),
        (greedy, "all orders"),
        (lambda rates, size: by_ring(rates, size) * len(rates) / (2 * len(rates) - 2), "send"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(answer, said):
    verdict = judge(FOUND["11.1"], answer)
    assert not verdict.right and said in verdict.text
