"""What a rank holds under DeepSpeed 0.19, and telling a tracker of it as it comes and goes.

Ψ: trained parameters, p̂ the largest of them, N: ranks, w: bytes of a weight (2 where fp16 or bf16 is DeepSpeed's or the
model's, else 4), B: `reduce_bucket_size`, which the `Trainer` sets to the hidden size squared. "part": one rank's elements,
at stages 1 and 2 the N-th of each parameter group's, padded to a multiple of 2N, at stage 3 the sum of ⌈p/N⌉. Checked
against real ranks, event by event (`test_deepspeed.py`). Bytes besides activations:

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

Offloaded, fp32 weights, states and fp32 gradients of the part are on the host (with "parameters" stage 3's weights too);
at stages 1 and 2 the device then has another buffer of w · p̂ (temp_grad_buffer_for_gpu_offload). Stages 1 and 2
all-reduce each bucket and gather the updated weights: they send 3Ψ elements, not 2Ψ.
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
        for owner, name, tensors_of, claim in made:
            stack.enter_context(patch.object(owner, name, _claiming(getattr(owner, name), tensors_of, tracker, claim)))
        yield


def _claiming(method: Callable, tensors_of: Callable, tracker: "Follower", claim: tuple[str, str]) -> Callable:
    """`method`, which claims what it has made when it returns."""

    @functools.wraps(method)
    def inner(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        tracker.claim(tensors_of(*args, **options), *claim)
        return result

    return inner


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
