"""Data parallel: `DistributedDataParallel`, and with it ZeRO stage 1 by `ZeroRedundancyOptimizer`."""

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...recipe.recipe import Recipe
from ..engine import Engine
from ..models import is_fake, real_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ..engine import Follower, Training


class DDP(Engine):
    """A replica on each rank; gradients are averaged in buckets while the backward pass runs (Li et al. 2020)."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.stage = recipe, recipe.sharding.stage
        self._seen: list[weakref.ref] = []

    def wrap(self, model: "torch.nn.Module") -> "torch.nn.Module":
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        with _buckets_seen(self._seen):
            ddp = DistributedDataParallel(model, find_unused_parameters=self._finds_unused())
        if dist.get_backend() == "fake":
            ddp.register_comm_hook(None, _answered)
            if is_fake(model):
                ddp.reducer = _Reducer(ddp.reducer)
        return ddp

    def buffers(self) -> list["torch.UntypedStorage"]:
        """The buckets that the reducer made with itself, which no attribute leads to."""
        return [storage for storage in (seen() for seen in self._seen) if storage is not None]

    @contextlib.contextmanager
    def follow(self, training: "Training", tracker: "Follower") -> "Iterator[None]":
        """The buckets that the second step's forward pass makes anew are named as soon as they are there."""

        def rebuilt() -> None:
            for handle in self.buffers():
                if storage := tracker.live.get(handle._cdata):
                    storage.category, storage.where = "workspace", "buckets"

        reducer = training.model.reducer
        training.model.reducer = _Watched(reducer, self._seen, rebuilt)
        try:
            yield
        finally:
            training.model.reducer = reducer

    def _finds_unused(self) -> bool:
        """The Trainer looks for parameters without gradients unless layers are recomputed (and with PEFT always).

        `transformers.Trainer._build_accelerator_args`. It costs a copy of the outputs, and the buckets stay as they
        were first made instead of being made anew in the order of the first backward pass.
        """
        trainer, checkpointing = self.recipe.loop.name == "trainer", self.recipe.gradient_checkpointing
        return trainer and (not checkpointing or self.recipe.lora is not None)

    def optimizer(self, parameters: list, make: Callable[[list], Any]) -> Any:
        if self.stage == 0:
            return make(parameters)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # it makes the optimizer of its own share by a class and its arguments; ours is made by a function
        return ZeroRedundancyOptimizer(parameters, optimizer_class=lambda params, **_: make(params))

    def micro_batch(self, training: "Training", last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else training.model.no_sync()


def _answered(state, bucket):  # DDP refuses annotations that are not its own
    """The all-reduce of a group whose other ranks are not there: its work has no result, which DDP asks for."""
    import torch

    torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _buckets_seen(seen: list[weakref.ref]) -> contextlib.AbstractContextManager:
    """While entered, `seen` gets the storages that C++ makes with `at::empty`, floats only: those of buckets."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Buckets(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.empty.memory_format and result.is_floating_point():
                seen.append(weakref.ref(result.untyped_storage()))
            return result

    return Buckets()


class _Watched:
    """DDP's reducer; `rebuilt` is called when it has made its buckets anew, and `seen` has them then."""

    def __init__(self, reducer, seen: list[weakref.ref], rebuilt: Callable[[], None]):
        self._reducer, self._seen, self._rebuilt = reducer, seen, rebuilt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with _buckets_seen(self._seen):
            done = self._reducer._rebuild_buckets()
        if done:
            self._rebuilt()
        return done


class _Reducer:
    """DDP's reducer of fake tensors. It agrees with the other ranks on the buckets' order through tensors that it reads."""

    def __init__(self, reducer):
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with _numbers_are_real():
            return self._reducer._rebuild_buckets()


def _numbers_are_real() -> contextlib.AbstractContextManager:
    """While entered, tensors of int32 (bucket indices) are real under a FakeTensorMode, all others are fake."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Numbers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if kwargs.get("dtype") is torch.int32 or any(t.dtype is torch.int32 for t in inputs):
                with real_tensors():
                    return func(*args, **kwargs)
            return func(*args, **kwargs)

    return Numbers()


def make(recipe: Recipe) -> Engine:
    return DDP(recipe)
