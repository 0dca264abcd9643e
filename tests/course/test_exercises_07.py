"""Chapter 07's exercises: right answers in any form are accepted, and what readers get wrong is
told apart.
"""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from vramlab_course import exercises
from vramlab_course.exercises import judge
from vramlab_course.judges import judges_07

FOUND = exercises.chapter("07")


def test_there_are_six_with_two_hints_each():
    assert list(FOUND) == [f"07.{i}" for i in range(1, 7)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 100


def marks(intervals):
    """Seconds covered, by walking over starts and ends."""
    events = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    total = depth = before = 0
    for at, change in events:
        total += (at - before) * (depth > 0)
        depth, before = depth + change, at
    return total


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


def without_checkpoints(model, batch, seconds, peak):
    """The flags of the layers, and not the mode."""
    layers = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    for layer in layers:
        layer.gradient_checkpointing = False
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=batch, labels=batch).loss.backward()
    for layer in layers:
        layer.gradient_checkpointing = True
    return counter.get_total_flops() / (seconds * peak)


def smaller_in_a_loop(step, batch):
    todo, found = [batch], []
    while todo:
        part = todo.pop(0)
        try:
            found.append(step(part))
        except torch.OutOfMemoryError:
            if len(part) == 1:
                raise
            todo[:0] = part.chunk(2)
    return found


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
        ("07.1", marks),
        ("07.2", dealt),
        ("07.3", detached),
        ("07.4", without_checkpoints),
        ("07.5", smaller_in_a_loop),
        ("07.6", grouped),
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


def left_without(model, batch, seconds, peak):
    return judges_07.counted(model.eval(), batch, seconds, peak)


def gives_up(step, batch):
    """A row that does not fit is left out."""
    try:
        return judges_07.retried(step, batch)
    except torch.OutOfMemoryError:
        return []


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("07.1", lambda intervals: sum(end - start for start, end in intervals), "more than once"),
        (
            "07.1",
            lambda intervals: max(e for _, e in intervals) - min(s for s, _ in intervals),
            "gaps",
        ),
        ("07.1", 4, "A function was expected"),
        ("07.1", lambda intervals: None, "not answered yet"),
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
        ("07.3", judges_07.leaky, "still alive"),
        ("07.3", judges_07.half_repaired, "times the memory of two"),
        ("07.3", without_clearing, "are others than before"),
        ("07.3", keeps_losses, "still alive"),
        ("07.4", lambda *given: 100 * without_checkpoints(*given), "not percent"),
        ("07.4", judges_07.counted, "still counts"),
        ("07.4", left_without, "leave it as it was"),
        ("07.4", lambda *given: 0.75 * judges_07.counted(*given), "Not right with"),
        ("07.5", judges_07.retried_inside, "although halves would fit"),
        ("07.5", lambda step, batch: [step(row) for row in batch.split(1)], "8 rows each"),
        ("07.5", gives_up, "nothing left to halve"),
        ("07.6", lambda lengths, size, seed: [[0] * size], "come once"),
        ("07.6", lambda lengths, size, seed: [[i] for i in range(len(lengths))], "Batches of 8"),
        ("07.6", lambda lengths, size, seed: grouped(lengths, size, 0), "another seed others"),
        (
            "07.6",
            lambda lengths, size, seed: grouped(lengths, size, seed)[::-1],
            "only one may have fewer|Reserved grows",
        ),
    ],
)
def test_typical_mistakes_are_told_what_they_are(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and any(part in verdict.text for part in said.split("|")), verdict.text
