"""Follows every storage from birth to free, and knows what it was for.

A storage is a block of memory; tensors are views of it. `Tracker` is a dispatch mode: it sees the results of every
operator, notes each storage it has not met, and hears from Python's garbage collector when the storage goes. The log of
births and frees is replayed afterwards, because what a storage is *for* is often known only later: a gradient is an
anonymous result until autograd hands it to its parameter. It works the same on fake, CPU and CUDA tensors.

Prior art: `torch.distributed._tools.mem_tracker.MemTracker`, which decides the category at birth.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch._C import _storage_Use_Count
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .collectives import group_of
from .gloo import gloo_scratch

aten = torch.ops.aten
# What FSDP and collectives work in: operator to the places of the arguments that are buffers for the transfer.
BUFFERS = {
    "fsdp::all_gather_copy_in": (0, 1),
    "fsdp::chunk_cat": ("out",),
    "c10d::_allgather_base_": (0,),
    "c10d::_reduce_scatter_base_": (0, 1),
    "c10d::allreduce_": (0,),
}
TOGETHER = {  # collectives that all ranks enter
    *(("c10d", name) for name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_")),
    *(("_c10d_functional", name) for name in ("all_reduce", "all_gather_into_tensor", "wait_tensor")),
}
SPARSE = {  # layout to what the tensors of it are made of
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
ELSEWHERE = "elsewhere"  # on the host or in unified memory: seen, and counted nowhere


class Storage:
    """One block of memory: its size (rounded) and what was asked for in bytes, what it is for, and what made it.

    `stream`: the number of the stream it was allocated on, 0 the default one; blocks of others are not reused for it.
    """

    __slots__ = ("alive", "asked", "category", "dtype", "op", "ref", "shape", "size", "stream", "where")

    def __init__(
        self, size: int, asked: int, category: str | None, op: str, tensor: torch.Tensor | None, where: str = ""
    ):
        self.size, self.asked, self.category, self.op, self.where, self.alive = size, asked, category, op, where, True
        self.shape = tuple(tensor.shape) if tensor is not None else ()
        self.dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
        self.ref, self.stream = None, 0

    def copy(self, where: str) -> "Storage":
        """The same for another layer."""
        twin = Storage(self.size, self.asked, self.category, self.op, None, where)
        twin.shape, twin.dtype, twin.alive, twin.stream = self.shape, self.dtype, self.alive, self.stream
        return twin


class Tracker(TorchDispatchMode):
    """Logs births and frees of storages while it is entered. Enter it inside a FakeTensorMode, not around it.

    Args:
        device: count storages of this device type only ("cpu" or "cuda").
        round_to: sizes are rounded up to a multiple of this many bytes, as the allocator of `target` does.
        scratch: bytes that a kernel needs besides its results while it runs, a function of the operator's name and
            arguments. None: gloo's on a CPU, nothing otherwise.

    Attributes:
        only_device: of the devices of that type, the one to count; None: all.
        keep_storage: called with each operator, its arguments and its result (`operators.py`).
        host_computes: what is computed from tensors that live elsewhere alone stays there.
        notes: what the report is to say about the run.
        host_peak: once finished, the most bytes that were elsewhere at a time.
    """

    def __init__(self, device: str = "cpu", round_to: int = 1, scratch: Callable[..., int] | None = None):
        super().__init__()
        self.device, self.round_to = device, round_to
        self.scratch = scratch or (gloo_scratch if device == "cpu" else None)
        self._over_gloo = False
        self._sent: Any = None  # the group of the collective that was the last operator
        self.live: dict[int, Storage] = {}
        self.streams = {id(torch.cpu.current_stream()): 0}
        self.log: list[tuple[int, Storage, str]] = []  # (+size or -size, storage, operator)
        self.marks: list[tuple[int, str]] = []  # (position in the log, phase that begins there)
        self.calls: list[tuple[int, str, str, int]] = []  # (position in the log, operator, where, marks before it)
        self.phase = "load"
        self.recomputed: list[Storage] = []
        self.at_phase: dict[str, int] = {}  # workspace bytes that stay from a phase's first time on
        self.constant: dict[torch.dtype, Any] = {}
        self.values: Any = None  # of fake tensors, where some are known (`values.Values`)
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._made_in: dict[int, str] = {}  # autograd's number of an operator to the module that called it
        self.asleep = False
        self.only_device: torch.device | None = None
        self.host_computes = False
        self.keep_storage: Callable[..., None] | None = None
        self.notes: list[str] = []
        self.host_peak = 0
        self._entered = ExitStack()

    def __enter__(self) -> "Tracker":
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._over_gloo = grouped and torch.distributed.get_backend() == "gloo"
        self._entered.enter_context(_resizes_seen(self._resized))
        self._entered.enter_context(_shapes_unseen(self))
        if self.device == "cpu" and self.round_to == 1:
            self._entered.enter_context(_generator_states_seen(self.made))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._sent = None
        super().__exit__(*error)
        self._entered.close()

    # --- what the caller says -------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """A phase begins. What a forward pass made and still holds when it ends are activations."""
        self._let_go()
        self._settle()
        kept = {"forward": "activations", "step": "temporaries"}.get(self.phase)
        if kept and (self.phase == "forward" or phase == "forward"):  # a forward pass in a step is that of a closure
            for storage in self.live.values():
                storage.category = storage.category or kept
        self.phase = phase
        self.marks.append((len(self.log), phase))
        if size := self.at_phase.pop(phase, 0):
            self.log.append((size, Storage(size, size, "workspace", "cublas", None), "cublas"))

    def claim(self, tensors: Iterable[torch.Tensor], category: str, where: str = "") -> None:
        """These tensors' storages are, and always were, of `category`. Storages not met before are born now."""
        for tensor in tensors:
            for inner in _beneath(tensor):
                if not self._counts(inner):
                    continue
                storage = self._storage(inner) or self._born(inner, "given", where)
                if storage and storage.category != ELSEWHERE:
                    storage.category, storage.where = category, where or storage.where

    def claim_storages(self, storages: Iterable[torch.UntypedStorage], category: str, where: str) -> None:
        """Storages without a tensor that is known: they are there, of `category`."""
        for handle in storages:
            storage = self._enter(
                handle, Storage(self._round(handle.nbytes()), handle.nbytes(), category, "given", None)
            )
            if storage:
                storage.where = where

    def mark_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors live on another device than the one described (the host's step counters): leave them out."""
        for tensor in tensors:
            for inner in _beneath(tensor):
                if storage := self._storage(inner):
                    storage.category = ELSEWHERE

    def is_on_host(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether there are any `tensors`, and all of them live elsewhere."""
        found = [self._storage(inner) for tensor in tensors for inner in _beneath(tensor)]
        return bool(found) and all(storage is not None and storage.category == ELSEWHERE for storage in found)

    def _counts(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device and self.only_device in (None, tensor.device)

    def _storage(self, tensor: torch.Tensor) -> Storage | None:
        return None if tensor.layout in SPARSE else self.live.get(tensor.untyped_storage()._cdata)

    @contextmanager
    def modules(self, model: torch.nn.Module):
        """While entered, storages also know the module that made them."""
        self._names = {id(m): name for name, m in model.named_modules()}

        def enter(module, args):
            name = self._names.get(id(module))
            self._stack.append(name if name is not None else (self._stack[-1] if self._stack else ""))

        def leave(module, args, output):
            if self._stack:
                self._stack.pop()

        # always_call: a checkpoint stops its recomputation early, by an exception that skips ordinary hooks
        before = torch.nn.modules.module.register_module_forward_pre_hook(enter)
        after = torch.nn.modules.module.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _where(self, args: tuple) -> str:
        """The module that is running, or whose backward is, or (in the optimizer) the parameter that is updated."""
        if self._stack:
            where = self._stack[-1]
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

    def _place(self) -> str:
        """The module that is running, for a sentence."""
        return f"module {self._stack[-1]!r}" if self._stack else ""

    def owner(self, tensor: Any) -> str:
        """Where the storage of `tensor` belongs, "" if it is none."""
        storage = self._storage(tensor) if isinstance(tensor, torch.Tensor) else None
        return storage.where if storage else ""

    def _leave_out(self) -> None:
        kept = [event[1].category != ELSEWHERE for event in self.log]
        if not all(kept):
            held = accumulate(event[0] for event, keep in zip(self.log, kept, strict=True) if not keep)
            self.host_peak = max(held)
            at = [0, *accumulate(kept)]  # old position to new
            self.log = [event for event, keep in zip(self.log, kept, strict=True) if keep]
            self.marks = [(at[position], phase) for position, phase in self.marks]
            self.calls = [(at[position], *call) for position, *call in self.calls]

    def finish(self) -> "Tracker":
        """Close the log: what is freed from now on is teardown. Returns self.

        What was found to be elsewhere is left out, and frees that nothing came between are sorted by birth:
        their order (a hash table's, say) means nothing.
        """
        self.live.clear()
        self._leave_out()
        cuts = sorted({0, len(self.log), *(call[0] for call in self.calls), *(position for position, _ in self.marks)})
        born = {id(storage): i for i, (size, storage, _) in enumerate(self.log) if size > 0}
        for first, last in pairwise(cuts):
            start = first
            for i in range(first, last + 1):
                if i == last or self.log[i][0] > 0:
                    self.log[start:i] = sorted(self.log[start:i], key=lambda event: born[id(event[1])])
                    start = i + 1
        return self

    # --- what the dispatcher says ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor: what it is made of comes here next
        if self.asleep:
            return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and (self.values or args[0].dtype in self.constant):
            # A fake tensor has no value to read. What a module has drawn is not below its rate: LayerDrop drops no layer.
            drawn = args[0].dtype == torch.bool and self.calls and self.calls[-1][1] in ("lt", "le")
            guess = False if drawn else self.constant.get(args[0].dtype, 1)
            return self.values.read(args[0], guess, self._place()) if self.values else guess
        self._let_go()
        if self.recomputed and not torch.is_grad_enabled():
            self._settle()
        if func is aten.add.Tensor and self.phase == "backward" and _accumulates(*args, **kwargs):
            func = aten.add_.Tensor
        name = func.overloadpacket._qualified_op_name.rpartition("::")[2]
        start, where = len(self.log), self._where(args)
        extra = self.scratch(name, args) if self.scratch else 0
        if extra:
            block = Storage(self._round(extra), extra, "workspace", name, None, where)
            self.log.append((block.size, block, name))
        self._sent = group_of(args) if self._over_gloo and (func.namespace, name) in TOGETHER else None
        result = self.values.run(func, args, kwargs, self._place()) if self.values else func(*args, **kwargs)
        if self.keep_storage:
            self.keep_storage(func, args, kwargs, result)
        self.calls.append((start, name, where, len(self.marks)))
        self._see(result, name, where, args)
        if name == "_pack_padded_sequence" and self.round_to > 1:
            self.mark_on_host([result[1]])  # the batch sizes are the host's
        if self.host_computes and self.is_on_host(_tensors((args, kwargs))):
            self.mark_on_host(_tensors(result))
        for place in BUFFERS.get(func.overloadpacket._qualified_op_name, ()):
            self._carries(args[place] if isinstance(place, int) else kwargs[place])
        if extra:
            self.log.append((-block.size, block, name))
        return result

    def _see(self, result: Any, op: str, where: str, args: tuple = ()) -> None:
        if isinstance(result, torch.Tensor):
            for tensor in _beneath(result):
                if self._counts(tensor) and not self._storage(tensor):
                    if op == "split":  # of a collective's own copy, which `scratch` has counted
                        continue
                    self._born(tensor, op, where)
        elif isinstance(result, list | tuple):
            # a multi-tensor kernel: each result belongs where its own operand does
            operands = args[0] if args and isinstance(args[0], list | tuple) and len(args[0]) == len(result) else None
            for i, item in enumerate(result):
                self._see(item, op, self.owner(operands[i]) if operands else where)

    def made(self, tensor: torch.Tensor, op: str) -> None:
        """`tensor` was made by `op` without the dispatcher."""
        self._let_go()
        self.calls.append((len(self.log), op, self._where(()), len(self.marks)))
        self._see(tensor, op, self.calls[-1][2])

    def _born(self, tensor: torch.Tensor, op: str, where: str = "") -> Storage | None:
        handle = tensor.untyped_storage()
        asked = handle.nbytes()
        storage = self._enter(handle, Storage(self._round(asked), asked, None, op, tensor, where))
        if storage and self.phase == "backward" and torch.is_grad_enabled():
            self.recomputed.append(storage)
        return storage

    def _enter(self, handle: torch.UntypedStorage, storage: Storage) -> Storage | None:
        """Log the birth of `storage`, whose memory `handle` is; None without memory."""
        if not storage.size:
            return None
        key, stream = handle._cdata, torch.cpu.current_stream()  # which is where FSDP works on fake tensors
        storage.stream = self.streams.setdefault(id(stream), len(self.streams))
        storage.ref = weakref.ref(handle, lambda _, key=key: self._freed(key))
        self.live[key] = storage
        self.log.append((storage.size, storage, storage.op))
        return storage

    def _freed(self, key: int) -> None:
        storage = self.live.pop(key, None)
        if storage and storage.alive:
            storage.alive = False
            self.log.append((-storage.size, storage, "free"))

    def _resized(self, handle: torch.UntypedStorage) -> None:
        """A storage is emptied or filled again without an operator, as FSDP does with what it gathers."""
        self._let_go()
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

    def _carries(self, tensors: Any) -> None:
        """What nobody has claimed of `tensors` is a buffer for a transfer."""
        if isinstance(tensors, list | tuple):
            for each in tensors:
                self._carries(each)
        elif isinstance(tensors, torch.Tensor) and (storage := self._storage(tensors)):
            storage.category = storage.category or "workspace"

    def _let_go(self) -> None:
        """Gloo's thread holds what it worked on a moment longer than the transfer takes; wait for that moment's end.

        A group's thread does one thing after the other (`process_group.real_rank` gives it no second), so once it has begun
        another it has let go of the last. Without this, frees would be late by chance.
        """
        if self._sent is None:
            return
        group, self._sent = self._sent, None
        with _disable_current_modes():
            group.allreduce([torch.zeros(1)]).wait()

    def _settle(self) -> None:
        """A recomputed piece of the forward pass has ended: what is still held of it was kept for its backward pass."""
        for storage in self.recomputed:
            if storage.alive:
                storage.category = storage.category or "activations"
        self.recomputed.clear()

    def _round(self, size: int) -> int:
        return -(-size // self.round_to) * self.round_to


@contextmanager
def _resizes_seen(seen: Callable[[torch.UntypedStorage], None]):
    """While entered, `seen` is told of each storage that Python resizes; no dispatch mode is."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        seen(storage)
        return result

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain


def _generator_states_seen(seen: Callable[[torch.Tensor, str], None]):
    """A context in which `seen` is told of each state of the CPU's generator that Python asks for; no dispatch mode is.

    A checkpoint keeps one (5,056 bytes). They are the host's, as is that of a GPU's generator (`torch.cuda.get_rng_state`).
    """
    plain = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = plain()
        seen(state, "get_rng_state")
        return state

    return patch.object(torch, "get_rng_state", get_rng_state)


@contextmanager
def _shapes_unseen(tracker: Tracker):
    """While entered, `tracker` sleeps whenever DTensor runs an operator on fake tensors to learn its result's shape."""
    propagator = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if propagator is None:
        yield
        return
    kind = propagator.ShardingPropagator
    plain = kind._propagate_tensor_meta_non_cached

    def unseen(*args: Any) -> Any:
        tracker.asleep = True
        try:
            return plain(*args)
        finally:
            tracker.asleep = False

    kind._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        kind._propagate_tensor_meta_non_cached = plain


def _accumulates(held: Any, new: Any, **options: Any) -> bool:
    """Whether autograd adds `new` to a gradient that only its own buffer holds, which it does in place.

    It does so unless a dispatch mode is active (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp), and
    this tracker is one: without this, each residual connection would hold one gradient more than without a tracker.
    Two hold the storage here: the tensor, and the handle that is asked.
    """
    if torch.is_grad_enabled() or options or not isinstance(new, torch.Tensor) or held.layout in SPARSE:
        return False
    storage = held.untyped_storage()
    dense = held.nbytes == storage.nbytes()
    return dense and held.shape == new.shape and held.dtype == new.dtype and _storage_Use_Count(storage._cdata) == 2


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _beneath(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold the memory of `tensor`: itself, what a wrapper such as DTensor wraps, or a sparse one's
    indices and values."""
    if tensor.layout not in (torch.strided, torch.jagged):
        return [getattr(tensor, part)() for part in SPARSE.get(tensor.layout, ())]
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]
    return [inner for each in held if isinstance(each, torch.Tensor) for inner in _beneath(each)]  # a mesh is no tensor
