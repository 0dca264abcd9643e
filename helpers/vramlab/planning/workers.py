"""Processes that simulate candidates beside each other, and load libraries early."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from operator import methodcaller
from typing import Any

from ..base.errors import VramLabError, needing
from ..private.of_transformers import load_modeling
from ..recipe.from_transformers import build
from ..training.quiet import no_collection

_pipe: ContextVar[Any] = ContextVar("pipe_to_loader", default=None)


def _may_fork() -> bool:
    """Tell whether this process may be forked: where torch was used, a child waits for threads."""
    is_alone = threading.active_count() == 1
    return sys.platform == "linux" and "torch" not in sys.modules and is_alone


@contextlib.contextmanager
def loaded_early() -> Iterator[None]:
    """While entered, a process forked from this one loads torch, and then simulates for it.

    It is in a group of its own, with all that it forks: Ctrl-C is not sent there, and the group is
    ended here.
    """
    if _pipe.get() or not _may_fork():
        yield
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_serve, args=(ours, theirs))
    process.start()
    group: Any = process.pid
    os.setpgid(group, group)
    theirs.close()
    _pipe.set(ours)
    try:
        yield
    finally:
        _pipe.set(None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        process.join()


def _serve(ours: Any, theirs: Any) -> None:
    ours.close()  # so that the pipe ends with the process that asks
    # who asks does without, and says what is missing
    with no_collection(before=False), contextlib.suppress(EOFError, OSError, ImportError):
        load_modeling()
        from ..simulation import simulate  # noqa: F401

        gc.freeze()  # a collection in a forked process would visit all of it, and copy its pages
        is_used = False
        while True:
            candidates = theirs.recv()
            # one alone runs here, and uses torch
            is_used = is_used or len(candidates) == 1
            for simulation in _simulated(candidates, not is_used):
                theirs.send(simulation)


def simulations(candidates: list) -> Iterator[Any]:
    """Yield each candidate's `simulation()`, a report or why there is none; several run at once."""
    pipe = _pipe.get()
    with contextlib.suppress(EOFError, OSError):
        if pipe:
            pipe.send(candidates)
            while candidates:
                yield pipe.recv()
                candidates = candidates[1:]
    if candidates:  # nothing was loaded early, or it has ended
        yield from _simulated(candidates, _may_fork())


def _simulated(candidates: list, forks: bool) -> Iterator[Any]:
    try:
        with needing("a simulation"):
            build(candidates[0].recipe.shape)  # loads the libraries once for all
    except (VramLabError, ImportError) as error:
        yield from [str(error)] * len(candidates)
        return
    workers = min(len(candidates), os.cpu_count() or 1)
    simulation = methodcaller("simulation")
    if not forks or workers < 2:
        yield from map(simulation, candidates)
        return
    fork = multiprocessing.get_context("fork")
    with fork.Pool(workers, _start_worker) as pool:
        yield from pool.imap(simulation, candidates)


def _start_worker() -> None:
    # an interrupt is for the process that asks to answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # what a simulation leaves ends with the process
