"""Between a `Recipe` and `transformers.TrainingArguments`: the same training, said either way.

`TrainingArguments` describe how the `Trainer` trains, not what: the model, its format ("-true" precisions), sequence
length, adapters, quantization, attention kernel and the number of ranks are said elsewhere, so they are arguments here.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from .engines.deepspeed_config import deepspeed_config
from .errors import RecipeError
from .options import LOOPS, Loop, Sharding
from .recipe import ATTENTION, Recipe

if TYPE_CHECKING:
    from transformers import TrainingArguments

# What `Trainer` hands to each optimizer (transformers/trainer_optimizer.py): its own arguments, and those it takes
# from `optim_args`. The rest of `optim_args` it drops without a word.
OWN = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
TAKES = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr", "lr_decay", "weight_decay", "eps"),
    "rmsprop": ("lr", "momentum", "alpha", "eps", "weight_decay", "centered"),
    "adafactor": ("lr", "weight_decay"),
}
# Arguments that move the peak when they are set, and that no recipe models.
UNMODELLED = (
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "use_liger_kernel",
    "optim_target_modules",
    "auto_find_batch_size",
)


def to_training_arguments(recipe: Recipe, output_dir: str = "out", **changes: Any) -> "TrainingArguments":
    """The `TrainingArguments` with which the `Trainer` trains as `recipe` says; `changes` are set on top.

    Nothing is reported or saved unless `changes` ask for it. Without a GPU the arguments say `use_cpu`; bf16 then
    trains on the CPU, tf32 is recorded but nothing is switched on, and fp16 waits for a GPU, because accelerate refuses
    to autocast to fp16 on a CPU when the `Trainer` starts. Precisions ending in "-true", sequence length, adapters,
    quantization and attention kernel belong to the model and its data, and are not in the result.

    Raises:
        RecipeError: the `Trainer` cannot train so: another loop, or optimizer arguments that it does not pass on.
    """
    import torch
    from transformers import TrainingArguments

    values = {**settings(recipe), "output_dir": output_dir, "save_strategy": "no"}
    values["use_cpu"] = not torch.accelerator.is_available()
    values.update(changes)
    without_tf32 = bool(values["tf32"]) and values["use_cpu"]
    if without_tf32:
        values["tf32"] = None
    try:
        arguments = TrainingArguments(**values)
    except (ValueError, ImportError) as error:
        reason = "transformers refuses it on this machine: " + str(error).strip().splitlines()[0].rstrip(".")
        raise RecipeError("precision", recipe.precision, reason) from error
    if without_tf32:
        arguments.tf32 = True
    return arguments


def settings(recipe: Recipe) -> dict[str, Any]:
    """Names of `TrainingArguments` to the values that describe `recipe`, on whatever machine. Loads transformers.

    Raises:
        RecipeError: as `to_training_arguments`.
    """
    from transformers import TrainingArguments

    loop, options = _trainer_loop(recipe), _optimizer_options(recipe)
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    # transformers 5.2x renames the switch and warns about the old name
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    values = {
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        checkpointing: recipe.gradient_checkpointing,
        "optim": recipe.optim,
        "optim_args": recipe.optim_args,
        **{OWN[name]: value for name, value in options.items() if name in OWN},
        "fp16": recipe.precision == "fp16-mixed",
        "bf16": recipe.precision == "bf16-mixed",
        "tf32": recipe.precision == "tf32",
        "max_grad_norm": loop.max_grad_norm or 0.0,
        "torch_empty_cache_steps": loop.empty_cache_steps,
        "use_cache": loop.use_cache,
        "torch_compile": recipe.torch_compile,
        "report_to": "none",
        **_sharding_arguments(recipe.sharding),
    }
    if recipe.gradient_checkpointing:
        values[f"{checkpointing}_kwargs"] = {"use_reentrant": False}
    return values


def from_training_arguments(args: "TrainingArguments", model: Any, **fields: Any) -> Recipe:
    """The recipe of a `Trainer` with `args` that trains `model`.

    Args:
        model: what `Recipe` takes, or the model itself; then its format ("-true" precisions) and its attention
            kernel are read off.
        fields: of the recipe, for what the arguments do not say: `seq_len`, `lora`, `quantization`, `sharding` (the
            number of ranks), `attn_implementation`, `task`, `num_layers`, and a `precision` ending in "-true".
            They go before what is read off.
    Raises:
        RecipeError: arguments that no recipe models, or `fields` that contradict `args`.
    """
    for name in UNMODELLED:
        if value := getattr(args, name, None):
            raise RecipeError(name, value, "no recipe models what it does to memory: leave it at its default")
    said = {
        "batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_checkpointing": bool(
            getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None)
        ),
        "optim": getattr(args.optim, "value", args.optim),
        "optim_args": args.optim_args or None,
        "torch_compile": args.torch_compile,
        "loop": Loop(
            use_cache=args.use_cache,
            max_grad_norm=args.max_grad_norm or None,
            empty_cache_steps=args.torch_empty_cache_steps,
        ),
    }
    if hasattr(model, "named_parameters"):
        said.update(_of_model(model, fields))
        model = model.config
    said["precision"] = _precision(args, fields.get("precision") or said.get("precision"))
    if (args.fsdp or args.deepspeed) and not fields.get("sharding"):
        engine = "fsdp" if args.fsdp else "deepspeed"
        rest = f"the arguments ask for {engine}: say sharding=Sharding(stage, world_size, engine={engine!r})"
        raise RecipeError("sharding", None, rest)
    return Recipe(model, **{**said, **fields, "precision": said["precision"]})


def _trainer_loop(recipe: Recipe) -> Loop:
    """The recipe's loop, if the `Trainer` can run it."""
    loop, ours = recipe.loop, LOOPS["trainer"]
    adjustable = ("name", "use_cache", "max_grad_norm", "empty_cache_steps")
    for field in dataclasses.fields(Loop):
        value, wanted = getattr(loop, field.name), getattr(ours, field.name)
        if field.name not in adjustable and value != wanted:
            raise RecipeError(f"loop.{field.name}", value, f"the Trainer's loop has {wanted!r}: use loop='trainer'")
    if loop.use_cache is None:
        raise RecipeError("loop.use_cache", None, "the Trainer always sets it: say True or False")
    return loop


def _optimizer_options(recipe: Recipe) -> dict[str, float]:
    """The recipe's optimizer arguments, if the `Trainer` passes them all on."""
    options = recipe.optimizer_arguments()
    takes = TAKES.get(recipe.optim, ("lr", "weight_decay") if "lion" in recipe.optim else tuple(OWN))
    for name in options:
        if name not in takes:
            rest = f"the Trainer gives {recipe.optim} only {', '.join(takes)}, not {name}"
            raise RecipeError("optim_args", recipe.optim_args, rest)
    return options


def _sharding_arguments(sharding: Sharding | None) -> dict[str, Any]:
    """`fsdp` or `deepspeed`; the number of ranks is the launcher's business, and "auto" leaves it to the arguments."""
    if sharding is None or sharding.engine == "ddp":
        return {}
    if sharding.engine == "fsdp":
        offload = {"cpu_offload": True} if sharding.offload else {}
        mode = "full_shard auto_wrap" if sharding.stage == 3 else "shard_grad_op auto_wrap"
        return {"fsdp": mode, "fsdp_config": {"version": 2, "reshard_after_forward": sharding.stage == 3, **offload}}
    return {"deepspeed": deepspeed_config(sharding)}


def _precision(args: "TrainingArguments", wanted: str | None) -> str:
    """The precision that `args` say, or `wanted` if it does not contradict them."""
    said = "fp16-mixed" if args.fp16 else "bf16-mixed" if args.bf16 else "tf32" if args.tf32 else "fp32"
    if wanted is None or wanted == said:
        return said
    if wanted.endswith("-true") and not said.endswith("-mixed"):
        return wanted
    rest = f"the arguments say {said}"
    if wanted.endswith("-true"):
        rest += ", which keeps the weights in fp32: unset fp16 and bf16, or load the model in fp32"
    raise RecipeError("precision", wanted, rest)


def _of_model(model: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Recipe fields that show on a built model."""
    for name, attribute in (("lora", "peft_config"), ("quantization", "quantization_method")):
        if getattr(model, attribute, None) and not fields.get(name):
            raise RecipeError(name, None, f"the model has it: say {name}=...")
    found: dict[str, Any] = {}
    kernel = getattr(model.config, "_attn_implementation", None)
    if kernel in ATTENTION:
        found["attn_implementation"] = kernel
    dtypes = {str(parameter.dtype) for _, parameter in model.named_parameters()}
    half = {"torch.float16": "fp16-true", "torch.bfloat16": "bf16-true"}
    if len(dtypes) == 1 and dtypes <= half.keys():
        found["precision"] = half[dtypes.pop()]
    return found
