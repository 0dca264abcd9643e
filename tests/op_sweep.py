"""Operators on fake and on real CPU tensors, forward and backward: what each allocates, in order,
and what is alive then.

As a script it runs torch's own table of operators (OpInfo) and prints what differs as JSON. It is
run in a process of its own, because that table's module changes settings of torch for good.
"""

import contextlib
import copy
import json
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._pytree import tree_leaves, tree_map
from vramlab.simulation.fake_operators import keep_storage
from vramlab.simulation.fakes import fake_world
from vramlab.tracking.fake_tracker import FakeTracker
from vramlab.tracking.tensors import tensors_in
from vramlab.tracking.tracker import Tracker
from vramlab.training.quiet import no_collection


def allocations(
    function: Callable, args: tuple, fake: bool, kwargs: dict | None = None
) -> list[tuple[int, str, int]]:
    """Of each storage that `function(*args)` and its backward pass make: bytes, operator, bytes
    alive after its birth.
    """
    tracker = FakeTracker(keep_storage) if fake else Tracker("cpu")
    tracker.claim_given(tensors_in([args, kwargs or {}]))
    if isinstance(function, torch.nn.Module):
        tracker.claim_given([*function.parameters(), *function.buffers()])
    with no_collection(before=False), tracker:
        tracker.begin("forward")
        made = function(*args, **(kwargs or {}))
        outputs = [o for o in tree_leaves(made) if isinstance(o, torch.Tensor) and o.requires_grad]
        if outputs:
            tracker.begin("backward")
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
        del made, outputs
    alive, found = 0, []
    for size, storage, _ in tracker.finish().log:
        if storage.op == "given":  # the arguments
            continue
        alive += size
        if size > 0:
            found.append((size, storage.op, alive))
    return found


def on_real(function: Callable, args: tuple, kwargs: dict | None = None) -> list:
    """The second time: the first may set something up."""
    copied = [_copy((function, args, kwargs)) for _ in range(2)]
    return [allocations(f, a, False, k) for f, a, k in copied][1]


def on_fake(function: Callable, args: tuple, kwargs: dict | None = None, mode: Any = None) -> list:
    with contextlib.nullcontext((mode, None)) if mode else fake_world("cpu") as (mode, _):
        with FakeCopyMode(mode):
            function, args, kwargs = copy.deepcopy(_copy((function, args, kwargs)))
        return allocations(function, args, True, kwargs)


def _copy(values: Any) -> Any:
    def one(value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            value = copy.deepcopy(value)
            value.zero_grad()
        elif isinstance(value, torch.Tensor):
            value = (
                value.detach()
                .clone(memory_format=torch.preserve_format)
                .requires_grad_(value.requires_grad)
            )
        return value

    return tree_map(one, values)


def opinfo(samples: int, dtypes: tuple[torch.dtype, ...]) -> dict[str, dict[str, Any]]:
    """Name of the operator and sample to both lists where they differ; samples without a fake
    kernel are passed over.
    """
    missing = types.ModuleType("expecttest")  # torch.testing imports it, and nothing here needs it
    missing.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", missing)
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    real = {}
    for op in op_db:
        dtype = next((d for d in dtypes if op.supports_dtype(d, "cpu")), None)
        if dtype is None:
            continue
        torch.manual_seed(0)
        trained = op.supports_autograd and dtype.is_floating_point
        with contextlib.suppress(Exception):  # some tables need scipy
            for i, sample in zip(
                range(samples), op.sample_inputs("cpu", dtype, requires_grad=trained), strict=False
            ):
                call = op.op, (sample.input, *sample.args), sample.kwargs
                with contextlib.suppress(Exception):  # some operators are another device's
                    real[f"{op.formatted_name} {i}"] = call, on_real(*call)
    different = {}
    with fake_world("cpu") as (mode, _):
        for name, (call, ran) in real.items():
            with contextlib.suppress(Exception):  # depends on values
                fake = on_fake(*call, mode=mode)
                if fake != ran:
                    different[name] = {"real": ran, "fake": fake}
    return {"swept": len(real), "different": different}


if __name__ == "__main__":
    dtypes = [getattr(torch, name) for name in sys.argv[2:]]
    print(json.dumps(opinfo(int(sys.argv[1]), tuple(dtypes))))
