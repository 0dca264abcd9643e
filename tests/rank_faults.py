"""What ranks do in test_sharding_faults.py: fail, each in its own way, while the others wait for
them.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil


def greet(word: str = "hello") -> dict[str, Any]:
    """The rank, what it was told, and the sum of all ranks by a real collective."""
    import torch
    import torch.distributed as dist
    from vramlab.training.process_group import real_rank

    with real_rank("cpu") as rank:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
    return {
        "rank": rank,
        "word": word,
        "total": total.item(),
        "local": int(os.environ["LOCAL_RANK"]),
    }


def traces(mark: str) -> tuple[str | None, list[str]]:
    """The mark that an earlier order has left in this process, and variables of a Trainer.

    Leave `mark`.
    """
    import transformers.integrations.deepspeed as integration

    found = getattr(integration, "_left_by_a_test", None)
    integration._left_by_a_test = mark
    return found, [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]


def fail(how: str, folder: str, who: int = 1) -> None:
    """Rank `who` fails; the others wait for it in an all-reduce.

    Each leaves its process number in `folder`.
    """
    import torch
    import torch.distributed as dist
    from vramlab.training.process_group import real_rank

    with real_rank("cpu") as rank:
        Path(folder, str(os.getpid())).touch()
        dist.barrier()
        if rank == who:
            FAULTS[how]()
        dist.all_reduce(torch.ones(3))


def fail_alone(how: str, words: str) -> None:
    """A single process says something and fails."""
    print(words, file=sys.stderr, flush=True)
    FAULTS[how]()


def hang(folder: str) -> None:
    """No rank comes to an end; Ctrl-C and SIGTERM are ignored, as by a process that is stuck in a
    library.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(folder, str(os.getpid())).touch()
    time.sleep(300)


def _raise() -> None:
    raise ValueError("a bad value\nof two lines")


def _fill_the_disk() -> None:
    import resource

    # no file of this process grows any more, and Python is told so instead of ended
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _refuse() -> None:
    from vramlab import RecipeError

    raise RecipeError("sharding.world_size", 3, "it must divide what it must divide")


FAULTS = {
    "refuse": _refuse,
    "exit": lambda: os._exit(7),
    "leave": lambda: sys.exit("enough"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "full": _fill_the_disk,
}


def without_deepspeed(**arguments: Any) -> Any:
    """A rank's training on a machine that has no DeepSpeed."""
    from compared_ranks import train

    sys.modules["deepspeed"] = None
    return train(**arguments)


def unanswerable() -> Any:
    return lambda: None


@contextlib.contextmanager
def small_children() -> Generator[None]:
    """Processes that are started get 32 GiB at most, also of a kernel that promises everything:
    asking for more harms nobody."""
    import pytest

    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**35, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether none of `pids` is left within `seconds`, not even as a zombie of ours."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        left = [
            p
            for p in pids
            if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
        ]
        if not left:
            return not [p for p in psutil.Process().children(recursive=True) if p.pid in pids]
        time.sleep(0.05)
    return False
