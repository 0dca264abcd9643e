"""The space of recipes that answer a `Question`.

A family is one way to train. Its recipes differ in the micro-batch only: a divisor of one GPU's
share of the global batch, so that micro-batch × accumulation × GPUs is always the global batch.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..base.errors import RecipeError
from ..formulas import model_states, shards
from ..formulas.fused_head import with_its_adapters
from ..formulas.predict import predict
from ..hardware.gpu import Chip, Gpu
from ..recipe import liger
from ..recipe.knobs import options, unchecked
from ..recipe.lora_modules import has_experts, unquantized
from ..recipe.options import (
    HALF,
    IN_BACKWARD,
    LOOPS,
    REPEATED,
    TRL,
    Loop,
    Quantization,
    Sharding,
)
from ..recipe.recipe import Recipe
from ..report.report import format_bytes
from .counted import activations_on_host, counted_as, has_room, host_bytes, refused_by_host
from .question import FLASH_SINCE, Question, without_rollouts
from .step_walk import walk

FLAGS = {".".join(path): "--" + knob.option.replace("_", "-") for path, knob in options(Recipe)}
SHARDED_OPTIMS = ("adamw_torch_fused", "adamw_torch")  # bitsandbytes does not update shards
# Precisions to try by method, "half" being the card's. Full training in fp16-true only on request:
# there AdamW's epsilon of 1e-8 is zero, and small gradients are too.
PRECISIONS_OF = {
    "full": ("half-true", "half-mixed", "tf32", "fp32"),
    "lora": ("half-true", "half-mixed", "fp32"),
    "qlora": ("half-true", "half-mixed"),
}
# Kernels of attention, by what they ask of a program.
PREFERRED = ("sdpa", REPEATED, "eager", "flash_attention_2")
# What a recipe may go without to take less memory, the best first: nothing; clipping and
# accumulation, where weights are updated in the backward pass; time, where it waits for the host.
# What backward needs goes there only where a method has no other answer.
EFFORTS = ("", "in_backward", "offload", "activations")
# Part of the saved activations interpolated from two micro-batches: rounding of blocks is not
# affine.
SURE = 0.98
# Half the least relative step of the format: 2^-8, 2^-11.
ROUNDING = {"bf16-true": "1/256", "fp16-true": "1/2048"}


def micro_batches(question: Question) -> tuple[int, ...]:
    """Return the possible micro-batches, largest first."""
    return _divisors(question.samples_per_gpu, question.plain.batch_size)


def _divisors(number: int, least: int = 1) -> tuple[int, ...]:
    """Return the divisors of `number` from `least` on, largest first."""
    sizes = range(number, least - 1, -1)
    return tuple(size for size in sizes if number % size == 0)


def families(
    question: Question,
    method: str,
    refused: list[str] | None = None,
) -> Iterator[Recipe]:
    """Yield every way to train by `method`, the simpler ones first, with the largest micro-batch.

    Why others are none is added to `refused`.
    """
    refused = [] if refused is None else refused
    fixed = {
        "batch_size": question.samples_per_gpu,
        "gradient_accumulation_steps": 1,
        "lora": None if method == "full" or question.peft else question.lora,
        "peft": None if method == "full" else question.peft,
    }
    tried = _options(question, method)
    for values in itertools.product(*tried.values()):
        fields = dict(zip(tried, values, strict=True))
        if not (_is_tried(fields) and _joins_as_tried(question, fields)):
            continue
        # The dtype and the rows follow from what is chosen.
        fields |= _implied(question, method, fields)
        try:  # the model, the base or the trainer cannot have it
            family = question.plain.replace(**fixed | fields)
            # Raises RecipeError for adapters that formulas cannot count.
            with_its_adapters(without_rollouts(family))
        except RecipeError as error:
            refused.append(rule_of(error))
            continue
        if has_room(question, family):
            yield family
        else:
            refused.append(refused_by_host(question))


def rule_of(error: RecipeError) -> str:
    """Return why a recipe is none, with its field called as on the command line."""
    return f"{FLAGS.get(error.field, error.field)} {error.shown}: {error.allowed}"


def _options(
    question: Question,
    method: str,
) -> dict[str, Sequence[Any]]:
    """Return by field the values to try, the simpler ones first."""
    bases: list[Quantization | None] = [None]
    if method == "qlora":
        # Prepared shards would have two dtypes in one unit.
        prepares = (True, False) if question.gpus == 1 else (False,)
        pairs = list(itertools.product(prepares, (False, True)))
        packs = has_experts(question.plain.shape) and question.gpus == 1
        ways = itertools.product((None, "loading") if packs else (None,), pairs)
        bases = []
        for experts, (prepare, double) in ways:
            bases.append(Quantization("nf4", double, prepare=prepare, experts=experts))
    return {
        "use_liger_kernel": (True, False) if question.liger_is_possible() else (False,),
        "trainer": question.trainers(),
        "sharding": tuple(_shardings(question)),
        "gradient_checkpointing": question.checkpointing,
        "loop": _loops(question, method),
        "optim": question.optims,
        "attn_implementation": _kernels(question),
        "packing": (False, True) if question.can_be_packed() else (question.packing,),
        "precision": question.precisions or precisions_to_try(question.gpu, method),
        "quantization": bases,
    }


def _loops(question: Question, method: str) -> Sequence[Loop]:
    """Return the Trainer's loop, and that which updates weights as their gradients come.

    The second is modelled on one device. Where adapters are trained it saves next to nothing.
    """
    saves = method == "full" and question.gpus == 1 and question.plain.trainer == "transformers"
    return (LOOPS["trainer"], IN_BACKWARD) if saves else (LOOPS["trainer"],)


def _implied(
    question: Question,
    method: str,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Return the fields that follow from those chosen."""
    implied: dict[str, Any] = {}
    half = HALF.get(fields["precision"].removesuffix("-mixed"))
    if method == "lora" and half:
        # Autocast over a frozen fp32 base would cast it anew in every step.
        implied["dtype"] = half
    packs = fields["packing"] and fields["trainer"] == "sft"
    implied["packing"] = packs
    if packs and not question.packing:
        # A step has about as many samples as without packing, in fewer rows.
        implied["batch_size"] = question.data.packed_in_step(question.samples_per_gpu)
    elif fields["trainer"] == "sft":
        is_flash = fields["attn_implementation"] == "flash_attention_2"
        implied["padding_free"] = is_flash and question.can_be_joined()
    return implied


def _joins_as_tried(question: Question, fields: dict[str, Any]) -> bool:
    """Tell whether a combination, by its rows, is not another one under a second name."""
    is_sft = fields["trainer"] == "sft"
    is_flash = fields["attn_implementation"] == "flash_attention_2"
    packs = fields["packing"]
    if packs and not question.packing and not (is_sft and is_flash):
        return False  # SFTConfig: joined rows are "only supported with the FlashAttention 2 or 3"
    if is_sft and (packs or (is_flash and question.can_be_joined())):
        return True
    if is_flash and "sdpa" in question.attention:
        return False  # sdpa takes that kernel by itself
    # SFTTrainer is tried for its loss, or for its rows alone.
    is_added = is_sft and question.plain.trainer != "sft"
    return not (is_added and question.liger_replaces_trl(fields["sharding"]))


def _kernels(question: Question) -> list[str]:
    """Return attention's kernels to try, sdpa first, which takes FlashAttention by itself.

    flash-attn's own is for rows of which each is several samples, and on request.
    """
    has_flash = question.gpu.compute_capability >= FLASH_SINCE
    joins = "sft" in question.trainers() and question.can_share_rows()
    left_out = set()
    if has_flash:  # from Ampere on sdpa has a kernel for shared keys
        left_out.add(REPEATED)
    if not has_flash or (not joins and "sdpa" in question.attention):
        left_out.add("flash_attention_2")
    kernels = []
    for name in question.attention:
        is_request = question.attention == (name,)
        if is_request or name not in left_out:
            kernels.append(name)
    return sorted(kernels, key=PREFERRED.index)


def with_micro_batch(family: Recipe, size: int) -> Recipe:
    """Return the family's recipe with micro-batches of `size` samples.

    It is not validated again, for speed.
    """
    # The product of both stays that of the family.
    steps = family.batch_size * family.gradient_accumulation_steps // size
    return unchecked(family, batch_size=size, gradient_accumulation_steps=steps)


def sizes_of(family: Recipe, sizes: Sequence[int]) -> Sequence[int]:
    """Return those micro-batches of `sizes`, largest first, that the family can have.

    Where several samples are a row, they are of the fewer rows.
    """
    if family.loop.optimizer_in_backward:
        return sizes[:1]  # no gradient survives to accumulate
    rows = family.batch_size * family.gradient_accumulation_steps
    return sizes if not sizes or rows == sizes[0] else _divisors(rows)


def method_of(recipe: Recipe) -> str:
    """ "full", "lora" or "qlora"."""
    if recipe.quantization:
        return "qlora"
    return "lora" if recipe.adapters else "full"


def is_sound(recipe: Recipe) -> bool:
    """Tell whether what is trained is kept in fp32, and fp16's gradients are scaled.

    Then no update is lost to a format.
    """
    is_full_in_half = recipe.precision in ROUNDING and recipe.adapters is None
    return not is_full_in_half and recipe.precision != "fp16-true"


def effort_of(recipe: Recipe) -> str:
    """Return what `recipe` goes without to take less: one of `EFFORTS`."""
    if recipe.activation_offloading:
        return "activations"
    if recipe.group.offload:
        return "offload"
    return "in_backward" if recipe.loop.optimizer_in_backward else ""


def notes_on(recipe: Recipe, card: Gpu) -> Iterator[str]:
    """Say what to know before choosing `recipe` that ranking by speed does not weigh."""
    precision = recipe.precision
    if precision in ROUNDING and recipe.adapters is None:
        lost = f"an update below about {ROUNDING[precision]} of a weight is rounded away"
        yield f"{precision}: {lost} (chapter 01)"
        yield f"what helps: {'; '.join(_cures(recipe, card))}"
    if precision == "fp16-true":
        lost = "gradients under 6e-8 become zero"
        yield f"fp16-true: nothing scales the loss, so {lost} (chapter 01)"
    if recipe.loop.optimizer_in_backward:
        yield "updates in the backward pass: no gradient waits to be clipped or accumulated"
    if recipe.optim.startswith("paged"):
        size = format_bytes(host_bytes(counted_as(recipe)), digits=2)
        yield f"paged states: {size} of host memory when the card is full"
    if recipe.activation_offloading:
        size = format_bytes(activations_on_host(recipe), digits=2)
        yield f"activations offloaded: up to {size} of host memory, pinned"
    yield from unquantized(recipe)
    sharding = recipe.group
    if sharding.offload:
        size = format_bytes(host_bytes(recipe), digits=0)
        yield f"{sharding.offload} offloaded: {size} of host memory for all ranks"
        resident = dataclasses.replace(sharding, offload=None)
        with contextlib.suppress(RecipeError):
            alone = recipe.replace(batch_size=1, lengths=None, sharding=resident)
            answer = predict(counted_as(alone), card).answer(card.name)
            yield f"with nothing offloaded, batch 1: {answer}"
    if sharding.world_size > 8:
        rest = "say link=, the bytes a second of one GPU's network"
        yield f"more than 8 GPUs are several machines: {rest}"


def warned(recipe: Recipe) -> str:
    """Return what a line that only names `recipe` has to say of its precision, "" mostly."""
    if recipe.precision not in ROUNDING:
        return ""
    if recipe.lora and recipe.lora.autocast_adapter_dtype:
        return "; without autocast PEFT copies each adapter's input to fp32"
    return "" if recipe.adapters else f"; {recipe.precision} rounds small updates away"


def _cures(recipe: Recipe, card: Gpu) -> Iterator[str]:
    """Yield what keeps small updates, instead of training all weights in half precision."""
    precision = recipe.precision.replace("-true", "-mixed")
    with contextlib.suppress(RecipeError):
        now = predict(recipe, card).peak.total
        # The same recipe with a copy of the weights in fp32.
        mixed = predict(recipe.replace(precision=precision), card).peak.total
        yield f"fp32 weights ({precision}), {format_bytes(mixed - now, digits=2)} more"
    yield "adapters in fp32 (method lora)"


def without_switches(
    recipe: Recipe,
    card: Gpu,
) -> dict[str, int]:
    """Return by switch that is on in `recipe` what leaving it out adds to the predicted peak."""
    if recipe.rollouts or recipe.activation_offloading:
        # The peak may be where it samples, or is none of the formulas'.
        return {}
    recipe = counted_as(recipe)
    before = predict(recipe, card).peak.total
    added = {}
    for name, fields in _switches(recipe):
        # The trainer needs it, or the formulas do not know the recipe without.
        with contextlib.suppress(RecipeError):
            added[name] = predict(recipe.replace(**fields), card).peak.total - before
    return added


def _switches(recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each switch that is on, and the fields that leave it out."""
    quantization = recipe.quantization
    if recipe.use_liger_kernel:
        yield "Liger's kernels", {"use_liger_kernel": False}
    if recipe.trainer == "sft":
        fields = {"trainer": "transformers", "packing": False, "padding_free": False}
        # Packed rows cannot be had without TRL, so their lengths go with it.
        rows = None if recipe.packing else recipe.lengths
        yield "SFTTrainer's loss", {**fields, "lengths": rows}
    if recipe.gradient_checkpointing:
        yield "checkpointing", {"gradient_checkpointing": False}
    if recipe.loop.optimizer_in_backward:
        yield "updates in the backward pass", {"loop": "trainer"}
    if "8bit" in recipe.optim:
        yield "8-bit states", {"optim": "adamw_torch_fused"}
    if quantization and quantization.double:
        single = dataclasses.replace(quantization, double=False)
        yield "double quantization", {"quantization": single}
    if quantization and quantization.experts:
        whole = dataclasses.replace(quantization, experts=None)
        yield "experts in 4 bits", {"quantization": whole}
    if quantization and recipe.adapters:
        # Without quantization the base is in the format that its other weights have.
        yield "the 4-bit base", {"quantization": None, "dtype": recipe.weights_dtype}


def to_install(recipe: Recipe) -> Iterator[str]:
    """Yield what `recipe` needs that a plain Trainer does not, as pip knows it."""
    if liger.kernels(recipe):
        yield "liger-kernel"
    if recipe.adapters:
        yield "peft"
    if recipe.quantization or "bit" in recipe.optim:
        yield "bitsandbytes"
    if recipe.trainer in TRL:
        yield "trl"
    if recipe.rollouts and recipe.rollouts.is_colocated:
        yield "vllm"
    if recipe.attn_implementation == "flash_attention_2":
        yield "flash-attn"
    if recipe.group.engine == "deepspeed":
        yield "deepspeed"


def least_bytes(recipe: Recipe) -> int:
    """Return a lower bound of a rank's peak: what is held when the optimizer steps."""
    rank = shards.rank_bytes(counted_as(recipe))
    return rank.parameters + _waiting(recipe, rank) + rank.optimizer_states


def held_bytes(recipe: Recipe, chip: Chip) -> int:
    """Return a lower bound of a rank's peak.

    That is model states, and gradients or what is saved when forward ends.
    """
    return max(least_bytes(recipe), saved_bytes(recipe, chip))


def saved_bytes(recipe: Recipe, chip: Chip) -> int:
    """Return a lower bound of a rank's peak, which grows with the micro-batch.

    That is weights, states and what is saved when forward ends.
    """
    rank = shards.rank_bytes(recipe)
    saved = int(SURE * walk(model_states.compute_recipe(recipe), chip).kept)
    return rank.parameters + rank.optimizer_states + saved


def _waiting(recipe: Recipe, rank: model_states.RankBytes) -> int:
    """Return the bytes of a rank's gradients that wait for the optimizer's step."""
    return 0 if recipe.loop.optimizer_in_backward else rank.gradients


def precisions_to_try(card: Gpu, method: str) -> list[str]:
    """Return the precisions to try: bf16 where the card computes in it, else fp16."""
    half = "bf16" if card.supports("bf16") else "fp16"
    precisions = []
    for name in PRECISIONS_OF[method]:
        precision = name.replace("half", half)
        is_on_request = method == "full" and precision == "fp16-true"
        if card.supports(precision) and not is_on_request:
            precisions.append(precision)
    return precisions


def _shardings(question: Question) -> Iterator[Sharding | None]:
    """Yield the ways to share the work that the formulas know, the simpler ones first."""
    known: Mapping[str, Sequence[tuple[int, str | None]]] = shards.ON_SEVERAL
    if question.gpus == 1:
        yield None
        known = shards.ON_ONE_GPU
    for engine, ways in known.items():
        if engine not in question.engines or (question.plain.sharding and engine != "ddp"):
            continue
        for stage, offload in ways:
            if question.offload or not offload:
                yield Sharding(stage, question.gpus, engine, offload)


def _is_tried(fields: dict[str, Any]) -> bool:
    """Tell whether a combination runs, is known, and is not another one under a second name."""
    sharding = fields["sharding"]
    if fields["use_liger_kernel"] and fields["trainer"] == "sft":
        return False  # TRL's own loss makes no logits either
    if fields["loop"].optimizer_in_backward:
        # The loss scaler divides and checks gradients that are gone by then.
        other = sharding or fields["trainer"] != "transformers"
        return not other and not fields["precision"].startswith("fp16")
    if sharding is None:
        return True
    if fields["use_liger_kernel"] and sharding.engine != "ddp":
        return False  # beside adapters FSDP leaves the head's weight cut: `recipe.liger`
    if sharding.engine == "deepspeed" and fields["precision"].endswith("-true"):
        # DeepSpeed keeps fp32 copies of half-precision weights either way: that is "-mixed", in no
        # more bytes
        return False
    if sharding.offload:
        # DeepSpeed updates by its own CPU Adam, FSDP on the CPU; DeepSpeed moves no packed weights.
        moves = not fields["quantization"] or sharding.engine != "deepspeed"
        return moves and fields["optim"] == "adamw_torch"
    return sharding.stage == 0 or fields["optim"] in SHARDED_OPTIMS
