"""Chapter 07's exercises: right answers in any form are accepted, and what readers get wrong is
told apart.
"""

import random

import pytest
from vramlab_course import exercises
from vramlab_course.exercises import judge
from vramlab_course.judges import judges_07

FOUND = exercises.chapter("07")


def test_there_are_three_with_two_hints_each():
    assert list(FOUND) == [f"07.{i}" for i in range(1, 4)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 65


def dealt(samples, rank, ranks, worker, workers):
    return (
        sample for i, sample in enumerate(samples) if i % (ranks * workers) == worker * ranks + rank
    )


def detached(model, optimizer, batches):
    history, last = [], None
    for batch in batches:
        optimizer.zero_grad()
        last = model(batch)
        loss = (last - batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    optimizer.zero_grad()
    return history, last.mean().item()


def grouped(lengths, size, seed):
    """Sorted within random groups, the longest first."""
    draw = random.Random(seed)
    order = draw.sample(range(len(lengths)), len(lengths))
    groups = [
        sorted(order[at : at + 16 * size], key=lengths.__getitem__)
        for at in range(0, len(order), 16 * size)
    ]
    flat = sorted((i for group in groups for i in group), key=lengths.__getitem__, reverse=True)
    cut = [flat[at : at + size] for at in range(0, len(flat), size)]
    first, rest = cut[0], cut[1:]
    draw.shuffle(rest)
    return [first, *rest]


@pytest.mark.parametrize(
    "name, answer",
    [
        ("07.1", detached),
        ("07.2", dealt),
        ("07.3", grouped),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer).text


def without_clearing(model, optimizer, batches):
    """Gradients add up: another training."""
    optimizer.zero_grad = lambda: None
    return judges_07.trained(model, optimizer, batches)


def keeps_losses(model, optimizer, batches):
    history, last = judges_07.leaky(model, optimizer, batches)
    return [loss.detach() for loss in history], last.item()


@pytest.mark.parametrize(
    "name, answer, said",
    [
        (
            "07.2",
            lambda samples, rank, ranks, worker, workers: samples[worker::workers],
            "comes 2 times",
        ),
        (
            "07.2",
            lambda samples, rank, ranks, worker, workers: samples[rank::ranks],
            "comes 2 times",
        ),
        ("07.2", lambda samples, rank, ranks, worker, workers: samples[:1], "never comes"),
        ("07.2", lambda samples: samples, "fails with TypeError"),
        ("07.2", lambda *given: ..., "not answered yet"),
        ("07.1", judges_07.leaky, "still alive"),
        ("07.1", judges_07.half_repaired, "times the memory of two"),
        ("07.1", without_clearing, "are others than before"),
        ("07.1", keeps_losses, "still alive"),
        ("07.3", lambda lengths, size, seed: [[0] * size], "come once"),
        ("07.3", lambda lengths, size, seed: [[i] for i in range(len(lengths))], "Batches of 8"),
        ("07.3", lambda lengths, size, seed: grouped(lengths, size, 0), "another seed others"),
        (
            "07.3",
            lambda lengths, size, seed: grouped(lengths, size, seed)[::-1],
            "only one may have fewer|Reserved grows",
        ),
    ],
)
def test_typical_mistakes_are_told_what_they_are(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and any(part in verdict.text for part in said.split("|")), verdict.text
