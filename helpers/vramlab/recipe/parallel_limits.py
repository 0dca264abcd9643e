"""What can be cut by tensors or by layers, into how many parts, which layers each part has, and what trains shards."""

from itertools import pairwise
from typing import Any

from .families import FAMILIES
from .knobs import Refusals
from .optimizers import MODELLED

WHOLE_EMBEDDING = tuple(name for name, family in FAMILIES.items() if family.whole_embedding)
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")  # those that work on DTensors


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, as even as they go: the first stages have one more where it does not divide."""
    least, more = divmod(layers, stages)
    starts = [rank * least + min(rank, more) for rank in range(stages + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


def refusals(recipe: Any) -> Refusals:
    """What cannot be cut as its sharding says."""
    sharding, shape, lora = recipe.sharding, recipe.shape, recipe.lora
    if not sharding:
        return
    engine = sharding.engine
    allowed = f"{engine} cuts weights into DTensors, which are trained with {', '.join(OPTIMIZERS)}"
    yield "optim", engine in ("fsdp", "tensor") and recipe.optim not in OPTIMIZERS, allowed
    schedule_free = MODELLED[recipe.optim].library == "schedulefree"
    allowed = "schedule-free optimizers are modelled for one device only"
    yield "optim", sharding.world_size > 1 and schedule_free, allowed
    allowed = "it is modelled where weights are whole: one device, or 'ddp'"
    for name in ("use_dora", "target_parameters") if lora else ():  # read the base's weights outside their layers
        yield f"lora.{name}", engine in ("fsdp", "deepspeed") and getattr(lora, name), allowed
    allowed = "DeepSpeed's stage 3 does not divide quantized weights: use stage 2 or engine 'fsdp'"
    yield "sharding.stage", engine == "deepspeed" and sharding.stage == 3 and recipe.quantization, allowed
    if engine not in ("tensor", "pipeline"):
        return
    divisible = [name for name, family in FAMILIES.items() if family.divisible]
    what = "its matrices" if engine == "tensor" else "its layers"
    why = " (GPT-2's matrices are Conv1D, which DTensor cannot slice)" if shape.family == "gpt2" else ""
    allowed = f"{what} cannot be divided{why}; causal models of these families can: {', '.join(divisible)}"
    allowed = f"{shape.name} is a {shape.family} for {shape.task}: {allowed}"
    yield "sharding.engine", shape.family not in divisible or shape.task != "causal-lm", allowed
    for name in ("lora", "quantization"):
        yield "sharding.engine", getattr(recipe, name), f"it is for full fine-tuning: leave {name} out"
    yield from (_tensor_refusals if engine == "tensor" else _pipeline_refusals)(recipe)


def _tensor_refusals(recipe: Any) -> Refusals:
    shape, n = recipe.shape, recipe.sharding.world_size
    sizes = {"heads": shape.num_heads, "key/value heads": shape.num_kv_heads, "MLP channels": shape.intermediate_size}
    fitting = [str(k) for k in range(1, shape.num_kv_heads + 1) if not any(s % k for s in sizes.values())]
    for what, size in sizes.items():
        allowed = f"{shape.name} has {size:,} {what}, which {n} ranks cannot share equally; these can: "
        yield "sharding.world_size", size % n, allowed + ", ".join(fitting)


def _pipeline_refusals(recipe: Any) -> Refusals:
    shape, n, parts = recipe.shape, recipe.sharding.world_size, recipe.sharding.micro_batches
    allowed = f"{shape.name} has {shape.num_layers} layers, and each stage needs one at least"
    yield "sharding.world_size", n > shape.num_layers, allowed
    allowed = f"a batch of {recipe.batch_size} samples does not divide into {parts} equal parts"
    yield "sharding.micro_batches", recipe.batch_size % parts, allowed
    allowed = f"1f1b needs a micro-batch for each of the {n} stages at least; schedule='gpipe' takes fewer"
    yield "sharding.micro_batches", recipe.sharding.schedule == "1f1b" and parts < n, allowed
    allowed = "each stage would scale its own loss: use 'bf16-mixed', or a precision without a loss scale"
    yield "precision", recipe.precision == "fp16-mixed", allowed
