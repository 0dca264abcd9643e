"""DeepSpeed under torch's fake process group: answers to what it asks of other ranks and of fake tensors' values.

Each answer is that of a healthy run, and allocates what the question would. Nothing else of DeepSpeed is replaced.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...report.errors import RecipeError
from ..patched import afterwards, caught, replaced
from ..quiet import unheard


@contextlib.contextmanager
def without_peers(device: str) -> Iterator[None]:
    """While entered, DeepSpeed runs on one rank of a fake group, with `device` as its accelerator.

    Where fake tensors stand for a GPU's, `device` is not "cpu", which is the host (`cuda.CudaKernels`).
    """
    from deepspeed.accelerator import get_accelerator, real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.comm import comm
    from deepspeed.comm import utils as comm_utils
    from deepspeed.runtime import engine
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import linear, partition_parameters, partitioned_param_coordinator, utils
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if comm.cdb is not None:
        rest = "this process trains with DeepSpeed, which keeps one process group for all threads: take another process"
        raise RecipeError("sharding.engine", "deepspeed", rest)
    stays = {"dont_change_device": True}
    # DeepSpeed requires a local rank; torchrun sets it for real ranks
    environment = {"LOCAL_RANK": "0", **os.environ}
    own_os = SimpleNamespace(**vars(os) | {"environ": environment})
    kind = SimpleNamespace(device_name=lambda: "cpu")  # of device, for autocast
    ours = (
        # `choose_accelerator` may replace it
        replaced(real_accelerator, "ds_accelerator", get_accelerator()),
        *(replaced(module, "os", own_os) for module in (comm_utils, engine, partition_parameters, utils)),
        # no gradient overflowed, and every norm is 1
        _healthy(DeepSpeedEngine, "_take_model_step"),
        _healthy(DeepSpeedZeroOptimizer, "update_offload_overflow_tracker"),
        # every rank saw the modules in the same order
        replaced(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", _same_everywhere),
        # it puts together as many pieces as there are ranks
        afterwards(AllGatherCoalescedHandle, "__init__", _share_views),
        # the model is on its device already, and a fake parameter that is referred to cannot be moved
        afterwards(DeepSpeedEngine, "_set_client_model", lambda _, engine, model: vars(engine).update(stays)),
        # `device` is text, as of its accelerators: stage 3 finds no device equal to it
        replaced(CPU_Accelerator, "device_name", lambda *index: device),
        replaced(CPU_Accelerator, "current_device_name", lambda *index: device),
        replaced(CPU_Accelerator, "on_accelerator", lambda _, t: t.device == torch.device(device)),
        replaced(linear, "get_accelerator", lambda: kind),
        *(_streams(CPU_Accelerator) if device != "cpu" else ()),
        # it checks the alignment of its partitions; the address of a fake one is 0, which is aligned
        unheard("Accessing the data pointer of FakeTensor"),
    )
    with contextlib.ExitStack() as stack:
        for each in ours:
            stack.enter_context(each)
        # stage 3 puts another linear layer there
        stack.enter_context(caught(stack, torch.nn.functional))
        stack.callback(forget)
        yield


def _streams(accelerator: type) -> Iterator[contextlib.AbstractContextManager]:
    """A GPU's streams, which stage 3 gathers and reduces on: torch's for CPUs, whose work is done when it is asked for."""
    yield replaced(torch.cpu.Stream, "synchronize", lambda stream: None)
    yield replaced(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name, kind in (("Stream", torch.cpu.Stream), ("Event", torch.cpu.Event)):
        yield replaced(accelerator, name, kind)
    for name in ("stream", "current_stream"):
        yield replaced(accelerator, name, staticmethod(getattr(torch.cpu, name)))
    yield replaced(accelerator, "default_stream", staticmethod(torch.cpu.current_stream))
    yield replaced(accelerator, "is_fp16_supported", lambda accelerator: True)
    for name in ("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure"):
        yield replaced(accelerator, name, lambda accelerator: False)


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

    return replaced(owner, name, functools.wraps(method)(inner))


def _same_everywhere(ints: list[int]) -> None:
    """Allocate what the comparison does: the list's length, then the list (`deepspeed/runtime/zero/utils.py`)."""
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().device_name(os.environ.get("LOCAL_RANK", "0")))
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
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import groups

    comm.cdb = groups._WORLD_GROUP = None
    if torch.nn.functional.linear is partition_parameters.zero3_linear_wrap:
        torch.nn.functional.linear = partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk
