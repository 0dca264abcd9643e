"""The child process behind `launch.Launcher`: load the libraries once, then start the ranks of every order.

An order is a folder with `order.pickle` in it, whose path comes as a line on the standard input. Each rank leaves its
answer or its error there, and the end of all of them is `done.pickle`. When the standard input ends, so does everything
here.
"""

import contextlib
import gc
import os
import pickle
import pkgutil
import queue
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ..report.collector import no_collection
from ..report.errors import RankError, VramLabError
from ..training.quiet import silence
from .launch import rank_name

with no_collection(before=False):
    import psutil
    import torch
    import transformers.modeling_utils
    import transformers.trainer_pt_utils  # noqa: F401 (loaded here, once for all ranks)
    from torch.multiprocessing import _prctl_pr_set_pdeathsig as set_parent_death_signal
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

LOCALHOST = "127.0.0.1"
# Messages of gloo, NCCL and the store on a rank whose neighbour is gone.
CONSEQUENCES = re.compile("Connection closed|Connection reset|Broken pipe|connection was closed|remote process exited")


def main() -> None:
    """Run orders until the standard input ends; a single one in this process itself."""
    silence()
    with contextlib.suppress(OSError):  # Linux: when RAM runs out, kill this process and its ranks first
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a job's SIGTERM also ends the parent, and with it this process
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(folders,), daemon=True).start()
    while True:
        folder = Path(folders.get())
        order = pickle.loads((folder / "order.pickle").read_bytes())
        sys.path += [path for path in order["path"] if path not in sys.path]
        outcome: tuple[int | None, int] = (None, 0)
        if order["single"]:
            with contextlib.suppress(SystemExit):
                run_function(0, order)
        else:
            outcome = start_ranks(order)
        _write(folder / "done.pickle", outcome)


def _read_orders(folders: "queue.SimpleQueue[str]") -> None:
    """Pass on the folders that the parent names. When it is gone, remove the last one and end all processes here."""
    folder = ""
    while line := os.read(0, 4096):
        folder = line.decode().rstrip("\n")
        folders.put(folder)
    others = psutil.Process().children(recursive=True)
    for process in others:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(others, timeout=5)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL) if hasattr(os, "killpg") else os._exit(1)


def start_ranks(order: dict[str, Any]) -> tuple[int | None, int]:
    """Run the order's function on all ranks; return which rank failed first (None: no one) and its exit code.

    On a CPU under Linux ranks are forked from this process. CUDA does not survive a fork, nor do the system libraries'
    threads elsewhere: there each rank is a fresh process. Ranks on a CPU see no GPU: a library that looks for one would
    start CUDA here.
    """
    cpu = order["device"] == "cpu"
    forks = cpu and sys.platform == "linux"
    surroundings = {"MASTER_ADDR": LOCALHOST} | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    with patch.dict(os.environ, surroundings), socket.socket() as reserved:
        if forks:
            _preload(order)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOCALHOST, 0))  # rank 0's store may bind to it too, as nobody listens here
        os.environ["MASTER_PORT"] = str(reserved.getsockname()[1])
        method = "fork" if forks else "spawn"
        try:
            ranks = start_processes(rank_process, (order,), order["world_size"], join=False, start_method=method)
            while not ranks.join(grace_period=0.5):
                pass
        except ProcessExitedException as error:
            return error.error_index, error.exit_code
    return None, 0


def _preload(order: dict[str, Any]) -> None:
    """Import here, once, what ranks of this and of later orders need; an error is for the ranks to report."""
    with contextlib.suppress(Exception), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        function, arguments = pickle.loads(order["call"])
        pkgutil.resolve_name(function)
        if order["preload"]:
            pkgutil.resolve_name(order["preload"])(**arguments)
    gc.collect()
    gc.freeze()  # a collection in a rank would visit all of it, and copy its pages


def rank_process(rank: int, order: dict[str, Any]) -> None:
    """Set up one rank's process as torchrun does, then run the function."""
    for caught in (signal.SIGTERM, signal.SIGINT):
        signal.signal(caught, signal.SIG_DFL)
    set_parent_death_signal(signal.SIGKILL)
    silence()
    world = order["world_size"]
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    # A fork replaces torch's thread pool at the first call that asks for it. Two of autograd's threads may ask at once, of
    # which one finds none and aborts ("Invalid thread pool!", pthreadpool-cpp.cc); so ask here, before they exist.
    torch.set_num_threads(torch.get_num_threads())
    run_function(rank, order)


def run_function(rank: int, order: dict[str, Any]) -> None:
    """Call the order's function and leave its answer in a file; after an exception leave that, and exit with status 1."""
    file = Path(order["folder"], f"{rank}.pickle")
    try:
        function, arguments = pickle.loads(order["call"])
        _write(file, {"answer": pkgutil.resolve_name(function)(**arguments)})
    except Exception as error:
        own, name = isinstance(error, VramLabError), rank_name(order["single"], order["world_size"], rank)
        _write(file, {"error": error if own else described(error, name, rank), "time": time.time()})
        if CONSEQUENCES.search(str(error)):
            time.sleep(2)  # so that the rank that caused it ends first
        sys.exit(1)


def described(error: Exception, name: str, rank: int) -> RankError:
    """Describe `error` for the parent, where its class may not exist."""
    steps = traceback.extract_tb(error.__traceback__)[1:]  # without this module's own
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(steps)]
    lines += traceback.format_exception_only(error)
    return RankError(f"{name} failed: {type(error).__name__}: {error}", rank, None, "".join(lines))


def _write(file: Path, content: Any) -> None:
    """Write a whole file at once, so that nobody reads a part of it."""
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(content))
    part.replace(file)


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    main()
