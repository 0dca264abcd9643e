"""Quiet for what loads and runs here: known, harmless messages of other packages are dropped by their text (any other
is still shown), and Python's cycle collector is off where it costs time or frees at times that are not deterministic."""

import contextlib
import gc
import json
import logging
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


@contextlib.contextmanager
def no_collection(before: bool = True) -> Iterator[None]:
    """While entered, switch the cycle collector off; run it `before`. Libraries load a fifth faster without it."""
    if before:
        gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
