"""Silence known, harmless messages of other packages by their text; any other is still shown."""

import json
import logging
import warnings

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
