"""What a rank holds under DeepSpeed: flat partitions, a bucket for gradients, a step in fp32.

Ψ: trained parameters, N: ranks, w: bytes of a weight, "part": what a rank has, ⌈Ψ/N⌉ elements at
stages 1 and 2, the sum of ⌈p/N⌉ at stage 3. The Trainer's two parameter groups are counted as one.

    weights      stages 1, 2 in one flat tensor, w · N part; 3 w · part
    states       fp32 weights (4 part) and the optimizer's states of those
    gradients    1 all to the end of backward; 2, 3 one after the other, and 3 always w · part
    gathered     3: see `param_coordinator`; too much in the lower layers
    step         an fp64 copy of the largest gradient for the norm, then fp32 gradients and the
                 optimizer's temporaries
"""

from itertools import accumulate
from math import ceil, prod
from typing import Any

from ..hardware.overhead import rounded
from ..recipe.deepspeed_config import HIDDEN
from ..recipe.options import FUSED
from ..recipe.recipe import Recipe
from . import model_states
from .engine_memory import EMBEDDING, Engine
from .graph import Parameter
from .ledger import Ledger
from .memory import Block
from .model_states import RankBytes, compute_recipe, parameter_table
from .param_coordinator import gathered
from .reserved import internal_fragmentation
from .step import single_temporaries
from .tensor_sizes import FP32, HALF, state_sizes, weight_width

# Elements (`sub_group_size`, zero/config.py; zero/stage3.py, _create_fp16_sub_groups).
SUB_GROUP = 1_000_000_000
FP64 = 8
NORM_ELEMENTS = 250_000_000  # of a norm that is computed at a time


def deepspeed_bytes(asked: Recipe) -> RankBytes:
    """Return the bytes that `asked`'s rank holds."""
    rank = _Rank(asked)
    recipe = rank.recipe
    third = asked.group.stage == 3
    offload = asked.group.offload
    # Frozen weights are in no flat partition: whole tensors at stages 1 and 2, each divided among
    # ranks at stage 3.
    frozen = 0
    for row in parameter_table(recipe):
        if not row.trained:
            frozen += row.count * sum(row.blocks)
    if third:
        frozen = ceil(frozen / rank.ranks)
        weights = [sum(rank.parts) * rank.width]
    else:
        weights = [part * rank.width * rank.ranks for part in rank.parts]

    # The optimizer updates fp32 copies of the parts. Stage 3 could do without of fp32 weights, but
    # compares a device with its name (zero/stage3.py, _create_fp32_partitions; DeepSpeed 0.19.8).
    updated = [] if offload else rank.parts
    masters = [rounded(FP32 * part) for part in updated]
    states: list[int] = []
    for part in updated:
        states += state_sizes(
            (part,),
            "linear",
            FP32,
            recipe.optim,
            recipe.optim_args,
            trainer=False,
        )
    rests = 0
    for size in (*weights, *states, *masters):
        rests += internal_fragmentation(rounded(size))

    always, rest = rank.stage_3() if third else rank.stage_1_or_2()
    # fp32 weights count as states of the optimizer, because the model does not compute with them.
    always = {"optimizer_states": sum(masters)} | always
    always["workspace"] += rests
    parameters = 0
    if offload != "parameters":
        parameters = frozen + sum(rounded(size) for size in weights)
    return RankBytes(
        parameters=parameters,
        gradients=0,
        optimizer_states=sum(states),
        always=always,
        **rest,
    )


class _Rank:
    """One rank's partitions of the recipe `asked`.

    Attributes:
        sizes: elements of each trained tensor; `parts`: of each partition.
        width: bytes of a weight. `reduced`: of a gradient at stage 3.
        tied_gradient: elements of a tied embedding's gradients: the head's, the lookup's and their
            sum.
        precision_set: DeepSpeed's configuration has the model's precision, or the model is in fp32.
        bucket: elements that gradients are reduced in.
        updating: bytes of the optimizer's temporaries for the largest part.
        one_group: the optimizer has one parameter group; with two, norms are apart.
    """

    def __init__(self, asked: Recipe):
        self.recipe = compute_recipe(asked)
        self.sharding = asked.group
        self.ranks = asked.group.world_size
        recipe = self.recipe
        shape = recipe.shape
        mixed = asked.precision.endswith("-mixed")
        rows = [row for row in model_states.tensors_in_order(recipe) if row.trained]
        self.sizes = [prod(row.shape) for row in rows]
        self.width = max(row.width for row in rows)
        # Stage 3 reduces in the configuration's precision, adapters too, or in fp32 without one.
        self.reduced = HALF if mixed else FP32
        self.tied_gradient = 0
        if shape.tied and not recipe.lora:
            # A function's gradient is added to in place, a linear layer's is not (`Ledger`).
            copies = 2 if recipe.trainer in FUSED else 3
            self.tied_gradient = copies * self.sizes[0]
        self.precision_set = mixed or self.width == FP32
        self.bucket = HIDDEN["reduce_bucket_size"](shape.hidden_size)
        self.one_group = recipe.loop.name != "trainer" or all(row.decayed for row in rows)
        if self.sharding.stage == 3:
            self.parts = self._sub_groups()
        else:
            self.parts = [ceil(sum(self.sizes) / self.ranks)]
        self.updating = single_temporaries(recipe, (max(self.parts),), FP32)

    def _sub_groups(self) -> list[int]:
        """List the rank's parts at stage 3, which updates `sub_group_size` elements at a time."""
        # A new group begins once the last one has reached its size, so groups are somewhat larger
        # than that.
        parts = [0]
        for size in self.sizes:
            if parts[-1] >= SUB_GROUP:
                parts.append(0)
            parts[-1] += ceil(size / self.ranks)
        return parts

    def stage_1_or_2(self) -> tuple[dict[str, int], dict[str, Any]]:
        """Keep this rank's gradients to the step, whole where its partition ends within one.

        Returns:
            What is added in every phase, and the other fields of `RankBytes`.
        """
        second = self.sharding.stage == 2
        offload = self.sharding.offload
        precision_set = self.precision_set
        pieces = self._pieces()
        whole = sum(size for _, size in pieces)
        width = self.width if precision_set else FP32
        gradients = self._gradients(whole, width)
        # fp32 gradients of all micro-batches are added up in one buffer, which the first makes.
        exists = not precision_set and self.recipe.gradient_accumulation_steps > 1
        reducing = 0 if exists else gradients
        kept = 0
        if second:
            # The norm of what is offloaded is computed now, else later, in the step.
            norm = FP64 if offload else 0
            tied = self.tied_gradient * self.width
            if precision_set or offload:
                # Candidates for the highest moment: a whole gradient, and offloaded also an fp64
                # copy of this rank's part for the norm.
                last = [size * self.width + inside * norm for inside, size in pieces]
            else:
                last = [self._last(whole)]
                tied += self._others(whole)
            if offload and self.recipe.gradient_accumulation_steps > 1:
                # Only the last micro-batch frees the rank's large gradients as it copies them
                # (`copy_grads_in_partition`, `is_gradient_accumulation_boundary`).
                large = sum(size for _, size in pieces if size > self.bucket)
                last.append(self._last(large))
                tied += self._others(large)
            if precision_set or exists or len(pieces) > 1:
                # The buffer is there before the embedding's gradient, which comes last.
                last.append(tied)
            reducing += max(last, default=0)
        elif not precision_set:
            # Gradients over the bucket's size of which this rank has nothing stay too.
            large = sum(size for size in self.sizes if size > self.bucket)
            kept = FP32 * max(0, large - whole)
        always = {"workspace": max(self.sizes) * self.width if offload else 0}
        return always, {
            "temporaries": self._temporaries(gradients, pieces) + kept,
            "backward": {"workspace": self.bucket * self.width},
            "backward_end": {"gradients": gradients + kept},
            "reducing": reducing,
            "existing": gradients if second else sum(self.sizes) * width,
        }

    def _gradients(self, whole: int, width: int) -> int:
        """Return the bytes of gradients on the device: of `whole` elements or the partition's."""
        if not self.precision_set:
            # Offloaded ones too: they are added to a buffer that stays on the device
            # (`_get_compact_grad_partition_buffer`).
            return sum(self.parts) * FP32
        if self.sharding.offload:
            return 0
        return whole * width

    def _temporaries(self, gradients: int, pieces: list[tuple[int, int]]) -> int:
        """Return the peak of the step's temporaries, `gradients` included."""
        if self.sharding.offload:
            return gradients
        part = max(self.parts)
        # Flattening one tensor makes no copy of it, and neither does its cast: the gradient stays.
        alone = len(pieces) == 1
        is_view = alone and self.precision_set and self.width == FP32
        copied = self.precision_set and not is_view
        flat = self.updating
        joined = 0
        if copied:
            flat += part * FP32
        if self.precision_set and not alone:
            joined += part * self.width
        if self.precision_set and self.width < FP32:
            # Half-precision gradients are joined, then copied to fp32 while both are there.
            joined += part * FP32
        norm = max((inside for inside, _ in pieces), default=0) * FP64
        before = gradients + max(norm, joined)
        if self.sharding.stage == 2 and copied and self.one_group:
            # One buffer has the gradients of all groups, and goes when the last group's are flat.
            return max(before, flat)
        return max(before, gradients + flat)

    def _others(self, whole: int) -> int:
        """Return the bytes of this rank's gradients but the first tensor's.

        All gradients that stay until backward ends are `whole` elements.
        """
        first = self.sizes[0]
        has_first = self.sharding.rank * max(self.parts) < first
        others = whole - first if has_first else whole
        return others * self.width

    def _last(self, whole: int) -> int:
        """Return the bytes while the first tensor's gradient, the last one, is reduced.

        It is there beside the rank's others of `whole` elements, and where the configuration has
        no half precision a slice of it of up to a rank's part in fp32
        (zero/stage_1_and_2.py, average_tensor and allreduce_no_retain).
        """
        first = self.sizes[0]
        in_fp32 = 0
        if not self.precision_set:
            in_fp32 = min(first, max(self.parts)) * FP32
        return self._others(whole) + first * self.width + in_fp32

    def stage_3(self) -> tuple[dict[str, int], dict[str, Any]]:
        """Keep the partition's gradients at all times, and gather weights while they are needed.

        Returns:
            What is added in every phase, and the other fields of `RankBytes`.
        """
        # The bucket for gradients is allocated once and filled again and again (`ipg_buckets`).
        always = {"workspace": self.bucket * self.reduced}
        if self.sharding.offload:
            return always, {"temporaries": 0}
        width = self.reduced if self.precision_set else FP32
        always["gradients"] = rounded(sum(self.parts) * width)
        part = max(self.parts)
        # The norm of the largest gradient comes before anything is flat (get_grad_norm_direct).
        norm = ceil(max(self.sizes) / self.ranks) * FP64
        # Gradients are joined in their own dtype, then copied to fp32 if they are not
        # (_prepare_fp32_grad_for_sub_group).
        joined = part * width if width < FP32 else 0
        update = part * FP32 + max(joined, self.updating)
        return always, {"temporaries": max(norm, update)}

    def _pieces(self) -> list[tuple[int, int]]:
        """List (elements in the partition, elements) of each tensor that the rank has some of."""
        (part,) = self.parts
        # This rank has elements low to low + part of all trained tensors laid end to end.
        low = self.sharding.rank * part
        pieces = []
        for size, end in zip(self.sizes, accumulate(self.sizes), strict=True):
            inside = min(low + part, end) - max(low, end - size)
            if inside > 0:
                pieces.append((inside, size))
        return pieces


class DeepSpeedEngine(Engine):
    """An engine that frees gradients one by one.

    It does so in `reduce_independent_p_g_buckets_and_remove_grads`.
    Stages 1 and 2 reduce a copy, in fp32 and in pieces where DeepSpeed does not know that the
    model is in half precision. Stage 3 scatters the gradient; offloaded, the rank's part comes
    back and is copied to fp64, then to fp32 (`partition_grads`).

    Attributes:
        gathered: what stage 3 has gathered; `sizes`: bytes of that in each part of the step.
        in_fp32: DeepSpeed reduces in fp32, as it knows of no other precision.
        kept: fp32 copies of complete gradients. `added`: they are added to those of earlier
            micro-batches.
        part: elements of the rank's partition.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: dict[str, Parameter],
        asked: Recipe,
        recipe: Recipe,
    ):
        super().__init__(ledger, parameters, asked, recipe)
        sharding = asked.group
        self.sharding = sharding
        self.gathered: Block | None = None
        self.sizes: dict[str, int] = {}
        self.copies: dict[str, int] = {}
        self.in_fp32 = asked.precision.endswith("-true")
        self.kept: list[Block] = []
        self.added = False
        trained = 0
        for row in parameter_table(asked):
            if row.trained:
                trained += prod(row.shape) * row.count
        self.part = ceil(trained / sharding.world_size)
        if sharding.stage == 3:
            ledger.adds_linear_in_place = True  # `zero.Init`, memory_efficient_linear
            width = weight_width(recipe.weights_dtype, recipe.quantization)
            # One rank's copy is the weight itself (`NoGatherCoalescedHandle`).
            copies = sharding.offload == "parameters" and sharding.world_size > 1
            ranks = sharding.world_size if copies else 0
            # TRL multiplies with the head's weight itself.
            head_in_root = recipe.trainer in FUSED
            checkpoints = recipe.gradient_checkpointing
            elements = gathered(recipe.shape, checkpoints, ranks, head_in_root)
            self.sizes = {part: count * width for part, (count, _) in elements.items()}
            self.copies = {part: copied * width for part, (_, copied) in elements.items()}

    def begin(self, gradients_exist: bool) -> None:
        """Begin the micro-batch, and note whether its gradients are added to others."""
        super().begin(gradients_exist)
        self.added = gradients_exist

    def before_forward(self) -> None:
        """Gather what stage 3 has at most before the head runs."""
        self._gather("forward")

    def leave(self, key: str, needs: bool = True) -> None:
        """Have backward gather what stage 3 needs before the embedding, where `key` is that."""
        if key == EMBEDDING:
            # It stands behind the embedding's nodes, so backward comes to it when all layers are
            # done.
            self.ledger.nodes.append(lambda: self._gather("front"))

    def before_head(self) -> None:
        """Gather what stage 3 has at most while the head runs, and later in backward."""
        self._gather("head")
        # It stands before the head's nodes, so backward comes to it when the head is done.
        self.ledger.nodes.append(lambda: self._gather("backward"))

    def _gather(self, part: str) -> None:
        """Replace what is gathered by the most that is gathered in `part` of the step."""
        self.gathered = None
        # Stages 1 and 2 gather nothing.
        if self.sizes:
            self.gathered = self.ledger.group("all_gather", [(self.sizes[part], 1)], "workspace")
            # A rank's part on its way from the host, while it is gathered.
            self.ledger.group("_to_copy", [(self.copies[part], 1)], "temporaries")

    def finish(self) -> None:
        """Release what is gathered, at the end of backward."""
        self.gathered = None

    def complete(self, parameter: Parameter) -> None:
        """Reduce a complete gradient and free it, but at stage 1 in DeepSpeed's own precision."""
        if self.sharding.stage == 1 and not self.in_fp32:
            super().complete(parameter)
            return
        assert parameter.partial is not None
        parameter.partial.entry.category = "gradients"
        elements = prod(parameter.shape)
        if self._is_head(parameter):
            self._gather("reduced")
        if (
            self.sharding.stage == 1
        ):  # it stays in fp32, or is added to that of earlier micro-batches
            copy = self.ledger.group(
                "to",
                [(elements * FP32, 1)],
                "gradients",
                FP32,
            )
            if not self.added:
                self.kept.append(copy)
        else:
            width = FP32 if self.in_fp32 else parameter.width
            size = self._reduced(parameter, elements, width)
            if size:
                self.ledger.group(
                    "reduced",
                    [(size, 1)],
                    "workspace",
                    width,
                )
        parameter.partial = None

    def _is_head(self, parameter: Parameter) -> bool:
        """Tell whether `parameter` is the weight of a head that has its own.

        Its gradient is reduced when the next one comes, and by then more has been gathered.
        """
        return parameter.name == f"{self.recipe.shape.head}.weight"

    def _reduced(self, parameter: Parameter, elements: int, width: int) -> int:
        """Return what a complete gradient takes to be reduced in numbers of `width` bytes."""
        if self.sharding.stage == 2:
            if self.in_fp32:
                elements = min(elements, self.part)
            return elements * width
        size = 0
        if width > parameter.width:  # cast before it is scattered
            size += elements * width
        if self.sharding.offload:
            # Its norm is computed, then it is cast (`_offload_grad_partition_at_boundary`).
            part = ceil(elements / self.sharding.world_size)
            cast = part * FP32 if width < FP32 else 0
            size += part * width + max(min(part, NORM_ELEMENTS) * FP64, cast)
        embedding = bool(self.embeddings) and parameter.name == f"{self.embeddings[0]}.weight"
        if not (embedding or self._is_head(parameter)):
            # The weight is released by then, but the embedding's, whose gradient comes last.
            size -= elements * parameter.width
        return max(0, size)
