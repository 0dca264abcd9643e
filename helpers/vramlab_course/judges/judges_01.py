"""Judges of chapter 01's exercises.

They say what readers' functions do with numbers, gradients and 4-bit weights.
"""

from collections.abc import Callable
from copy import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from ..answers import NOT_ANSWERED, Feedback, kind_of
from ..base_model import bits_per_byte, held_out, load_base_model

# Of the project.
BITS = 4.45  # a number
COST = 0.0032  # how much more bits per byte


def scales(answer: Callable[[Any, Any, float], float]) -> Feedback:
    """Whether `answer(network, optimizer, scale)` trains as a loss scaler does.

    It has to unscale, clip to a norm of 1, update, and skip infinities.
    """
    # Decay moves weights in any step, also in one whose gradients were set to zero.
    # A gradient that is clipped and one that is not; an infinity and a nan.
    for scale, large, broken in (
        (1024.0, 3.0, None),
        (64.0, 0.1, None),
        (4096.0, 3.0, torch.inf),
        (8.0, 1, torch.nan),
    ):
        network = torch.nn.Linear(2, 1, bias=False)
        # (3, 4) has norm 5: its norm is 5/3 of `large`.
        gradient = torch.tensor([[large, 4 / 3 * large]])
        clipped = gradient / max(1.0, gradient.norm().item())
        before = network.weight.detach().clone()
        network.weight.grad = gradient * scale
        if broken is not None:
            network.weight.grad[0, 0] = broken
        decay = 0.0 if broken is None else 0.1
        returned = answer(
            network,
            torch.optim.SGD(network.parameters(), 0.5, weight_decay=decay),
            scale,
        )
        moved = before - network.weight.detach()
        if broken is not None:
            if not torch.equal(network.weight.detach(), before):
                return Feedback(
                    False,
                    f"A gradient is {broken}, and the weights were changed all the same.",
                )
            if returned != scale / 2:
                return Feedback(
                    False,
                    f"After a gradient of {broken} the scale should be half, and it is {returned}.",
                )
        elif returned != scale:
            return Feedback(
                False,
                f"All gradients were finite: the scale should stay {scale}, and it is {returned}.",
            )
        # The learning rate is 0.5, so the step is half the gradient that was applied.
        elif not moved.allclose(0.5 * clipped, rtol=1e-3):
            size = f"{moved.norm() / 0.5:.3g}"
            return Feedback(
                False,
                f"A true gradient of norm {gradient.norm():.3g} was applied with norm {size}.",
            )
    return Feedback(True, "Right: unscale, then clip, and let no infinity near the averages.")


def rounds_at_random(answer: Callable[[torch.Tensor], torch.Tensor]) -> Feedback:
    """Whether `answer(numbers)` rounds fp32 to one of the two bf16 neighbours, in proportion."""
    # The last is a bf16 number, which must stay.
    for value in (1.001, -3.3, 0.0007, 2.0):
        # So many that the mean settles to a hundredth of a step.
        numbers = torch.full((200_000,), value)
        rounded = answer(numbers.clone())
        if rounded is None:
            return NOT_ANSWERED
        if not isinstance(rounded, torch.Tensor) or rounded.shape != numbers.shape:
            return Feedback(False, "A tensor of the same shape was expected.")
        # bf16 has eight significant bits, so the neighbours of a number below 2^e are 2^(e − 8)
        # apart.
        exponent = torch.frexp(numbers[0]).exponent.item()
        step = 2.0 ** (exponent - 8)
        rounded = rounded.float()
        if not torch.equal(rounded.bfloat16().float(), rounded):
            return Feedback(False, f"For {value} it gives numbers that bf16 does not have.")
        if (rounded - numbers).abs().max() >= step:
            return Feedback(False, f"For {value} it goes further than to the two neighbours.")
        mean = rounded.double().mean().item()
        if abs(mean - numbers[0].item()) > step / 100:
            return Feedback(False, f"For {value} the mean of many is {mean:.6g}.")
    return Feedback(True, "Right: a thousand updates of 0.001 now come to about 1.")


def dequantizes(answer: Callable[[torch.Tensor, Any], torch.Tensor]) -> Feedback:
    """Whether `answer(packed, state)` gives back what bitsandbytes does.

    That is from NF4 with double quantization.

    It is handed only what the question names, which is too little for bitsandbytes' own function.
    """
    for seed, shape in enumerate(((64, 128), (96, 640))):
        # The second matrix is shifted, so that it is not symmetric about 0.
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + seed
        packed, state = quantize_4bit(
            weight,
            blocksize=64,
            quant_type="nf4",
            compress_statistics=True,
        )
        # Double quantization: the scales' own codes, scales and block size.
        inner = SimpleNamespace(code=state.state2.code, absmax=state.state2.absmax, blocksize=256)
        named = {
            name: getattr(state, name)
            for name in ("shape", "code", "absmax", "offset", "blocksize")
        }
        returned = answer(packed, SimpleNamespace(**named, state2=inner))
        if returned is None:
            return NOT_ANSWERED
        right = dequantize_4bit(packed, state)
        if not isinstance(returned, torch.Tensor) or returned.shape != right.shape:
            return Feedback(False, f"A tensor of {tuple(right.shape)} was expected.")
        unshifted = copy(state)
        unshifted.offset = torch.zeros_like(state.offset)
        usual = {
            "The two numbers of each byte come back in the wrong order.": dequantize_4bit(
                packed >> 4 | packed << 4, state
            ),
            "Each scale lacks the mean, which was taken away before the scales were stored.": (
                dequantize_4bit(packed, unshifted)
            ),
        }
        for said, mistaken in usual.items():
            if returned.allclose(mistaken, atol=1e-6):
                return Feedback(False, said)
        if not returned.allclose(right, atol=1e-6):
            off = (returned - right).abs().max() / right.abs().max()
            return Feedback(
                False,
                f"A matrix of {tuple(shape)} is off by {off:.1%} of its largest number.",
            )
    return Feedback(True, "Right: that is all that a 4-bit layer does before its matrix product.")


@cache
def _base() -> tuple[Any, list[str], float]:
    model = load_base_model()
    texts = held_out(12_000)
    return model, texts, bits_per_byte(model, texts, stride=256)


def spends_bits(answer: Callable[[str, torch.Tensor], tuple[torch.Tensor, float]]) -> Feedback:
    """Whether `answer(name, weight)` keeps the base model good within BITS.

    It returns restored numbers and bits a number.
    """
    if not callable(answer):
        return Feedback(False, f"A function was expected, not {kind_of(answer)}.")
    model, texts, before = _base()
    # Kept, since the model is shared by all checks of this session.
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    matrices = {name: weight for name, weight in trained.items() if weight.dim() == 2}
    try:
        # The name is handed over too: a reader may spend more bits on some matrices.
        kept = {name: answer(name, weight.clone()) for name, weight in matrices.items()}
        if None in kept.values():
            return NOT_ANSWERED
        with torch.no_grad():
            for name, (restored, _) in kept.items():
                model.get_parameter(name).copy_(restored)
        cost = bits_per_byte(model, texts, stride=256) / before - 1
    finally:
        model.load_state_dict(trained, strict=False)
    total = 0
    all_bits = 0.0
    for name, (restored, bits_a_number) in kept.items():
        weight = matrices[name]
        if torch.equal(restored, weight):
            return Feedback(False, f"{name} comes back unchanged, so nothing was rounded.")
        total += weight.numel()
        all_bits += bits_a_number * weight.numel()
    bits = all_bits / total
    said = f"{bits:.3f} bits a number cost {cost:.2%}"
    # Written so that a cost of nan does not pass.
    if bits > BITS or not cost <= COST:
        return Feedback(False, f"{said}; at most {BITS} bits and {COST:.2%} were asked for.")
    return Feedback(True, f"Right: {said}.")
