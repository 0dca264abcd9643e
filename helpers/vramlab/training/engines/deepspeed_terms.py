"""What a rank holds under DeepSpeed 0.19, told to a tracker as it comes and goes.

Ψ: trained parameters, p̂ the largest of them, N: ranks, w: bytes of a weight (2 where fp16 or bf16 is DeepSpeed's or the
model's, else 4), B: `reduce_bucket_size`, as the `Trainer` sets it the hidden size squared. A "part" is what one rank has
of the elements: at stages 1 and 2 the N-th of each parameter group's, padded to a multiple of 2N, at stage 3 the sum
of ⌈p/N⌉. The numbers were held against real ranks, event by event (`test_deepspeed.py`). Bytes, beside activations:

    stage name                    size                 when                 where in deepspeed/runtime
    0     fp32 weights            4Ψ if w = 2          always               fp16/unfused_optimizer.py, __init__
    0     flat gradients          wΨ                   end of backward      engine.py, allreduce_bucket (5e8 at a time)
    0     fp32 gradients          4Ψ if w = 2          step                 fp16/unfused_optimizer.py, step
    1, 2  weights                 w · N part           always               zero/stage_1_and_2.py, bit16_groups_flat
    1, 2  fp32 weights            4 part, w = 4 too    always               single_partition_of_fp32_groups
    1, 2  reduce bucket           wB                   backward             setup_buckets
    1, 2  copy of what is reduced w · at most B or p̂   each reduction       allreduce_bucket
    3     part of a gradient, and its fp64 copy   w ⌈p/N⌉ + 8 ⌈p/N⌉ if offloaded   each reduction   partition_grads
    1     gradients               wΨ                   backward             the parameters' own, until all are reduced
    2     gradients               w(B + p̂) at most     backward             reduce_ipg_grads
    1, 2  gradients in the part   w · part, and the rest of parameters at its ends; backward, step  copy_grads_in_partition
    1, 2  fp64 copy for the norm  8p̂ at most           step                 get_grad_norm_direct
    1, 2  flat gradients          4 part, by group     step                 step (single_grad_partition)
    3     weights                 w · part             always               zero/stage3.py, lp_param_buffer
    3     fp32 weights            4 part, w = 4 too    always               fp32_partitioned_groups_flat
    3     gradients in the part   w · part             always               grad_partitions_flat_buffer
    3     reduce bucket           wB                   always               ipg_buckets
    3     gathered weights        w · p while used; from the second step on the next ones in order too, up to 1e9 elements
                                  (`stage3_max_live_parameters`), and what comes again within 1e9 stays: forward,
                                  backward          zero/partitioned_param_coordinator.py; formulas/zero_gathered.py
    3     gathering several       w · N ⌈p/N⌉ for all of them once more     zero/partition_parameters.py, wait
    3     persistent weights      w · p for p ≤ 10 · hidden size, between steps too   persistent_parameters
    3     scattering several      w · N ⌈p/N⌉ of the bucket                 comm/coalesced_collectives.py
    3     fp64 copy for the norm  8 · largest ⌈p/N⌉    step                 zero/stage3.py, get_grad_norm_direct
    3     flat gradients          4 part, by group     step                 _prepare_fp32_grad_for_sub_group

Offloaded: fp32 weights, states and fp32 gradients of the part are the host's (with "parameters" stage 3's weights too);
at stages 1 and 2 the device then has a buffer of w · p̂ more (temp_grad_buffer_for_gpu_offload). Stages 1 and 2
all-reduce each bucket and gather the updated weights: 3Ψ elements travel, not 2Ψ.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from ..engine import Follower


@contextlib.contextmanager
def follow(engine: Any, tracker: "Follower") -> Iterator[None]:
    """Tell `tracker` what DeepSpeed's `engine` holds and, while entered, what it makes."""
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage12

    for category, where, tensors in held(engine):
        tracker.claim(tensors, category, where)

    def buckets(optimizer: Any) -> None:
        for bucket in optimizer.ipg_buckets.values():
            tracker.claim(bucket.buffer, "workspace", "reduce bucket")

    def part(optimizer: Any, *_: Any) -> None:
        if optimizer.grads_in_partition is not None:
            tracker.claim([optimizer.grads_in_partition], "gradients", "gradients in the part")

    def flat(optimizer: Any, gradients: list, *_: Any) -> None:
        tracker.claim(gradients, "gradients", "flat gradients")

    def flat_3(optimizer: Any, group: int) -> None:
        tracker.claim([optimizer.fp32_partitioned_groups_flat[group].grad], "gradients", "flat gradients")

    def one(handle: Any, *_: Any, **__: Any) -> None:
        tracker.claim([handle._AllGatherHandle__param.data], "workspace", "gathered weights")

    def several(handle: Any, *_: Any, **__: Any) -> None:
        tracker.claim([p.data for p in handle.params], "workspace", "gathered weights")

    with contextlib.ExitStack() as stack:
        for owner, name, tell in (
            (Stage12, "setup_buckets", buckets),
            (Stage12, "copy_grads_in_partition", part),
            (Stage12, "unscale_and_clip_grads", flat),
            (Stage3, "_prepare_fp32_grad_for_sub_group", flat_3),
            (AllGatherHandle, "wait", one),
            (AllGatherCoalescedHandle, "wait", several),
        ):
            stack.enter_context(patch.object(owner, name, _then(getattr(owner, name), tell)))
        yield


def _then(method: Callable, tell: Callable) -> Callable:
    """`method`, and `tell` with the same arguments when it is done."""

    @functools.wraps(method)
    def inner(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        tell(*args, **options)
        return result

    return inner


def held(engine: Any) -> Iterable[tuple[str, str, list[torch.Tensor]]]:
    """(category, name, tensors) of what is there before the first step. fp32 weights are optimizer states, as in ZeRO."""
    optimizer = engine.optimizer

    def those(name: str) -> list[torch.Tensor]:
        value = getattr(optimizer, name, None)
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    weights = those("single_partition_of_fp32_groups") + those("fp32_partitioned_groups_flat")
    weights += [p for group in those("fp32_groups") for p in group]
    yield "optimizer_states", "fp32 weights", weights
    yield "gradients", "flat gradients", [p.grad for p in weights if p.grad is not None]
    yield "gradients", "gradients in the part", those("grad_partitions_flat_buffer")
    shards = [p.ds_tensor for p in engine.module.parameters() if hasattr(p, "ds_tensor")]
    yield "parameters", "flat weights", shards + those("param_groups_fp16_flat_cpu_memory")
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    yield "workspace", "reduce bucket", [b.buffer for b in buckets if hasattr(b.buffer, "untyped_storage")]
    yield "workspace", "overflow flag", those("inf_or_nan_tracker")
    offload = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")
    for name in (*offload, "temp_grad_buffer_for_gpu_offload"):
        yield "workspace", name, those(name)
