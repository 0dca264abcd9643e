"""Chapter 02's exercises: right answers in other words are accepted, and what readers get wrong is
told apart.
"""

import pytest
import torch
from vramlab import Recipe, find_gpu, predict
from vramlab_course import exercises
from vramlab_course.exercises import judge

FOUND = exercises.chapter("02")
KEPT = {
    "x + 1": 0,
    "x * x": 4,
    "x.relu()": 4,
    "x * x.sigmoid()": 8,
    "silu(x)": 4,
    "x.softmax(-1)": 4,
}


def fitting(**changes):
    fields = dict(
        batch_size=1, seq_len=1024, gradient_accumulation_steps=4, gradient_checkpointing=True
    )
    return Recipe(
        "gpt2-large", **{**fields, "precision": "fp16-mixed", "optim": "adamw_bnb_8bit", **changes}
    )


def test_there_are_six_with_two_hints_each():
    assert list(FOUND) == [f"02.{i}" for i in range(1, 7)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


def history(model, batches):
    kept = []
    for ids in batches:
        with torch.no_grad():
            kept.append(model(ids)[:, -1].clone())
    return kept


def as_numbers(model, batches):
    return [torch.tensor(model(ids)[:, -1].tolist()) for ids in batches]


def stepping(model, lr, rate=1.0, free=True):
    """An optimizer for each parameter, as in PyTorch's tutorial."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr * rate)

        def update(p, optimizer=optimizer):
            optimizer.step()
            if free:
                optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)


def first_batch(model, seq_len, more=0):
    def in_step(batch):
        return predict(Recipe(model, batch, seq_len, "bf16-true")).peak_phase == "step"

    low, high = 0, 1
    while in_step(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if in_step(middle) else (low, middle)
    return high + more


def page(recipe, norms=True, lookup=True):
    """The heights of a step, and Qwen3's two more norms."""
    s, tokens, e = recipe.shape, recipe.batch_size * recipe.seq_len, 2
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    layer = (
        2 * ((4 + 2 * e) * s.hidden_size + 4)
        + 2 * e * (q + kv)
        + 4 * s.num_heads
        + 4 * e * s.intermediate_size
    )
    layer += (4 + e) * (q + kv) * (norms and s.family == "qwen3")
    kept = e * s.hidden_size if recipe.gradient_checkpointing else layer
    forward = tokens * (s.num_layers * kept + (4 + 2 * e) * s.hidden_size)
    update = (4 if "fused" in recipe.optim else 5) * e * s.num_parameters
    end = 4 * e * s.num_parameters + 2 * e * s.vocab_size * s.hidden_size * (s.tied and lookup)
    return max(3 * e * s.num_parameters + forward + 12 * tokens * s.vocab_size, update, end)


RIGHT = [
    ("02.1", KEPT),
    ("02.1", {**KEPT, "x.softmax(-1)": 4.02}),
    ("02.2", history),
    ("02.2", as_numbers),
    ("02.3", stepping),
    ("02.4", first_batch),
    ("02.5", fitting()),
    ("02.5", fitting(optim="adafactor")),
    ("02.5", fitting(batch_size=2, gradient_accumulation_steps=2)),
    ("02.6", page),
]


@pytest.mark.parametrize("name, answer", RIGHT)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer)


WRONG = [
    ("02.1", {**KEPT, "x * x": 8}, "same storage"),
    ("02.1", {**KEPT, "x + 1": 4}, "derivative of a sum"),
    ("02.1", {**KEPT, "silu(x)": 8}, "one operator"),
    ("02.1", {"x + 1": 0}, "Not answered yet for"),
    ("02.2", lambda model, batches: [model(ids)[:, -1] for ids in batches], "times its own bytes"),
    (
        "02.2",
        lambda model, batches: [model(ids)[:, -1].detach() for ids in batches],
        "times its own bytes",
    ),
    (
        "02.2",
        lambda model, batches: [model(ids)[:, -1].clone() for ids in batches],
        "remembers how it was made",
    ),
    (
        "02.2",
        lambda model, batches: [model(ids).clone().detach() for ids in batches],
        "not those of each",
    ),
    ("02.2", lambda model, batches: history(model, batches)[1:], "A list of 3"),
    ("02.2", "clone it", "cannot be checked"),
    ("02.3", lambda model, lr: None, "not answered yet"),
    ("02.3", lambda model, lr: model.zero_grad(), "still gradients"),
    ("02.3", lambda model, lr: stepping(model, lr, rate=0.5), "not those of SGD"),
    ("02.3", lambda model, lr: stepping(model, 0.1), "lr=0.02"),
    ("02.3", lambda model, lr: stepping(model, lr, free=False), "still gradients"),
    ("02.4", lambda model, seq_len: first_batch(model, seq_len, -1), "last batch whose peak"),
    ("02.4", lambda model, seq_len: 4, "are right"),
    ("02.5", fitting(precision="fp32", optim="adamw_torch"), "does not fit"),
    ("02.5", fitting(optim="adamw_torch_fused"), "does not fit"),
    ("02.5", fitting(precision="fp16-true"), "what that does to trained weights"),
    (
        "02.5",
        fitting(gradient_checkpointing=False, batch_size=4, gradient_accumulation_steps=1),
        "activations",
    ),
    ("02.5", fitting(gradient_accumulation_steps=1), "four sequences"),
    ("02.5", fitting(precision="bf16-true"), "take fp16"),
    ("02.5", fitting(seq_len=512), "1,024 tokens"),
    ("02.5", fitting(num_layers=4), "whole of gpt2-large"),
    ("02.5", fitting().replace(model="gpt2"), "whole of gpt2-large"),
    ("02.5", fitting(lora={"r": 8}), "All weights"),
    ("02.5", "fp16-true", "A Recipe was expected"),
    ("02.6", lambda recipe: page(recipe, norms=False), "are right"),
    ("02.6", lambda recipe: page(recipe, lookup=False), "are right"),
    ("02.6", lambda recipe: page(recipe) / 2**30, "GiB"),
    ("02.6", lambda recipe: 8 * recipe.shape.num_parameters, "are right"),
]


@pytest.mark.parametrize("name, answer, said", WRONG)
def test_typical_mistakes_are_told_what_they_are(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right
    assert said in verdict.text, verdict.text


def test_gradients_that_wait_are_counted():
    """The right training with all gradients alive at once."""

    def late(model, lr):
        waiting = list(model.parameters())

        def update(_):
            if all(p.grad is not None for p in waiting):
                for p in waiting:
                    p.data -= lr * p.grad
                    p.grad = None

        for parameter in waiting:
            parameter.register_post_accumulate_grad_hook(update)

    assert "gradients were alive at once" in judge(FOUND["02.3"], late).text


def test_the_fitting_check_is_predicts_own():
    """The verdict follows the report: refused is what is likely not to fit."""
    for batch in (1, 4, 8, 16, 32, 64):
        recipe = fitting(batch_size=batch, gradient_accumulation_steps=4)
        fits = predict(recipe, gpu="T4").process.value <= find_gpu("T4").total
        assert judge(FOUND["02.5"], recipe).right is fits
