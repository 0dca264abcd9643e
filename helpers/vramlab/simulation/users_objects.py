"""What a loss and its objects hold, remembered before a simulated step and given back after it.

A loss may keep what it makes, as a queue of outputs or a teacher that the first call loads. In a
simulation that is fake, and the user's next real step would find it. Nothing here keeps a tensor's
object alive, whose life the step follows.
"""

import functools
import itertools
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from ..private.of_fake_tensors import FakeTensor
from ..private.of_torch import buffers_of, parameters_of, without_modes

MOST = 50_000  # objects that are looked at, the nearest first
FEW = 1_000
OF_MODULES = vars(torch.nn.Module()).keys()
GONE = object()
LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
NUMBERS_AND_TEXT = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
PLAIN: tuple[type, ...] = (*NUMBERS_AND_TEXT, ModuleType, BuiltinFunctionType, CodeType)
CACHED = type(functools.cache(len))


class Globals(NamedTuple):
    """The global names that a function reads or writes."""

    of: dict[str, Any]
    names: tuple[str, ...]


class Remembered:
    """What can be reached from `roots` as it is now."""

    def __init__(self, *roots: Any):
        self._roots = roots
        self._before = []
        for one in _reached(roots):
            held = _read(one)
            if held or (held is not None and not isinstance(one, torch.nn.Module)):
                self._before.append(
                    (_again(one), {name: _again(value) for name, value in held.items()})
                )

    def restore(self) -> list[str]:
        """Give each object or variable into which a fake tensor has come what it held before.

        Returns the names of those that hold one still.
        """
        for again, ways in self._before:
            one = again()
            if one is not GONE:
                _give_back(one, {name: way() for name, way in ways.items()})
        return sorted({name for one in _reached(self._roots) for name in _fakes_of(one)})


def _give_back(one: Any, before: dict[Any, Any]) -> None:
    now = _read(one)
    assert now is not None  # as it was when `before` was read
    # Only what has been put there since can be of the simulation.
    new = [value for name, value in now.items() if before.get(name, GONE) is not value]
    if isinstance(one, CACHED) and now != before:
        one.cache_clear()
    elif any(isinstance(value, FakeTensor) for value in _reached(new)):
        # What died in the meantime was replaced by something that is not fake, which stays.
        held = {
            name: now.get(name, GONE) if value is GONE else value for name, value in before.items()
        }
        _write(one, {name: value for name, value in held.items() if value is not GONE}, now)


def _again(value: Any) -> Callable[[], Any]:
    """Return a function that gives `value` again, or GONE where nothing holds it any more.

    A tensor, as it is in a step, dies when it is replaced, and is given back as another object of
    the same storage.
    """
    if isinstance(value, torch.Tensor):
        is_plain = type(value) is torch.Tensor and not value.requires_grad
        with without_modes():
            alias = value.data if is_plain else GONE  # detach() would hold `value` as its base
        original = weakref.ref(value)
        return lambda: alias if original() is None else original()
    if isinstance(
        value,
        Globals | CellType | type | FunctionType | CACHED,
    ) or not _may_have_tensors(value):
        return lambda: value
    try:
        original = weakref.ref(value)
    except TypeError:
        return lambda: GONE
    return lambda: GONE if original() is None else original()


def _may_have_tensors(value: Any) -> bool:
    """Tell whether a tensor can be reached from `value`, or too many objects to say."""
    if isinstance(value, torch.nn.Module):
        return True
    found = list(itertools.islice(_reached([value]), FEW))
    return len(found) == FEW or any(isinstance(one, torch.Tensor) for one in found)


def _fakes_of(one: Any) -> Iterator[str]:
    """Yield the names of what `one` holds that is fake."""
    for name, value in (_read(one) or {}).items():
        if isinstance(value, FakeTensor):
            owner = one if isinstance(one, type) else type(one)
            yield {Globals: f"{name}", CellType: "a variable of an outer function"}.get(
                owner,
                f"{owner.__name__}.{name}",
            )


def _reached(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield all objects that `roots` hold, each once."""
    pending = deque(roots)
    seen: dict[int, Any] = {}
    while pending and len(seen) < MOST:
        # The nearest first, so that the limit cuts off what is farthest from the loss.
        one = pending.popleft()
        if isinstance(one, PLAIN) or id(one) in seen:
            continue
        seen[id(one)] = one  # kept, so that no other object gets its id
        yield one
        pending.extend(_parts(one))


def _parts(one: Any) -> Iterable[Any]:
    if isinstance(one, torch.Tensor):
        return ()
    if isinstance(one, MethodType):
        return one.__self__, one.__func__
    if isinstance(one, functools.partial):
        return one.func, one.args, one.keywords
    if isinstance(one, FunctionType | CACHED):
        return _parts_of_function(getattr(one, "__wrapped__", one))
    if isinstance(one, tuple | set | frozenset) and not isinstance(one, Globals):
        return one
    if isinstance(one, torch.nn.Module):
        return [
            *parameters_of(one).values(),
            *buffers_of(one).values(),
            *one.children(),
            *(_read(one) or {}).values(),
        ]
    # A class of the user's may hold tensors in its attributes; one of a library does not keep the
    # step's.
    kind = [] if isinstance(one, type) or _is_of_library(type(one).__module__) else [type(one)]
    return [*kind, *(_read(one) or {}).values()]


def _parts_of_function(function: Any) -> Iterable[Any]:
    if not isinstance(function, FunctionType) or _is_of_library(function.__module__):
        return ()
    known = Globals(function.__globals__, tuple(_names(function.__code__)))
    return known, *(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and those in it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _read(one: Any) -> dict[Any, Any] | None:
    """Return what `one` holds by name or place, if others can be put there; else None."""
    if isinstance(one, Globals):
        return {name: one.of[name] for name in one.names if name in one.of}
    if isinstance(one, dict):
        return dict(one)
    if isinstance(one, list | deque):
        return dict(enumerate(one))
    if isinstance(one, CACHED):
        # `functools.cache` does not show its values, so one that has grown is emptied.
        return {"size": one.cache_info().currsize}
    if isinstance(one, CellType):
        try:
            return {"": one.cell_contents}
        except ValueError:  # of a variable that has no value yet
            return {}
    if isinstance(one, torch.Tensor | FunctionType | MethodType | functools.partial):
        return None
    if isinstance(one, type) and _is_of_library(one.__module__):
        return None
    if isinstance(one, torch.nn.Module):  # `Values` remembers what torch keeps in it
        return {name: value for name, value in vars(one).items() if name not in OF_MODULES}
    return dict(vars(one)) if hasattr(one, "__dict__") else None


def _write(one: Any, held: dict[Any, Any], now: dict[Any, Any]) -> None:
    """Put `held` in the place of what `one` holds `now`."""
    if isinstance(one, list | deque):
        one.clear()
        one.extend(held.values())
    elif isinstance(one, CellType):
        for value in held.values():
            one.cell_contents = value
        if not held:
            del one.cell_contents
    elif isinstance(one, type):
        for name in now.keys() - held.keys():
            delattr(one, name)
        for name in held:
            if now.get(name) is not held[name]:
                setattr(one, name, held[name])
    else:
        whole = one.of if isinstance(one, Globals) else one if isinstance(one, dict) else vars(one)
        for name in now.keys() - held.keys():
            del whole[name]
        whole.update(held)


def _is_of_library(module: str | None) -> bool:
    """Tell whether a module, by its name, is Python's or was installed."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module in sys.builtin_module_names or (file is not None and file.startswith(LIBRARIES))
