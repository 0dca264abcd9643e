"""What can be cut by tensors or by layers, into how many parts, and what trains shards."""

from typing import Any

from ..base.errors import RecipeError
from ..hardware.overhead import efficient_takes_groups
from . import lora_modules
from .families import FAMILIES
from .fields import RecipeFields
from .knobs import Refusals
from .optimizers import MODELLED
from .options import HALF, LoRA, Sharding

# Those that work on DTensors.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")

BLOCK = (
    32  # tokens whose sum the fp32 attention kernel returns together (`attention.cu`, kAlignLSE)
)


def refusals(recipe: RecipeFields) -> Refusals:
    """Return what cannot be cut as a recipe's sharding says."""
    sharding = recipe.sharding
    if not sharding:
        return
    engine = sharding.engine
    known = ", ".join(OPTIMIZERS)
    allowed = f"{engine} cuts weights into DTensors, which are trained with {known}"
    is_cut = engine in ("fsdp", "tensor")
    yield "optim", is_cut and recipe.optim not in OPTIMIZERS, allowed
    is_kept = engine == "deepspeed" and not recipe.loop.set_to_none
    allowed = "engine 'deepspeed' frees gradients by itself: leave it True"
    yield "loop.set_to_none", is_kept, allowed
    is_schedule_free = MODELLED[recipe.optim].library == "schedulefree"
    allowed = "schedule-free optimizers are modelled for one device only"
    yield "optim", sharding.world_size > 1 and is_schedule_free, allowed
    if recipe.lora:
        yield from _adapter_refusals(recipe.lora, engine)
    is_third = engine == "deepspeed" and sharding.stage == 3
    allowed = "DeepSpeed's stage 3 does not divide quantized weights: use stage 2 or engine 'fsdp'"
    yield "sharding.stage", is_third and recipe.quantization, allowed
    has_two_formats = is_third and recipe.lora and _trains_two_formats(recipe, recipe.lora)
    allowed = (
        "DeepSpeed's stage 3 trains one format: fp32 adapters beside weights in half "
        "precision need stage 2 or 'fp32'"
    )
    yield "sharding.stage", has_two_formats, allowed
    if engine in ("tensor", "pipeline"):
        yield from _divided(recipe, sharding)
    if sharding.cp_size > 1:
        yield from _in_rings(recipe, sharding.cp_size)
    if sharding.sp_size > 1:
        yield from _in_ulysses(recipe, sharding.sp_size)


def notes(sharding: Sharding) -> list[str]:
    """Return what a library computes in another way than one would think; no byte shows it."""
    if sharding.sp_size == 1 or sharding.stage == 3:
        return []
    # Each rank's loss is that of all, and stages 1 and 2 divide the sum of the ranks' gradients by
    # the number of groups (stage_1_and_2.py, dp_world_size / sequence_parallel_size), stage 3 by
    # that of ranks.
    text = (
        f"the Trainer's Ulysses over DeepSpeed's stage {sharding.stage} makes gradients "
        f"{sharding.sp_size} times as large as over stage 3; AdamW divides that out, SGD and "
        "max_grad_norm do not: take stage 3"
    )
    return [text]


def check_division(division: Any) -> None:
    """Raise RecipeError where transformers itself has divided a model (its `DistributedConfig`)."""
    if division is None:
        return
    sizes = {name: size for name, size in vars(division).items() if name.endswith("_size")}
    divided = ", ".join(f"{name}={size}" for name, size in sizes.items() if (size or 1) > 1)
    if divided:
        rest = (
            "from_pretrained divides such a model itself, which no recipe describes, and with "
            "expert parallel a rank holds the tokens that the router sends it: WatchCallback() "
            "in its Trainer measures it, and sharding=Sharding(…) is for FSDP and DeepSpeed"
        )
        raise RecipeError("model.distributed_config", divided, rest)


def _of_a_divided_sample(recipe: RecipeFields, field: str, way: str) -> Refusals:
    """Return what no way to divide a sample's tokens among ranks is modelled for."""
    shape = recipe.shape
    allowed = f"{way} is modelled for the Trainer's and SFTTrainer's loops"
    is_other = recipe.trainer not in ("transformers", "sft") or recipe.loop.name != "trainer"
    yield field, is_other, allowed
    allowed = f"{way} is for causal models, and {shape.name} is one for {shape.task}"
    yield field, shape.task != "causal-lm" or recipe.images, allowed


def _in_rings(recipe: RecipeFields, ranks: int) -> Refusals:
    """Return what ring attention does not compute (`Trainer._prepare_context_parallel_inputs`).

    What accelerate refuses is among it (`_attach_context_parallel_hooks`).
    """
    shape = recipe.shape
    allowed = "the Trainer's context parallel computes attention by 'sdpa' only"
    yield "attn_implementation", recipe.attn_implementation != "sdpa", allowed
    yield from _of_a_divided_sample(recipe, "sharding.cp_size", "context parallel")
    allowed = (
        f"a token of {shape.name} looks back {shape.sliding_window} tokens only, which "
        "accelerate refuses: the ring drops that mask"
    )
    yield "sharding.cp_size", shape.sliding_window, allowed
    allowed = "the ring drops the mask that keeps joined samples apart: leave packing and "
    yield "sharding.cp_size", recipe.joins, allowed + "padding_free out"
    _, width = recipe.rows
    # Each rank has a piece from the row's front and one from its end, so that all attend to as
    # much (`_HeadTailLoadBalancer` of torch's context parallel).
    allowed = f"rows of {width:,} tokens do not divide into two equal pieces for each of {ranks} "
    yield "sharding.cp_size", width % recipe.pieces, allowed + "ranks"
    is_wide = recipe.precision in ("fp32", "tf32") and not efficient_takes_groups()
    allowed = (
        "no fused CUDA kernel takes fp32 queries that share keys, and the ring needs one: "
        "compute in bf16 or fp16"
    )
    yield "precision", is_wide and shape.num_kv_heads < shape.num_heads, allowed


def check_ring(recipe: RecipeFields, target: str) -> None:
    """Raise RecipeError for a ring that torch has no kernels for, or whose own code fails in it."""
    if recipe.group.cp_size == 1:
        return
    if target == "cpu":
        rest = "torch's ring attention has kernels for CUDA only: simulate it for target='cuda'"
        raise RecipeError("target", target, rest)
    # `_SDPAMerger` adds up what the fp32 kernel has for whole blocks
    _, width = recipe.rows
    multiple = BLOCK * recipe.pieces
    if recipe.precision in ("fp32", "tf32") and width % multiple:
        rest = (
            f"torch's ring adds up whole blocks of {BLOCK} tokens in it, and rows of {width:,} "
            f"are no multiple of {multiple}: take such a length, or compute in bf16 or fp16"
        )
        raise RecipeError("precision", recipe.precision, rest)


def _in_ulysses(recipe: RecipeFields, ranks: int) -> Refusals:
    """Return what DeepSpeed's Ulysses does not exchange (`UlyssesSPAttentionHF`)."""
    shape = recipe.shape
    allowed = "Ulysses exchanges the heads of 'sdpa' and 'flash_attention_2'"
    is_known = recipe.attn_implementation in ("sdpa", "flash_attention_2")
    yield "attn_implementation", not is_known, allowed
    yield from _of_a_divided_sample(recipe, "sharding.sp_size", "Ulysses")
    allowed = (
        f"a token of {shape.name} looks back {shape.sliding_window} tokens only, and Ulysses "
        "drops that mask"
    )
    yield "sharding.sp_size", shape.sliding_window, allowed
    allowed = "samples that are joined are not divided here: leave packing and padding_free out"
    yield "sharding.sp_size", recipe.joins, allowed
    _, width = recipe.rows
    allowed = f"rows of {width:,} tokens do not divide into an equal part for each of {ranks} ranks"
    yield "sharding.sp_size", width % ranks, allowed
    allowed = (
        f"it must divide the {shape.num_heads} heads of {shape.name}, and its "
        f"{shape.num_kv_heads} key/value heads or be a multiple of them"
    )
    # With fewer key heads than ranks each is sent to several (kv_replication_factor in
    # ulysses_sp.py).
    keys = shape.num_kv_heads
    is_uneven = shape.num_heads % ranks or (keys % ranks and ranks % keys)
    yield "sharding.sp_size", is_uneven, allowed


def _adapter_refusals(lora: LoRA, engine: str) -> Refusals:
    """Return adapters that read the base's weights outside their layers."""
    allowed = "it is modelled where weights are whole: one device, or 'ddp'"
    is_divided = engine in ("fsdp", "deepspeed")
    for name in ("use_dora", "target_parameters"):
        yield f"lora.{name}", is_divided and getattr(lora, name), allowed


def _trains_two_formats(recipe: RecipeFields, lora: LoRA) -> bool:
    """Tell whether adapters stay in fp32 beside half-precision weights that are trained.

    Source: zero/utils.py, defragment.
    """
    form, _, kind = recipe.precision.partition("-")
    shape = recipe.shape
    if form not in HALF or (kind == "true" and not lora.autocast_adapter_dtype):
        return False
    # copies of whole modules have the base's format
    if lora_modules.trained_whole(shape, lora.modules_to_save):
        return True
    adapted = {name for name, _, _ in lora_modules.adapted(shape, lora)}
    names = [weight.name for weight in shape.weights()]
    return any(lora_modules.trains_bias(name, lora.bias, adapted) for name in names)


def _divided(recipe: RecipeFields, sharding: Sharding) -> Refusals:
    """Return what engines "tensor" and "pipeline" do not divide."""
    shape = recipe.shape
    divisible = [name for name, family in FAMILIES.items() if family.divisible]
    is_other = shape.family not in divisible or shape.task != "causal-lm"
    known = ", ".join(divisible)
    allowed = f"it divides causal models of {known}, and {shape.name} is a {shape.family} for "
    yield "sharding.engine", is_other, allowed + str(shape.task)
    for name in ("lora", "quantization"):
        allowed = f"it is for full fine-tuning: leave {name} out"
        yield "sharding.engine", getattr(recipe, name), allowed
    if sharding.engine == "tensor":
        yield from _uneven(recipe, sharding.world_size)
    else:
        yield from _stages(recipe, sharding)


def _uneven(recipe: RecipeFields, ranks: int) -> Refusals:
    """Return sizes that do not divide into a slice for each rank."""
    shape = recipe.shape
    sizes = {
        "heads": shape.num_heads,
        "key/value heads": shape.num_kv_heads,
        "channels": shape.intermediate_size,
    }
    for what, size in sizes.items():
        allowed = f"it must divide the {size:,} {what} of {shape.name}"
        yield "sharding.world_size", size % ranks, allowed


def _stages(recipe: RecipeFields, sharding: Sharding) -> Refusals:
    """Return layers and batches that do not divide into stages and parts."""
    shape = recipe.shape
    ranks = sharding.world_size
    parts = sharding.micro_batches
    allowed = f"{shape.name} has {shape.num_layers} layers, and each stage needs one at least"
    yield "sharding.world_size", ranks > shape.num_layers, allowed
    allowed = f"a batch of {recipe.batch_size} samples does not divide into {parts} equal parts"
    yield "sharding.micro_batches", recipe.batch_size % parts, allowed
    allowed = (
        f"1f1b needs a micro-batch for each of the {ranks} stages at least; "
        "schedule='gpipe' takes fewer"
    )
    yield "sharding.micro_batches", sharding.schedule == "1f1b" and parts < ranks, allowed
    allowed = (
        "each stage would scale its own loss: use 'bf16-mixed', or a precision without a loss scale"
    )
    yield "precision", recipe.precision == "fp16-mixed", allowed
