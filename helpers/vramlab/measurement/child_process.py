"""A program in a process of its own, always killed together with its process group. It leaves no file."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

ANSWER = "vramlab-answer "  # begins the line of the output that is the answer


class Apart:
    """Starts `command`; leaving the with-block kills whatever is left of its process group, also on Ctrl-C.

    It gets this process's environment with `environment` on top, and finds this package. Its standard input stays open as
    long as this process lives, so a child that calls `end_with_parent` never outlives it.
    """

    def __init__(self, command: list[str], cwd: Path | None = None, **environment: str):
        package = str(Path(__file__).resolve().parents[2])
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
        self._oom_kills = oom_kills()

    def send(self, line: str) -> None:
        """Write a line to its standard input; that it has ended already is for `wait` to tell."""
        self._oom_kills = oom_kills()
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

    def answer(self) -> Any:
        """What it handed to `answer`, None if it ended before that."""
        self._output.seek(0)
        lines = [line for line in self._output if line.startswith(ANSWER)]
        with contextlib.suppress(ValueError):  # cut off
            return json.loads(lines[-1].removeprefix(ANSWER)) if lines else None

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process for its memory since the last `send`.

        Without that a process killed by SIGKILL was killed by somebody: a person, a scheduler, a service manager.
        """
        return oom_kills() > self._oom_kills

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


def answer(value: Any) -> None:
    """In the child: hand a JSON-ready value to the parent's `Apart.answer`."""
    print(f"\n{ANSWER}{json.dumps(value)}", flush=True)


def oom_kills() -> int:
    """How many processes the kernel has killed for their memory; 0 where it does not count them."""
    for file in oom_counters():
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def oom_counters() -> list[Path]:
    """Where Linux counts them: in this control group, or where that has no count in all (Documentation/admin-guide/
    cgroup-v2.rst, "memory.events"; /proc/vmstat)."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = Path("/sys/fs/cgroup", next(line[4:] for line in lines if line.startswith("0::/")))
        return [*(folder / "memory.events" for folder in (group, *group.parents)), Path("/proc/vmstat")]
    return [Path("/proc/vmstat")]


def end_with_parent(folder: str | None = None) -> None:
    """In the child: end when the standard input ends, and let the kernel take this process first when RAM runs out.

    `folder`: the parent's, removed in its place.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    with contextlib.suppress(OSError):  # Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
