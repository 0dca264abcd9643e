"""ZeRO stages 0 to 3 by DeepSpeed (`deepspeed.initialize`; Rajbhandari et al. 2020, 2021).

DeepSpeed is an optional extra. `deepspeed_fake_group.py` answers for ranks that do not exist. Sizes
of what a rank holds are in `formulas/deepspeed_memory.py`.
"""

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...base.errors import needing
from ...private import of_deepspeed
from ...private.patched import afterwards, assign, replaced
from ...recipe.deepspeed_config import filled_in
from ...recipe.recipe import Recipe
from ..engine import ShardedEngine, Training

FLAT_GRADIENTS = "flat gradients"
PART_OF_GRADIENTS = "gradients in the part"
REDUCE_BUCKET = "reduce bucket"
GATHERED = "gathered weights"


class DeepSpeed(ShardedEngine):
    """DeepSpeed's engine owns model and optimizer.

    It averages, clips, steps and clears gradients by itself. It also casts by itself, as under
    accelerate (`Accelerator.native_amp` is False): in a "-mixed" precision weights are half
    precision for good, and each rank updates an fp32 copy of its shard.
    """

    autocasts = False
    fake_gpu = "cpu:0"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.exchanging: Callable | None = None

    def start(self, training: Training) -> None:
        """Give model and optimizer to DeepSpeed's engine."""
        deepspeed = library()
        choose_accelerator(training.device.type)
        from .deepspeed_fake_group import forget

        model = training.model
        config = filled_in(self.recipe)
        # the default of 65,536 overflows at once with random weights, and a skipped step makes no
        # states
        config["fp16"]["initial_scale_power"] = 0
        forget()
        groups = None
        if self.sharding.sp_size > 1:
            from . import ulysses  # with DeepSpeed, whose import takes seconds

            groups, self.exchanging = ulysses.attach(training, self.recipe)
        is_divided = self.sharding.stage == 3
        with _adapters_as_they_are() if is_divided else contextlib.nullcontext():
            engine, optimizer, _, _ = deepspeed.initialize(
                model=model,
                optimizer=training.optimizer,
                config=config,
                dist_init_required=False,
                mpu=groups,
            )
        training.model = engine
        training.optimizer = optimizer
        training.scaler = None
        if self.recipe.precision.endswith("-mixed"):
            # Trainer._prepare_input: inputs in the weights' dtype
            dtype = next(model.parameters()).dtype
            for batch in (training.batch, *training.further):
                for name, value in batch.items():
                    if _is_floating(value):
                        batch[name] = value.to(dtype)

    def without_peers(self, target: str) -> contextlib.AbstractContextManager:
        """While entered, DeepSpeed runs on one rank of a fake group."""
        library()
        from .deepspeed_fake_group import without_peers

        return without_peers(self.fake_gpu if target == "cuda" else "cpu")

    @contextlib.contextmanager
    def follow(self, training: Training, tracker: Any) -> Iterator[None]:
        """Name what DeepSpeed holds, and its buffers as it fills them."""
        # What was made before the tracker was there; the patches below see the rest.
        for category, where, tensors in held(training.model):
            tracker.claim(tensors, category, where)

        def claims(category: str, where: str, tensors_of: Callable) -> Callable:
            def claim(result: Any, *args: Any, **options: Any) -> None:
                tracker.claim(tensors_of(*args), category, where)

            return claim

        with contextlib.ExitStack() as stack:
            for patch in _followed(claims):
                stack.enter_context(patch)
            if self.sharding.stage == 3:
                stack.enter_context(_persistent_named(training.model, tracker))
            yield

    def part_of(
        self,
        training: Training,
        batch: Any,
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the batch; while it is entered, ranks with the same samples exchange heads."""
        if self.exchanging is None:
            return super().part_of(training, batch)
        return self.exchanging(training.model, batch)

    def micro_batch(self, training: Training, last: bool) -> contextlib.AbstractContextManager:
        """Reduce gradients after the last micro-batch only."""
        training.model.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, training: Training, loss: torch.Tensor) -> None:
        """Run DeepSpeed's backward pass."""
        # the loop has divided by the number of micro-batches
        training.model.backward(loss, scale_wrt_gas=False)

    def clip(self, training: Training, norm: float) -> None:
        """Leave it to `update`: the norm is in the configuration."""

    def update(self, training: Training) -> None:
        """Clip, step and clear."""
        training.model.step()

    def zero_grad(self, training: Training) -> None:
        """Leave it to `update`, which has done it."""


def _followed(claims: Callable) -> Iterator[contextlib.AbstractContextManager]:
    """Return patches of DeepSpeed's methods; after each call the tracker claims what they made."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import (
        AllGatherCoalescedHandle,
        AllGatherHandle,
    )
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage12

    def buckets(optimizer: Any) -> list[torch.Tensor]:
        tensors = []
        # A bucket for each dtype; with `overlap_comm` it has two buffers, which take turns.
        for bucket in optimizer.ipg_buckets.values():
            tensors += bucket.buffer
        return tensors

    def in_partition(optimizer: Any, *unused: Any) -> list[torch.Tensor]:
        return _attribute(optimizer, "grads_in_partition")

    def compact(optimizer: Any, group: int) -> list[torch.Tensor]:
        return [optimizer.averaged_gradients[group].flat_partition]

    def unscaled(optimizer: Any, gradients: list[torch.Tensor], *unused: Any) -> list[torch.Tensor]:
        return gradients

    def of_sub_group(optimizer: Any, group: int) -> list[torch.Tensor]:
        return [optimizer.fp32_partitioned_groups_flat[group].grad]

    def gathered_one(handle: Any, *unused: Any) -> list[torch.Tensor]:
        return [of_deepspeed.gathered_by(handle)]

    def gathered_all(handle: Any, *unused: Any) -> list[torch.Tensor]:
        return [parameter.data for parameter in handle.params]

    # On a CPU each call of it starts a process (numactl), once for each weight of each step. The
    # count tells nodes apart where gradients are quantized, which no recipe has.
    accelerator = get_accelerator()
    count = accelerator.device_count()
    yield replaced(type(accelerator), "device_count", lambda self: count)
    flat = ("gradients", FLAT_GRADIENTS)
    gathered = ("workspace", GATHERED)
    in_part = ("gradients", PART_OF_GRADIENTS)
    yield afterwards(Stage12, "setup_buckets", claims("workspace", REDUCE_BUCKET, buckets))
    yield afterwards(Stage12, "copy_grads_in_partition", claims(*in_part, in_partition))
    yield afterwards(Stage12, of_deepspeed.COMPACT_GRADIENTS, claims(*flat, compact))
    yield afterwards(Stage12, "unscale_and_clip_grads", claims(*flat, unscaled))
    yield afterwards(Stage3, of_deepspeed.FP32_GRADIENTS, claims(*flat, of_sub_group))
    yield afterwards(AllGatherHandle, "wait", claims(*gathered, gathered_one))
    yield afterwards(AllGatherCoalescedHandle, "wait", claims(*gathered, gathered_all))


def _persistent_named(engine: Any, tracker: Any) -> contextlib.AbstractContextManager:
    """While entered, the small weights that a step gathers for the next one have their names."""
    names = {parameter: name for name, parameter in engine.named_parameters()}

    def name_all(_: Any, optimizer: Any, *unused: Any) -> None:
        for parameter in optimizer.persistent_parameters:
            tracker.claim([parameter.data], None, names[parameter])

    return afterwards(type(engine.optimizer), of_deepspeed.AFTER_STEP, name_all)


def _is_floating(value: Any) -> bool:
    """Tell whether `value` is a tensor of floating-point numbers.

    A packed batch also has lengths that are plain ints.
    """
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def held(engine: Any) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    """Return (category, name, tensors) of what DeepSpeed's engine holds before the first step.

    fp32 weights count as optimizer states, as in ZeRO.
    """
    optimizer = engine.optimizer
    weights = _attribute(optimizer, "single_partition_of_fp32_groups")
    weights += _attribute(optimizer, "fp32_partitioned_groups_flat")
    for group in _attribute(optimizer, "fp32_groups"):
        weights += group
    yield "optimizer_states", "fp32 weights", weights
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    yield "gradients", FLAT_GRADIENTS, gradients
    yield "gradients", PART_OF_GRADIENTS, _attribute(optimizer, "grad_partitions_flat_buffer")
    parameters = engine.module.parameters()
    # At stage 3 a parameter is empty, and this rank's shard of it hangs on it.
    shards = [each.ds_tensor for each in parameters if hasattr(each, "ds_tensor")]
    shards += _attribute(optimizer, "param_groups_fp16_flat_cpu_memory")
    yield "parameters", "flat weights", shards
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    # before `setup_buckets` it is an empty list
    buffers = [buffer for buffer in buckets if hasattr(buffer, "untyped_storage")]
    yield "workspace", REDUCE_BUCKET, buffers
    yield "workspace", "overflow flag", _attribute(optimizer, "inf_or_nan_tracker")
    for name in (
        "param_buffer_of_bit16_for_cpu_offload_groups",
        "temp_grad_buffer_for_cpu_offload",
        "temp_grad_buffer_for_gpu_offload",
    ):
        yield "workspace", name, _attribute(optimizer, name)


def _attribute(optimizer: Any, name: str) -> list[Any]:
    """Return what `optimizer` holds by that name, as a list; stages hold different things."""
    value = getattr(optimizer, name, None)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


@contextlib.contextmanager
def _adapters_as_they_are() -> Iterator[None]:
    """While entered, adapters are not cast.

    At stage 3 `from_pretrained` divides the base (`deepspeed.zero.Init`), and DeepSpeed casts no
    model of which anything is divided already; adapters are made after that, in fp32.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    cast_all = getattr(DeepSpeedEngine, of_deepspeed.CAST_MODEL)

    def cast(engine: Any, *args: Any, **options: Any) -> None:
        # DeepSpeed replaces a parameter's `data`, so the fp32 tensor is kept and put back.
        adapters = {}
        for name, parameter in engine.module.named_parameters():
            if "lora_" in name:
                adapters[parameter] = parameter.data
        cast_all(engine, *args, **options)
        for parameter, data in adapters.items():
            parameter.data = data

    with replaced(DeepSpeedEngine, of_deepspeed.CAST_MODEL, cast):
        yield


def library() -> Any:
    """Return the package `deepspeed`, quiet.

    Raises MissingExtra with the command that installs it.
    """
    # it looks for an accelerator at its first import, and warns if it finds none
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with needing("sharding.engine='deepspeed'"):
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated")
    # it would compile its shared-memory collectives now, which serve inference only
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def choose_accelerator(device: str) -> None:
    """Replace DeepSpeed's accelerator, which it chooses once, by that of the model's device.

    Fake tensors are on CPU.
    """
    from deepspeed.accelerator import get_accelerator, real_accelerator

    if get_accelerator().device_name() == device:
        return
    # "cuda" is `CUDA_Accelerator` in `cuda_accelerator`, and "cpu" likewise.
    home = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
    accelerator = getattr(home, f"{device.upper()}_Accelerator")
    assign(real_accelerator, "ds_accelerator", accelerator())
