"""Which parts of a model `use_liger_kernel` replaces, from `data/liger.json`: Liger's own package is not asked."""

import json
from typing import Any

from ..report.data import data_path
from . import lora_modules
from .knobs import Refusals

FAMILIES = json.loads(data_path("liger.json").read_text(encoding="utf-8"))["families"]
HEAD = "fused_linear_cross_entropy"
SWITCHES = frozenset(("rope", "rms_norm", "swiglu", "geglu", HEAD))


def kernels(recipe: Any) -> frozenset[str]:
    """Return the switches that are on; SFTTrainer has a fused head of its own."""
    if not recipe.use_liger_kernel or recipe.shape.family not in FAMILIES:
        return frozenset()
    return SWITCHES - {HEAD} if recipe.trainer == "sft" else SWITCHES


def refusals(recipe: Any) -> Refusals:
    """What Liger or a model of it does not train."""
    if not (on := kernels(recipe)):
        return
    shape, lora, name = recipe.shape, recipe.lora, "use_liger_kernel"
    engine = recipe.sharding.engine if recipe.sharding else "ddp"
    yield name, recipe.trainer not in ("transformers", "sft"), "it is modelled with trainer 'transformers' and 'sft'"
    yield name, engine not in ("ddp", "fsdp"), "it is modelled on one device and on ranks of 'ddp' and 'fsdp'"
    yield name, shape.experts_per_token, "what Liger's experts allocate depends on where the router sends tokens"
    if HEAD not in on:
        return
    yield name, shape.task != "causal-lm", f"Liger puts a language model's head in the place of {shape.head}"
    yield name, lora and engine == "fsdp", "beside adapters FSDP leaves the head's weight cut: take engine='ddp'"
    allowed = f"Liger's head reads the weight of {shape.head} and not its adapter, which would not be trained"
    yield "lora.target_modules", lora_modules.is_adapted(shape, lora, shape.head), allowed
