"""DeepSpeed's configuration of a recipe, the same for the `Trainer` and for the training step."""

from typing import TYPE_CHECKING, Any

from ..report.errors import RecipeError

if TYPE_CHECKING:
    from .options import Sharding

HIDDEN = {  # what `HfTrainerDeepSpeedConfig.trainer_config_finalize` gives for "auto", of a model's hidden size
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def deepspeed_config(sharding: "Sharding") -> dict[str, Any]:
    """What goes into `TrainingArguments.deepspeed`; "auto" is filled in by the `Trainer`, and by `filled_in`.

    Bucket sizes are "auto", numbers of elements that follow the hidden size; DeepSpeed's own default is 500 million,
    which alone would be 1 GB of bf16. Offloaded states are updated by the recipe's optimizer instead of DeepSpeed's
    own CPU Adam, which has to be compiled and holds the same bytes.
    """
    zero: dict[str, Any] = {"stage": sharding.stage}
    if sharding.stage:
        zero["reduce_bucket_size"] = "auto"
    if sharding.stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    parts = {"optimizer": ["offload_optimizer"], "parameters": ["offload_optimizer", "offload_param"]}
    zero |= {part: {"device": "cpu"} for part in parts.get(sharding.offload, ())}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {"zero_optimization": zero, **dict.fromkeys(auto, "auto")}
    config |= {name: {"enabled": "auto"} for name in ("fp16", "bf16")}
    if sharding.offload:
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def filled_in(recipe: Any, hidden: int) -> dict[str, Any]:
    """The configuration of `recipe` as `Trainer` and accelerate complete it for a model of `hidden` channels.

    Sources: `HfTrainerDeepSpeedConfig.trainer_config_process` and `.trainer_config_finalize`
    (transformers/integrations/deepspeed.py), `DeepSpeedPlugin.__post_init__` and `Accelerator._prepare_deepspeed`.
    A "-true" precision is the model's own dtype, and neither fp16 nor bf16 for DeepSpeed, as for the `Trainer`.
    """
    config = deepspeed_config(recipe.sharding)
    zero = config["zero_optimization"]
    zero |= {name: HIDDEN[name](hidden) for name, value in zero.items() if value == "auto"}
    return config | {
        "train_micro_batch_size_per_gpu": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        "gradient_clipping": recipe.loop.max_grad_norm or 0.0,
        "fp16": {"enabled": recipe.precision == "fp16-mixed"},
        "bf16": {"enabled": recipe.precision == "bf16-mixed"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": float("inf"),
    }


def hidden_size(config: Any) -> int:
    """The hidden size that "auto" goes by: of a model's configuration, the largest if there are several.

    Raises RecipeError where the `Trainer` would not know either.
    """
    for part in (config, getattr(config, "text_config", None)):
        if size := getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or (0,)):
            return size
    rest = "DeepSpeed's buckets are sized by the model's hidden_size, and its configuration has none"
    raise RecipeError("sharding.engine", "deepspeed", rest)


def nvme_config(
    path: str,
    sharding: "Sharding | None" = None,
    *,
    parameters: bool = True,
    buffer_count: int = 5,
    aio: dict | None = None,
) -> dict[str, Any]:
    """A configuration for `TrainingArguments.deepspeed` that keeps states on an NVMe drive (ZeRO-Infinity, stage 3).

    Args:
        path: a folder on the drive, one that every rank of a node sees.
        sharding: what else is asked of stage 3; None takes its defaults.
        parameters: the weights go there too, not only fp32 weights, gradients and the optimizer's states.
        buffer_count: of pinned host buffers through which weights are read; each is as large as the largest weight.
        aio: over DeepSpeed's defaults of its asynchronous reads and writes (`runtime/swap_tensor/constants.py`).
    Source: Rajbhandari et al. 2021; deepspeed/runtime/zero/offload_config.py. No run of this course has used it: see
    `nvme_missing`.
    """
    from .options import Sharding

    sharding = sharding or Sharding(3, engine="deepspeed")
    if sharding.engine != "deepspeed" or sharding.stage != 3:
        raise RecipeError("sharding.stage", sharding.stage, "NVMe offload needs engine 'deepspeed' at stage 3")
    config = deepspeed_config(sharding)
    zero = config["zero_optimization"]
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": path, "pin_memory": True, "buffer_count": 4}
    if parameters:
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": path,
            "pin_memory": True,
            "buffer_count": buffer_count,
            "buffer_size": 100_000_000,
            "max_in_cpu": 1_000_000_000,
        }
    defaults = {"block_size": 1_048_576, "queue_depth": 8, "intra_op_parallelism": 1}
    config["aio"] = defaults | {"single_submit": False, "overlap_events": True} | (aio or {})
    return config


def nvme_missing() -> str:
    """Why DeepSpeed cannot reach an NVMe drive on this machine, as a clause; "" when it can.

    It compiles its operator `async_io` against libaio on first use, so the library's headers have to be there.
    """
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ImportError:
        return "DeepSpeed is not installed (pip install deepspeed)"
    if AsyncIOBuilder().is_compatible(verbose=False):
        return ""
    return "its operator async_io needs libaio with headers (on Debian and Ubuntu: apt install libaio-dev)"
