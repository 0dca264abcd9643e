"""DeepSpeed under torch's fake process group: answers to what it asks of other ranks and of fake tensors' values.

Each answer is that of a healthy run, and allocates what the question would. Nothing else of DeepSpeed is replaced.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
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
    from deepspeed.runtime.zero import linear, partitioned_param_coordinator
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    stays = {"dont_change_device": True}
    kind = SimpleNamespace(device_name=lambda: "cpu")  # of device, for autocast
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
        # it puts together as many pieces as there are ranks
        afterwards(AllGatherCoalescedHandle, "__init__", _share_views),
        # stage 3 replaces it by its own
        patch.object(torch.nn.functional, "linear", torch.nn.functional.linear),
        # the model is on its device already, and a fake parameter that is referred to cannot be moved
        afterwards(DeepSpeedEngine, "_set_client_model", lambda _, engine, model: vars(engine).update(stays)),
        # `device` is text, as of its accelerators: stage 3 finds no device equal to it
        patch.object(CPU_Accelerator, "device_name", lambda *index: device),
        patch.object(CPU_Accelerator, "current_device_name", lambda *index: device),
        patch.object(CPU_Accelerator, "on_accelerator", lambda _, t: t.device == torch.device(device)),
        patch.object(linear, "get_accelerator", lambda: kind),
        *(_streams(CPU_Accelerator) if device != "cpu" else ()),
        warnings.catch_warnings(),
    )
    with contextlib.ExitStack() as stack:
        for each in ours:
            stack.enter_context(each)
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


HEALTHY = dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), 1.0)
HEALTHY |= {torch.bool: False, torch.uint8: 0}


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


def _share_views(result: None, handle: Any, **fields: Any) -> None:
    handle.partitions = _Parts(handle.partitions[0])


class _Parts:
    """The ranks' parts of what was gathered: views of one size are one view of the first rank's."""

    def __init__(self, part: torch.Tensor):
        self.narrow = functools.cache(part.narrow)

    def __getitem__(self, rank: int) -> "_Parts":
        return self


def forget() -> None:
    """Reset what DeepSpeed keeps for the process's life: its first process group, and stage 3's linear layer."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched
    from deepspeed.utils import groups

    comm.cdb = groups._WORLD_GROUP = None
    torch.nn.functional.linear = getattr(Patched, "linear_bk", torch.nn.functional.linear)
