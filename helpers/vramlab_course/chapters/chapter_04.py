"""What chapter 04's cells share.

That is ranks that run a function of the notebook, two collectives, and a step that is followed or
timed.

Ranks are forked, so that they may run functions which a reader has just written. Where there is a
GPU, a process that ran a backward pass cannot fork such ranks any more (autograd has started
threads), hence `apart` for a simulation.
"""

import gc
import logging
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from vramlab.base.errors import VramLabError
from vramlab.recipe.recipe import Loop
from vramlab.report.report import Report
from vramlab.tracking.history import History, to_report
from vramlab.tracking.tracked import run_tracked
from vramlab.tracking.tracker import Tracker
from vramlab.training.engine import Training
from vramlab.training.process_group import one_gloo_thread

ERROR = ".error"  # how the file is called in which a rank leaves its error
STARTS = 3  # of a group that lost a connection
# A rank that fails ends the others. torch announces that, above what the rank failed with.
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)


class RankFailed(VramLabError):
    """A function that failed on a rank, with its error's type and text."""


def on_ranks(
    function: Callable[[int, int], Any],
    world: int = 2,
    seconds: float = 300,
) -> list[Any]:
    """What `function(rank, world)` returns on each of `world` processes.

    They are the ranks of a gloo group.

    A rank waits `seconds` at most for another. What loses a connection starts again, with ports of
    its own. Raises RankFailed with the error of a rank, and not with what it did to the others.
    """
    for _ in range(STARTS):
        try:
            return _forked(_rank, world, (function, seconds))
        except RankFailed as error:
            if not _lost_a_rank(str(error)):
                raise
    raise RankFailed(
        f"a rank waits for one that has ended, in each of {STARTS} starts: all ranks have to call "
        "the same collectives"
    )


def _lost_a_rank(text: str) -> bool:
    """Tell whether this error is of a connection, as "…/gloo/…: Connection closed by peer"."""
    return "gloo" in text and "onnect" in text


def apart(function: Callable[[], Any]) -> Any:
    """What `function()` returns in a process of its own, without a group."""
    return _forked(_alone, 1, (function,))[0]


def _forked(work: Callable[..., Any], count: int, given: tuple) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            _enter,
            (work, count, folder, given),
            count,
            join=False,
            start_method="fork",
        )
        try:
            # join returns False when one process has ended and others run.
            while not processes.join():
                pass
        except mp.ProcessRaisedException:
            errors = [path.read_text() for path in sorted(Path(folder).glob(f"*{ERROR}"))]
            # The others lost the rank that failed, and torch may have met one of them first.
            raise RankFailed(min(errors, key=_lost_a_rank)) from None
        # start_processes hands back no results, so each rank leaves its own in a file.
        return [torch.load(f"{folder}/{number}", weights_only=False) for number in range(count)]


def _enter(
    number: int,
    work: Callable[..., Any],
    count: int,
    folder: str,
    given: tuple,
) -> None:
    # A collection would write to every object of the parent, and so copy each of its pages.
    gc.freeze()
    # ranks on the same cores would wait for one another's threads
    torch.set_num_threads(1)
    try:
        found = work(number, count, folder, *given)
    except Exception as error:
        # torch.multiprocessing gives the parent one rank's traceback only.
        text = traceback.format_exception_only(error)[-1].strip()
        Path(f"{folder}/{number}{ERROR}").write_text(text)
        raise
    torch.save(found, f"{folder}/{number}")


def _alone(
    number: int,
    count: int,
    folder: str,
    function: Callable[[], Any],
) -> Any:
    return function()


def _rank(
    rank: int,
    world: int,
    folder: str,
    function: Callable[[int, int], Any],
    seconds: float,
) -> Any:
    # With several threads it is a race when gloo frees its buffers, and the figures would differ.
    with one_gloo_thread():
        dist.init_process_group(
            "gloo",
            # in a folder of this call: a port could be taken, by another notebook for instance
            f"file://{folder}/meeting",
            timedelta(seconds=seconds),
            rank=rank,
            world_size=world,
        )
        found = function(rank, world)
        gc.collect()  # what holds the group goes first, see process_group.real_rank
        dist.destroy_process_group()
    return found


def reduce_scatter(whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of the sum of all ranks' `whole`, which is cut along its first dimension."""
    # A part of a tensor that is not contiguous is none either, and a collective needs that.
    parts = [part.contiguous() for part in whole.chunk(dist.get_world_size())]
    # as large as one part: the ranks' parts are equal where the length is a multiple of them
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


def all_gather(part: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks, one after the other."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def seconds_of(*steps: Callable) -> torch.Tensor:
    """The median seconds of each step, over five turns.

    They take turns because other work on the machine then slows all of them.
    """
    turns = [[timeit(step, number=1) for step in steps] for _ in range(5)]
    return torch.tensor(turns).median(0).values


def followed(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: torch.Tensor,
) -> Report:
    """The bytes of the second of two steps on `rows`.

    Each storage is followed from its birth to its end. What gloo needs for itself is left out, as a
    GPU's rank has none of it.
    """
    training = Training(
        model=model,
        optimizer=optimizer,
        batch={
            "input_ids": rows.clone(),
            "labels": rows.clone(),
        },  # a chunk's storage is the whole batch
        device=torch.device("cpu"),
        multi_tensor=False,
        loop=Loop.named("plain"),
    )
    # Two steps: the first makes the optimizer's states, the second is what is reported.
    tracker = run_tracked(training, Tracker("cpu", scratch=lambda *called: 0), 2, "cpu")
    return to_report(History(tracker.log, tracker.marks), "measured", None, "cpu")


def held(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and optimizer states in this process."""
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in [*parameters, *gradients, *states])
