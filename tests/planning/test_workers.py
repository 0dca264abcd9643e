"""A plan's simulations run in processes that end with it."""

import signal
import subprocess
import sys

import pytest

LOADING = """
import contextlib, multiprocessing, time
from vramlab.planning import workers
with contextlib.suppress(KeyboardInterrupt), workers.loaded_early():
    print(len(multiprocessing.active_children()), flush=True)
    time.sleep(60)
print(len(multiprocessing.active_children()))
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
        assert child.stdout.readline() == "1\n"
        child.send_signal(ending)
        # until everybody who could write has ended
        out, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    is_killed = ending == signal.SIGKILL
    assert (child.returncode, out) == ((-ending, "") if is_killed else (0, "0\n"))
