"""Chapter 00's exercises: right answers in other words are accepted, and what readers get wrong is
told apart.
"""

import re

import pytest
from vramlab import GiB, Recipe, find_gpu, predict, read_shape
from vramlab_course import blank, exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("00")
SIZE = {"K": 2**-10, "M": 1, "G": 2**10}


def test_there_are_three_with_two_hints_each():
    assert list(FOUND) == [f"00.{i}" for i in range(1, 4)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


def states_made(message, parameters, kept=8, floor=0.0):
    """From the text itself, in MiB first."""
    found = re.search(r"allocated memory ([\d.]+) (\w)iB", message)
    left = float(found[1]) * SIZE[found[2]] / 1024 - kept * parameters / GiB
    return left if left > 0 else floor


def halves(model, gpu, seq_len, told=True):
    """Another way to the same batch: a bisection from a batch that is surely too large."""
    low, high = 0, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        need = predict(
            Recipe(model, middle, seq_len, "fp16-mixed"),
            gpu=gpu if told else None,
            expandable_segments=True,
        ).process
        fits = need.value <= find_gpu(gpu).total
        low, high = (middle, high) if fits else (low, middle)
    return low


@pytest.mark.parametrize(
    "name, answer",
    [
        (
            "00.1",
            Recipe(
                "qwen3-0.6b",
                1,
                1024,
                "fp16-mixed",
                gradient_accumulation_steps=4,
                gradient_checkpointing=True,
            ),
        ),
        (
            "00.1",
            Recipe(
                "qwen3-0.6b",
                2,
                1024,
                "fp16-mixed",
                gradient_accumulation_steps=2,
                gradient_checkpointing=True,
            ),
        ),
        ("00.2", states_made),
        ("00.3", halves),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer)


@pytest.mark.parametrize(
    "name, answer, said",
    [
        (
            "00.1",
            Recipe("qwen3-0.6b", 2, 1024, "fp16-mixed", gradient_accumulation_steps=2),
            "are gradients, which stay",
        ),
        ("00.1", Recipe("qwen3-0.6b", 4, 1024, "fp16-mixed"), "most of the peak"),
        ("00.1", Recipe("qwen3-0.6b", 2, 1024, "fp16-mixed"), "has to see 4 samples"),
        (
            "00.2",
            lambda message, parameters: states_made(message, parameters, kept=4),
            "gradients are there too",
        ),
        (
            "00.2",
            lambda message, parameters: states_made(message, parameters) - 1,
            "0 of 3 are right",
        ),
        (
            "00.3",
            lambda model, gpu, seq_len: halves(model, gpu, seq_len) + 1,
            "first that does not fit",
        ),
        ("00.3", lambda model, gpu, seq_len: halves(model, gpu, seq_len, told=False), "gpu=gpu"),
        ("00.3", lambda model, gpu, seq_len: max(1, halves(model, gpu, seq_len)), "not even one"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict


def test_a_number_in_the_optimizers_state_is_no_tensor():
    def held(model, optimizer):
        parameters = list(model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [value for state in optimizer.state.values() for value in state.values()]
        kinds = {"parameters": parameters, "gradients": gradients, "states": states}
        return {kind: sum(each.nbytes for each in found) for kind, found in kinds.items()}

    said = blank.judge(blank.find("00.held"), held)
    assert not said.right and "'int' object has no attribute 'nbytes'" in said.text


def test_the_messages_are_of_runs_that_died_before_and_within_the_update():
    """The third example is of a run that had no states yet."""
    message = "Of the allocated memory 43.69 GiB is allocated"
    parameters = read_shape("llama-3.1-8b").num_parameters
    assert states_made(message, parameters) == 0 < states_made(message, parameters, kept=4)
