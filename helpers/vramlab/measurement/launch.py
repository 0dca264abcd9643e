"""A function on several ranks, started from a notebook: torch's elastic agent underneath, and nothing left behind.

`launch("package.module:function", {...}, world_size=4)` is what `torchrun --standalone --nproc_per_node 4` does. Between
here and there go files of JSON. A child process (`measurement/ranks.py`) loads the libraries once; on Linux CPUs the
ranks are forked from it, as `accelerate.notebook_launcher` does it, and so start in a fraction of a second.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..report.errors import MeasurementError, RankError, RecipeError
from .child_process import Apart

MODULE = [
    sys.executable,
    "-P",
    "-m",
    "vramlab.measurement.ranks",
]  # -P: a torch.py in the notebook's folder is not meant


class Launcher:
    """A child that has loaded its libraries and starts ranks whenever it is asked; leave its with-block to end it.

    Every launch has processes of its own; only the loading is shared. Should this process be killed, it ends by itself.
    """

    def __init__(self):
        self._child: Apart | None = None

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()

    def end(self) -> None:
        """Kill the child and all ranks that are left; the next launch starts a new one."""
        child, self._child = self._child, None
        if child:
            child.__exit__()

    def start(self) -> "Launcher":
        """Begin to load the libraries now."""
        if self._child is None or self._child.ended() is not None:
            self.end()
            cpus = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # torchrun's default
            if sys.platform == "linux":
                cpus["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here
            self._child = Apart(MODULE, **cpus)
        return self

    @contextlib.contextmanager
    def run(
        self,
        function: str,
        arguments: dict[str, Any],
        world_size: int,
        device: str = "cpu",
        timeout: float = 300,
        port: int | None = None,
        preload: str | None = None,
    ) -> Iterator[Path]:
        """Run `function` on all ranks; gives the folder where each left its answer, until the with-block is left.

        `preload(**arguments)` loads what they need before they are forked; it may start no thread.
        """
        if port is not None:
            _check_port(port)
        self.start()
        with tempfile.TemporaryDirectory(prefix="vramlab-") as folder:
            order = {"function": function, "arguments": arguments, "world_size": world_size, "device": device}
            order |= {"folder": folder, "port": port, "path": sys.path, "preload": preload}
            try:
                self._child.send(json.dumps(order))
                done = self._wait(Path(folder), world_size, timeout)
            except BaseException:  # Ctrl-C too: whatever is left goes
                self.end()
                raise
            if done != {"failed": None}:
                starved = device == "cpu" and self._child.out_of_memory()
                raise _failure(Path(folder), done, world_size, starved)  # the ranks are gone; the child is as it was
            yield Path(folder)

    def answers(self, function: str, arguments: dict[str, Any], world_size: int, *how: Any) -> list[Any]:
        """What `function(**arguments)` returns on each rank; the rest as in `run`."""
        with self.run(function, arguments, world_size, *how) as folder:
            return [json.loads((folder / f"{rank}.json").read_text())["answer"] for rank in range(world_size)]

    def _wait(self, folder: Path, world_size: int, timeout: float) -> dict[str, Any]:
        """What `ranks.py` says at the end. Raises MeasurementError after `timeout` seconds, or if it is gone itself."""
        until = time.monotonic() + timeout
        while not (folder / "done.json").exists():
            if (code := self._child.ended()) is not None:
                words = "\n".join(self._child.wait(1)[1]) or "nothing was printed"
                raise MeasurementError(f"the process that starts the ranks ended with code {code}:\n{words}")
            if time.monotonic() > until:
                late = [str(rank) for rank in range(world_size) if not (folder / f"{rank}.json").exists()]
                which = f"no answer from {', '.join(late)}" if late else "all had answered"
                raise MeasurementError(
                    f"{world_size} ranks took over {timeout:g} s and were ended ({which}): raise timeout=."
                )
            time.sleep(0.02)
        return json.loads((folder / "done.json").read_text())


def _check_port(port: int) -> None:
    """Raise MeasurementError if somebody listens there: the ranks would wait for an answer that never comes."""
    with socket.socket() as probe:
        if os.name != "nt":  # a port that was in use a moment ago is free; on Windows the option means otherwise
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise MeasurementError(
                f"port {port} is in use ({error.strerror}): leave port= out for a free one."
            ) from None


def _failure(folder: Path, done: dict, world_size: int, starved: bool) -> Exception:
    """The error of the rank that failed first, as an exception of this process.

    `starved`: the kernel has killed a process for its memory.
    """
    errors = {}
    for rank in range(world_size):
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((folder / f"{rank}.json").read_text())
            if "error" in found:
                errors[rank] = found
    silent = done["failed"] is not None and done["failed"] not in errors
    if silent and (done["code"] != -getattr(signal, "SIGABRT", 6) or not errors):
        rank, code = done["failed"], done["code"]
        starved = starved and code == -getattr(signal, "SIGKILL", 9)
        why = " by the kernel because RAM ran out" if starved else ""
        oom = f"It was killed{why}." if starved else ""
        return RankError(f"Rank {rank} of {world_size} {_ending(code)}{why}.", rank, code, oom=oom)
    if not errors:
        return MeasurementError(done["message"])
    rank = min(errors, key=lambda r: (errors[r]["consequence"], errors[r]["time"]))
    error = errors[rank]
    if error["error"] == "RecipeError":
        return RecipeError(*error["args"])
    if error["error"] == "MeasurementError":
        return MeasurementError(error["message"])
    sentence = f"Rank {rank} of {world_size} failed: {error['error']}: {error['message']}"
    return RankError(sentence, rank, None, error["traceback"], error["oom"])


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended in the middle with exit status {code}, without an exception"
    return f"was killed by {signal.Signals(-code).name}"


def launch(
    function: str | Callable,
    arguments: Mapping[str, Any] | None = None,
    world_size: int = 2,
    *,
    device: str = "cpu",
    timeout: float = 300,
    port: int | None = None,
    launcher: Launcher | None = None,
) -> list[Any]:
    """What `function(**arguments)` returns on each of `world_size` ranks, in their order.

    Args:
        function: "package.module:function", or a function of a module; each rank imports it. It runs with torchrun's
            environment (RANK, WORLD_SIZE, MASTER_ADDR, …) and makes its own process group (`world.real_rank`).
        arguments: keyword arguments, JSON-ready; what is returned must be too.
        device: "cuda" gives each rank a fresh process with a GPU of its own, "cpu" forks them where that is sound.
        timeout: seconds after which all ranks are ended.
        port: of the rendezvous; None takes a free one.
        launcher: one that was started before, so that the libraries are loaded by now.
    Raises:
        RankError: a rank failed; with its own traceback.
        MeasurementError: they took too long, or could not be started.
    """
    name, arguments = _name(function), dict(arguments or {})
    json.dumps(arguments)  # says at once what is not JSON
    with _launcher(launcher) as it:
        return it.answers(name, arguments, world_size, device, timeout, port)


@contextlib.contextmanager
def _launcher(launcher: Launcher | None) -> Iterator[Launcher]:
    if launcher is not None:
        yield launcher  # it is its owner's to end
        return
    with Launcher() as launcher:
        yield launcher


def _name(function: str | Callable) -> str:
    if isinstance(function, str):
        if function.count(":") != 1:
            raise RecipeError("function", function, "it must be written 'package.module:function'")
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or "<" in name:
        raise RecipeError("function", name, "ranks import what they run: put it into a module")
    return f"{module}:{name}"
