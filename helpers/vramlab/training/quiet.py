"""Quiet for what loads and runs here.

Known, harmless messages of other packages are dropped by their text (any other is still shown), and
Python's cycle collector is off where it costs time or frees at times that are not deterministic.
"""

import contextlib
import gc
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from ..base.data import data_path

# How each begins, and why it is harmless.
_KNOWN = json.loads(data_path("known_messages.json").read_text(encoding="utf-8"))
KNOWN_WARNINGS = tuple(row["begins"] for row in _KNOWN["warnings"])
KNOWN_LOGS = tuple((row["logger"], row["begins"]) for row in _KNOWN["logs"])


def silence() -> None:
    """Drop the known messages in this process from now on."""
    for start in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=start)
    for name, start in KNOWN_LOGS:
        logging.getLogger(name).addFilter(_WithoutStart(start))


class _WithoutStart(logging.Filter):
    """Drops records whose text begins so."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)


class _Pattern:
    """How a warning's text begins, for a filter of `warnings` that one thread sees."""

    def __init__(self, pattern: str) -> None:
        self.pattern = re.compile(pattern, re.IGNORECASE)
        self.thread = threading.get_ident()

    def match(self, text: str) -> bool:
        """Tell whether the text begins so, in the thread that made the filter."""
        return threading.get_ident() == self.thread and self.pattern.match(text) is not None


@contextlib.contextmanager
def unheard(*patterns: str, category: type[Warning] = Warning) -> Iterator[None]:
    """While entered, drop this thread's warnings that begin so.

    `warnings.catch_warnings` is for the whole process: it would also end what another thread has
    asked for in the meantime.
    """
    filters: Any = warnings.filters
    own = [("ignore", _Pattern(pattern), category, None, 0) for pattern in patterns]
    # Put first, since the first filter that fits decides.
    filters[:0] = own
    try:
        yield
    finally:
        lists = [filters]
        # somebody else's `catch_warnings` has put a copy in the place of the list
        if warnings.filters is not filters:
            lists.append(warnings.filters)
        for each in lists:
            each[:] = [one for one in each if one not in own]


@contextlib.contextmanager
def unlogged(name: str) -> Iterator[None]:
    """While entered, drop what this thread logs by the logger of that name."""
    logger = logging.getLogger(name)
    thread = threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread

    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


class _CycleCollector:
    """Python's cycle collector, off while any thread wants it off.

    It is the process's: a thread cannot switch it for itself alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0  # threads that want no collection
        self._was_enabled = False  # before the first of them

    def switch_off(self) -> None:
        with self._lock:
            if not self._users:
                self._was_enabled = gc.isenabled()
            self._users += 1
            gc.disable()

    def switch_on(self) -> None:
        """Take back one `switch_off`; the last one lets the collector run again."""
        with self._lock:
            if self._users:
                self._users -= 1
                if not self._users and self._was_enabled:
                    gc.enable()

    def forget_others(self) -> None:
        """In a forked process: nobody is there who wanted no collection."""
        # a thread that is not there may have held the lock
        self._lock = threading.Lock()
        if self._users and self._was_enabled:
            gc.enable()
        self._users = 0


_collector = _CycleCollector()


@contextlib.contextmanager
def no_collection(before: bool = True) -> Iterator[None]:
    """While entered, switch the cycle collector off, of all threads; run it `before`.

    Libraries load a fifth faster without it. The last thread that leaves switches it on again.
    """
    if before:
        gc.collect()
    _collector.switch_off()
    try:
        yield
    finally:
        _collector.switch_on()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collector.forget_others)
