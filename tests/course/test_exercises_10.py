"""Chapter 10's exercises: right answers in other words are accepted, and what readers get wrong is
told apart; and what the chapter's cells share counts rightly.
"""

from math import ceil
from types import SimpleNamespace

import pytest
import torch
from vramlab import LoRA, Quantization, Recipe
from vramlab_course import blank, exercises
from vramlab_course.chapters.chapter_10 import (
    cached_by,
    largest_made,
    nbytes,
    saved_for_backward,
)
from vramlab_course.exercises import judge
from vramlab_course.judges.judges_10 import LOOPS, sampled

FOUND = exercises.chapter("10")
LONG = Recipe("llama-3.1-8b", 1, 16_384, "bf16-mixed", gradient_checkpointing=True)
LONG = LONG.replace(gradient_accumulation_steps=8, lora=LoRA(r=16, target_modules="all-linear"))
SPLIT = LONG.replace(quantization=Quantization("nf4", prepare=False))  # all but the fused loss


def own_cache(step, prompt, new):
    """Another right loop: it gives the prompt a token at a time where it can."""
    with torch.no_grad():
        logits, cache = step(prompt, None)
        answer = [prompt]
        for number in range(new):
            answer.append(logits[:, -1:].max(-1).indices)
            if number < new - 1:
                logits, cache = step(answer[-1], cache)
    return torch.cat(answer, 1)


def never_shared(prompt, completions, size):
    return sum(ceil((prompt + tokens) / size) for tokens in completions)


def by_counting(prompt, completions, size):
    """Blocks as pairs of an owner and a number."""
    held = set()
    for owner, tokens in enumerate(completions):
        for position in range(prompt + tokens):
            number = position // size
            is_shared = (number + 1) * size <= prompt
            held.add((None if is_shared else owner, number))
    return len(held)


def test_there_are_three_with_two_hints_each():
    assert list(FOUND) == ["10.1", "10.2", "10.3"]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


@pytest.mark.parametrize(
    "name, answer",
    [
        ("10.1", own_cache),
        ("10.2", by_counting),
        ("10.3", SPLIT.replace(trainer="sft", optim="paged_adamw_8bit")),
    ],
)
def test_right_answers_in_other_words(name, answer):
    verdict = judge(FOUND[name], answer)
    assert verdict.right, verdict


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("10.1", LOOPS["as_given"], "computed again, 18 of them"),
        ("10.1", LOOPS["graph"], "Autograd still records"),
        ("10.1", LOOPS["off_for_good"], "switched off for everybody"),
        ("10.1", LOOPS["twice"], "called 10 times"),
        ("10.1", LOOPS["all_ids"], "the new tokens only"),
        ("10.1", lambda step, prompt, new: prompt, "not those"),
        ("10.1", lambda step, prompt, new: 1 / 0, "ZeroDivisionError"),
        ("10.2", never_shared, "once for every completion"),
        ("10.2", lambda prompt, completions, size: 1 / 0, "ZeroDivisionError"),
        ("10.3", SPLIT, "over what is usable"),
        ("10.3", LONG.replace(dtype="bfloat16", use_liger_kernel=True), "over what is usable"),
        ("10.3", SPLIT.replace(trainer="sft", batch_size=2), "sees 16 texts"),
        ("10.3", SPLIT.replace(trainer="sft", activation_offloading=True), "does not know it"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict


def reentrant(block, x, size):
    run = torch.utils.checkpoint.checkpoint
    return torch.cat([run(block, piece, use_reentrant=True) for piece in x.split(size)])


class InPieces(torch.autograd.Function):
    """Keeps the input, and runs each piece forward and backward in the backward pass."""

    @staticmethod
    def forward(ctx, x, block, size):
        ctx.save_for_backward(x)
        ctx.block = block
        ctx.size = size
        return torch.cat([block(piece) for piece in x.split(size)])

    @staticmethod
    def backward(ctx, slope):
        gradients = []
        pairs = zip(ctx.saved_tensors[0].split(ctx.size), slope.split(ctx.size), strict=True)
        for piece, above in pairs:
            leaf = piece.detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.block(leaf)
            output.backward(above)
            gradients.append(leaf.grad)
        return torch.cat(gradients), None, None


@pytest.mark.parametrize(
    "tiled", [reentrant, lambda block, x, size: InPieces.apply(x, block, size)]
)
def test_other_ways_to_compute_a_piece_again_are_right(tiled):
    verdict = blank.judge(blank.find("10.tiled"), tiled)
    assert verdict.right, verdict


def test_a_loop_without_its_cache_computes_every_earlier_token_again():
    # a prompt of 3 tokens and 5 new ones: 3 + 4 + 5 + 6 of the last four calls are known
    assert sampled(LOOPS["as_given"]).again == 3 + 4 + 5 + 6
    assert sampled(LOOPS["no_grad"]).again == 0


def test_what_is_saved_is_counted_once_and_without_the_weights():
    layer = torch.nn.Linear(4, 8)
    x = torch.randn(16, 4, requires_grad=True)
    with saved_for_backward(layer) as saved:
        wide = layer(x).relu()
        (wide * wide).sum()
    # x of the matrix product; relu's result, which the product saves twice more
    assert nbytes(saved.values()) == 4 * (16 * 4 + 16 * 8)
    with saved_for_backward() as saved:
        layer(x)
    assert nbytes(saved.values()) == 4 * (16 * 4 + 8 * 4)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_read_under_the_name_that_the_answer_has_for_it(name):
    """transformers 5.24 renamed it, and warns whoever reads the older name."""

    class Answer(dict):
        __getattr__ = dict.__getitem__

    layers = [SimpleNamespace(keys=1, values=2), SimpleNamespace(keys=3, values=4)]
    assert cached_by(Answer({name: SimpleNamespace(layers=layers)})) == [1, 2, 3, 4]


def test_the_largest_tensor_that_a_call_makes_is_what_it_takes_in_memory():
    x = torch.randn(4, 8)
    assert largest_made(lambda: (x @ x.T).sum()) == 4 * 4 * 4  # the transposed x is a view
    assert largest_made(lambda: x.sum(0).expand(100, 8)) == 4 * 8  # 100 rows, one in memory
    assert largest_made(lambda: x.repeat(3, 1)[:2]) == 4 * 3 * 32
