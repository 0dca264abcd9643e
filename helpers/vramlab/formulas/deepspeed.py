"""What a rank holds under DeepSpeed: flat partitions, gradients reduced in a bucket, a step in fp32.

Ψ: trained parameters, N: ranks, w: bytes of a weight, "part": what a rank has, ⌈Ψ/N⌉ elements at stages 1 and 2, the sum
of ⌈p/N⌉ at stage 3. The Trainer's two parameter groups are counted as one.

    weights      stages 1, 2 in one flat tensor, w · N part; 3 w · part
    states       fp32 weights (4 part) and the optimizer's states of those
    gradients    1 all to the end of backward; 2, 3 one after the other, and 3 always w · part
    gathered     3: see `param_coordinator`; too much in the lower layers
    step         an fp64 copy of the largest gradient for the norm, then fp32 gradients and the optimizer's temporaries
"""

from itertools import accumulate
from math import ceil, prod
from typing import Any

from ..hardware.overhead import rounded
from ..recipe.deepspeed_config import HIDDEN
from ..recipe.recipe import Recipe
from . import model_states
from .ledger import Parameter, Tensor
from .model import Model
from .model_states import FP32, HALF, RankBytes, compute_recipe, parameter_table, weight_width
from .param_coordinator import gathered
from .reserved import internal_fragmentation
from .step import single_temporaries

SUB_GROUP = 1_000_000_000  # elements (`sub_group_size`, zero/config.py; zero/stage3.py, _create_fp16_sub_groups)
FP64, AT_ONCE = 8, 250_000_000  # elements of a norm that is computed at a time


def deepspeed_bytes(asked: Recipe) -> RankBytes:
    """Return the bytes that `asked`'s rank holds."""
    rank, third, offload = _Rank(asked), asked.sharding.stage == 3, asked.sharding.offload
    frozen = sum(row.count * sum(row.blocks) for row in parameter_table(rank.recipe) if not row.trained)
    weights = [part * rank.width * rank.ranks for part in rank.parts]
    if third:
        frozen, weights = ceil(frozen / rank.ranks), [sum(rank.parts) * rank.width]
    updated = [] if offload else rank.parts
    optim = rank.recipe.optim, rank.recipe.optim_args
    states = [n for part in updated for n in model_states.state_sizes((part,), "linear", FP32, *optim, False)]
    # of fp32 weights too: stage 3 would do without, but compares a device with its name (zero/stage3.py,
    # _create_fp32_partitions; DeepSpeed 0.19.8)
    masters = [rounded(FP32 * part) for part in updated]
    rests = sum(internal_fragmentation(rounded(size)) for size in (*weights, *states, *masters))
    always, rest = rank.stage_3() if third else rank.stage_1_or_2()
    return RankBytes(
        parameters=0 if offload == "parameters" else frozen + sum(map(rounded, weights)),
        gradients=0,
        optimizer_states=sum(states),
        always={"optimizer_states": sum(masters)} | always | {"workspace": always["workspace"] + rests},
        **rest,
    )


class _Rank:
    """One rank's partitions of the recipe `asked`; sizes are numbers of elements."""

    def __init__(self, asked: Recipe):
        self.recipe, self.sharding = recipe, sharding = compute_recipe(asked), asked.sharding
        self.ranks = sharding.world_size
        rows = [row for row in model_states.tensors_in_order(recipe) if row.trained]
        self.sizes = [prod(row.shape) for row in rows]
        self.width = max(row.width for row in rows)  # bytes of a weight
        # bytes of a gradient at stage 3: adapters stay in fp32 there, and are reduced in the configuration's precision
        self.reduced = HALF if asked.precision.endswith("-mixed") else self.width
        # a tied embedding's gradient: the head's, the lookup's and their sum
        self.tied_gradient = 3 * self.sizes[0] if recipe.shape.tied and not recipe.lora else 0
        # DeepSpeed's configuration has the precision, or it is fp32
        self.precision_set = asked.precision.endswith("-mixed") or self.width == FP32
        self.bucket = HIDDEN["reduce_bucket_size"](recipe.shape.hidden_size)  # where gradients are reduced
        self.one_group = recipe.loop.name != "trainer" or all(row.decayed for row in rows)  # else norms are apart
        self.parts = self._sub_groups() if sharding.stage == 3 else [ceil(sum(self.sizes) / self.ranks)]
        self.updating = single_temporaries(recipe, (max(self.parts),), FP32)  # the optimizer's, of one flat part

    def _sub_groups(self) -> list[int]:
        """List the rank's parts at stage 3, which updates `sub_group_size` elements after the other."""
        parts = [0]
        for size in self.sizes:
            if parts[-1] >= SUB_GROUP:
                parts.append(0)
            parts[-1] += ceil(size / self.ranks)
        return parts

    def stage_1_or_2(self) -> tuple[dict[str, int], dict[str, Any]]:
        """Keep this rank's gradients to the step, whole where its partition begins or ends within one."""
        second, precision_set, pieces = self.sharding.stage == 2, self.precision_set, self._pieces()
        width, whole, kept = self.width if precision_set else FP32, sum(size for _, size in pieces), 0
        if self.sharding.offload:
            # fp32 gradients are added to a buffer that stays on the device (`_get_compact_grad_partition_buffer`)
            gradients = temporaries = 0 if precision_set else sum(self.parts) * FP32
            norm = FP64
        else:
            norm = 0  # later, in the step
            alone = len(pieces) == 1  # flattening one tensor makes no copy of it
            view = alone and precision_set and width == FP32  # and neither does its cast: the gradient stays
            gradients = (whole if precision_set else sum(self.parts)) * width
            flat = self.updating
            if precision_set and not view:
                flat += max(self.parts) * FP32
            fp64 = max((inside for inside, _ in pieces), default=0) * FP64
            # gradients are joined; those in half precision then copied to fp32 while both are there
            widths = self.width * (not alone) + (FP32 if self.width < FP32 else 0)
            joined = max(self.parts) * widths if precision_set else 0
            # one buffer has the gradients of all groups, and goes when the last group's are flat
            soon = second and precision_set and self.one_group and not view
            first = gradients + max(fp64, joined)
            temporaries = max(first, flat) if soon else max(first, gradients + flat)
        # fp32 gradients of all micro-batches are added up in one buffer, which the first makes
        exists = not precision_set and self.recipe.gradient_accumulation_steps > 1
        reducing = 0 if exists else gradients
        if second:
            tied = self.tied_gradient * self.width
            if precision_set or self.sharding.offload:
                last = [size * self.width + norm * inside for inside, size in pieces]
            else:
                last, tied = [self._last_in_fp32(whole)], self._others(whole) + tied
            if precision_set or exists or len(pieces) > 1:  # the buffer is there before the embedding's gradient
                last.append(tied)
            reducing += max(last, default=0)
        elif not precision_set:  # gradients over the bucket's size of which this rank has nothing stay too
            kept = FP32 * max(0, sum(size for size in self.sizes if size > self.bucket) - whole)
        return {"workspace": max(self.sizes) * self.width if self.sharding.offload else 0}, {
            "temporaries": temporaries + kept,
            "backward": {"workspace": self.bucket * self.width},
            "backward_end": {"gradients": gradients + kept},
            "reducing": reducing,
            "existing": gradients if second else sum(self.sizes) * width,
        }

    def _others(self, whole: int) -> int:
        """Return the bytes of this rank's gradients but the first tensor's, of `whole` elements with it: where the
        configuration has no half precision they stay beside their fp32 copies until backward ends."""
        first = self.sizes[0]
        has_it = self.sharding.rank * max(self.parts) < first
        return (whole - first if has_it else whole) * self.width

    def _last_in_fp32(self, whole: int) -> int:
        """Return the bytes while the first tensor's gradient, the last one, is reduced: it is there, and of it a slice
        of up to a rank's part in fp32 (zero/stage_1_and_2.py, average_tensor and allreduce_no_retain)."""
        first = self.sizes[0]
        return self._others(whole) + first * self.width + min(first, max(self.parts)) * FP32

    def stage_3(self) -> tuple[dict[str, int], dict[str, Any]]:
        """Keep the partition's gradients at all times, and gather weights while the step needs them."""
        width = self.reduced if self.precision_set else FP32
        gradients = rounded(sum(self.parts) * width)
        norm = ceil(max(self.sizes) / self.ranks) * FP64  # get_grad_norm_direct, before anything is flat
        # joined in their own dtype, then copied to fp32 if they are not (_prepare_fp32_grad_for_sub_group)
        joined = max(self.parts) * width if width < FP32 else 0
        temporaries = max(norm, max(self.parts) * FP32 + max(joined, self.updating))
        always = {"workspace": self.bucket * self.reduced}
        if self.sharding.offload:
            return always, {"temporaries": 0}
        return always | {"gradients": gradients}, {"temporaries": temporaries}

    def _pieces(self) -> list[tuple[int, int]]:
        """List (elements in the partition, elements) of each tensor that the rank has some of."""
        (part,), ends = self.parts, zip(self.sizes, accumulate(self.sizes), strict=True)
        low = self.sharding.rank * part
        found = ((min(low + part, end) - max(low, end - size), size) for size, end in ends)
        return [(inside, size) for inside, size in found if inside > 0]


class DeepSpeedModel(Model):
    """The ledger of a DeepSpeed rank, which frees gradients one by one (`reduce_independent_p_g_buckets_and_remove_grads`).

    Stages 1 and 2 reduce a copy, in fp32 and in pieces where DeepSpeed does not know that the model is in half precision.
    Stage 3 scatters the gradient; offloaded, the rank's part comes back and is copied to fp64 (`partition_grads`).
    """

    def shard(self, asked: Recipe, gradients_exist: bool) -> None:
        super().shard(asked, gradients_exist)
        self.sharding, self.gathered, self.sizes = asked.sharding, None, {}
        self.zero3_linear = asked.sharding.stage == 3  # `zero.Init`, memory_efficient_linear
        self.in_fp32, self.kept, self.added = asked.precision.endswith("-true"), [], gradients_exist
        table, ranks = parameter_table(asked), asked.sharding.world_size
        self.part = ceil(sum(prod(row.shape) * row.count for row in table if row.trained) / ranks)
        if self.zero3_linear:
            width = weight_width(self.recipe.weights_dtype, self.recipe.quantization)
            copies = ranks if asked.sharding.offload == "parameters" else 0
            elements = gathered(self.recipe.shape, self.checkpoints, copies)
            self.sizes = {part: n * width for part, n in elements.items()}

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
        if self.sharding.stage == 1 and not self.in_fp32:
            super().complete(parameter)
            return
        parameter.partial.entry.category = "gradients"
        elements, width = prod(parameter.shape), FP32 if self.in_fp32 else parameter.width
        if self.sharding.stage == 1:  # it stays in fp32, or is added to that of earlier micro-batches
            copy = self.group("to", [(elements * FP32, 1)], "gradients", FP32)
            if not self.added:
                self.kept.append(copy)
        elif size := self._reduced(parameter, elements, width):
            self.group("reduced", [(size, 1)], "workspace", width)
        parameter.partial = None

    def _reduced(self, parameter: Parameter, elements: int, width: int) -> int:
        """Return the bytes beside a complete gradient while it is reduced, in numbers of `width` bytes."""
        if self.sharding.stage == 2:
            return (min(elements, self.part) if self.in_fp32 else elements) * width
        part = ceil(elements / self.sharding.world_size)
        back = part * width + min(part, AT_ONCE) * FP64 if self.sharding.offload else 0
        cast = elements * width if width > parameter.width else 0
        embedding = parameter.name == f"{self.embeddings[0]}.weight" if self.embeddings else False
        return max(0, cast + back - (0 if embedding else elements * parameter.width))
