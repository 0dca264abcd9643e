"""Quantizers from first principles: numbers become small codes and scales, and back.

    >>> blockwise(torch.randn(4096), NF4, block_size=64).dequantize().shape
    torch.Size([4096])

`absmax` has steps of one width. `quantile` and `blockwise` have a table of the numbers that codes
stand for. Codes and maxima of NF4 equal those of bitsandbytes bit for bit.
"""

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from .number_formats import E2M1, NumericsError, rounded

# 1 − (1/32 + 1/30)/2, halfway between the outermost of 16 and of 15 equally likely bins (Yoshida
# 2023, arXiv 2306.06965). bitsandbytes (`create_normal_map`) has these seven digits.
NF4_OFFSET = 0.9677083


@dataclass(frozen=True)
class Quantized:
    """Codes and the constants that turn them back into numbers.

    Attributes:
        codes: integers in the shape of the original.
        scales: one per block, or one for all.
        block_size: numbers that share a scale; None when all do.
        table: what the codes stand for before scaling, ascending; None without a table.
    """

    codes: Tensor
    scales: Tensor
    block_size: int | None = None
    table: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The numbers that the codes stand for, in fp32 and the original's shape."""
        codes = self.codes.flatten()
        scales = self.scales
        numbers = self.table[codes.long()] if self.table is not None else codes.float()
        if self.block_size is not None:
            # The last block may be shorter, so what is repeated too often is cut off.
            scales = scales.repeat_interleave(self.block_size)[: len(codes)]
        return (numbers * scales).reshape(self.codes.shape)


def absmax(numbers: Tensor, bits: int = 8, block_size: int | None = None) -> Quantized:
    """Even steps, symmetric around zero: codes ±(2^(bits − 1) − 1), so one code is never used.

    With a `block_size`, each block of that many numbers has its own scale.
    """
    _check(numbers, bits)
    top = 2 ** (bits - 1) - 1
    size = numbers.numel() if block_size is None else block_size
    scales = _maxima(numbers, size) / top
    spread = scales.repeat_interleave(size)[: numbers.numel()].reshape(numbers.shape)
    # A block of zeros has a scale of zero, by which nothing can be divided.
    steps = torch.where(spread > 0, spread, 1)
    codes = torch.round(numbers / steps).clamp(-top, top)
    return Quantized(codes.int(), scales if block_size is not None else scales[0], block_size)


def blockwise(numbers: Tensor, table: Tensor, block_size: int | None = 64) -> Quantized:
    """The nearest number of `table` after scaling each block by its absolute maximum.

    The table ascends within −1 to 1.

    A number halfway between two takes the lower one. Raises NumericsError for an empty tensor,
    numbers that are not finite, and a table that does not ascend within ±1.
    """
    # After scaling all numbers lie within ±1, so a table beyond has codes that are never used.
    is_table = len(table) >= 2 and _ascends(table) and float(table.abs().max()) <= 1
    if not is_table:
        raise NumericsError("A table has two or more ascending numbers from −1 to 1.")
    _check(numbers, (len(table) - 1).bit_length())
    size = numbers.numel() if block_size is None else block_size
    maxima = _maxima(numbers, size)
    # Like bitsandbytes: multiply whole blocks by the reciprocal, divide the last, shorter one. It
    # decides ties.
    flat = numbers.flatten().float()
    whole = numbers.numel() // size * size
    inverse = 1 / maxima.clamp(min=1e-38)
    scaled = flat * inverse.repeat_interleave(size)[: len(flat)]
    scaled[whole:] = flat[whole:] / maxima[-1].clamp(min=1e-38)
    codes = _nearest(scaled.clamp(-1, 1), table)
    return Quantized(
        codes.reshape(numbers.shape),
        maxima if block_size is not None else maxima[0],
        block_size,
        table,
    )


def quantile(numbers: Tensor, bits: int = 8) -> Quantized:
    """Codes that are used equally often.

    The table holds the middle of each of 2^bits equal shares of the numbers.

    The table is stored with the codes, 4 · 2^bits bytes. Raises NumericsError when repeated numbers
    make shares coincide.
    """
    _check(numbers, bits)
    ordered = numbers.flatten().sort().values
    # Positions in the sorted numbers, at the middle of each of 2^bits equal shares.
    shares = (torch.arange(2**bits) + 0.5) / 2**bits
    middles = shares * len(ordered)
    table = ordered[middles.long().clamp(max=len(ordered) - 1)]
    if not _ascends(table):
        raise NumericsError(
            f"There are fewer than {2**bits} different numbers at the quantiles: use fewer bits."
        )
    codes = _nearest(numbers, table)
    return Quantized(codes, torch.tensor(1.0), table=table)


def normal_float(bits: int = 4, offset: float = NF4_OFFSET) -> Tensor:
    """The table of NormalFloat (Dettmers et al. 2023, section 3).

    Its codes are equally likely for normal numbers.

    Quantiles of the normal distribution, evenly spaced from `offset` to one half: 2^(bits − 1)
    above zero, one fewer below, zero itself, and all divided by the largest. The probabilities are
    fp32, as bitsandbytes has them.
    """
    half = 2 ** (bits - 1)
    # The last, one half, has the quantile zero and is left out.
    *above, _ = torch.linspace(offset, 0.5, half + 1).tolist()
    *below, _ = torch.linspace(offset, 0.5, half).tolist()
    quantile_of = NormalDist().inv_cdf
    # zero is in neither half, so that it has a code of its own and is exact
    numbers = [quantile_of(p) for p in above]
    numbers += [-quantile_of(p) for p in below]
    table = torch.tensor(sorted([*numbers, 0.0]))
    return table / table[-1]


NF4 = normal_float()


def mxfp4(numbers: Tensor, block_size: int = 32) -> Tensor:
    """`numbers` as MXFP4 gives them back: fp4, and a power of two for each block.

    OCP MX 1.0, section 6.3: the scale is the largest power of two within the block's largest
    magnitude, over 4, which is the largest power of two in fp4.
    """
    blocks = numbers.reshape(-1, block_size)
    # A block of zeros has no logarithm; any scale gives it back.
    exponents = blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-125).log2().floor() - 2
    return (rounded(blocks / 2**exponents, E2M1) * 2**exponents).reshape(numbers.shape)


def nvfp4(numbers: Tensor, block_size: int = 16) -> Tensor:
    """`numbers` as NVFP4 gives them back: fp4, an fp8 scale for each block, and one in fp32.

    As Transformer Engine and torchao compute them; 6 and 448 are the largest of fp4 and fp8.
    """
    blocks = numbers.reshape(-1, block_size)
    whole = numbers.abs().max().clamp(min=1e-30) / (6 * 448)
    scales = blocks.abs().amax(1, keepdim=True) / 6 / whole
    smallest = torch.finfo(torch.float8_e4m3fn).tiny
    scales = scales.clamp(min=smallest).to(torch.float8_e4m3fn).float() * whole
    return (rounded(blocks / scales, E2M1) * scales).reshape(numbers.shape)


def fp8(numbers: Tensor) -> Tensor:
    """`numbers` as e4m3 with one scale gives them back, the largest as 448."""
    scale = numbers.abs().max().clamp(min=1e-30) / 448
    return (numbers / scale).to(torch.float8_e4m3fn).float() * scale


def _maxima(numbers: Tensor, size: int) -> Tensor:
    """The absolute maximum of each block of `size` numbers; the last block may be shorter."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise NumericsError(
            f"block size is {size!r}, but allowed is a whole number of at least 1, or None."
        )
    flat = numbers.flatten().float().abs()
    # How many the last block lacks: Python's remainder of a negative number is positive.
    lacking = -len(flat) % size
    whole = torch.nn.functional.pad(flat, (0, lacking))
    return whole.reshape(-1, size).amax(1)


def _ascends(table: Tensor) -> bool:
    return bool((table[1:] > table[:-1]).all())


def _nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """The code of the nearest number of the table, of two the lower one."""
    # halfway between two neighbours one code ends and the next begins
    borders = (table[1:] + table[:-1]) / 2
    # right=False: a number on the border gets the lower code.
    return torch.bucketize(numbers, borders).to(torch.uint8)


def _check(numbers: Tensor, bits: int) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
        raise NumericsError(f"bits is {bits!r}, but allowed is a whole number from 2 to 16.")
    if (
        not numbers.is_floating_point()
        or numbers.numel() == 0
        or not bool(numbers.isfinite().all())
    ):
        raise NumericsError("A tensor to quantize has one finite floating-point number or more.")
