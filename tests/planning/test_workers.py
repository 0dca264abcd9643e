"""A plan's simulations run in processes that end with it."""

import signal
import subprocess
import sys

import pytest

LOADING = """
import time
from vramlab.planning import workers
with workers.loaded_early():
    print("started", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing loads early")
@pytest.mark.parametrize(
    "ending", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_what_loads_early_ends_with_the_plan(ending):
    child = subprocess.Popen(
        [sys.executable, "-c", LOADING], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert child.stdout.readline() == "started\n"
        child.send_signal(ending)
        # until everybody who could write has ended
        out, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == -ending
    assert ("KeyboardInterrupt" in out) == (ending == signal.SIGINT)
    assert "Process" not in out
