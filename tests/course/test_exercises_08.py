"""Chapter 08's exercises: right answers in any form are accepted, and what readers get wrong is
told apart.
"""

import pytest
from vramlab import Quantization, Recipe
from vramlab.planning.question import RANK
from vramlab_course import exercises
from vramlab_course.exercises import judge
from vramlab_course.judges import judges_08

FOUND = exercises.chapter("08")


def repaired(**changes):
    nf4 = Quantization("nf4", double=True, prepare=False)
    fields = dict(gradient_accumulation_steps=16, gradient_checkpointing=True, lora=RANK)
    recipe = Recipe(
        "qwen2.5-7b", 1, 1024, "fp16-mixed", "adamw_torch_fused", quantization=nf4, **fields
    )
    return recipe.replace(**changes)


def sample(prompt, reply, end, length):
    room = max(0, length - len(reply) - 1)
    kept = prompt[-room:] if room else []
    return kept + reply + [end], [-100] * len(kept) + reply + [end]


def sent(gpu="T4", error=1.0, **changes):
    """An answer to 08.3 whose peak is `error` times what is foretold of its recipe."""
    recipe = Recipe("gpt2", 2, 64, optim="adamw_torch_fused")
    peak = error * judges_08.foretold(recipe, gpu)
    return {"recipe": recipe.replace(**changes), "gpu": gpu, "peak": peak}


def test_there_are_three_with_two_hints_each():
    assert list(FOUND) == [f"08.{i}" for i in range(1, 4)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 75


@pytest.mark.parametrize(
    "name,answer",
    [
        ("08.1", repaired()),
        ("08.1", repaired(quantization=Quantization("nf4", prepare=False))),
        ("08.2", sample),
        ("08.3", sent()),
        ("08.3", sent(error=0.97)),
        ("08.3", sent(gpu=None)),
    ],
)
def test_right_answers_are_accepted(name, answer):
    verdict = judge(FOUND[name], answer)
    assert verdict.right, str(verdict)


@pytest.mark.parametrize(
    "name,answer,said",
    [
        ("08.1", repaired(precision="bf16-mixed"), "bf16"),
        ("08.1", repaired(batch_size=4), "not 16"),
        (
            "08.1",
            repaired(gradient_checkpointing=False, batch_size=8, gradient_accumulation_steps=2),
            "may take",
        ),
        ("08.1", repaired(lora=None, quantization=None), "rank 16"),
        ("08.1", ..., "not answered"),
        (
            "08.2",
            lambda prompt, reply, end, length: (prompt + reply + [end], [end]),
            "equal length",
        ),
        ("08.2", lambda prompt, reply, end, length: [(prompt + reply)[:length]] * 2, "no end"),
        ("08.2", lambda prompt, reply, end, length: [prompt + reply + [end]] * 2, "questions"),
        ("08.2", lambda *asked: sample(*asked[:3], 99), "four tokens"),
        (
            "08.2",
            lambda *asked: [part[-max(asked[3], 4) :] for part in sample(*asked[:3], 99)],
            "alone",
        ),
        ("08.3", ..., "not answered"),
        ("08.3", sent() | {"peak": 0.2}, "multiply"),
        ("08.3", sent(error=1.2), "+20.0%"),
        ("08.3", sent(batch_size=64), "predicted"),
    ],
)
def test_wrong_answers_are_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right
    assert said in str(verdict)
