"""Quiet for what loads and runs here: known, harmless messages of other packages are dropped by their text (any other
is still shown), and Python's cycle collector is off where it costs time or frees at times that are not deterministic."""

import contextlib
import gc
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator

from ..report.data import data_path

# How each begins, and why it is harmless.
_KNOWN = json.loads(data_path("known_messages.json").read_text(encoding="utf-8"))
KNOWN_WARNINGS = tuple(row["begins"] for row in _KNOWN["warnings"])
KNOWN_LOGS = tuple((row["logger"], row["begins"]) for row in _KNOWN["logs"])


def silence() -> None:
    """Drop the known messages in this process from now on."""
    for start in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=start)
    for name, start in KNOWN_LOGS:
        logging.getLogger(name).addFilter(lambda record, start=start: not record.getMessage().startswith(start))


class _Pattern:
    """How a warning's text begins, for a filter of `warnings` that only the thread which makes it sees."""

    def __init__(self, pattern: str):
        self.pattern, self.thread = re.compile(pattern, re.IGNORECASE), threading.get_ident()

    def match(self, text: str) -> bool:
        return threading.get_ident() == self.thread and self.pattern.match(text) is not None


@contextlib.contextmanager
def unheard(*patterns: str, category: type[Warning] = Warning) -> Iterator[None]:
    """While entered, drop this thread's warnings that begin so. `warnings.catch_warnings` is for the whole process: it
    would also end what another thread has asked for in the meantime."""
    filters = warnings.filters
    own = [("ignore", _Pattern(pattern), category, None, 0) for pattern in patterns]
    filters[:0] = own
    try:
        yield
    finally:
        for held in (filters, *([warnings.filters] if warnings.filters is not filters else ())):
            held[:] = [each for each in held if each not in own]


@contextlib.contextmanager
def unlogged(name: str, level: int = logging.CRITICAL + 1) -> Iterator[None]:
    """While entered, drop what this thread logs below `level` by the logger of that name."""
    logger, thread = logging.getLogger(name), threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread or record.levelno >= level

    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


_collecting = threading.Lock()
_without: list[bool] = []  # for each thread that wants no collection: whether there was one before the first


@contextlib.contextmanager
def no_collection(before: bool = True) -> Iterator[None]:
    """While entered, switch the cycle collector off, of all threads; run it `before`. Libraries load a fifth faster
    without it. The last thread that leaves switches it on again."""
    if before:
        gc.collect()
    with _collecting:
        _without.append(_without[0] if _without else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _collecting:
            was_enabled = _without.pop() if _without else False
            if was_enabled and not _without:
                gc.enable()


def _collect_in_child() -> None:
    """In a forked process: nobody is there who wanted no collection."""
    global _collecting
    _collecting = threading.Lock()
    if _without and _without[0]:
        gc.enable()
    _without.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_in_child)
