"""Chapter 07's exercises: right answers in any form are accepted, and what readers get wrong is told apart."""

import pytest
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("07")
ORDER = (20, 44, 28, 60, 36, 52, 12, 68)


def test_there_are_seven_with_two_hints_each():
    assert list(FOUND) == [f"07.{i}" for i in range(1, 8)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 45


def deal(samples, worker, workers):
    return [sample for i, sample in enumerate(samples) if i % workers == worker]


def halves(samples, worker, workers):
    size = -(-len(samples) // workers)
    return samples[worker * size : (worker + 1) * size]


@pytest.mark.parametrize(
    "name, answer",
    [
        ("07.1", 3),
        ("07.1", 3.0),
        ("07.2", deal),
        ("07.2", halves),
        ("07.2", lambda samples, worker, workers: iter(samples[worker::workers])),
        ("07.3", {"default": 60 + 62 + 64, "expandable": 80}),
        ("07.4", 100 * (1 - 9792 / (24 * 1024))),
        ("07.4", 60.2),
        ("07.5", "c"),
        ("07.5", " C "),
        ("07.6", 40.4),
        ("07.7", sorted(ORDER)[::-1]),
        ("07.7", [68, 12, 20, 28, 36, 44, 52, 60]),
        ("07.7", tuple(sorted(ORDER)[::-1])),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer).text


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("07.1", 2, "every 100 ms"),
        ("07.1", 2.5, "half a worker"),
        ("07.1", 4, "smaller number"),
        ("07.2", lambda samples, worker, workers: samples, "each comes 2 times"),
        ("07.2", lambda samples, worker, workers: samples[worker : worker + 1], "never comes"),
        ("07.2", lambda samples, worker, workers: samples[worker:], "more than once"),
        ("07.2", lambda samples, worker, workers: samples if worker == 0 else [], "far more than another"),
        ("07.2", lambda samples: samples, "fails for 12 samples"),
        ("07.2", [1, 2], "A function was expected"),
        ("07.3", {"default": 310, "expandable": 80}, "61 MiB get a segment of 62"),
        ("07.3", {"default": 64, "expandable": 80}, "does not grow"),
        ("07.3", {"default": 186, "expandable": 64}, "pages of 20 MiB"),
        ("07.3", {"default": 186}, "Not answered yet for expandable"),
        ("07.4", 39.8, "real tokens"),
        ("07.4", 30.45, "with buckets"),
        ("07.4", 0.6016, "percent"),
        ("07.5", "a", "knows nothing of a graph"),
        ("07.5", "b", "no graph behind"),
        ("07.5", "d", "backward freed them"),
        ("07.6", 13.46, "forward pass alone"),
        ("07.6", 0.404, "fraction"),
        ("07.7", list(ORDER), "larger than itself"),
        ("07.7", sorted(ORDER), "larger than itself"),
        ("07.7", [68, 60], "these eight sizes"),
        ("07.7", 68, "A list of the eight"),
    ],
)
def test_typical_mistakes_are_told_what_they_are(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict.text
