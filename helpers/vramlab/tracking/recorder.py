"""A tracker that keeps the stack of every birth, and so names the lines of code whose storages are never freed."""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..hardware.snapshot import Group, Groups, Line, is_users, user_line
from .tensors import tensors_in
from .tracker import Storage, Tracker

OWN = (__file__, str(Path(__file__).with_name("tracker.py")))


class Recorder(Tracker):
    """Follows what is made while it is entered, and no storage that was there before."""

    def __init__(self, device: str = "cpu"):
        super().__init__(device)
        # by `id` of a storage: from its birth's line, without the tracker's own, to the user's
        self.frames: dict[int, list[dict[str, Any]]] = {}
        self._given: set[int] = set()  # storages of the arguments of the operator that runs

    def dispatch(self, func: Any, types: tuple, args: tuple, kwargs: dict) -> Any:
        """Run an operator and log what it makes; what it was given and is not followed was there before."""
        self._given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = super().dispatch(func, types, args, kwargs)
        self._given.clear()
        return result

    def log_birth(self, tensor: torch.Tensor, op: str, where: str = "") -> Storage | None:
        storage = None if tensor.untyped_storage()._cdata in self._given else super().log_birth(tensor, op, where)
        if storage:
            self.frames[id(storage)] = frames = []
            frame = sys._getframe(1)
            while frame is not None and not (frames and is_users(frames[-1]["filename"])):
                code = frame.f_code
                if code.co_filename not in OWN:
                    frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
                frame = frame.f_back
        return storage

    def leaks(self, ends: Sequence[int], least: int) -> Groups:
        """Return the lines of which every step but the last left `least` bytes; `ends` are the steps' places in the log."""
        steps: list[dict[Line, Counter]] = [{} for _ in ends[2:]]
        for step, (start, end) in zip(steps, pairwise(ends), strict=False):
            for size, storage, _ in self.log[start:end]:
                if size > 0 and storage.alive:
                    counts = step.setdefault(user_line(self.frames.get(id(storage), ())), Counter())
                    counts.update(bytes=size, count=1)
        found = [
            Group(line, min(step[line]["bytes"] for step in steps), min(step[line]["count"] for step in steps))
            for line in set.intersection(*map(set, steps))
        ]
        return Groups(sorted((g for g in found if g.size >= least), key=lambda group: (-group.size, group.line)))
