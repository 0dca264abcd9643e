"""Chapter 01's exercises: right answers in any form are accepted, and what readers get wrong is told apart."""

import numpy as np
import pytest
import torch
from vramlab_course import exercises
from vramlab_course.exercises import judge
from vramlab_course.quantizers import NF4

FOUND = exercises.chapter("01")
NINE = (1, -2, 3, -4, 5, -6, 10, -20, 15)


def by_formula(sign, exponent, fraction, exponent_bits, fraction_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    hidden = 1 if exponent else 0
    return (-1) ** sign * 2 ** (max(exponent, 1) - bias) * (hidden + fraction / 2**fraction_bits)


def test_there_are_eight_with_two_hints_each():
    assert list(FOUND) == [f"01.{i}" for i in range(1, 9)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 60


@pytest.mark.parametrize(
    "name, answer",
    [
        ("01.1", 15.5),
        ("01.1", np.float32(15.5)),
        ("01.2", by_formula),
        ("01.3", 256),
        ("01.4", 65536),
        ("01.4", 2.0**16),
        ("01.5", {n: round(n * 127 / 20) for n in NINE}),
        ("01.6", lambda bits, block_size, nested_block: bits + (8 + 32 / nested_block) / block_size),
        ("01.7", 33.896),
        ("01.8", torch.linspace(-1, 1, 16)),
        ("01.8", np.linspace(-1, 1, 16)),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer)


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("01.1", 31, "infinity or nan"),
        ("01.1", 7.5, "hidden one"),
        ("01.3", 128, "half a step"),
        ("01.3", 2048, "fp16"),
        ("01.4", 64, "subnormal"),
        ("01.5", {1: 134, -2: 115, 3: 147, -4: 102, 5: 159, -6: 89, 10: 191, -20: 0, 15: 223}, "zero has no code"),
        ("01.6", lambda bits, block_size, nested_block: bits + 8 / block_size, "32 bits each"),
        ("01.7", 33.896 * 1.073741824, "GB"),
        ("01.7", 36.96, "without double"),
        ("01.8", NF4, "Not a tenth better"),
        ("01.8", torch.linspace(-1, 1, 8), "16 codes"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text
