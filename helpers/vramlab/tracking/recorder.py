"""A tracker that keeps the stack of every birth.

So it names the lines of code whose storages are never freed.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
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


class Recorder(Tracker):
    """Follows what is made while it is entered, and no storage that was there before."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        # by `id` of a storage: from its birth's line, without the tracker's own, to the user's
        self.frames: dict[int, list[dict[str, Any]]] = {}
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
        storage = super().log_birth(tensor, op, where)
        if storage:
            self.frames[id(storage)] = _stack_to_user(sys._getframe(1))
        return storage

    def leaks(self, ends: Sequence[int], least: int) -> Groups:
        """Return the lines of which every step but the last left `least` bytes or more.

        `ends` are the positions in the log at which the steps ended.
        """
        # what the last step made may still be freed by the next one
        steps = [self._left_by_line(start, end) for start, end in pairwise(ends[:-1])]
        in_every_step = set.intersection(*(set(step) for step in steps))
        leaking = []
        for line in in_every_step:
            size = min(step[line]["bytes"] for step in steps)
            count = min(step[line]["count"] for step in steps)
            if size >= least:
                leaking.append(Group(line, size, count))
        return Groups(sorted(leaking, key=lambda group: (-group.size, group.line)))

    def _left_by_line(self, start: int, end: int) -> dict[Line, Counter]:
        """Return bytes and count, by line, of what was born between two positions and lives."""
        by_line: dict[Line, Counter] = {}
        for size, storage, _ in self.log[start:end]:
            if size > 0 and storage.alive:
                line = user_line(self.frames.get(id(storage), ()))
                by_line.setdefault(line, Counter()).update(bytes=size, count=1)
        return by_line


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
