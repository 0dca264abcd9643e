"""What can be cut by tensors or by layers, into how many parts, which layers each part has, and what trains shards."""

from itertools import pairwise
from typing import Any

from ..report.errors import RecipeError
from .families import FAMILIES
from .optimizers import MODELLED

WHOLE_EMBEDDING = tuple(name for name, family in FAMILIES.items() if family.whole_embedding)
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")  # those that work on DTensors


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, as even as they go: the first stages have one more where it does not divide."""
    least, more = divmod(layers, stages)
    starts = [rank * least + min(rank, more) for rank in range(stages + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


def check(recipe: Any) -> None:
    """Raise RecipeError, with the numbers, if `recipe` cannot be cut as its sharding says."""
    sharding, shape = recipe.sharding, recipe.shape
    if sharding and sharding.engine in ("fsdp", "tensor") and recipe.optim not in OPTIMIZERS:
        rest = f"{sharding.engine} cuts weights into DTensors, which are trained with {', '.join(OPTIMIZERS)}"
        raise RecipeError("optim", recipe.optim, rest)
    if sharding and sharding.world_size > 1 and MODELLED[recipe.optim].library == "schedulefree":
        raise RecipeError("optim", recipe.optim, "schedule-free optimizers are modelled for one device only")
    if sharding and sharding.engine in ("fsdp", "deepspeed") and recipe.lora:
        for name in ("use_dora", "target_parameters"):  # they read the base's weights outside its layers' forward pass
            if value := getattr(recipe.lora, name):
                raise RecipeError(f"lora.{name}", value, "it is modelled where weights are whole: one device, or 'ddp'")
    if sharding is None or sharding.engine not in ("tensor", "pipeline"):
        return
    engine = sharding.engine
    divisible = [name for name, family in FAMILIES.items() if family.divisible]
    if shape.family not in divisible or shape.task != "causal-lm":
        what = "its matrices" if engine == "tensor" else "its layers"
        why = " (GPT-2's matrices are Conv1D, which DTensor cannot slice)" if shape.family == "gpt2" else ""
        rest = f"{what} cannot be divided{why}; causal models of these families can: {', '.join(divisible)}"
        raise RecipeError("sharding.engine", engine, f"{shape.name} is a {shape.family} for {shape.task}: {rest}")
    for name in ("lora", "quantization"):
        if getattr(recipe, name):
            raise RecipeError("sharding.engine", engine, f"it is for full fine-tuning: leave {name} out")
    (_check_tensor if engine == "tensor" else _check_pipeline)(recipe)


def _check_tensor(recipe: Any) -> None:
    shape, n = recipe.shape, recipe.sharding.world_size
    sizes = {"heads": shape.num_heads, "key/value heads": shape.num_kv_heads, "MLP channels": shape.intermediate_size}
    for what, size in sizes.items():
        if size % n:
            fitting = [str(k) for k in range(1, shape.num_kv_heads + 1) if not any(s % k for s in sizes.values())]
            rest = f"{shape.name} has {size:,} {what}, which {n} ranks cannot share equally; these can: "
            raise RecipeError("sharding.world_size", n, rest + ", ".join(fitting))


def _check_pipeline(recipe: Any) -> None:
    shape, sharding = recipe.shape, recipe.sharding
    n, parts = sharding.world_size, sharding.micro_batches
    if n > shape.num_layers:
        rest = f"{shape.name} has {shape.num_layers} layers, and each stage needs one at least"
        raise RecipeError("sharding.world_size", n, rest)
    if recipe.batch_size % parts:
        rest = f"a batch of {recipe.batch_size} samples does not divide into {parts} equal parts"
        raise RecipeError("sharding.micro_batches", parts, rest)
    if sharding.schedule == "1f1b" and parts < n:
        rest = f"1f1b needs a micro-batch for each of the {n} stages at least; schedule='gpipe' takes fewer"
        raise RecipeError("sharding.micro_batches", parts, rest)
    if recipe.precision == "fp16-mixed":
        rest = "each stage would scale its own loss: use 'bf16-mixed', or a precision without a loss scale"
        raise RecipeError("precision", recipe.precision, rest)
