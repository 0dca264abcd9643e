"""ZeRO stages 0 to 3 by DeepSpeed (`deepspeed.initialize`; Rajbhandari et al. 2020, 2021), an optional extra.

`deepspeed_fake_group.py` answers for ranks that do not exist. Sizes of what a rank holds are in `formulas/deepspeed.py`.
"""

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...recipe.deepspeed_config import filled_in
from ...report.errors import needing
from ..engine import Engine, Training
from ..patched import afterwards, assign, replaced


class DeepSpeed(Engine):
    """DeepSpeed's engine owns model and optimizer: it averages, clips, steps and clears gradients by itself.

    It also casts by itself, as under accelerate (`Accelerator.native_amp` is False): in a "-mixed" precision weights are
    half precision for good, and each rank updates an fp32 copy of its shard.
    """

    autocasts = False
    fake_gpu = "cpu:0"

    def start(self, training: Training) -> None:
        deepspeed = library()
        choose_accelerator(training.device.type)
        model, config = training.model, filled_in(self.recipe)
        # the default of 65,536 overflows at once with random weights, and a skipped step makes no states
        config["fp16"]["initial_scale_power"] = 0
        from .deepspeed_fake_group import forget

        forget()
        with _adapters_as_they_are() if self.recipe.sharding.stage == 3 else contextlib.nullcontext():
            engine, training.optimizer, _, _ = deepspeed.initialize(
                model=model, optimizer=training.optimizer, config=config, dist_init_required=False
            )
        training.model, training.scaler = engine, None
        dtype = next(model.parameters()).dtype
        if self.recipe.precision.endswith("-mixed"):
            for batch in (training.batch, *training.further):  # Trainer._prepare_input: inputs in the weights' dtype
                batch.update({name: value.to(dtype) for name, value in batch.items() if _is_floating(value)})

    def without_peers(self, target: str) -> contextlib.AbstractContextManager:
        library()
        from .deepspeed_fake_group import without_peers

        return without_peers({"cuda": self.fake_gpu, "cpu": "cpu"}[target])

    @contextlib.contextmanager
    def follow(self, training: Training, tracker: Any) -> Iterator[None]:
        from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage12

        for category, where, tensors in held(training.model):
            tracker.claim(tensors, category, where)

        def claims(category: str, where: str, tensors_of: Callable) -> Callable:
            return lambda _, *args, **options: tracker.claim(tensors_of(*args), category, where)

        gathered, flat = ("workspace", "gathered weights"), ("gradients", "flat gradients")
        reduced = claims("workspace", "reduce bucket", lambda o: [t for b in o.ipg_buckets.values() for t in b.buffer])
        part = claims("gradients", "gradients in the part", lambda o, *_: _held(o, "grads_in_partition"))
        compact = claims(*flat, lambda optimizer, group: [optimizer.averaged_gradients[group].flat_partition])
        of_group = claims(*flat, lambda optimizer, group: [optimizer.fp32_partitioned_groups_flat[group].grad])
        with (
            afterwards(Stage12, "setup_buckets", reduced),
            afterwards(Stage12, "copy_grads_in_partition", part),
            afterwards(Stage12, "_get_compact_grad_partition_buffer", compact),
            afterwards(Stage12, "unscale_and_clip_grads", claims(*flat, lambda optimizer, grads, *_: grads)),
            afterwards(Stage3, "_prepare_fp32_grad_for_sub_group", of_group),
            afterwards(AllGatherHandle, "wait", claims(*gathered, lambda h, *_: [h._AllGatherHandle__param.data])),
            afterwards(AllGatherCoalescedHandle, "wait", claims(*gathered, lambda h, *_: [p.data for p in h.params])),
        ):
            yield

    def micro_batch(self, training: Training, last: bool) -> contextlib.AbstractContextManager:
        training.model.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, training: Training, loss: torch.Tensor) -> None:
        training.model.backward(loss, scale_wrt_gas=False)  # the loop has divided by the number of micro-batches

    def clip(self, training: Training, norm: float) -> None:
        """`update` clips: the norm is in the configuration."""

    def update(self, training: Training) -> None:
        training.model.step()

    def zero_grad(self, training: Training) -> None:
        """`update` has done it."""


def _is_floating(value: Any) -> bool:
    """Tell whether `value` is a tensor of floating-point numbers; a packed batch also has lengths that are plain ints."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def held(engine: Any) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    """(category, name, tensors) before the first step. fp32 weights count as optimizer states, as in ZeRO."""
    optimizer = engine.optimizer
    weights = _held(optimizer, "single_partition_of_fp32_groups") + _held(optimizer, "fp32_partitioned_groups_flat")
    weights += [p for group in _held(optimizer, "fp32_groups") for p in group]
    yield "optimizer_states", "fp32 weights", weights
    yield "gradients", "flat gradients", [p.grad for p in weights if p.grad is not None]
    yield "gradients", "gradients in the part", _held(optimizer, "grad_partitions_flat_buffer")
    shards = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
    yield "parameters", "flat weights", shards + _held(optimizer, "param_groups_fp16_flat_cpu_memory")
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    yield "workspace", "reduce bucket", [b.buffer for b in buckets if hasattr(b.buffer, "untyped_storage")]
    yield "workspace", "overflow flag", _held(optimizer, "inf_or_nan_tracker")
    offload = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")
    for name in (*offload, "temp_grad_buffer_for_gpu_offload"):
        yield "workspace", name, _held(optimizer, name)


def _held(optimizer: Any, name: str) -> list[Any]:
    """What `optimizer` holds by that name, as a list."""
    value = getattr(optimizer, name, None)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


@contextlib.contextmanager
def _adapters_as_they_are() -> Iterator[None]:
    """While entered, adapters are not cast. At stage 3 `from_pretrained` divides the base (`deepspeed.zero.Init`), and
    DeepSpeed casts no model of which anything is divided already; adapters are made after that, in fp32."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    cast_all = DeepSpeedEngine._cast_module_mixed_precision

    def cast(engine: Any, *args: Any, **options: Any) -> None:
        kept = {p: p.data for name, p in engine.module.named_parameters() if "lora_" in name}
        cast_all(engine, *args, **options)
        for parameter, data in kept.items():
            parameter.data = data

    with replaced(DeepSpeedEngine, "_cast_module_mixed_precision", cast):
        yield


def library() -> Any:
    """The package `deepspeed`, quiet. Raises MissingExtra with the command that installs it."""
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
    """Replace DeepSpeed's accelerator, which it chooses once, by that of the model's device; fake tensors are on CPU."""
    from deepspeed.accelerator import get_accelerator, real_accelerator

    if get_accelerator().device_name() != device:
        home = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
        assign(real_accelerator, "ds_accelerator", getattr(home, f"{device.upper()}_Accelerator")())
