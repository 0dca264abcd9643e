"""Exercises of chapter 08, make it fit."""

from functools import cache
from typing import Any

from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import find_gpu
from vramlab.planning.plan import plan
from vramlab.planning.search_space import usable_memory
from vramlab.planning.step_time import BANDWIDTH, LAUNCH, TRANSFERS, UTILISATION, step_time
from vramlab.recipe.recipe import LoRA, Recipe
from vramlab.report.report import GiB, format_bytes

from ..answers import Choice, Function, Judge, Mistake, Number, Verdict
from ..exercises import Exercise

T4, CARD, MODEL, TOKENS, BATCH = "T4", "RTX 4070", "llama-3.2-1b", 1024, 32
SLOWER = 1.1  # times the best plan's seconds, at most
LLAMA = Recipe("llama-3.1-8b").shape
TRIED = Recipe("polyglot-ko-1.3b", 1, 256, "bf16-true", "adamw_torch_fused", gradient_accumulation_steps=16)


def most_parameters(width: int, total: int | None = None) -> float:
    """Billion parameters of `width` bytes each that a T4 holds."""
    return (total or find_gpu(T4).total) / width / 1e9


def seconds(operations: float, written: float, kernels: int, peak: float, bandwidth: float) -> float:
    """The chapter's roofline of one micro-batch."""
    return (
        operations / (UTILISATION * peak) + TRANSFERS * written / (BANDWIDTH * bandwidth) + kernels * LAUNCH
    )  # fmt: skip


STEPS = [
    dict(operations=5e13, written=2e11, kernels=12000, peak=6.5e13, bandwidth=3.2e11),
    dict(operations=4e14, written=3e11, kernels=9000, peak=9.895e14, bandwidth=4.8e12),
    dict(operations=1e12, written=1e9, kernels=40000, peak=3.12e14, bandwidth=2.039e12),
]


def sent(rounds: float = 3, micro: int = 4, ranks: int = 8, ring: bool = True) -> float:
    """GiB that a rank sends in a step of LLAMA in bf16: `rounds` times all weights (or gradients), each micro-batch."""
    return rounds * micro * ((ranks - 1) / ranks if ring else 1) * 2 * LLAMA.num_parameters / GiB


def largest_part() -> str:
    """The category that takes most of TRIED's peak."""
    return max(predict(TRIED, gpu=CARD).peak.items(), key=lambda part: part[1])[0].replace("_", " ")


@cache
def best_seconds() -> float:
    """Of the fastest full training of MODEL that a plan finds on CARD."""
    return plan(MODEL, CARD, global_batch=BATCH, seq_len=TOKENS, method="full", offload=False, top=1).best.time.seconds


def _good(answer: Any) -> Verdict:
    """Whether a recipe trains all of MODEL on CARD with the wanted batch, fits, and is about as fast as can be."""
    if not isinstance(answer, Recipe):
        return Verdict(False, f"A Recipe was expected, not a {type(answer).__name__}.")
    if answer.name != MODEL or answer.num_layers is not None or answer.seq_len != TOKENS:
        return Verdict(False, f"It has to be the whole of {MODEL} at {TOKENS:,} tokens.")
    if answer.lora or answer.sharding:
        return Verdict(False, "All weights are to be trained, on one card.")
    batch = answer.batch_size * answer.gradient_accumulation_steps
    if batch != BATCH:
        return Verdict(False, f"A step has {batch} samples, not {BATCH}: micro-batch × accumulation.")
    card = find_gpu(CARD)
    report, room = predict(answer, gpu=card), usable_memory(card)
    most = report.process.high
    if most > room:
        part, size = max(report.peak.items(), key=lambda item: item[1])
        said = f"The process may take {format_bytes(most)}, {format_bytes(most - room)} over what is usable"
        return Verdict(
            False, f"{said}; the largest part of the peak is {part.replace('_', ' ')}, {format_bytes(size)}."
        )
    ratio = step_time(answer, card).seconds / best_seconds()
    if ratio > SLOWER:
        return Verdict(False, f"It fits, and takes {ratio:.2f} times as long as the best: which switch can go again?")
    return Verdict(True, f"Right: it fits with {format_bytes(room - most)} left, at {ratio:.2f} times the best time.")


def _fitting(**changes: Any) -> Recipe:
    best = plan(MODEL, CARD, global_batch=BATCH, seq_len=TOKENS, method="full", offload=False, top=1).best.recipe
    return best.replace(**changes)


EXERCISES = [
    Exercise(
        "08.1",
        "By stored bytes alone (weights, gradients, states): how many billion parameters can a model have at most that is "
        f"trained in full in 16 bits with AdamW on a T4, whose total is {format_bytes(find_gpu(T4).total, digits=2)}?",
        difficulty=1,
        minutes=3,
        hints=("How many bytes does a parameter keep?", "2 + 2 + 4 bytes; divide the total in bytes by that."),
        check=Number(
            lambda: most_parameters(8),
            unit="billion parameters",
            mistakes=[
                Mistake(lambda: most_parameters(16), "16 bytes are those of fp32, or of mixed precision."),
                Mistake(lambda: most_parameters(2), "Those are the weights alone."),
                Mistake(lambda: most_parameters(6), "AdamW has two states a parameter, of 2 bytes each."),
                Mistake(lambda: most_parameters(8, 16 * GiB), "16 GB is what the box says, not the card."),
            ],
            right="and nothing is left for activations, temporaries and the context.",
        ),
    ),
    Exercise(
        "08.2",
        "A global batch of 96 is wanted on 4 GPUs, and micro-batches of 3 are the largest that fit. "
        "What is gradient_accumulation_steps?",
        difficulty=1,
        minutes=2,
        hints=(
            "The global batch counts all GPUs and all micro-batches of a step.",
            "96 = 3 × 4 × gradient_accumulation_steps.",
        ),
        check=Number(
            96 // (3 * 4),
            unit="steps",
            mistakes=[
                Mistake(32, "That is on one GPU: four share the batch."),
                Mistake(24, "That is each GPU's part of the batch, in samples."),
                Mistake(12, "That is what one micro-batch of all GPUs has."),
            ],
            right="memory follows the 3, learning the 96.",
        ),
    ),
    Exercise(
        "08.3",
        "Write `seconds(operations, written, kernels, peak, bandwidth)`: the chapter's roofline of one micro-batch, with "
        f"U = {UTILISATION}, V = {BANDWIDTH} and τ = {LAUNCH * 1e6:.2f} µs.",
        difficulty=2,
        minutes=6,
        hints=("Three terms, added up.", "A byte written stands for three that move."),
        check=Function(
            seconds,
            cases=STEPS,
            unit="s",
            mistakes=[
                Mistake(
                    lambda operations, written, kernels, peak, bandwidth: max(
                        operations / (UTILISATION * peak),
                        TRANSFERS * written / (BANDWIDTH * bandwidth),
                        kernels * LAUNCH,
                    ),
                    "Kernels run one after the other: their times add up.",
                ),
                Mistake(
                    lambda operations, written, kernels, peak, bandwidth: (
                        operations / (UTILISATION * peak) + written / (BANDWIDTH * bandwidth) + kernels * LAUNCH
                    ),
                    "What an operator writes it made of what it read: three bytes move for one written.",
                ),
                Mistake(
                    lambda operations, written, kernels, peak, bandwidth: (
                        operations / peak + TRANSFERS * written / bandwidth + kernels * LAUNCH
                    ),
                    "No card reaches its peak: U and V are the parts that runs did reach.",
                ),
            ],
            right="three terms: the largest says what to change.",
        ),
    ),
    Exercise(
        "08.4",
        f"{TRIED} does not fit an RTX 4070 by the upper end of its process. Which part of its peak is the largest, "
        "and so the first to look at? Answer 'parameters', 'gradients', 'optimizer states', 'activations' or 'temporaries'.",
        difficulty=2,
        minutes=4,
        hints=(
            "Weights, gradients and states are 2, 2 and 4 bytes a parameter.",
            "predict(recipe, gpu='RTX 4070').peak.",
        ),
        check=Choice(
            largest_part,
            options={
                "parameters": "They are 2 bytes each; something is twice as large.",
                "gradients": "They are as large as the weights; something is twice as large.",
                "optimizer states": "AdamW keeps two numbers for each parameter.",
                "activations": "Those of one sample of 256 tokens are small.",
                "temporaries": "The fused kernel makes no copy of the parameters' size.",
            },
        ),
    ),
    Exercise(
        "08.5",
        "Llama 3.1 8B is trained in full in bf16 by ZeRO stage 3 on 8 GPUs, 4 micro-batches a step. How many GiB does each "
        "GPU send in a step?",
        difficulty=3,
        minutes=8,
        hints=(
            "For each micro-batch weights are gathered for forward and for backward, and gradients divided.",
            "A ring sends 7/8 of the whole each time: 4 × 3 × 7/8 × 2 bytes × parameters.",
        ),
        check=Number(
            sent,
            unit="GiB",
            tolerance=0.01,
            mistakes=[
                Mistake(lambda: sent(rounds=2, micro=1), "That is DDP's all-reduce, once a step."),
                Mistake(lambda: sent(micro=1), "That is one micro-batch: stage 3 gathers and divides in each."),
                Mistake(lambda: sent(rounds=2), "Weights are gathered twice, for forward and for backward."),
                Mistake(lambda: sent(ring=False), "A rank has an eighth already: 7/8 of it moves."),
            ],
            right="which is why a link's bandwidth decides what sharding costs.",
        ),
    ),
    Exercise(
        "08.6",
        f"Without asking `plan`: write a Recipe that trains all of {MODEL} at {TOKENS:,} tokens with a global batch of "
        f"{BATCH} on an {CARD}. The upper end of its process has to be within the usable "
        f"{format_bytes(usable_memory(find_gpu(CARD)), digits=2)}, and by step_time it may take {SLOWER} times as long as "
        "the fastest that fits, no more.",
        difficulty=4,
        minutes=15,
        hints=(
            "predict(recipe, gpu='RTX 4070').process.high is what has to fit; look at the largest part of the peak.",
            "Weights in bf16, states outside of the card, and then: checkpointing or a small micro-batch?",
        ),
        check=Judge(
            _good,
            rights=lambda: [_fitting(), _fitting(optim="paged_lion_8bit")],
            wrongs=lambda: [
                _fitting(precision="bf16-mixed"),
                _fitting(optim="adamw_torch"),
                _fitting(gradient_checkpointing=True, attn_implementation="eager"),
                _fitting(gradient_accumulation_steps=1),
                _fitting(lora=LoRA()),
                _fitting(seq_len=512),
                "a plan",
            ],
        ),
    ),
]
