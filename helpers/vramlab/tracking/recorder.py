"""A tracker that keeps the stack of every birth.

So it names the lines of code whose storages are never freed.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..hardware.snapshot import Group, Groups, Line, is_users, user_line
from ..private.of_torch import address_of
from .tensors import tensors_in
from .tracker import Storage, Tracker

# The tracker's own lines are on every stack, and made nothing.
TRACKER_FILES = (__file__, str(Path(__file__).with_name("tracker.py")))


class LineTracker(Tracker):
    """A tracker that keeps the stack of every birth while `keeps_stacks`."""

    keeps_stacks = False

    def __init__(self, device: str = "cpu", round_to: int = 1) -> None:
        super().__init__(device, round_to)
        # by `id` of a storage: from its birth's line, without the tracker's own, to the user's
        self.frames: dict[int, list[dict[str, Any]]] = {}

    def log_birth(self, tensor: torch.Tensor, op: str, where: str = "") -> Storage | None:
        """Log the storage of `tensor`, with the stack at this moment if stacks are kept."""
        storage = super().log_birth(tensor, op, where)
        if storage and self.keeps_stacks:
            self.frames[id(storage)] = _stack_to_user(sys._getframe(1))
        return storage

    def line_of(self, storage: Storage) -> Line:
        """Return the user's line that made a storage."""
        return user_line(self.frames.get(id(storage), ()))

    def left_by(
        self,
        key: Callable[[Storage], Any],
        steps: Iterable[Sequence[int]],
        least: int,
    ) -> list[tuple[Any, int, int]]:
        """Return what each step made and nothing freed: key, and the least bytes and count.

        Steps are pairs of positions in the log. What has no key, or what some step left less than
        `least` bytes of (as a cached mask of a new length), is no leak. Largest first.
        """
        left: list[dict[Any, list[int]]] = []
        for start, end in steps:
            by_key: dict[Any, list[int]] = {}
            for size, storage, _ in self.log[start:end]:
                if size > 0 and storage.alive and (name := key(storage)):
                    by_key.setdefault(name, []).append(size)
            left.append(by_key)
        found = []
        for name in set.intersection(*map(set, left)):
            size = min(sum(step[name]) for step in left)
            if size >= least:
                found.append((name, size, min(len(step[name]) for step in left)))
        return sorted(found, key=lambda each: (-each[1], each[0]))


class Recorder(LineTracker):
    """Follows what is made while it is entered, and no storage that was there before."""

    keeps_stacks = True

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        # addresses of the storages that the running operator was given
        self._given: set[int] = set()

    def dispatch(
        self,
        func: Any,
        types: tuple,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """Run an operator and log what it makes.

        What it is given and is not followed was there before, so a view of it is no birth.
        """
        given = tensors_in((args, kwargs))
        self._given = {address_of(tensor.untyped_storage()) for tensor in given}
        result = super().dispatch(func, types, args, kwargs)
        self._given.clear()
        return result

    def log_birth(self, tensor: torch.Tensor, op: str, where: str = "") -> Storage | None:
        """Log the storage of `tensor` with the stack at this moment, unless it was there before."""
        if address_of(tensor.untyped_storage()) in self._given:
            return None
        return super().log_birth(tensor, op, where)

    def leaks(self, ends: Sequence[int], least: int) -> Groups:
        """Return the lines of which every step but the last left `least` bytes or more.

        `ends` are the positions in the log at which the steps ended.
        """
        # what the last step made may still be freed by the next one
        left = self.left_by(self.line_of, pairwise(ends[:-1]), least)
        return Groups(Group(*each) for each in left)


def _stack_to_user(frame: FrameType | None) -> list[dict[str, Any]]:
    """Return the stack above `frame` up to the first line of the user's, which is the last."""
    stack: list[dict[str, Any]] = []
    for each in _callers(frame):
        code = each.f_code
        if code.co_filename in TRACKER_FILES:
            continue
        stack.append({"filename": code.co_filename, "line": each.f_lineno, "name": code.co_name})
        if is_users(code.co_filename):
            break
    return stack


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
