"""Data parallel: `DistributedDataParallel` (Li et al. 2020), and with it ZeRO stage 1 by `ZeroRedundancyOptimizer`."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ...recipe.recipe import Recipe
from ..engine import AUTOCAST, Engine, Follower, Training, autocast_inside
from ..models import is_fake, real_tensors
from ..process_group import is_fake_group

Seen = list[weakref.ref]  # storages


class DDP(Engine):
    """Every rank holds the whole model; gradients are averaged in buckets during the backward pass."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self._seen: Seen = []

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        with _Buckets(self._seen):
            ddp = DistributedDataParallel(model, find_unused_parameters=self._finds_unused())
        if is_fake_group():
            ddp.register_comm_hook(None, _all_reduce)
            if is_fake(model):
                ddp.reducer = _Reducer(ddp.reducer, _Int32IsReal)
        return ddp

    def start(self, training: Training) -> None:
        """Autocast inside DDP as accelerate does: what DDP copies of outputs is in fp32 by then."""
        inside = training.loop.outputs_to_fp32 and self.recipe.trainer in ("transformers", "sft")  # others do it anyway
        if inside and training.precision in AUTOCAST:
            autocast_inside(training.model.module, training.device.type, training.precision)
            self.autocasts = False

    def buffers(self) -> list[torch.UntypedStorage]:
        """The reducer's buckets, which no attribute leads to."""
        return [storage for storage in (seen() for seen in self._seen) if storage is not None]

    @contextlib.contextmanager
    def follow(self, training: Training, tracker: Follower) -> Iterator[None]:
        """The second step's forward pass makes the buckets anew: name them at once."""

        def rebuilt() -> None:
            for handle in self.buffers():
                if storage := tracker.live.get(handle._cdata):
                    storage.category, storage.where = "workspace", "buckets"

        model = training.model
        with patch.object(model, "reducer", _Reducer(model.reducer, lambda: _Buckets(self._seen), rebuilt)):
            yield

    def _finds_unused(self) -> bool:
        """The Trainer looks for parameters without gradients unless layers are recomputed, and always with PEFT
        (`Trainer._build_accelerator_args`). It costs a copy of the outputs, and buckets are not made anew."""
        trainer, checkpointing = self.recipe.loop.name == "trainer", self.recipe.gradient_checkpointing
        return trainer and (not checkpointing or self.recipe.lora is not None)

    def optimizer(self, parameters: list, make: Callable[[list], Any]) -> Any:
        if self.recipe.sharding.stage == 0:
            return make(parameters)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # it wants a class and its arguments; ours is made by a function
        return ZeroRedundancyOptimizer(parameters, optimizer_class=lambda params, **_: make(params))

    def micro_batch(self, training: Training, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else training.model.no_sync()


def _all_reduce(state, bucket):  # DDP refuses annotations that are not its own
    """All-reduce a bucket in a fake group, whose work has no result although DDP asks for it."""
    torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _Buckets(TorchDispatchMode):
    """Collects the storages that C++ makes with `at::empty`, floats only: those of buckets."""

    def __init__(self, seen: Seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and result.is_floating_point():
            self.seen.append(weakref.ref(result.untyped_storage()))
        return result


class _Int32IsReal(TorchDispatchMode):
    """Makes int32 tensors real under a FakeTensorMode: the reducer agrees on the order of buckets by reading such."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if kwargs.get("dtype") is torch.int32 or any(t.dtype is torch.int32 for t in inputs):
            with real_tensors():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _Reducer:
    """DDP's reducer; it makes its buckets anew under a `mode`, and then calls `rebuilt`."""

    def __init__(self, reducer: Any, mode: Callable[[], TorchDispatchMode], rebuilt: Callable[[], None] = lambda: None):
        self._reducer, self._mode, self._rebuilt = reducer, mode, rebuilt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with self._mode():
            done = self._reducer._rebuild_buckets()
        if done:
            self._rebuilt()
        return done
