"""Follows every storage from birth to free, and knows what it was for.

A storage is a block of memory; tensors are views of it. `Tracker` is a dispatch mode: it sees the results of every
operator, notes each storage it has not met, and hears from Python's garbage collector when the storage goes. The log of
births and frees is replayed afterwards, because what a storage is *for* is often known only later: a gradient is an
anonymous result until autograd hands it to its parameter. It works the same on fake, CPU and CUDA tensors.

Prior art: `torch.distributed._tools.mem_tracker.MemTracker`, which decides the category at birth.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from .report import Bytes, Moment, Phase, Tensor

ATTRIBUTED = ("parameters", "gradients", "optimizer_states", "activations", "temporaries", "buffers", "inputs", "workspace")
INDEX = {name: i for i, name in enumerate(ATTRIBUTED)}


class Storage:
    """One block of memory: its size in bytes, what it is for, and what made it."""

    __slots__ = ("alive", "category", "dtype", "op", "ref", "shape", "size", "where")

    def __init__(self, size: int, category: str | None, op: str, tensor: torch.Tensor | None, where: str = ""):
        self.size, self.category, self.op, self.where, self.alive = size, category, op, where, True
        self.shape = tuple(tensor.shape) if tensor is not None else ()
        self.dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
        self.ref = None


class Tracker(TorchDispatchMode):
    """Logs births and frees of storages while it is entered. Enter it inside a FakeTensorMode, not around it.

    Args:
        device: count storages of this device type only ("cpu" or "cuda").
        round_to: sizes are rounded up to a multiple of this many bytes, as the allocator of `target` does.
        scratch: what an operator's kernel needs besides its results while it runs: a function of the operator's name and
            arguments to bytes.
    """

    def __init__(self, device: str = "cpu", round_to: int = 1, scratch: Callable[..., int] | None = None):
        super().__init__()
        self.device, self.round_to, self.scratch = device, round_to, scratch
        self.live: dict[int, Storage] = {}
        self.log: list[tuple[int, Storage, str]] = []  # (+size or -size, storage, operator)
        self.marks: list[tuple[int, str]] = []  # (position in the log, phase that begins there)
        self.phase = "load"
        self.recomputed: list[Storage] = []
        self.constant: dict[torch.dtype, Any] = {}
        self._names: dict[int, str] = {}
        self._stack: list[str] = []

    # --- what the caller says -------------------------------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """A phase begins. Leaving "forward", what it made and still holds is kept for the backward pass: activations."""
        self._settle()
        if self.phase == "forward":
            for storage in self.live.values():
                storage.category = storage.category or "activations"
        self.phase = phase
        self.marks.append((len(self.log), phase))

    def claim(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """These tensors' storages are, and always were, of `category`. Storages not met before are born now."""
        for tensor in tensors:
            for inner in _beneath(tensor):
                if inner.device.type != self.device:
                    continue
                storage = self.live.get(inner.untyped_storage()._cdata) or self._born(inner, "given")
                if storage:
                    storage.category = category

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors live on another device than the one described (the host's step counters): leave them out."""
        for tensor in tensors:
            storage = self.live.pop(tensor.untyped_storage()._cdata, None)
            if storage:
                self.log = [event for event in self.log if event[1] is not storage]

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

    # --- what the dispatcher says ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype in self.constant:
            return self.constant[args[0].dtype]  # a fake tensor has no value to read
        if self.recomputed and not torch.is_grad_enabled():
            self._settle()
        name = func.overloadpacket._qualified_op_name.rpartition("::")[2]
        extra = self.scratch(name, args) if self.scratch else 0
        if extra:
            block = Storage(self._round(extra), "workspace", name, None)
            self.log.append((block.size, block, name))
        result = func(*args, **kwargs)
        self._see(result, name)
        if extra:
            self.log.append((-block.size, block, name))
        return result

    def _see(self, result: Any, op: str) -> None:
        if isinstance(result, torch.Tensor):
            for tensor in _beneath(result):
                if tensor.device.type == self.device and tensor.untyped_storage()._cdata not in self.live:
                    self._born(tensor, op)
        elif isinstance(result, list | tuple):
            for item in result:
                self._see(item, op)

    def _born(self, tensor: torch.Tensor, op: str) -> Storage | None:
        handle = tensor.untyped_storage()
        size = self._round(handle.nbytes())
        if not size:
            return None
        key = handle._cdata
        storage = Storage(size, None, op, tensor, self._stack[-1] if self._stack else "")
        storage.ref = weakref.ref(handle, lambda _, key=key: self._freed(key))
        self.live[key] = storage
        self.log.append((size, storage, op))
        if self.phase == "backward" and torch.is_grad_enabled():
            self.recomputed.append(storage)
        return storage

    def _freed(self, key: int) -> None:
        storage = self.live.pop(key, None)
        if storage:
            storage.alive = False
            self.log.append((-storage.size, storage, "free"))

    def _settle(self) -> None:
        """A recomputed piece of the forward pass has ended: what is still held of it was kept for its backward pass."""
        for storage in self.recomputed:
            if storage.alive:
                storage.category = storage.category or "activations"
        self.recomputed.clear()

    def _round(self, size: int) -> int:
        return -(-size // self.round_to) * self.round_to


def _beneath(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold the memory of `tensor`: itself, or what a wrapper such as DTensor wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _beneath(getattr(tensor, name))]




class History:
    """A replayed log. `totals[i]` are the bytes by category after event `i`; phases are the stretches between marks."""

    def __init__(self, log: list[tuple[int, Storage, str]], marks: list[tuple[int, str]]):
        self.log, self.marks = list(log), list(marks)  # frees go on being logged while the run is torn down
        self.live: list[int] = []
        total = 0
        for size, _, _ in log:
            total += size
            self.live.append(total)

    def stretches(self) -> list[tuple[str, int, int]]:
        """(phase, first event, one past the last event), in order; the first is "load"."""
        starts = [(0, "load"), *self.marks]
        ends = [position for position, _ in self.marks] + [len(self.log)]
        return [(name, start, end) for (start, name), end in zip(starts, ends, strict=True)]

    def split(self, position: int) -> Bytes:
        """Bytes by category just before event `position`, that is after the first `position` events."""
        totals = [0] * len(ATTRIBUTED)
        for size, storage, _ in self.log[:position]:
            totals[INDEX[storage.category or "temporaries"]] += size
        return Bytes(**dict(zip(ATTRIBUTED, totals, strict=True)))

    def peak_position(self, start: int, end: int) -> int:
        """The position in start…end at which most is alive (the first such)."""
        best, at = (self.live[start - 1] if start else 0), start
        for i in range(start, end):
            if self.live[i] > best:
                best, at = self.live[i], i + 1
        return at

    def last_step(self) -> list[tuple[str, int, int]]:
        """The stretches of the last optimizer step: from its first "forward" to its "between_steps"."""
        stretches = self.stretches()
        first = 0
        for i, (name, _, _) in enumerate(stretches):
            if name == "forward" and (i == 0 or stretches[i - 1][0] in ("load", "between_steps")):
                first = i
        return stretches[first:]

    def phases(self) -> dict[str, Phase]:
        """Each phase of the last step (the highest of its micro-batches), and "load"."""
        stretches = self.stretches()
        load = self.split(stretches[0][2])
        phases = {"load": Phase(load, load)}
        for name, start, end in self.last_step():
            peak, last = self.split(self.peak_position(start, end)), self.split(end)
            if name in phases and phases[name].peak.total >= peak.total:
                peak = phases[name].peak
            phases[name] = Phase(peak, last)
        return phases

    def largest(self, position: int, count: int = 8) -> list[Tensor]:
        """The largest storages alive at `position`; equal ones are counted together."""
        alive: dict[int, Storage] = {}
        for size, storage, _ in self.log[:position]:
            if size > 0:
                alive[id(storage)] = storage
            else:
                alive.pop(id(storage), None)
        groups: dict[tuple, list[Storage]] = {}
        for s in alive.values():
            category = s.category or "temporaries"
            groups.setdefault((s.size, category, s.shape, s.dtype, s.op), []).append(s)
        ranked = sorted(groups.items(), key=lambda item: (-item[0][0] * len(item[1]), item[0][1:3]))
        return [Tensor(*key, where=group[0].where, count=len(group)) for key, group in ranked[:count]]

    def timeline(self, points: int = 400) -> list[Moment]:
        """The last step as at most about `points` moments: every high and low that shows at that resolution."""
        step = self.last_step()
        begin, end = step[0][1], step[-1][2]
        phase_at = {start: name for name, start, _ in step}
        chosen = {begin, end, *(s for _, s, _ in step)}
        width = max(1, (end - begin) * 2 // points)
        for left in range(begin, end, width):
            window = range(left, min(left + width, end))
            chosen.add(max(window, key=self.live.__getitem__) + 1)
            chosen.add(min(window, key=self.live.__getitem__) + 1)
        totals, moments, name = [0] * len(ATTRIBUTED), [], ""
        for position in range(end + 1):
            name = phase_at.get(position, name)
            if position >= begin and position in chosen:
                moments.append(Moment(position - begin, name, Bytes(**dict(zip(ATTRIBUTED, totals, strict=True)))))
            if position < end:
                size, storage, _ = self.log[position]
                totals[INDEX[storage.category or "temporaries"]] += size
        return moments
