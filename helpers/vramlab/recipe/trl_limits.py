"""What TRL's trainers do not train."""

import dataclasses

from . import (
    lora_modules,
)
from .fields import RecipeFields
from .knobs import Refusals
from .options import (
    LOOPS,
    TRL,
    LoRA,
)

LEAST_BATCH = {"kto": 2}  # samples


def refusals(recipe: RecipeFields) -> Refusals:
    """Return what TRL's trainers do not train."""
    name = TRL[recipe.trainer]
    task = "sequence-classification" if recipe.trainer == "reward" else "causal-lm"
    allowed = f"{name} trains models for {task}, not for {recipe.shape.task}"
    reads_images = recipe.trainer == "sft" and recipe.shape.task == "image-text"
    yield "trainer", recipe.shape.task != task and not reads_images, allowed
    # The two that TRL's configurations say as the Trainer's do; all else of the loop is fixed.
    usual = dataclasses.replace(recipe.loop, max_grad_norm=1.0, empty_cache_steps=None)
    allowed = f"{name} has the Trainer's loop without a cache: use loop='trainer'"
    yield "loop", usual != LOOPS["trainer"], allowed
    yield from _sharding_refusals(recipe, name)
    least = LEAST_BATCH.get(recipe.trainer, 1)
    allowed = "KTOTrainer compares samples of a micro-batch: take at least 2"
    yield "batch_size", recipe.batch_size < least, allowed
    if recipe.lora:
        yield from _adapter_refusals(recipe, name, recipe.lora)


def _sharding_refusals(recipe: RecipeFields, name: str) -> Refusals:
    """Return how TRL's trainers are not modelled on many ranks."""
    engine = recipe.group.engine
    allowed = f"{name} is modelled on 'ddp', 'fsdp' and 'deepspeed'"
    yield "sharding.engine", engine not in ("ddp", "fsdp", "deepspeed"), allowed
    precomputes = engine == "deepspeed" and recipe.precompute_ref_log_probs
    is_whole = recipe.has_reference or precomputes
    allowed = (
        f"{name}'s reference model is modelled whole: add lora, which needs none, or "
        "take engine 'ddp'"
    )
    yield "sharding.engine", engine != "ddp" and is_whole, allowed
    is_third = engine == "deepspeed" and recipe.group.stage == 3
    allowed = f"{name} trains adapters otherwise there: take stage 2, or engine 'fsdp'"
    yield "sharding.stage", is_third and recipe.lora, allowed


def _adapter_refusals(recipe: RecipeFields, name: str, lora: LoRA) -> Refusals:
    """Return adapters that TRL's trainers do not train."""
    shape = recipe.shape
    quantization = recipe.quantization
    keeps_copy = not quantization and recipe.trainer not in ("sft", "reward")
    allowed = (
        f"{name} keeps a copy of adapters that it does not make itself, which are in "
        "fp32: leave it True"
    )
    is_half = keeps_copy and not lora.autocast_adapter_dtype
    yield "lora.autocast_adapter_dtype", is_half, allowed
    allowed = (
        f"{name} does not call prepare_model_for_kbit_training: say Quantization(prepare=False)"
    )
    yield "quantization.prepare", quantization and quantization.prepare, allowed
    # pytorch/pytorch#127176
    allowed = f"the loss scaler refuses the bfloat16 adapters that {name} makes: take "
    # No other trainer samples.
    instead = "--precision fp32" if recipe.rollouts else "--trainer transformers"
    allowed += f"--precision bf16-mixed, or before Ampere {instead}"
    yield "precision", quantization and recipe.precision == "fp16-mixed", allowed
    has_fused_head = recipe.trainer != "reward"
    is_adapted = has_fused_head and lora_modules.is_adapted(shape, lora, shape.head)
    allowed = f"{name} refuses an adapter on {shape.head}, whose weight its fused head reads: "
    yield "lora.target_modules", is_adapted, allowed + "leave that out"
