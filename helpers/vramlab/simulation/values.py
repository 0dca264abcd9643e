"""What a simulated step of any module knows of values.

Those are the values of its batch, its buffers, and what follows from them. Lengths, masks and
counters decide sizes, so small tensors keep their real content beside the fake one, and operators
on such tensors alone are also run for real. What is read without being known is taken as one, and
noted.
"""

import contextlib
import copy
import linecache
import os
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..base.versions import version_trouble
from ..private.of_fake_tensors import (
    UNFAKED,
    FakeCopyMode,
    FakeTensor,
    backward_hooks,
    base_of,
    is_of_functorch,
    run_fake,
    schema_of,
    without_functions,
)
from ..private.of_torch import (
    accumulation_hooks,
    is_traceable_wrapper_subclass,
    tree_leaves,
    tree_map_only,
    without_modes,
)
from ..private.patched import plain, replaced
from ..tracking.tensors import plain_tensors
from .fake_mode import RuledFakeMode

LIMIT = 2**16  # elements of a tensor whose content is kept
NUMBERS = {int, float, bool}
NEVER_REAL = {FakeTensor, type(None), torch.dtype, torch.device, *NUMBERS}
TORCH = os.path.dirname(torch.__file__) + os.sep
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Values:
    """Runs operators on fake tensors, and on the content of those whose content is known.

    Contents are of up to `limit` elements.
    """

    def __init__(self, mode: RuledFakeMode, limit: int = LIMIT) -> None:
        self.mode = mode
        self.limit = max(limit, LIMIT)
        self.notes: list[str] = []  # a sentence for each line that read an unknown value
        # fake tensors by the real one, as long as that is there
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # those that modules hold, as long as they do, by the real one's id
        self._placed: dict[int, weakref.ref] = {}
        # modules with fake tensors, and the attributes they had
        self._before: list[tuple[torch.nn.Module, dict]] = []
        # gradients of real leaves of the step's graph
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def stand_in(self, real: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the fake CPU tensor for `real`, made once, with its hooks.

        It is of `dtype` if it is floating.
        """
        if not _is_real(real):
            return real
        placed = self._placed.get(id(real))
        fake = placed() if placed else self._made.get(real)
        if fake is not None:
            return fake
        # Unseen by the tracker: a stand-in is counted when the step takes it, not when it is made.
        with without_functions(), without_modes(), self.mode:
            fake = self._new_stand_in(real, dtype)
            self._made[real] = fake
        return fake

    def _new_stand_in(self, real: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        fake: torch.Tensor = self.mode.from_tensor(real, static_shapes=True)
        # `from_tensor` also makes a fake of the gradient, and a step begins without.
        fake.grad = None
        # torch's has no more than the elements of a tensor that is no view
        room = real.untyped_storage().nbytes()
        if fake.untyped_storage().nbytes() < room:
            fake.untyped_storage().resize_(room)
        dtype = dtype if dtype and real.is_floating_point() else real.dtype
        if (fake.device.type, fake.dtype) != ("cpu", dtype):
            moved = torch.empty_like(fake, device="cpu", dtype=dtype)
            if isinstance(fake, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, fake.requires_grad)
            fake = moved
        for hook in (backward_hooks(real) or {}).values():
            fake.register_hook(hook)
        for hook in (accumulation_hooks(real) or {}).values():
            fake.register_post_accumulate_grad_hook(hook)
        self.know(fake, real)
        # an autograd.Function takes the real one
        if real.requires_grad and real.is_leaf:
            self._gradients.append((real, real.grad))
        return fake

    def stand_ins(self, values: Any) -> Any:
        """Return `values` with fake tensors in the place of real ones."""
        if not _has_real(values):
            return values
        return tree_map_only(torch.Tensor, self.stand_in, values)

    def copied(self, value: Any) -> Any:
        """Return a copy of `value` with fake tensors."""
        memo = {}
        for key, reference in self._placed.items():
            fake = reference()
            if fake is not None:
                memo[key] = fake
        for real, fake in self._made.items():
            memo[id(real)] = fake
        with FakeCopyMode(self.mode):
            return copy.deepcopy(value, memo)

    def take_place(self, module: torch.nn.Module) -> None:
        """Put fake tensors in the place of all real ones that the modules in `module` hold.

        The fake ones stay until `restore`.
        """
        # `functional_call` writes what the module holds afterwards into the caller's own mapping
        for frame, _ in traceback.walk_stack(None):
            if frame.f_code.co_filename == stateless.__file__:
                return
        known = {id(part) for part, _ in self._before}
        for part in module.modules():
            attributes = dict(vars(part))
            tensors = _tensors(attributes)
            is_made_in_step = any(isinstance(tensor, FakeTensor) for tensor in tensors)
            if id(part) in known or is_made_in_step:
                continue
            self._before.append((part, attributes))
            vars(part).update(tree_map_only(torch.Tensor, self.stand_in, attributes))
            for tensor in tensors:
                # The module holds it now; held here too, it would outlive a step that lets go of
                # it.
                fake = self._made.pop(tensor, None)
                if fake is not None:
                    self._placed[id(tensor)] = weakref.ref(fake)

    def restore(self) -> None:
        """Give modules and real tensors back what they had."""
        for module, attributes in self._before:
            vars(module).clear()
            vars(module).update(attributes)
        for real, gradient in self._gradients:
            real.grad = gradient

    def know(self, fake: Any, real: torch.Tensor) -> None:
        """Give `fake` the content of `real`, where that is small and needs no gradient."""
        is_small = real.numel() <= self.limit
        if is_small and real.device.type == "cpu" and not real.requires_grad:
            with without_modes():
                fake.vramlab_content = real.to(fake.dtype, copy=True)

    def faked(self, device: str, real: torch.Tensor) -> torch.Tensor:
        """Return a real CPU tensor as a fake one on `device`, with its content.

        On a GPU it has a storage of its own.
        """
        with without_modes():
            moved = real.clone() if self.mode.target == "cuda" else real
        fake = self.mode.from_tensor(moved, static_shapes=True).to(device)
        self.know(fake, real)
        return fake

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the content of `tensor` if it is known, as a real tensor to be left alone."""
        if not isinstance(tensor, FakeTensor):
            with without_modes():
                return tensor.detach().clone() if tensor.numel() <= self.limit else None
        real = getattr(tensor, "vramlab_content", None)
        if real is None:
            return None
        # `_written` has given it up
        is_lost = real.numel() and not real.untyped_storage().nbytes()
        return None if is_lost else real

    def read(self, tensor: torch.Tensor, guess: Any, where: str) -> Any:
        """Return what `tensor.item()` gives: its value if it is known, else `guess`.

        A guess is noted.
        """
        real = self.of(tensor)
        if real is not None:
            with without_modes():
                return real.item()
        line = user_line(traceback.walk_stack(None)) or where
        if line:
            what = "a value that the simulation does not know is read"
            self._note(f"{what}, and taken as {guess} ({line})")
        return guess

    def run(
        self,
        func: Any,
        args: tuple,
        kwargs: dict,
        where: str,
    ) -> Any:
        """Return the fake result of `func`; with its content, where all arguments' is known."""
        # Asked before the operator runs, which may write into its arguments.
        has_unknown = self._has_unknown((args, *kwargs.values()))
        # The result of a mask is as long as the mask has ones, which a fake mask does not say.
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], self._all_places(args[1]))
        try:
            result = run_fake(func, args, kwargs)
        except UNFAKED:
            if has_unknown:
                raise
            fake_of = partial(self.faked, "cpu")
            return tree_map_only(torch.Tensor, fake_of, self._really(func, args, kwargs))
        if not has_unknown and self._may_be_run(func, _tensors(result)):
            contents = _tensors(self._really(func, args, kwargs))
            for fake, real in zip(_tensors(result), contents, strict=True):
                if isinstance(fake, FakeTensor) and fake.shape == real.shape:
                    _set_content(fake, real)
        elif schema_of(func).is_mutable:
            # An operator that writes does so into its first argument, or into `out`.
            self._written(_tensors((args[:1], kwargs.get("out"))), where)
        return result

    def _has_unknown(self, values: Any) -> bool:
        """Tell whether there is a tensor of unknown content in nested sequences."""
        if isinstance(values, torch.Tensor):
            return self.of(values) is None
        return isinstance(values, list | tuple) and any(map(self._has_unknown, values))

    def _may_be_run(self, func: Any, made: list[torch.Tensor]) -> bool:
        """Tell whether an operator that makes these tensors may be run for real, too."""
        # Random numbers are not run for real: they would move the user's generator.
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        return not is_drawn and all(tensor.numel() <= self.limit for tensor in made)

    def _really(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of `func` on the content of its tensors, in place too."""
        with without_modes(), without_functions(), torch.no_grad():
            given = args, tuple(kwargs.items())
            args, options = _changed(given, torch.Tensor, self.of)
            return func(*args, **dict(options))

    def _written(self, tensors: list[torch.Tensor], where: str) -> None:
        """Give up the content of `tensors` that were written into, and of every view of them.

        Of real tensors autograd finds the gradient of such a view by AsStridedBackward, which makes
        one of the base's size; fake ones have the view's own backward
        (torch/csrc/autograd/variable.cpp, grad_fn).
        """
        for tensor in tensors:
            real = self.of(tensor) if isinstance(tensor, FakeTensor) else None
            if real is not None:
                with without_modes():
                    real.untyped_storage().resize_(0)
            base = base_of(tensor)
            if base is not None and base.requires_grad and torch.is_grad_enabled():
                line = user_line(traceback.walk_stack(None)) or where
                self._note(
                    f"a view is written into ({line}): its backward pass takes {base.nbytes:,} "
                    "bytes more for a moment",
                )

    def _all_places(self, indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the indices of `aten.index`.

        A mask that is known becomes one fake index for each of its dimensions.
        """
        places: list[torch.Tensor | None] = []
        for index in indices:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            mask = self.of(index) if index is not None and is_mask else None
            if mask is None:
                places.append(index)
                continue
            with without_modes():
                coordinates = mask.nonzero().unbind(-1)
            for coordinate in coordinates:
                places.append(self.faked("cpu", coordinate))
        return places

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _set_content(fake: Any, real: torch.Tensor) -> None:
    fake.vramlab_content = real


class StandIns(TorchFunctionMode):
    """While entered, give torch's functions the fake tensor for a real one, and autograd too.

    A loss or a hook may hold real ones.
    """

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        args, kwargs = self.values.stand_ins((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def readable_values() -> Iterator[None]:
    """While entered, let `torch.tensor` take a list with fake tensors in it.

    torch itself would read their storage, which has no content. What is known of a fake tensor is
    read at once, not by element.
    """
    make = plain(torch, "tensor")
    read = plain(FakeTensor, "tolist")

    def tolist(fake: Any) -> Any:
        real = getattr(fake, "vramlab_content", None)
        if real is None or not real.untyped_storage().nbytes():
            return read(fake)
        with without_functions(), without_modes():
            return real.tolist()

    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list):
            data = _changed(data, FakeTensor, FakeTensor.tolist)
        return make(data, **kwargs)

    with replaced(torch, "tensor", tensor), replaced(FakeTensor, "tolist", tolist):
        yield


def _changed(values: Any, kind: type, change: Callable) -> Any:
    """Return nested sequences as lists, with what `change` makes of all of a kind.

    `tree_map_only` takes ten times as long.
    """
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, list | tuple):
        if NUMBERS.issuperset(map(type, values)):  # a row of a batch has thousands
            return values
        return [_changed(value, kind, change) for value in values]
    return values


def reason_at(error: Exception) -> str:
    """Return the first line of what `error` says, and the user's line that it came from.

    Libraries in untested versions are named too.
    """
    said = str(error).strip() or type(error).__name__
    text = said.splitlines()[0].rstrip(".")
    if "Couldn't swap" in text:
        text = (
            "a module is cast or moved inside the step, which swaps its parameters, and fake "
            "ones cannot be swapped"
        )
    outermost_first = list(traceback.walk_tb(error.__traceback__))
    line = user_line(reversed(outermost_first))
    return (f"{text} ({line})" if line else text) + version_trouble()


def user_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return file, line and text of the innermost of `frames` that is not torch's, or "".

    The frames are as `traceback.walk_stack` gives them.
    """
    for frame, number in frames:
        file = frame.f_code.co_filename
        # it calls the module: outside is the call of `simulate`
        if file.startswith(HERE + "training"):
            return ""
        if not file.startswith((TORCH, HERE, "<")) and not file.endswith("contextlib.py"):
            name = "a cell" if "ipykernel" in file else os.path.basename(file)
            return f"{name}, line {number}: {linecache.getline(file, number).strip()}"
    return ""


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _is_real(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` is neither fake nor what wraps one.

    That is what `torch.func` makes, or a class such as torchao's for states of 8 bits.
    """
    if isinstance(tensor, FakeTensor) or is_of_functorch(tensor):
        return False
    if is_traceable_wrapper_subclass(tensor):
        return any(map(_is_real, plain_tensors([tensor])))
    return True


def _has_real(values: Any) -> bool:
    """Tell whether there is a tensor in nested sequences and mappings that is not fake."""
    if type(values) in NEVER_REAL:
        return False
    if isinstance(values, torch.Tensor):
        return _is_real(values)
    if isinstance(values, dict):
        return any(map(_has_real, values.values()))
    return isinstance(values, list | tuple) and any(map(_has_real, values))
