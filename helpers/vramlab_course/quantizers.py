"""Quantizers from first principles: numbers become small codes and a few constants, and back.

    >>> import torch
    >>> small = blockwise(torch.randn(4096), NF4, block_size=64)
    >>> small.bits_per_number
    4.5
    >>> small.dequantize().shape
    torch.Size([4096])

`minmax` and `absmax` have steps of one width. `quantile` and `blockwise` have a table of the numbers that codes stand for:
`NF4`, `FP4`, `DYNAMIC`, quantiles or any sorted list. `blockwise` scales each block into the table's range by its absolute
maximum. Codes and maxima of NF4 and FP4 equal those of bitsandbytes bit for bit.
"""

import dataclasses
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from .numerics import NumericsError

# 1 − (1/32 + 1/30)/2, halfway between the outermost of 16 and of 15 equally likely bins (Yoshida 2023, arXiv
# 2306.06965). bitsandbytes (`create_normal_map`) has these seven digits.
NF4_OFFSET = 0.9677083


@dataclass(frozen=True)
class Quantized:
    """Codes and the constants that turn them back into numbers.

    Attributes:
        codes: integers in the shape of the original.
        bits: of a code.
        scales: one per block, or one for all.
        block_size: numbers that share a scale; None when all do.
        table: what the codes stand for before scaling, ascending; None without a table.
        zero_point: the code that stands for zero.
        nested: the quantized scales under double quantization; `offset` was subtracted from them first.
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
        """The numbers that the codes stand for, in fp32 and the original's shape."""
        codes = self.codes.flatten()
        numbers = self.table[codes.long()] if self.table is not None else (codes - self.zero_point).float()
        scales = self.scales if self.nested is None else self.nested.dequantize() + self.offset
        if self.block_size is not None:
            scales = scales.repeat_interleave(self.block_size)[: len(codes)]
        return (numbers * scales).reshape(self.codes.shape)

    @property
    def bits_per_number(self) -> float:
        """Bits of codes and scales for each number, without tables and single constants of a few hundred bytes."""
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
    """Even steps, symmetric around zero: codes ±(2^(bits − 1) − 1), so one code is never used.

    With a `block_size`, each block of that many numbers has its own scale.
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

    A number halfway between two takes the lower one. `double` quantizes the maxima too (Dettmers et al. 2023, section 3):
    after subtracting their mean, by `DYNAMIC` in blocks of 256, as bitsandbytes does.

    Raises NumericsError for an empty tensor, numbers that are not finite, and a table that does not ascend within ±1.
    """
    if len(table) < 2 or not bool((table[1:] > table[:-1]).all()) or float(table.abs().max()) > 1:
        raise NumericsError("A table has two or more ascending numbers from −1 to 1.")
    bits, table = (len(table) - 1).bit_length(), table.to(numbers.device)
    _check(numbers, bits)
    size = numbers.numel() if block_size is None else block_size
    maxima = _maxima(numbers, size)
    # Like bitsandbytes: multiply whole blocks by the reciprocal, divide the last, shorter one. It decides ties.
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
    """Codes that are used equally often: the table holds the middle of each of 2^bits equal shares of the numbers.

    The table is stored with the codes, 4 · 2^bits bytes. Raises NumericsError when repeated numbers make shares coincide.
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
    """The table of NormalFloat (Dettmers et al. 2023, section 3): codes are equally likely for normal numbers.

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
    """`absmax` as a table: even steps from −1 to 1."""
    top = 2 ** (bits - 1) - 1
    return torch.arange(-top, top + 1) / top


def float_table(format) -> Tensor:
    """Every finite number of a `numerics.Format`, divided by the largest."""
    return torch.tensor(format.numbers()) / format.max


def _maxima(numbers: Tensor, size: int) -> Tensor:
    """The absolute maximum of each block of `size` numbers; the last block may be shorter."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise NumericsError(f"block size is {size!r}, but allowed is a whole number of at least 1, or None.")
    flat = numbers.flatten().float().abs()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).reshape(-1, size).amax(1)


def _check(numbers: Tensor, bits: int) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
        raise NumericsError(f"bits is {bits!r}, but allowed is a whole number from 2 to 16.")
    if not numbers.is_floating_point() or numbers.numel() == 0 or not bool(numbers.isfinite().all()):
        raise NumericsError("A tensor to quantize has one finite floating-point number or more.")
