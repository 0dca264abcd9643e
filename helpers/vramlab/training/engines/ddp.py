"""Data parallel: `DistributedDataParallel` (Li et al. 2020), and with it ZeRO stage 1 by `ZeroRedundancyOptimizer`."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...recipe.recipe import Recipe
from ..engine import AUTOCAST, Engine, Training, autocast_inside
from ..models import real_tensors
from ..process_group import is_fake_group


class DDP(Engine):
    """Every rank holds the whole model; gradients are averaged in buckets during the backward pass."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self._buckets: list[weakref.ref] = []  # their storages

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        # the Trainer looks for parameters without gradients unless layers are recomputed, and always with PEFT
        # (`Trainer._build_accelerator_args`): it costs a copy of the outputs, and buckets are not made anew
        recomputed = self.recipe.gradient_checkpointing and not self.recipe.lora
        unused = self.recipe.loop.name == "trainer" and not recomputed
        with _Buckets(self._buckets):
            ddp = DistributedDataParallel(model, find_unused_parameters=unused)
        if is_fake_group():
            ddp.register_comm_hook(None, _all_reduce)
        ddp.reducer = _Reducer(ddp.reducer, self._buckets)
        return ddp

    def start(self, training: Training) -> None:
        """Autocast inside DDP as accelerate does: what DDP copies of outputs is in fp32 by then."""
        inside = training.loop.outputs_to_fp32 and self.recipe.trainer in ("transformers", "sft")  # others do it anyway
        if inside and training.precision in AUTOCAST:
            autocast_inside(training.model.module, training.device.type, training.precision)
            self.autocasts = False

    def _live_buckets(self) -> list[torch.UntypedStorage]:
        """The reducer's buckets, which no attribute leads to."""
        return [storage for storage in (reference() for reference in self._buckets) if storage is not None]

    @contextlib.contextmanager
    def follow(self, training: Training, tracker: Any) -> Iterator[None]:
        """Name the buckets, and those that the second step's forward pass makes anew."""
        tracker.claim_storages(self._live_buckets(), "workspace", "buckets")
        yield
        for handle in self._live_buckets():
            if storage := tracker.live.get(handle._cdata):
                storage.category, storage.where = "workspace", "buckets"

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
    """Collects the storages that C++ makes with `at::empty`, floats only: those of buckets. With `agreed`, int32 tensors are
    real under a FakeTensorMode too: the reducer agrees on the order of new buckets by reading such."""

    def __init__(self, found: list[weakref.ref], agreed: bool = False):
        super().__init__()
        self.found, self.agreed = found, agreed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtypes = [kwargs.get("dtype"), *(getattr(t, "dtype", None) for t in tree_leaves((args, kwargs)))]
        with real_tensors() if self.agreed and torch.int32 in dtypes else contextlib.nullcontext():
            result = func(*args, **kwargs)
        if func is torch.ops.aten.empty.memory_format and result.is_floating_point():
            self.found.append(weakref.ref(result.untyped_storage()))
        return result


class _Reducer:
    """DDP's reducer, whose new buckets are collected too."""

    def __init__(self, reducer: Any, buckets: list[weakref.ref]):
        self._reducer, self._buckets = reducer, buckets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with _Buckets(self._buckets, agreed=True):
            return self._reducer._rebuild_buckets()
