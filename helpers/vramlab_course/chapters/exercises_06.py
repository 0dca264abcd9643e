"""Exercises of chapter 06, QLoRA."""

import itertools
from functools import partial
from math import ceil
from typing import Any

from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import LoRA, Quantization, Recipe
from vramlab.report.report import CATEGORIES, GiB, MiB, format_bytes

from ..answers import Choice, Function, Judge, Mistake, Number, Verdict
from ..exercises import Exercise

LLAMA = Recipe("llama-3.1-8b").shape
CARD = "T4"
NF4 = Quantization("nf4", double=True)
PAGED_FROM = 100_000  # numbers, as bitsandbytes has it (`Optimizer8bit.get_state_buffer`)
ROWS, COLUMNS = 14336, 4096
# (most, nested) -> block: 64, 32, 256, 64, 256 and 32; each mistake below is wrong in some.
BUDGETS = [
    {"most": most, "nested": nested}
    for most, nested in ((4.5, None), (4.5, 256), (4.2, None), (4.2, 256), (4.05, 256), (4.5, 16))
]


def bits(block: int, nested: int | None) -> float:
    """Bits a weight: 4, and for each block one fp32 scale, or a byte and its part of an fp32 scale of scales."""
    return 4 + (32 / block if nested is None else (8 + 32 / nested) / block)


def half_scales(block: int, nested: int | None) -> float:
    """The same with scales of 16 bits."""
    return 4 + (16 / block if nested is None else (8 + 16 / nested) / block)


def byte_scales(block: int, nested: int | None) -> float:
    """The same without the scales of the scales."""
    return 4 + (32 if nested is None else 8) / block


def smallest_block(most: float, nested: int | None, each=bits) -> int:
    """The smallest power of two as a block size with which a weight takes at most `most` bits, `each` being its bits."""
    return next(2**n for n in itertools.count() if each(2**n, nested) <= most)


def too_dear(most: float, nested: int | None) -> int:
    """The block below, which takes more than `most` bits."""
    return smallest_block(most, nested) // 2


def matrix(each: float) -> float:
    """MiB of one feed-forward matrix of Llama 3.1 8B at `each` bits a weight."""
    return each * ROWS * COLUMNS / 8 / MiB


def not_quantized() -> int:
    """Weights of Llama 3.1 8B outside its quantized matrices: embedding, head and norms."""
    return sum(w.size for w in LLAMA.weights() if w.kind != "linear" or w.name == f"{LLAMA.head}.weight")


def cast(bytes_more: int, weights: int | None = None) -> float:
    """GiB that so many bytes more for each weight outside the matrices come to."""
    return bytes_more * (not_quantized() if weights is None else weights) / GiB


def break_even(each: float = 4.127, rest: float = 32) -> float:
    """Weights outside the matrices for each one inside at which both forms take the same: 16 (x + 1) = rest x + each."""
    return (16 - each) / (rest - 16)


def paged_rank(width: int) -> int:
    """The smallest rank whose width × r matrix has enough numbers to be paged."""
    return ceil(PAGED_FROM / width)


def larger_in_4_bits() -> str:
    """The category that grows most at the peak of B's run when its base is quantized."""
    lecture = Recipe("polyglot-ko-1.3b", batch_size=16, seq_len=256, precision="fp16-true", lora=LoRA(r=8))
    half, four = (predict(lecture.replace(quantization=q), gpu=CARD).peak for q in (None, NF4))
    name = max(CATEGORIES, key=lambda category: getattr(four, category) - getattr(half, category))
    return name.replace("parameters", "weights").replace("_", " ")


def fits(answer: Any) -> Verdict:
    """Whether a recipe fine-tunes Llama 3.1 8B with adapters everywhere at 2,048 tokens on a T4."""
    if not isinstance(answer, Recipe):
        return Verdict(False, f"A Recipe was expected, not a {type(answer).__name__}.")
    if answer.name != LLAMA.name or answer.num_layers is not None or answer.seq_len != 2048:
        return Verdict(False, "It has to be the whole of llama-3.1-8b at 2,048 tokens.")
    if answer.sharding:
        return Verdict(False, "There is one card: no sharding.")
    if not answer.lora or answer.lora.target_modules != "all-linear":
        return Verdict(False, "All linear layers are to be adapted: lora=LoRA(…, target_modules='all-linear').")
    if answer.batch_size * answer.gradient_accumulation_steps < 8:
        return Verdict(False, "A step has to see eight sequences or more: batch_size × gradient_accumulation_steps.")
    card = find_gpu(CARD)
    if why := card.why_not(answer.precision):
        return Verdict(False, f"{why}.")
    if answer.quantization and answer.quantization.compute_dtype == "bfloat16":
        return Verdict(False, f"{card.why_not('bf16-true')}; that goes for bnb_4bit_compute_dtype too.")
    report = predict(answer, gpu=card)
    need = f"The process is likely to take {format_bytes(report.process.value)} of {format_bytes(card.total)}"
    if report.process.value <= card.total:
        return Verdict(True, f"Right. {need}.")
    most = max(report.peak.items(), key=lambda item: item[1])
    said = f"most of the peak, in {report.peak_phase}, is {most[0].replace('_', ' ')}: {format_bytes(most[1])}"
    return Verdict(False, f"It does not fit. {need}; {said}.")


def _fitting(**changes: Any) -> Recipe:
    fields = dict(batch_size=1, seq_len=2048, precision="fp16-true", gradient_checkpointing=True)
    adapters = dict(lora=LoRA(r=16, target_modules="all-linear"), quantization=NF4, gradient_accumulation_steps=8)
    return Recipe("llama-3.1-8b", **{**fields, **adapters, **changes})


EXERCISES = [
    Exercise(
        "06.1",
        "A feed-forward matrix of Llama 3.1 8B has 14,336 × 4,096 weights. How many MiB does it take in NF4 with "
        "double quantization? (Leave out the two tables and the offset, about a kilobyte.)",
        difficulty=1,
        minutes=4,
        hints=(
            "4 bits a weight; one byte for each block of 64; 4 bytes for each 256 of those bytes.",
            "4 + 8/64 + 32/(64 · 256) = 4.127 bits a weight; 8 bits are a byte.",
        ),
        check=Number(
            lambda: matrix(bits(64, 256)),
            unit="MiB",
            mistakes=[
                Mistake(lambda: matrix(bits(64, None)), "That is with fp32 scales: double quantization shrinks them."),
                Mistake(lambda: matrix(4), "Those are the codes alone: each block of 64 has a scale."),
                Mistake(lambda: matrix(16), "That is the matrix in fp16."),
            ],
            right="a quarter of fp16, and 3 % more.",
        ),
    ),
    Exercise(
        "06.2",
        "Smaller blocks follow the weights more closely and cost more. Write `smallest_block(most, nested)`: the smallest "
        "power of two as a block size with which 4-bit weights take at most `most` bits each, scales included. With "
        "nested=None a block has an fp32 scale; else an 8-bit one, and `nested` scales share an fp32 scale.",
        difficulty=3,
        minutes=8,
        hints=(
            "A number that n weights share costs each of them 1/n of its bits. Double the block until they fit.",
            "nested=None: 4 + 32/block. Else a block has 8 bits and 1/nested of 32 bits.",
        ),
        check=Function(
            smallest_block,
            tolerance=0.001,
            cases=BUDGETS,
            mistakes=[
                Mistake(
                    partial(smallest_block, each=half_scales), "bitsandbytes keeps scales in fp32: 32 bits, not 16."
                ),
                Mistake(partial(smallest_block, each=byte_scales), "The 8-bit scales have fp32 scales of their own."),
                Mistake(too_dear, "That is the last block size that takes more than `most` bits: take the next."),
            ],
            right="within 4.5 bits, double quantization halves the block, from 64 to 32.",
        ),
    ),
    Exercise(
        "06.3",
        "Llama 3.1 8B is loaded in 4 bits from a bf16 checkpoint. By how many GiB does "
        "prepare_model_for_kbit_training enlarge its weights? Embedding and head have 128,256 × 4,096 weights each.",
        difficulty=2,
        minutes=6,
        hints=("What is not quantized goes from 2 bytes to 4.", "Embedding, head, and 65 norms of 4,096."),
        check=Number(
            lambda: cast(2),
            unit="GiB",
            mistakes=[
                Mistake(lambda: cast(4), "That is what they take in fp32; 2 bytes of it were there before."),
                Mistake(
                    lambda: cast(2, 128256 * 4096), "Embedding and head are two tensors: this model does not tie them."
                ),
                Mistake(lambda: cast(2, LLAMA.num_parameters), "The quantized matrices are not cast."),
            ],
            right="and from then on everything between the layers is fp32, which costs more than this.",
        ),
    ),
    Exercise(
        "06.4",
        "In source B's run at batch 16, with checkpointing in neither, QLoRA's peak is higher than LoRA's. What is "
        "larger in QLoRA? Answer 'weights', 'activations', 'optimizer states' or 'gradients'.",
        difficulty=2,
        minutes=4,
        hints=(
            "Adapters are the same in both, so what belongs to adapters is the same.",
            "prepare_model_for_kbit_training casts the norms to fp32: in which dtype are their results?",
        ),
        check=Choice(
            larger_in_4_bits,
            {
                "weights": "the weights are the one thing that got smaller.",
                "activations": "fp32 norms make fp32 results, and from the first one on all that layers keep is fp32.",
                "optimizer states": "there are two for each adapter parameter in both.",
                "gradients": "there is one for each adapter parameter in both.",
            },
        ),
    ),
    Exercise(
        "06.5",
        "Weights in fp16 against weights prepared for QLoRA (matrices at 4.127 bits, all else in fp32). From how many "
        "weights outside the matrices, for each one inside, does the second take more?",
        difficulty=3,
        minutes=8,
        hints=(
            "Let there be x weights outside for each one inside, and write down the bits of both forms.",
            "16 (x + 1) = 32 x + 4.127.",
        ),
        check=Number(
            break_even,
            unit="weights",
            tolerance=0.01,
            mistakes=[
                Mistake(lambda: break_even(4), "That is with codes alone: count the scales, 4.127 bits."),
                Mistake(lambda: 1 / break_even(), "That is the other way round: weights inside for each one outside."),
            ],
            right="pythia-160m, nearly half of whose weights are embedding and head, is past it.",
        ),
    ),
    Exercise(
        "06.6",
        "B adapts a layer of 2,048 inputs and 6,144 outputs. A paged optimizer pages the states of tensors of 100,000 "
        "numbers or more. What is the smallest rank r at which it pages any?",
        difficulty=2,
        minutes=5,
        hints=("The adapter is two matrices. Which is larger?", "6,144 × r ≥ 100,000, and r is whole."),
        check=Number(
            lambda: paged_rank(6144),
            unit="rank",
            tolerance=0,
            mistakes=[
                Mistake(lambda: paged_rank(2048), "That is A, 2,048 × r; the larger matrix is paged earlier."),
                Mistake(lambda: paged_rank(2048 + 6144), "A and B are two tensors, each looked at by itself."),
                Mistake(lambda: paged_rank(6144) - 1, "That is still under 100,000."),
            ],
            right="so in B's run, at r = 8, a paged optimizer would page nothing.",
        ),
    ),
    Exercise(
        "06.7",
        f"Write a Recipe that fine-tunes llama-3.1-8b at 2,048 tokens on a {CARD}, with adapters of any rank on all "
        "linear layers and at least eight sequences a step. By predict, what its process is likely to take has to fit.",
        difficulty=4,
        minutes=12,
        hints=(
            "A T4 has no bf16. Which precision, which quantization? What grows with the batch?",
            "fp16-true, Quantization('nf4', double=True), gradient_checkpointing, batch 1 accumulated eight times.",
        ),
        check=Judge(
            fits,
            rights=lambda: [
                _fitting(),
                _fitting(lora=LoRA(r=8, target_modules="all-linear"), gradient_accumulation_steps=16),
            ],
            wrongs=lambda: [
                _fitting(quantization=None),
                _fitting(gradient_checkpointing=False),
                _fitting(batch_size=8, gradient_accumulation_steps=1),
                _fitting(gradient_accumulation_steps=4),
                _fitting(precision="bf16-true"),
                _fitting(quantization=Quantization("nf4", double=True, compute_dtype="bfloat16")),
                _fitting(lora=LoRA(r=8)),
                _fitting(seq_len=1024),
                "nf4",
            ],
        ),
    ),
]
