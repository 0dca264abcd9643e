"""What a rank holds under DeepSpeed 0.19 as it comes and goes, for a tracker; sizes are in `formulas/deepspeed.py`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from ..patched import afterwards


@contextlib.contextmanager
def follow(engine: Any, tracker: Any) -> Iterator[None]:
    """Tell `tracker` what DeepSpeed's `engine` holds and, while entered, what it allocates."""
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage12

    for category, where, tensors in held(engine):
        tracker.claim(tensors, category, where)
    # method, what it has made when it returns (of its arguments), category and name
    for_gathered = ("workspace", "gathered weights")
    made = (
        (Stage12, "setup_buckets", _buckets, ("workspace", "reduce bucket")),
        (Stage12, "copy_grads_in_partition", _partition, ("gradients", "gradients in the part")),
        (Stage12, "unscale_and_clip_grads", lambda optimizer, grads, *_: grads, ("gradients", "flat gradients")),
        (Stage3, "_prepare_fp32_grad_for_sub_group", _flat, ("gradients", "flat gradients")),
        (AllGatherHandle, "wait", lambda handle, *_, **__: [handle._AllGatherHandle__param.data], for_gathered),
        (AllGatherCoalescedHandle, "wait", lambda handle, *_, **__: [p.data for p in handle.params], for_gathered),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, tensors_of, (category, where) in made:
            claim = partial(_claim, tracker, tensors_of, category, where)
            stack.enter_context(afterwards(owner, name, claim))
        yield


def _claim(tracker: Any, tensors_of: Callable, category: str, where: str, result: Any, *args, **options) -> None:
    tracker.claim(tensors_of(*args, **options), category, where)


def _buckets(optimizer: Any) -> list[torch.Tensor]:
    return [tensor for bucket in optimizer.ipg_buckets.values() for tensor in bucket.buffer]


def _partition(optimizer: Any, *_: Any) -> list[torch.Tensor]:
    return [] if optimizer.grads_in_partition is None else [optimizer.grads_in_partition]


def _flat(optimizer: Any, group: int) -> list[torch.Tensor]:
    return [optimizer.fp32_partitioned_groups_flat[group].grad]


def held(engine: Any) -> Iterable[tuple[str, str, list[torch.Tensor]]]:
    """(category, name, tensors) before the first step. fp32 weights count as optimizer states, as in ZeRO."""
    optimizer = engine.optimizer

    def named(name: str) -> list[torch.Tensor]:
        value = getattr(optimizer, name, None)
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    weights = named("single_partition_of_fp32_groups") + named("fp32_partitioned_groups_flat")
    weights += [p for group in named("fp32_groups") for p in group]
    yield "optimizer_states", "fp32 weights", weights
    yield "gradients", "flat gradients", [p.grad for p in weights if p.grad is not None]
    yield "gradients", "gradients in the part", named("grad_partitions_flat_buffer")
    shards = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
    yield "parameters", "flat weights", shards + named("param_groups_fp16_flat_cpu_memory")
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    yield "workspace", "reduce bucket", [b.buffer for b in buckets if hasattr(b.buffer, "untyped_storage")]
    yield "workspace", "overflow flag", named("inf_or_nan_tracker")
    offload = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")
    for name in (*offload, "temp_grad_buffer_for_gpu_offload"):
        yield "workspace", name, named(name)
