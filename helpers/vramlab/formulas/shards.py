"""What one rank of many holds: ZeRO (Rajbhandari et al. 2020, figure 1) as DDP, FSDP2 and DeepSpeed do it.

    stage 0   P + G + S             each rank holds everything (plain data parallel)
    stage 1   P + G + S / N         optimizer states are divided among N ranks
    stage 2   P + (G + S) / N       and gradients
    stage 3   (P + G + S) / N + U   and parameters: U is what is gathered at a time

    DDP        a copy of all gradients in buckets (`gradient_as_bucket_view` is False), from the beginning on; at stage 1
               `ZeroRedundancyOptimizer` gives whole tensors, largest first, to the rank that has least so far
    FSDP2      rows of every tensor, `fsdp.padded`; what is gathered and reduced is in the ledger (`fsdp.FsdpModel`)
    DeepSpeed  flat partitions (`deepspeed`)

NCCL's own buffers are not counted.
"""

import heapq
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod

from ..hardware.overhead import rounded
from ..hardware.reserved import internal_fragmentation, pack
from ..recipe.recipe import Recipe
from . import model_states
from .fsdp import own, padded, unit_of
from .model_states import (
    CacheKey,
    ParameterRow,
    RankBytes,
    is_sharded_by,
    parameter_table,
    state_sizes,
    tensors_in_order,
)
from .step import step_temporaries


def rank_bytes(recipe: Recipe) -> RankBytes:
    """Bytes that this rank holds; everything without sharding."""
    sharding = recipe.sharding
    if sharding is None or sharding.engine in ("tensor", "pipeline"):
        return _alone(recipe)
    return _rank_bytes(_Key(recipe))


class _Key(CacheKey):
    """A recipe, equal to others by what `rank_bytes` depends on."""

    def __init__(self, r: Recipe):
        self.recipe = r
        self.key = (r.shape, r.precision, r.quantization, r.lora, r.optim, r.optim_args, r.loop, r.sharding)
        self.key += (r.gradient_accumulation_steps > 1,)


@lru_cache(maxsize=512)
def _rank_bytes(key: _Key) -> RankBytes:
    recipe = key.recipe
    if recipe.sharding.engine == "deepspeed":
        from .deepspeed import deepspeed_bytes

        return deepspeed_bytes(recipe)
    return _fsdp(recipe) if is_sharded_by(recipe, "fsdp") else _ddp(recipe)


def _alone(recipe: Recipe) -> RankBytes:
    return RankBytes(
        model_states.parameter_bytes(recipe),
        model_states.gradient_bytes(recipe),
        model_states.optimizer_state_bytes(recipe),
        model_states.fragmentation_bytes(recipe),
        step_temporaries(recipe),
    )


# --- DDP --------------------------------------------------------------------------------------------------------------


def _ddp(recipe: Recipe) -> RankBytes:
    """A replica with buckets beside its gradients; the states of this rank."""
    alone = _alone(recipe)
    found = replace(alone, always={"workspace": sum(buckets(recipe))})
    if recipe.sharding.stage == 0:
        return found
    mine = dealt(recipe, recipe.sharding.rank)
    states = [size for row in mine for size in row.states]
    fragmentation = alone.fragmentation | {"optimizer_states": pack(states) - sum(states)}
    counts = Counter(mine)
    rows = tuple(replace(row, count=count) for row, count in counts.items())
    temporaries = step_temporaries(recipe, rows)
    return replace(found, optimizer_states=sum(states), fragmentation=fragmentation, temporaries=temporaries)


def buckets(recipe: Recipe) -> list[int]:
    """Bytes of DDP's buckets as the allocator holds them: gradients in the order of the backward pass, up to 25 MiB
    each and the first one up to 1 MiB (`_DEFAULT_FIRST_BUCKET_BYTES`; torch/csrc/distributed/c10d/reducer.cpp,
    `compute_bucket_assignment_by_size`: a bucket is full with the tensor that reaches its limit)."""
    sizes, current, limit = [], 0, 1 << 20
    for row in reversed(tensors_in_order(recipe)):
        if row.trained:
            current += prod(row.shape) * row.width
            if current >= limit:
                sizes.append(current)
                current, limit = 0, 25 << 20
    sizes += [current] if current else []
    return [rounded(size) + internal_fragmentation(rounded(size)) for size in sizes]


def dealt(recipe: Recipe, rank: int) -> list[ParameterRow]:
    """The tensors whose states are this rank's: each to the rank with fewest numbers so far, in order of size within a
    parameter group (`ZeroRedundancyOptimizer._partition_parameters`)."""
    ranks, mine = recipe.sharding.world_size, []
    loads = [(0, i) for i in range(ranks)]
    heapq.heapify(loads)
    rows = [row for row in tensors_in_order(recipe) if row.trained]
    for row in sorted(rows, key=lambda row: -prod(row.shape)):
        load, i = heapq.heappop(loads)
        heapq.heappush(loads, (load + prod(row.shape), i))
        if i == rank:
            mine.append(row)
    return mine


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def _fsdp(recipe: Recipe) -> RankBytes:
    """Padded shards of the weights, states of the rows that are this rank's, one flat shard of a unit's gradients."""
    sharding, trainer = recipe.sharding, recipe.loop.name == "trainer"
    ranks, rank, offload = sharding.world_size, sharding.rank, sharding.offload is not None
    rows, units = [], {}
    for row in parameter_table(recipe):
        shape = own(row.shape, ranks, rank)
        states = (
            state_sizes(shape, row.kind, row.width, recipe.optim, recipe.optim_args, trainer) if row.trained else ()
        )
        if row.quantized:
            blocks = (rounded(-(-row.blocks[0] // ranks)), *row.blocks[1:])
        else:
            blocks = (rounded(padded(row.shape, ranks) * row.width),)
        rows.append(replace(row, shape=shape, blocks=blocks, states=states, size=rounded(prod(shape) * row.width)))
        if row.trained:
            key = unit_of(row.name, recipe)
            layers = recipe.shape.num_layers if "*" in key else 1
            size, _ = units.get(key, (0, 1))
            units[key] = size + padded(row.shape, ranks) * row.width * row.count // layers, layers
    if offload:
        return RankBytes(0, 0, 0, {}, 0)
    gradients = [rounded(size) for size, count in units.values() for _ in range(count)]
    sizes = {
        "parameters": [size for row in rows for size in row.blocks for _ in range(row.count)],
        "gradients": gradients,
        "optimizer_states": [size for row in rows for size in row.states for _ in range(row.count)],
    }
    fragmentation = {name: pack(found) - sum(found) for name, found in sizes.items()}
    temporaries = step_temporaries(recipe, tuple(rows))
    return RankBytes(*(sum(sizes[name]) for name in sizes), fragmentation, temporaries)


def notes(recipe: Recipe) -> list[str]:
    """What the reader should know about the figures of a sharded recipe."""
    sharding = recipe.sharding
    if sharding is None:
        return []
    found = [f"rank {sharding.rank} of {sharding.world_size}: buffers of NCCL are not counted"]
    if sharding.world_size == 1:
        found = []
    if sharding.offload:
        found.append(f"{sharding.offload} offloaded to host memory, which needs them in full")
    return found
