"""DeepSpeed's configuration of a recipe, the same for the `Trainer` and for the training step."""

from collections.abc import Callable
from typing import Any

from ..base.errors import RecipeError
from .fields import RecipeFields
from .options import Sharding

# What `HfTrainerDeepSpeedConfig.trainer_config_finalize` gives for "auto", of a model's hidden
# size.
HIDDEN: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}

MOST_GATHERED = 1_000_000_000  # stage3_max_live_parameters, and stage3_max_reuse_distance


def deepspeed_config(sharding: Sharding) -> dict[str, Any]:
    """Return what goes into `TrainingArguments.deepspeed`.

    "auto" is filled in by the `Trainer`, and by `filled_in`. Bucket sizes follow the hidden size:
    DeepSpeed's default of 500 million elements alone would be 1 GB of bf16. Offloaded states are
    updated by the recipe's optimizer: DeepSpeed's CPU Adam has to be compiled and holds the same
    bytes.
    """
    zero: dict[str, Any] = {"stage": sharding.stage}
    for name in HIDDEN:
        first_stage = 3 if name.startswith("stage3") else 1
        if sharding.stage >= first_stage:
            zero[name] = "auto"
    if sharding.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if sharding.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    if not sharding.memory_efficient_linear:
        zero["memory_efficient_linear"] = False
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
    }
    if sharding.offload:
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def check_dtype(recipe: RecipeFields) -> None:
    """Raise RecipeError where the `Trainer` would train weights of another dtype.

    At stage 3 `from_pretrained` makes the weights inside `deepspeed.zero.Init`, which takes their
    dtype from this configuration alone (`_set_dtype` in zero/partition_parameters.py;
    transformers/modeling_utils.py gives it no other). Quantized weights are not made so
    (`get_init_context` there).
    """
    sharding = recipe.group
    dtype = recipe.weights_dtype
    if (sharding.engine, sharding.stage) != ("deepspeed", 3):
        return
    if recipe.quantization or recipe.precision.endswith("-mixed") or dtype == "float32":
        return
    mixed = "fp16-mixed" if dtype == "float16" else "bf16-mixed"
    rest = (
        f"at DeepSpeed's stage 3 from_pretrained makes fp32 of {dtype} weights then: take "
        f"{mixed!r}, whose weights are {dtype} beside DeepSpeed's fp32 copies, or 'fp32'"
    )
    raise RecipeError("precision", recipe.precision, rest)


def filled_in(recipe: RecipeFields) -> dict[str, Any]:
    """Return the configuration of `recipe` as `Trainer` and accelerate complete it.

    Sources: `HfTrainerDeepSpeedConfig.trainer_config_process` and `.trainer_config_finalize`
    (transformers/integrations/deepspeed.py), `DeepSpeedPlugin.__post_init__` and
    `Accelerator._prepare_deepspeed`. A "-true" precision is the model's own dtype, and neither fp16
    nor bf16 for DeepSpeed, as for the `Trainer`, which cannot make such a model at stage 3
    (`check_dtype`).
    """
    config = deepspeed_config(recipe.group)
    zero = config["zero_optimization"]
    for name, value in zero.items():
        if value == "auto":
            zero[name] = HIDDEN[name](recipe.shape.hidden_size)
    return config | {
        "train_micro_batch_size_per_gpu": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        "gradient_clipping": recipe.loop.max_grad_norm or 0.0,
        "fp16": {"enabled": recipe.precision == "fp16-mixed"},
        "bf16": {"enabled": recipe.precision == "bf16-mixed"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": float("inf"),
    }
