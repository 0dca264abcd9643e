"""Which recipes train with cut cross-entropy (Wijmans et al. 2024), as axolotl's plugin does."""

from . import lora_modules
from .fields import RecipeFields
from .knobs import Refusals

FIELD = "cut_cross_entropy"
PACKAGE = (
    "cut-cross-entropy[transformers] @ git+https://github.com/axolotl-ai-cloud/ml-cross-entropy"
)
# Whose patched forward passes have the same loss: neither scaled nor capped logits
# (`cut_cross_entropy/transformers` of axolotl's fork at 5f0c7a7).
FAMILIES = (
    "gemma glm4_moe gpt_oss llama mistral mixtral olmo2 olmo3 phi3 qwen2 qwen3 qwen3_moe "
    "qwen3_next smollm3"
)


def refusals(recipe: RecipeFields) -> Refusals:
    """Return what cut cross-entropy does not train, or is not modelled with."""
    if not recipe.cut_cross_entropy:
        return
    shape = recipe.shape
    is_plain = shape.family in FAMILIES.split() and shape.task == "causal-lm"
    allowed = f"it is modelled for causal-lm of {FAMILIES}"
    yield FIELD, not is_plain, allowed
    engine = recipe.group.engine
    is_usual = recipe.trainer == "transformers" and engine == "ddp"
    smooths = recipe.label_smoothing_factor
    allowed = "it is modelled with trainer 'transformers', without label smoothing, on one device "
    yield FIELD, not is_usual or smooths, allowed + "and on ranks of 'ddp'"
    prepared = recipe.quantization and recipe.quantization.prepare
    lora = recipe.lora
    is_saved = lora and shape.head in (lora.modules_to_save or ())
    is_wide = recipe.weights_dtype == "float32" or prepared or is_saved
    allowed = f"its backward pass asks for {shape.head} in half precision: say a dtype, without "
    yield FIELD, is_wide, allowed + "a copy that is trained or quantization.prepare"
    allowed = f"it reads the weight of {shape.head} and not its adapter, which would not be trained"
    is_adapted = lora_modules.is_adapted(shape, lora, shape.head)
    yield "lora.target_modules", is_adapted, allowed
