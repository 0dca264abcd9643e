"""The space of recipes that answer a `Question`.

A family is one way to train. Its recipes differ in the micro-batch only: a divisor of one GPU's share of the global
batch, so that micro-batch × accumulation × GPUs is always the global batch.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

from ..formulas import model_states, shards
from ..formulas.fused_head import with_its_adapters
from ..formulas.loading import loaded_on_host
from ..formulas.predict import predict
from ..hardware.gpu import Chip, Gpu
from ..recipe import liger, lora_modules
from ..recipe.knobs import unchecked
from ..recipe.lora_modules import unquantized
from ..recipe.options import HALF, REPEATED, TRL, LoRA, Quantization, Sharding
from ..recipe.recipe import LATER_OF_LORA, Recipe
from ..recipe.shapes import Shape
from ..report.errors import RecipeError
from ..report.report import format_bytes
from .question import FLASH_SINCE, Question
from .step_time import walk
from .step_traffic import paged_bytes

SHARDED_OPTIMS = ("adamw_torch_fused", "adamw_torch")  # bitsandbytes does not update shards
# Precisions to try by method, "half" being the card's. Full training in fp16-true only on request: there AdamW's
# epsilon of 1e-8 is zero, and small gradients are too.
PRECISIONS_OF = {
    "full": ("half-true", "half-mixed", "tf32", "fp32"),
    "lora": ("half-true", "half-mixed", "fp32"),
    "qlora": ("half-true", "half-mixed"),
}
PREFERRED = ("sdpa", REPEATED, "eager", "flash_attention_2")  # kernels of attention, by what they ask of a program
SURE = 0.98  # of the saved activations interpolated from two micro-batches: rounding of blocks is not affine
ROUNDING = {"bf16-true": "1/256", "fp16-true": "1/2048"}  # half the least relative step of the format: 2^-8, 2^-11


def micro_batches(question: Question) -> tuple[int, ...]:
    """Possible micro-batches, largest first."""
    samples, least = question.samples_per_gpu, question.plain.batch_size
    return tuple(n for n in range(samples, least - 1, -1) if samples % n == 0)


def families(question: Question, method: str, refused: list[str] | None = None) -> Iterator[Recipe]:
    """Every way to train by `method`, the simpler ones first, with the largest micro-batch; why others are none is added
    to `refused`."""
    refused = [] if refused is None else refused
    prepares = (True, False) if question.gpus == 1 else (False,)  # prepared shards would have two dtypes in one unit
    bases = [Quantization("nf4", double, prepare=prepare) for prepare in prepares for double in (False, True)]
    options = {
        "use_liger_kernel": (True, False) if question.liger_is_possible() else (False,),
        "trainer": question.trainers(),
        "sharding": tuple(_shardings(question)),
        "gradient_checkpointing": question.checkpointing,
        "optim": question.optims,
        "attn_implementation": _kernels(question),
        "precision": question.precisions or _precisions(question.gpu, method),
        "quantization": bases if method == "qlora" else (None,),
    }
    fixed = {"batch_size": question.samples_per_gpu, "lora": None if method == "full" else question.lora}
    for values in itertools.product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        if not _runs(chosen["optim"], chosen["quantization"], chosen["sharding"], chosen["precision"]):
            continue
        if chosen["use_liger_kernel"] and chosen["sharding"]:
            continue  # the formulas do not know it
        if method == "lora" and (half := HALF.get(chosen["precision"].removesuffix("-mixed"))):
            chosen["dtype"] = half  # autocast over a frozen fp32 base would cast it anew in every step
        if chosen["trainer"] == "sft":
            chosen["packing"] = question.packing
            chosen["padding_free"] = chosen["attn_implementation"] == "flash_attention_2" and question.can_be_joined()
        try:  # the model, the base or the trainer cannot have it
            family = question.plain.replace(**fixed, **chosen)
            with_its_adapters(family)
        except RecipeError as error:
            refused.append(f"{error.field} {error.value!r}: {error.allowed}")
            continue
        if question.host_memory is None or host_memory(family) <= question.host_memory:
            yield family
        else:
            refused.append(f"what the host has to hold is more than its {format_bytes(question.host_memory, digits=2)}")


def _kernels(question: Question) -> list[str]:
    """Attention's kernels to try, sdpa first, which takes FlashAttention by itself. flash-attn's own is for rows of which
    each is several samples, and on request."""
    joins = question.can_be_joined() and "sft" in question.trainers()
    tries_flash = joins or "sdpa" not in question.attention
    since = question.gpu.compute_capability >= FLASH_SINCE
    left_out = {REPEATED} if since else set()  # from Ampere on sdpa has a kernel for shared keys
    if not (since and tries_flash):
        left_out.add("flash_attention_2")
    kernels = [name for name in question.attention if name not in left_out or question.attention == (name,)]
    return sorted(kernels, key=PREFERRED.index)


def counted_as(recipe: Recipe) -> Recipe:
    """The recipe by which formulas count: adapters that they do not know stand as plain ones on all linear layers."""
    lora = recipe.lora
    if lora is None or not _is_unknown(recipe.shape, lora):
        return recipe
    plain = dataclasses.replace(lora, target_modules="all-linear", **dict.fromkeys(LATER_OF_LORA[:2], False))
    return unchecked(recipe, lora=dataclasses.replace(plain, target_parameters=None))


@lru_cache(maxsize=64)
def _is_unknown(shape: Shape, lora: LoRA) -> bool:
    """Whether no formula knows these adapters."""
    later = any(getattr(lora, name) for name in LATER_OF_LORA)
    return later or lora_modules.differ_by_layer(shape, lora) or lora_modules.adapts_experts(shape, lora)


def with_micro_batch(family: Recipe, size: int) -> Recipe:
    """The family's recipe with micro-batches of `size` samples; not validated again, for speed."""
    steps = family.batch_size * family.gradient_accumulation_steps // size
    return unchecked(family, batch_size=size, gradient_accumulation_steps=steps)


def method_of(recipe: Recipe) -> str:
    """ "full", "lora" or "qlora"."""
    return "qlora" if recipe.quantization else "lora" if recipe.lora else "full"


def host_bytes(recipe: Recipe) -> int:
    """Bytes that all ranks together offload to the host's memory or may page there."""
    if not (recipe.sharding and recipe.sharding.offload):
        return paged_bytes(recipe)
    held = recipe
    moved = model_states.optimizer_state_bytes(recipe) + model_states.gradient_bytes(recipe)
    if recipe.sharding.engine == "deepspeed":
        # fp32 weights with their gradients beside the states, and a buffer for what the device
        # sends or gets: gradients at stage 3 (zero/stage3.py, grad_partitions_flat_buffer), weights
        # below (zero/stage_1_and_2.py, param_buffer_of_bit16_for_cpu_offload_groups)
        held = model_states.compute_recipe(recipe)
        rows = [row for row in model_states.parameter_table(recipe) if row.trained]
        numbers = sum(row.count * prod(row.shape) for row in rows)
        buffer = model_states.gradient_bytes(held)
        moved = model_states.optimizer_state_bytes(recipe) + 2 * model_states.FP32 * numbers + buffer
    if recipe.sharding.offload == "parameters":
        moved += model_states.parameter_bytes(held)
    return moved


def host_memory(recipe: Recipe) -> int:
    """Bytes of host memory that all ranks together need: for the weights while they load, then for what is there."""
    return max(loaded_on_host(recipe), host_bytes(recipe))


def is_sound(recipe: Recipe) -> bool:
    """Whether what is trained is kept in fp32, and fp16's gradients are scaled: no update is lost to a format."""
    full_in_half = recipe.precision in ROUNDING and recipe.lora is None
    return not (full_in_half or recipe.precision == "fp16-true")


def notes_on(recipe: Recipe, card: Gpu) -> Iterator[str]:
    """Say what to know before choosing `recipe` that ranking by speed does not weigh, one sentence each."""
    precision, full = recipe.precision, recipe.lora is None
    if precision in ROUNDING and full:
        yield f"{precision}: an update below about {ROUNDING[precision]} of a weight is rounded away (chapter 01)"
        yield f"what helps: {'; '.join(_cures(recipe, card))}"
    if precision == "fp16-true":
        yield "fp16-true: nothing scales the loss, so gradients under 6e-8 become zero (chapter 01)"
    if recipe.optim.startswith("paged"):
        yield f"paged states: {format_bytes(host_bytes(recipe), digits=2)} of host memory when the card is full"
    yield from unquantized(recipe)
    sharding = recipe.sharding
    if sharding and sharding.offload:
        yield f"{sharding.offload} offloaded: {format_bytes(host_bytes(recipe), digits=0)} of host memory for all ranks"
    if sharding and sharding.world_size > 8:
        yield "more than 8 GPUs are several machines: say link=, the bytes a second of one GPU's network"


def _cures(recipe: Recipe, card: Gpu) -> Iterator[str]:
    """What keeps small updates, instead of training all weights in half precision."""
    mixed = recipe.precision.replace("-true", "-mixed")
    with contextlib.suppress(RecipeError):
        peaks = [predict(each, card).peak.total for each in (recipe, recipe.replace(precision=mixed))]
        yield f"fp32 weights ({mixed}), {format_bytes(peaks[1] - peaks[0], digits=2)} more"
    yield "adapters in fp32 (method lora)"


def without_switches(recipe: Recipe, card: Gpu) -> dict[str, int]:
    """Return by switch that is on in `recipe` what leaving it out adds to the predicted peak, in bytes."""
    recipe, found = counted_as(recipe), {}
    before = predict(recipe, card).peak.total
    for name, fields in _switches(recipe):
        with contextlib.suppress(RecipeError):  # the trainer needs it, or the formulas do not know the recipe without
            found[name] = predict(recipe.replace(**fields), card).peak.total - before
    return found


def _switches(recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each switch that is on, and the fields that leave it out."""
    if recipe.use_liger_kernel:
        yield "Liger's kernels", {"use_liger_kernel": False}
    if recipe.trainer == "sft":
        yield "SFTTrainer's loss", {"trainer": "transformers", "packing": False, "padding_free": False}
    if recipe.gradient_checkpointing:
        yield "checkpointing", {"gradient_checkpointing": False}
    if recipe.activation_offloading:
        yield "offloaded activations", {"activation_offloading": False}
    if "8bit" in recipe.optim:
        yield "8-bit states", {"optim": "adamw_torch_fused"}
    if recipe.quantization and recipe.quantization.double:
        yield "double quantization", {"quantization": dataclasses.replace(recipe.quantization, double=False)}
    if recipe.quantization and recipe.lora:
        yield "the 4-bit base", {"quantization": None, "dtype": recipe.weights_dtype}


def to_install(recipe: Recipe) -> Iterator[str]:
    """Return what `recipe` needs that a plain Trainer does not, as pip knows it."""
    if liger.kernels(recipe):
        yield "liger-kernel"
    if recipe.lora:
        yield "peft"
    if recipe.quantization or "bit" in recipe.optim:
        yield "bitsandbytes"
    if recipe.trainer in TRL:
        yield "trl"
    if recipe.attn_implementation == "flash_attention_2":
        yield "flash-attn"
    if recipe.sharding and recipe.sharding.engine == "deepspeed":
        yield "deepspeed"


def least_bytes(recipe: Recipe) -> int:
    """Return a lower bound of a rank's peak: weights, gradients and states when the optimizer steps."""
    rank = shards.rank_bytes(recipe)
    return rank.parameters + rank.gradients + rank.optimizer_states


def held_bytes(recipe: Recipe, chip: Chip) -> int:
    """Return a lower bound of a rank's peak: model states, and gradients or what is saved when forward ends."""
    rank = shards.rank_bytes(recipe)
    saved = int(SURE * walk(model_states.compute_recipe(recipe), chip).kept)
    return rank.parameters + rank.optimizer_states + max(rank.gradients, saved)


def _precisions(card: Gpu, method: str) -> list[str]:
    """Precisions to try: bf16 where the card computes in it, else fp16."""
    half = "bf16" if card.supports("bf16") else "fp16"
    names = [name.replace("half", half) for name in PRECISIONS_OF[method]]
    return [name for name in names if card.supports(name) and not (method == "full" and name == "fp16-true")]


def _shardings(question: Question) -> Iterator[Sharding | None]:
    if question.gpus == 1:
        yield None
    for engine, ways in (shards.ON_ONE_GPU if question.gpus == 1 else shards.ON_SEVERAL).items():
        for stage, offload in ways:
            if engine in question.engines and (question.offload or not offload):
                yield Sharding(stage, question.gpus, engine, offload)


def _runs(optim: str, base: Quantization | None, sharding: Sharding | None, precision: str) -> bool:
    """Whether a combination runs, and is not another one under a second name."""
    if sharding is None:
        return True
    if sharding.engine == "deepspeed" and precision.endswith("-true"):
        # DeepSpeed keeps fp32 copies of half-precision weights either way: that is "-mixed", in no more bytes
        return False
    if sharding.offload:  # DeepSpeed updates by its own CPU Adam, FSDP on the CPU; DeepSpeed moves no packed weights
        return optim == "adamw_torch" and not (base and sharding.engine == "deepspeed")
    return sharding.stage == 0 or optim in SHARDED_OPTIMS
