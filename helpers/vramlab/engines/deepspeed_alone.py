"""DeepSpeed on fake tensors under torch's fake process group: what it asks of values and of other ranks.

Each answer is the one that a healthy run gives, and what it allocates on the way to the question is allocated all the
same. Nothing else of DeepSpeed is replaced.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextlib.contextmanager
def without_peers() -> Iterator[None]:
    """While entered, DeepSpeed runs on one rank of a world that is not there."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from .deepspeed import forget

    ours = (
        # Fake tensors are CPU tensors, whatever this machine has.
        patch.object(real_accelerator, "ds_accelerator", CPU_Accelerator()),
        # torchrun says it to real ranks, and DeepSpeed insists.
        patch.dict(os.environ, {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}),
        # No gradient overflowed, and a norm is 1.
        patch.object(DeepSpeedEngine, "_take_model_step", _healthy(DeepSpeedEngine._take_model_step)),
        patch.object(
            DeepSpeedZeroOptimizer,
            "update_offload_overflow_tracker",
            _healthy(DeepSpeedZeroOptimizer.update_offload_overflow_tracker),
        ),
        # Every rank saw the modules in the same order.
        patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", _same_everywhere),
        # The model is where it belongs, and a fake parameter that somebody refers to cannot be moved.
        patch.object(DeepSpeedEngine, "_set_client_model", _stays(DeepSpeedEngine._set_client_model)),
    )
    with contextlib.ExitStack() as stack:
        for each in ours:
            stack.enter_context(each)
        stack.enter_context(warnings.catch_warnings())
        # It checks the alignment of its partitions; the address of a fake one is 0, which is aligned.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.callback(forget)
        yield


class Healthy(TorchDispatchMode):
    """Answers reads of values in DeepSpeed's step: nothing overflowed (no flag is set), and every norm is 1."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype in (torch.bool, torch.uint8):
            return args[0].dtype is torch.uint8 and 0
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        return func(*args, **(kwargs or {}))


def _healthy(method: Callable) -> Callable:
    @functools.wraps(method)
    def inner(*args: Any, **options: Any) -> Any:
        with Healthy():
            return method(*args, **options)

    return inner


def _same_everywhere(ints: list[int]) -> None:
    """Allocates what the comparison does: the list's length, then the list (`deepspeed/runtime/zero/utils.py`)."""
    torch.tensor(len(ints))
    torch.tensor(ints, dtype=int)


def _stays(method: Callable) -> Callable:
    @functools.wraps(method)
    def inner(engine: Any, model: torch.nn.Module) -> None:
        method(engine, model)
        engine.dont_change_device = True

    return inner
