"""Chapter 08's exercises: right answers in any form are accepted, and what readers get wrong is
told apart.
"""

import itertools

import pytest
from vramlab import Quantization, Recipe, find_gpu, predict, step_time
from vramlab.planning.question import RANK, usable_memory
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


def fitting(**changes):
    fields = dict(batch_size=1, seq_len=1024, precision="bf16-true", optim="paged_adamw_8bit")
    more = dict(gradient_checkpointing=True, gradient_accumulation_steps=32)
    return Recipe(**{"model": "llama-3.2-1b", **fields, **more, **changes})


def candidates(model, card, seq_len, batch):
    half = "bf16" if card.supports("bf16-true") else "fp16"
    bases = (
        None,
        Quantization("nf4", prepare=False),
        Quantization("nf4", double=True, prepare=False),
    )
    attention, sizes = ("sdpa", "eager"), [n for n in range(1, batch + 1) if batch % n == 0]
    for base, lora, checkpoint, kernel, n in itertools.product(
        bases, (None, RANK), (False, True), attention, sizes
    ):
        if (base and not lora) or (half == "fp16" and not lora):
            continue
        optim, dtype = "adamw_torch_fused" if lora else "paged_adamw_8bit", None
        precision = f"{half}-mixed" if lora else f"{half}-true"
        if lora and not base:
            dtype = "bfloat16" if half == "bf16" else "float16"
        more = dict(
            gradient_accumulation_steps=batch // n,
            gradient_checkpointing=checkpoint,
            lora=lora,
            dtype=dtype,
        )
        yield Recipe(
            model,
            n,
            seq_len,
            precision,
            optim,
            quantization=base,
            attn_implementation=kernel,
            **more,
        )


def planner(end="high", order=min, **changes):
    """An answer to 08.4: the first by `order` of the seconds whose process's `end` is within the
    card.
    """

    def answer(model, gpu, seq_len, global_batch):
        card = find_gpu(gpu)
        room = usable_memory(card)
        found = [r.replace(**changes) for r in candidates(model, card, seq_len, global_batch)]
        found = [r for r in found if getattr(predict(r, gpu=card).process, end) <= room]
        return order(found, key=lambda r: step_time(r, card).seconds, default=None)

    return answer


def test_there_are_four_with_two_hints_each():
    assert list(FOUND) == [f"08.{i}" for i in range(1, 5)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 90


@pytest.mark.parametrize(
    "name,answer",
    [
        ("08.1", repaired()),
        ("08.1", repaired(quantization=Quantization("nf4", prepare=False))),
        ("08.2", sample),
        ("08.3", fitting()),
        ("08.4", planner()),
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
        ("08.3", fitting(optim="adamw_torch_fused"), "The process may take"),
        ("08.3", fitting(gradient_accumulation_steps=16), "not 32"),
        ("08.3", fitting(attn_implementation="eager"), "times as long"),
        ("08.3", fitting(model="llama-3.2-3b"), "whole of llama-3.2-1b"),
        ("08.3", ..., "not answered"),
        ("08.4", planner(end="low"), "not safe"),
        ("08.4", planner(order=max), "times as long"),
        ("08.4", planner(batch_size=1, gradient_accumulation_steps=1), "samples a step"),
        ("08.4", lambda *asked: None, "not answered"),
        ("08.4", lambda *asked: asked[0], "a Recipe or None"),
        ("08.4", lambda *asked: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_wrong_answers_are_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right
    assert said in str(verdict)


def test_where_nothing_is_safe_the_answer_is_none():
    assert judges_08.best_seconds(*judges_08.ASKED[-1]) is None
