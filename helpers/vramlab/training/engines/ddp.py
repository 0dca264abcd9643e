"""Data parallel: `DistributedDataParallel` (Li et al. 2020).

With it comes ZeRO stage 1 by `ZeroRedundancyOptimizer`.
"""

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...private.of_distributed import rebuild_buckets
from ...private.of_torch import TorchDispatchMode, address_of, tree_leaves
from ...recipe.recipe import Recipe
from ..engine import AUTOCAST, Model, ShardedEngine, Training, autocast_inside
from ..models import real_tensors
from ..process_group import is_fake_group
from ..quiet import unheard

# Trainers whose model is not under autocast by itself.
WITHOUT_OWN_AUTOCAST = ("transformers", "sft")


class DDP(ShardedEngine):
    """Every rank holds the whole model.

    Gradients are averaged in buckets during the backward pass.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._buckets: list[weakref.ref] = []  # their storages
        if self.sharding.stage:
            # It is compiled as TorchScript, which nothing that a simulation changes may see.
            importlib.import_module("torch.distributed.optim")

    def wrap(self, model: Model) -> Model:
        """Return `model` in DDP, whose buckets are known from the start."""
        # the Trainer looks for parameters without gradients unless layers are recomputed, and
        # always with PEFT (`Trainer._build_accelerator_args`): it costs a copy of the outputs, and
        # buckets are not made anew. axolotl and LLaMA-Factory turn it off: forward then ends
        # without the copy, and the peak stays, since backward has the logits' gradient in its place
        # (re-entrant checkpointing fails so: `ddp: true` of axolotl turns it off)
        recipe = self.recipe
        is_recomputed = recipe.use_reentrant or (recipe.gradient_checkpointing and not recipe.lora)
        looks_for_unused = self.recipe.loop.name == "trainer" and not is_recomputed
        with _Buckets(self._buckets):
            ddp: Any = DistributedDataParallel(model, find_unused_parameters=looks_for_unused)
        if is_fake_group():
            ddp.register_comm_hook(None, _all_reduce)
        ddp.reducer = _Reducer(ddp.reducer, self._buckets)
        return ddp

    def start(self, training: Training) -> None:
        """Autocast inside DDP as accelerate does.

        What DDP copies of outputs is in fp32 by then.
        """
        if training.precision not in AUTOCAST or not training.loop.outputs_to_fp32:
            return
        if self.recipe.trainer in WITHOUT_OWN_AUTOCAST:
            autocast_inside(training.model.module, training.device.type, training.precision)
            self.autocasts = False

    def _live_buckets(self) -> list[torch.UntypedStorage]:
        """Return the reducer's buckets, which no attribute leads to."""
        storages = [reference() for reference in self._buckets]
        return [storage for storage in storages if storage is not None]

    @contextlib.contextmanager
    def follow(self, training: Training, tracker: Any) -> Iterator[None]:
        """Name the buckets, and those that the second step's forward pass makes anew."""
        tracker.claim_buckets(self._live_buckets())
        yield
        for handle in self._live_buckets():
            storage = tracker.live.get(address_of(handle))
            if storage:
                storage.category = "workspace"
                storage.where = "buckets"

    def optimizer(self, parameters: list, make: Callable[[list], Any]) -> Any:
        """Return the optimizer; at stage 1 each rank has that of its shard."""
        if self.sharding.stage == 0:
            return make(parameters)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # it wants a class and its arguments; ours is made by a function
        def of_shard(params: list, **unused: Any) -> Any:
            return make(params)

        make_sharded: Any = ZeroRedundancyOptimizer
        return make_sharded(parameters, optimizer_class=of_shard)

    def micro_batch(self, training: Training, last: bool) -> contextlib.AbstractContextManager:
        """Average gradients after the last micro-batch only."""
        return contextlib.nullcontext() if last else training.model.no_sync()


# DDP refuses annotations that are not its own
def _all_reduce(state, bucket):  # type: ignore[no-untyped-def]
    """All-reduce a bucket in a fake group.

    Its work has no result although DDP asks for it.
    """
    torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _Buckets(TorchDispatchMode):
    """Collects the storages that C++ makes with `at::empty`, floats only: those of buckets.

    With `agreed`, int32 tensors are real under a FakeTensorMode too: the reducer agrees on the
    order of new buckets by reading such.
    """

    def __init__(self, storages: list[weakref.ref], agreed: bool = False) -> None:
        super().__init__()
        self.storages = storages
        self.agreed = agreed

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self._mode(args, kwargs):
            result = func(*args, **kwargs)
        if func is torch.ops.aten.empty.memory_format and result.is_floating_point():
            self.storages.append(weakref.ref(result.untyped_storage()))
        return result

    def _mode(self, args: tuple, kwargs: dict) -> contextlib.AbstractContextManager:
        if not self.agreed:
            return contextlib.nullcontext()
        leaves = tree_leaves((args, kwargs))
        dtypes = [kwargs.get("dtype"), *(getattr(leaf, "dtype", None) for leaf in leaves)]
        return real_tensors() if torch.int32 in dtypes else contextlib.nullcontext()


class _Reducer:
    """DDP's reducer, whose new buckets are collected too."""

    def __init__(self, reducer: Any, buckets: list[weakref.ref]) -> None:
        self._reducer = reducer
        self._buckets = buckets
        # made before a tracker is there, for which it would be a tensor of the step
        with real_tensors():
            self._number = torch.zeros(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Look for unused parameters, quietly in a simulation: that it finds none is no news."""
        if not is_fake_group():
            self._reducer.prepare_for_backward(outputs)
            return

        def prepare(number: float) -> float:
            self._reducer.prepare_for_backward(outputs)
            return number

        with unheard("find_unused_parameters=True was specified", category=UserWarning):
            # C++ writes its warnings to standard error, but hands Python those of what runs inside
            # an operator of Python's (`HANDLE_TH_ERRORS`), and this one runs a function.
            self._number.apply_(prepare)

    def _rebuild_buckets(self) -> bool:
        with _Buckets(self._buckets, agreed=True):
            return rebuild_buckets(self._reducer)
