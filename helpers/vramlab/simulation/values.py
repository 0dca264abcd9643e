"""What a simulated step of any module knows of values: those of its batch, its buffers, and what follows from them.

Lengths, masks and counters decide sizes, so small tensors keep their real content beside the fake one, and operators on
such tensors alone are also run for real. What is read without being known is taken as one, and noted.
"""

import contextlib
import linecache
import math
import os
import traceback
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ..tracking.tracker import SPARSE
from . import sparse
from .operators import is_cuda

aten = torch.ops.aten
LIMIT = 2**16  # elements of a tensor whose content is kept
LARGEST = 2**30  # bytes that an operator without a fake kernel may be given as zeros
BY_SHAPE = {  # whose results do not depend on the content of their tensors
    name for fill in ("zeros", "ones", "full", "empty") for name in (fill, f"{fill}_like", f"new_{fill}")
}
BY_CONTENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
UNFAKED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
TORCH, HERE = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep
STEP = tuple(HERE + os.path.join(*name) for name in (
    ("training", ""), ("tracking", "tracked.py"), ("simulation", "any_module.py")))  # fmt: skip


class ValueNeeded(Exception):
    """An operator whose result's size depends on content that nobody knows."""


class Values:
    """Runs operators on fake tensors, and on the content of those whose content is known, of up to `limit` elements."""

    def __init__(self, mode: FakeTensorMode, limit: int = LIMIT):
        self.mode, self.limit, self._reads = mode, max(limit, LIMIT), 0
        self.notes: list[str] = []  # a sentence for each line that read an unknown value

    def know(self, fakes: Iterable[torch.Tensor], reals: Iterable[torch.Tensor]) -> None:
        """Give each of `fakes` the content of the real tensor at its place, where that is small and needs no gradient."""
        for fake, real in zip(fakes, reals, strict=True):
            if sparse.is_sparse(real) and isinstance(fake, FakeTensor):
                sparse.know(fake, real)
            elif real.layout in SPARSE:
                self.note(f"a {real.layout} tensor, and what is made of it, is counted as empty: give it as sparse_coo")
            plain = real.layout == torch.strided and real.device.type == "cpu" and not real.requires_grad
            if plain and real.numel() <= self.limit and not isinstance(real, FakeTensor):
                with _disable_current_modes():
                    fake._content = real.detach().to(fake.dtype, copy=True)

    def faked(self, batch: dict[str, Any], device: str) -> dict[str, Any]:
        """The real CPU tensors of `batch` as fake ones on `device`, where each has a storage of its own unless that is the
        CPU they are on, with their content."""
        fakes = {}
        for name, real in batch.items():
            if isinstance(fakes.setdefault(name, real), torch.Tensor):
                with _disable_current_modes():
                    moved = real.clone() if is_cuda() else real
                fakes[name] = self.mode.from_tensor(moved, static_shapes=True).to(device)
                self.know([fakes[name]], [real])
        return fakes

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
        return self._guess(guess, where)

    def run(self, func: Any, args: tuple, kwargs: dict, where: str) -> Any:
        """The fake result of `func`; with its content, where that of all arguments is known."""
        name = func.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        if sparse.concerns(func, tensors):
            return sparse.run(func, args, kwargs, self)
        known = torch.Tag.nondeterministic_seeded not in func.tags
        known = known and all(self._argument(tensor, name) is not None for tensor in tensors)
        real = bool(tensors) and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if real and known and not func._schema.is_mutable and not name.startswith("lift"):
            with _disable_current_modes():  # of the user's own, or the host's
                return func(*args, **kwargs)
        if real and func._schema.is_mutable and name.endswith("_"):
            return args[0]
        try:
            result = self._faked(func, name, args, kwargs)
        except UNFAKED:
            if func is aten.equal.default and not known:
                return self._guess(True, where)
            return self._from_real(func, name, tensors, args, kwargs, where)
        made = _tensors(result)
        if known and all(tensor.numel() <= self.limit for tensor in made):
            content = _tensors(self._really(func, args, kwargs, lambda tensor: self._argument(tensor, name)))
            _remember(made, content)
        elif func._schema.is_mutable:
            self._lose(func, args, kwargs)
            if name.endswith("_") and torch.is_grad_enabled():
                self._note_view(args[0], where)
        return result

    def _note_view(self, tensor: Any, where: str) -> None:
        """Of real tensors autograd finds the gradient of a view that was written into by AsStridedBackward, which makes
        one of the base's size; fake ones have the view's own backward (torch/csrc/autograd/variable.cpp, grad_fn)."""
        base = tensor._base if isinstance(tensor, torch.Tensor) else None
        written = base is not None and base.requires_grad
        if written and all(frame.f_code is not _pad.__code__ for frame, _ in traceback.walk_stack(None)):
            line, size = user_line(traceback.walk_stack(None)) or where, base.nbytes
            self.note(f"a view is written into ({line}): its backward pass takes {size:,} bytes more for a moment")

    def _argument(self, tensor: torch.Tensor, name: str) -> torch.Tensor | None:
        """The content of an operator's argument; any will do where only its shape counts."""
        real = self.of(tensor)
        if real is None and name in BY_SHAPE and tensor.numel() <= self.limit:
            real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return real

    def _really(self, func: Any, args: tuple, kwargs: dict, content: Any) -> Any:
        """The result of `func` on what `content` gives for its tensors, in place too."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            args, kwargs = tree_map_only(torch.Tensor, content, (args, kwargs))
            return func(*args, **kwargs)

    def _lose(self, func: Any, args: tuple, kwargs: dict) -> None:
        """What `func` writes into, and every view of it, is not known any more: its content is given up."""
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(named.get(argument.name)):
                    if isinstance(tensor, FakeTensor) and (real := self.of(tensor)) is not None:
                        with _disable_current_modes():
                            real.untyped_storage().resize_(0)

    def _faked(self, func: Any, name: str, args: tuple, kwargs: dict) -> Any:
        if name == "index" and any(map(_is_mask, args[1])):
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        elif name == "masked_select" and (mask := self.of(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, mask.shape)
            with _disable_current_modes():
                count = int(mask.sum()) * (math.prod(shape) // max(1, mask.numel()))
            return args[0].new_empty(count)
        return func(*args, **kwargs)

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """An index of `aten.index`; a mask that is known as one fake index for each of its dimensions."""
        if not _is_mask(index) or (mask := self.of(index)) is None:
            return [index]
        with _disable_current_modes():
            count = int(mask.count_nonzero())
        return [torch.empty(count, dtype=torch.int64) for _ in range(mask.dim())]

    def _from_real(self, func: Any, name: str, tensors: list, args: tuple, kwargs: dict, where: str) -> Any:
        """The result of an operator without a fake kernel, from the known content of its whole numbers and zeros."""
        contents = {id(tensor): self.of(tensor) for tensor in tensors}
        unknown = [tensor for tensor in tensors if contents[id(tensor)] is None]
        by_value = name in BY_CONTENT or (name == "index" and any(map(_is_mask, args[1])))
        whole = any(not tensor.is_floating_point() for tensor in unknown)
        if unknown and (by_value or whole or sum(tensor.nbytes for tensor in unknown) > LARGEST):
            raise ValueNeeded(
                f"the size of what aten.{name} returns depends on values that the simulation does not know "
                f"({user_line(traceback.walk_stack(None)) or where or 'in its backward pass'})"
            )

        def real(tensor: torch.Tensor) -> torch.Tensor:
            content = contents[id(tensor)]
            return torch.zeros(tensor.shape, dtype=tensor.dtype) if content is None else content

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            made = self.mode.from_tensor(tensor, static_shapes=True)
            if not unknown and tensor.numel() <= self.limit:
                made._content = tensor
            return made

        result = self._really(func, args, kwargs, real)
        if name == "_pack_padded_sequence":  # kernels of packed sequences read the batch sizes, which are the host's
            return self.mode.from_tensor(result[0], static_shapes=True), result[1]
        return tree_map_only(torch.Tensor, fake, result)

    def _guess(self, guess: Any, where: str) -> Any:
        line = user_line(traceback.walk_stack(None)) or where
        note = f"a value that the simulation does not know is read, and taken as {guess} ({line})"
        if line.startswith("lbfgs.py"):
            note = (
                "LBFGS decides by values when to stop: it is simulated as if it never converged, which takes the most"
            )
            self._reads += 1  # losses that fall from read to read, steps that lead downhill
            guess = "ys" in line if isinstance(guess, bool) else 1 / self._reads
        if line:
            self.note(note)
        return guess


@contextlib.contextmanager
def readable_values() -> Iterator[None]:
    """While entered, two functions of torch that read a fake tensor's storage are made of operators:
    `pad_packed_sequence`, and `torch.tensor` of a list with tensors in it."""
    real = torch.tensor

    def numbers(tensor: FakeTensor) -> Any:
        return [*map(numbers, tensor)] if tensor.dim() else tensor.item()

    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        return real(tree_map_only(FakeTensor, numbers, data) if isinstance(data, list) else data, **kwargs)

    with patch.object(torch._VF, "_pad_packed_sequence", _pad, create=True), patch.object(torch, "tensor", tensor):
        yield


def _pad(data, batch_sizes, batch_first, padding_value, total_length):
    """As `_pad_packed_sequence` in aten/src/ATen/native/PackedSequence.cpp."""
    with _disable_current_modes():
        sizes = [*batch_sizes.tolist(), 0]
        lengths = torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])])
    shape = (max(total_length, len(sizes) - 1), sizes[0], *data.shape[1:])
    output, start, since = data.new_full(shape, padding_value), 0, 0
    for i, (size, following) in enumerate(pairwise(sizes), 1):
        if size != following:
            end = start + size * (i - since)
            part = data[start:end].view(i - since, size, *data.shape[1:])
            output[since:i, :size].copy_(part)
            start, since = end, i
    return (output.transpose(0, 1) if batch_first else output), lengths


def reason_at(error: Exception, whole: bool = False) -> str:
    """What `error` says (its first line unless `whole`), and the user's line that it came from."""
    text = str(error).replace("\n", " ")
    if not whole:
        text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    line = user_line(list(traceback.walk_tb(error.__traceback__))[::-1])
    return f"{text} ({line})" if line else text


def user_line(frames: Iterable[tuple[Any, int]]) -> str:
    """File, line and text of the innermost of `frames` (as `traceback.walk_stack` gives them) that is not torch's, or ""."""
    for frame, number in frames:
        file = frame.f_code.co_filename
        lbfgs = file.startswith(TORCH + "optim") and file.endswith("lbfgs.py")  # its line search decides by values
        if file.startswith(STEP) and not lbfgs:
            return ""
        if lbfgs or (not file.startswith((TORCH, HERE, "<")) and not file.endswith("contextlib.py")):
            text = linecache.getline(file, number).strip()
            name = "a cell" if "ipykernel" in file else os.path.basename(file)
            return f"{name}, line {number}" + (f": {text}" if text else "")
    return ""


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _remember(made: Iterable[torch.Tensor], content: Iterable[torch.Tensor]) -> None:
    for fake, real in zip(made, content, strict=True):
        if isinstance(fake, FakeTensor) and fake.shape == real.shape and real.layout == torch.strided:
            fake._content = real
