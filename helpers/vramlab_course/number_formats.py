"""Floating-point formats from first principles: every bit of a number, every number of a format.

    >>> FP16.encode(1.5)
    15872
    >>> FP16.decode(0b0_11110_1111111111)
    65504.0

`Format` is one rule with two widths and a meaning of its highest codes. Sources: IEEE 754-2019
(section 3) for fp32, fp16 and e5m2, the OCP 8-bit specification (2023) for e4m3fn, OCP microscaling
(2023) for e2m1, NVIDIA's Ampere whitepaper (2020) for tf32. All round to the nearest number, ties
to the even code. Python floats hold every value of these formats exactly; `rounded` works on
tensors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramlab.base.errors import VramLabError

if TYPE_CHECKING:
    import torch


class NumericsError(VramLabError, ValueError):
    """A number that a format cannot hold, or an invalid code, block or table."""


@dataclass(frozen=True)
class Format:
    """A sign bit, an exponent and a fraction: (−1)^sign · 2^(exponent − bias) · 1.fraction.

    With an exponent of zero it is 0.fraction times the power of two of the smallest normal number:
    the subnormals and zero.

    Attributes:
        name: as PyTorch or the specification calls it.
        exponent_bits, fraction_bits: their widths.
        top: what the highest codes mean: "ieee" (an exponent of all ones is infinity or not a
            number), "nan" (only the code of all ones is not a number, there is no infinity) or
            "finite" (all are numbers).
        saturates: whether overflow gives the largest number, not infinity or nan. The specification
            of e4m3fn allows both; PyTorch saturates since 2.12 (pull request 178817) and gave nan
            before.
        stored_bits: bits of a number in memory where these are more than the format's (tf32: 32).
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    top: str = "ieee"
    saturates: bool = False
    stored_bits: int | None = None

    @property
    def bits(self) -> int:
        """Sign, exponent and fraction together."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bytes(self) -> float:
        """Bytes that a number takes in memory."""
        return (self.stored_bits or self.bits) / 8

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def least_exponent(self) -> int:
        """The power of two of the smallest normal number, and of all subnormal ones."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """The code of the largest finite number."""
        # The codes above it are infinity and nan's.
        return self._ones - {"ieee": 2**self.fraction_bits, "nan": 1, "finite": 0}[self.top]

    @property
    def max(self) -> float:
        """The largest finite number."""
        return self.decode(self.max_code)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with the full precision of the fraction."""
        return 2.0**self.least_exponent

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal one."""
        return 2.0 ** (self.least_exponent - self.fraction_bits)

    @property
    def epsilon(self) -> float:
        """The step from 1 to the next number; rounding's relative error is at most half of it."""
        return 2.0**-self.fraction_bits

    def fields(self, code: int) -> tuple[int, int, int]:
        """(sign, stored exponent, fraction) of a code.

        Raises NumericsError when the format has no such code.
        """
        is_number = isinstance(code, int) and not isinstance(code, bool)
        if not is_number or not 0 <= code < 2**self.bits:
            raise NumericsError(f"{self.name} has codes 0 to {2**self.bits - 1}, not {code!r}.")
        sign, rest = divmod(code, 2 ** (self.bits - 1))
        exponent, fraction = divmod(rest, 2**self.fraction_bits)
        return sign, exponent, fraction

    def decode(self, code: int) -> float:
        """The number of a code; also infinity and nan."""
        sign, exponent, fraction = self.fields(code)
        # above the largest finite number stand infinity, with a fraction of zero, and nan
        if code % 2 ** (self.bits - 1) > self.max_code:
            is_infinity = self.top == "ieee" and fraction == 0
            number = math.inf if is_infinity else math.nan
        elif exponent == 0:
            number = math.ldexp(fraction, self.least_exponent - self.fraction_bits)
        else:
            number = math.ldexp(
                2**self.fraction_bits + fraction,
                exponent - self.bias - self.fraction_bits,
            )
        return math.copysign(number, -1 if sign else 1)

    def encode(self, number: float) -> int:
        """The code of the nearest number, ties to even.

        Overflow gives infinity, nan in a format without infinity, or the largest number in one that
        saturates. Raises NumericsError for nan in a format without it.
        """
        number = float(number)
        # copysign tells −0.0 from 0.0, a comparison does not.
        sign = 2 ** (self.bits - 1) if math.copysign(1, number) < 0 else 0
        if math.isnan(number):
            if self.top == "finite":
                raise NumericsError(f"{self.name} has no code for nan.")
            # "nan" formats have one code for it, all ones.
            if self.top == "nan":
                return sign + self._ones
            # IEEE's quiet nan has the fraction's first bit set.
            return sign + self._infinity + self._quiet
        if number == 0 or math.isinf(number):
            return sign + (self._beyond if number else 0)
        size = abs(number)
        # frexp gives a fraction from 0.5 to 1, so its exponent is one more than IEEE 754's
        _, above = math.frexp(size)
        exponent = max(above - 1, self.least_exponent)
        # Python rounds halves to even, as IEEE 754 does.
        steps = round(math.ldexp(size, self.fraction_bits - exponent))
        # Steps of a normal number begin with a hidden 1, which lands in the exponent and adds one
        # to it; rounding up to the next power of two carries over in the same way.
        code = ((exponent - self.least_exponent) << self.fraction_bits) + steps
        return sign + (code if code <= self.max_code else self._beyond)

    @property
    def _ones(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def _infinity(self) -> int:
        return (2**self.exponent_bits - 1) << self.fraction_bits

    @property
    def _quiet(self) -> int:
        return 2 ** (self.fraction_bits - 1)

    @property
    def _beyond(self) -> int:
        """The code of overflow, without its sign."""
        if self.saturates:
            return self.max_code
        return self._infinity if self.top == "ieee" else self._ones

    def round(self, number: float) -> float:
        """The nearest number of the format."""
        return self.decode(self.encode(number))

    def codes(self) -> Iterator[int]:
        """Every code. Raises NumericsError for formats of more than 16 bits."""
        if self.bits > 16:
            raise NumericsError(
                f"{self.name} has {2**self.bits:,} codes, too many to list: allowed are 16 bits."
            )
        return iter(range(2**self.bits))

    def numbers(self) -> list[float]:
        """Every finite number, ascending, zero once."""
        found = set()
        for code in self.codes():
            number = self.decode(code)
            if math.isfinite(number):
                # −0.0 + 0.0 is 0.0, so zero is there once.
                found.add(number + 0.0)
        return sorted(found)

    def __post_init__(self):
        # Without infinity and nan there is no code for what is too large.
        has_none = self.top == "finite" and not self.saturates
        if self.top not in ("ieee", "nan", "finite") or has_none:
            raise NumericsError(
                f"top is {self.top!r}, but allowed are 'ieee', 'nan', and 'finite' with "
                f"saturates=True."
            )
        # Wider formats have numbers that fp32's range and precision do not hold.
        if (
            self.exponent_bits < 1
            or self.fraction_bits < 1
            or self.exponent_bits > 8
            or self.fraction_bits > 23
        ):
            raise NumericsError(
                f"{self.name}: exponents have 1 to 8 bits and fractions 1 to 23, as fp32 does."
            )

    def __str__(self) -> str:
        return self.name


FP32 = Format("fp32", 8, 23)
TF32 = Format("tf32", 8, 10, stored_bits=32)
FP16 = Format("fp16", 5, 10)
BF16 = Format("bf16", 8, 7)
E5M2 = Format("fp8 e5m2", 5, 2)
E4M3FN = Format("fp8 e4m3fn", 4, 3, top="nan", saturates=True)
E2M1 = Format("fp4 e2m1", 2, 1, top="finite", saturates=True)
FORMATS = (FP32, TF32, FP16, BF16, E5M2, E4M3FN, E2M1)


def rounded(tensor: "torch.Tensor", format: Format) -> "torch.Tensor":
    """`Format.round` for a float32 or float64 tensor, in its dtype; nan stays nan."""
    import torch

    # In fp64, in which scaling by powers of two is exact.
    sizes = tensor.abs().double()
    exponents = (torch.frexp(sizes).exponent - 1).clamp(min=format.least_exponent)
    # the power of two of a number's last digit; subnormal numbers share the smallest one
    shifts = (exponents - format.fraction_bits).double()
    steps = torch.round(sizes * torch.exp2(-shifts)) * torch.exp2(shifts)
    if format.saturates:
        beyond = format.max
    elif format.top == "ieee":
        beyond = math.inf
    else:
        beyond = math.nan
    steps = torch.where(steps > format.max, beyond, steps)
    steps = torch.where(tensor.isnan(), math.nan, steps)
    return torch.copysign(steps, tensor.double()).to(tensor.dtype)
