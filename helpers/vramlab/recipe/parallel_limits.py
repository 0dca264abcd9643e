"""What can be cut by tensors or by layers, into how many parts, and what trains shards."""

from typing import Any

from . import lora_modules
from .families import FAMILIES
from .knobs import Refusals
from .optimizers import MODELLED
from .options import HALF

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")  # those that work on DTensors


def refusals(recipe: Any) -> Refusals:
    """What cannot be cut as its sharding says."""
    sharding, lora = recipe.sharding, recipe.lora
    if not sharding:
        return
    engine = sharding.engine
    allowed = f"{engine} cuts weights into DTensors, which are trained with {', '.join(OPTIMIZERS)}"
    yield "optim", engine in ("fsdp", "tensor") and recipe.optim not in OPTIMIZERS, allowed
    allowed = "engine 'deepspeed' frees gradients by itself: leave it True"
    yield "loop.set_to_none", engine == "deepspeed" and not recipe.loop.set_to_none, allowed
    schedule_free = MODELLED[recipe.optim].library == "schedulefree"
    allowed = "schedule-free optimizers are modelled for one device only"
    yield "optim", sharding.world_size > 1 and schedule_free, allowed
    allowed = "it is modelled where weights are whole: one device, or 'ddp'"
    for name in ("use_dora", "target_parameters") if lora else ():  # read the base's weights outside their layers
        yield f"lora.{name}", engine in ("fsdp", "deepspeed") and getattr(lora, name), allowed
    allowed = "DeepSpeed's stage 3 does not divide quantized weights: use stage 2 or engine 'fsdp'"
    yield "sharding.stage", engine == "deepspeed" and sharding.stage == 3 and recipe.quantization, allowed
    third = engine == "deepspeed" and sharding.stage == 3
    allowed = (
        "DeepSpeed's stage 3 trains one format: fp32 adapters beside weights in half precision need stage 2 or 'fp32'"
    )
    yield "sharding.stage", third and lora and _trains_two_formats(recipe), allowed
    if engine in ("tensor", "pipeline"):
        yield from _divided(recipe, sharding.world_size, sharding.micro_batches)


def _trains_two_formats(recipe: Any) -> bool:
    """Tell whether adapters stay in fp32 beside half-precision weights that are trained (zero/utils.py, defragment)."""
    form, _, kind = recipe.precision.partition("-")
    shape, lora = recipe.shape, recipe.lora
    if form not in HALF or (kind == "true" and not lora.autocast_adapter_dtype):
        return False
    if lora_modules.trained_whole(shape, lora.modules_to_save):
        return True
    adapted = {name for name, _, _ in lora_modules.adapted(shape, lora)}
    return any(lora_modules.trains_bias(weight.name, lora.bias, adapted) for weight in shape.weights())


def _divided(recipe: Any, ranks: int, parts: int) -> Refusals:
    """What engines "tensor" and "pipeline" do not divide."""
    shape, sharding = recipe.shape, recipe.sharding
    divisible = [name for name, family in FAMILIES.items() if family.divisible]
    allowed = f"it divides causal models of {', '.join(divisible)}, and {shape.name} is a {shape.family}"
    yield "sharding.engine", shape.family not in divisible or shape.task != "causal-lm", f"{allowed} for {shape.task}"
    for name in ("lora", "quantization"):
        yield "sharding.engine", getattr(recipe, name), f"it is for full fine-tuning: leave {name} out"
    if sharding.engine == "tensor":
        sizes = {"heads": shape.num_heads, "key/value heads": shape.num_kv_heads, "channels": shape.intermediate_size}
        for what, size in sizes.items():
            yield "sharding.world_size", size % ranks, f"it must divide the {size:,} {what} of {shape.name}"
        return
    allowed = f"{shape.name} has {shape.num_layers} layers, and each stage needs one at least"
    yield "sharding.world_size", ranks > shape.num_layers, allowed
    allowed = f"a batch of {recipe.batch_size} samples does not divide into {parts} equal parts"
    yield "sharding.micro_batches", recipe.batch_size % parts, allowed
    allowed = f"1f1b needs a micro-batch for each of the {ranks} stages at least; schedule='gpipe' takes fewer"
    yield "sharding.micro_batches", sharding.schedule == "1f1b" and parts < ranks, allowed
    allowed = "each stage would scale its own loss: use 'bf16-mixed', or a precision without a loss scale"
    yield "precision", recipe.precision == "fp16-mixed", allowed
