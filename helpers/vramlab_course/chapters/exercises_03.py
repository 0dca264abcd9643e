"""Exercises of chapter 03, tricks on one GPU."""

from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import KiB, format_bytes

from ..answers import Choice, Function, Judge, Mistake, Number, Verdict
from ..exercises import Exercise

CARD = "RTX 3090"
START = Recipe("gpt2-large", batch_size=16, seq_len=1024)
WORDS = [dict(here=100, whole=400, parts=4), dict(here=30, whole=300, parts=3), dict(here=512, whole=640, parts=2)]
GEMMS = [dict(rows=129, columns=256), dict(rows=1000, columns=1000), dict(rows=4096, columns=50257)]
STACKS = [
    dict(layers=12, every=1, given=10, kept=170),
    dict(layers=12, every=3, given=10, kept=170),
    dict(layers=32, every=4, given=8, kept=8),
    dict(layers=48, every=5, given=64, kept=900),
]
SAMPLES, MICRO, ACCUMULATED = 10_000, 4, 16
WIDTHS = (4096, 11008)


def updates(samples: int = SAMPLES) -> int:
    """Optimizer steps in an epoch; the last accumulation is a shorter one."""
    batches = -(-samples // MICRO)
    return -(-batches // ACCUMULATED)


def weight(here: int, whole: int, parts: int) -> float:
    """What a micro-batch's mean loss is multiplied by, so that the sum is the whole batch's mean."""
    return here / whole


def used(rows: int, columns: int, tile: int = 128) -> float:
    """The part of the computed tiles that is asked for."""

    def padded(n: int) -> int:
        return -(-n // tile) * tile

    return rows * columns / (padded(rows) * padded(columns))


def at_the_peak(layers: int, every: int, given: int, kept: int) -> int:
    """Checkpoints of all segments, and the activations of the longest one."""
    return -(-layers // every) * given + every * kept


def fits(answer: Recipe) -> Verdict:
    """Whether a recipe trains GPT-2 large on 32 sequences a step, on an RTX 3090, without recomputing anything."""
    if not isinstance(answer, Recipe):
        return Verdict(False, f"A Recipe was expected, not a {type(answer).__name__}.")
    if answer.name != "gpt2-large" or answer.num_layers is not None or answer.seq_len != 1024:
        return Verdict(False, "It has to be the whole of gpt2-large at 1,024 tokens.")
    if answer.lora or answer.quantization or answer.sharding or answer.loop.name != "trainer":
        return Verdict(False, "All weights, on this one card, by the Trainer: no LoRA, quantization, sharding.")
    if answer.gradient_checkpointing:
        return Verdict(False, "Checkpointing computes everything twice: this time without it.")
    if answer.precision.endswith("-true"):
        return Verdict(False, "The weights stay in fp32: take a precision that ends in '-mixed', or fp32 or tf32.")
    if answer.batch_size * answer.gradient_accumulation_steps != 32:
        return Verdict(False, "A step has to see 32 sequences: batch_size × gradient_accumulation_steps.")
    card = find_gpu(CARD)
    report = predict(answer, gpu=CARD)
    need = f"the process is likely to take {format_bytes(report.process.value)} of {format_bytes(card.total)}"
    if report.process.value <= card.total:
        return Verdict(True, f"Right: {need}.")
    most = max(report.peak.items(), key=lambda item: item[1])
    said = f"most of the peak, in {report.peak_phase}, is {most[0].replace('_', ' ')}: {format_bytes(most[1])}"
    return Verdict(False, f"It does not fit: {need}; {said}.")


def _fitting(**changes) -> Recipe:
    fields = dict(batch_size=1, gradient_accumulation_steps=32, precision="bf16-mixed", optim="adamw_bnb_8bit")
    return START.replace(**{**fields, **changes})


EXERCISES = [
    Exercise(
        "03.1",
        f"You have {SAMPLES:,} sequences, per_device_train_batch_size={MICRO} and gradient_accumulation_steps={ACCUMULATED}, "
        "on one GPU. How often does the Trainer update the weights in an epoch?",
        difficulty=1,
        minutes=4,
        hints=("First the micro-batches of an epoch.", "2,500 of them; what becomes of those left over at the end?"),
        check=Number(
            updates,
            unit="updates",
            tolerance=0.001,
            mistakes=[
                Mistake(lambda: SAMPLES // MICRO, "Those are the micro-batches: sixteen of them make an update."),
                Mistake(
                    lambda: SAMPLES // MICRO // ACCUMULATED,
                    "Four micro-batches are left at the end, and the Trainer makes an update of them too.",
                ),
                Mistake(lambda: SAMPLES // ACCUMULATED, "Sixteen is the number of micro-batches, not of sequences."),
            ],
            right="the last update sees fewer sequences than the others.",
        ),
    ),
    Exercise(
        "03.2",
        "Sequences differ in length. Write `weight(here, whole, parts)`: by what must a micro-batch's mean loss be "
        "multiplied so that the accumulated gradients are those of the whole batch? It has `here` tokens, the whole "
        "batch `whole`, in `parts` micro-batches.",
        difficulty=2,
        minutes=6,
        hints=(
            "The whole batch's loss is the sum over all tokens, divided by their number.",
            "A micro-batch's mean is its sum divided by `here`: multiply by that, divide by what it should have been.",
        ),
        check=Function(
            weight,
            cases=WORDS,
            unit="×",
            mistakes=[
                Mistake(
                    lambda here, whole, parts: 1 / parts, "That is the mean of means: a short sequence counts too much."
                ),
                Mistake(
                    lambda here, whole, parts: whole / here, "Upside down: a part with more tokens has to count more."
                ),
                Mistake(lambda here, whole, parts: 1 / whole, "The mean loss was divided by `here` already."),
            ],
            right="with equal lengths it is 1 / parts.",
        ),
    ),
    Exercise(
        "03.3",
        "Write `used(rows, columns)`: which part of what a GPU computes is asked for, when a matrix product's result of "
        "rows × columns is made of tiles of 128 × 128?",
        difficulty=2,
        minutes=5,
        hints=("Count whole tiles in each direction.", "-(-n // 128) rounds n / 128 up."),
        check=Function(
            used,
            cases=GEMMS,
            unit="part",
            tolerance=0.0002,
            mistakes=[
                Mistake(lambda rows, columns: used(rows, 128), "The columns come in tiles too."),
                Mistake(lambda rows, columns: used(128, columns), "The rows come in tiles too."),
                Mistake(lambda rows, columns: 1 / used(rows, columns), "That is how much too much is computed."),
            ],
            right="GPT-2's 50,257 tokens are 47 columns short of whole tiles, which costs next to nothing.",
        ),
    ),
    Exercise(
        "03.4",
        "Write `at_the_peak(layers, every, given, kept)`: bytes of activations at the highest moment of the backward pass "
        "when a checkpoint is set every `every` layers. A layer is given `given` bytes and keeps `kept` of its own.",
        difficulty=3,
        minutes=8,
        hints=(
            "Two terms: what is kept of every segment, and what is recomputed of one.",
            "The number of segments, rounded up, times `given`; and one segment's layers times `kept`.",
        ),
        check=Function(
            at_the_peak,
            cases=STACKS,
            mistakes=[
                Mistake(
                    lambda layers, every, given, kept: -(-layers // every) * given,
                    "That is what forward leaves. In backward one segment after the other is recomputed on top of it.",
                ),
                Mistake(
                    lambda layers, every, given, kept: layers * given + every * kept,
                    "A checkpoint is kept for every segment, not for every layer.",
                ),
                Mistake(
                    lambda layers, every, given, kept: -(-layers // every) * given + kept,
                    "A segment is recomputed as a whole: all its layers are alive together.",
                ),
            ],
            right="its smallest value over `every` is near √(layers · given / kept).",
        ),
    ),
    Exercise(
        "03.5",
        "gpt2 at batch 1 and 512 tokens, AdamW fused. fp16 mixed precision in place of fp32: is the peak 'lower', 'the "
        "same' or 'higher'?",
        difficulty=2,
        minutes=4,
        hints=(
            "Autocast makes 16-bit copies of the weights, and halves most activations.",
            "Compare: 2 bytes a parameter more, against half of the activations of only 512 tokens.",
        ),
        check=Choice(
            lambda: mixed_against_fp32(batch_size=1, optim="adamw_torch_fused"),
            {
                "lower": "so few tokens have few activations to halve.",
                "the same": "that is so with AdamW's foreach step, whose copy of the parameters is the peak either way.",
                "higher": "the 16-bit copies of the weights take more than halved activations save.",
            },
        ),
    ),
    Exercise(
        "03.6",
        f"A weight of {WIDTHS[0]:,} × {WIDTHS[1]:,} numbers is trained in fp32. How many KiB of averages does Adafactor keep "
        "for it?",
        difficulty=2,
        minutes=4,
        hints=("One average for each row, one for each column.", "Each is an fp32 number."),
        check=Number(
            lambda: 4 * sum(WIDTHS) / KiB,
            unit="KiB",
            mistakes=[
                Mistake(
                    lambda: 4 * WIDTHS[0] * WIDTHS[1] / KiB, "That is one for each element, as AdamW's second average."
                ),
                Mistake(lambda: 4 * max(WIDTHS) / KiB, "Both directions have averages."),
            ],
            right="AdamW keeps 344 MiB for the same weight.",
        ),
    ),
    Exercise(
        "03.7",
        f"Write a Recipe that trains gpt2-large with the Trainer on an {CARD} (24 GB): 1,024 tokens, 32 sequences a step, "
        "weights in fp32, no checkpointing. What its process is likely to take, by predict, has to fit. "
        f"At batch {START.batch_size} without any trick it needs several times as much.",
        difficulty=4,
        minutes=12,
        hints=(
            "Which of this chapter's tricks lower activations, and which states? Only one costs nothing but time.",
            "A small micro-batch with accumulation, bf16-mixed, and 8-bit AdamW or Adafactor.",
        ),
        check=Judge(
            fits,
            rights=lambda: [_fitting(), _fitting(batch_size=2, gradient_accumulation_steps=16, optim="adafactor")],
            wrongs=lambda: [
                START.replace(gradient_accumulation_steps=2),
                _fitting(batch_size=8, gradient_accumulation_steps=4),
                _fitting(gradient_accumulation_steps=8),
                _fitting(gradient_checkpointing=True),
                _fitting(precision="bf16-true"),
                _fitting(seq_len=512),
                "bf16",
            ],
        ),
    ),
]


def mixed_against_fp32(**changes) -> str:
    """How fp16 mixed precision's peak stands to fp32's: "lower", "the same" (to one per cent) or "higher"."""
    start = Recipe("gpt2", seq_len=512, **changes)
    before, after = (predict(r, gpu="A100").peak.total for r in (start, start.replace(precision="fp16-mixed")))
    return "the same" if abs(after / before - 1) < 0.01 else "higher" if after > before else "lower"
