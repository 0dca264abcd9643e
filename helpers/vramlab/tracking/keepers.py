"""Who keeps tensors: the names in the user's code from which they can be reached."""

import re
import time
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..hardware.snapshot import is_users, source_lines, user_line
from ..private.of_torch import address_of, number_of
from .tensors import WITH_STORAGE

COLLECTIONS = (list, tuple, set, deque)
PLAIN = (int, float, str)
SECONDS = 1.0  # of a search, which is made where memory grows
NODES = 20_000  # of autograd's graph that are looked at, for one tensor


class Name(NamedTuple):
    """A name in a frame: a variable, with the attributes that lead to what is meant."""

    text: str
    frame: FrameType

    def __str__(self) -> str:
        """Return the name, and the line next above the frame's that sets it."""
        return f"`{self.text}` ({self.set_at(range(self.frame.f_lineno, 0, -1))})"

    def set_at(self, numbers: range) -> str:
        """Return the first of the frame's lines, by `numbers`, that sets the name; else ""."""
        file = self.frame.f_code.co_filename
        lines = source_lines(file)
        # an attribute is set under another name than the one that leads to it, as self's
        _, dot, last = self.text.rpartition(".")
        before = r"\." if dot else r"(?<![\w.])"
        sets = re.compile(rf"{before}{re.escape(last)}\s*(:[^=]+)?[-+]?=(?!=)")
        number = next((n for n in numbers if sets.search("".join(lines[n - 1 : n]))), 0)
        return str(user_line([{"filename": file, "line": number, "name": ""}]))


def variables(frame: FrameType | None) -> list[tuple[Name, Any]]:
    """Return the variables of the user's frames from `frame` up."""
    found = []
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            found += [(Name(name, frame), value) for name, value in frame.f_locals.items()]
        frame = frame.f_back
    return found


def holders(found: list[tuple[Name, Any]]) -> dict[int, Name]:
    """Return by address of a storage the variable or attribute that leads to a tensor of it."""
    until = time.monotonic() + SECONDS
    held: dict[int, Name] = {}
    seen: set[int] = set()
    queue = deque(found)
    while queue and time.monotonic() < until:
        name, value = queue.popleft()
        if id(value) in seen or isinstance(value, ModuleType):
            continue
        seen.add(id(value))
        if is_lazy(value):
            # a lazy module's parameter has no storage yet
            continue
        if isinstance(value, torch.Tensor) and value.layout in WITH_STORAGE:
            held.setdefault(address_of(value.untyped_storage()), name)
        elif isinstance(value, COLLECTIONS):
            # a data set has millions of numbers
            queue.extend((name, item) for item in list(value) if not isinstance(item, PLAIN))
        elif isinstance(value, dict):
            queue.extend((name, item) for item in list(value.values()))
        else:
            for key, item in list(getattr(value, "__dict__", {}).items()):
                text = name.text if key == "_modules" else f"{name.text}.{key}"
                queue.append((name._replace(text=text), item))
    return held


def steps_in_graph(tensor: torch.Tensor, starts: Sequence[int]) -> int:
    """Return of how many steps a tensor's graph has operators; `starts` are their first numbers.

    A step's backward frees what its operators saved, and not the operators.
    """
    steps: set[int] = set()
    seen: set[Any] = {tensor.grad_fn} - {None}
    queue = deque(seen)
    while queue and len(seen) < NODES:
        node = queue.popleft()
        steps.add(bisect(starts, number_of(node)))
        new = {further for further, _ in node.next_functions if further} - seen
        seen |= new
        queue.extend(new)
    return len(steps)
