"""Exercises of chapter 04, ZeRO and FSDP."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.options import Sharding
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import format_bytes

from ..answers import Function, Judge, Mistake, Number, Table, Verdict
from ..exercises import Exercise
from ..topology import bytes_sent
from ..zero_paper import model_states

LLAMA = Recipe("llama-3.1-8b").shape
CARD, RANKS = "RTX 4090", 8
WAYS = {"DDP": 1.0, "ZeRO-2": 1.0, "ZeRO-3": 1.5}
LAYERS = [
    dict(hidden=4096, intermediate=14336, heads=32, kv_heads=8, n=8),
    dict(hidden=2048, intermediate=8192, heads=32, kv_heads=8, n=2),
    dict(hidden=256, intermediate=704, heads=4, kv_heads=4, n=4),
    dict(hidden=3072, intermediate=8192, heads=24, kv_heads=8, n=1),
]
SIZES = [
    dict(sizes=[5, 4, 3, 3, 3], n=2),
    dict(sizes=[1, 2, 3, 9, 8, 2, 7], n=3),
    dict(sizes=[128_256 * 2048, *[8192 * 2048] * 12, *[2048] * 9], n=4),
    dict(sizes=[6, 10, 6], n=2),
]


def cards_for(parameters: float, memory: float, stage: int = 3, per_parameter: int = 16) -> int:
    """The fewest ranks of `memory` bytes that hold the paper's model states at stage 3."""
    return ceil(per_parameter * parameters / memory)


def gigabytes() -> dict[str, float]:
    """GB that each of 8 ranks sends a step for Llama 3.1 8B in bf16, by ring."""
    return {way: bytes_sent(way, 2 * LLAMA.num_parameters, RANKS) / 1e9 for way in WAYS}


def micro_batches(stages: int, waiting: float) -> int:
    """The fewest micro-batches with which a pipeline waits for no more than `waiting` of the time."""
    return ceil((stages - 1) * (1 - waiting) / waiting - 1e-9)


def tensor_share(hidden: int, intermediate: int, heads: int, kv_heads: int, n: int) -> int:
    """Parameters of one layer of a Llama on one of `n` tensor-parallel ranks: matrices cut, norms whole."""
    width = hidden // heads
    attention = 2 * hidden * heads * width + 2 * hidden * kv_heads * width
    return (attention + 3 * hidden * intermediate) // n + 2 * hidden


def dealt(sizes: Sequence[int], n: int, largest_first: bool = True) -> int:
    """What the fullest of `n` ranks gets if each parameter goes to the rank that has least so far."""
    held = [0] * n
    for size in sorted(sizes, reverse=True) if largest_first else sizes:
        held[held.index(min(held))] += size
    return max(held)


def in_turn(sizes: Sequence[int], n: int) -> int:
    """The same if they are dealt like cards."""
    return max(sum(sizes[rank::n]) for rank in range(n))


def _fits(answer: Any) -> Verdict:
    """Whether a recipe trains all of Llama 3.1 8B on eight cards, by predict."""
    if not isinstance(answer, Recipe):
        return Verdict(False, f"A Recipe was expected, not a {type(answer).__name__}.")
    if answer.name != "llama-3.1-8b" or answer.num_layers is not None or answer.seq_len != 2048:
        return Verdict(False, "It has to be the whole of llama-3.1-8b at 2,048 tokens.")
    if answer.lora or answer.quantization:
        return Verdict(False, "All parameters are to be trained: no LoRA, no quantization.")
    if answer.precision.endswith("-true"):
        return Verdict(False, "Master weights in fp32 are wanted, so a '-mixed' precision or fp32.")
    if not answer.optim.startswith("adamw_torch"):
        return Verdict(False, "The optimizer is to be adamw_torch or adamw_torch_fused.")
    if not answer.sharding or answer.sharding.world_size != RANKS:
        return Verdict(False, f"There are {RANKS} cards: sharding=Sharding(…, world_size={RANKS}).")
    if answer.sharding.offload:
        return Verdict(False, "Without offloading.")
    card = find_gpu(CARD)
    report = predict(answer, gpu=card)
    need = f"A rank's process is likely to take {format_bytes(report.process.value)}, the card has"
    need += f" {format_bytes(card.total)}"
    if report.process.value <= card.total:
        return Verdict(True, f"Right. {need}.")
    most = max(report.peak.items(), key=lambda item: item[1])
    return Verdict(False, f"It does not fit. {need}; most of the peak is {most[0]}: {format_bytes(most[1])}.")


def _fitting(**changes: Any) -> Recipe:
    fields = dict(seq_len=2048, precision="bf16-mixed", gradient_checkpointing=True, optim="adamw_torch_fused")
    return Recipe("llama-3.1-8b", **{**fields, "sharding": Sharding(3, RANKS), **changes})


EXERCISES = [
    Exercise(
        "04.1",
        "Write `model_states(parameters, world_size, stage)`: the bytes of parameters, gradients and optimizer states on one "
        "rank by the ZeRO paper's count (fp16 weights and gradients, 12 bytes of states), for stages 0 to 3.",
        difficulty=1,
        minutes=5,
        hints=(
            "2 + 2 + 12 bytes a parameter; which of the three does each stage divide?",
            "Stage 1 divides the 12, stage 2 also the gradients' 2, stage 3 all.",
        ),
        check=Function(
            model_states,
            cases=[dict(parameters=7.5e9, world_size=n, stage=stage) for n in (1, 64) for stage in range(4)],
            unit="B",
            mistakes=[
                Mistake(
                    lambda parameters, world_size, stage: 16 * parameters / (world_size if stage else 1),
                    "That divides everything from stage 1 on.",
                ),
                Mistake(
                    lambda parameters, world_size, stage: model_states(parameters, world_size, max(stage - 1, 0)),
                    "One stage too late: stage 1 divides the optimizer states already.",
                ),
                Mistake(
                    lambda parameters, world_size, stage: (
                        model_states(parameters, world_size, stage) - 4 * parameters / (world_size if stage else 1)
                    ),
                    "The states are 12 bytes: the fp32 copy of the weights is one of them.",
                ),
            ],
            right="that is the paper's figure 1, and its table 1.",
        ),
    ),
    Exercise(
        "04.2",
        "How many GPUs, at least, hold the model states of 13 billion parameters at stage 3, by the same count, if each may "
        "give 20 GB (10⁹ bytes) to them?",
        difficulty=1,
        minutes=3,
        hints=("16 bytes a parameter, shared by all.", "208 GB over 20 GB, rounded up."),
        check=Number(
            lambda: cards_for(13e9, 20e9),
            unit="GPUs",
            mistakes=[
                Mistake(10, "Ten hold 200 GB; 208 are needed."),
                Mistake(lambda: cards_for(13e9, 20e9, per_parameter=12), "Those are the optimizer states alone."),
                Mistake(lambda: cards_for(13e9, 20e9, per_parameter=2), "Those are the weights alone."),
            ],
            right="and then come activations and what is gathered at a time.",
        ),
    ),
    Exercise(
        "04.3",
        "GB (10⁹ bytes) that each of 8 ranks *sends* in a step of Llama 3.1 8B (8,030,261,248 parameters), everything in "
        f"bf16, by a ring. Answer with a dictionary whose keys are {', '.join(map(repr, WAYS))}.",
        difficulty=2,
        minutes=6,
        hints=(
            "A ring sends (N − 1)/N of the tensor for a reduce-scatter or an all-gather.",
            "An all-reduce is both; stage 3 gathers once more, for its backward pass.",
        ),
        check=Table(
            gigabytes,
            unit="GB sent",
            mistakes=[
                Mistake(
                    lambda: {way: factor * 4 * LLAMA.num_parameters / 1e9 for way, factor in WAYS.items()},
                    "That is the volume; a rank already has an N-th of it and sends (N − 1)/N.",
                ),
                Mistake(
                    lambda: {way: 2 * size for way, size in gigabytes().items()},
                    "That is with 4 bytes a parameter.",
                ),
                Mistake(lambda: {"ZeRO-3": gigabytes()["DDP"]}, "Stage 3 gathers the parameters twice."),
                Mistake(lambda: {"ZeRO-2": gigabytes()["DDP"] / 2}, "Stage 2 also has to gather parameters."),
            ],
            right="stage 3 costs half as much again, stages 1 and 2 nothing.",
        ),
    ),
    Exercise(
        "04.4",
        "A pipeline of 8 stages should wait no more than a tenth of the time. How many micro-batches does it need at least?",
        difficulty=2,
        minutes=4,
        hints=("The bubble is (N − 1)/(m + N − 1).", "7/(m + 7) ≤ 1/10."),
        check=Number(
            lambda: micro_batches(8, 0.1),
            unit="micro-batches",
            mistakes=[
                Mistake(70, "m + 7 is 70, not m."),
                Mistake(72, "There are N − 1 = 7 slots to wait for, not 8."),
                Mistake(lambda: micro_batches(8, 0.5), "That is a bubble of one half."),
            ],
            right="eight stages want large batches; 1F1B keeps their activations at eight micro-batches' worth.",
        ),
    ),
    Exercise(
        "04.5",
        "Write `tensor_share(hidden, intermediate, heads, kv_heads, n)`: the parameters of one Llama layer that one of n "
        "tensor-parallel ranks holds. Attention: q and o are hidden × hidden, k and v hidden × (kv_heads · hidden / heads). "
        "Feed-forward: three matrices of hidden × intermediate. Two norms of `hidden`. No biases.",
        difficulty=3,
        minutes=8,
        hints=(
            "Every matrix is cut in n; what about a norm?",
            "A norm needs all channels of each token, so every rank has both, whole.",
        ),
        check=Function(
            tensor_share,
            cases=LAYERS,
            unit="parameters",
            tolerance=1e-6,
            mistakes=[
                Mistake(
                    lambda hidden, intermediate, heads, kv_heads, n: (
                        tensor_share(hidden, intermediate, heads, kv_heads, n) - 2 * hidden + 2 * hidden // n
                    ),
                    "Norms are not cut.",
                ),
                Mistake(
                    lambda hidden, intermediate, heads, kv_heads, n: tensor_share(
                        hidden, intermediate, heads, heads, n
                    ),
                    "k and v have kv_heads heads only.",
                ),
                Mistake(
                    lambda hidden, intermediate, heads, kv_heads, n: tensor_share(
                        hidden, intermediate, heads, kv_heads, 1
                    ),
                    "That is the whole layer.",
                ),
                Mistake(
                    lambda hidden, intermediate, heads, kv_heads, n: (
                        tensor_share(hidden, intermediate, heads, kv_heads, n) - hidden * intermediate // n
                    ),
                    "A Llama's feed-forward block has three matrices: gate, up and down.",
                ),
            ],
            right="the norms are all that a rank has in common with the others.",
        ),
    ),
    Exercise(
        "04.6",
        "`ZeroRedundancyOptimizer` does not cut parameters: it deals them out whole, the largest first, each to the "
        "rank that has fewest elements so far (the first such). Write `dealt(sizes, n)`: the elements of the fullest rank.",
        difficulty=3,
        minutes=8,
        hints=(
            "Sort, then keep a list of what each rank has.",
            "held[held.index(min(held))] += size, for each size from the largest down; then the maximum.",
        ),
        check=Function(
            dealt,
            cases=SIZES,
            unit="elements",
            tolerance=1e-6,
            mistakes=[
                Mistake(lambda sizes, n: sum(sizes) / n, "That would be an even share; parameters are not cut."),
                Mistake(lambda sizes, n: dealt(sizes, n, largest_first=False), "The largest go first."),
                Mistake(in_turn, "Not in turn: each goes to the rank that has least."),
                Mistake(lambda sizes, n: max(sizes), "That is the largest parameter; its rank may get others too."),
            ],
            right="one embedding can be larger than a fair share, and then stage 1 saves less than the formula says.",
        ),
    ),
    Exercise(
        "04.7",
        f"Write a Recipe that trains all parameters of llama-3.1-8b at 2,048 tokens on {RANKS} × {CARD} (24 GB each), with "
        "AdamW and fp32 master weights, without offloading. By predict, what a rank's process is likely to take has to fit.",
        difficulty=4,
        minutes=12,
        hints=(
            "16 bytes a parameter are 120 GiB; eight cards have 190. Which stage divides all of them?",
            "FSDP stage 3, bf16-mixed, checkpointing; and look at the step's own copies: which AdamW needs none?",
        ),
        check=Judge(
            _fits,
            rights=lambda: [_fitting()],
            wrongs=lambda: [
                _fitting(sharding=None),
                _fitting(sharding=Sharding(2, RANKS)),
                _fitting(sharding=Sharding(0, RANKS, "ddp")),
                _fitting(sharding=Sharding(3, 16)),
                _fitting(sharding=Sharding(3, RANKS, offload="parameters")),
                _fitting(batch_size=4, gradient_checkpointing=False),
                _fitting(precision="bf16-true"),
                _fitting(optim="sgd"),
                _fitting(seq_len=512),
                "ZeRO-3",
            ],
        ),
    ),
]
