"""The recipe by which formulas count another, and what the host has to hold."""

import dataclasses
from functools import lru_cache
from math import prod

from ..formulas import model_states
from ..formulas.loading import loaded_on_host
from ..hardware.gpu import DEFAULT_CHIP
from ..recipe import lora_modules
from ..recipe.knobs import unchecked
from ..recipe.options import LoRA
from ..recipe.recipe import LATER_OF_LORA, Recipe
from ..recipe.shapes import Shape
from ..report.report import format_bytes
from .question import Question, without_rollouts
from .step_traffic import paged_bytes
from .step_walk import walk

HOSTS = {"free Colab": 12.7, "Kaggle": 30}  # GiB of host memory, as their machines show it

# `CachingHostAllocator` rounds pinned blocks up to a power of two: at most twice as much.
PINNED = 2


def counted_as(recipe: Recipe) -> Recipe:
    """Return the recipe by which formulas count.

    Adapters that they do not know stand as plain ones on all linear layers, what is sampled as
    given.
    """
    recipe = without_rollouts(recipe)
    if recipe.activation_offloading:
        recipe = unchecked(recipe, activation_offloading=False)
    if recipe.peft:
        return unchecked(recipe, lora=LoRA(target_modules="all-linear"), peft=None)
    lora = recipe.lora
    if lora is None or not _is_unknown(recipe.shape, lora):
        return recipe
    plain = dataclasses.replace(
        lora,
        target_modules="all-linear",
        use_dora=False,
        lora_bias=False,
        target_parameters=None,
    )
    return unchecked(recipe, lora=plain)


@lru_cache(maxsize=64)
def _is_unknown(shape: Shape, lora: LoRA) -> bool:
    """Tell whether no formula knows these adapters."""
    if any(getattr(lora, name) for name in LATER_OF_LORA):
        return True
    return lora_modules.differ_by_layer(shape, lora) or lora_modules.adapts_experts(shape, lora)


def host_bytes(recipe: Recipe) -> int:
    """Return the bytes that all ranks together offload to the host's memory or may page there."""
    sharding = recipe.group
    if not sharding.offload:
        return paged_bytes(recipe)
    computed = recipe
    moved = model_states.optimizer_state_bytes(recipe)
    if sharding.engine == "deepspeed":
        # fp32 weights with their gradients beside the states, and a buffer for what the device
        # sends or gets: gradients at stage 3 (zero/stage3.py, grad_partitions_flat_buffer), weights
        # below (zero/stage_1_and_2.py, param_buffer_of_bit16_for_cpu_offload_groups)
        computed = model_states.compute_recipe(recipe)
        rows = [row for row in model_states.parameter_table(recipe) if row.trained]
        numbers = sum(row.count * prod(row.shape) for row in rows)
        moved += 2 * model_states.FP32 * numbers
    moved += model_states.gradient_bytes(computed)
    if sharding.offload == "parameters":
        moved += model_states.parameter_bytes(computed)
    return moved


def host_memory(recipe: Recipe, kept: int = 0) -> int:
    """Return the bytes of host memory that all ranks together need.

    That is for the weights while they load, then for what is there, of which an evaluation has
    `kept`.
    """
    counted = counted_as(recipe)
    there = host_bytes(counted) + activations_on_host(recipe) + kept
    # Weights are read before anything is offloaded, so both do not add up.
    return max(loaded_on_host(counted), there)


def has_room(question: Question, recipe: Recipe) -> bool:
    """Tell whether the host has the memory that all ranks need there."""
    return question.host_memory is None or host_memory(recipe) <= question.host_memory


def refused_by_host(question: Question) -> str:
    """Return why a recipe without room on the host (`has_room`) is not tried."""
    size = format_bytes(question.host_memory or 0, digits=2)
    return f"what the host has to hold is more than its {size}"


def activations_on_host(recipe: Recipe) -> int:
    """Return the most bytes of host memory that offloaded activations take, which is pinned."""
    if not recipe.activation_offloading:
        return 0
    return PINNED * walk(counted_as(recipe), DEFAULT_CHIP).kept
