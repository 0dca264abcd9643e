"""What one rank of many holds: ZeRO (Rajbhandari et al. 2020, figure 1) as DDP, FSDP2 and DeepSpeed implement it.

    stage 0   P + G + S             each rank holds everything (plain data parallel)
    stage 1   P + G + S / N         optimizer states are divided among N ranks
    stage 2   P + (G + S) / N       and gradients
    stage 3   (P + G + S) / N + U   and parameters: U is what is gathered at a time

FSDP2 divides rows of every tensor (`fsdp`), DeepSpeed flat partitions (`deepspeed`). NCCL's buffers are not counted.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod

from ..hardware.overhead import rounded
from ..recipe.options import Sharding
from ..recipe.recipe import Recipe
from . import fsdp, model_states
from .deepspeed import deepspeed_bytes
from .model_states import RankBytes, Settings, tensors_in_order
from .reserved import internal_fragmentation, pack
from .step import step_temporaries

# (stage, offload) that the formulas know, and plan tries, by engine; on one GPU only what takes bytes off it.
ON_ONE_GPU = {"deepspeed": ((2, "optimizer"), (3, "parameters"))}
ON_SEVERAL = {
    "ddp": ((0, None),),
    "fsdp": ((2, None), (3, None), (3, "parameters")),
    "deepspeed": ((1, None), (2, None), (3, None), (2, "optimizer"), (3, "optimizer"), (3, "parameters")),
}


def is_known(sharding: Sharding) -> bool:
    """Tell whether the formulas know what a rank holds."""
    ways = ON_SEVERAL | (ON_ONE_GPU if sharding.world_size == 1 else {})
    by_default = sharding.wrap == "layers" and not sharding.reshard_root and sharding.memory_efficient_linear
    return by_default and (sharding.stage, sharding.offload) in ways.get(sharding.engine, ())


def rank_bytes(recipe: Recipe) -> RankBytes:
    """Return the bytes that `recipe`'s rank holds, everything without sharding, from a cache for batches of any kind."""
    batch = dict(batch_size=1, seq_len=1, lengths=None, completion_lengths=None, gradient_checkpointing=False)
    steps = min(recipe.gradient_accumulation_steps, 2)
    return _cached_rank_bytes(Settings(recipe, gradient_accumulation_steps=steps, attn_implementation=None, **batch))


@lru_cache(maxsize=512)
def _cached_rank_bytes(settings: Settings) -> RankBytes:
    recipe = settings.recipe
    return ENGINES[recipe.sharding.engine](recipe) if recipe.sharding else _whole(recipe)


def _whole(recipe: Recipe) -> RankBytes:
    sums = model_states.parameter_bytes, model_states.gradient_bytes, model_states.optimizer_state_bytes
    return RankBytes(*(of(recipe) for of in (*sums, step_temporaries, model_states.fragmentation_bytes)))


def _ddp(recipe: Recipe) -> RankBytes:
    """Hold a replica and a copy of its gradients in buckets (reducer.cpp, `compute_bucket_assignment_by_size`)."""
    sizes, current, limit = [], 0, 1 << 20  # of the first; a bucket is full with the tensor that reaches its limit
    for row in reversed(tensors_in_order(recipe)):
        if row.trained:
            current += prod(row.shape) * row.width
            if current >= limit:
                sizes.append(current)
                current, limit = 0, 25 << 20
    buckets = (rounded(size) + internal_fragmentation(rounded(size)) for size in (*sizes, current))
    return replace(_whole(recipe), always={"workspace": sum(buckets)})


def _fsdp(recipe: Recipe) -> RankBytes:
    """Hold padded shards of the weights, states of this rank's rows, and a flat shard of each unit's gradients."""
    sharding, trainer = recipe.sharding, recipe.loop.name == "trainer"
    if sharding.offload:
        return RankBytes(0, 0, 0, 0)
    ranks, rows, units = sharding.world_size, [], Counter()  # bytes of the rank's gradients by unit, * for all layers
    for row in model_states.parameter_table(recipe):
        shape, states, shard = fsdp.own(row.shape, ranks, sharding.rank), (), fsdp.padded(row.shape, ranks) * row.width
        blocks = (rounded(-(-row.blocks[0] // ranks)), *row.blocks[1:]) if row.quantized else (rounded(shard),)
        if row.trained:
            states = model_states.state_sizes(shape, row.kind, row.width, recipe.optim, recipe.optim_args, trainer)
            units[fsdp.unit_of(row.name, recipe)] += shard * row.count
        rows.append(replace(row, shape=shape, blocks=blocks, states=states, size=rounded(prod(shape) * row.width)))
    layers = {key: recipe.shape.num_layers if "*" in key else 1 for key in units}
    sizes = {
        "parameters": [size for row in rows for size in row.blocks for _ in range(row.count)],
        "gradients": [rounded(size // layers[key]) for key, size in units.items() for _ in range(layers[key])],
        "optimizer_states": [size for row in rows for size in row.states for _ in range(row.count)],
    }
    fragmentation = {name: pack(found) - sum(found) for name, found in sizes.items()}
    return RankBytes(*(sum(found) for found in sizes.values()), step_temporaries(recipe, tuple(rows)), fragmentation)


ENGINES = {"ddp": _ddp, "fsdp": _fsdp, "deepspeed": deepspeed_bytes}
