"""Known messages of other packages are dropped by their text, and nothing else is."""

import logging
import subprocess
import sys
import warnings

import transformers
from vramlab.training import quiet


def test_known_warnings_are_dropped_and_others_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quiet.silence()
        for start in quiet.KNOWN_WARNINGS:
            warnings.warn(f"{start} and more", FutureWarning, stacklevel=1)
        warnings.warn("something new about IProgress not found", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == [
        "something new about IProgress not found"
    ]


def test_known_logs_are_dropped_and_others_shown(caplog):
    quiet.silence()
    transformers.logging.set_verbosity_warning()  # whatever ran in this process before
    for name, start in quiet.KNOWN_LOGS:
        logger = logging.getLogger(name)
        logger.propagate = True
        logger.warning("%s and more", start)
        logger.warning("new: %s", start)
    shown = dict.fromkeys(
        record.getMessage() for record in caplog.records
    )  # a logger with a handler of its own twice
    assert [*shown] == [f"new: {start}" for _, start in quiet.KNOWN_LOGS]


def test_importing_the_package_silences():
    script = """import logging, warnings, vramlab
from vramlab.training.quiet import KNOWN_LOGS, KNOWN_WARNINGS
texts = [f[1].pattern for f in warnings.filters if f[1] is not None]
assert set(KNOWN_WARNINGS) <= set(texts), texts
assert all(logging.getLogger(name).filters for name, _ in KNOWN_LOGS)"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
