"""Exercises of chapter 01, data types and quantization."""

import torch
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB

from ..answers import Function, Judge, Mistake, Number, Table, Verdict
from ..exercises import Exercise
from ..numerics import BF16, FP16, Format
from ..quantizers import FP4, NF4, absmax, blockwise

LLAMA = Recipe("llama-3.1-70b").shape.num_parameters
SMALL = Format("3 and 4", 3, 4)
NINE = (1, -2, 3, -4, 5, -6, 10, -20, 15)
CODES = [
    dict(sign=0, exponent=15, fraction=512, exponent_bits=5, fraction_bits=10),
    dict(sign=1, exponent=0, fraction=3, exponent_bits=5, fraction_bits=10),
    dict(sign=0, exponent=130, fraction=73, exponent_bits=8, fraction_bits=7),
    dict(sign=1, exponent=9, fraction=5, exponent_bits=4, fraction_bits=3),
    dict(sign=0, exponent=0, fraction=1, exponent_bits=4, fraction_bits=3),
]
BLOCKS = [
    dict(bits=4, block_size=64, nested_block=256),
    dict(bits=8, block_size=32, nested_block=128),
    dict(bits=3, block_size=128, nested_block=64),
]


def decode(sign: int, exponent: int, fraction: int, exponent_bits: int, fraction_bits: int) -> float:
    """The number of a code, by `Format`."""
    code = (sign << (exponent_bits + fraction_bits)) + (exponent << fraction_bits) + fraction
    return Format("asked", exponent_bits, fraction_bits).decode(code)


def always_normal(sign: int, exponent: int, fraction: int, exponent_bits: int, fraction_bits: int) -> float:
    """The same without subnormals."""
    bias = 2 ** (exponent_bits - 1) - 1
    return (-1) ** sign * 2.0 ** (exponent - bias) * (1 + fraction / 2**fraction_bits)


def wrong_bias(sign: int, exponent: int, fraction: int, exponent_bits: int, fraction_bits: int) -> float:
    """The same with a bias of 2^(bits − 1)."""
    return decode(sign, exponent, fraction, exponent_bits, fraction_bits) / 2


def low_subnormals(sign: int, exponent: int, fraction: int, exponent_bits: int, fraction_bits: int) -> float:
    """The same with subnormals at 2^(0 − bias)."""
    right = decode(sign, exponent, fraction, exponent_bits, fraction_bits)
    return right if exponent else right / 2


def stored_bits(bits: int, block_size: int, nested_block: int) -> float:
    """Bits a number of codes, 8-bit scales and the fp32 scales of these."""
    return bits + 8 / block_size + 32 / (block_size * nested_block)


def without_second(bits: int, block_size: int, nested_block: int) -> float:
    """The same without the scales of scales."""
    return bits + 8 / block_size


def single(bits: int, block_size: int, nested_block: int) -> float:
    """Codes and fp32 scales: no double quantization."""
    return bits + 32 / block_size


def not_shared(bits: int, block_size: int, nested_block: int) -> float:
    """As if each `nested_block` numbers, not scales, shared an fp32 scale."""
    return bits + 8 / block_size + 32 / nested_block


def codes(unsigned: bool = False) -> dict[int, int]:
    """The code of each of B's nine numbers."""
    if unsigned:
        return {n: round((n + 20) / 40 * 255) for n in NINE}
    return dict(zip(NINE, absmax(torch.tensor(NINE).float(), 8).codes.tolist(), strict=True))


def first_weights() -> torch.Tensor:
    """What nn.Linear(256, 256) begins with: uniform numbers, here from one seed."""
    return (torch.rand(65536, generator=torch.Generator().manual_seed(0)) * 2 - 1) / 16


def table_error(table: torch.Tensor) -> float:
    """Mean squared error of these numbers in blocks of 64, relative to NF4's."""
    numbers = first_weights()
    errors = [(blockwise(numbers, t, 64).dequantize() - numbers).square().mean() for t in (table, NF4)]
    return float(errors[0] / errors[1])


def beats_nf4(answer) -> Verdict:
    """Whether a table of sixteen numbers is at least a tenth better than NF4 for uniform numbers."""
    try:
        table = torch.as_tensor(answer, dtype=torch.float32).flatten()
    except (TypeError, ValueError, RuntimeError):
        return Verdict(False, "A tensor or list of 16 numbers was expected.")
    if len(table) != 16:
        return Verdict(False, f"Four bits have 16 codes, and these are {len(table)} numbers.")
    if not bool((table[1:] > table[:-1]).all()) or float(table.abs().max()) > 1:
        return Verdict(False, "The numbers have to ascend, and to lie between −1 and 1.")
    ratio = table_error(table)
    said = f"the mean squared error is {ratio:.2f} times NF4's"
    if ratio <= 0.9:
        return Verdict(True, f"Right: {said}. A table is good or bad for a distribution, not by itself.")
    return Verdict(False, f"Not a tenth better yet: {said}. How are these weights distributed?")


EXERCISES = [
    Exercise(
        "01.1",
        "A format made as IEEE's are has a sign, 3 bits of exponent and 4 of fraction. What is its largest finite "
        "number?",
        difficulty=2,
        minutes=4,
        hints=(
            "The exponent of all ones is taken: it means infinity and nan.",
            "The bias is 2² − 1 = 3, so the largest exponent is 6 − 3; and the fraction is all ones behind 'one point'.",
        ),
        check=Number(
            lambda: SMALL.max,
            unit="",
            tolerance=0,
            mistakes=[
                Mistake(lambda: 2 * SMALL.max, "An exponent of all ones means infinity or nan: take the one below."),
                Mistake(lambda: SMALL.max - 8, "Behind the hidden one: 1.1111 in binary, not 0.1111."),
                Mistake(lambda: 2.0**3, "That is 1.0000 · 2³: the fraction can be all ones."),
                Mistake(lambda: 2.0**4, "The number just under that: 2⁴ itself would need another exponent."),
            ],
            right="1.1111 in binary times 2³.",
        ),
    ),
    Exercise(
        "01.2",
        "Write `decode(sign, exponent, fraction, exponent_bits, fraction_bits)`: the number that a code of an IEEE-like "
        "format stands for. The three parts are whole numbers; infinity and nan need not be handled, subnormals do.",
        difficulty=3,
        minutes=10,
        hints=(
            "The bias is 2^(exponent_bits − 1) − 1. An exponent of zero is a case of its own.",
            "Normal: 2^(exponent − bias) · (1 + fraction / 2^fraction_bits). Subnormal: 2^(1 − bias) · (0 + …).",
        ),
        check=Function(
            decode,
            cases=CODES,
            unit="",
            tolerance=1e-9,
            mistakes=[
                Mistake(always_normal, "With an exponent of zero there is no hidden one: those are the subnormals."),
                Mistake(wrong_bias, "The bias is one less than that: 2^(exponent_bits − 1) − 1."),
                Mistake(low_subnormals, "Subnormals have the exponent of the smallest normal number: 1 − bias."),
            ],
            right="subnormals go on to zero in even steps where normal numbers would leave a gap.",
        ),
    ),
    Exercise(
        "01.3",
        "From which whole number on (a power of two) does adding 1 change nothing in bf16? Ties go to the even code.",
        difficulty=3,
        minutes=6,
        hints=(
            "The step at a power of two 2^k is 2^k times the format's step at 1, 2^−7.",
            "1 is lost when it is half a step: a tie, and the power of two has the even fraction.",
        ),
        check=Number(
            lambda: next(2**k for k in range(30) if BF16.round(2**k + 1) == 2**k),
            unit="",
            tolerance=0,
            mistakes=[
                Mistake(128, "At 128 the step is 1, so 129 is there. When is 1 only half a step?"),
                Mistake(512, "One power of two earlier a tie already goes back to the even one."),
                Mistake(
                    lambda: next(2**k for k in range(30) if FP16.round(2**k + 1) == 2**k),
                    "That is fp16, which has three more bits of fraction.",
                ),
                Mistake(2**24, "That is fp32."),
            ],
            right="so a counter in bf16 stops there.",
        ),
    ),
    Exercise(
        "01.4",
        "The gradients that matter are at least 1e-9 in size. What is the smallest power of two as a loss scale that "
        "lifts them all to normal fp16 numbers, with the full fraction?",
        difficulty=2,
        minutes=5,
        hints=(
            "The smallest normal fp16 number is 2^−14.",
            "Divide it by 1e-9 and take the next power of two.",
        ),
        check=Number(
            lambda: next(float(2**k) for k in range(64) if 2**k * 1e-9 >= FP16.smallest_normal),
            unit="",
            tolerance=0,
            mistakes=[
                Mistake(
                    lambda: next(float(2**k) for k in range(64) if 2**k * 1e-9 >= FP16.smallest),
                    "That makes them subnormal: over zero, with one bit left of the fraction.",
                ),
                Mistake(16, "That is the exponent: the scale is 2 to that."),
                Mistake(2**15, "Just too little: the product is still under 2^−14."),
            ],
            right="torch.amp.GradScaler begins with this very number.",
        ),
    ),
    Exercise(
        "01.5",
        f"Quantize B's nine numbers {', '.join(map(str, NINE))} by their absolute maximum as bitsandbytes does for int8: "
        "codes −127 to 127, zero is 0. Answer with a dictionary from number to code.",
        difficulty=2,
        minutes=6,
        hints=("The scale is 20 / 127.", "code = round(number / scale)."),
        check=Table(
            codes,
            unit="",
            tolerance=0,
            mistakes=[
                Mistake(
                    lambda: codes(unsigned=True), "Those are codes 0 to 255, in which zero has no code of its own."
                ),
                Mistake(
                    lambda: {n: round(n / 20 * 128) for n in NINE}, "The largest code is 127: −128 would be one-sided."
                ),
                Mistake(lambda: {n: int(n / 20 * 127) for n in NINE}, "Round to the nearest code, do not cut off."),
            ],
            right="one code, −128, is never used.",
        ),
    ),
    Exercise(
        "01.6",
        "Write `stored_bits(bits, block_size, nested_block)`: bits a number under double quantization. A block of "
        "`block_size` numbers shares an 8-bit scale, and `nested_block` of these scales share one in fp32.",
        difficulty=3,
        minutes=8,
        hints=(
            "Three terms: the code, a share of the 8-bit scale, a share of the fp32 scale.",
            "One fp32 scale serves block_size · nested_block numbers.",
        ),
        check=Function(
            stored_bits,
            cases=BLOCKS,
            unit="bits",
            tolerance=1e-6,
            mistakes=[
                Mistake(without_second, "The 8-bit scales have scales themselves, 32 bits each."),
                Mistake(single, "That is with fp32 scales: single quantization."),
                Mistake(not_shared, "nested_block counts scales, not numbers."),
            ],
            right="4, 64 and 256 give the 4.127 of QLoRA.",
        ),
    ),
    Exercise(
        "01.7",
        f"Llama 3.1 70B has {LLAMA:,} parameters. How many GiB would they take if all were NF4 with double "
        "quantization (blocks of 64, nested blocks of 256)?",
        difficulty=2,
        minutes=4,
        hints=("Bits a parameter: exercise 01.6.", "Divide by 8 for bytes, and by 1,024³ for GiB."),
        check=Number(
            lambda: LLAMA * stored_bits(4, 64, 256) / 8 / GiB,
            unit="GiB",
            tolerance=0.002,
            mistakes=[
                Mistake(lambda: LLAMA * 4.5 / 8 / GiB, "That is with fp32 scales: without double quantization."),
                Mistake(lambda: LLAMA * 4 / 8 / GiB, "Those are the codes alone: blocks have scales."),
            ],
            right="bitsandbytes leaves embeddings, norms and the head in 16 bits, so a real model takes more.",
        ),
    ),
    Exercise(
        "01.8",
        "A new nn.Linear begins with uniformly distributed weights. Give a table of 16 ascending numbers from −1 to 1 "
        "with which blockwise(weights, table, 64) has a mean squared error at least a tenth below NF4's.",
        difficulty=3,
        minutes=10,
        hints=(
            "NF4's codes are equally likely for normally distributed numbers. What is equally likely here?",
            "Even steps, and all sixteen codes.",
        ),
        check=Judge(
            beats_nf4,
            rights=lambda: [torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16).tolist()],
            wrongs=lambda: [
                NF4,
                FP4,
                torch.linspace(-1, 1, 15),
                torch.linspace(1, -1, 16),
                torch.linspace(-2, 2, 16),
                torch.linspace(-0.5, 0.5, 16),
                "even",
                None,
            ],
        ),
    ),
]
