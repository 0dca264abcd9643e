"""Where PEFT's other methods, Muon, regularizers and frozen modules are not modelled."""

from . import lora_modules, peft_methods
from .fields import RecipeFields
from .knobs import Refusals
from .optimizers import SIMULATED
from .options import TRL

# Whose router is a subclass of `nn.Linear` that returns scores beside its product, in which PEFT's
# adapters look for a dtype (`Llama4Router`, `PhimoeTopKRouter` of transformers 5.23).
ROUTER = "router"
WITH_LINEAR_ROUTER = ("llama4", "llama4_text", "phimoe")


def refusals(recipe: RecipeFields) -> Refusals:
    """Yield (field, whether its value is refused, what is allowed)."""
    if recipe.peft:
        yield from _method_refusals(recipe, recipe.peft)
    yield from _regularizer_refusals(recipe)
    yield from _router_refusals(recipe)
    is_simulated = recipe.optim in SIMULATED
    allowed = "it is modelled on one device"
    yield "optim", is_simulated and recipe.sharding, allowed
    allowed = "it is modelled with an update of all weights: take loop 'trainer' or 'plain'"
    yield "optim", is_simulated and recipe.loop.optimizer_in_backward, allowed
    allowed = "adapters leave the whole base frozen: name their targets instead"
    yield "freeze", recipe.freeze and recipe.adapters, allowed


def _method_refusals(recipe: RecipeFields, method: peft_methods.Peft) -> Refusals:
    """Return where PEFT's other methods are not modelled."""
    allowed = "PEFT's methods other than LoRA are modelled on one device"
    yield "sharding", recipe.sharding, allowed
    is_other = recipe.trainer not in ("transformers", "sft")
    name = TRL.get(recipe.trainer)
    yield "peft", is_other, f"{name} is modelled with LoRA: take trainer 'sft', or lora"
    takes_whole = method.peft_type in peft_methods.NEED_WHOLE_WEIGHTS
    allowed = (
        f"{method.peft_type} computes with the base's own weights, which 4 bits pack: "
        "take no quantization, or a method such as LoRA, OFT, VERA or IA3"
    )
    yield "peft", recipe.quantization and takes_whole, allowed
    # PeftModel.get_prompt
    keeps_keys = method.peft_type in peft_methods.WITH_CACHE
    allowed = f"PEFT refuses {method.peft_type} with it, whose keys are in the cache"
    yield "gradient_checkpointing", keeps_keys and recipe.gradient_checkpointing, allowed


def _router_refusals(recipe: RecipeFields) -> Refusals:
    """Return where PEFT would adapt a router and fail in its forward pass."""
    if recipe.lora is None or recipe.shape.family not in WITH_LINEAR_ROUTER:
        return
    adapted = lora_modules.adapted(recipe.shape, recipe.lora)
    ends = {name.rpartition(".")[2] for name, _, _ in adapted}
    others = ",".join(sorted(ends - {ROUTER})) or "q_proj,v_proj"
    allowed = "PEFT adapts the router too, whose result its adapters cannot add to: name the "
    yield "lora.target_modules", ROUTER in ends, f"{allowed}modules, such as {others}"


def _regularizer_refusals(recipe: RecipeFields) -> Refusals:
    """Return where the Trainer's smoothed labels and noise are not modelled."""
    is_other = recipe.trainer != "transformers" or recipe.loop.name != "trainer"
    allowed = "it is modelled in transformers' Trainer on one device"
    smooths = recipe.label_smoothing_factor
    yield "label_smoothing_factor", smooths and (is_other or recipe.sharding), allowed
    is_fused = smooths and recipe.use_liger_kernel
    allowed = "it needs the logits, which Liger's loss does not make"
    yield "label_smoothing_factor", is_fused, allowed
    has_noise = recipe.neftune_noise_alpha is not None
    is_other = recipe.trainer not in ("transformers", "sft") or bool(recipe.sharding)
    allowed = "it is modelled in transformers' Trainer and SFTTrainer on one device"
    yield "neftune_noise_alpha", has_noise and is_other, allowed
    allowed = "an image model has no embedded tokens"
    yield "neftune_noise_alpha", has_noise and recipe.shape.image_tokens, allowed
