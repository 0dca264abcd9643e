"""What a wrong number looks like: the right one in another unit, in bits, twice over, or so many per cent off."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .report import GiB, KiB, MiB

# Bytes in one of each unit; the decimal ones are what the binary ones are taken for.
UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "kB": 10**3, "MB": 10**6, "GB": 10**9}
BITS = {
    8: "That is the number of bits: 8 bits are one byte.",
    1 / 8: "That is an eighth of the right amount: these are bytes already, nothing is to be divided by 8.",
}
FACTORS = {
    2: "That is twice the right amount: is something counted two times?",
    1 / 2: "That is half the right amount: is there a second copy of something?",
    -1: "The amount is right, the sign is not.",
}
# The nearest two units are 2.4 % apart (kB and KiB), so a check that lets more through cannot tell them apart.
MOST_TOLERANT = 0.02


def as_number(answer: Any) -> float | str:
    """The number that an answer is (also numpy's and one-element tensors), or a sentence that says why it is none."""
    if hasattr(answer, "peak"):
        return "A number was expected, not a whole report: take for example report.peak.total."
    if isinstance(answer, bool | str | bytes) or callable(answer):
        return f"A number was expected, not {kind(answer)}."
    try:
        number = float(answer.item() if hasattr(answer, "item") else answer)
    except Exception:  # whatever a stranger's __float__ does
        return f"A number was expected, not {kind(answer)}."
    return number if math.isfinite(number) else f"A number was expected, and {number} is none."


def same(numbers: Sequence[float], references: Sequence[float], tolerance: float) -> bool:
    """Whether each number is its reference within the relative tolerance."""
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(numbers, references, strict=True))


def recognise(numbers: Sequence[float], references: Sequence[float], unit: str, tolerance: float) -> str:
    """The sentence for one factor that explains all the numbers at once, "" when none does."""
    if not any(references):
        return ""
    factors = dict(FACTORS)
    if unit in UNITS:
        text = "The amount is right, but it is in {}: the answer is wanted in {}."
        others = {
            UNITS[unit] / size: text.format(_long(name), _long(unit)) for name, size in UNITS.items() if name != unit
        }
        factors = {**others, **BITS, **FACTORS}
    for factor, said in factors.items():
        if same(numbers, [reference * factor for reference in references], tolerance):
            return said
    return ""


def off(number: float, reference: float) -> str:
    """How far a number is from its reference, without giving the reference away."""
    if reference == 0 or number == 0 or (number < 0) != (reference < 0):
        return f"{number:,.6g} is {'too high' if number > reference else 'too low'}"
    ratio = number / reference
    direction = "high" if number > reference else "low"
    if 0.5 <= ratio <= 2:
        return f"{number:,.6g} is {abs(ratio - 1):.1%} too {direction}"
    return f"{number:,.6g} is {max(ratio, 1 / ratio):,.3g} times too {direction}"


def kind(answer: Any) -> str:
    """What an answer is, in words."""
    name = type(answer).__name__
    known = {"str": "text", "bool": "True or False", "function": "a function", "NoneType": "nothing"}
    return known.get(name, f"{'an' if name[0] in 'aeio' else 'a'} {name}")


def listed(names: Sequence[Any]) -> str:
    """Names in a row."""
    return ", ".join(map(str, names))


def called(case: Mapping[str, Any]) -> str:
    """Keyword arguments as they are written."""
    return ", ".join(
        f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in case.items()
    )


def _long(unit: str) -> str:
    return "bytes" if unit == "B" else f"{unit} ({UNITS[unit]:,} bytes)"
