"""What to change: the cheapest single changes of a recipe, and what would fit where a plan has no answer."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..formulas.predict import predict
from ..hardware.gpu import Gpu, GpuError, find_gpu, gpu_names
from ..hardware.overhead import expandable
from ..recipe.knobs import knobs
from ..recipe.options import Quantization
from ..recipe.process_context import context_of
from ..recipe.recipe import Recipe
from ..report.errors import RecipeError
from ..report.report import Report, format_bytes, unit_for
from .question import RANK, Question
from .search import Search, simulate_briefly
from .search_space import least_bytes
from .step_time import estimate

USUAL_CARD = "A100 80GB"  # for relative times where no card is named
LEAST = 0.01  # of the peak: less is no help
SLOW_CHANGE = 0.02  # of the step: less is not said
SHORTEST, MOST_GPUS = 64, 1024  # tokens, GPUs
OFFLOADED_LAYERS = 48  # that are simulated one by one, half a minute


@dataclass(frozen=True)
class Change:
    """Fields of a recipe to change: what that takes off its peak, the step's time afterwards over that before (None if
    unknown), and whether it computes the same training."""

    fields: dict[str, Any]
    saves: int
    time: float | None
    same: bool

    def __str__(self) -> str:
        said = ((f"{name}={value!r}", knobs(Recipe)[name].words(value)) for name, value in self.fields.items())
        fields = ", ".join(words if "(" in plain else plain for plain, words in said)
        slower = "" if not self.time or abs(self.time - 1) < SLOW_CHANGE else f", step time ×{self.time:.2f}"
        kind = "the same training" if self.same else "another training"
        return f"{fields}: −{format_bytes(self.saves, unit_for(self.saves))}{slower}, {kind}"


def cheapest(
    recipe: Recipe, card: Gpu | None = None, need: int = 0, count: int = 3, witness: Callable[..., Report] = predict
) -> list[Change]:
    """Return up to `count` changes that each take bytes off the peak: first those that take `need`, of these first what
    computes the same training, then what costs the least time.

    Raises RecipeError where `witness` refuses the recipe itself.
    """
    before = witness(recipe).peak.total
    seconds, found = _seconds(recipe, card), []
    for fields, same in _changes(recipe):
        with contextlib.suppress(RecipeError):  # this model or trainer cannot have it, or the formulas do not know it
            changed = recipe.replace(**fields)
            saves, after = before - witness(changed).peak.total, _seconds(changed, card)
            if saves > LEAST * before:
                found.append(Change(fields, saves, after / seconds if after and seconds else None, same))
    return sorted(found, key=lambda c: (c.saves < need, not c.same, c.time or 1.0, -c.saves))[:count]


def _seconds(recipe: Recipe, card: Gpu | None) -> float | None:
    try:
        return sum(estimate(recipe, card or find_gpu(USUAL_CARD)).values())
    except (GpuError, RecipeError):
        return None


def _changes(recipe: Recipe) -> Iterator[tuple[dict[str, Any], bool]]:
    """Fields to change, and whether the training stays the same up to rounding."""
    yield {"attn_implementation": "sdpa"}, True
    yield {"use_liger_kernel": True}, True
    yield {"gradient_checkpointing": True}, True
    yield {"optim": "adamw_torch_fused"}, recipe.optim == "adamw_torch"
    if recipe.batch_size > 1 and recipe.batch_size % 2 == 0 and not recipe.lengths:
        times = 2 * recipe.gradient_accumulation_steps
        yield {"batch_size": recipe.batch_size // 2, "gradient_accumulation_steps": times}, True
    if recipe.optim.startswith("adamw"):
        yield {"optim": "adamw_bnb_8bit"}, False
    if recipe.precision == "fp32":
        yield {"precision": "bf16-mixed"}, False
    yield {"lora": recipe.lora or RANK}, False
    if recipe.lora or recipe.precision != "fp32":
        yield {"lora": recipe.lora or RANK, "quantization": Quantization("nf4", double=True)}, False
    if not recipe.lengths and not recipe.shape.image_tokens and recipe.seq_len > 1:
        yield {"seq_len": recipe.seq_len // 2}, False


def advise(question: Question) -> Iterator[str]:
    """The least change of each kind that makes something fit: method, trainer, offload, sequences, GPUs, card. Of recipes
    that differ in checkpointing alone, only the lighter is tried. Where a rule refused all, no memory is missing, and what
    is under another rule comes alone."""
    question = dataclasses.replace(question, checkpointing=max(question.checkpointing))
    refused, found = not Search(question).candidates, False
    for changes in _under_other_rules(question):
        for said in _first_fit(question, changes):
            found = True
            yield said
    if refused and found:
        return
    with contextlib.suppress(RecipeError):
        yield from _with_offloaded_activations(question)
    for changes in _wider(question):
        yield from _first_fit(question, changes)


def _with_offloaded_activations(question: Question) -> Iterator[str]:
    """The lightest recipe of SFTTrainer with its activations in host memory, if that fits: formulas do not know it, so it
    is simulated."""
    trained = {question.plain.trainer, *question.trainers()}
    if question.gpus > 1 or not question.offload or not trained & {"transformers", "sft"}:
        return
    changed = dataclasses.replace(question, trainer="sft", checkpointing=True, offload=False)
    lightest = min(Search(changed).ends, key=lambda one: one.bound("safe"), default=None)
    if lightest is None or least_bytes(lightest.recipe) > question.usable:
        return
    recipe = lightest.recipe.replace(activation_offloading=True)
    found = simulate_briefly(recipe, question, deepest=OFFLOADED_LAYERS)
    if isinstance(found, str):
        return
    held = expandable(max(found.allocated, found.peak.total), 1.0)
    needs = held + context_of(recipe, question.gpu)
    if needs.high <= question.usable:
        yield f"activation_offloading=True fits (SFTTrainer): {recipe}"


def _first_fit(question: Question, changes: list[dict[str, Any]]) -> Iterator[str]:
    """The first of `changes` that makes something fit, and what."""
    for change in changes:
        with contextlib.suppress(RecipeError):
            if recipe := Search(dataclasses.replace(question, **change)).any_fit():
                yield f"{', '.join(f'{name}={value!r}' for name, value in change.items())} fits: {recipe}"
                return


def _under_other_rules(question: Question) -> Iterator[list[dict[str, Any]]]:
    """For each kind of change that another method's or trainer's rules come with, the fields that it changes."""
    yield [{"method": method} for method in ("lora", "qlora") if question.method not in ("any", method)]
    yield [{"trainer": "transformers"}] if question.trainer == "sft" else []


def _wider(question: Question) -> Iterator[list[dict[str, Any]]]:
    """For each kind of change the fields that it changes, the least change first."""
    yield [] if question.offload else [{"offload": True}]
    if question.plain.shape.task != "image-classification":
        yield [{"seq_len": n} for i in range(1, 32) if (n := question.plain.seq_len >> i) >= SHORTEST]
    counts = (question.gpus << i for i in range(1, 11) if question.gpus << i <= MOST_GPUS)
    yield [{"gpus": n, "global_batch": n * max(1, question.global_batch // n)} for n in counts]
    if question.memory is None:
        cards = sorted(map(find_gpu, gpu_names()), key=lambda card: (card.total, card.name))
        larger = [card for card in cards if card.total > question.gpu.total]
        yield [{"gpu": card.name} for card in larger if all(map(card.supports, question.precisions or ()))]
