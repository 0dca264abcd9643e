"""Which parts of a model `use_liger_kernel` replaces, from `data/liger.json`: Liger's own package is not asked."""

import json
from typing import Any

from ..report.data import data_path
from ..report.errors import RecipeError

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


def check(recipe: Any) -> None:
    """Raise RecipeError for switches that do not exist, and for what Liger or a model of it does not train."""
    _check_switches(recipe)
    shape, lora, on = recipe.shape, recipe.lora, kernels(recipe)
    if not on:
        return
    if recipe.trainer not in ("transformers", "sft"):
        raise RecipeError("use_liger_kernel", True, f"it is not modelled with trainer={recipe.trainer!r}: leave it out")
    if recipe.sharding and recipe.sharding.engine not in ("ddp", "fsdp"):
        raise RecipeError("use_liger_kernel", True, "it is modelled on one device and on ranks of 'ddp' and 'fsdp'")
    if shape.experts_per_token and "swiglu" in on:
        allowed = "what Liger's experts allocate depends on where the router sends tokens: say liger_kernel_config="
        raise RecipeError("use_liger_kernel", True, f"{allowed}{{'swiglu': False}}")
    if HEAD not in on:
        return
    if recipe.trainer == "sft":
        allowed = f"SFTTrainer has a fused head of its own: leave {HEAD} out"
        raise RecipeError("liger_kernel_config", recipe.liger_kernel_config, allowed)
    if shape.task != "causal-lm":
        allowed = f"Liger puts a language model's head in the place of {shape.head}: say liger_kernel_config="
        raise RecipeError("use_liger_kernel", True, f"{allowed}{{{HEAD!r}: False}}")
    if lora and recipe.sharding and recipe.sharding.engine == "fsdp":
        rest = "Liger's head multiplies by a weight that FSDP leaves cut beside adapters: say liger_kernel_config="
        raise RecipeError("use_liger_kernel", True, f"{rest}{{{HEAD!r}: False}}, or engine='ddp'")
    if lora and shape.head in (name for name, *_ in shape.lora_targets(lora.target_modules, lora.modules_to_save)):
        rest = f"Liger's head reads the weight of {shape.head} and not its adapter, which would not be trained"
        raise RecipeError("lora.target_modules", lora.target_modules, rest)


def _check_switches(recipe: Any) -> None:
    config = recipe.liger_kernel_config
    if config is None:
        return
    known = isinstance(config, dict) and all(n in SWITCHES and isinstance(on, bool) for n, on in config.items())
    if not known or not recipe.use_liger_kernel:
        allowed = f"it must be a dictionary of True and False for {', '.join(SWITCHES)}, with use_liger_kernel=True"
        raise RecipeError("liger_kernel_config", config, allowed)
