"""Which parts of a model `use_liger_kernel` replaces, from `data/liger.json`: Liger's own package is not asked."""

import json
from typing import Any

from ..report.data import data_path
from . import lora_modules
from .knobs import Refusals

FAMILIES = json.loads(data_path("liger.json").read_text(encoding="utf-8"))["families"]
HEAD = "fused_linear_cross_entropy"
SWITCHES = ("rope", "rms_norm", "swiglu", "geglu", HEAD)


def kernels(recipe: Any) -> frozenset[str]:
    """Return the switches that are on and change the recipe's model; SFTTrainer has a fused head of its own."""
    if not recipe.use_liger_kernel or recipe.shape.family not in FAMILIES:
        return frozenset()
    said = {HEAD: recipe.trainer != "sft", **(recipe.liger_kernel_config or {})}
    return frozenset(name for name in SWITCHES if said.get(name, True))


def words(config: dict[str, bool]) -> str:
    return " ".join(f"{'with' if on else 'without'} {name}" for name, on in sorted(config.items()))


def refusals(recipe: Any) -> Refusals:
    """Switches that do not exist, and what Liger or a model of it does not train."""
    shape, lora, config, sharding = recipe.shape, recipe.lora, recipe.liger_kernel_config, recipe.sharding
    switches = isinstance(config, dict) and all(n in SWITCHES and isinstance(on, bool) for n, on in config.items())
    allowed = f"it must be a dictionary of True and False for {', '.join(SWITCHES)}, with use_liger_kernel=True"
    yield "liger_kernel_config", config is not None and not (switches and recipe.use_liger_kernel), allowed
    if not (on := kernels(recipe)):
        return
    allowed = f"it is not modelled with trainer={recipe.trainer!r}: leave it out"
    yield "use_liger_kernel", recipe.trainer not in ("transformers", "sft"), allowed
    allowed = "it is modelled on one device and on ranks of 'ddp' and 'fsdp'"
    yield "use_liger_kernel", sharding and sharding.engine not in ("ddp", "fsdp"), allowed
    allowed = "what Liger's experts allocate depends on where the router sends tokens: say liger_kernel_config="
    yield "use_liger_kernel", shape.experts_per_token and "swiglu" in on, f"{allowed}{{'swiglu': False}}"
    if HEAD not in on:
        return
    allowed = f"SFTTrainer has a fused head of its own: leave {HEAD} out"
    yield "liger_kernel_config", recipe.trainer == "sft", allowed
    without = f"say liger_kernel_config={{{HEAD!r}: False}}"
    allowed = f"Liger puts a language model's head in the place of {shape.head}: {without}"
    yield "use_liger_kernel", shape.task != "causal-lm", allowed
    allowed = f"Liger's head multiplies by a weight that FSDP leaves cut beside adapters: {without}, or engine='ddp'"
    yield "use_liger_kernel", lora and sharding and sharding.engine == "fsdp", allowed
    allowed = f"Liger's head reads the weight of {shape.head} and not its adapter, which would not be trained"
    yield "lora.target_modules", lora_modules.is_adapted(shape, lora, shape.head), allowed
