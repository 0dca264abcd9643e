"""Chapter 01's exercises: right answers in other words are accepted, and what readers get wrong is
told apart.
"""

import pytest
import torch
from bitsandbytes import functional as bnb
from vramlab_course import exercises
from vramlab_course.exercises import judge
from vramlab_course.quantizers import NF4, absmax, blockwise

FOUND = exercises.chapter("01")
# made by other numbers than the check's


def test_there_are_four_with_two_hints_each():
    assert list(FOUND) == [f"01.{i}" for i in range(1, 5)]
    assert all(len(set(exercise.hints)) == 2 for exercise in FOUND.values())


def scaled(network, optimizer, scale, order="divide clip", skip=True, less=0.5):
    """Another scaler, which may do its parts in the wrong order or leave one out."""
    parameters, whole = list(network.parameters()), torch.isfinite(network.weight.grad).all()
    for part in order.split():
        if part == "clip":
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        else:
            for p in parameters:
                p.grad = p.grad / scale
    if whole or not skip:
        optimizer.step()
    return scale if whole else scale * less


def zeroed(network):
    """Let the step be taken, with a gradient of zero."""
    if not torch.isfinite(network.weight.grad).all():
        network.weight.grad.zero_()


def with_scaler(network, optimizer, scale):
    """The same by torch's own class."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def neighbours(numbers):
    """Down to a bf16 number, then up by a step with the right probability."""
    down = (numbers.view(torch.int32) & -65536).view(torch.float32)
    up = ((numbers.view(torch.int32) & -65536) + 65536).view(torch.float32)
    return torch.where(
        torch.rand_like(numbers) < (numbers - down) / (up - down), up, down
    ).bfloat16()


def by_blocks(packed, state, shift=True):
    rows = state.state2.code[state.absmax.int()].split(state.state2.blocksize)
    scales = torch.cat([row * scale for row, scale in zip(rows, state.state2.absmax, strict=True)])
    if shift:
        scales = scales + state.offset
    codes = torch.stack([packed.flatten() // 16, packed.flatten() % 16], 1).flatten()
    return (state.code[codes.int()].view(-1, 64) * scales.view(-1, 1)).view(state.shape)


def store(name, weight, bits=6):
    if name.startswith("model.embed"):
        return absmax(weight, bits, 128).dequantize(), bits + 0.25
    return blockwise(weight, NF4, 64).dequantize(), 4.127


@pytest.mark.parametrize(
    "name, answer",
    [
        ("01.1", scaled),
        ("01.1", with_scaler),
        ("01.2", neighbours),
        ("01.3", by_blocks),
        ("01.4", store),
    ],
)
def test_right_answers_in_other_words(name, answer):
    assert judge(FOUND[name], answer).right, judge(FOUND[name], answer)


@pytest.mark.parametrize(
    "name, answer, said",
    [
        ("01.1", lambda *given: scaled(*given, order="clip divide"), "was applied with norm"),
        ("01.1", lambda *given: scaled(*given, order="clip"), "was applied with norm"),
        ("01.1", lambda *given: scaled(*given, order="divide"), "was applied with norm"),
        ("01.1", lambda *given: scaled(*given, skip=False), "changed all the same"),
        (
            "01.1",
            lambda network, *rest: (zeroed(network), scaled(network, *rest))[1],
            "changed all the same",
        ),
        ("01.1", lambda *given: scaled(*given, less=1), "should be half"),
        ("01.1", lambda *given: scaled(*given) / 2, "should stay"),
        ("01.2", lambda x: x.bfloat16(), "the mean of many"),
        ("01.2", lambda x: x.half().float(), "bf16 does not have"),
        ("01.2", lambda x: 2 * x.bfloat16(), "two neighbours"),
        ("01.2", lambda x: x[:5], "same shape"),
        ("01.3", lambda packed, state: state.code[packed.long()], "cannot be checked"),
        ("01.3", bnb.dequantize_4bit, "cannot be checked"),
        ("01.3", lambda packed, state: by_blocks(packed, state)[:3], "was expected"),
        ("01.3", lambda packed, state: by_blocks(packed, state) * 1.1, "off by"),
        ("01.3", lambda packed, state: by_blocks(packed >> 4 | packed << 4, state), "wrong order"),
        ("01.3", lambda packed, state: by_blocks(packed, state, shift=False), "lacks the mean"),
        ("01.4", lambda name, weight: store(name, weight, bits=8), "at most 4.45 bits"),
        ("01.4", lambda name, weight: store(name, weight, bits=4), "0.32%"),
        ("01.4", lambda name, weight: (weight, 4), "comes back unchanged"),
    ],
)
def test_what_readers_get_wrong_is_told_apart(name, answer, said):
    verdict = judge(FOUND[name], answer)
    assert not verdict.right and said in verdict.text, verdict
