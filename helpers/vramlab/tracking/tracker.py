"""Follows every storage, of fake, CPU and CUDA tensors, from birth to free, and what it is for.

`Tracker` is a dispatch mode: it logs each storage of a result that it has not met, and learns from
a weak reference when it is freed. The log is replayed afterwards (`history.py`), because the
purpose of a storage is often known only later: a gradient is an anonymous result until autograd
gives it to its parameter.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import torch

from ..private import of_distributed, of_torch
from ..private.of_torch import address_of
from ..private.patched import afterwards, replaced
from .events import ON_HOST, Call, Event, EventLog, Mark, Storage
from .gloo import LastCollective, gloo_scratch
from .running_modules import REFERENCE, RunningModules
from .tensors import plain_tensors, tensors_in
from .tracked_operators import (
    DEVICE_QUERY,
    READ_SCALAR,
    UNPACKED,
    about,
    accumulates,
    aten,
    is_wrapper,
    operands_of,
    workspaces_taken,
)

__all__ = ["DEVICE_QUERY", "ON_HOST", "REFERENCE", "Event", "Mark", "Storage", "Tracker", "aten"]


class Tracker(RunningModules, EventLog, of_torch.TorchDispatchMode):
    """Logs births and frees of storages on `device` while it is entered.

    Enter it inside a FakeTensorMode, not around it. Sizes are rounded up to a multiple of
    `round_to` bytes. `scratch` gives, of an operator's name and arguments, the bytes that its
    kernel needs besides its results while it runs; None takes gloo's on a CPU, else nothing.
    """

    def __init__(
        self,
        device: str = "cpu",
        round_to: int = 1,
        scratch: Callable[..., int] | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self.round_to = round_to
        if scratch is None and device == "cpu":
            scratch = gloo_scratch
        self.scratch = scratch
        self.live: dict[int, Storage] = {}  # by the address of torch's own object
        self.phase = "load"
        # phase to operator to bytes that stay: `_log_workspace`
        self.workspaces: dict[str, dict[str, int]] = {}
        # the only device of its type to count; None counts all
        self.only_device: torch.device | None = None
        self.notes: list[str] = []
        # bytes that an evaluation keeps on the host
        self.kept_on_host: int | None = None
        # Whether to log what a step is given and none of it made: a recipe's is known, and what
        # else there is (code tables of bitsandbytes, DDP's maps, FSDP's emptied units) is no part
        # of it.
        self.meets = False
        self._streams = {id(torch.cpu.current_stream()): 0}
        # made while a checkpoint recomputes, whose results are kept for backward
        self._recomputed: list[Storage] = []
        self._collective = LastCollective()
        # autograd's number of an operator to the module that called it
        self._made_in: dict[int, str] = {}
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._collective = LastCollective()
        for patch in self._patches():
            self._entered.enter_context(patch)
        return super().__enter__()

    def _patches(self) -> Iterator[Any]:
        """Return what is replaced while the tracker is entered."""

        def resized(result: Any, handle: torch.UntypedStorage, size: int) -> None:
            self._resized(handle)

        yield afterwards(torch.UntypedStorage, "resize_", resized)
        # DTensor finds out shapes on fake tensors, which are no memory
        propagator = of_distributed.dtensor_propagator()
        if propagator:
            name = of_distributed.PROPAGATE_SHAPES
            unseen = of_torch.without_modes()(getattr(propagator, name))
            yield replaced(propagator, name, unseen)
        # a checkpoint keeps a state of the generator, of 5,056 bytes
        if self.device == "cpu" and self.round_to == 1:
            yield afterwards(torch, "get_rng_state", self._generator_state)

    def __exit__(self, *error: Any) -> None:
        self._collective = LastCollective()
        super().__exit__(*error)
        self._entered.close()

    def begin(self, phase: str) -> None:
        """Begin a phase. What the forward pass made and still holds when it ends is activations."""
        self._collective.wait()
        self._keep_recomputed()
        # an optimizer's closure has a forward pass inside the step
        if self.phase == "forward":
            self._name_unknown("activations")
        elif self.phase == "step" and phase == "forward":
            self._name_unknown("temporaries")
        self.phase = phase
        self.marks.append((len(self.log), phase))
        if phase in ("forward", "prefill"):
            self._log_workspace("mm")

    def _name_unknown(self, category: str) -> None:
        """Give what is alive and has no category yet this one."""
        for storage in self.live.values():
            storage.category = storage.category or category

    def _log_workspace(self, operator: str, args: tuple = ()) -> None:
        """Log cuBLAS's workspace, which stays."""
        for size in workspaces_taken(self.workspaces.get(self.phase, {}), operator, args):
            self.log.append((size, Storage(size, size, "workspace", "cublas"), "cublas"))

    def claim(
        self,
        tensors: Iterable[torch.Tensor],
        category: str | None,
        where: str = "",
    ) -> None:
        """Give the storages of `tensors` a category, from their birth on; None leaves it as it is.

        With ON_HOST they are left out. Unknown ones are born now.
        """
        for tensor in plain_tensors(tensors):
            if not self._counts(tensor):
                continue
            storage = self._storage(tensor) or self.log_birth(tensor, "given", where)
            if storage and storage.category != ON_HOST:
                storage.category = category or storage.category
                storage.where = where or storage.where

    def claim_given(
        self,
        tensors: Iterable[torch.Tensor],
        category: str | None = None,
        where: str = "",
    ) -> None:
        """Log storages that are not known yet as there from the start.

        They were made before the tracker was entered. Without a category parameters are known by
        their class, and all else (labels, masks, queues) is input.
        """
        for tensor in plain_tensors(tensors):
            if not self._counts(tensor) or self._storage(tensor) is not None:
                continue
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            implied = "parameters" if is_parameter else "inputs"
            position = len(self.log)
            storage = self.log_birth(tensor, "given", where)
            if storage:
                # `finish` puts the birth at the log's begin
                del self.log[position]
                storage.category = category or implied
                self.given.append(storage)

    def claim_buckets(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Log DDP's buckets, storages that no tensor is known of."""
        for handle in storages:
            size = handle.nbytes()
            bucket = Storage(self._round(size), size, "workspace", "given", "buckets")
            self._log_birth(handle, bucket)

    def is_on_host(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Tell whether there are any `tensors`, and all are marked as the host's."""
        storages = [self._storage(tensor) for tensor in plain_tensors(tensors)]
        categories = {storage.category if storage else None for storage in storages}
        return categories == {ON_HOST}

    def owner(self, tensor: Any) -> str:
        """Return the module or parameter that the storage of `tensor` belongs to; "" if unknown."""
        storage = self._storage(tensor) if isinstance(tensor, torch.Tensor) else None
        return storage.where if storage else ""

    def finish(self) -> Self:
        """Close the log, and return self."""
        # What is still alive at the end has no free in the log.
        self.live.clear()
        self.close_log()
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

    def dispatch(
        self,
        func: of_torch.OpOverload,
        types: tuple,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Run an operator and log what it makes."""
        if any(map(is_wrapper, types)):
            return NotImplemented  # such as DTensor: its own operators come here next
        if func is DEVICE_QUERY:
            return func(*args, **kwargs)
        if func is READ_SCALAR:
            value = self.scalar(args[0])
            if value is not None:
                return value
        self._settle()
        # A tracker is a dispatch mode, under which autograd never accumulates in place; the plain
        # run would.
        if func is aten.add.Tensor and self.phase == "backward" and accumulates(*args, **kwargs):
            func = aten.add_.Tensor
        self.meet(func, args, kwargs)
        return self._run_logged(func, args, kwargs)

    def _settle(self) -> None:
        """Note what an operator ends: a collective, and a checkpoint's recomputation."""
        self._collective.wait()
        if self._recomputed and not torch.is_grad_enabled():
            self._keep_recomputed()

    def _run_logged(self, func: of_torch.OpOverload, args: tuple, kwargs: dict) -> Any:
        """Run an operator, and log its scratch, its results and its buffers."""
        known = about(func)
        called = self._call(known.name, args)
        where = called.where
        block = self._log_scratch(known.name, args, where)
        if known.is_collective:
            self._collective.begin(args)
        result = self.run(func, args, kwargs)
        # After it ran, so that an operator that raised is none that ran.
        self.calls.append(called)
        self._record(result, known.name, where, args)
        # a 4-bit weight that is not unpacked takes no scratch, and no product of cuBLAS
        if known.multiplies and (block or known.name != UNPACKED):
            self._log_workspace(known.name, args)
        for place in known.buffers:
            buffer = args[place] if isinstance(place, int) else kwargs[place]
            for tensor in tensors_in(buffer):
                storage = self._storage(tensor)
                if storage:
                    storage.category = storage.category or "workspace"
        if block:
            self.log.append((-block.size, block, known.name))
        return result

    def meet(self, func: of_torch.OpOverload, args: tuple, kwargs: dict) -> None:
        """Log what an operator is given and none has made.

        Such are a teacher's weights, a queue, and labels that a loss holds.
        """
        # `lift_fresh` is given what `torch.tensor` makes at that moment
        if self.meets and func is not aten.lift_fresh.default:
            self.claim_given(tensors_in([args, kwargs]))

    def meet_module(self, module: torch.nn.Module) -> None:
        """Log all that a called module holds which is no part of the model, such as a teacher."""
        kind = type(module).__name__
        for name, parameter in module.named_parameters(kind):
            self.claim_given([parameter], "parameters", name)
        for name, buffer in module.named_buffers(kind):
            self.claim_given([buffer], "buffers", name)

    def run(self, func: of_torch.OpOverload, args: tuple, kwargs: dict) -> Any:
        """Return the result of an operator."""
        return func(*args, **kwargs)

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Return the number that `tensor.item()` is to give; None reads it."""
        return None

    def _call(self, op: str, args: tuple) -> Call:
        """Return the call of an operator that runs now."""
        return Call(len(self.log), op, self._where(args), len(self.marks))

    def _where(self, args: tuple) -> str:
        """Return where an operator runs.

        That is the module that is running, or whose backward is, or (in the optimizer) the
        parameter that is updated.
        """
        if self._modules:
            where = self._modules[-1]
            if torch.is_grad_enabled():
                # the node was made before its kernel ran; what makes no node must not take the
                # last one's place
                self._made_in.setdefault(of_torch.next_number() - 1, where)
            return where
        node = of_torch.current_node()
        if node is not None:
            return self._made_in.get(of_torch.number_of(node), type(node).__name__)
        if self.phase == "step":
            return next(filter(None, map(self.owner, args)), "")
        return ""

    def _record(
        self,
        result: Any,
        op: str,
        where: str,
        args: tuple = (),
    ) -> None:
        """Log the storages of a result that are not known yet."""
        if isinstance(result, torch.Tensor):
            if op == "split":
                return  # pieces of a collective's own copy, which `scratch` has counted
            for tensor in plain_tensors((result,)):
                is_known = address_of(tensor.untyped_storage()) in self.live
                if not is_known and self._counts(tensor):
                    self.log_birth(tensor, op, where)
        elif isinstance(result, list | tuple):
            operands = operands_of(result, args)
            for index, item in enumerate(result):
                owner = self.owner(operands[index]) if operands else where
                self._record(item, op, owner)

    def _log_scratch(self, name: str, args: tuple, where: str) -> Storage | None:
        size = self.scratch(name, args) if self.scratch else 0
        if not size:
            return None
        block = Storage(self._round(size), size, "workspace", name, where)
        block.stream = self._stream()
        block.recomputed = self._is_recomputing()
        self.log.append((block.size, block, name))
        return block

    def _generator_state(self, state: torch.Tensor) -> None:
        """Log a copy of the CPU generator's state, which is made without the dispatcher."""
        self._collective.wait()
        self.calls.append(self._call("get_rng_state", ()))
        self._record(state, "get_rng_state", self.calls[-1].where)

    def log_birth(self, tensor: torch.Tensor, op: str, where: str = "") -> Storage | None:
        """Log the storage of `tensor`, made by operator `op`; None if it has no memory."""
        handle = tensor.untyped_storage()
        asked = handle.nbytes()
        born = Storage.of(tensor, self._round(asked), asked, op, where)
        born.recomputed = self._is_recomputing()
        storage = self._log_birth(handle, born)
        # In backward only a checkpoint's recomputation records a graph.
        if storage and self.phase == "backward" and torch.is_grad_enabled():
            self._recomputed.append(storage)
        return storage

    def _log_birth(self, handle: torch.UntypedStorage, storage: Storage) -> Storage | None:
        if not storage.size:
            return None
        key = address_of(handle)
        storage.stream = self._stream()

        def freed(reference: weakref.ref) -> None:
            self._freed(key)

        # torch keeps one Python object for a storage, whose end is the free.
        storage.ref = weakref.ref(handle, freed)
        self.live[key] = storage
        self.log.append((storage.size, storage, storage.op))
        return storage

    def _is_recomputing(self) -> bool:
        """Tell whether a checkpoint runs forward again.

        An operator's backward formula records no graph, and the loss's gradient has no operator.
        """
        is_recorded = self.phase == "backward" and torch.is_grad_enabled()
        return is_recorded and of_torch.current_node() is not None

    def _stream(self) -> int:
        """Return the index of the stream that runs.

        FSDP and DeepSpeed choose among streams on fake tensors as on a GPU.
        """
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))

    def _freed(self, key: int) -> None:
        storage = self.live.pop(key, None)
        if storage and storage.alive:
            storage.alive = False
            self.log.append((-storage.size, storage, "free"))

    def _resized(self, handle: torch.UntypedStorage) -> None:
        """Log that a storage was emptied or filled again without an operator.

        FSDP does so with what it gathers.
        """
        self._collective.wait()
        storage = self.live.get(address_of(handle))
        size = self._round(handle.nbytes())
        if storage is None:
            return
        before = storage.size if storage.alive else 0
        if size == before:
            return
        if storage.alive:
            storage.alive = False
            self.log.append((-storage.size, storage, "resize"))
        if size:
            # A new storage in the log, since one has a single birth and a single free.
            filled = storage.copy(storage.where)
            filled.size = size
            filled.asked = handle.nbytes()
            filled.ref = storage.ref
            self.live[address_of(handle)] = filled
            self.log.append((size, filled, "resize"))

    def _keep_recomputed(self) -> None:
        """Name what is still held at the end of a checkpoint's recomputation.

        It was kept for backward, as activations are.
        """
        for storage in self._recomputed:
            if storage.alive:
                storage.category = storage.category or "activations"
        self._recomputed.clear()

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor is on the device that is followed."""
        # a fake tensor's `device` goes the long way
        device = getattr(tensor, "fake_device", None) or tensor.device
        return device.type == self.device and self.only_device in (None, device)

    def _storage(self, tensor: torch.Tensor) -> Storage | None:
        return self.live.get(address_of(tensor.untyped_storage()))

    def _round(self, size: int) -> int:
        return -(-size // self.round_to) * self.round_to
