"""What to change: the cheapest single changes of a recipe, and what would fit if nothing does."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..base.errors import RecipeError
from ..formulas.predict import predict
from ..hardware.gpu import Gpu, GpuError, find_gpu, gpu_names
from ..recipe.knobs import knobs
from ..recipe.options import REPEATED, TRL, Quantization
from ..recipe.recipe import OPTIMIZERS, Recipe
from ..report.report import Report, format_bytes, unit_for
from ..simulation.colocated import least_share
from .counted import counted_as
from .question import LIGER_SINCE, RANK, Question
from .search import Search
from .search_space import warned
from .step_time import estimate
from .vllm_share import with_least_share

Fields = dict[str, Any]  # of a recipe or a question: names and their new values

DEFAULT_CARD = "A100 80GB"  # for relative times where no card is named
LEAST_SAVED = 0.01  # of the peak: less is no help
LEAST_SLOWER = 0.02  # of the step: less is not said
SHORTEST = 64  # tokens
MOST_CHANGES = 15  # that `_changes` has
MOST_GPUS = 1024
OF_TRITON = {"use_liger_kernel", "trainer"}  # fields whose change brings kernels of Triton's
WITHOUT_LIGER = ("fsdp", "deepspeed")  # engines under which formulas know SFTTrainer's loss only
# Of fields with their value, whose work that is
MEANING = {
    "trainer='sft'": " (TRL's SFTTrainer, whose loss makes no logits)",
    f"attn_implementation={REPEATED!r}": " (repeat_shared_keys() of vramlab)",
}
SHARE = 0.05  # of a card: steps in which another share is tried for vLLM


@dataclass(frozen=True)
class Change:
    """A change of a recipe, and what it does.

    Attributes:
        fields: the fields to change.
        saves: bytes that it takes off the peak.
        frees: bytes that it takes off the likely figure of the process, with the allocator's own.
        time: the step's time afterwards over that before; None if unknown.
        same: whether it computes the same training.
    """

    fields: Fields
    saves: int
    time: float | None
    same: bool
    frees: int = 0

    def takes(self, need: int, process: int) -> bool:
        """Tell whether it takes `need` off the peak and `process` off the process."""
        return self.saves >= need and self.frees >= process

    def __str__(self) -> str:
        names = []
        for name, value in self.fields.items():
            plain = f"{name}={value!r}"
            # An object's words are shorter than the call that makes it.
            names.append(knobs(Recipe)[name].words(value) if "(" in plain else plain)
            names[-1] += MEANING.get(plain, "")
        fields = ", ".join(names)
        saves = format_bytes(self.saves, unit_for(self.saves))
        slower = ""
        if self.time and abs(self.time - 1) >= LEAST_SLOWER:
            slower = f", step time ×{self.time:.2f}"
        kind = "the same training" if self.same else "another training"
        return f"{fields}: −{saves}{slower}, {kind}"


def cheapest(
    recipe: Recipe,
    card: Gpu | None = None,
    need: int = 0,
    count: int = 3,
    witness: Callable[..., Report] = predict,
    process: int = 0,
) -> list[Change]:
    """Return up to `count` changes that each take bytes off the peak.

    First come those that take `need` off the peak and `process` off the process, of these first
    what computes the same training, then what costs the least time. Raises RecipeError where
    `witness` refuses the recipe itself.
    """
    report = witness(recipe)
    tried = partial(_tried, recipe, report, _seconds(recipe, card), card, witness)
    changes = []
    for fields, same in _possible(recipe, card):
        # This model or trainer cannot have it, or the formulas do not know it.
        with contextlib.suppress(RecipeError, GpuError):
            change = tried(fields, same)
            if "batch_size" in fields and not change.takes(need, process):
                change = _smaller_batch(recipe.replace(**fields), tried, need, process) or change
            if change.saves > LEAST_SAVED * report.peak.total:
                changes.append(change)

    # An unknown time counts as no slower.
    def order(change: Change) -> tuple:
        enough = change.takes(need, process)
        # Enough first, then the same training, then the least time, then the most bytes.
        return not enough, not change.same, change.time or 1.0, -change.saves

    return sorted(changes, key=order)[:count]


def _smaller_batch(
    recipe: Recipe, tried: Callable[[Fields, bool], Change], need: int, process: int
) -> Change | None:
    """Return the largest micro-batch that is enough, of those below the recipe's; None."""
    while fields := _halved(recipe):
        change = tried(fields, True)
        if change.takes(need, process):
            return change
        recipe = recipe.replace(**fields)
    return None


def supports_liger(card: Gpu | None) -> bool:
    """Tell whether Triton, in which Liger is written, supports the card; True of none."""
    return card is None or card.compute_capability >= LIGER_SINCE


def cheapest_pair(
    recipe: Recipe,
    card: Gpu | None,
    need: int,
    witness: Callable[..., Report] = predict,
    process: int = 0,
) -> Change | None:
    """Return the cheapest two changes that are enough together, as `cheapest` orders; None.

    The second is looked for after the first, so what depends on it counts.
    """
    tried = partial(_tried, recipe, witness(recipe), _seconds(recipe, card), card, witness)
    found = []
    for fields, same in [*_possible(recipe, card), *_unprepared(recipe)]:
        with contextlib.suppress(RecipeError, GpuError):
            halfway = recipe.replace(**fields)
            if halfway == recipe:
                continue
            # All of them: what is cheapest alone need not be the cheapest second.
            for change in cheapest(halfway, card, 0, count=MOST_CHANGES, witness=witness):
                # A second change of one field would undo the first.
                if fields.keys() & change.fields.keys():
                    continue
                pair = tried(fields | change.fields, same and change.same)
                if pair.takes(need, process):
                    found.append(pair)

    def order(change: Change) -> tuple:
        return not change.same, change.time or 1.0, -change.saves

    return min(found, key=order, default=None)


def _tried(
    recipe: Recipe,
    report: Report,
    seconds: float | None,
    card: Gpu | None,
    witness: Callable[..., Report],
    fields: Fields,
    same: bool,
) -> Change:
    """Return what changing `fields` does to a recipe whose `report` and `seconds` are given."""
    changed = recipe.replace(**fields)
    after = witness(changed)
    time = _seconds(changed, card)
    return Change(
        fields=fields,
        saves=report.peak.total - after.peak.total,
        time=time / seconds if time and seconds else None,
        same=same,
        frees=_process(report) - _process(after),
    )


def _process(report: Report) -> int:
    """Return the likely bytes of the process, or the peak's where nothing says more."""
    return report.peak.total if report.process is None else int(report.process)


def _seconds(recipe: Recipe, card: Gpu | None) -> float | None:
    """Return the estimated seconds of a step, None where they are unknown."""
    try:
        parts = estimate(counted_as(recipe), card or find_gpu(DEFAULT_CARD))
    except (GpuError, RecipeError):
        return None
    return sum(parts.values())


def _possible(recipe: Recipe, card: Gpu | None) -> Iterator[tuple[Fields, bool]]:
    """Yield those of `_changes` whose kernels the card supports."""
    for fields, same in _changes(recipe):
        if supports_liger(card) or not fields.keys() & OF_TRITON:
            yield fields, same


def _changes(recipe: Recipe) -> Iterator[tuple[Fields, bool]]:
    """Yield fields to change, and whether the training stays the same up to rounding."""
    yield {"attn_implementation": "sdpa"}, True
    # Where a card has no fused kernel for keys that query heads share.
    yield {"attn_implementation": REPEATED}, True
    yield {"use_liger_kernel": True}, True
    divided = recipe.group.engine in WITHOUT_LIGER
    if divided and recipe.trainer == "transformers":
        yield {"trainer": "sft"}, True
    yield {"gradient_checkpointing": True}, True
    # The fused kernel has no temporaries; from another optimizer it is another training.
    yield {"optim": "adamw_torch_fused"}, recipe.optim == "adamw_torch"
    if halved := _halved(recipe):
        yield halved, True
    if recipe.optim.startswith("adamw"):
        yield {"optim": "adamw_bnb_8bit"}, False
    # The same update; its states move to host memory when the card is full.
    paged = f"paged_{recipe.optim.replace('_bnb', '')}"
    if paged in OPTIMIZERS:
        yield {"optim": paged}, True
    if recipe.precision == "fp32":
        yield {"precision": "bf16-mixed"}, False
    # Adapters that are there stay, and of PEFT's other methods nothing is asked.
    adapters: Fields = {"lora": recipe.lora or RANK}
    if recipe.peft:
        adapters = {}
    yield adapters, False
    if recipe.adapters or recipe.precision != "fp32":
        # TRL's trainers never call prepare_model_for_kbit_training.
        base = Quantization("nf4", double=True, prepare=recipe.trainer not in TRL)
        yield {**adapters, "quantization": base}, False
    if not recipe.lengths and not recipe.shape.image_tokens and recipe.seq_len > 1:
        yield {"seq_len": recipe.seq_len // 2}, False


def _halved(recipe: Recipe) -> Fields:
    """Return half a micro-batch and twice the accumulation as fields; {} of an odd one."""
    if recipe.batch_size % 2 or recipe.lengths:
        return {}
    return {
        "batch_size": recipe.batch_size // 2,
        "gradient_accumulation_steps": 2 * recipe.gradient_accumulation_steps,
    }


def _unprepared(recipe: Recipe) -> Iterator[tuple[Fields, bool]]:
    """Yield 4 bits without prepare_model_for_kbit_training, which makes hidden states fp32."""
    for fields, same in _changes(recipe):
        base = fields.get("quantization")
        if base and base.prepare:
            yield fields | {"quantization": dataclasses.replace(base, prepare=False)}, same


def advise(question: Question, offloaded: bool = False) -> Iterator[str]:
    """Say the least change of each kind that makes something fit.

    The kinds are method, trainer, offload, sequences, GPUs and card. Of recipes that differ in
    checkpointing alone, only the lighter is tried. Where a rule refused all recipes, no memory is
    missing, and what is under another rule comes alone. Activations were `offloaded` already where
    that is no advice. Of another method it is what `plan` answers.
    """
    asked = question
    # The largest of (False, True): checkpointing where it may be used.
    finds_share = question.finds_share
    question = dataclasses.replace(question, checkpointing=(max(question.checkpointing),))
    question.finds_share = finds_share
    refused = not Search(question).candidates
    # Those of other rules come first: where they answer, more memory is no advice.
    fits_elsewhere = False
    for changes in _under_other_rules(question):
        # The lightest LoRA has every switch on, which others beat in memory and in speed.
        by_method = changes and "method" in changes[0]
        for sentence in _first_fit(asked if by_method else question, changes):
            fits_elsewhere = True
            yield sentence
    if refused and fits_elsewhere:
        return
    # Each try of a trainer that samples is simulated, so the first that fits is said alone.
    for sentence in _first_fit(question, _shares(question)):
        yield sentence
        return
    if not offloaded:
        yield from _with_offloaded_activations(question)
    for changes in _wider(question):
        yield from _first_fit(question, changes)


def _with_offloaded_activations(question: Question) -> Iterator[str]:
    """Say what fits with its activations in host memory, which is simulated."""
    search = Search(question)
    for method in question.methods:
        found, tier = search.offloaded(method)
        if found and tier == "safe":
            yield f"activation_offloading=True fits (SFTTrainer): {found.recipe}"
            return


def _first_fit(
    question: Question,
    changes: list[Fields],
) -> Iterator[str]:
    """Yield the first of `changes` that makes something fit, and what fits."""
    for change in changes:
        with contextlib.suppress(RecipeError):
            changed = dataclasses.replace(question, **change)
            if question.finds_share:
                # What of one card is a large share is a small one of a larger card.
                changed = with_least_share(changed)
            search = Search(changed)
            if "method" in change:
                best, _ = search.answer(change["method"])
                recipe = best.recipe if best else None
            else:
                recipe = search.any_fit()
            if recipe:
                if "rollouts" in change:
                    share = change["rollouts"].vllm_gpu_memory_utilization
                    change = {"vllm_gpu_memory_utilization": share}
                fields = ", ".join(f"{name}={value!r}" for name, value in change.items())
                yield f"{fields} fits: {recipe}{warned(recipe)}"
                return


def _shares(question: Question) -> list[Fields]:
    """Return other shares of the card for a vLLM on it, the least that holds what it needs first.

    That is its weights and the keys and values of one batch. Each is simulated, so they are few.
    """
    rollouts = question.rollouts
    if question.finds_share or not (rollouts and rollouts.is_colocated):
        return []
    # In whole steps, rounded up.
    least = math.ceil(least_share(question.plain, question.gpu) / SHARE)
    changes = []
    for steps in (least, least + 1, least + 2):
        share = round(steps * SHARE, 2)
        if share < 1 and share != rollouts.vllm_gpu_memory_utilization:
            other = dataclasses.replace(rollouts, vllm_gpu_memory_utilization=share)
            changes.append({"rollouts": other})
    return changes


def _under_other_rules(question: Question) -> Iterator[list[Fields]]:
    """Yield for each kind of change that brings other rules the fields that it changes."""
    methods = [method for method in ("lora", "qlora") if question.method not in ("any", method)]
    yield [{"method": method} for method in methods]
    if question.trainer == "sft":
        yield [{"trainer": "transformers"}]


def _wider(question: Question) -> Iterator[list[Fields]]:
    """Yield for each kind of change the fields that it changes, the least change first."""
    if not question.offload:
        yield [{"offload": True}]
    if question.plain.shape.task != "image-classification":
        # Half as long each time, for whoever asks wants the longest that fits.
        shorter = [question.plain.seq_len >> halvings for halvings in range(1, 32)]
        yield [{"seq_len": length} for length in shorter if length >= SHORTEST]
    wider = []
    for doublings in range(1, 11):
        gpus = question.gpus << doublings
        if gpus <= MOST_GPUS:
            # The global batch has to be a multiple of the GPUs.
            batch = gpus * max(1, question.global_batch // gpus)
            wider.append({"gpus": gpus, "global_batch": batch})
    yield wider
    if question.memory is None:
        yield [{"gpu": card.name} for card in _larger_cards(question)]


def _larger_cards(question: Question) -> list[Gpu]:
    """Return the cards with more memory that compute in the precisions asked for, least first."""
    larger = []
    for card in map(find_gpu, gpu_names()):
        computes = all(map(card.supports, question.precisions or ()))
        if computes and card.total > question.gpu.total:
            larger.append(card)
    return sorted(larger, key=lambda card: (card.total, card.name))
