"""Formats equal torch's dtypes bit for bit, quantizers equal bitsandbytes'; both keep the promises
that rounding makes.
"""

import dataclasses
import math
import struct

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vramlab_course.number_formats import (
    BF16,
    E2M1,
    E4M3FN,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Format,
    NumericsError,
    rounded,
)
from vramlab_course.quantizers import (
    NF4,
    absmax,
    blockwise,
    normal_float,
    quantile,
)

# PyTorch before 2.12 turns what is too large for e4m3fn into nan (pull request 178817).
SATURATES = torch.tensor(1e9).to(torch.float8_e4m3fn).float().item() == 448
TORCH = {
    FP16: (torch.float16, torch.int16),
    BF16: (torch.bfloat16, torch.int16),
    E5M2: (torch.float8_e5m2, torch.int8),
    dataclasses.replace(E4M3FN, saturates=SATURATES): (torch.float8_e4m3fn, torch.int8),
}
SMALL = [f for f in FORMATS if f.bits <= 8]
fp32 = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def codes_of(numbers: torch.Tensor, format: Format) -> list[int]:
    """The bit patterns of torch's cast, as unsigned numbers."""
    dtype, whole = TORCH[format]
    return (numbers.to(dtype).view(whole).int() & (2**format.bits - 1)).tolist()


def same(a: float, b: float) -> bool:
    """Equal, and with the same sign where they are zero; nan equals nan."""
    return (math.isnan(a) and math.isnan(b)) or (
        a == b and math.copysign(1, a) == math.copysign(1, b)
    )


def awkward(format: Format) -> list[float]:
    """Every number of a format, every tie between two, and what lies just beside; for 16 bits,
    every 37th.
    """
    numbers = [
        *[n for n in format.numbers() if n >= 0][:: 37 if format.bits > 8 else 1],
        format.max,
    ]
    ties = [(a + format.decode(format.encode(a) + 1)) / 2 for a in numbers if a < format.max]
    last = format.max - format.decode(format.max_code - 1)
    found = torch.tensor(
        [*numbers, *ties, format.max + last / 2, format.max + last, 1e-45, 3e38, math.inf, 0.0]
    )
    beside = [torch.nextafter(found, torch.tensor(end)) for end in (-math.inf, math.inf)]
    found = torch.cat([found, *beside])
    return torch.cat([found, -found]).tolist()


# --- formats


@pytest.mark.parametrize("format", TORCH, ids=str)
def test_every_code_decodes_as_torch_does(format):
    dtype, whole = TORCH[format]
    expected = torch.arange(2**format.bits).to(whole).view(dtype).double().tolist()
    assert all(same(format.decode(code), expected[code]) for code in format.codes())


@pytest.mark.parametrize("format", TORCH, ids=str)
def test_every_code_is_its_numbers_code(format):
    for code in format.codes():
        number = format.decode(code)
        assert math.isnan(number) or format.encode(number) == code


@pytest.mark.parametrize("format", TORCH, ids=str)
def test_awkward_numbers_encode_as_torch_casts_them(format):
    numbers = awkward(format)
    expected = codes_of(torch.tensor(numbers), format)
    wrong = [
        (n, format.encode(n), code)
        for n, code in zip(numbers, expected, strict=True)
        if format.encode(n) != code
    ]
    assert not wrong
    assert len({code for code in expected}) > 100


@pytest.mark.parametrize("format", TORCH, ids=str)
@given(number=fp32)
def test_any_number_encodes_as_torch_casts_it(format, number):
    expected = codes_of(torch.tensor([number]), format)[0]
    if math.isnan(number):  # payloads differ from kernel to kernel: both are nan
        assert math.isnan(format.decode(format.encode(number))) and math.isnan(
            format.decode(expected)
        )
    else:
        assert format.encode(number) == expected


@given(number=fp32)
def test_fp32_is_the_machines_own(number):
    code = struct.unpack("<I", struct.pack("<f", number))[0]
    assert same(FP32.decode(code), number)
    assert math.isnan(number) or FP32.encode(number) == code


@given(number=st.floats(allow_nan=False))
def test_fp32_rounds_doubles_as_the_machine_does(number):
    assert same(FP32.round(number), torch.tensor(number, dtype=torch.float64).float().item())


@given(number=finite)
def test_tf32_keeps_the_upper_bits_of_fp32(number):
    """The nearest of the fp32 numbers whose last 13 bits are zero, by whole-number arithmetic on
    the bits.
    """
    code = FP32.encode(number)
    kept, rest = divmod(code, 2**13)
    up = rest > 2**12 or (rest == 2**12 and kept % 2)
    assert TF32.encode(number) == kept + up


def test_e2m1_holds_the_sixteen_numbers_of_its_specification():
    """OCP Microscaling Formats 1.0, table 5: ±0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [E2M1.decode(code) for code in E2M1.codes()] == sizes + [-size for size in sizes]
    assert (
        E2M1.round(1e9) == E2M1.round(math.inf) == 6
        and E2M1.round(5) == 4
        and E2M1.round(0.25) == 0
    )


@pytest.mark.parametrize("format", TORCH, ids=str)
def test_limits_are_torchs(format):
    info = torch.finfo(TORCH[format][0])
    assert (format.max, format.smallest_normal, format.epsilon) == (info.max, info.tiny, info.eps)
    assert format.bits == info.bits and format.smallest == format.decode(1)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@given(number=finite)
def test_rounding_is_near_idempotent_and_symmetric(format, number):
    there = format.round(number)
    assert same(format.round(there), there) and same(format.round(-number), -there)
    if abs(number) <= format.max:
        assert abs(there - number) <= max(abs(number) * format.epsilon, format.smallest) / 2


@pytest.mark.parametrize("format", FORMATS, ids=str)
@given(a=finite, b=finite)
def test_rounding_keeps_the_order(format, a, b):
    low, high = sorted((format.round(min(a, b)), format.round(max(a, b))))
    assert (format.round(min(a, b)), format.round(max(a, b))) == (low, high)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_tensors_are_rounded_as_numbers_are(format):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(3000, generator=generator) * torch.exp2(
        torch.randint(-150, 127, (3000,), generator=generator)
    )
    numbers = torch.cat(
        [numbers, torch.tensor(awkward(BF16)[::11]), torch.tensor([0.0, -0.0, math.inf, -math.inf])]
    )
    expected = [format.round(n) for n in numbers.tolist()]
    assert all(same(a, b) for a, b in zip(rounded(numbers, format).tolist(), expected, strict=True))
    assert rounded(torch.tensor([math.nan]), format).isnan().all()


@pytest.mark.parametrize("format", TORCH, ids=str)
def test_tensors_are_rounded_as_torch_does(format):
    numbers = torch.tensor(awkward(format))
    expected = numbers.to(TORCH[format][0]).float()
    assert torch.equal(rounded(numbers, format).nan_to_num(7), expected.nan_to_num(7))


def test_a_format_knows_its_size():
    assert (TF32.bits, TF32.bytes, BF16.bytes, E2M1.bytes) == (19, 4, 2, 0.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: FP16.decode(65536), "codes 0 to 65535"),
        (lambda: FP16.decode(-1), "codes 0 to 65535"),
        (lambda: FP16.decode(1.0), "codes 0 to 65535"),
        (lambda: E2M1.encode(math.nan), "no code for nan"),
        (lambda: FP32.codes(), "too many to list"),
        (lambda: Format("odd", 4, 3, top="none"), "allowed are 'ieee'"),
        (lambda: Format("odd", 2, 1, top="finite"), "allowed are 'ieee'"),
        (lambda: Format("fp64", 11, 52), "1 to 8 bits"),
        (lambda: absmax(torch.randn(4), bits=1), "bits is 1"),
        (lambda: absmax(torch.tensor([]), bits=8), "one finite floating-point number or more"),
        (lambda: absmax(torch.tensor([1, 2])), "one finite floating-point number or more"),
        (
            lambda: blockwise(torch.tensor([1.0, math.nan]), NF4),
            "one finite floating-point number or more",
        ),
        (lambda: blockwise(torch.randn(4), NF4.flip(0)), "ascending numbers"),
        (lambda: blockwise(torch.randn(4), 2 * NF4), "from −1 to 1"),
        (lambda: quantile(torch.ones(99), 4), "fewer than 16 different numbers"),
        (lambda: absmax(torch.randn(4), block_size=0), "block size is 0"),
        (lambda: blockwise(torch.randn(4), NF4, -64), "block size is -64"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(wrong, said):
    with pytest.raises(NumericsError, match=said):
        wrong()


# --- quantizers against bitsandbytes


def random(count: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed, with an outlier here and there."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator)
    numbers[torch.randint(0, count, (count // 500,), generator=generator)] *= 30
    return numbers


def unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Two codes a byte, the first in its upper half."""
    return torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()[:count].long()


def test_tables_are_those_of_bitsandbytes():
    assert torch.equal(NF4, bnb.get_4bit_type("nf4", device="cpu"))


def test_another_offset_would_not_be_nf4():
    assert not torch.allclose(normal_float(offset=0.97), NF4, atol=1e-4)
    assert (normal_float(offset=1 - (1 / 32 + 1 / 30) / 2) - NF4).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [32, 64, 128, 512, 4096])
def test_four_bit_codes_are_those_of_bitsandbytes(block_size, dtype):
    for seed, count in enumerate((3 * 4096, 10_002)):  # whole blocks, and a shorter one at the end
        numbers = random(count, seed).to(dtype)
        packed, state = bnb.quantize_4bit(numbers, blocksize=block_size, quant_type="nf4")
        ours = blockwise(numbers, NF4, block_size)
        assert torch.equal(ours.scales, state.absmax.float())
        theirs = unpacked(packed, count)
        assert torch.equal(ours.codes.long(), theirs)
        if (
            block_size < 2048
        ):  # above, some CPUs take a kernel that torch.compile makes first, in half a minute
            back = bnb.dequantize_4bit(packed, state).flatten().float()
            assert (back - ours.dequantize()).abs().max() <= torch.finfo(
                dtype
            ).eps * numbers.abs().max()


def test_rowwise_absmax_is_that_of_bitsandbytes():
    rows = random(64 * 128).reshape(64, 128)
    codes, maxima, _ = bnb.int8_vectorwise_quant(rows.half())
    ours = absmax(rows.half().float(), 8, block_size=128)
    assert torch.equal(127 * ours.scales, maxima) or torch.allclose(
        127 * ours.scales, maxima, rtol=1e-6
    )
    assert (codes.int() - ours.codes).abs().max() <= 1  # it multiplies in fp16
    assert (codes.int() != ours.codes).float().mean() < 0.02


# --- what every quantizer promises

data = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=300).map(torch.tensor)
many = st.integers(0, 2**31).map(lambda seed: random(400, seed))


@given(numbers=data, bits=st.integers(2, 8), block_size=st.sampled_from([None, 1, 7, 64]))
def test_absmax_is_half_a_step_off_at_most(numbers, bits, block_size):
    small = absmax(numbers, bits, block_size)
    steps = (
        small.scales.repeat_interleave(block_size)[: len(numbers)] if block_size else small.scales
    )
    assert bool(((small.dequantize() - numbers).abs() <= steps / 2 * 1.0001 + 1e-37).all())
    assert small.codes.abs().max() <= 2 ** (bits - 1) - 1
    assert torch.equal(absmax(-numbers, bits, block_size).codes, -small.codes)


@given(numbers=many, table=st.sampled_from([NF4, torch.linspace(-1, 1, 7)]))
def test_a_table_gives_the_nearest_of_its_numbers(numbers, table):
    small = blockwise(numbers, table, 64)
    scales = small.scales.repeat_interleave(64)[: len(numbers)]
    best = ((numbers / scales)[:, None] - table).abs().amin(1)
    assert ((small.dequantize() / scales - numbers / scales).abs() - best).max() < 1e-6


@given(numbers=many, table=st.sampled_from([NF4, torch.linspace(-1, 1, 7)]))
def test_quantizing_again_changes_nothing(numbers, table):
    once = blockwise(numbers, table, 64)
    again = blockwise(once.dequantize(), table, 64)
    assert torch.equal(once.codes, again.codes)


@given(numbers=many)
def test_order_is_kept_within_a_block(numbers):
    ordered = numbers.sort().values
    for small in (
        blockwise(ordered, NF4, None),
        absmax(ordered, 4),
        quantile(ordered, 4),
    ):
        assert bool((small.dequantize().diff() >= 0).all())


@given(numbers=many, bits=st.integers(2, 5))
def test_quantile_codes_are_used_equally(numbers, bits):
    used = torch.bincount(quantile(numbers, bits).codes.long(), minlength=2**bits)
    # borders lie halfway between two middles, not at the share's end: no code has more than a few
    # shares
    assert used.min() >= 1 and used.max() <= 3 * len(numbers) / 2**bits + 1


def test_more_bits_and_smaller_blocks_mean_less_error():
    numbers = random(64 * 256)
    usual = numbers[numbers.abs() < 4]  # a table of quantiles has no place for outliers
    for quantizer in (absmax, quantile):
        errors = [
            (quantizer(usual, bits).dequantize() - usual).square().mean() for bits in (3, 4, 6, 8)
        ]
        assert errors == sorted(errors, reverse=True) and errors[-1] < 0.05 * errors[0]
    errors = [
        (blockwise(numbers, NF4, size).dequantize() - numbers).square().mean()
        for size in (4096, 512, 64, 32)
    ]
    assert errors == sorted(errors, reverse=True)


def test_shapes_come_back_and_all_zeros_are_fine():
    numbers = random(6 * 35).reshape(6, 5, 7)
    zeros = torch.zeros(6, 5, 7)
    for quantizer in (absmax, lambda x: blockwise(x, NF4, 64)):
        assert quantizer(numbers).dequantize().shape == numbers.shape
        assert torch.equal(quantizer(zeros).dequantize(), zeros)
