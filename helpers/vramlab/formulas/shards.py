"""What one rank of many holds: ZeRO as DDP, FSDP2 and DeepSpeed do it.

After Rajbhandari et al. 2020, figure 1:

    stage 0   P + G + S             each rank holds everything (plain data parallel)
    stage 1   P + G + S / N         optimizer states are divided among N ranks
    stage 2   P + (G + S) / N       and gradients
    stage 3   (P + G + S) / N + U   and parameters: U is what is gathered at a time

FSDP2 divides rows of every tensor (`fsdp`), DeepSpeed flat partitions (`deepspeed`). NCCL's
buffers are not counted.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod

from ..hardware.overhead import rounded
from ..recipe.options import Sharding
from ..recipe.recipe import Recipe
from . import fsdp_memory, model_states
from .deepspeed_memory import deepspeed_bytes
from .model_states import ParameterRow, RankBytes, Settings, tensors_in_order
from .reserved import internal_fragmentation, pack
from .step import step_temporaries
from .tensor_sizes import state_sizes

# (stage, offload) that the formulas know, and plan tries, by engine.
ON_SEVERAL = {
    "ddp": ((0, None),),
    "fsdp": ((2, None), (3, None), (3, "parameters")),
    "deepspeed": (
        (1, None),
        (2, None),
        (3, None),
        (2, "optimizer"),
        (3, "optimizer"),
        (3, "parameters"),
    ),
}
# On one GPU only what takes bytes off it.
ON_ONE_GPU = {"deepspeed": ((2, "optimizer"), (3, "parameters"))}
# Bytes that fill a bucket of DDP's (reducer.hpp, kDefaultFirstBucketBytes; `bucket_cap_mb`).
FIRST_BUCKET = 1 << 20
BUCKET = 25 << 20


def is_known(sharding: Sharding) -> bool:
    """Tell whether the formulas know what a rank holds."""
    ways = ON_SEVERAL.get(sharding.engine, ())
    if sharding.world_size == 1:
        ways = ON_ONE_GPU.get(sharding.engine, ways)
    in_layers = sharding.wrap == "layers" and not sharding.reshard_root
    by_default = in_layers and sharding.memory_efficient_linear and sharding.ranks_of_sample == 1
    return by_default and (sharding.stage, sharding.offload) in ways


def rank_bytes(recipe: Recipe) -> RankBytes:
    """Return the bytes that `recipe`'s rank holds, everything without sharding.

    They come from a cache for micro-batches of any kind.
    """
    # None of these changes what a rank holds between micro-batches; two of them stand for more.
    settings = Settings(
        recipe,
        gradient_accumulation_steps=min(recipe.gradient_accumulation_steps, 2),
        attn_implementation=None,
        gradient_checkpointing=False,
        batch_size=1,
        seq_len=1,
        lengths=None,
        completion_lengths=None,
    )
    return _cached_rank_bytes(settings)


@lru_cache(maxsize=512)
def _cached_rank_bytes(settings: Settings) -> RankBytes:
    recipe = settings.recipe
    if recipe.sharding is None:
        return _whole(recipe)
    return ENGINES[recipe.sharding.engine](recipe)


def _whole(recipe: Recipe) -> RankBytes:
    """Return what a rank holds that holds everything, as one GPU does."""
    return RankBytes(
        parameters=model_states.parameter_bytes(recipe),
        gradients=model_states.gradient_bytes(recipe),
        optimizer_states=model_states.optimizer_state_bytes(recipe),
        temporaries=step_temporaries(recipe),
        fragmentation=model_states.fragmentation_bytes(recipe),
    )


def _ddp(recipe: Recipe) -> RankBytes:
    """Hold a replica and a copy of its gradients in buckets.

    Buckets are those of reducer.cpp, `compute_bucket_assignment_by_size`.
    """
    # After the first step the reducer makes its buckets anew in the order in which gradients came
    # (`Reducer::rebuild_buckets`), from the last weight to the first.
    buckets = []
    current = 0
    limit = FIRST_BUCKET
    for row in reversed(tensors_in_order(recipe)):
        if row.trained:
            current += prod(row.shape) * row.width
            if current >= limit:  # a bucket is full with the tensor that reaches its limit
                buckets.append(current)
                current = 0
                limit = BUCKET
    # The last one has what is left.
    buckets.append(current)
    workspace = 0
    for bucket in buckets:
        # A bucket is one flat tensor, which exists beside the gradients: `gradient_as_bucket_view`
        # is False by default.
        size = rounded(bucket)
        workspace += size + internal_fragmentation(size)
    return replace(_whole(recipe), always={"workspace": workspace})


def _fsdp(recipe: Recipe) -> RankBytes:
    """Hold padded shards of weights, states of this rank's rows, flat shards of gradients."""
    if recipe.group.offload:
        # The rest is on the host.
        scales = _quantization_states(recipe)
        fragmentation = {"parameters": pack(scales) - sum(scales)}
        return RankBytes(sum(scales), 0, 0, 0, fragmentation=fragmentation)
    shards = []
    for row in model_states.parameter_table(recipe):
        shards.append(_shard(row, recipe))
    parameters = []
    states = []
    for shard in shards:
        for size in shard.blocks:
            parameters += shard.count * [size]
        for size in shard.states:
            states += shard.count * [size]
    gradients = _unit_gradients(recipe)
    fragmentation = {
        "parameters": pack(parameters) - sum(parameters),
        "gradients": pack(gradients) - sum(gradients),
        "optimizer_states": pack(states) - sum(states),
    }
    return RankBytes(
        parameters=sum(parameters),
        gradients=sum(gradients),
        optimizer_states=sum(states),
        temporaries=step_temporaries(recipe, tuple(shards)),
        fragmentation=fragmentation,
    )


def _quantization_states(recipe: Recipe) -> list[int]:
    """Return the sizes of the scales of 4-bit weights, which are no parameters to FSDP.

    Each rank has all of them on its device.
    """
    sizes: list[int] = []
    for row in model_states.parameter_table(recipe):
        if row.quantized:
            _, *scales = row.blocks
            for size in scales:
                sizes += row.count * [size]
    return sizes


def _shard(row: ParameterRow, recipe: Recipe) -> ParameterRow:
    """Return what the recipe's rank has of the tensors of `row`."""
    sharding = recipe.group
    ranks = sharding.shards
    shape = fsdp_memory.own(row.shape, ranks, sharding.shard)
    if row.quantized:
        numbers, *scales = row.blocks
        blocks = (rounded(ceil(numbers / ranks)), *scales)  # the quantization state is not divided
    else:
        # FSDP stores a shard with padding (`_sharded_param_data`); the optimizer sees this rank's
        # own rows alone.
        blocks = (rounded(fsdp_memory.padded(row.shape, ranks) * row.width),)
    states: tuple[int, ...] = ()
    if row.trained:
        states = state_sizes(
            shape,
            row.kind,
            row.width,
            recipe.optim,
            recipe.optim_args,
            trainer=recipe.loop.name == "trainer",
        )
    size = rounded(prod(shape) * row.width)
    return replace(row, shape=shape, blocks=blocks, states=states, size=size)


def _unit_gradients(recipe: Recipe) -> list[int]:
    """List the bytes of each unit's shard of gradients."""
    ranks = recipe.group.shards
    units: Counter[str] = Counter()  # with * for the number of a layer, all layers together
    for row in model_states.parameter_table(recipe):
        if row.trained:
            shard = fsdp_memory.padded(row.shape, ranks) * row.width
            units[fsdp_memory.unit_of(row.name, recipe)] += shard * row.count
    sizes = []
    for key, size in units.items():
        # A unit's gradients are one flat tensor, rounded as a whole.
        layers = recipe.shape.num_layers if "*" in key else 1
        sizes += layers * [rounded(size // layers)]
    return sizes


ENGINES = {"ddp": _ddp, "fsdp": _fsdp, "deepspeed": deepspeed_bytes}
