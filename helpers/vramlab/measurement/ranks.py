"""The far side of `launch`: a child process that loads the libraries, then starts ranks for every order it reads."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers.modeling_utils
import transformers.trainer_pt_utils  # noqa: F401 (loaded here, once for all ranks)
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..training.quiet import silence
from .child_process import end_with_parent
from .records import write_atomically

FORKS = sys.platform == "linux"  # elsewhere threads of the system's libraries do not survive it
# What a rank says whose neighbour is gone: gloo's and NCCL's words for a connection that broke, and the store's.
CONSEQUENCES = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "connection was closed",
    "remote process exited",
)
FOLDER = "VRAMLAB_FOLDER"  # names the folder in which a rank may leave files of its own
OUTCOME, DONE = "outcome.json", "done.json"
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPUS = os.environ.get(VISIBLE)  # what this process may see, None for all
PR_SET_PDEATHSIG = 1  # prctl(2)
# A number, because a forked rank may find glibc's lock on its list of name servers taken for ever: the agent's store looks
# names up on a thread of its own, whenever a rank connects.
HERE = "127.0.0.1"


def main() -> None:
    """Load the libraries, then start ranks for each order, a line of JSON, until the standard input ends."""
    silence()
    with contextlib.suppress(OSError):  # Linux: take ranks first when RAM runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    if not FORKS:
        line = sys.stdin.readline()
        if line:
            order = json.loads(line)
            end_with_parent(order["folder"])
            _show_gpus(order["device"])
            start_ranks(order, "spawn")
            Path(order["folder"], OUTCOME).rename(Path(order["folder"], DONE))
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that of a whole job: this process ends when its parent does
    while line := _line():
        order = json.loads(line)
        _show_gpus(order["device"])
        _preload(order)
        agent = os.fork()  # so that this process stays as it is, without a thread
        if not agent:
            _die_with_parent()
            start_ranks(order, "fork" if order["device"] == "cpu" else "spawn")
            os._exit(0)
        while not (ended := os.waitpid(agent, os.WNOHANG))[0]:
            if select.select([0], [], [], 0.02)[0]:  # nobody writes now: this is the end of the parent
                _end(order["folder"])
        outcome = Path(order["folder"], OUTCOME)
        if not outcome.exists():
            code = os.waitstatus_to_exitcode(ended[1])
            _write(outcome, {"failed": None, "message": f"torch's elastic agent ended with code {code}"})
        outcome.rename(outcome.with_name(DONE))  # now that nobody else writes to the folder


def _end(folder: str) -> None:
    """End all processes here, this one last, and remove the parent's folder, which it no longer can."""
    others = psutil.Process().children(recursive=True)
    for process in others:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(others, timeout=5)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _line() -> str:
    """The next line of the standard input, without reading ahead of it."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return ""
        line += byte
    return line.decode()


def _show_gpus(device: str) -> None:
    """Hide all GPUs from ranks on the CPU: libraries that look for one would start CUDA here, which no fork survives."""
    if device == "cpu" or GPUS is not None:
        os.environ[VISIBLE] = "" if device == "cpu" else GPUS
    else:
        os.environ.pop(VISIBLE, None)


def _preload(order: dict[str, Any]) -> None:
    """Load here, once, what every rank of this and of later orders needs; what cannot be loaded is for them to say."""
    if order["preload"] and order["device"] == "cpu":  # on a GPU each rank is a fresh process
        with contextlib.suppress(Exception), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            _resolve(order["preload"])(**order["arguments"])
    gc.collect()
    gc.freeze()  # a collection in a rank would go through all of it, and copy its pages


def _die_with_parent() -> None:
    if FORKS:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_ranks(order: dict[str, Any], start_method: str) -> None:
    """Have torch's elastic agent run the ordered function on all ranks, and write OUTCOME: which failed, and how."""
    folder = Path(order["folder"])
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "agent.json")  # its own; ours hold more
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"  # torch 2.11 has no such setting
    done: dict[str, Any] = {"failed": None}
    try:
        sys.path += [path for path in order["path"] if path not in sys.path]
        if start_method == "fork":
            with contextlib.suppress(Exception):  # the rank that cannot import it says so with its traceback
                _resolve(order["function"])
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=order["world_size"],
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{HERE}:{order['port'] or 0}",
            local_addr=HERE,
            max_restarts=0,
            monitor_interval=0.02,
            start_method=start_method,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        )
        elastic_launch(config, one_rank)(order)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        done = {"failed": rank, "code": failure.exitcode, "message": failure.message}
    except Exception as error:
        done = {"failed": None, "message": f"the ranks could not be started: {error}"}
    _write(folder / OUTCOME, done)


def one_rank(order: dict[str, Any]) -> None:
    """One rank's side: call the function and leave its answer, or its error, in a file of its own."""
    for caught in (signal.SIGTERM, signal.SIGINT):  # the agent's handlers, inherited
        signal.signal(caught, signal.SIG_DFL)
    _die_with_parent()
    silence()
    sys.path += [path for path in order["path"] if path not in sys.path]
    os.environ[FOLDER] = order["folder"]
    # A fork replaces torch's thread pool at the first call that asks for it. Two of autograd's threads may ask at once, of
    # which one finds none and aborts ("Invalid thread pool!", pthreadpool-cpp.cc); so this thread asks before they are made.
    torch.set_num_threads(torch.get_num_threads())
    _wait_for_all(Path(order["folder"]), order["world_size"])
    file = Path(order["folder"], os.environ["RANK"] + ".json")
    try:
        answer = _resolve(order["function"])(**order["arguments"])
        _write(file, {"answer": answer})
    except Exception as error:
        _write(file, {**describe(error), "oom": _out_of_memory(error, order)})
        if any(text in str(error) for text in CONSEQUENCES):
            time.sleep(2)  # the agent looks for the rank that is gone, and ends this one
        raise


def _wait_for_all(folder: Path, world_size: int, seconds: float = 60) -> None:
    """Return when all ranks are there: while the agent forks, none may connect to it (see HERE)."""
    (folder / f"{os.environ['RANK']}.started").touch()
    until = time.monotonic() + seconds
    while len([*folder.glob("*.started")]) < world_size and time.monotonic() < until:
        time.sleep(0.005)


def describe(error: Exception) -> dict[str, Any]:
    """What the parent has to know of `error`: its kind, sentence, traceback and time."""
    steps = traceback.extract_tb(error.__traceback__)[1:]  # without this module's own
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(steps)]
    lines += traceback.format_exception_only(error)
    return {
        "error": type(error).__name__,
        "message": str(error),
        "args": [str(value) for value in error.args] if not hasattr(error, "allowed") else _refused(error),
        "traceback": "".join(lines),
        "time": time.time(),
        "consequence": any(text in str(error) for text in CONSEQUENCES),
    }


def _out_of_memory(error: Exception, order: dict[str, Any]) -> str:
    from .worker import out_of_memory

    limit = order["arguments"].get("memory_limit")
    limit = limit.get(os.environ["RANK"]) if isinstance(limit, dict) else limit
    return out_of_memory(error, order["device"], limit) if isinstance(error, MemoryError | RuntimeError) else ""


def _refused(error: Any) -> list[str]:
    return [error.field, str(error.value), error.allowed]


def _resolve(function: str) -> Any:
    module, name = function.split(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _write(file: Path, content: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(content))


if __name__ == "__main__":
    from . import ranks  # by its name, as spawned ranks import what they run

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    ranks.main()
