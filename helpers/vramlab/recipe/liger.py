"""Which parts of a model `use_liger_kernel` replaces, from `data/liger.json`.

Liger's own package is not asked.
"""

import json

from ..base.data import data_path
from . import lora_modules
from .fields import RecipeFields
from .knobs import Refusals

FAMILIES = json.loads(data_path("liger.json").read_text(encoding="utf-8"))["families"]
HEAD = "fused_linear_cross_entropy"
SWITCHES = frozenset(("rope", "rms_norm", "swiglu", "geglu", HEAD))
FIELD = "use_liger_kernel"


def kernels(recipe: RecipeFields) -> frozenset[str]:
    """Return the switches that are on; SFTTrainer and cut cross-entropy have heads of their own."""
    if not recipe.use_liger_kernel or recipe.shape.family not in FAMILIES:
        return frozenset()
    has_head = recipe.trainer == "sft" or recipe.cut_cross_entropy
    return SWITCHES - {HEAD} if has_head else SWITCHES


def refusals(recipe: RecipeFields) -> Refusals:
    """Return what Liger or a model of it does not train."""
    switches = kernels(recipe)
    if not switches:
        return
    shape = recipe.shape
    engine = recipe.group.engine
    allowed = "it is modelled with trainer 'transformers' and 'sft'"
    yield FIELD, recipe.trainer not in ("transformers", "sft"), allowed
    allowed = "it is modelled on one device and on ranks of 'ddp' and 'fsdp'"
    yield FIELD, engine not in ("ddp", "fsdp"), allowed
    allowed = "what Liger's experts allocate depends on where the router sends tokens"
    yield FIELD, shape.experts_per_token, allowed
    if HEAD not in switches:
        return
    allowed = f"Liger puts a language model's head in the place of {shape.head}"
    yield FIELD, shape.task != "causal-lm", allowed
    allowed = "beside adapters FSDP leaves the head's weight cut: take engine='ddp'"
    yield FIELD, recipe.lora and engine == "fsdp", allowed
    allowed = (
        f"Liger's head reads the weight of {shape.head} and not its adapter, which would "
        "not be trained"
    )
    is_adapted = lora_modules.is_adapted(shape, recipe.lora, shape.head)
    yield "lora.target_modules", is_adapted, allowed
