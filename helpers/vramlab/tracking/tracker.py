"""Follows every storage, of fake, CPU and CUDA tensors, from birth to free, and records what it is for.

`Tracker` is a dispatch mode: it logs each storage of a result that it has not met, and learns from a weak reference when
it is freed. The log is replayed afterwards (`history.py`), because the purpose of a storage is often known only later:
a gradient is an anonymous result until autograd gives it to its parameter.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, groupby, pairwise
from typing import Any

import torch
from torch._C import _storage_Use_Count
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..training.patched import afterwards, only_here, replaced
from ..training.process_group import group_of
from .tensors import plain_tensors, tensors_in

aten = torch.ops.aten
DEVICE_QUERY, READ_SCALAR = torch.ops.prim.device.default, aten._local_scalar_dense.default
# Buffers of FSDP and of collectives: operator to the places of its arguments that are one.
BUFFERS = {
    "fsdp::all_gather_copy_in": (0, 1),
    "fsdp::chunk_cat": ("out",),
    "c10d::_allgather_base_": (0,),
    "c10d::_reduce_scatter_base_": (0, 1),
    "c10d::allreduce_": (0,),
}
COLLECTIVES = {  # that all ranks of a group enter
    *(f"c10d::{name}" for name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_")),
    *(f"_c10d_functional::{name}" for name in ("all_reduce", "all_gather_into_tensor", "wait_tensor")),
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm"}  # cuBLAS's
REFERENCE = "reference"  # before the names of its modules and parameters
_is_wrapper = cache(lambda kind: hasattr(kind, "__tensor_flatten__"))
ON_HOST = "on host"  # category of what is in host or unified memory: seen, and left out of the finished log


@dataclass(slots=True, eq=False)
class Storage:
    """One block of memory: rounded `size` and `asked` bytes, category, what made it, the index of its `stream`."""

    size: int
    asked: int
    category: str | None
    op: str
    where: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stream: int = 0
    alive: bool = True
    ref: weakref.ref | None = None

    def copy(self, where: str) -> "Storage":
        """The same storage for another layer."""
        return Storage(self.size, self.asked, self.category, self.op, where, self.shape, self.dtype, self.stream)


class Tracker(TorchDispatchMode):
    """Logs births and frees of storages on `device` while entered. Enter it inside a FakeTensorMode, not around it.

    Sizes are rounded up to a multiple of `round_to` bytes. `scratch` gives, of an operator's name and arguments, the
    bytes that its kernel needs besides its results while it runs; None: gloo's on a CPU, nothing otherwise.
    """

    def __init__(self, device: str = "cpu", round_to: int = 1, scratch: Callable[..., int] | None = None):
        super().__init__()
        self.device, self.round_to = device, round_to
        self.scratch = scratch or (gloo_scratch if device == "cpu" else None)
        self.log: list[tuple[int, Storage, str]] = []  # +size or -size, storage, operator
        self.marks: list[tuple[int, str]] = []  # position in the log, phase that begins there
        self.calls: list[tuple[int, str, str, int]] = []  # position in the log, operator, module, marks before it
        self.live: dict[int, Storage] = {}  # by the address of torch's own object
        self.phase = "load"
        self.workspaces: dict[str, dict[str, int]] = {}  # phase to operator to bytes that stay: `_log_workspace`
        self.only_device: torch.device | None = None  # the only one of its type to count; None counts all
        self.notes: list[str] = []
        # Whether to log what a step is given and none of it made: a recipe's is known, and what else there is (code tables
        # of bitsandbytes, DDP's maps, FSDP's emptied units) is no part of it.
        self.meets = False
        self.given: list[Storage] = []  # met in the step and made before it: they are there from the start
        self._others = weakref.WeakSet()  # modules outside of the model that were called
        self._streams = {id(torch.cpu.current_stream()): 0}
        self._recomputed: list[Storage] = []
        self._over_gloo, self._group = False, None  # group: that of a collective which was the last operator
        self._modules: list[str] = []  # that are running, innermost last
        self._made_in: dict[int, str] = {}  # autograd's number of an operator to the module that called it
        self._entered = ExitStack()

    def __enter__(self) -> "Tracker":
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._over_gloo = grouped and torch.distributed.get_backend() == "gloo"
        enter = self._entered.enter_context
        enter(afterwards(torch.UntypedStorage, "resize_", lambda result, handle, size: self._resized(handle)))
        if propagation := sys.modules.get("torch.distributed.tensor._sharding_prop"):  # of shapes, on fake tensors
            owner, name = propagation.ShardingPropagator, "_propagate_tensor_meta_non_cached"
            enter(replaced(owner, name, _disable_current_modes()(getattr(owner, name))))
        if self.device == "cpu" and self.round_to == 1:  # a checkpoint keeps one, of 5,056 bytes
            enter(afterwards(torch, "get_rng_state", self._generator_state))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._group = None
        super().__exit__(*error)
        self._entered.close()

    def begin(self, phase: str) -> None:
        """Begin a phase. What the forward pass made and still holds when it ends are activations."""
        self._wait_for_gloo()
        self._keep_recomputed()
        kept = {"forward": "activations", "step": "temporaries"}.get(self.phase)
        if kept and (self.phase == "forward" or phase == "forward"):  # a closure's forward pass runs inside the step
            for storage in self.live.values():
                storage.category = storage.category or kept
        self.phase = phase
        self.marks.append((len(self.log), phase))
        if phase == "forward":
            self._log_workspace("mm")

    def _log_workspace(self, operator: str) -> None:
        """Log cuBLAS's workspace: forward's as it begins, backward's with its first product, after gradients of logits."""
        if operator in PRODUCTS:
            sizes = self.workspaces.get(self.phase, {})
            for size in [sizes.pop(of) for of in ("mm", operator) if of in sizes]:
                self.log.append((size, Storage(size, size, "workspace", "cublas"), "cublas"))

    def claim(self, tensors: Iterable[torch.Tensor], category: str, where: str = "") -> None:
        """Give the storages of `tensors` a category, from their birth on; with ON_HOST they are left out. Unknown ones
        are born now."""
        for tensor in plain_tensors(tensors):
            if self._counts(tensor):
                storage = self._storage(tensor) or self.log_birth(tensor, "given", where)
                if storage and storage.category != ON_HOST:
                    storage.category, storage.where = category, where or storage.where

    def claim_given(self, tensors: Iterable[torch.Tensor], category: str | None = None, where: str = "") -> None:
        """Log storages that are not known yet as there from the start: they were made before the tracker was entered.

        Without a category parameters are known by their class, and all else (labels, masks, queues) is input.
        """
        for tensor in plain_tensors(tensors):
            if self._counts(tensor) and self._storage(tensor) is None:
                named = category or ("parameters" if isinstance(tensor, torch.nn.Parameter) else "inputs")
                position = len(self.log)
                if storage := self.log_birth(tensor, "given", where):
                    del self.log[position]
                    storage.category = named
                    self.given.append(storage)

    def claim_storages(self, storages: Iterable[torch.UntypedStorage], category: str, where: str) -> None:
        """Log storages that no tensor is known of."""
        for handle in storages:
            size = handle.nbytes()
            self._log_birth(handle, Storage(self._round(size), size, category, "given", where))

    def is_on_host(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether there are any `tensors`, and all are marked as the host's."""
        storages = [self._storage(tensor) for tensor in plain_tensors(tensors)]
        return bool(storages) and all(storage is not None and storage.category == ON_HOST for storage in storages)

    def owner(self, tensor: Any) -> str:
        """The module or parameter that the storage of `tensor` belongs to; "" if unknown."""
        storage = self._storage(tensor) if isinstance(tensor, torch.Tensor) else None
        return storage.where if storage else ""

    @contextmanager
    def modules(self, model: torch.nn.Module, reference: torch.nn.Module | None = None):
        """While entered, storages get the name of the module that made them; of a `reference` model with REFERENCE first."""
        also = reference.named_modules(prefix=REFERENCE) if reference is not None else ()
        names = {id(m): name for name, m in (*model.named_modules(), *also)}

        def enter(module, args):
            if not is_here():
                return
            if self.meets and id(module) not in names and module not in self._others:
                self._others.update(module.modules())
                self.meet_module(module)
            self._modules.append(names.get(id(module), self._modules[-1] if self._modules else ""))

        def leave(module, args, output):
            if self._modules and is_here():
                self._modules.pop()

        # always_call: a checkpoint stops its recomputation early, by an exception that skips ordinary hooks
        hooks = torch.nn.modules.module
        with (
            only_here() as is_here,  # such hooks run in every thread
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ):
            yield

    def finish(self) -> "Tracker":
        """Close the log, without the host's storages. Consecutive frees, whose order may be a hash table's, are sorted
        by birth. Returns self."""
        self.live.clear()
        self.log[:0] = [(storage.size, storage, storage.op) for storage in self.given]
        self.marks = [(len(self.given) + old, phase) for old, phase in self.marks]
        self.calls = [(len(self.given) + old, *call) for old, *call in self.calls]
        self.given = []
        position = [0, *accumulate(storage.category != ON_HOST for _, storage, _ in self.log)]  # by the old one
        self.log = [event for event in self.log if event[1].category != ON_HOST]
        self.marks = [(position[old], phase) for old, phase in self.marks]
        self.calls = [(position[old], *call) for old, *call in self.calls]
        cuts = sorted({0, len(self.log), *(call[0] for call in self.calls), *(position for position, _ in self.marks)})
        born = {storage: i for i, (size, storage, _) in enumerate(self.log) if size > 0}
        for first, last in pairwise(cuts):
            runs = groupby(self.log[first:last], key=lambda event: event[0] > 0)
            in_order = [list(run) if births else sorted(run, key=lambda e: born[e[1]]) for births, run in runs]
            self.log[first:last] = chain.from_iterable(in_order)
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.dispatch(func, types, args, kwargs or {})

    def dispatch(self, func: torch._ops.OpOverload, types: tuple, args: tuple, kwargs: dict) -> Any:
        """Run an operator and log what it makes."""
        if any(map(_is_wrapper, types)):
            return NotImplemented  # such as DTensor: the operators that it is made of come here next
        if func is DEVICE_QUERY:
            return func(*args, **kwargs)
        if func is READ_SCALAR and (value := self.scalar(args[0])) is not None:
            return value
        self._wait_for_gloo()
        if self._recomputed and not torch.is_grad_enabled():
            self._keep_recomputed()
        if func is aten.add.Tensor and self.phase == "backward" and _accumulates(*args, **kwargs):
            func = aten.add_.Tensor
        self.meet(func, args, kwargs)
        name, is_collective, buffers = _about(func)
        start, where = len(self.log), self._where(args)
        block = self._log_scratch(name, args, where)
        if is_collective and self._over_gloo:
            self._group = group_of(args)
        result = self.run(func, args, kwargs)
        self.calls.append((start, name, where, len(self.marks)))
        self._record(result, name, where, args)
        self._log_workspace(name)
        for tensor in tensors_in([args[place] if isinstance(place, int) else kwargs[place] for place in buffers]):
            if storage := self._storage(tensor):
                storage.category = storage.category or "workspace"
        if block:
            self.log.append((-block.size, block, name))
        return result

    def meet(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
        """Log what an operator is given and none has made: a teacher's weights, a queue, labels that a loss holds."""
        if self.meets and func is not aten.lift_fresh.default:  # of what `torch.tensor` makes at that moment
            self.claim_given(tensors_in([args, kwargs]))

    def meet_module(self, module: torch.nn.Module) -> None:
        """Log what a called module holds that is no part of the model, such as a teacher in the loss: all of it."""
        kind = type(module).__name__
        for name, parameter in module.named_parameters(kind):
            self.claim_given([parameter], "parameters", name)
        for name, buffer in module.named_buffers(kind):
            self.claim_given([buffer], "buffers", name)

    def run(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
        """The result of an operator."""
        return func(*args, **kwargs)

    def scalar(self, tensor: torch.Tensor) -> Any:
        """The number that `tensor.item()` is to give; None reads it."""
        return None

    def name_module(self, name: str) -> None:
        """Give what is made from here on the name of a module or parameter, outside of `modules`."""
        self._modules = [name]

    def running_module(self) -> str:
        """The module that is running, for a sentence; "" outside."""
        return f"module {self._modules[-1]!r}" if self._modules else ""

    def _where(self, args: tuple) -> str:
        """The module that is running, or whose backward is, or (in the optimizer) the parameter that is updated."""
        if self._modules:
            where = self._modules[-1]
            if torch.is_grad_enabled():
                # the node was made before its kernel ran; what makes no node must not take the last one's place
                self._made_in.setdefault(torch.autograd._get_sequence_nr() - 1, where)
            return where
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._made_in.get(node._sequence_nr(), type(node).__name__)
        if self.phase == "step":
            return next(filter(None, map(self.owner, args)), "")
        return ""

    def _record(self, result: Any, op: str, where: str, args: tuple = ()) -> None:
        """Log the storages of a result that are not known yet."""
        if isinstance(result, torch.Tensor):
            for tensor in plain_tensors((result,)):
                # "split": pieces of a collective's own copy, which `scratch` has counted
                if tensor.untyped_storage()._cdata not in self.live and self._counts(tensor) and op != "split":
                    self.log_birth(tensor, op, where)
        elif isinstance(result, list | tuple):
            # a multi-tensor kernel: each result belongs where its own operand does
            operands = args[0] if args and isinstance(args[0], list | tuple) and len(args[0]) == len(result) else None
            for i, item in enumerate(result):
                self._record(item, op, self.owner(operands[i]) if operands else where)

    def _log_scratch(self, name: str, args: tuple, where: str) -> Storage | None:
        size = self.scratch(name, args) if self.scratch else 0
        if not size:
            return None
        block = Storage(self._round(size), size, "workspace", name, where)
        block.stream = self._stream()
        self.log.append((block.size, block, name))
        return block

    def _generator_state(self, state: torch.Tensor) -> None:
        """Log a copy of the CPU generator's state, which is made without the dispatcher."""
        self._wait_for_gloo()
        where = self._where(())
        self.calls.append((len(self.log), "get_rng_state", where, len(self.marks)))
        self._record(state, "get_rng_state", where)

    def log_birth(self, tensor: torch.Tensor, op: str, where: str = "") -> Storage | None:
        """Log the storage of `tensor`, made by operator `op`; None if it has no memory."""
        handle = tensor.untyped_storage()
        asked = handle.nbytes()
        about = where, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        storage = self._log_birth(handle, Storage(self._round(asked), asked, None, op, *about))
        if storage and self.phase == "backward" and torch.is_grad_enabled():
            self._recomputed.append(storage)
        return storage

    def _log_birth(self, handle: torch.UntypedStorage, storage: Storage) -> Storage | None:
        if not storage.size:
            return None
        key, storage.stream = handle._cdata, self._stream()
        storage.ref = weakref.ref(handle, lambda _, key=key: self._freed(key))
        self.live[key] = storage
        self.log.append((storage.size, storage, storage.op))
        return storage

    def _stream(self) -> int:
        """The stream that runs, as FSDP and DeepSpeed choose it on fake tensors."""
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))

    def _freed(self, key: int) -> None:
        storage = self.live.pop(key, None)
        if storage and storage.alive:
            storage.alive = False
            self.log.append((-storage.size, storage, "free"))

    def _resized(self, handle: torch.UntypedStorage) -> None:
        """Log that a storage was emptied or filled again without an operator, as FSDP does with what it gathers."""
        self._wait_for_gloo()
        storage, size = self.live.get(handle._cdata), self._round(handle.nbytes())
        if storage is None or (size == storage.size if storage.alive else not size):
            return
        if storage.alive:
            storage.alive = False
            self.log.append((-storage.size, storage, "resize"))
        if size:
            filled = self.live[handle._cdata] = storage.copy(storage.where)
            filled.size, filled.asked, filled.alive, filled.ref = size, handle.nbytes(), True, storage.ref
            self.log.append((size, filled, "resize"))

    def _wait_for_gloo(self) -> None:
        """Run another collective, so that gloo's one thread has let go of the last one's tensors: frees are deterministic."""
        if self._group is not None:
            group, self._group = self._group, None
            with _disable_current_modes():
                group.allreduce([torch.zeros(1)]).wait()

    def _keep_recomputed(self) -> None:
        """At the end of a checkpoint's recomputation: what is still held was kept for backward, as activations."""
        for storage in self._recomputed:
            if storage.alive:
                storage.category = storage.category or "activations"
        self._recomputed.clear()

    def _counts(self, tensor: torch.Tensor) -> bool:
        device = getattr(tensor, "fake_device", None) or tensor.device  # a fake tensor's `device` goes the long way
        return device.type == self.device and self.only_device in (None, device)

    def _storage(self, tensor: torch.Tensor) -> Storage | None:
        return self.live.get(tensor.untyped_storage()._cdata)

    def _round(self, size: int) -> int:
        return -(-size // self.round_to) * self.round_to


@cache
def _about(func: torch._ops.OpOverload) -> tuple[str, bool, tuple[int | str, ...]]:
    """Name of an operator, whether all ranks enter it, and the places of its arguments that are buffers."""
    qualified = func.overloadpacket._qualified_op_name
    return qualified.rpartition("::")[2], qualified in COLLECTIVES, BUFFERS.get(qualified, ())


def gloo_scratch(name: str, args: tuple[Any, ...]) -> int:
    """Bytes of torch's CPU allocator that gloo takes for a collective: a flat result when it gathers
    (`AsyncAllgatherWork::allgather`), a copy of what it reduces and scatters (`reduce_scatter_tensor_coalesced`)."""
    place = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}.get(name)
    return 0 if place is None else args[place].nbytes


def _accumulates(held: Any, new: Any, **options: Any) -> bool:
    """Whether autograd would add `new` in place to a gradient that only its own buffer holds, were no dispatch mode active
    (`can_accumulate_inplace` in input_buffer.cpp). Two hold the storage here: the tensor, and the handle that is asked.
    """
    if torch.is_grad_enabled() or options or not isinstance(new, torch.Tensor):
        return False
    storage = held.untyped_storage()
    dense = held.nbytes == storage.nbytes()
    return dense and held.shape == new.shape and held.dtype == new.dtype and _storage_Use_Count(storage._cdata) == 2
