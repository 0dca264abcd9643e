"""The child process behind `launch.Launcher`: load the libraries once, then run every order.

On ranks or here.

An order is a folder with `order.pickle` in it, whose path comes as a line on the standard input;
what becomes of it is left there in `outcome.pickle`. When the standard input ends, so does
everything here.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import pkgutil
import queue
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

from ..base.errors import VramLabError
from ..private import of_compiler
from ..private.of_torch import is_in_bad_fork, set_parent_death_signal
from ..training.quiet import no_collection, silence
from .launch import RankError, rank_name

with no_collection(before=False):
    import torch
    import transformers.modeling_utils
    import transformers.trainer_pt_utils  # noqa: F401 (loaded here, once for all ranks)
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

LOCALHOST = "127.0.0.1"
SIGABRT = -6  # as an exit code
# What a single rank needs that is forked from here.
SHARED = ("vramlab.measurement.worker", "vramlab.measurement.card_work")


def main() -> None:
    """Run orders until the standard input ends."""
    silence()
    with contextlib.suppress(
        OSError
    ):  # Linux: when RAM runs out, kill this process and its ranks first
        Path("/proc/self/oom_score_adj").write_text("1000")
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    # A thread of its own, so that the end of the parent is noticed while an order runs.
    threading.Thread(target=_read_orders, args=(folders,), daemon=True).start()
    while True:
        folder = folders.get()
        order = pickle.loads((folder / "order.pickle").read_bytes())
        # A function may be of the caller's own module, in a folder that this process does not know.
        sys.path += [path for path in order["path"] if path not in sys.path]
        if order["is_forked"]:
            outcome = of_fork(order, folder)
        elif order["world_size"] == 1:
            outcome = called(order, 0)
        else:
            outcome = of_ranks(order, folder)
        _leave(outcome, folder / "outcome.pickle")


def _leave(outcome: dict[str, Any], file: Path) -> None:
    """Write an outcome to `file` at once, so that nobody reads a part of it."""
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(outcome))
    part.replace(file)


def _read_orders(folders: "queue.SimpleQueue[Path]") -> None:
    """Pass on the folders that the parent names.

    When it is gone, remove the last one and end all processes here.
    """
    folder = Path("nowhere")
    while line := os.read(0, 4096):
        folder = Path(line.decode().rstrip("\n"))
        folders.put(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    else:
        os._exit(1)


def of_ranks(
    order: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Run the order's function on all ranks.

    Return their "answers", or of the one that failed first its "error" or, without an exception,
    its number and exit code ("ended").
    """
    world = order["world_size"]
    ended = _run_ranks(order, folder)
    outcomes = {}
    for rank in range(world):
        file = folder / str(rank)
        if file.exists():
            outcomes[rank] = pickle.loads(file.read_bytes())
    if ended is None and len(outcomes) == world:
        return {"answers": [outcomes[rank]["answers"][0] for rank in range(world)]}
    # Ranks that left nothing: killed, or ended in a library.
    silent = {*range(world)} - {*outcomes}
    rank, code = ended or (min(silent), 0)
    errors = [outcome for outcome in outcomes.values() if "error" in outcome]
    # Who aborts may have lost a neighbour.
    may_be_another = "error" in outcomes.get(rank, {}) or code == SIGABRT
    if errors and may_be_another:
        # The first error is the cause; later ones are of ranks that lost the first.
        return min(errors, key=lambda outcome: outcome["time"])
    return {"ended": (rank, code)}


def _run_ranks(
    order: dict[str, Any],
    folder: Path,
) -> tuple[int, int] | None:
    """Run the order's function on all ranks; return the number and exit code of one that ended.

    On a CPU under Linux ranks are forked from this process. CUDA does not survive a fork, nor do
    the system libraries' threads elsewhere: there each rank is a fresh process. Ranks on a CPU see
    no GPU: a library that looks for one would start CUDA here.
    """
    is_cpu = order["device"] == "cpu"
    forks = is_cpu and sys.platform == "linux"
    own = {
        "MASTER_ADDR": LOCALHOST,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if is_cpu:
        own["CUDA_VISIBLE_DEVICES"] = ""
    with patch.dict(os.environ, own), socket.socket() as reserved:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if forks:
            _preload(order)
        # Bound and never listened to: the port is kept from others until rank 0 takes it.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOCALHOST, 0))  # rank 0's store may bind to it too, as nobody listens here
        _, port = reserved.getsockname()
        os.environ["MASTER_PORT"] = str(port)
        try:
            ranks = start_processes(
                rank_process,
                (order, folder),
                order["world_size"],
                join=False,
                start_method="fork" if forks else "spawn",
            )
            # One that fails gives the others half a second before they are ended.
            while not ranks.join(grace_period=0.5):
                pass
        except ProcessExitedException as error:
            return error.error_index, error.exit_code
    return None


def _preload(order: dict[str, Any]) -> None:
    """Import here, once, what ranks of this and of later orders need.

    An error is for the ranks to report.
    """
    with contextlib.suppress(Exception):
        function, arguments = pickle.loads(order["call"])
        pkgutil.resolve_name(function)
        # It runs without a thread of its own: ranks that are forked would wait for it.
        if order["preload"]:
            pkgutil.resolve_name(order["preload"])(**arguments)
    gc.collect()
    gc.freeze()  # a collection in a rank would visit all of it, and copy its pages


def of_fork(
    order: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Run the order's function in a process forked from this one, which has not used the GPU.

    Return its outcome, or its exit code ("ended"), or that a GPU was used here ("unfit").
    """
    # bitsandbytes imports Inductor, and itself asks CUDA for the card: it is left to the forks.
    for name in SHARED:
        importlib.import_module(name)
    of_compiler.inductor("compile_fx")
    gc.collect()
    gc.freeze()
    forked = multiprocessing.get_context("fork").Process(target=_forked, args=(order, folder))
    forked.start()
    forked.join()
    file = folder / "0.pickle"
    if file.exists():
        return pickle.loads(file.read_bytes())
    return {"ended": (0, forked.exitcode)}


def _forked(order: dict[str, Any], folder: Path) -> None:
    """Call the order's function, leave what becomes of it in a file, and end without a word."""
    set_parent_death_signal(signal.SIGKILL)
    torch.set_num_threads(torch.get_num_threads())  # as in `rank_process`
    outcome = {"unfit": True} if is_in_bad_fork() else called(order, 0)
    _leave(outcome, folder / "0.pickle")
    sys.stderr.flush()
    os._exit(0)  # what libraries do at an exit would be done to the card, too


def rank_process(
    rank: int,
    order: dict[str, Any],
    folder: Path,
) -> None:
    """Set up one rank's process as torchrun does, and call the function.

    What becomes of it is left in a file.
    """
    set_parent_death_signal(signal.SIGKILL)
    silence()
    world = order["world_size"]
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    # A fork replaces torch's thread pool at the first call that asks for it. Two of autograd's
    # threads may ask at once, of which one finds none and aborts ("Invalid thread pool!",
    # pthreadpool-cpp.cc); so ask here, before they exist.
    torch.set_num_threads(torch.get_num_threads())
    outcome = called(order, rank)
    (folder / str(rank)).write_bytes(pickle.dumps(outcome))
    if "error" in outcome:
        if isinstance(outcome["error"], RankError):
            time.sleep(2)  # it may have lost the rank that fails, which ends first then
        sys.exit(1)


def called(
    order: dict[str, Any],
    rank: int,
) -> dict[str, Any]:
    """Call the order's function.

    Return its pickled answer in a list, or its error and when it was raised.
    """
    try:
        function, arguments = pickle.loads(order["call"])
        return {"answers": [pickle.dumps(pkgutil.resolve_name(function)(**arguments))]}
    except VramLabError as error:
        return {"error": error, "time": time.time()}
    except Exception as error:  # described, as its class may not exist in the parent
        steps = traceback.extract_tb(error.__traceback__)[1:]  # without this module's own
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(steps)]
        text = "".join(lines + traceback.format_exception_only(error))
        message = f"{rank_name(rank, order['world_size'])} failed: {type(error).__name__}: {error}"
        return {
            "error": RankError(
                message,
                rank,
                None,
                text,
            ),
            "time": time.time(),
        }


if __name__ == "__main__":
    main()
