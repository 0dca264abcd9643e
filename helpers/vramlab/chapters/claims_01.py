"""The experiments that test what the sources say about data types and quantization (chapter 01).

B's lecture (5.1.1 and 5.1.2) counts a small network, describes formats and quantizes three short lists by hand. A's guide
says of mixed precision what each format is good for; what it says of speed and memory is chapter 03's.
"""

import itertools
import subprocess
import sys
from functools import cache

import torch
from torch import Tensor, nn

from .. import numerics
from ..claims import Finding
from ..gpu import find_gpu, gpu_names
from ..numerics import BF16, FP16, FP32, Format
from ..quantizers import Quantized, absmax, minmax, quantile

FORMATS = {format.name: format for format in numerics.FORMATS}
NINE = [1, -2, 3, -4, 5, -6, 10, -20, 15]  # B's example of the absolute maximum
PRINTED = [134, 115, 147, 102, 159, 89, 191, 0, 218]
BLOCKS = {1: [1, 2, 3, 100, 4], 2: [5, 6, 7, 200, 8, 9]}  # and of blocks
PRINTED_BLOCKS = {1: [2, 5, 7, 255, 10], 2: [6, 8, 9, 255, 10, 11]}


# --- counting -----------------------------------------------------------------------------------------------------


def parameters(hidden_bias: int, output_bias: int) -> Finding:
    """Parameters of two inputs, two hidden units and two outputs, with so many biases a layer."""
    weights = 2 * 2 + 2 * 2
    text = f"{weights} weights, {hidden_bias} biases in the hidden layer and {output_bias} at the output"
    return Finding(weights + hidden_bias + output_bias, "derived", text)


def gigabyte(power_of: int, power: int = 3) -> Finding:
    """Bytes of a GB, or of a MB (`power` 2), by thousands or by 1,024."""
    return Finding(power_of**power, "derived", " × ".join([str(power_of)] * power))


def weights_of_seven_billion(divisor: int) -> Finding:
    """What 7 billion parameters take at 2 bytes each, in units of `divisor`."""
    return Finding(7_000_000_000 * 2 / divisor, "derived", f"7,000,000,000 × 2 / {divisor:,}")


def file_is_parameters_times_bytes() -> Finding:
    """Whether the base model's file of fp16 weights has two bytes a parameter, to a thousandth (it has a header)."""
    from ..base_model import base_model_folder, load_base_model

    size = (base_model_folder() / "model.safetensors").stat().st_size
    count = sum(parameter.numel() for parameter in load_base_model().parameters())
    return Finding(abs(size / (2 * count) - 1) < 1e-3, "measured", f"{size:,} bytes, {count:,} parameters in fp16")


def per_code(what: str) -> Finding:
    """What goes into one of 8 bits from 32: "bits", or the "codes" that go into one code."""
    return Finding(32 / 8 if what == "bits" else 2**32 / 2**8, "derived", f"{what} of 32 for one of 8 bits")


# --- formats ------------------------------------------------------------------------------------------------------


def format_width(format: str, part: str) -> Finding:
    """Bits of a format's "exponent" or "fraction", or its "stored" bytes."""
    of = FORMATS[format]
    value = {"exponent": of.exponent_bits, "fraction": of.fraction_bits, "stored": of.bytes}[part]
    return Finding(value, "derived", f"{of}: 1 + {of.exponent_bits} + {of.fraction_bits} bits")


def format_ratio(format: str, to: str, limit: str) -> Finding:
    """One format's `limit` ("max", "smallest_normal", "smallest", "epsilon") relative to another's."""
    a, b = (getattr(FORMATS[name], limit) for name in (format, to))
    return Finding(a / b, "derived", f"{limit}: {a:.4g} of {format}, {b:.4g} of {to}")


def one_bit_more(part: str) -> Finding:
    """Whether a bit more for the exponent widens the range, or one more for the fraction halves the step, and only that."""
    base = Format("5 + 10", 5, 10)
    more = Format("6 + 10", 6, 10) if part == "exponent" else Format("5 + 11", 5, 11)
    wider, finer = more.max / base.max > 2 and more.smallest_normal < base.smallest_normal, more.epsilon < base.epsilon
    text = f"max {base.max:.5g} → {more.max:.5g}, step at 1: {base.epsilon:.3g} → {more.epsilon:.3g}"
    return Finding((wider and not finer) if part == "exponent" else (finer and not wider), "derived", text)


def held(format: str, numbers: list[float], all_or_none: str = "all") -> Finding:
    """Whether a format holds "all" of some numbers to a hundredth, or "none" of them."""
    pairs = [(number, FORMATS[format].round(number)) for number in numbers]
    near = [abs(there - number) <= 0.01 * abs(number) for number, there in pairs]
    found = all(near) if all_or_none == "all" else not any(near)
    return Finding(found, "derived", ", ".join(f"{number:g} → {there:.4g}" for number, there in pairs))


def range_for_precision() -> Finding:
    """Whether bf16 spans more powers of two than fp16 and has coarser steps."""
    spans = [format.exponent_bits for format in (BF16, FP16)]
    steps = [format.epsilon for format in (BF16, FP16)]
    return Finding(spans[0] > spans[1] and steps[0] > steps[1], "derived", f"exponents {spans}, steps at 1 {steps}")


def fewer_bits_are_faster(gpu: str, format: str) -> Finding:
    """Whether a card's peak rate in a format is above its rate in fp32, by its datasheet; no where it has no unit for it."""
    card = find_gpu(gpu)
    rate = card.peak.get(format, 0)
    rates = f"{rate / 1e12:g} and {card.peak['fp32'] / 1e12:g} TFLOP/s"
    return Finding(rate > card.peak["fp32"], "derived", f"{card.name}: {rates if rate else f'has no {format}'}")


def more_precise(format: str, than: str) -> Finding:
    """Whether a format has finer steps than another."""
    a, b = FORMATS[format], FORMATS[than]
    return Finding(a.epsilon < b.epsilon, "derived", f"steps at 1: {a.epsilon:.3g} and {b.epsilon:.3g}")


def since_ampere(format: str) -> Finding:
    """Whether the cards of the table that have a format are those of compute capability 8.0 (Ampere) or more."""
    cards = [find_gpu(name) for name in gpu_names()]
    agree = all(bool(card.why_not(f"{format}-mixed")) == (card.compute_capability < (8, 0)) for card in cards)
    return Finding(agree, "derived", f"{len(cards)} cards; CUDA C++ Programming Guide, compute capabilities")


SWITCHES = ("torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32")


@cache
def _tf32_switches(turned_on: bool = False) -> tuple[bool, bool]:
    """torch's switches for (matmuls, convolutions) as a fresh interpreter has them, or after A's two lines."""
    lines = [f"{switch} = True" for switch in SWITCHES] if turned_on else []
    code = "; ".join(["import torch", *lines, f"print({', '.join(SWITCHES)})"])
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return said[0] == "True", said[1] == "True"


def tf32_by_default(operation: str) -> Finding:
    """Whether torch lets "matmuls" or "convolutions" use tf32 without being asked."""
    on = _tf32_switches()[operation == "convolutions"]
    return Finding(on, "measured", f"torch {torch.__version__.split('+')[0]}, {operation}")


def tf32_turned_on(operation: str) -> Finding:
    """Whether A's two lines turn tf32 on for "matmuls" or "convolutions"."""
    on = _tf32_switches(turned_on=True)[operation == "convolutions"]
    return Finding(on, "measured", f"torch {torch.__version__.split('+')[0]}, {SWITCHES[operation == 'convolutions']}")


def half_is_less(what: str, gpu: str = "A100") -> Finding:
    """Whether a product of 256 × 256 matrices in fp16 has fewer "operations" than in fp32, fewer "bytes" to move, or takes
    less "time" at a card's peak rates."""
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for dtype in (torch.float16, torch.float32):
        a = torch.ones(256, 256, dtype=dtype)
        with FlopCounterMode(display=False) as counter:
            result = a @ a
        counts.append((counter.get_total_flops(), 2 * a.nbytes + result.nbytes))
    operations, moved = zip(*counts, strict=True)
    seconds = [n / find_gpu(gpu).peak[name] for n, name in zip(operations, ("fp16", "fp32"), strict=True)]
    half, full = {"operations": operations, "bytes": moved, "time": seconds}[what]
    witness = "derived" if what == "time" else "measured"
    return Finding(half < full, witness, f"{what}: {half:.4g} and {full:.4g}{f' s on {gpu}' if what == 'time' else ''}")


def under_autocast(what: str) -> Finding:
    """What autocast to fp16 does: "gradients" arrive in fp32; results are fp16 or fp32 by the kind of operator ("mixed");
    the "update" adds fp32 to fp32."""
    layer, x = nn.Linear(8, 8), torch.ones(2, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        result = layer(x)
        loss = nn.functional.mse_loss(result, x)
    loss.backward()
    mixed = (result.dtype, loss.dtype) == (torch.float16, torch.float32)
    gradients = layer.weight.grad.dtype == torch.float32
    found = {"gradients": gradients, "mixed": mixed, "update": gradients and layer.weight.dtype == torch.float32}[what]
    return Finding(found, "measured", f"linear {result.dtype}, loss {loss.dtype}, gradient {layer.weight.grad.dtype}")


# --- training -----------------------------------------------------------------------------------------------------


def deep_network(layers: int = 20) -> tuple[nn.Module, Tensor, Tensor]:
    """A plain network of so many hidden layers of 32 units as nn.Linear initialises them, and 256 labelled points.

    Each such layer makes gradients about 0.4 times as large (uniform weights of variance 1/(3 · 32), half of the units
    off), so that twenty of them reach what fp16 cannot hold. Labels are those of a random network: four classes.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    torch.manual_seed(1)
    first, second = torch.randn(16, 32), torch.randn(32, 4)
    labels = (torch.tanh(x @ first) @ second).argmax(1)
    torch.manual_seed(0)
    sizes = [16] + [32] * layers
    hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(32, 4)), x, labels


def guessing(labels: Tensor) -> float:
    """The loss of one who knows how frequent each label is and nothing else: the entropy of the labels."""
    shares = torch.bincount(labels) / len(labels)
    return float(-(shares * shares.log()).sum())


@cache
def _loss(dtype: str, scaled: bool, layers: int, steps: int) -> tuple[float, float]:
    """(lowest loss of the last ten steps, that of guessing) under autocast, with loss scaling or without."""
    network, x, labels = deep_network(layers)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            loss = nn.functional.cross_entropy(network(x).float(), labels)  # in fp32, as autocast does on a GPU
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return min(losses[-10:]), guessing(labels)


def learns(dtype: str, scaled: bool = False, layers: int = 20, steps: int = 150) -> Finding:
    """Whether a network of `layers` gets a tenth below the loss of guessing in so many steps."""
    loss, guess = _loss(dtype, scaled, layers, steps)
    text = f"{layers} layers, {steps} steps of Adam under autocast to {dtype}, loss scaling {'on' if scaled else 'off'}"
    return Finding(loss < 0.9 * guess, "measured", f"{text}: loss {loss:.2f}, guessing {guess:.2f}")


def needs_scaling(layers: int, steps: int = 150) -> Finding:
    """Whether such a network learns in fp16 with loss scaling and does not without."""
    with_, without = (learns("float16", scaled, layers, steps) for scaled in (True, False))
    return Finding(with_.value and not without.value, "measured", f"{with_.configuration}; {without.configuration}")


@cache
def _bits_per_byte(format: str | None, limit: int) -> float:
    from ..base_model import bits_per_byte, held_out, load_base_model

    model = load_base_model()
    if format:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(numerics.rounded(parameter, FORMATS[format]))
    return bits_per_byte(model, held_out(limit), stride=256)


def same_quality(format: str, limit: int = 8000) -> Finding:
    """The base model's bits per byte with its weights rounded to a format, relative to those with fp32 weights."""
    there, before = _bits_per_byte(format, limit), _bits_per_byte(None, limit)
    text = f"the base model on {limit:,} held-out bytes: {there:.3f} and {before:.3f} bits per byte"
    return Finding(there / before, "measured", text)


# --- quantizers ---------------------------------------------------------------------------------------------------


def spread_over(numbers: list[float], largest: float, low: float, how: str = "round") -> list[int]:
    """B's way: `low` to `largest` onto the codes 0 to 255, rounded to the nearest or cut off."""
    exact = [(n - low) / (largest - low) * 255 for n in numbers]
    return [round(e) if how == "round" else int(e) for e in exact]


def largest(block: int | None = None) -> Finding:
    """The largest absolute value of B's nine numbers, or of one of its blocks."""
    numbers = BLOCKS[block] if block else NINE
    return Finding(float(max(map(abs, numbers))), "derived", str(numbers))


def code_of(number: float) -> Finding:
    """The code of one of B's nine numbers."""
    code = spread_over([number], 20, -20)[0]
    return Finding(code, "derived", f"({number:g} + 20) / 40 · 255 = {(number + 20) / 40 * 255:.3f}")


def other_codes() -> Finding:
    """Whether the eight codes beside the wrong one are right."""
    codes = spread_over(NINE, 20, -20)
    pairs = [(a, b) for n, a, b in zip(NINE, codes, PRINTED, strict=True) if n != 15]
    return Finding(all(a == b for a, b in pairs), "derived", f"computed {codes}")


def block_codes(block: int, how: str) -> Finding:
    """Whether B's codes of a block are 255 · number / maximum, by rounding ("round") or by cutting off ("cut")."""
    numbers = BLOCKS[block]
    codes = spread_over(numbers, max(numbers), 0, how)
    return Finding(codes == PRINTED_BLOCKS[block], "derived", f"block {block}, {how}: {codes}")


def normal_numbers(outlier: float | None = None, count: int = 4096) -> Tensor:
    """Numbers from a normal distribution, the same on every machine; one of them may be made an outlier."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(0))
    if outlier is not None:
        numbers[count // 2] = outlier
    return numbers


def rms_error(numbers: Tensor, small: Quantized) -> float:
    """Root of the mean squared difference after quantizing and back."""
    return float((small.dequantize() - numbers).square().mean().sqrt())


def blocks_help(data: str) -> Finding:
    """Whether blocks at least halve the error: of B's own eleven numbers, or of 4,096 with one outlier."""
    if data == "B":
        numbers, sizes = torch.tensor([float(n) for block in BLOCKS.values() for n in block]), (None, 5)
        # B's blocks have 5 and 6 numbers: the second is quantized by itself
        parts = [absmax(torch.tensor([float(n) for n in block]), 8).dequantize() for block in BLOCKS.values()]
        blocked = float((torch.cat(parts) - numbers).square().mean().sqrt())
    else:
        numbers, sizes = normal_numbers(outlier=100.0), (None, 64)
        blocked = rms_error(numbers, absmax(numbers, 8, 64))
    whole = rms_error(numbers, absmax(numbers, 8))
    text = f"{numbers.numel()} numbers, 8 bits, blocks of {sizes[1]}: {blocked:.4f}, without {whole:.4f}"
    return Finding(blocked <= whole / 2, "measured", text)


def uneven_wastes(method: str = "minmax") -> Finding:
    """Whether "minmax" or "absmax" leaves more of 256 codes unused on normal numbers with an outlier than on evenly
    spread ones."""
    even = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 2 - 1
    quantize = {"minmax": minmax, "absmax": absmax}[method]
    used = [len(quantize(numbers, 8).codes.unique()) for numbers in (even, normal_numbers(outlier=20.0))]
    return Finding(used[1] < used[0], "measured", f"{used[0]} of 256 codes used, and {used[1]}")


def absmax_is_finer(than: str) -> Finding:
    """Whether B's nine numbers get finer steps by their absolute maximum than by the range of "fp32" or their "own"."""
    numbers = torch.tensor([float(n) for n in NINE])
    step = 2 * float(numbers.abs().max()) / 255
    other = float(numbers.max() - numbers.min()) / 255 if than == "own" else 2 * FP32.max / 255
    return Finding(step < other, "derived", f"steps of {step:.3g} and {other:.3g}")


def quantiles_follow_frequency() -> Finding:
    """Whether the numbers that codes stand for lie closer together where the data is dense."""
    table = quantile(normal_numbers(), 4).table
    middle, edge = float(table[8] - table[7]), float(table[15] - table[14])
    return Finding(middle < edge / 2, "measured", f"16 codes of normal numbers: {middle:.3f} apart, {edge:.3f} outside")
