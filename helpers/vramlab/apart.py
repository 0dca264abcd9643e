"""A program in a process of its own, of which nothing is left afterwards, however that comes about."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any


class Apart:
    """Starts `command`; leaving the with-block kills whatever is left of its process group, also on Ctrl-C.

    It gets this process's environment with `environment` on top, and finds this package. Its standard input stays open as
    long as this process lives, so a child that calls `end_with_parent` never outlives it.
    """

    def __init__(self, command: list[str], cwd: Path | None = None, **environment: str):
        package = str(Path(__file__).resolve().parent.parent)
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in __exit__)
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            cwd=cwd,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment, "PYTHONPATH": paths},
            text=True,
        )

    def send(self, line: str) -> None:
        """Write a line to its standard input; that it has ended already is for `wait` to tell."""
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()

    def ended(self) -> int | None:
        """Its exit code if it has ended (negative: the signal that killed it), else None."""
        return self._child.poll()

    def wait(self, timeout: float) -> tuple[int, list[str]]:
        """Its exit code (negative: the signal that killed it) and the last lines it printed.

        Raises subprocess.TimeoutExpired after `timeout` seconds.
        """
        code = self._child.wait(timeout)
        self._output.seek(0)
        return code, self._output.read().strip().splitlines()[-12:]

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._output.closed:
            return  # it has been left before, and the number may be another process's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL) if hasattr(os, "killpg") else self._child.kill()
        self._child.wait()
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._output.close()


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
