"""DeepSpeed on paper: flat partitions, gradients that go into a bucket, a step in fp32. See `engines.deepspeed_storages`.

Ψ: trained parameters, N: ranks, w: bytes of a weight, B: `reduce_bucket_size` (hidden size squared), "part": what a rank
has of each parameter group, ⌈Ψ/2N⌉ · 2 elements at stages 1 and 2, the sum of ⌈p/N⌉ at stage 3.

    weights      stage 0 as they are; 1, 2 in one flat tensor a group, w · N part; 3 w · part
    states       fp32 weights (4 part; 4Ψ at stage 0 if a "-mixed" precision trains half-precision weights) and what the
                 optimizer keeps of those
    gradients    0, 1 all to the end of the backward pass (in fp32 at stage 1 with half-precision weights, which DeepSpeed
                 was not told of); 2, 3 one after the other, each until the next is complete, and 3 always w · part
    reducing     0 a flat copy at the end, over 500 million elements at a time (`allreduce_bucket`), and in fp32 once more
                 with weights in half precision that DeepSpeed was not told of (`communication_data_type`)
    gathered     3: all of the last 500 million elements to be used, whose next use in the step is within
                 `stage3_max_reuse_distance`; small ones (10 · hidden size) at all times; layers' until backward has been
                 through all of them, though each goes after its own backward pass: too much in the lower layers
    step         an fp64 copy of the largest gradient for the norm, then fp32 gradients and the optimizer's temporaries

A world of one at stage 2 in fp32 is said too small, by 14 % with a large tied embedding.
"""

from dataclasses import replace
from math import ceil, prod

from ..hardware.overhead import rounded
from ..hardware.reserved import internal_fragmentation
from ..recipe.deepspeed_config import HIDDEN
from ..recipe.recipe import Recipe
from . import model_states as stored
from .ledger import Parameter
from .model import Model
from .model_states import FP32, HALF, Held, Row, compute_recipe, held, in_order, is_sharded_by, state_sizes
from .param_coordinator import Gathered, gathered
from .step import COPIES, copies

ALL_REDUCED = 500_000_000  # elements that stage 0 reduces at a time (runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE)
FP64, AT_ONCE = 8, 250_000_000  # elements of a norm that is computed at a time


def of_rank(recipe: Recipe) -> Held:
    """What a rank holds."""
    sharding, asked = recipe.sharding, recipe
    recipe = compute_recipe(recipe)
    told, offload = asked.precision.endswith("-mixed"), sharding.offload is not None
    rows = [row for row in in_order(recipe) if row.trained]
    groups = [rows]
    if recipe.loop.name == "trainer":
        groups = [[row for row in rows if row.decayed], [row for row in rows if not row.decayed]]
    groups = [group for group in groups if group]
    if sharding.stage == 0:
        return _replica(recipe, told, rows)
    width, ranks = max((row.width for row in rows), default=FP32), sharding.world_size
    parts = [_part(group, ranks, sharding.stage) for group in groups]
    frozen = sum(row.count * sum(row.blocks) for row in stored.held(recipe) if not row.trained)
    bucket = _bucket(recipe) * width
    weights = [part * width * (1 if sharding.stage == 3 else ranks) for part in parts]
    if sharding.stage == 3:
        frozen = ceil(frozen / ranks)
        weights = [sum(weights)]
    states = [size for part in parts for size in _states(recipe, (part,))] if not offload else []
    # of fp32 weights too: stage 3 would do without, but compares a device with its name (zero/stage3.py,
    # _create_fp32_partitions; DeepSpeed 0.19.8)
    masters = [rounded(FP32 * part) for part in parts] if not offload else []
    found = Held(
        parameters=0 if sharding.offload == "parameters" else frozen + sum(map(rounded, weights)),
        gradients=0,
        optimizer_states=sum(states),
        fragmentation={
            "parameters": sum(internal_fragmentation(rounded(size)) for size in weights),
            "optimizer_states": sum(internal_fragmentation(size) for size in (*states, *masters)),
        },
        temporaries=0,
        always={"optimizer_states": sum(masters)},
    )
    if sharding.stage == 3:
        return _third(recipe, found, rows, parts, width, bucket, told or width == FP32)
    pieces = [piece for group, part in zip(groups, parts, strict=True) for piece in _pieces(group, part, sharding.rank)]
    return _first_two(
        recipe, found, parts, pieces, width if told or width == FP32 else FP32, bucket, told or width == FP32
    )


def _first_two(
    recipe: Recipe, found: Held, parts: list[int], pieces: list[tuple[int, int]], width: int, bucket: int, told: bool
) -> Held:
    """Stages 1 and 2: the gradients that are this rank's stay to the step, whole where they lie across its ends."""
    stage, offload = recipe.sharding.stage, recipe.sharding.offload is not None
    largest = max((row for _, row in pieces), default=0)
    if offload:
        gradients, temporaries = 0, 0
        buffer = {"workspace": max((prod(r.shape) * r.width for r in held(recipe) if r.trained), default=0)}
        found = replace(found, always=found.always | buffer)
    else:
        gradients = sum(whole for _, whole in pieces) * width if told else sum(parts) * width
        flat = max(parts) * FP32 * ((1 if told else 0) + _foreach(recipe))
        fp64 = max((piece for piece, _ in pieces), default=0) * FP64
        # one buffer has the gradients of all groups, and goes when the last group's are flat
        soon = stage == 2 and told and len(parts) == 1
        temporaries = max(gradients + fp64, flat) if soon else gradients + max(fp64, flat)
    if stage == 1:
        rows = [row for row in held(recipe) if row.trained]
        left = 0 if told else _left(recipe, pieces) * FP32
        return replace(
            found,
            temporaries=temporaries + left,
            backward={"workspace": bucket},
            backward_end={"gradients": gradients + left},
            reducing=0 if told else gradients,
            existing=sum(prod(row.shape) * row.count for row in rows) * width,
        )
    return replace(
        found,
        temporaries=temporaries,
        backward={"workspace": bucket},
        backward_end={"gradients": gradients},
        reducing=gradients + largest * width,
        existing=gradients,
    )


def _third(recipe: Recipe, found: Held, rows: list[Row], parts: list[int], width: int, bucket: int, told: bool) -> Held:
    """Stage 3: gradients of the part at all times, weights gathered while the step needs them."""
    sharding, small = recipe.sharding, HIDDEN["stage3_param_persistence_threshold"](recipe.shape.hidden_size)
    persistent = sum(rounded(prod(row.shape) * row.width) for row in rows if prod(row.shape) <= small)
    parts_of_step = gathered(recipe.shape)
    if sharding.world_size == 1:  # the part is the whole, and is taken as it is
        parts_of_step, persistent = Gathered(), 0
    wide = stored.weight_width(recipe.precision, recipe.quantization)
    times = [n * wide for n in parts_of_step]
    if sharding.offload == "parameters":  # a rank's part is copied to the device, then gathered
        part = wide * max(ceil(prod(row.shape) / sharding.world_size) for row in held(recipe))
        times[0] += part
    found = replace(
        found, forward={"workspace": times[1]}, forward_parts=tuple(times[:2]), backward_parts=tuple(times[1:])
    )
    always = {"workspace": bucket + persistent, "gradients": rounded(sum(parts) * (width if told else FP32))}
    if sharding.offload:
        return replace(found, always=always | {"gradients": 0})
    largest = max((ceil(prod(row.shape) / sharding.world_size) for row in rows), default=0)
    whole = max(FP32 * part + max(FP32 * part * _foreach(recipe), width * part) for part in parts)
    temporaries = max(FP64 * largest, whole)
    return replace(found, always=found.always | always, temporaries=temporaries)


def _pieces(rows: list[Row], part: int, rank: int) -> list[tuple[int, int]]:
    """(elements in the part, elements) of each tensor of a group that `rank`'s part has something of."""
    begin, found = 0, []
    for row in rows:
        size = prod(row.shape)
        inside = min((rank + 1) * part, begin + size) - max(rank * part, begin)
        if inside > 0:
            found.append((inside, size))
        begin += size
    return found


def _left(recipe: Recipe, pieces: list[tuple[int, int]]) -> int:
    """Elements of gradients that stay with their parameters to the step: of those that filled a bucket alone, and of
    which this rank's part has nothing."""
    mine = sum(size for _, size in pieces)
    rows = [row for row in held(recipe) if row.trained and prod(row.shape) > _bucket(recipe)]
    total = sum(prod(row.shape) * row.count for row in rows)
    return max(0, total - mine)


def _foreach(recipe: Recipe) -> int:
    return copies(recipe)[0] if recipe.optim in COPIES else 0


def _replica(recipe: Recipe, told: bool, rows: list[Row]) -> Held:
    """Stage 0: everything, and in "-mixed" precisions an fp32 copy of every weight, which the optimizer updates."""
    width = max((row.width for row in rows), default=FP32)
    sizes = [prod(row.shape) for row in rows]
    copies_, states = [], [size for row in rows for size in row.states]
    if told:
        copies_ = [rounded(FP32 * size) for size in sizes]
        states = [size for row in rows for size in _states(recipe, row.shape)]
    chunks, current = [0], 0
    for size in sizes:
        current += size
        if current > ALL_REDUCED:
            chunks, current = [*chunks, current], 0
    chunk = max(*chunks, current)
    own = FP32 if told else width
    foreach = _foreach(recipe)
    whole = sum(rounded(own * size) + internal_fragmentation(rounded(own * size)) for size in sizes)
    norm = FP32 * max(sizes, default=0) if width == HALF and not told and recipe.loop.max_grad_norm else 0
    return Held(
        parameters=stored.parameter_bytes(recipe),
        gradients=stored.gradient_bytes(recipe),
        optimizer_states=sum(states),
        fragmentation=stored.fragmentation_bytes(recipe)
        | {"optimizer_states": sum(map(internal_fragmentation, (*copies_, *states)))},
        temporaries=max(whole * foreach + (whole if told else 0), norm),
        always={"optimizer_states": sum(copies_)},
        reducing=chunk * width + (chunk * FP32 if width == HALF and not told else 0),
    )


def _part(rows: list[Row], ranks: int, stage: int) -> int:
    """Elements of a parameter group on one rank."""
    if stage == 3:
        return sum(ceil(prod(row.shape) / ranks) for row in rows)
    return 2 * ceil(sum(prod(row.shape) for row in rows) / (2 * ranks))


def _bucket(recipe: Recipe) -> int:
    return HIDDEN["reduce_bucket_size"](recipe.shape.hidden_size)


def _states(recipe: Recipe, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of the states of an fp32 tensor."""
    return state_sizes(shape, "linear", FP32, recipe.optim, recipe.optim_args, False)


def gradient_reduction(recipe: Recipe) -> bool | str:
    """What DeepSpeed does with a gradient that is complete: False, it stays; True, it is reduced and goes when the next
    one is complete; "fp32", it stays in fp32."""
    if not is_sharded_by(recipe, "deepspeed") or recipe.sharding.stage == 0:
        return False
    if recipe.sharding.stage == 1:
        return "fp32" if recipe.precision.endswith("-true") else False
    return True


class DeepSpeedModel(Model):
    """The ledger of a rank whose gradients go one by one (`reduce_independent_p_g_buckets_and_remove_grads`).

    Stages 1 and 2 reduce a copy of a gradient; in fp32 where the model is in half precision and DeepSpeed does not know
    it, and then in pieces, one for each rank that has a part of it. Stage 3 scatters it as it is; offloaded, the rank's
    part comes back to the device and is copied to fp64 for its norm (`partition_grads`), when the module's gathered
    weights have just been freed, unless it is the embedding.
    """

    def shard(self, asked: Recipe, gradients_exist: bool) -> None:
        super().shard(asked, gradients_exist)
        self.sharding, self.reduction = asked.sharding, gradient_reduction(asked)
        self.in_fp32, self.kept = asked.precision.endswith("-true"), []
        trained = sum(prod(row.shape) * row.count for row in held(asked) if row.trained)
        self.part = ceil(trained / asked.sharding.world_size)

    def complete(self, parameter: Parameter) -> None:
        if not self.reduction:
            super().complete(parameter)
            return
        parameter.partial.block.entry.category = "gradients"
        elements, width = prod(parameter.shape), FP32 if self.in_fp32 else parameter.width
        if self.reduction == "fp32":
            self.kept.append(self.group("to", [(elements * FP32, 1)], "gradients", FP32))
            parameter.partial = None
            return
        size = (min(elements, self.part) if self.in_fp32 else elements) * width
        if self.sharding.stage == 3:
            part = ceil(elements / self.sharding.world_size)
            back = part * width + min(part, AT_ONCE) * FP64 if self.sharding.offload else 0
            cast = elements * width if width > parameter.width else 0
            embedding = parameter.name == f"{self.embeddings[0]}.weight" if self.embeddings else False
            size = max(0, cast + back - (0 if embedding else elements * parameter.width))
        if size:
            self.group("reduced", [(size, 1)], "workspace", width)
        parameter.partial = None
