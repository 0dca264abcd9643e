"""Chapter 09's exercises: right answers in other words are accepted, and what
readers get wrong is told apart.
"""

import pytest
import torch
from vramlab_course import blank, exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("09")


def loss(slices, labels):
    whole = torch.cat(slices, 1)
    return torch.nn.functional.cross_entropy(whole, labels)


def by_home(slices, labels):
    """Each rank's exp of its own logsumexp, and one-hot columns for its own labels."""
    size = slices[0].shape[1]
    total = torch.stack([part.exp().sum(1) for part in slices]).sum(0).log()
    columns = torch.arange(size)
    at_home = [(labels[:, None] - rank * size) == columns for rank in range(len(slices))]
    picked = [(part * mask).sum(1) for part, mask in zip(slices, at_home, strict=True)]
    return (total - sum(picked)).mean()


def summed(slices, labels):
    size = slices[0].shape[1]
    total = sum(part.logsumexp(1) for part in slices)
    rows = torch.arange(len(labels))
    return (total - torch.stack(slices)[labels // size, rows, labels % size]).mean()


def folded(tokens, ranks):
    """Tokens dealt forward, then backward, as cards."""
    dealt = [[] for _ in range(ranks)]
    for t in range(tokens):
        turn, place = divmod(t, ranks)
        dealt[place if turn % 2 == 0 else ranks - 1 - place].append(t)
    return dealt


def contiguous(tokens, ranks):
    return [list(part) for part in torch.arange(tokens).chunk(ranks)]


def test_there_are_two_with_two_hints_each():
    assert list(FOUND) == ["09.1", "09.2"]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


@pytest.mark.parametrize("name, answer", [("09.1", by_home), ("09.2", folded)])
def test_right_answers_in_other_words(name, answer):
    verdict = judge(FOUND[name], answer)
    assert verdict.right, verdict


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("09.1", summed, "Logarithms of sums"),
        ("09.1", loss, "put the slices together"),
        ("09.1", lambda slices, labels: loss(slices, labels) + 1, ""),
        ("09.1", lambda slices, labels: 1 / 0, "ZeroDivisionError"),
        ("09.2", contiguous, "the work is"),
        ("09.2", lambda tokens, ranks: folded(tokens, ranks)[1:], "for each rank"),
        ("09.2", lambda tokens, ranks: [[0]] * ranks, "held by one rank"),
        ("09.2", "folded", "A function"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict


def test_the_wide_numbers_may_be_dealt_out_in_any_way():
    def strided(x, up, down, rank, world):
        return (x @ up[:, rank::world]).relu() @ down[rank::world]

    verdict = blank.judge(blank.find("09.my_part"), strided)
    assert verdict.right, verdict


def test_matrices_that_do_not_fit_are_told_by_their_sizes():
    def both_by_columns(x, up, down, rank, world):
        wide = (x @ up.chunk(world, 1)[rank]).relu()
        return wide @ down.chunk(world, 1)[rank]

    verdict = blank.judge(blank.find("09.my_part"), both_by_columns)
    assert not verdict.right
    assert "tokens of 4 numbers by a matrix of 12 rows" in verdict.text
