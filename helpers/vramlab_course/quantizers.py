"""Quantizers from first principles: numbers become small codes and a few constants, and come back nearly the same.

    >>> import torch
    >>> small = blockwise(torch.randn(4096), NF4, block_size=64)
    >>> small.bits_per_number
    4.5
    >>> small.dequantize().shape
    torch.Size([4096])

Two kinds. The even ones (`minmax`, `absmax`) have steps of one width. Those with a **table** say which numbers the codes
stand for: `NF4`, `FP4`, `DYNAMIC`, a table of quantiles, any sorted list; `blockwise` scales each block of numbers into the
table's range by the block's absolute maximum. Codes and maxima of NF4 and FP4 are those of bitsandbytes, bit for bit.
"""

import dataclasses
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from .numerics import NumericsError

# Yoshida 2023 (arXiv 2306.06965) reads it off the QLoRA code: 1 − (1/32 + 1/30)/2 is halfway between the
# outermost of 16 and of 15 equally likely bins. bitsandbytes (`create_normal_map`) writes it with seven digits.
NF4_OFFSET = 0.9677083


@dataclass(frozen=True)
class Quantized:
    """Codes and the constants that turn them back into numbers.

    Attributes:
        codes: one whole number per number, in the shape of the original.
        bits: bits that a code takes.
        scales: one number per block, or one for all.
        block_size: how many numbers share a scale; None when all do.
        table: what the codes stand for before scaling, ascending; None when a code stands for itself.
        zero_point: the code that stands for zero.
        nested: the quantized scales, where these are quantized themselves; `offset` was subtracted from them before.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    block_size: int | None = None
    table: Tensor | None = None
    zero_point: int = 0
    nested: "Quantized | None" = None
    offset: float = 0.0

    def dequantize(self) -> Tensor:
        """The numbers that the codes stand for, fp32, in the original's shape."""
        codes = self.codes.flatten()
        numbers = self.table[codes.long()] if self.table is not None else (codes - self.zero_point).float()
        scales = self.scales if self.nested is None else self.nested.dequantize() + self.offset
        if self.block_size is not None:
            scales = scales.repeat_interleave(self.block_size)[: len(codes)]
        return (numbers * scales).reshape(self.codes.shape)

    @property
    def bits_per_number(self) -> float:
        """Bits of codes and fp32 scales for each number; tables and single constants, a few hundred bytes, are not in it."""
        if self.block_size is None:
            return float(self.bits)
        scale_bits = 32 if self.nested is None else self.nested.bits_per_number
        return self.bits + scale_bits / self.block_size


def minmax(numbers: Tensor, bits: int = 8) -> Quantized:
    """Even steps from the smallest number to the largest, in codes 0 to 2^bits − 1.

    The range is widened to hold zero, and zero gets a code of its own, the zero point (Jacob et al. 2018, section 2.1).
    """
    _check(numbers, bits)
    low, high = numbers.min().clamp(max=0), numbers.max().clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    if scale == 0:
        return Quantized(torch.zeros_like(numbers, dtype=torch.int32), bits, torch.tensor(1.0))
    zero_point = int(torch.round(-low / scale))
    codes = (torch.round(numbers / scale) + zero_point).clamp(0, 2**bits - 1)
    return Quantized(codes.int(), bits, scale, zero_point=zero_point)


def absmax(numbers: Tensor, bits: int = 8, block_size: int | None = None) -> Quantized:
    """Even steps, as many to the left of zero as to the right: codes ±(2^(bits − 1) − 1), one of all is not used.

    With a `block_size`, each block of so many numbers has its own scale.
    """
    _check(numbers, bits)
    top = 2 ** (bits - 1) - 1
    size = numbers.numel() if block_size is None else block_size
    scales = _maxima(numbers, size) / top
    spread = scales.repeat_interleave(size)[: numbers.numel()].reshape(numbers.shape)
    codes = torch.round(numbers / torch.where(spread > 0, spread, 1)).clamp(-top, top)
    return Quantized(codes.int(), bits, scales if block_size is not None else scales[0], block_size)


def blockwise(numbers: Tensor, table: Tensor, block_size: int | None = 64, double: bool = False) -> Quantized:
    """The nearest number of `table` (ascending, within −1 to 1) after scaling each block by its absolute maximum.

    A number halfway between two takes the lower one. With `double`, the maxima are quantized too, as bitsandbytes does
    (Dettmers et al. 2023, section 3): their mean goes off, the rest is coded by `DYNAMIC` in blocks of 256.

    Raises NumericsError for an empty tensor, numbers that are not finite, and a table that does not ascend within ±1.
    """
    if len(table) < 2 or not bool((table[1:] > table[:-1]).all()) or float(table.abs().max()) > 1:
        raise NumericsError("A table has two or more ascending numbers from −1 to 1.")
    bits, table = (len(table) - 1).bit_length(), table.to(numbers.device)
    _check(numbers, bits)
    size = numbers.numel() if block_size is None else block_size
    maxima = _maxima(numbers, size)
    # bitsandbytes multiplies whole blocks by the reciprocal and divides the last, shorter one: half a step's last bit.
    flat, whole = numbers.flatten().float(), numbers.numel() // size * size
    inverse = 1 / maxima.clamp(min=1e-38)
    scaled = flat * inverse.repeat_interleave(size)[: len(flat)]
    scaled[whole:] = flat[whole:] / maxima[-1].clamp(min=1e-38)
    codes = torch.bucketize(scaled.clamp(-1, 1), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    found = Quantized(
        codes.reshape(numbers.shape), bits, maxima if block_size is not None else maxima[0], block_size, table
    )
    if not double:
        return found
    if block_size is None:
        raise NumericsError("Double quantization is of many scales: give a block size.")
    offset = maxima.mean()
    return dataclasses.replace(found, nested=blockwise(maxima - offset, DYNAMIC, 256), offset=float(offset))


def quantile(numbers: Tensor, bits: int = 8) -> Quantized:
    """Codes that are all used equally often: the table holds the middle of each of 2^bits equal shares of the numbers.

    The table belongs to the data and takes 4 · 2^bits bytes. Raises NumericsError when the data repeats so often that
    shares coincide.
    """
    _check(numbers, bits)
    ordered = numbers.flatten().sort().values
    middles = (torch.arange(2**bits) + 0.5) / 2**bits * len(ordered)
    table = ordered[middles.long().clamp(max=len(ordered) - 1)]
    if not bool((table[1:] > table[:-1]).all()):
        raise NumericsError(f"There are fewer than {2**bits} different numbers at the quantiles: use fewer bits.")
    codes = torch.bucketize(numbers, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return Quantized(codes, bits, torch.tensor(1.0), table=table)


def normal_float(bits: int = 4, offset: float = NF4_OFFSET) -> Tensor:
    """The table of NormalFloat (Dettmers et al. 2023, section 3): codes equally likely for normally distributed numbers.

    Quantiles of the normal distribution, evenly spaced from `offset` to one half: 2^(bits − 1) above zero, one fewer
    below, zero itself, and all divided by the largest. The probabilities are fp32, as bitsandbytes has them.
    """
    half = 2 ** (bits - 1)
    above = [NormalDist().inv_cdf(p) for p in torch.linspace(offset, 0.5, half + 1).tolist()[:-1]]
    below = [-NormalDist().inv_cdf(p) for p in torch.linspace(offset, 0.5, half).tolist()[:-1]]
    table = torch.tensor(sorted([*above, 0.0, *below]))
    return table / table[-1]


def dynamic() -> Tensor:
    """The 8-bit table of bitsandbytes' optimizers and double quantization, "dynamic tree" (Dettmers 2016, section 2).

    Decades from 10^-6 to 1, each with twice as many numbers as the one below: the middles of 1, 2, 4, … 64 equal parts
    of 0.1 to 1 times the decade, with both signs; and 0 and 1.
    """
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        positive += (10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return torch.tensor(sorted([*positive, *(-number for number in positive), 0.0, 1.0]))


NF4 = normal_float()
# bitsandbytes' own four-bit float (`get_4bit_type`): not e2m1, its numbers are 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1.
FP4 = torch.tensor(sorted({sign * size / 12 for sign in (-1, 1) for size in (0, 0.0625, 2, 3, 4, 6, 8, 12)}))
DYNAMIC = dynamic()


def even_table(bits: int) -> Tensor:
    """±(2^(bits − 1) − 1) even steps from −1 to 1: `absmax` as a table."""
    top = 2 ** (bits - 1) - 1
    return torch.arange(-top, top + 1) / top


def float_table(format) -> Tensor:
    """Every finite number of a small `numerics.Format`, divided by the largest: the format as a table."""
    return torch.tensor(format.numbers()) / format.max


def _maxima(numbers: Tensor, size: int) -> Tensor:
    """The absolute maximum of each block of `size` numbers, the last one may be shorter."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise NumericsError(f"block size is {size!r}, but allowed is a whole number of at least 1, or None.")
    flat = numbers.flatten().float().abs()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).reshape(-1, size).amax(1)


def _check(numbers: Tensor, bits: int) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
        raise NumericsError(f"bits is {bits!r}, but allowed is a whole number from 2 to 16.")
    if not numbers.is_floating_point() or numbers.numel() == 0 or not bool(numbers.isfinite().all()):
        raise NumericsError("A tensor to quantize has one finite floating-point number or more.")
