"""Chapter 05's exercises: right answers are accepted, and what readers get wrong is told apart."""

import pytest
import torch
from vramlab import LoRA, Recipe
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("05")


def closest(update, r):
    U, S, Vh = torch.linalg.svd(update, full_matrices=False)
    return U[:, :r] @ torch.diag(S[:r]) @ Vh[:r]


def as_given(update, r):
    U, S, V = torch.linalg.svd(update, full_matrices=False)
    return U[:, :r] @ torch.diag(S[:r]) @ V[:, :r].T


def fitting(**changes):
    fields = {"precision": "bf16-mixed", "dtype": "bfloat16", "gradient_checkpointing": True}
    fields["trainer"] = "sft"
    return Recipe(
        "llama-3.1-8b",
        1,
        4096,
        **{**fields, "lora": LoRA(r=16, target_modules="all-linear"), **changes},
    )


@pytest.mark.parametrize(
    "name,answer",
    [
        ("05.1", closest),
        ("05.2", fitting()),
        ("05.2", fitting(precision="bf16-true")),
        ("05.1", lambda delta, rank: closest(delta, rank)),  # arguments by other names
    ],
)
def test_right_answers_are_accepted(name, answer):
    feedback = judge(FOUND[name], answer)
    assert feedback.right, feedback


@pytest.mark.parametrize(
    "name,answer,said",
    [
        ("05.1", lambda update, r: update, "numbers are not"),
        ("05.1", as_given, "before the repair"),
        ("05.2", fitting(dtype="float32"), "fp32"),
        ("05.2", fitting(gradient_checkpointing=False), "does not fit"),
        ("05.2", fitting(trainer="transformers"), "holds all logits"),
    ],
)
def test_wrong_answers_are_told_apart(name, answer, said):
    feedback = judge(FOUND[name], answer)
    assert not feedback.right and said in feedback.text, feedback
