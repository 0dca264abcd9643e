"""DeepSpeed under torch's fake process group: answers to what it asks of other ranks and of fake tensors' values.

Each answer is that of a healthy run, and allocates what the question would. Two loops over all ranks, of stage 3, are cut
short, since a thousand fake views take long. Nothing else of DeepSpeed is replaced.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..patched import afterwards


@contextlib.contextmanager
def without_peers(device: str) -> Iterator[None]:
    """While entered, DeepSpeed runs on one rank of a fake group, with `device` as its accelerator.

    Where fake tensors stand for a GPU's, `device` is not "cpu", which is the host (`cuda.CudaKernels`).
    """
    from deepspeed.accelerator import get_accelerator, real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import linear, partitioned_param_coordinator, stage3
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    stays = {"dont_change_device": True}
    ours = (
        # `choose_accelerator` may replace it
        patch.object(real_accelerator, "ds_accelerator", get_accelerator()),
        # DeepSpeed requires it; torchrun sets it for real ranks
        patch.dict(os.environ, {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}),
        # no gradient overflowed, and every norm is 1
        _healthy(DeepSpeedEngine, "_take_model_step"),
        _healthy(DeepSpeedZeroOptimizer, "update_offload_overflow_tracker"),
        # every rank saw the modules in the same order
        patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", _same_everywhere),
        # these put together as many pieces as there are ranks
        _if_fake(AllGatherCoalescedHandle, "wait", _gathered),
        _if_fake(stage3, "reduce_scatter_coalesced", _scattered),
        # stage 3 replaces it by its own
        patch.object(torch.nn.functional, "linear", torch.nn.functional.linear),
        # the model is on its device already, and a fake parameter that is referred to cannot be moved
        afterwards(DeepSpeedEngine, "_set_client_model", lambda _, engine, model: vars(engine).update(stays)),
    )
    with contextlib.ExitStack() as stack:
        for each in ours:
            stack.enter_context(each)
        # `device` is text, as of its accelerators: stage 3 finds no device equal to it
        for name in ("device_name", "current_device_name"):
            stack.enter_context(patch.object(CPU_Accelerator, name, lambda *index: device))
        there = patch.object(CPU_Accelerator, "on_accelerator", lambda _, t: t.device == torch.device(device))
        stack.enter_context(there)
        for each in _streams(CPU_Accelerator) if device != "cpu" else ():
            stack.enter_context(each)
        kind = SimpleNamespace(device_name=lambda: "cpu")  # of device, for autocast
        stack.enter_context(patch.object(linear, "get_accelerator", lambda: kind))
        stack.enter_context(warnings.catch_warnings())
        # it checks the alignment of its partitions; the address of a fake one is 0, which is aligned
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.callback(forget)
        yield


def _streams(accelerator: type) -> Iterator[contextlib.AbstractContextManager]:
    """A GPU's streams, which stage 3 gathers and reduces on: torch's for CPUs, whose work is done when it is asked for."""
    yield patch.object(torch.cpu.Stream, "synchronize", lambda stream: None, create=True)
    yield patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name, kind in (("Stream", torch.cpu.Stream), ("Event", torch.cpu.Event)):
        yield patch.object(accelerator, name, kind)
    for name in ("stream", "current_stream"):
        yield patch.object(accelerator, name, staticmethod(getattr(torch.cpu, name)))
    for name in ("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure"):
        yield patch.object(accelerator, name, lambda accelerator: False)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HEALTHY = {torch.bool: False, torch.uint8: 0, **dict.fromkeys(FLOATS, 1.0)}


class Healthy(TorchDispatchMode):
    """Answer reads of values in DeepSpeed's step: no overflow flag is set, and every norm is 1."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype in HEALTHY:
            return HEALTHY[args[0].dtype]
        return func(*args, **(kwargs or {}))


def _healthy(owner: Any, name: str) -> contextlib.AbstractContextManager:
    method = getattr(owner, name)

    def inner(*args: Any, **options: Any) -> Any:
        with Healthy():
            return method(*args, **options)

    return patch.object(owner, name, functools.wraps(method)(inner))


def _same_everywhere(ints: list[int]) -> None:
    """Allocate what the comparison does: the list's length, then the list (`deepspeed/runtime/zero/utils.py`)."""
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().device_name(os.environ["LOCAL_RANK"]))
    torch.tensor(len(ints), device=device)
    torch.tensor(ints, dtype=int, device=device)


def _if_fake(owner: Any, name: str, short: Callable) -> contextlib.AbstractContextManager:
    """While entered, `owner`'s function of that name is `short` for a list, or a handle, of fake tensors."""
    method = getattr(owner, name)

    def inner(first: Any, *args: Any, **options: Any) -> Any:
        tensors = first if isinstance(first, list) else first.partitions
        return (short if isinstance(tensors[0], FakeTensor) else method)(first, *args, **options)

    return patch.object(owner, name, functools.wraps(method)(inner))


def _gathered(handle: Any, handle_dependency: bool = True) -> None:
    """`AllGatherCoalescedHandle.wait`: each parameter becomes one `cat` of its size."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if handle.complete:
        return
    handle.allgather_handle.wait()
    for param in handle.params:
        whole = handle.partitions[0].as_strided((param.ds_numel,), (1,), 0)
        param.data = torch.cat([whole]).view(param.ds_shape).to(param.ds_tensor.dtype)
        param.ds_status = ZeroParamStatus.AVAILABLE
    handle.complete = True


@torch.no_grad()
def _scattered(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """`reduce_scatter_coalesced`: padding, piece by piece, and one `cat` of all; returns this rank's part of each."""
    from deepspeed import comm

    world, rank = comm.get_world_size(group), comm.get_rank(group)
    sizes = [-(-t.numel() // world) for t in tensors]
    flat = tensors[0].view(-1)
    if len(tensors) > 1 or tensors[0].numel() % world:
        paddings = []
        for other in range(world):
            for tensor, size in zip(tensors, sizes, strict=True):
                if missing := size - _own(tensor, size, other):
                    paddings.append(torch.empty(missing, dtype=tensor.dtype, device=tensor.device))
        more = world * sum(sizes) - sum(t.numel() for t in tensors)
        filler = [paddings[0].narrow(0, 0, 1).expand(more)] if more else []
        flat = torch.cat([*(t.view(-1) for t in tensors), *filler])
    flat.div_(world)
    mine = flat.narrow(0, rank * sum(sizes), sum(sizes))
    comm.reduce_scatter_fn(mine, flat, group=group)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = zip(tensors, sizes, starts, strict=True)
    return [mine.narrow(0, start, _own(tensor, size, rank)) for tensor, size, start in parts]


def _own(tensor: torch.Tensor, size: int, rank: int) -> int:
    """Elements of `tensor` that are the part of `rank`, at most `size`."""
    return max(0, min(size, tensor.numel() - rank * size))


def forget() -> None:
    """Reset what DeepSpeed keeps for the process's life: its first process group, and stage 3's linear layer."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched
    from deepspeed.utils import groups

    comm.cdb = groups._WORLD_GROUP = None
    torch.nn.functional.linear = getattr(Patched, "linear_bk", torch.nn.functional.linear)
