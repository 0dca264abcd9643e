"""Chapter 05's exercises: right answers are accepted, and what readers get wrong is told apart."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from vramlab import LoRA, Recipe
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("05")


class Adapted(nn.Module):
    def __init__(self, base, r, scale, zero):
        super().__init__()
        self.base, self.scale = base, scale
        self.A = nn.Parameter(torch.randn(r, base.in_features))
        self.B = nn.Parameter((torch.zeros if zero else torch.randn)(base.out_features, r))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


def add_lora(model, r, alpha, head=False, frozen=True, zero=True, scale=None):
    kept = None if head else model.get_output_embeddings()
    model.requires_grad_(not frozen)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not kept:
                setattr(parent, name, Adapted(child, r, scale or alpha / r, zero))
    return model


def peft(model, r, alpha):
    return get_peft_model(model, LoraConfig(r=r, lora_alpha=alpha, target_modules="all-linear"))


def closest(update, r):
    U, S, Vh = torch.linalg.svd(update, full_matrices=False)
    return U[:, :r] @ torch.diag(S[:r]) @ Vh[:r]


def fitting(**changes):
    fields = {"precision": "bf16-mixed", "dtype": "bfloat16", "gradient_checkpointing": True}
    return Recipe(
        "mistral-7b",
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
        ("05.3", add_lora),
        ("05.3", peft),
    ],
)
def test_right_answers_are_accepted(name, answer):
    feedback = judge(FOUND[name], answer)
    assert feedback.right, feedback


@pytest.mark.parametrize(
    "name,answer,said",
    [
        ("05.1", lambda update, r: update, "numbers are not"),
        ("05.2", fitting(dtype="float32"), "fp32"),
        ("05.2", fitting(gradient_checkpointing=False), "does not fit"),
        ("05.3", lambda model, r, alpha: model, "numbers are trained"),
        (
            "05.3",
            lambda model, r, alpha: add_lora(model, r, alpha, head=True),
            "numbers are trained",
        ),
        (
            "05.3",
            lambda model, r, alpha: add_lora(model, r, alpha, frozen=False),
            "numbers are trained",
        ),
        (
            "05.3",
            lambda model, r, alpha: add_lora(model, r, alpha, zero=False),
            "not the base any more",
        ),
        ("05.3", lambda model, r, alpha: add_lora(model, r, alpha, scale=1), "PEFT's"),
        ("05.3", lambda model, r, alpha: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_wrong_answers_are_told_apart(name, answer, said):
    feedback = judge(FOUND[name], answer)
    assert not feedback.right and said in feedback.text, feedback
