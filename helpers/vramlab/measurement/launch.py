"""Run a function on several ranks of this machine, from a notebook, and leave no process behind.

`launcher.run("package.module:function", {...}, world_size=4)` does what `torchrun --standalone
--nproc_per_node 4` does and returns what each rank returned. A child process (`ranks.py`) loads the
libraries once; on a CPU under Linux the ranks are forked from it
(`torch.multiprocessing.start_processes`) and start in a fraction of a second.
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

from ..base.errors import MeasurementError

# -P: ignore a torch.py in the current folder.
COMMAND = [sys.executable, "-P", "-m", "vramlab.measurement.ranks"]
SIGKILL = -9  # as an exit code
# What a Trainer sets in its process (accelerate's plugins), and libraries of ranks would take for
# orders of theirs.
TRAINERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


class RankError(MeasurementError):
    """A rank that failed.

    Its exit `code` (negative for a signal), `traceback`, and `oom`, what it asked for in vain.
    """

    def __init__(
        self,
        message: str,
        rank: int = 0,
        code: int | None = None,
        traceback: str = "",
        oom: str = "",
    ) -> None:
        self.rank = rank
        self.code = code
        self.traceback = traceback
        self.oom = oom
        if traceback:
            message += f"\n\n{traceback.rstrip()}"
        super().__init__(message)


class LateError(MeasurementError):
    """What ran was ended because it took longer than it was given."""


class Launcher:
    """A child process that has loaded its libraries and runs functions on request.

    Leave its with-block to end it. It is always killed together with its process group. Should this
    process be killed, it ends by itself. A child that was a single rank runs nothing else: what
    libraries leave in a process that trained, such as transformers' reference to DeepSpeed's stage
    3, would change how the next ranks, forked from it, build their models.

    Attributes:
        settings: environment variables of the child, besides this process's own.
        forks: a single rank is forked from the child (Linux only). The child itself never uses a
            GPU and stays, so the next rank has its libraries at once.
    """

    _child: subprocess.Popen[str] | None = None
    _ran_alone = False  # the child was a single rank
    _words_from = 0  # where in the output the last run began

    def __init__(self, settings: Mapping[str, str] | None = None, forks: bool = False) -> None:
        self.settings = dict(settings or {})
        self.forks = forks

    def start(self) -> "Launcher":
        """Start to load the libraries, unless that has been done."""
        self._started()
        return self

    def _started(self) -> subprocess.Popen[str]:
        """Return the child, a new one where there is none or it has ended."""
        child = self._child
        if child is None or child.poll() is not None:
            self.end()
            self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (`end`)
            child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                # A process group of its own, which can be killed with all its ranks.
                start_new_session=True,
                env=_childs_environment() | self.settings,
                text=True,
            )
            self._child = child
        return child

    def end(self, *error: Any) -> None:
        """Kill the child and all that it started; the next run starts a new one."""
        child = self._child
        self._child = None
        self._ran_alone = False
        if child:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if hasattr(os, "killpg"):
                    os.killpg(child.pid, signal.SIGKILL)
                else:  # Windows has no process groups of that kind
                    child.kill()
            # Without it a killed child stays a zombie.
            child.wait()
            if child.stdin:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
            self._output.close()

    __enter__ = start
    __exit__ = end

    def run(
        self,
        function: str,
        arguments: Mapping[str, Any] | None = None,
        world_size: int = 2,
        device: str = "cpu",
        timeout: float = 300,
        preload: str = "",
    ) -> list[Any]:
        """Return what `function(**arguments)` returns on each of `world_size` ranks, in order.

        A single one is the child itself, or forked from it. Several have torchrun's environment
        (RANK, WORLD_SIZE, MASTER_ADDR, …) and make their own process group
        (`process_group.real_rank`). What the function takes and returns is pickled. After `timeout`
        seconds all are ended.
        `preload(**arguments)` imports what ranks need before they are forked; it must not start a
        thread.

        Raises RankError with the traceback of the rank that failed first, the package's own errors
        as they are, LateError if they took too long, and MeasurementError if they did not start.
        """
        if self._ran_alone:
            self.end()
        child = self._started()
        is_forked = self.forks and world_size == 1
        # What it leaves behind must not meet ranks that are forked from it.
        self._ran_alone = world_size == 1 and not is_forked
        self._words_from = self._output.seek(0, os.SEEK_END)
        order = {
            "call": pickle.dumps((function, dict(arguments or {}))),
            "preload": preload,
            "path": sys.path,
            "world_size": world_size,
            "device": device,
            "is_forked": is_forked,
        }
        with tempfile.TemporaryDirectory(prefix="vramlab-") as folder:
            Path(folder, "order.pickle").write_bytes(pickle.dumps(order))
            try:
                # `_outcome` notices that the child has ended.
                with contextlib.suppress(BrokenPipeError):
                    # A line on its standard input is an order; the end of that input is the end of
                    # this process.
                    print(folder, file=child.stdin, flush=True)
                file = Path(folder, "outcome.pickle")
                outcome = self._outcome(child, file, world_size, timeout)
            except BaseException:  # Ctrl-C too
                self.end()
                raise
        if "answers" in outcome:
            return [pickle.loads(answer) for answer in outcome["answers"]]
        if "error" in outcome:
            raise outcome["error"]
        if "unfit" in outcome:  # a library used CUDA when it was imported
            self.end()
            self.forks = False
            with self:
                return self.run(function, arguments, world_size, device, timeout, preload)
        rank, code = outcome["ended"]
        raise self._ended(rank, code, world_size)

    def _outcome(
        self,
        child: subprocess.Popen[str],
        file: Path,
        world_size: int,
        timeout: float,
    ) -> dict[str, Any]:
        """Wait for what the child leaves in `file`, or for its end.

        LateError if it takes over `timeout` seconds.
        """
        until = time.monotonic() + timeout
        # By looking, since a pipe would have to be read while the child is watched.
        while not file.exists():
            code = child.poll()
            if code is not None:
                if world_size == 1:
                    return {"ended": (0, code)}
                ending = f"ended with code {code}{self._last_words()}"
                raise MeasurementError(f"the process that starts the ranks {ending}")
            if time.monotonic() > until:
                raise LateError(f"it took over {timeout:.0f} s, so all was ended: raise timeout=.")
            time.sleep(0.02)
        return pickle.loads(file.read_bytes())

    def _ended(self, rank: int, code: int, world_size: int) -> RankError:
        """Build the error of a rank that ended without an exception."""
        ending = f"ended in the middle with exit status {code}, without an exception"
        if code < 0:
            ending = f"was killed by {signal.Signals(-code).name}"
        # What several ranks write is mixed, and says little.
        words = self._last_words() if world_size == 1 else "."
        if code == SIGKILL:
            words = ", as the kernel does when RAM runs out."
        return RankError(
            f"{rank_name(rank, world_size)} {ending}{words}",
            rank,
            code,
        )

    def _last_words(self) -> str:
        # The child writes to a file and not to a pipe, so that it never waits for a reader.
        self._output.seek(self._words_from)
        lines = self._output.read().strip().splitlines()[-12:]
        return "; its last output:\n" + ("\n".join(lines) or "none")


def _childs_environment() -> dict[str, str]:
    """Return this process's environment without what a Trainer set, and with this package."""
    variables = {}
    for name, value in os.environ.items():
        if not name.startswith(TRAINERS):
            variables[name] = value
    # The child runs this very package, installed or not.
    paths = [str(Path(__file__).resolve().parents[2])]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    # tokenizers warns of forks after its threads have started.
    variables["TOKENIZERS_PARALLELISM"] = "false"
    return variables


def rank_name(rank: int, world_size: int) -> str:
    """Name a rank in a message."""
    return f"Rank {rank} of {world_size}" if world_size > 1 else "its process"
