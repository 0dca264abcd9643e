"""What a simulated step of any module knows of values: those of its batch, its buffers, and what follows from them.

Lengths, masks and counters decide sizes, so small tensors keep their real content beside the fake one, and operators on
such tensors alone are also run for real. What is read without being known is taken as one, and noted.
"""

import contextlib
import linecache
import os
import traceback
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .operators import is_cuda

LIMIT = 2**16  # elements of a tensor whose content is kept
LARGEST = 2**30  # bytes that an operator without a fake kernel may be given as zeros
BAGS = ("_embedding_bag", "_embedding_bag_forward_only")  # whose kernels make indices of other sizes
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
BY_CONTENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
TORCH, HERE = os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep


class NotSimulated(Exception):
    """An operator whose result depends on content that nobody knows, or is sparse."""


UNFAKED = (
    NotSimulated,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)


class Values:
    """Runs operators on fake tensors, and on the content of those whose content is known, of up to `limit` elements."""

    def __init__(self, mode: FakeTensorMode, limit: int = LIMIT):
        self.mode, self.limit = mode, max(limit, LIMIT)
        self.notes: list[str] = []  # a sentence for each line that read an unknown value

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Give `fake` the content of `real`, where that is small, on the CPU and needs no gradient."""
        plain = real.layout == torch.strided and real.device.type == "cpu" and not real.requires_grad
        if plain and real.numel() <= self.limit and not isinstance(real, FakeTensor):
            with _disable_current_modes():
                fake._content = real.detach().to(fake.dtype, copy=True)

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
        name, tensors = func.overloadpacket.__name__, _tensors((args, kwargs))
        known = torch.Tag.nondeterministic_seeded not in func.tags and all(self.of(t) is not None for t in tensors)
        try:
            result = self._faked(func, name, args, kwargs)
        except UNFAKED:
            return self._from_real(func, name, tensors, args, kwargs)
        made = _tensors(result)
        if name in BAGS or any(tensor.layout in SPARSE for tensor in (*tensors, *made)):
            raise NotSimulated(f"aten.{name}: neither sparse tensors nor embedding bags are simulated")
        if known and all(tensor.numel() <= self.limit for tensor in made):
            for fake, real in zip(made, _tensors(self._really(func, args, kwargs, self.of)), strict=True):
                if isinstance(fake, FakeTensor) and fake.shape == real.shape:
                    fake._content = real
        elif func._schema.is_mutable:
            self._lose(func, args, kwargs)
            if name.endswith("_") and torch.is_grad_enabled():
                self._note_view(args[0], where)
        return result

    def _note_view(self, tensor: Any, where: str) -> None:
        """Of real tensors autograd finds the gradient of a view that was written into by AsStridedBackward, which makes
        one of the base's size; fake ones have the view's own backward (torch/csrc/autograd/variable.cpp, grad_fn)."""
        base = tensor._base if isinstance(tensor, torch.Tensor) else None
        if base is not None and base.requires_grad:
            line, size = user_line(traceback.walk_stack(None)) or where, base.nbytes
            self._note(f"a view is written into ({line}): its backward pass takes {size:,} bytes more for a moment")

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
        """The result of `func` without content; the count of a known mask is its result's size."""
        if name == "index":
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        elif name == "masked_select" and (mask := self.of(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, mask.shape)
            with _disable_current_modes():
                count = int(mask.expand(shape).sum())
            return args[0].new_empty(count)
        return func(*args, **kwargs)

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """An index of `aten.index`; a mask that is known as one fake index for each of its dimensions."""
        if not _is_mask(index) or (mask := self.of(index)) is None:
            return [index]
        with _disable_current_modes():
            count = int(mask.count_nonzero())
        return [torch.empty(count, dtype=torch.int64) for _ in range(mask.dim())]

    def _from_real(self, func: Any, name: str, tensors: list, args: tuple, kwargs: dict) -> Any:
        """The result of an operator without a fake kernel, from the known content of its whole numbers and zeros."""
        unknown = [tensor for tensor in tensors if self.of(tensor) is None]
        by_value = name in BY_CONTENT or (name == "index" and any(map(_is_mask, args[1])))
        whole = any(not tensor.is_floating_point() for tensor in unknown)
        if unknown and (by_value or whole or sum(tensor.nbytes for tensor in unknown) > LARGEST):
            raise NotSimulated(f"what aten.{name} returns depends on values that the simulation does not know")

        def real(tensor: torch.Tensor) -> torch.Tensor:
            content = self.of(tensor)
            return torch.zeros(tensor.shape, dtype=tensor.dtype) if content is None else content

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            made = self.mode.from_tensor(tensor, static_shapes=True)
            if not unknown and tensor.numel() <= self.limit:
                made._content = tensor
            return made

        return tree_map_only(torch.Tensor, fake, self._really(func, args, kwargs, real))

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def readable_values() -> contextlib.AbstractContextManager:
    """While entered, `torch.tensor` takes a list with fake tensors in it, of which it would read the storage."""
    make = torch.tensor

    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        return make(tree_map_only(FakeTensor, FakeTensor.tolist, data) if isinstance(data, list) else data, **kwargs)

    return patch.object(torch, "tensor", tensor)


def reason_at(error: Exception) -> str:
    """The first line of what `error` says, and the user's line that it came from."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    line = user_line(list(traceback.walk_tb(error.__traceback__))[::-1])
    return f"{text} ({line})" if line else text


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


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
