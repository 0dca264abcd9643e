"""Replace attributes of other libraries for one thread, so that others which train in this process see no difference.

Whoever reads a replaced attribute gets one object, the same in all threads, that gives each thread its own value. The
values are kept where torch hands them to the threads of autograd that work for this one (`at::ThreadLocalState`).
"""

import contextlib
import ctypes
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

TLS_KEY = "vramlab: replaced attributes"
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
ABSENT = object()
_shared: dict[tuple[int, str], "_Attribute"] = {}  # by the owner's id and the attribute's name
_lock = threading.Lock()  # while an attribute is put in place or removed


def _values() -> dict["_Attribute", Any]:
    """What is replaced in this thread."""
    return torch._C._get_obj_in_tls(TLS_KEY) if torch._C._is_key_in_tls(TLS_KEY) else {}


def _stash(values: dict["_Attribute", Any]) -> None:
    """Keep `values` for this thread. torch 2.11 takes the caller's reference instead of one of its own."""
    before = sys.getrefcount(values)
    torch._C._stash_obj_in_tls(TLS_KEY, values)
    if sys.getrefcount(values) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(values))


def _keep(values: dict["_Attribute", Any]) -> None:
    if values or not hasattr(torch._C, "_remove_obj_from_tls"):  # torch 2.11 cannot remove
        _stash(values)
    elif torch._C._is_key_in_tls(TLS_KEY):
        torch._C._remove_obj_from_tls(TLS_KEY)


class _Attribute:
    """An attribute with a value of its own in some threads; a dictionary's item where the owner is one. Modules that have
    the same function by that name, and compare it, are `also` owners."""

    def __init__(self, owner: Any, name: str, also: Sequence[Any] = ()):
        self.owner, self.name, self.also, self.users = owner, name, also, 0
        held = owner if isinstance(owner, dict) else vars(owner)
        self.original = held.get(name, ABSENT)  # as it is stored: of a class without binding it
        if self.original is ABSENT and not isinstance(owner, type):
            self.original = getattr(owner, name, ABSENT)  # of an instance it may be its class's
            self.is_inherited = self.original is not ABSENT
        else:
            self.is_inherited = self.original is ABSENT
        self.stand_in = self._make()

    def _make(self) -> Any:
        if isinstance(self.owner, type):
            return _OfClass(self)
        if not isinstance(self.original, FUNCTIONS):
            return _Object(self)

        @functools.wraps(self.original)
        def function(*args: Any, **options: Any) -> Any:
            return _values().get(self, self.original)(*args, **options)

        return function

    def value(self) -> Any:
        """The value in this thread."""
        return _values().get(self, self.original)

    def install(self) -> None:
        self._put(self.stand_in)

    def remove(self) -> None:
        """Put the original back, unless somebody else has replaced the attribute since."""
        held = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        if held.get(self.name) is not self.stand_in:
            return
        if self.is_inherited or self.original is ABSENT:
            delattr(self.owner, self.name)
        else:
            self._put(self.original)

    def _put(self, value: Any) -> None:
        for owner in (self.owner, *self.also):
            if isinstance(owner, dict | types.ModuleType):  # a module may catch assignments
                (owner if isinstance(owner, dict) else vars(owner))[self.name] = value
            else:
                setattr(owner, self.name, value)


class _OfClass:
    """What stands in a class: functions are bound, descriptors asked, as if they stood there themselves."""

    def __init__(self, attribute: _Attribute):
        self.attribute = attribute

    def __get__(self, instance: Any, owner: type) -> Any:
        attribute = self.attribute
        value = attribute.value()
        if value is ABSENT:
            above = super(attribute.owner, owner if instance is None else instance)
            return getattr(above, attribute.name)
        bind = getattr(type(value), "__get__", None)
        return value if bind is None else bind(value, instance, owner)


class _Object:
    """What stands for a module, a class, a kernel or any other object that is no function."""

    def __init__(self, attribute: _Attribute):
        object.__setattr__(self, "_attribute", attribute)

    def _value(self) -> Any:
        attribute = object.__getattribute__(self, "_attribute")
        if (value := attribute.value()) is ABSENT:
            raise NameError(f"name {attribute.name!r} is not defined")
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(_Object._value(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_Object._value(self), name, value)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _Object._value(self)(*args, **options)

    def __getitem__(self, key: Any) -> Any:
        return _Object._value(self)[key]

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _Object._value(self))


def plain(owner: Any, name: str) -> Any:
    """What `owner`'s attribute is in this thread now, for a replacement that calls it."""
    attribute = _shared.get((id(owner), name))
    if attribute is None or isinstance(owner, type):
        return owner[name] if isinstance(owner, dict) else getattr(owner, name)
    return attribute.value()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While entered, `owner`'s attribute (a dictionary's item, or that of several modules) is `value` in this thread, and
    for others what it was."""
    owner, *also = owner if isinstance(owner, tuple) else (owner,)
    with _lock:
        attribute = _shared.get((id(owner), name))
        if attribute is None:
            attribute = _shared[id(owner), name] = _Attribute(owner, name, also)
            attribute.install()
        attribute.users += 1
    before = _values().get(attribute, ABSENT)
    _keep(_values() | {attribute: value})
    try:
        yield
    finally:
        left = {other: held for other, held in _values().items() if other is not attribute}
        _keep(left if before is ABSENT else left | {attribute: before})
        with _lock:
            attribute.users -= 1
            if attribute.users < 1 and _shared.pop((id(owner), name), None):
                attribute.remove()


def assign(owner: Any, name: str, value: Any) -> None:
    """Set `owner`'s attribute: of this thread, where it is replaced in it."""
    attribute = _shared.get((id(owner), name))
    if attribute in _values():
        _keep(_values() | {attribute: value})
    else:
        setattr(owner, name, value)


@contextlib.contextmanager
def only_here() -> Iterator[Callable[[], bool]]:
    """While entered, what is yielded says whether it is called by this thread, or one of autograd's that works for it."""
    mark = object()
    _keep(_values() | {mark: True})
    try:
        yield lambda: mark in _values()
    finally:
        _keep({other: held for other, held in _values().items() if other is not mark})


def afterwards(owner: Any, name: str, call: Callable[..., Any]) -> contextlib.AbstractContextManager:
    """While entered, `owner`'s function of that name is followed by `call(result, *its arguments)` in this thread."""
    before = plain(owner, name)

    @functools.wraps(before)
    def function(*args: Any, **options: Any) -> Any:
        result = before(*args, **options)
        call(result, *args, **options)
        return result

    return replaced(owner, name, function)


class _Module(types.ModuleType):
    """A module some of whose attributes a library assigns: those of a thread that catches them are its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        stack = getattr(_catching, "stacks", {}).get(self.__name__)
        if stack is None:
            super().__setattr__(name, value)
        else:
            stack.enter_context(replaced(self, name, value))


_catching = threading.local()  # `stacks`: by a module's name, where this thread's assignments end


@contextlib.contextmanager
def caught(stack: contextlib.ExitStack, *modules: types.ModuleType) -> Iterator[None]:
    """While entered, what this thread assigns to attributes of `modules` holds for this thread, until `stack` is closed."""
    before = getattr(_catching, "stacks", {})
    for module in modules:
        if type(module) is types.ModuleType:  # for good: it changes nothing where no thread catches
            module.__class__ = _Module
    _catching.stacks = before | {module.__name__: stack for module in modules}
    try:
        yield
    finally:
        _catching.stacks = before


def _keep_own() -> None:
    """In a forked process: undo what was replaced for threads that are not there."""
    global _lock
    _lock = threading.Lock()
    own = _values()
    for key, attribute in list(_shared.items()):
        attribute.users = int(attribute in own)
        if not attribute.users:
            attribute.remove()
            del _shared[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_own)
