"""Replace attributes of other libraries for one thread.

So others which train in this process see no difference. Whoever reads a replaced attribute gets one
object, the same in all threads, that gives each thread its own value. The values are kept where
torch hands them to the threads of autograd that work for this one (`at::ThreadLocalState`).

Which private parts of libraries are reached at all, and what guards each, is in CONTRIBUTING.md.
"""

import contextlib
import ctypes
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import of_torch

TLS_KEY = "vramlab: replaced attributes"
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
ABSENT = object()


class _Shared:
    """The attributes that are replaced now in any thread, by the owner's id and their names."""

    def __init__(self) -> None:
        self.attributes: dict[tuple[int, str], _Attribute] = {}
        # held while an attribute is put in place or removed
        self.lock = threading.Lock()

    def find(self, owner: Any, name: str) -> "_Attribute | None":
        """Return the attribute if a thread has replaced it."""
        return self.attributes.get((id(owner), name))

    def use(self, owner: Any, name: str, also: Sequence[Any]) -> "_Attribute":
        """Return the attribute, put in place if no thread had replaced it."""
        with self.lock:
            attribute = self.find(owner, name)
            if attribute is None:
                attribute = _Attribute(owner, name, also)
                self.attributes[id(owner), name] = attribute
                attribute.install()
            attribute.users += 1
            return attribute

    def leave(self, attribute: "_Attribute") -> None:
        """Remove the attribute after the last thread has left it."""
        key = (id(attribute.owner), attribute.name)
        with self.lock:
            attribute.users -= 1
            if attribute.users < 1 and key in self.attributes:
                del self.attributes[key]
                attribute.remove()

    def keep_own(self) -> None:
        """In a forked process: undo what was replaced for threads that are not there."""
        # one of those threads may have held the lock
        self.lock = threading.Lock()
        own = _values()
        for key, attribute in list(self.attributes.items()):
            # Only the thread that forked is in the child, so what it uses counts once.
            attribute.users = int(attribute in own)
            if not attribute.users:
                attribute.remove()
                del self.attributes[key]


# one for all threads: an attribute has one stand-in, which gives each thread its value
_shared = _Shared()


def _values() -> Mapping[Any, Any]:
    """Return what is replaced in this thread: attributes, and marks, by value."""
    return of_torch.thread_value(TLS_KEY) or {}


def _stash(values: Mapping[Any, Any]) -> None:
    """Keep `values` for this thread."""
    before = sys.getrefcount(values)
    of_torch.set_thread_value(TLS_KEY, values)
    if sys.getrefcount(values) == before:
        # torch 2.11 takes the caller's reference instead of one of its own
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(values))


def _keep(values: Mapping[Any, Any]) -> None:
    # With nothing left the entry goes, where this torch can remove one.
    if values or not of_torch.forget_thread_value(TLS_KEY):
        _stash(values)


def _without(key: Any) -> dict[Any, Any]:
    """Return this thread's values but one."""
    return {other: value for other, value in _values().items() if other is not key}


class _Attribute:
    """An attribute with a value of its own in some threads.

    It is a dictionary's item where the owner is one. Modules that have the same function by that
    name, and compare it, are `also` owners.
    """

    def __init__(self, owner: Any, name: str, also: Sequence[Any] = ()) -> None:
        self.owner = owner
        self.name = name
        self.also = also
        self.users = 0
        # as it is stored: of a class without binding it
        self.original = _names_of(owner).get(name, ABSENT)
        self.is_inherited = self.original is ABSENT
        if self.original is ABSENT and not isinstance(owner, type):
            # an instance may have its class's
            self.original = getattr(owner, name, ABSENT)
            self.is_inherited = self.original is not ABSENT
        self.stand_in = self._make()

    def _make(self) -> Any:
        """Return the object that every thread finds in the attribute's place."""
        if isinstance(self.owner, type):
            return _OfClass(self)
        original: Any = self.original
        if not isinstance(original, FUNCTIONS):
            return _Object(self)

        @functools.wraps(original)
        def function(*args: Any, **options: Any) -> Any:
            return _values().get(self, original)(*args, **options)

        return function

    def value(self) -> Any:
        """Return the value in this thread."""
        return _values().get(self, self.original)

    def install(self) -> None:
        """Put the stand-in into the attribute's place."""
        self._put(self.stand_in)

    def remove(self) -> None:
        """Put the original back, unless somebody else has replaced the attribute since."""
        if _names_of(self.owner).get(self.name) is not self.stand_in:
            return
        if self.is_inherited or self.original is ABSENT:
            delattr(self.owner, self.name)
        else:
            self._put(self.original)

    def _put(self, value: Any) -> None:
        for owner in (self.owner, *self.also):
            # a module may catch assignments, so it is not assigned to
            if isinstance(owner, dict | types.ModuleType):
                _names_of(owner)[self.name] = value
            else:
                setattr(owner, self.name, value)


def _names_of(owner: Any) -> Any:
    """Return the mapping in which an owner's own attributes, or items, are."""
    return owner if isinstance(owner, dict) else vars(owner)


class _OfClass:
    """What stands in a class.

    Functions are bound, descriptors asked, as if they stood there themselves.
    """

    def __init__(self, attribute: _Attribute) -> None:
        self.attribute = attribute

    def __get__(self, instance: Any, owner: type) -> Any:
        attribute = self.attribute
        value = attribute.value()
        if value is ABSENT:
            # The attribute is this class's only in some threads: for others it is looked up as if
            # it were not there.
            above = super(attribute.owner, owner if instance is None else instance)
            return getattr(above, attribute.name)
        # A function found in a class has to be bound to the instance here, as Python does by
        # itself.
        bind = getattr(type(value), "__get__", None)
        return value if bind is None else bind(value, instance, owner)


class _Object:
    """What stands for a module, a class, a kernel or any other object that is no function."""

    def __init__(self, attribute: _Attribute) -> None:
        # `__setattr__` is the value's
        object.__setattr__(self, "_attribute", attribute)

    def _value(self) -> Any:
        attribute = object.__getattribute__(self, "_attribute")
        value = attribute.value()
        if value is ABSENT:
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

    def __bool__(self) -> bool:
        return bool(_Object._value(self))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _Object._value(self))


def plain(owner: Any, name: str) -> Any:
    """Return what `owner`'s attribute is in this thread now, for a replacement that calls it."""
    attribute = _shared.find(owner, name)
    if attribute is None or isinstance(owner, type):
        return owner[name] if isinstance(owner, dict) else getattr(owner, name)
    return attribute.value()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While entered, `owner`'s attribute is `value` in this thread, and for others what it was.

    The owner is an object, a dictionary with an item of that name, or several modules.
    """
    owner, *also = owner if isinstance(owner, tuple) else (owner,)
    attribute = _shared.use(owner, name, also)
    # Replacements nest, so the one outside comes back at the end.
    before = _values().get(attribute, ABSENT)
    _keep({**_values(), attribute: value})
    try:
        yield
    finally:
        left = _without(attribute)
        if before is not ABSENT:
            left[attribute] = before
        _keep(left)
        _shared.leave(attribute)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """While entered, what this thread has replaced in modules is what it was, for every thread.

    What reads code instead of running it, as torch.compile does, finds the library's own.
    """
    own = _own_of_modules()
    for attribute in own:
        attribute.remove()
    try:
        yield
    finally:
        for attribute in own:
            attribute.install()


def is_replaced(value: Any) -> bool:
    """Tell whether this thread has put something else in the place of `value` in a module."""
    return any(attribute.original is value for attribute in _own_of_modules())


def _own_of_modules() -> "list[_Attribute]":
    """Return what this thread has replaced, but for attributes of classes."""
    own = [key for key in _values() if isinstance(key, _Attribute)]
    return [attribute for attribute in own if not isinstance(attribute.owner, type)]


def assign(owner: Any, name: str, value: Any) -> None:
    """Set `owner`'s attribute: of this thread, where it is replaced in it."""
    attribute = _shared.find(owner, name)
    if attribute in _values():
        _keep({**_values(), attribute: value})
    else:
        setattr(owner, name, value)


@contextlib.contextmanager
def only_here() -> Iterator[Callable[[], bool]]:
    """Yield what says whether it is called by this thread.

    One of autograd's threads that works for this one counts too.
    """
    mark = object()
    _keep({**_values(), mark: True})
    try:
        yield lambda: mark in _values()
    finally:
        _keep(_without(mark))


def afterwards(
    owner: Any,
    name: str,
    call: Callable[..., Any],
) -> contextlib.AbstractContextManager:
    """While entered, follow `owner`'s function by `call(result, *its arguments)` in this thread."""
    # What it is in this thread now, so that two followers of one function both run.
    before = plain(owner, name)

    @functools.wraps(before)
    def function(*args: Any, **options: Any) -> Any:
        result = before(*args, **options)
        call(result, *args, **options)
        return result

    return replaced(owner, name, function)


class _Module(types.ModuleType):
    """A module some of whose attributes a library assigns.

    Those of a thread that catches them are its own.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        stack = getattr(_catching, "stacks", {}).get(self.__name__)
        if stack is None:
            super().__setattr__(name, value)
        else:
            stack.enter_context(replaced(self, name, value))


# `stacks`: by a module's name, where this thread's assignments end
_catching = threading.local()


@contextlib.contextmanager
def caught(stack: contextlib.ExitStack, *modules: types.ModuleType) -> Iterator[None]:
    """While entered, keep what this thread assigns to attributes of `modules` for this thread.

    It holds until `stack` is closed.
    """
    before = getattr(_catching, "stacks", {})
    for module in modules:
        # for good: it changes nothing where no thread catches
        if type(module) is types.ModuleType:
            module.__class__ = _Module
    _catching.stacks = before | {module.__name__: stack for module in modules}
    try:
        yield
    finally:
        _catching.stacks = before


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared.keep_own)
