"""Chapter 02's exercises: right answers in any form are accepted, and what readers get wrong is told apart."""

import numpy as np
import pytest
from vramlab import Recipe, find_gpu
from vramlab.formulas.predict import predict
from vramlab.report.report import GiB
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("02")
N = 124_439_808
TABLE = {
    "fp32 + AdamW": 16,
    "fp32 + SGD": 8,
    "fp16-true + AdamW": 8,
    "fp32 + 8-bit AdamW": 4 + 4 + 2 * (1 + 4 / 256),
    "bf16-true + 32-bit Lion": 2 + 2 + 4,
}


def korthikanti(batch, tokens, hidden, heads, layers):
    return layers * tokens * batch * hidden * (34 + 5 * heads * tokens / hidden)


def fitting(**changes):
    fields = dict(batch_size=1, seq_len=1024, gradient_accumulation_steps=4, gradient_checkpointing=True)
    return Recipe("gpt2-xl", **{**fields, "precision": "fp16-true", "optim": "adamw_bnb_8bit", **changes})


def test_there_are_seven_with_two_hints_each():
    assert list(FOUND) == [f"02.{i}" for i in range(1, 8)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())
    assert sum(exercise.minutes for exercise in FOUND.values()) <= 60


RIGHT = [
    ("02.1", 16 * N),
    ("02.1", 1.991e9),
    ("02.1", np.int64(16 * N)),
    ("02.2", TABLE),
    ("02.2", {**TABLE, "fp32 + 8-bit AdamW": 10.03}),
    ("02.3", korthikanti),
    (
        "02.3",
        lambda batch, tokens, hidden, heads, layers: (
            layers * (34 * batch * tokens * hidden + 5 * batch * heads * tokens**2)
        ),
    ),
    ("02.4", 4 * 2048 * 128_256 * 6 / 2**30),
    ("02.4", 5.87),
    ("02.5", "step"),
    ("02.5", " Step "),
    ("02.6", 10 * 8 * 512 * 50_257 * 4 / 2**30),
    ("02.6", 7.67),
    ("02.7", fitting()),
    ("02.7", fitting(optim="adafactor")),
    ("02.7", fitting(batch_size=2, gradient_accumulation_steps=2)),
]


@pytest.mark.parametrize("name, answer", RIGHT)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right


WRONG = [
    ("02.1", 12 * N, "which of the four"),
    ("02.1", 8 * N, "half"),
    ("02.1", 16 * N / GiB, "GiB"),
    ("02.1", 16 * N * 8, "bits"),
    ("02.1", 18 * N, "too high"),
    ("02.2", {**TABLE, "fp16-true + AdamW": 16}, "fp16 everywhere"),
    ("02.2", {**TABLE, "fp16-true + AdamW": 12}, "dtype of the weights"),
    ("02.2", {**TABLE, "fp32 + 8-bit AdamW": 10}, "too low"),
    ("02.2", {**TABLE, "fp32 + SGD": 12}, "no state at all"),
    ("02.2", {**TABLE, "bf16-true + 32-bit Lion": 12}, "one state"),
    ("02.2", {"fp32 + AdamW": 16}, "Not answered yet for"),
    ("02.3", lambda batch, tokens, hidden, heads, layers: 34 * layers * batch * tokens * hidden, "scores"),
    ("02.3", lambda batch, tokens, hidden, heads, layers: korthikanti(batch, tokens, hidden, heads, 1), "one layer"),
    ("02.3", lambda batch, tokens, hidden, heads, layers: korthikanti(1, tokens, hidden, heads, layers), None),
    (
        "02.3",
        lambda batch, tokens, hidden, heads, layers: 2 * korthikanti(batch, tokens, hidden, heads, layers),
        "twice",
    ),
    ("02.3", lambda batch, tokens: 0, "fails"),
    ("02.4", 4 * 2048 * 128_256 * 4 / 2**30, "fp32 copy alone"),
    ("02.4", 4 * 2048 * 4096 * 6 / 2**30, "vocabulary"),
    ("02.4", 4 * 2048 * 128_256 * 6, "bytes"),
    ("02.4", 4 * 2048 * 128_256 * 6 / 1e9, "GB"),
    ("02.5", "backward", "gradients stay"),
    ("02.5", "forward", "smaller"),
    ("02.5", "load", "Choose one"),
    ("02.6", 10 * 8 * 50_257 * 4 / 2**30, "clone"),
    ("02.6", 8 * 512 * 50_257 * 4 / 2**30, "list has ten"),
    ("02.7", fitting(precision="fp32", optim="adamw_torch"), "does not fit"),
    ("02.7", fitting(precision="fp16-mixed"), "does not fit"),
    ("02.7", fitting(gradient_checkpointing=False, batch_size=4, gradient_accumulation_steps=1), "activations"),
    ("02.7", fitting(gradient_accumulation_steps=1), "four sequences"),
    ("02.7", fitting(precision="bf16-true"), "take fp16"),
    ("02.7", fitting(seq_len=512), "1,024 tokens"),
    ("02.7", fitting(num_layers=4), "whole of gpt2-xl"),
    ("02.7", fitting().replace(model="gpt2"), "whole of gpt2-xl"),
    ("02.7", fitting(lora={"r": 8}), "All weights"),
    ("02.7", "fp16-true", "A Recipe was expected"),
]


@pytest.mark.parametrize("name, answer, said", WRONG)
def test_typical_mistakes_are_told_what_they_are(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right
    assert said is None or said in verdict.text, verdict.text


def test_the_fitting_check_is_predicts_own():
    """The verdict follows the report: refused is what is likely not to fit."""
    for batch in (1, 4, 8, 16, 32, 64):
        recipe = fitting(batch_size=batch, gradient_accumulation_steps=4)
        fits = predict(recipe, gpu="T4").process.value <= find_gpu("T4").total
        assert judge(FOUND["02.7"], recipe).right is fits
