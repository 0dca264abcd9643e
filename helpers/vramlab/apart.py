"""Run a program in a process of its own, of which nothing is left afterwards, however that comes about."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path


def run_apart(command: list[str], timeout: float, cwd: Path | None = None, **environment: str) -> tuple[int, list[str]]:
    """Run `command` and wait; returns its exit code (negative: the signal that killed it) and its last lines of output.

    It gets this process's environment with `environment` on top, and finds this package. Its standard input ends when
    this process does. When `timeout` seconds have passed, or Ctrl-C is pressed here, its whole process group is killed.

    Raises:
        subprocess.TimeoutExpired, KeyboardInterrupt: after the group is gone.
    """
    package = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=cwd,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment, "PYTHONPATH": paths},
        )
        try:
            code = child.wait(timeout)
        finally:
            _end(child)
        output.seek(0)
        return code, output.read().strip().splitlines()[-12:]


def _end(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
    child.wait()
    child.stdin.close()


def end_with_parent() -> None:
    """In the child: end when the standard input ends, and let the kernel take this process first when RAM runs out."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    with contextlib.suppress(OSError):  # Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
