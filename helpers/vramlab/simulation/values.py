"""What a simulated step of any module knows of values: those of its batch, its buffers, and what follows from them.

Lengths, masks and counters decide sizes, so small tensors keep their real content beside the fake one, and operators on
such tensors alone are also run for real. What is read without being known is taken as one, and noted.
"""

import contextlib
import copy
import linecache
import os
import traceback
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ..report.versions import version_trouble
from ..training.patched import plain, replaced
from .operators import is_cuda

LIMIT = 2**16  # elements of a tensor whose content is kept
TORCH, HERE = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep
UNFAKED = (  # operators whose result depends on content that nobody knows
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


class Values:
    """Runs operators on fake tensors, and on the content of those whose content is known, of up to `limit` elements."""

    def __init__(self, mode: FakeTensorMode, limit: int = LIMIT):
        self.mode, self.limit = mode, max(limit, LIMIT)
        self.notes: list[str] = []  # a sentence for each line that read an unknown value
        self._made = WeakIdKeyDictionary()  # fake tensors by the real one, as long as that is there
        self._placed: dict[int, weakref.ref] = {}  # those that modules hold, as long as they do, by the real one's id
        self._before: list[tuple[torch.nn.Module, dict]] = []  # modules with fake tensors, and the attributes they had
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # of real leaves of the step's graph

    def stand_in(self, real: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The fake CPU tensor for `real`, made once, with its hooks; of `dtype` if it is floating."""
        if not _is_real(real):
            return real
        placed = self._placed.get(id(real))
        fake = placed() if placed else self._made.get(real)
        if fake is not None:
            return fake
        with torch._C.DisableTorchFunction(), _disable_current_modes(), self.mode:
            fake = self._made[real] = self._new_stand_in(real, dtype)
        return fake

    def _new_stand_in(self, real: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        fake = self.mode.from_tensor(real, static_shapes=True)
        fake.grad = None
        room = real.untyped_storage().nbytes()  # torch's has no more than the elements of a tensor that is no view
        if fake.untyped_storage().nbytes() < room:
            fake.untyped_storage().resize_(room)
        dtype = dtype if dtype and real.is_floating_point() else real.dtype
        if (fake.device.type, fake.dtype) != ("cpu", dtype):
            moved = torch.empty_like(fake, device="cpu", dtype=dtype)
            fake = torch.nn.Parameter(moved, fake.requires_grad) if isinstance(fake, torch.nn.Parameter) else moved
        for hook in (real._backward_hooks or {}).values():
            fake.register_hook(hook)
        for hook in (real._post_accumulate_grad_hooks or {}).values():
            fake.register_post_accumulate_grad_hook(hook)
        self.know(fake, real)
        if real.requires_grad and real.is_leaf:
            self._gradients.append((real, real.grad))  # an autograd.Function takes the real one
        return fake

    def stand_ins(self, values: Any) -> Any:
        """`values` with fake tensors in the place of real ones."""
        return tree_map_only(torch.Tensor, self.stand_in, values) if _has_real(values) else values

    def copied(self, value: Any) -> Any:
        """A copy of `value` with fake tensors."""
        memo = {key: fake for key, ref in self._placed.items() if (fake := ref()) is not None}
        memo |= {id(real): fake for real, fake in self._made.items()}
        with FakeCopyMode(self.mode):
            return copy.deepcopy(value, memo)

    def take_place(self, module: torch.nn.Module) -> None:
        """Put fake tensors in the place of all real ones that the modules in `module` hold, until `restore`."""
        if any(frame.f_code.co_filename == stateless.__file__ for frame, _ in traceback.walk_stack(None)):
            return  # `functional_call` writes what the module holds afterwards into the caller's own mapping
        known = {id(part) for part, _ in self._before}
        for part in module.modules():
            held = dict(vars(part))
            tensors = _tensors(held)
            if id(part) in known or any(isinstance(tensor, FakeTensor) for tensor in tensors):
                continue  # the latter was made in the step
            self._before.append((part, held))
            vars(part).update(tree_map_only(torch.Tensor, self.stand_in, held))
            for tensor in tensors:
                if (fake := self._made.pop(tensor, None)) is not None:
                    self._placed[id(tensor)] = weakref.ref(fake)

    def restore(self) -> None:
        """Give modules and real tensors back what they had."""
        for module, held in self._before:
            vars(module).clear()
            vars(module).update(held)
        for real, gradient in self._gradients:
            real.grad = gradient

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Give `fake` the content of `real`, where that is small, on the CPU and needs no gradient."""
        if real.numel() <= self.limit and real.device.type == "cpu" and not real.requires_grad:
            with _disable_current_modes():
                fake._content = real.to(fake.dtype, copy=True)

    def faked(self, device: str, real: torch.Tensor) -> torch.Tensor:
        """A real CPU tensor as a fake one on `device`, with its content; on a GPU it has a storage of its own."""
        with _disable_current_modes():
            moved = real.clone() if is_cuda() else real
        fake = self.mode.from_tensor(moved, static_shapes=True).to(device)
        self.know(fake, real)
        return fake

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The content of `tensor` if it is known, as a real tensor to be left alone."""
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return tensor.detach().clone() if tensor.numel() <= self.limit else None
        real = getattr(tensor, "_content", None)
        lost = real is not None and real.numel() and not real.untyped_storage().nbytes()
        return None if lost else real

    def read(self, tensor: torch.Tensor, guess: Any, where: str) -> Any:
        """What `tensor.item()` gives: its value if it is known, else `guess`, which is noted."""
        if (real := self.of(tensor)) is not None:
            with _disable_current_modes():
                return real.item()
        if line := user_line(traceback.walk_stack(None)) or where:
            self._note(f"a value that the simulation does not know is read, and taken as {guess} ({line})")
        return guess

    def run(self, func: Any, args: tuple, kwargs: dict, where: str) -> Any:
        """The fake result of `func`; with its content, where that of all arguments is known."""
        unknown = [tensor for tensor in _tensors((args, kwargs)) if self.of(tensor) is None]
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in self._places(index)])
        try:
            result = func(*args, **kwargs)
        except UNFAKED:
            if unknown:
                raise
            return tree_map_only(torch.Tensor, partial(self.faked, "cpu"), self._really(func, args, kwargs))
        made, known = _tensors(result), not unknown and torch.Tag.nondeterministic_seeded not in func.tags
        if known and all(tensor.numel() <= self.limit for tensor in made):
            for fake, real in zip(made, _tensors(self._really(func, args, kwargs)), strict=True):
                if isinstance(fake, FakeTensor) and fake.shape == real.shape:
                    fake._content = real
        elif func._schema.is_mutable:
            self._written(_tensors((args[:1], kwargs.get("out"))), where)
        return result

    def _really(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The result of `func` on the content of its tensors, in place too."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            args, kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs))
            return func(*args, **kwargs)

    def _written(self, tensors: list[torch.Tensor], where: str) -> None:
        """Give up the content of `tensors` that were written into, and of every view of them.

        Of real tensors autograd finds the gradient of such a view by AsStridedBackward, which makes one of the base's size;
        fake ones have the view's own backward (torch/csrc/autograd/variable.cpp, grad_fn).
        """
        for tensor in tensors:
            if isinstance(tensor, FakeTensor) and (real := self.of(tensor)) is not None:
                with _disable_current_modes():
                    real.untyped_storage().resize_(0)
            if (base := tensor._base) is not None and base.requires_grad and torch.is_grad_enabled():
                line = user_line(traceback.walk_stack(None)) or where
                self._note(
                    f"a view is written into ({line}): its backward pass takes {base.nbytes:,} bytes more for a moment"
                )

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """An index of `aten.index`; a mask that is known as one fake index for each of its dimensions."""
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if not is_mask or (mask := self.of(index)) is None:
            return [index]
        with _disable_current_modes():
            places = mask.nonzero().unbind(-1)
        return [self.faked("cpu", place) for place in places]

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


class StandIns(TorchFunctionMode):
    """While entered, torch's functions get the fake tensor for a real one that a loss or hook holds: so does autograd."""

    def __init__(self, values: Values):
        super().__init__()
        self.values = values

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = self.values.stand_ins((args, kwargs or {}))
        return func(*args, **kwargs)


def readable_values() -> contextlib.AbstractContextManager:
    """While entered, `torch.tensor` takes a list with fake tensors in it, of which it would read the storage."""
    make = plain(torch, "tensor")

    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        return make(tree_map_only(FakeTensor, FakeTensor.tolist, data) if isinstance(data, list) else data, **kwargs)

    return replaced(torch, "tensor", tensor)


def reason_at(error: Exception) -> str:
    """The first line of what `error` says, the user's line that it came from, and libraries in untested versions."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if "Couldn't swap" in text:
        text = "a module is cast or moved inside the step, which swaps its parameters, and fake ones cannot be swapped"
    line = user_line(list(traceback.walk_tb(error.__traceback__))[::-1])
    return (f"{text} ({line})" if line else text) + version_trouble()


def user_line(frames: Iterable[tuple[Any, int]]) -> str:
    """File, line and text of the innermost of `frames` (as `traceback.walk_stack` gives them) that is not torch's, or ""."""
    for frame, number in frames:
        file = frame.f_code.co_filename
        if file.startswith(HERE + "training"):  # which calls the module: outside is the call of `simulate`
            return ""
        if not file.startswith((TORCH, HERE, "<")) and not file.endswith("contextlib.py"):
            name = "a cell" if "ipykernel" in file else os.path.basename(file)
            return f"{name}, line {number}: {linecache.getline(file, number).strip()}"
    return ""


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _is_real(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is neither fake nor what `torch.func` wraps around one."""
    return not isinstance(tensor, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _has_real(values: Any) -> bool:
    """Whether there is a tensor in nested sequences and mappings that is not fake."""
    if isinstance(values, torch.Tensor):
        return _is_real(values)
    if isinstance(values, dict):
        return any(map(_has_real, values.values()))
    return isinstance(values, list | tuple) and any(map(_has_real, values))
