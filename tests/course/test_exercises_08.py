"""Chapter 08's exercises: right answers in any form are accepted, and what readers get wrong is told apart."""

import pytest
from vramlab import Recipe
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("08")


def seconds(operations, written, kernels, peak, bandwidth):
    return operations / (0.425 * peak) + 3 * written / (0.922 * bandwidth) + kernels * 13.35e-6


def fitting(**changes):
    fields = dict(batch_size=1, seq_len=1024, precision="bf16-true", optim="paged_adamw_8bit")
    more = dict(gradient_checkpointing=True, gradient_accumulation_steps=32)
    return Recipe(**{"model": "llama-3.2-1b", **fields, **more, **changes})


def test_there_are_six_with_two_hints_each():
    assert list(FOUND) == [f"08.{i}" for i in range(1, 7)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 45


@pytest.mark.parametrize(
    "name,answer",
    [
        ("08.1", 1.9545),
        ("08.2", 8),
        ("08.3", seconds),
        ("08.4", " Optimizer states "),
        ("08.5", 157.05),
        ("08.6", fitting()),
    ],
)
def test_right_answers_are_accepted(name, answer):
    assert judge(FOUND[name], answer).right


@pytest.mark.parametrize(
    "name,answer,said",
    [
        ("08.1", 0.977, "fp32"),
        ("08.1", 16 * 2**30 / 8 / 1e9, "box"),
        ("08.2", 32, "four share"),
        ("08.3", lambda operations, written, kernels, peak, bandwidth: operations / (0.425 * peak), "operations"),
        ("08.3", lambda **_: 1 / 0, "ZeroDivisionError"),
        ("08.4", "gradients", "twice as large"),
        ("08.5", 157.05 / 4, "one micro-batch"),
        ("08.6", fitting(optim="adamw_torch_fused"), "The process may take"),
        ("08.6", fitting(gradient_accumulation_steps=16), "not 32"),
        ("08.6", fitting(attn_implementation="eager"), "times as long"),
        ("08.6", fitting(model="llama-3.2-3b"), "whole of llama-3.2-1b"),
        ("08.6", ..., "not answered"),
    ],
)
def test_wrong_answers_are_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right
    assert said in str(verdict)
