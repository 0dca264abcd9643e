"""DeepSpeed under torch's fake process group.

Here is what answers for other ranks, and for fake tensors' values. Each answer is that of a healthy
run, and allocates what the question would. Nothing else of DeepSpeed is replaced.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.nn import functional as collectives

from ...base.errors import RecipeError
from ...private import of_deepspeed
from ...private.of_torch import TorchDispatchMode
from ...private.patched import afterwards, caught, replaced
from ..quiet import unheard


@contextlib.contextmanager
def without_peers(device: str) -> Iterator[None]:
    """While entered, DeepSpeed runs on one rank of a fake group, with `device` as its accelerator.

    Where fake tensors stand for a GPU's, `device` is not "cpu", which is the host
    (`cuda.CudaKernels`).
    """
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.comm import comm

    if comm.cdb is not None:
        rest = (
            "this process trains with DeepSpeed, which keeps one process group for all threads: "
            "take another process"
        )
        raise RecipeError("sharding.engine", "deepspeed", rest)
    with contextlib.ExitStack() as stack:
        for patch in (
            *_process(),
            *_answers(),
            *_placement(CPU_Accelerator, device),
            *(_streams(CPU_Accelerator) if device != "cpu" else ()),
        ):
            stack.enter_context(patch)
        # stage 3 puts another linear layer there
        stack.enter_context(caught(stack, torch.nn.functional))
        stack.callback(forget)
        yield


def _process() -> Iterator[contextlib.AbstractContextManager]:
    """Return what DeepSpeed keeps and reads of the process, replaced for this thread."""
    from deepspeed.accelerator import get_accelerator, real_accelerator
    from deepspeed.comm import utils as comm_utils
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero import partition_parameters, utils
    from deepspeed.utils import nvtx

    # `choose_accelerator` may replace it
    yield replaced(real_accelerator, "ds_accelerator", get_accelerator())
    yield _without_ranges(nvtx)
    # DeepSpeed requires a local rank; torchrun sets it for real ranks
    environment = {"LOCAL_RANK": "0", **os.environ}
    own_os = SimpleNamespace(**vars(os) | {"environ": environment})
    for module in (comm_utils, engine, partition_parameters, utils):
        yield replaced(module, "os", own_os)


@contextlib.contextmanager
def _without_ranges(nvtx: Any) -> Iterator[None]:
    """While entered, no functions are told to a profiler, which does not run.

    It is asked of every function, twice: of a value for each thread for longer than they take. No
    other thread trains with DeepSpeed meanwhile.
    """
    before = nvtx.enable_nvtx
    nvtx.enable_nvtx = False
    try:
        yield
    finally:
        nvtx.enable_nvtx = before


def _answers() -> Iterator[contextlib.AbstractContextManager]:
    """Return answers to what DeepSpeed asks of other ranks and of values."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    # no gradient overflowed, and every norm is 1
    yield _healthy(DeepSpeedEngine, of_deepspeed.TAKE_STEP)
    yield _healthy(DeepSpeedZeroOptimizer, "update_offload_overflow_tracker")
    # every rank saw the modules in the same order
    yield replaced(
        partitioned_param_coordinator,
        "assert_ints_same_as_other_ranks",
        _same_everywhere,
    )
    # it puts together as many pieces as there are ranks
    yield afterwards(AllGatherCoalescedHandle, "__init__", _share_views)
    # it checks the alignment of its partitions; the address of a fake one is 0, which is aligned
    yield unheard("Accessing the data pointer of FakeTensor")


def _placement(accelerator: type, device: str) -> Iterator[contextlib.AbstractContextManager]:
    """Return what makes `device` DeepSpeed's accelerator, with the model on it already."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import linear

    # a fake parameter that is referred to cannot be moved
    yield afterwards(DeepSpeedEngine, of_deepspeed.SET_MODEL, _keep_device)
    # `device` is text, as of its accelerators: stage 3 finds no device equal to it
    yield replaced(accelerator, "device_name", lambda *index: device)
    yield replaced(accelerator, "current_device_name", lambda *index: device)

    def on_accelerator(itself: Any, tensor: torch.Tensor) -> bool:
        return tensor.device == torch.device(device)

    yield replaced(accelerator, "on_accelerator", on_accelerator)
    kind = SimpleNamespace(device_name=lambda: "cpu")  # of device, for autocast
    yield replaced(linear, "get_accelerator", lambda: kind)


def _keep_device(result: None, engine: Any, model: Any) -> None:
    vars(engine).update(dont_change_device=True)


def _streams(accelerator: type) -> Iterator[contextlib.AbstractContextManager]:
    """Return a GPU's streams, which stage 3 gathers and reduces on, and its collectives.

    Streams are torch's for CPUs, whose work is done when it is asked for.
    """
    yield replaced(torch.cpu.Stream, "synchronize", lambda stream: None)
    yield replaced(torch.Tensor, "record_stream", lambda tensor, stream: None)
    # where gradients of what was gathered are summed as NCCL does it
    nccl = {"get_backend": lambda group: "nccl"}
    yield replaced(collectives, "dist", SimpleNamespace(**vars(collectives.dist) | nccl))
    yield replaced(accelerator, "Stream", torch.cpu.Stream)
    yield replaced(accelerator, "Event", torch.cpu.Event)
    for name in ("stream", "current_stream"):
        yield replaced(accelerator, name, staticmethod(getattr(torch.cpu, name)))
    yield replaced(accelerator, "default_stream", staticmethod(torch.cpu.current_stream))
    yield replaced(accelerator, "is_fp16_supported", lambda accelerator: True)
    for name in (
        "is_synchronized_device",
        "resolves_data_dependency",
        "handles_memory_backpressure",
    ):
        yield replaced(accelerator, name, lambda accelerator: False)


# What a value is that DeepSpeed's step reads: a norm, or a flag of an overflow.
HEALTHY: dict[torch.dtype, float | bool | int] = {
    torch.float64: 1.0,
    torch.float32: 1.0,
    torch.float16: 1.0,
    torch.bfloat16: 1.0,
    torch.bool: False,
    torch.uint8: 0,
}


class Healthy(TorchDispatchMode):
    """Answers reads of values in DeepSpeed's step: no overflow flag is set, and every norm is 1."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype in HEALTHY:
            return HEALTHY[args[0].dtype]
        return func(*args, **(kwargs or {}))


def _healthy(owner: Any, name: str) -> contextlib.AbstractContextManager:
    """Return a patch of a method, which then runs under `Healthy`."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def inner(*args: Any, **options: Any) -> Any:
        with Healthy():
            return method(*args, **options)

    return replaced(owner, name, inner)


def _same_everywhere(ints: list[int]) -> None:
    """Allocate what the comparison of a list among ranks does (`deepspeed/runtime/zero/utils.py`).

    That is the list's length, then the list.
    """
    from deepspeed.accelerator import get_accelerator

    local_rank = os.environ.get("LOCAL_RANK", "0")
    device = torch.device(get_accelerator().device_name(local_rank))
    torch.tensor(len(ints), device=device)
    torch.tensor(ints, dtype=torch.int64, device=device)


def _share_views(result: None, handle: Any, **fields: Any) -> None:
    handle.partitions = _Parts(handle.partitions[0])


class _Parts:
    """The ranks' parts of what was gathered.

    Views of one size are one view of the first rank's.
    """

    def __init__(self, part: torch.Tensor) -> None:
        self.narrow = functools.cache(part.narrow)

    def __getitem__(self, rank: int) -> "_Parts":
        return self


def forget() -> None:
    """Reset what DeepSpeed keeps for the process's life.

    That is its first process group, and stage 3's linear layer.
    """
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partition_parameters

    comm.cdb = None
    of_deepspeed.forget_groups()
    functional = torch.nn.functional
    if functional.linear is partition_parameters.zero3_linear_wrap:
        original = partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk
        functional.linear = original
