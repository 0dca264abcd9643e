"""Run a function on several ranks of this machine, from a notebook, and leave no process behind.

`launcher.run("package.module:function", {...}, world_size=4)` does what `torchrun --standalone --nproc_per_node 4` does
and returns what each rank returned. A child process (`ranks.py`) loads the libraries once; on a CPU under Linux the ranks
are forked from it (`torch.multiprocessing.start_processes`) and start in a fraction of a second.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report.errors import MeasurementError, RankError
from .host_memory import oom_kills

COMMAND = [sys.executable, "-P", "-m", "vramlab.measurement.ranks"]  # -P: ignore a torch.py in the current folder
SIGABRT, SIGKILL = -getattr(signal, "SIGABRT", 6), -getattr(signal, "SIGKILL", 9)  # as exit codes


class Launcher:
    """A child process that has loaded its libraries and runs functions on request; leave its with-block to end it.

    It is always killed together with its process group. Should this process be killed, it ends by itself. `single`: run
    the function in the child itself, in place of ranks; for a measurement, which has a fresh process.
    """

    def __init__(self, single: bool = False):
        self.single = single
        self._child: subprocess.Popen | None = None

    def start(self) -> "Launcher":
        """Start to load the libraries, unless that has been done."""
        if self._child is None or self._child.poll() is not None:
            self.end()
            paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
            own = {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            usual = {} if self.single else {"OMP_NUM_THREADS": "1"}  # torchrun's default
            if sys.platform == "linux" and not self.single:
                usual["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here
            self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `end`)
            self._child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                env={**usual, **os.environ, **own},
                text=True,
            )
        return self

    def end(self, *error: Any) -> None:
        """Kill the child and all that it started; the next run starts a new one."""
        child, self._child = self._child, None
        if child:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
            child.wait()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            self._output.close()

    __enter__, __exit__ = start, end

    def run(
        self,
        function: str,
        arguments: Mapping[str, Any] | None = None,
        world_size: int = 2,
        device: str = "cpu",
        timeout: float = 300,
        preload: str = "",
    ) -> list[Any]:
        """Return what `function(**arguments)` returns on each of `world_size` ranks, in their order.

        The function has torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, …) and makes its own process group
        (`process_group.real_rank`). What it takes and returns is pickled. On "cuda" each rank is a fresh process with a
        GPU of its own, on "cpu" they are forked where that is sound; after `timeout` seconds all are ended.
        `preload(**arguments)` imports what forked ranks need before they are forked; it must not start a thread.

        Raises RankError with the traceback of the rank that failed first, the package's own errors as they are, and
        MeasurementError if they took too long or did not start.
        """
        self.start()
        kills = oom_kills()
        with tempfile.TemporaryDirectory(prefix="vramlab-") as name:
            folder = Path(name)
            order = {"call": pickle.dumps((function, dict(arguments or {}))), "preload": preload, "single": self.single}
            order |= {"world_size": world_size, "device": device, "folder": name, "path": sys.path}
            (folder / "order.pickle").write_bytes(pickle.dumps(order))
            try:
                with contextlib.suppress(BrokenPipeError):  # `_wait` notices that the child has ended
                    self._child.stdin.write(f"{name}\n")
                    self._child.stdin.flush()
                failed, code = self._wait(folder, world_size, timeout)
            except BaseException:  # Ctrl-C too
                self.end()
                raise
            found = {rank: read for rank in range(world_size) if (read := _read(folder / f"{rank}.pickle"))}
        missing = [rank for rank in range(world_size) if "answer" not in found.get(rank, {})]
        if failed is None and not missing:
            return [found[rank]["answer"] for rank in range(world_size)]
        failed = missing[0] if failed is None else failed
        errors = {rank: read for rank, read in found.items() if "error" in read}
        if errors and (failed in errors or code == SIGABRT):  # who aborts may have lost a neighbour
            raise min(errors.values(), key=lambda read: read["time"])["error"]
        raise self._ended(failed, code, world_size, device, killed_for_ram=code == SIGKILL and oom_kills() > kills)

    def _wait(self, folder: Path, world_size: int, timeout: float) -> tuple[int | None, int]:
        """Return the rank that failed first, None for none, and its exit code.

        Raise MeasurementError after `timeout` seconds, or if the process that starts the ranks ended.
        """
        until = time.monotonic() + timeout
        while not (outcome := _read(folder / "done.pickle")):
            if (code := self._child.poll()) is not None:
                if self.single:
                    return 0, code
                raise MeasurementError(f"the process that starts the ranks ended with code {code}{self._last_words()}")
            if time.monotonic() > until:
                late = [rank for rank in range(world_size) if not (folder / f"{rank}.pickle").exists()]
                who = rank_name(self.single, world_size, *(late or range(world_size)))
                raise MeasurementError(f"{who} took over {timeout:g} s, so all was ended: raise timeout=.")
            time.sleep(0.02)
        return outcome

    def _ended(self, rank: int, code: int, world_size: int, device: str, killed_for_ram: bool) -> RankError:
        """Build the error of a rank that ended without an exception."""
        why = " by the kernel because RAM ran out" if killed_for_ram else ""
        ending = f"ended in the middle with exit status {code}, without an exception"
        if code < 0:
            ending = f"was killed by {signal.Signals(-code).name}{why}"
        words = self._last_words() if self.single and code != SIGKILL else "."
        oom = f"It was killed{why}." if killed_for_ram and device == "cpu" else ""
        return RankError(f"{rank_name(self.single, world_size, rank)} {ending}{words}", rank, code, oom=oom)

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().strip().splitlines()[-12:]
        return "; its last output:\n" + ("\n".join(lines) or "none")


def rank_name(single: bool, world_size: int, *ranks: int) -> str:
    """Name ranks in a message."""
    return "its process" if single else f"Rank {', '.join(map(str, ranks))} of {world_size}"


def _read(file: Path) -> Any:
    return pickle.loads(file.read_bytes()) if file.exists() else None
