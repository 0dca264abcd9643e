"""What a rank holds under DeepSpeed: flat partitions, gradients reduced in a bucket, a step in fp32.

Ψ: trained parameters, N: ranks, w: bytes of a weight, "part": what a rank has of each parameter group, ⌈Ψ/2N⌉ · 2
elements at stages 1 and 2, the sum of ⌈p/N⌉ at stage 3.

    weights      stage 0 as they are; 1, 2 in one flat tensor a group, w · N part; 3 w · part
    states       fp32 weights (4 part; 4Ψ at stage 0 in a "-mixed" precision) and the optimizer's states of those
    gradients    0, 1 all to the end of backward; 2, 3 one after the other, and 3 always w · part
    reducing     0 a flat copy at the end, over 500 million elements at a time (`allreduce_bucket`)
    gathered     3: see `param_coordinator`; too much in the lower layers
    step         an fp64 copy of the largest gradient for the norm, then fp32 gradients and the optimizer's temporaries

Underestimates world_size=1 at stage 2 in fp32, by 14 % with a large tied embedding.
"""

from dataclasses import replace
from math import ceil, prod

from ..hardware.overhead import rounded
from ..hardware.reserved import internal_fragmentation
from ..recipe.deepspeed_config import HIDDEN
from ..recipe.recipe import Recipe
from . import model_states
from .ledger import Parameter, Tensor
from .model import Model
from .model_states import FP32, HALF, ParameterRow, RankBytes, compute_recipe, parameter_table
from .param_coordinator import gathered
from .step import copies

ALL_REDUCED = 500_000_000  # elements that stage 0 reduces at a time (runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE)
SUB_GROUP = 1_000_000_000  # elements (`sub_group_size`, zero/config.py; zero/stage3.py, _create_fp16_sub_groups)
FP64, AT_ONCE = 8, 250_000_000  # elements of a norm that is computed at a time


def deepspeed_bytes(recipe: Recipe) -> RankBytes:
    """Return the bytes that `recipe`'s rank holds."""
    rank = _Rank(recipe)
    if recipe.sharding.stage == 0:
        return rank.replica()
    return rank.stage_3() if recipe.sharding.stage == 3 else rank.stage_1_or_2()


class _Rank:
    """One rank's partitions of the recipe `asked`."""

    def __init__(self, asked: Recipe):
        self.recipe, self.sharding = compute_recipe(asked), asked.sharding
        self.rows = [row for row in model_states.tensors_in_order(self.recipe) if row.trained]
        self.width = max((row.width for row in self.rows), default=FP32)  # bytes of a weight
        self.mixed = asked.precision.endswith("-mixed")
        self.precision_set = self.mixed or self.width == FP32  # DeepSpeed's configuration has it, or it is fp32
        self.elements_of_bucket = HIDDEN["reduce_bucket_size"](self.recipe.shape.hidden_size)
        self.bucket = self.elements_of_bucket * self.width  # bytes of the buffer that gradients are reduced in
        self.foreach = copies(self.recipe)[0]  # temporaries as large as the weights
        trainer = self.recipe.loop.name == "trainer"
        split = [[row for row in self.rows if row.decayed or not trainer]]
        split.append([row for row in self.rows if trainer and not row.decayed])
        self.groups = [group for group in split if group]  # trained tensors by parameter group
        if self.sharding.stage == 3:
            self.groups = [part for group in self.groups for part in self._sub_groups(group)]
        self.parts = [self._part(group) for group in self.groups]  # elements that the rank has of each

    def _part(self, rows: list[ParameterRow]) -> int:
        ranks = self.sharding.world_size
        if self.sharding.stage == 3:
            return sum(ceil(prod(row.shape) / ranks) for row in rows)
        return 2 * ceil(sum(prod(row.shape) for row in rows) / (2 * ranks))

    def _sub_groups(self, rows: list[ParameterRow]) -> list[list[ParameterRow]]:
        """Split a group where the rank's part of it reaches `sub_group_size`: stage 3 updates one after the other."""
        found, elements = [[]], 0
        for row in rows:
            if elements >= SUB_GROUP:
                found, elements = [*found, []], 0
            found[-1].append(row)
            elements += ceil(prod(row.shape) / self.sharding.world_size)
        return found

    def _states(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the bytes of each state of an fp32 tensor."""
        return model_states.state_sizes(shape, "linear", FP32, self.recipe.optim, self.recipe.optim_args, False)

    def _partitioned(self) -> RankBytes:
        """Return weights, fp32 weights and states of stages 1 to 3."""
        third, offload, ranks = self.sharding.stage == 3, self.sharding.offload, self.sharding.world_size
        frozen = sum(row.count * sum(row.blocks) for row in parameter_table(self.recipe) if not row.trained)
        weights = [part * self.width * (1 if third else ranks) for part in self.parts]
        if third:
            frozen, weights = ceil(frozen / ranks), [sum(weights)]
        states = [size for part in self.parts for size in self._states((part,))] if not offload else []
        # of fp32 weights too: stage 3 would do without, but compares a device with its name (zero/stage3.py,
        # _create_fp32_partitions; DeepSpeed 0.19.8)
        masters = [rounded(FP32 * part) for part in self.parts] if not offload else []
        return RankBytes(
            parameters=0 if offload == "parameters" else frozen + sum(map(rounded, weights)),
            gradients=0,
            optimizer_states=sum(states),
            fragmentation={
                "parameters": sum(internal_fragmentation(rounded(size)) for size in weights),
                "optimizer_states": sum(map(internal_fragmentation, (*states, *masters))),
            },
            temporaries=0,
            always={"optimizer_states": sum(masters)},
        )

    def stage_1_or_2(self) -> RankBytes:
        """Keep this rank's gradients to the step, whole where its partition begins or ends within one."""
        stage, precision_set, found = self.sharding.stage, self.precision_set, self._partitioned()
        pieces = [piece for group in zip(self.groups, self.parts, strict=True) for piece in self._pieces(*group)]
        width = self.width if precision_set else FP32
        if self.sharding.offload:
            gradients, temporaries = 0, 0
            buffer = {"workspace": max((prod(row.shape) * row.width for row in self.rows), default=0)}
            found = replace(found, always=found.always | buffer)
        else:
            gradients = (sum(whole for _, whole in pieces) if precision_set else sum(self.parts)) * width
            flat = max(self.parts) * FP32 * (precision_set + self.foreach)
            fp64 = max((piece for piece, _ in pieces), default=0) * FP64
            # one buffer has the gradients of all groups, and goes when the last group's are flat
            soon = stage == 2 and precision_set and len(self.parts) == 1
            temporaries = max(gradients + fp64, flat) if soon else gradients + max(fp64, flat)
        kept, reducing, existing = 0, gradients + max((whole for _, whole in pieces), default=0) * width, gradients
        if stage == 1:
            kept = 0 if precision_set else self._kept_whole(pieces) * FP32
            reducing = 0 if precision_set else gradients
            existing = sum(prod(row.shape) for row in self.rows) * width
        return replace(
            found,
            temporaries=temporaries + kept,
            backward={"workspace": self.bucket},
            backward_end={"gradients": gradients + kept},
            reducing=reducing,
            existing=existing,
        )

    def stage_3(self) -> RankBytes:
        """Keep the partition's gradients at all times, and gather weights while the step needs them."""
        recipe, sharding, found = self.recipe, self.sharding, self._partitioned()
        small = HIDDEN["stage3_param_persistence_threshold"](recipe.shape.hidden_size)
        persistent = sum(rounded(prod(row.shape) * row.width) for row in self.rows if prod(row.shape) <= small)
        if sharding.world_size == 1:  # the part is the whole, and is taken as it is
            persistent = 0
        gradients = rounded(sum(self.parts) * (self.width if self.precision_set else FP32))
        always = {"workspace": self.bucket + persistent, "gradients": 0 if sharding.offload else gradients}
        temporaries = 0
        if not sharding.offload:
            largest = max((ceil(prod(row.shape) / sharding.world_size) for row in self.rows), default=0)
            beside = max(FP32 * self.foreach, self.width)
            temporaries = max(FP64 * largest, (FP32 + beside) * max(self.parts))
        masters = found.always if not sharding.offload else {}
        return replace(found, always=masters | always, temporaries=temporaries)

    def _pieces(self, rows: list[ParameterRow], part: int) -> list[tuple[int, int]]:
        """List (elements in the partition, elements) of each tensor of a group that the rank has some of."""
        rank, begin, found = self.sharding.rank, 0, []
        for row in rows:
            size = prod(row.shape)
            inside = min((rank + 1) * part, begin + size) - max(rank * part, begin)
            if inside > 0:
                found.append((inside, size))
            begin += size
        return found

    def _kept_whole(self, pieces: list[tuple[int, int]]) -> int:
        """Count elements of gradients over the bucket's size of which this rank has nothing: they stay to the step."""
        sizes = [prod(row.shape) for row in self.rows]
        return max(0, sum(size for size in sizes if size > self.elements_of_bucket) - sum(size for _, size in pieces))

    def replica(self) -> RankBytes:
        """Hold everything at stage 0, and in "-mixed" precisions an fp32 copy of every weight, which is updated."""
        recipe, mixed, width, chunks = self.recipe, self.mixed, self.width, [0]
        sizes, masters = [prod(row.shape) for row in self.rows], []
        states = [size for row in self.rows for size in row.states]
        if mixed:
            masters = [rounded(FP32 * size) for size in sizes]
            states = [size for row in self.rows for size in self._states(row.shape)]
        for size in sizes:
            chunks[-1] += size
            if chunks[-1] > ALL_REDUCED:
                chunks.append(0)
        updated = [rounded((FP32 if mixed else width) * size) for size in sizes]
        whole = sum(size + internal_fragmentation(size) for size in updated)
        rests = {"optimizer_states": sum(map(internal_fragmentation, (*masters, *states)))}
        norm = FP32 * max(sizes, default=0) if not self.precision_set and recipe.loop.max_grad_norm else 0
        return RankBytes(
            parameters=model_states.parameter_bytes(recipe),
            gradients=model_states.gradient_bytes(recipe),
            optimizer_states=sum(states),
            fragmentation=model_states.fragmentation_bytes(recipe) | rests,
            temporaries=max(whole * (self.foreach + mixed), norm),
            always={"optimizer_states": sum(masters)},
            reducing=max(chunks) * (width + (FP32 if width == HALF and not mixed else 0)),
        )


def gradient_reduction(recipe: Recipe) -> bool | str:
    """Tell whether a complete gradient is reduced and freed with the next one; "fp32": it stays, in fp32."""
    if not model_states.is_sharded_by(recipe, "deepspeed") or recipe.sharding.stage == 0:
        return False
    if recipe.sharding.stage == 1:
        return "fp32" if recipe.precision.endswith("-true") else False
    return True


def _gathered_bytes(recipe: Recipe) -> dict[str, int]:
    """Return the bytes that stage 3 has gathered in each part of the step."""
    sharding, recipe = recipe.sharding, compute_recipe(recipe)
    if sharding.world_size == 1:
        return {}
    width = model_states.weight_width(recipe.weights_dtype, recipe.quantization)
    sizes = {part: n * width for part, n in gathered(recipe.shape).items()}
    if sharding.offload == "parameters":  # a rank's part is copied to the device, then gathered
        sizes["forward"] += width * max(ceil(prod(row.shape) / sharding.world_size) for row in parameter_table(recipe))
    return sizes


class DeepSpeedModel(Model):
    """The ledger of a DeepSpeed rank, which frees gradients one by one (`reduce_independent_p_g_buckets_and_remove_grads`).

    Stages 1 and 2 reduce a copy, in fp32 and in pieces where DeepSpeed does not know that the model is in half precision.
    Stage 3 scatters the gradient; offloaded, the rank's part comes back and is copied to fp64 (`partition_grads`).
    """

    def shard(self, asked: Recipe, gradients_exist: bool) -> None:
        super().shard(asked, gradients_exist)
        self.sharding, self.reduction = asked.sharding, gradient_reduction(asked)
        self.zero3_linear = asked.sharding.stage == 3  # `zero.Init`, memory_efficient_linear
        self.in_fp32, self.kept = asked.precision.endswith("-true"), []
        trained = sum(prod(row.shape) * row.count for row in parameter_table(asked) if row.trained)
        self.part = ceil(trained / asked.sharding.world_size)
        self.gathered, self.sizes = None, _gathered_bytes(asked) if self.zero3_linear else ()

    def hidden_states(self) -> Tensor:
        self._gather("forward")
        return super().hidden_states()

    def stack(self, *args) -> Tensor:
        if not self.sections:
            self.nodes.append(lambda: self._gather("front"))
        return super().stack(*args)

    def logits_and_loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._gather("head")
        self.nodes.append(lambda: self._gather("backward"))
        return super().logits_and_loss(x)

    def _gather(self, part: str) -> None:
        self.gathered = None
        if self.sizes:
            self.gathered = self.group("all_gather", [(self.sizes[part], 1)], "workspace")

    def finish(self) -> None:
        self.gathered = None

    def complete(self, parameter: Parameter) -> None:
        if not self.reduction:
            super().complete(parameter)
            return
        parameter.partial.entry.category = "gradients"
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
