"""Exercises of chapter 05, LoRA."""

from math import sqrt
from typing import Any

from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import LoRA, Recipe
from vramlab.report.report import MiB, format_bytes

from ..answers import NOT_ANSWERED, Function, Judge, Mistake, Number, Table, Verdict
from ..exercises import Exercise

LLAMA = Recipe("llama-3.1-8b").shape
POLYGLOT = Recipe("polyglot-ko-1.3b").shape
CARD = "RTX 4090"
MATRICES = [
    dict(inputs=2048, outputs=6144, r=8),
    dict(inputs=4096, outputs=4096, r=1),
    dict(inputs=4096, outputs=14336, r=64),
    dict(inputs=256, outputs=704, r=16),
]


def trained(shape, r: int, targets: Any) -> int:
    """Parameters of rank-r adapters."""
    return sum(r * (inputs + outputs) for _, inputs, outputs in shape.lora_targets(targets))


def states(width: int, copies: int = 3, targets: Any = None, r: int = 8) -> float:
    """MiB of `copies` numbers of `width` bytes for each adapter parameter of POLYGLOT."""
    return copies * width * trained(POLYGLOT, r, targets) / MiB


def break_even(inputs: int, outputs: int) -> float:
    """The rank at which A and B have as many numbers as the matrix."""
    return inputs * outputs / (inputs + outputs)


def shares() -> dict[str, float]:
    """By which factor the update counts."""
    return {"r=8, alpha=32": 4.0, "r=64, alpha=32": 0.5, "r=64, alpha=32, rslora": 32 / sqrt(64)}


def adapters_beside(width: int, r: int = 16) -> int:
    """How many all-linear adapters of Llama 3.1 8B take no more than its bf16 weights."""
    return 2 * LLAMA.num_parameters // (width * trained(LLAMA, r, "all-linear"))


def _merge(function: Any) -> Verdict:
    """Whether merge(weight, A, B, alpha) gives the weight with which one linear layer does what base and adapter did."""
    import torch

    if not callable(function):
        return Verdict(False, f"A function was expected, not a {type(function).__name__}.")
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs, r, alpha in ((6, 4, 2, 8), (5, 9, 1, 1), (8, 8, 3, 16)):
        weight, a, b = (torch.randn(s, generator=generator) for s in ((outputs, inputs), (r, inputs), (outputs, r)))
        before = weight.clone()
        try:
            merged = function(weight, a, b, alpha)
        except Exception as error:
            return Verdict(False, f"Your function fails with {type(error).__name__}: {error}.")
        if merged is None or merged is ...:
            return NOT_ANSWERED
        case = f"inputs={inputs}, outputs={outputs}, r={r}, alpha={alpha}"
        if not isinstance(merged, torch.Tensor) or merged.shape != weight.shape:
            return Verdict(False, f"A matrix of {outputs} × {inputs} was expected, as the weight is: B · A, not A · B.")
        if not torch.equal(weight, before):
            return Verdict(
                False, "Your function changes the weight that it was given: the base is shared, so make a new one."
            )
        delta = b @ a
        known = {
            "Without alpha / r the update has the wrong size.": weight + delta,
            "The factor is alpha / r, not alpha.": weight + alpha * delta,
            "The update is added to the weight; yours is the update alone.": alpha / r * delta,
            "The update is added, not taken away.": weight - alpha / r * delta,
        }
        if not torch.allclose(merged, weight + alpha / r * delta, atol=1e-5):
            said = next(
                (t for t, wrong in known.items() if alpha != r and torch.allclose(merged, wrong, atol=1e-5)), ""
            )
            return Verdict(False, said or f"Not right for {case}: the outputs differ.")
    return Verdict(True, "Right: after merging a layer costs nothing more than before.")


def _merges(factor: str):
    """Right and wrong solutions to try `_merge` on."""
    return {
        "right": lambda w, a, b, alpha: w + alpha / a.shape[0] * b @ a,
        "transposed": lambda w, a, b, alpha: w.T + alpha / a.shape[0] * (b @ a).T,
        "no factor": lambda w, a, b, alpha: w + b @ a,
        "alpha": lambda w, a, b, alpha: w + alpha * b @ a,
        "alone": lambda w, a, b, alpha: alpha / a.shape[0] * b @ a,
        "minus": lambda w, a, b, alpha: w - alpha / a.shape[0] * b @ a,
        "in place": lambda w, a, b, alpha: w.add_(alpha / a.shape[0] * b @ a),
    }[factor]


def _fits(answer: Any) -> Verdict:
    """Whether a recipe trains adapters of Mistral 7B at 4,096 tokens on the card, by predict."""
    if not isinstance(answer, Recipe):
        return Verdict(False, f"A Recipe was expected, not a {type(answer).__name__}.")
    if answer.name != "mistral-7b" or answer.num_layers is not None or answer.seq_len != 4096:
        return Verdict(False, "It has to be the whole of mistral-7b at 4,096 tokens.")
    if not answer.lora:
        return Verdict(False, "Adapters are to be trained: lora=LoRA(...).")
    if answer.quantization or answer.sharding:
        return Verdict(False, "Without quantization (that is chapter 06) and on one card.")
    if trained(answer.shape, answer.lora.r, answer.lora.target_modules) < trained(answer.shape, 16, "all-linear"):
        return Verdict(False, "The adapters are to be rank 16 or more in every linear layer.")
    card = find_gpu(CARD)
    report = predict(answer, gpu=card)
    need = (
        f"The process is likely to take {format_bytes(report.process.value)}, the card has {format_bytes(card.total)}"
    )
    if report.process.value <= card.total:
        return Verdict(True, f"Right. {need}.")
    most = max(report.peak.items(), key=lambda item: item[1])
    return Verdict(False, f"It does not fit. {need}; most of the peak is {most[0]}: {format_bytes(most[1])}.")


def _fitting(**changes: Any) -> Recipe:
    fields = dict(seq_len=4096, precision="bf16-true", gradient_checkpointing=True)
    return Recipe("mistral-7b", **{**fields, "lora": LoRA(r=16, target_modules="all-linear"), **changes})


EXERCISES = [
    Exercise(
        "05.1",
        "Write `lora_parameters(inputs, outputs, r)`: the trained numbers that LoRA adds to one linear layer.",
        difficulty=1,
        minutes=3,
        hints=("A and B are two matrices: how large is each?", "A is r × inputs, B is outputs × r."),
        check=Function(
            lambda inputs, outputs, r: r * (inputs + outputs),
            cases=MATRICES,
            unit="parameters",
            mistakes=[
                Mistake(lambda inputs, outputs, r: r * inputs, "That is A alone."),
                Mistake(lambda inputs, outputs, r: r * outputs, "That is B alone."),
                Mistake(
                    lambda inputs, outputs, r: inputs * outputs, "That is the frozen matrix, or B · A multiplied out."
                ),
                Mistake(lambda inputs, outputs, r: r * inputs * outputs, "A and B are added up, not multiplied."),
            ],
            right="linear in the rank and in the width, where the matrix is quadratic.",
        ),
    ),
    Exercise(
        "05.2",
        "At which rank do A and B have exactly as many numbers as B's 2,048 × 6,144 matrix itself?",
        difficulty=2,
        minutes=4,
        hints=("Set the two counts equal.", "r · (inputs + outputs) = inputs · outputs."),
        check=Number(
            lambda: break_even(2048, 6144),
            unit="rank",
            mistakes=[
                Mistake(2048, "That is the largest rank the matrix can have; A and B outgrow it before."),
                Mistake(lambda: break_even(2048, 2048), "That is for a square matrix of 2,048 × 2,048."),
                Mistake(6144, "That is the number of outputs."),
            ],
            right="past it LoRA trains more numbers than full fine-tuning, and still cannot do more.",
        ),
    ),
    Exercise(
        "05.3",
        "polyglot-ko-1.3b is adapted at r = 8 in `query_key_value`; PEFT keeps adapters in fp32. How many MiB "
        "do their gradients and AdamW states take together?",
        difficulty=2,
        minutes=5,
        hints=(
            "1,572,864 parameters; how many numbers for each, and how wide?",
            "One gradient and two states, 4 bytes each.",
        ),
        check=Number(
            lambda: states(4),
            unit="MiB",
            mistakes=[
                Mistake(lambda: states(2), "That is with fp16 adapters, as B's were; PEFT makes them fp32 today."),
                Mistake(
                    lambda: states(4, copies=4),
                    "The adapters themselves are in it; only gradients and states were asked.",
                ),
                Mistake(lambda: states(4, copies=2), "Those are the states alone."),
                Mistake(lambda: 3 * 2 * POLYGLOT.num_parameters / MiB, "That is full fine-tuning."),
            ],
            right="full fine-tuning needs over four hundred times as much.",
        ),
    ),
    Exercise(
        "05.4",
        "By which factor is B · A · x multiplied before it is added, in PEFT? Answer with a dictionary whose keys are "
        f"{', '.join(map(repr, shares()))}. (`use_rslora` divides by the root of r; Kalajdzievski 2023.)",
        difficulty=1,
        minutes=3,
        hints=("The factor is alpha / r.", "rslora: alpha / √r."),
        check=Table(
            shares,
            unit="×",
            mistakes=[
                Mistake({"r=64, alpha=32, rslora": 0.5}, "rslora divides by √r."),
                Mistake({"r=8, alpha=32": 0.25, "r=64, alpha=32": 2.0}, "Upside down: alpha / r."),
                Mistake({"r=8, alpha=32": 256.0, "r=64, alpha=32": 2048.0}, "Divided by r, not multiplied."),
            ],
            right="so that with a fixed alpha one learning rate serves several ranks.",
        ),
    ),
    Exercise(
        "05.5",
        "Write `merge(weight, A, B, alpha)` for tensors: the one weight that gives what the frozen weight and the adapter "
        "give together. A is r × inputs, B is outputs × r.",
        difficulty=2,
        minutes=6,
        hints=("W x + alpha / r · B A x = (…) x.", "r is A.shape[0]; do not change the weight that was given."),
        check=Judge(
            _merge,
            rights=lambda: [_merges("right")],
            wrongs=lambda: [_merges(n) for n in ("transposed", "no factor", "alpha", "alone", "minus", "in place")],
        ),
    ),
    Exercise(
        "05.6",
        "One base, many customers: how many rank-16 adapters of every linear layer of Llama 3.1 8B, stored in bf16, take no "
        "more memory than the base's own bf16 weights?",
        difficulty=3,
        minutes=6,
        hints=(
            "Llama's linear layers: read_shape('llama-3.1-8b').lora_targets('all-linear').",
            "Both are bf16, so the bytes cancel: all parameters over one adapter's, rounded down.",
        ),
        check=Number(
            lambda: adapters_beside(2),
            unit="adapters",
            tolerance=0.001,
            mistakes=[
                Mistake(lambda: adapters_beside(4), "That is with fp32 adapters."),
                Mistake(lambda: adapters_beside(2, 8), "That is rank 8."),
                Mistake(
                    lambda: LLAMA.num_parameters // trained(LLAMA, 16, None), "That is with queries and values alone."
                ),
            ],
            right="that is what makes serving many fine-tuned models cheap.",
        ),
    ),
    Exercise(
        "05.7",
        f"Write a Recipe that trains adapters of rank 16 or more in every linear layer of mistral-7b at 4,096 tokens on one "
        f"{CARD} (24 GB). By predict, what its process is likely to take has to fit. No quantization.",
        difficulty=4,
        minutes=12,
        hints=(
            "The weights alone take 13.5 GiB in 16 bits. What is the largest part of the rest?",
            "Activations: the fp32 copies of every adapted layer's input. What trades them for arithmetic?",
        ),
        check=Judge(
            _fits,
            rights=lambda: [_fitting(), _fitting(lora=LoRA(r=32, target_modules="all-linear"))],
            wrongs=lambda: [
                _fitting(gradient_checkpointing=False),
                _fitting(precision="fp32"),
                _fitting(lora=LoRA(r=16)),
                _fitting(lora=None),
                _fitting(seq_len=2048),
                "LoRA",
            ],
        ),
    ),
]
