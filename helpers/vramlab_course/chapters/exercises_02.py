"""Exercises of chapter 02, memory decomposition."""

from vramlab.formulas.model_states import bytes_per_parameter
from vramlab.formulas.predict import predict
from vramlab.hardware.gpu import find_gpu
from vramlab.recipe.recipe import Recipe
from vramlab.report.report import GiB, format_bytes

from ..answers import Choice, Function, Judge, Mistake, Number, Table, Verdict
from ..exercises import Exercise

GPT2 = Recipe("gpt2").shape
LLAMA = Recipe("llama-3.1-8b").shape
POLYGLOT = Recipe("polyglot-ko-1.3b", batch_size=4, seq_len=256, precision="fp16-true")
CARD = "T4"
PER_PARAMETER = {
    "fp32 + AdamW": ("fp32", "adamw_torch"),
    "fp32 + SGD": ("fp32", "sgd"),
    "fp16-true + AdamW": ("fp16-true", "adamw_torch"),
    "fp32 + 8-bit AdamW": ("fp32", "adamw_bnb_8bit"),
    "bf16-true + 32-bit Lion": ("bf16-true", "lion_32bit"),
}
SHAPES = [
    dict(batch=1, tokens=128, hidden=768, heads=12, layers=12),
    dict(batch=8, tokens=1024, hidden=768, heads=12, layers=12),
    dict(batch=4, tokens=256, hidden=2048, heads=16, layers=24),
    dict(batch=2, tokens=2048, hidden=4096, heads=32, layers=32),
]


def per_parameter() -> dict[str, float]:
    """Bytes of weights, gradients and states a parameter for each line of the exercise."""
    return {name: bytes_per_parameter(*key)["kept"] for name, key in PER_PARAMETER.items()}


def activations(batch: int, tokens: int, hidden: int, heads: int, layers: int) -> int:
    """Korthikanti et al. 2022, equation 1, for all layers: bytes in 16 bits with dropout and written-out scores."""
    return layers * (34 * batch * tokens * hidden + 5 * batch * heads * tokens**2)


def linear_part(batch: int, tokens: int, hidden: int, heads: int, layers: int) -> int:
    """The same without the scores."""
    return layers * 34 * batch * tokens * hidden


def one_layer(batch: int, tokens: int, hidden: int, heads: int, layers: int) -> int:
    """The same for one layer."""
    return activations(batch, tokens, hidden, heads, 1)


def one_head(batch: int, tokens: int, hidden: int, heads: int, layers: int) -> int:
    """The same with the scores of a single head."""
    return activations(batch, tokens, hidden, 1, layers)


def logits(width: int, vocabulary: int = LLAMA.vocab_size) -> float:
    """GiB of logits of 4 × 2,048 tokens."""
    return 4 * 2048 * vocabulary * width / GiB


def kept_logits(tokens: int, steps: int = 10) -> float:
    """GiB of fp32 logits of 8 sequences of `tokens` tokens, kept for `steps` steps."""
    return steps * 8 * tokens * GPT2.vocab_size * 4 / GiB


def fits(answer: Recipe) -> Verdict:
    """Whether a recipe trains all of GPT-2 XL on a T4, as far as can be said beforehand."""
    if not isinstance(answer, Recipe):
        return Verdict(False, f"A Recipe was expected, not a {type(answer).__name__}.")
    if answer.name != "gpt2-xl" or answer.num_layers is not None or answer.seq_len != 1024:
        return Verdict(False, "It has to be the whole of gpt2-xl at 1,024 tokens.")
    if answer.lora or answer.quantization or answer.sharding:
        return Verdict(False, "All weights are to be trained, on this one card: no LoRA, no quantization, no sharding.")
    if answer.batch_size * answer.gradient_accumulation_steps < 4:
        return Verdict(False, "A step has to see four sequences or more: batch_size × gradient_accumulation_steps.")
    card = find_gpu(CARD)
    if why := card.why_not(answer.precision):
        return Verdict(False, f"{why}.")
    report = predict(answer, gpu=CARD)
    need = (
        f"The process is likely to take {format_bytes(report.process.value)}, the card has {format_bytes(card.total)}"
    )
    if report.process.value <= card.total:
        return Verdict(True, f"Right. {need}.")
    most = max(report.peak.items(), key=lambda item: item[1])
    said = f"most of the peak, in {report.peak_phase}, is {most[0].replace('_', ' ')}: {format_bytes(most[1])}"
    return Verdict(False, f"It does not fit. {need}; {said}.")


def _fitting(**changes) -> Recipe:
    fields = dict(batch_size=1, gradient_accumulation_steps=4, gradient_checkpointing=True, precision="fp16-true")
    return Recipe("gpt2-xl", **{"seq_len": 1024, **fields, "optim": "adamw_bnb_8bit", **changes})


EXERCISES = [
    Exercise(
        "02.1",
        f"GPT-2 has {GPT2.num_parameters:,} parameters. How many bytes do its weights, gradients and AdamW states "
        "take together in fp32, once the first step is done?",
        difficulty=1,
        minutes=3,
        hints=("How many numbers are kept for each parameter?", "Four, of 4 bytes each: AdamW keeps two of them."),
        check=Number(
            lambda: 16 * GPT2.num_parameters,
            mistakes=[
                Mistake(lambda: 12 * GPT2.num_parameters, "Three numbers a parameter: which of the four is missing?"),
                Mistake(lambda: 4 * GPT2.num_parameters, "Those are the weights alone."),
            ],
            right="4 N bytes of weights are 16 bytes a parameter in fp32.",
        ),
    ),
    Exercise(
        "02.2",
        "How many bytes a parameter are kept (weights, gradients and states, no copies that come and go) in each line? "
        f"Answer with a dictionary whose keys are {', '.join(map(repr, PER_PARAMETER))}. "
        "8-bit states come with one fp32 scale for every 256 numbers.",
        difficulty=2,
        minutes=6,
        hints=(
            "Three terms a line: width of the weight, width of the gradient, number of states × their width.",
            "torch's states have the weight's dtype; the name says the width of the others. Lion keeps one state.",
        ),
        check=Table(
            per_parameter,
            unit="bytes per parameter",
            tolerance=0.001,
            mistakes=[
                Mistake({"fp16-true + AdamW": 12}, "torch's AdamW keeps its states in the dtype of the weights: fp16."),
                Mistake({"fp16-true + AdamW": 16}, "'true' means fp16 everywhere: nothing is kept in fp32."),
                Mistake({"fp32 + 8-bit AdamW": 9}, "The 8-bit AdamW keeps two states, as the other one does."),
                Mistake({"fp32 + SGD": 12}, "SGD without momentum keeps no state at all."),
                Mistake({"bf16-true + 32-bit Lion": 12}, "Lion keeps one state, not two."),
            ],
            right="the number is that of its configuration, so never quote it alone.",
        ),
    ),
    Exercise(
        "02.3",
        "Write `activations(batch, tokens, hidden, heads, layers)`: the bytes that all layers keep for the backward "
        "pass by the formula of Korthikanti et al. (16-bit, dropout, attention written out).",
        difficulty=3,
        minutes=8,
        hints=(
            "Per layer there is a part that grows with tokens × hidden, and one that grows with heads × tokens².",
            "s·b·h · (34 + 5·a·s/h), times the number of layers; s tokens, b batch, h hidden, a heads.",
        ),
        check=Function(
            activations,
            cases=SHAPES,
            mistakes=[
                Mistake(linear_part, "The attention scores are missing: 5 bytes for each head and pair of tokens."),
                Mistake(one_layer, "That is one layer."),
                Mistake(one_head, "Each head has scores of its own."),
            ],
            right="linear in the batch, quadratic in the tokens.",
        ),
    ),
    Exercise(
        "02.4",
        f"Llama 3.1 8B has a vocabulary of {LLAMA.vocab_size:,}. In bf16, at batch 4 and 2,048 tokens, how many GiB do "
        "the logits take together with their fp32 copy, from which transformers computes the loss?",
        difficulty=2,
        minutes=5,
        hints=(
            "One logit for each token and each word of the vocabulary.",
            "Each is there twice: 2 bytes and 4 bytes.",
        ),
        check=Number(
            lambda: logits(6),
            unit="GiB",
            mistakes=[
                Mistake(lambda: logits(4), "That is the fp32 copy alone."),
                Mistake(lambda: logits(2), "Those are the bf16 logits alone."),
                Mistake(lambda: logits(6, LLAMA.hidden_size), "A logit a word: the vocabulary, not the hidden size."),
            ],
            right="the vocabulary can cost more than the layers.",
        ),
    ),
    Exercise(
        "02.5",
        f"In which phase is the peak of this recipe, on a {CARD}: {POLYGLOT}? Answer 'forward', 'backward' or 'step'.",
        difficulty=2,
        minutes=4,
        hints=(
            "Compare what comes on top of weights and states: activations in one phase, gradients in another.",
            "Gradients come to 2 bytes a parameter, and so does what AdamW's multi-tensor kernel adds. Activations "
            "at batch 4: print(predict(recipe)).",
        ),
        check=Choice(
            lambda: predict(POLYGLOT, gpu=CARD).peak_phase,
            {
                "forward": "at this batch the activations are smaller than the gradients that come later.",
                "backward": "as gradients come, activations go, and gradients stay for something larger.",
                "step": "gradients, states and one more copy of the weights' size, √v for all parameters at once.",
            },
        ),
    ),
    Exercise(
        "02.6",
        "A loop appends outputs.logits[:, -1], the last token's logits, to a list at each of 10 steps of GPT-2 "
        f"(batch 8, 512 tokens, fp32 logits, vocabulary {GPT2.vocab_size:,}). How many GiB does the list keep alive?",
        difficulty=3,
        minutes=6,
        hints=("Indexing with a slice makes a view.", "A view keeps its whole storage: the logits of every token."),
        check=Number(
            lambda: kept_logits(512),
            unit="GiB",
            mistakes=[
                Mistake(lambda: kept_logits(1), "That is what .clone() would keep: a view keeps its whole storage."),
                Mistake(lambda: kept_logits(512, 1), "That is one step, and the list has ten."),
            ],
            right="with .clone() it would be 512 times less.",
        ),
    ),
    Exercise(
        "02.7",
        f"Write a Recipe that trains all of gpt2-xl (1.56 billion parameters, no LoRA) at 1,024 tokens on a {CARD}, at "
        "least four sequences a step. By predict, what its process is likely to take has to fit. Any precision the "
        "card has, any optimizer.",
        difficulty=4,
        minutes=15,
        hints=(
            "Bytes a parameter first: which precision and optimizer leave room for activations?",
            "fp16-true and 8-bit states; then batch_size=1 with accumulation, and gradient_checkpointing.",
        ),
        check=Judge(
            fits,
            rights=lambda: [_fitting(), _fitting(gradient_accumulation_steps=8), _fitting(batch_size=2)],
            wrongs=lambda: [
                _fitting(precision="fp32", optim="adamw_torch"),
                _fitting(gradient_checkpointing=False, batch_size=4, gradient_accumulation_steps=1),
                _fitting(gradient_accumulation_steps=1),
                _fitting(precision="bf16-true"),
                _fitting(seq_len=512),
                Recipe("gpt2-large", batch_size=4, seq_len=1024),
                "adamw_8bit",
            ],
        ),
    ),
]
