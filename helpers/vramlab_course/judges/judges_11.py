"""Judges of chapter 11's repairs: how often DDP exchanges, and what a loader fills."""

import multiprocessing
import time
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from ..chapters.chapter_04 import RankFailed, on_ranks
from ..chapters.chapter_11 import NO_MOUNTS, pixels, shared_mib, with_shared
from ..chapters.two_ranks import count_buckets
from .judges_07 import judged

SMALL = 64  # MiB of /dev/shm, as Docker gives
CHANGED = (
    "It lives, but what arrives has changed: 8 batches are wanted, of 8 pictures in fp32, each "
    "number divided by 255."
)


def _exchanged(answer: Callable) -> str:
    import torch._dynamo  # DDP does it: once here, and not for each process anew

    def work(rank: int, world: int) -> tuple[int, bool]:
        ddp = DistributedDataParallel(torch.nn.Linear(8, 1))
        parts = torch.randn(4, 3, 8)
        exchanges = count_buckets(ddp)
        answer(ddp, list(parts))
        gradient = ddp.module.weight.grad
        right = gradient is not None and torch.allclose(gradient, parts.mean(1).sum(0)[None])
        return len(exchanges), right

    exchanges, right = on_ranks(work, 1)[0]
    if exchanges != 1:
        return (
            f"With 4 micro-batches it exchanges {exchanges} times. DDP decides in the *forward* "
            "pass whether the backward pass will exchange."
        )
    return "" if right else "It exchanges once, but the gradients are not those of all 4."


def _read(answer: Callable) -> tuple[list[bool], int]:
    """Whether each batch is right, and how many workers there were."""
    rights: list[bool] = []
    workers = 0
    for batch in answer():
        first = 8 * len(rights)
        if not rights:
            workers = len(multiprocessing.active_children())
            time.sleep(0.5)  # training, while the workers go ahead
        wanted = torch.stack([pixels(first + place) for place in range(8)]) / 255
        rights.append(batch.dtype == wanted.dtype and torch.equal(batch, wanted))
    return rights, workers


def _survives(answer: Callable) -> str:
    try:
        rights, workers = with_shared(SMALL, lambda: _read(answer))
    except RankFailed as error:
        if not str(error).endswith(NO_MOUNTS):
            return f"With {SMALL} MiB it ends with {str(error).splitlines()[-1]}."
        filled = shared_mib(answer())
        if filled and filled > SMALL:
            return f"It fills {filled:.0f} MiB of /dev/shm, and the container has {SMALL}."
        rights, workers = _read(answer)
    if workers < 2:
        return "It lives, but the loader has to keep its two workers."
    return "" if rights == 8 * [True] else CHANGED


once_judged = judged(_exchanged, "the same gradients, with one exchange.")
loader_judged = judged(_survives, "the same batches, and /dev/shm has room to spare.")
