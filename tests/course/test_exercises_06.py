"""Chapter 06's exercises: right answers in any form are accepted, and what readers get wrong is told apart."""

import pytest
from vramlab import LoRA, Quantization, Recipe, predict
from vramlab.recipe.shapes import read_shape
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("06")


def bits(block, nested):
    return 4 + 8 * (4 / block if nested is None else 1 / block + 4 / (block * nested))


def block(most, nested):
    return next(size for size in (2, 4, 8, 16, 32, 64, 128, 256, 512) if bits(size, nested) <= most)


def fitting(**changes):
    fields = dict(batch_size=1, seq_len=2048, gradient_accumulation_steps=8, gradient_checkpointing=True)
    adapters = dict(lora=LoRA(r=16, target_modules="all-linear"), quantization=Quantization("nf4", double=True))
    return Recipe(**{"model": "llama-3.1-8b", **fields, **adapters, "precision": "fp16-true", **changes})


def test_there_are_seven_with_two_hints_each():
    assert list(FOUND) == [f"06.{i}" for i in range(1, 8)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 60


@pytest.mark.parametrize(
    "name,answer",
    [
        ("06.1", 28.89),
        ("06.2", block),
        ("06.3", (2 * 128256 * 4096 + 65 * 4096) * 2 / 2**30),
        ("06.4", " Activations"),
        ("06.5", 0.742),
        ("06.6", 17),
        ("06.7", fitting()),
    ],
)
def test_right_answers_are_accepted(name, answer):
    assert judge(FOUND[name], answer).right


@pytest.mark.parametrize(
    "name,answer,said",
    [
        ("06.1", 28 * 1.125, "double quantization"),
        ("06.1", 28.89 * 1.048576, ""),
        ("06.2", lambda most, nested: 64, ""),
        ("06.2", lambda most, nested: block(most, None), ""),
        ("06.2", lambda most, nested: block(most, nested) // 2, "take the next"),
        ("06.2", lambda most, nested: (32 if nested is None else 8 + 32 / nested) / (most - 4), ""),
        ("06.3", 3.92, "there before"),
        ("06.3", 0.978, "two tensors"),
        ("06.4", "weights", "smaller"),
        ("06.5", 1.348, "other way round"),
        ("06.6", 49, "larger matrix"),
        ("06.7", fitting(quantization=None), "does not fit"),
        ("06.7", fitting(precision="bf16-true"), "bf16"),
        ("06.7", fitting(lora=LoRA(r=16)), "All linear"),
        ("06.7", fitting(batch_size=1, gradient_accumulation_steps=7), "eight"),
        ("06.7", fitting(model="llama-2-7b"), "whole of llama-3.1-8b"),
    ],
)
def test_wrong_answers_are_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text


def test_the_break_even_is_where_the_catalogue_has_it():
    """Models on both sides of it, by the bytes that loading takes."""

    def outside(name: str) -> float:
        shape = read_shape(name)
        inside = sum(w.size for w in shape.weights() if w.kind == "linear" and w.name != f"{shape.head}.weight")
        return (shape.num_parameters - inside) / inside

    def loaded(name: str, quantization: Quantization | None) -> int:
        recipe = Recipe(name, precision="fp16-true", lora=LoRA(r=8), quantization=quantization)
        return predict(recipe).phases["load"].end.parameters

    break_even = FOUND["06.5"].check.reference()
    for name in ("pythia-70m", "pythia-160m", "polyglot-ko-1.3b", "qwen2.5-0.5b", "llama-3.1-8b"):
        more = loaded(name, Quantization("nf4", double=True)) > loaded(name, None)
        assert more is (outside(name) > break_even), name
    assert outside("pythia-160m") > break_even
