"""What one rank of many holds: ZeRO (Rajbhandari et al. 2020, figure 1) as DDP, FSDP2 and DeepSpeed do it.

    stage 0   P + G + S             each rank holds everything (plain data parallel)
    stage 1   P + G + S / N         optimizer states are divided among N ranks
    stage 2   P + (G + S) / N       and gradients
    stage 3   (P + G + S) / N + U   and parameters: U is what is gathered at a time

U is two units (transformer layers), the one that computes and the next one, prefetched, with one unit's gradient on its
way to be divided, and all that is in no layer (embeddings, head), which the root unit keeps gathered. FSDP's stage 2
keeps its gathered parameters beside the shards from forward to the end of backward. DDP copies gradients into
buckets of the same total size unless `gradient_as_bucket_view` is set (`torch.nn.parallel.DistributedDataParallel`).
DeepSpeed keeps an fp32 copy of weights that are trained in half precision.

Limits: NCCL's own buffers, DeepSpeed's bucket sizes (configuration: `reduce_bucket_size`, …) and padding of shards to
equal sizes are not counted; each rank is taken to hold an equal share.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil, prod

from ..recipe import Recipe
from .stored import FP32, gradient_bytes, held


@dataclass(frozen=True)
class Shares:
    """What is left of each category on one rank, as a fraction, and bytes that come on top.

    `gathered`: while forward and backward run; `buckets`: always.
    """

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer_states: float = 1.0
    gathered: int = 0
    buckets: int = 0


def shares(recipe: Recipe) -> Shares:
    """The shares of one rank; all of everything without sharding or with one rank."""
    sharding, rows = recipe.sharding, held(recipe)
    if sharding is None or sharding.world_size == 1:
        return Shares()
    n, stage, engine = sharding.world_size, sharding.stage, sharding.engine
    inside, outside, layer = units(recipe)
    gathered, parameters = 0, 1.0
    if stage == 3:
        gradient = (
            sum(row.count * row.size for row in rows if row.trained and "*" in row.name) * layer // max(inside, 1)
        )
        parameters, gathered = 1 / n, 2 * layer + outside + gradient
    elif engine == "fsdp":
        parameters, gathered = 1 / n, inside + outside
    buckets = gradient_bytes(recipe) if engine == "ddp" else 0
    if engine == "deepspeed" and recipe.precision.endswith("-true") and sharding.offload is None:
        copy = sum(row.count * prod(row.shape) * FP32 for row in rows if row.trained)
        buckets += ceil(copy / (n if stage else 1))
    return Shares(
        parameters=0.0 if sharding.offload == "parameters" else parameters,
        gradients=1 / n if stage >= 2 else 1.0,
        optimizer_states=0.0 if sharding.offload else 1 / n if stage >= 1 else 1.0,
        gathered=gathered,
        buckets=buckets,
    )


def divide(split: Counter, share: Shares, computing: bool) -> Counter:
    """`split` as one rank has it. `computing`: in forward or backward, where parameters are gathered."""
    found = Counter(split)
    for category in ("parameters", "gradients", "optimizer_states"):
        found[category] = ceil(split[category] * getattr(share, category))
    found["workspace"] += share.buckets + (share.gathered if computing else 0)
    return found


def units(recipe: Recipe) -> tuple[int, int, int]:
    """Bytes of the parameters inside the layers, outside them, and in one layer."""
    layers = max(1, recipe.shape.num_layers + recipe.shape.num_decoder_layers)
    sizes = [("*" in row.name, row.count * sum(row.blocks)) for row in held(recipe)]
    inside, total = sum(size for in_layer, size in sizes if in_layer), sum(size for _, size in sizes)
    return inside, total - inside, ceil(inside / layers)


def notes(recipe: Recipe) -> list[str]:
    """What the reader should know about the figures of a sharded recipe."""
    sharding = recipe.sharding
    if sharding is None or sharding.world_size == 1:
        return []
    if sharding.engine in ("tensor", "pipeline"):
        return [f"rank {sharding.rank} of {sharding.world_size}: buffers of NCCL are not counted"]
    found = [
        f"one rank of {sharding.world_size}, by ZeRO's formulas: buffers of NCCL and bucket settings are not counted"
    ]
    if sharding.offload:
        found.append(f"{sharding.offload} offloaded to host memory, which needs them in full")
    return found
