"""The process group of a rank.

It is torchrun's for real ranks, and torch's fake one for a single rank of many.
"""

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ..private import of_distributed
from ..private.patched import plain, replaced
from ..recipe.recipe import Sharding

# Groups are named by number, in one table for the whole process: those of other threads count
# from 0.
FIRST_GROUP = 10**6
REDUCTIONS = ("sum", "avg", "min", "max", "product")


@contextlib.contextmanager
def one_rank_of(sharding: Sharding | None) -> Iterator[None]:
    """While entered, this process is one rank of many, in a fake group; None: no group.

    It is rank `sharding.rank` of `sharding.world_size`. The group's collectives return at once and
    move nothing (`torch.testing._internal.distributed.fake_pg`), so bytes are those of a real rank
    and values are not.
    """
    if sharding is None:
        yield
        return
    from torch.distributed import distributed_c10d

    # they assume that a process has one rank all its life
    of_distributed.forget_dtensor_shards()
    world = _ThreadsWorld(plain(distributed_c10d, of_distributed.WORLD))
    hook = sys.excepthook
    with (
        replaced(distributed_c10d, of_distributed.WORLD, world),
        replaced(distributed_c10d, of_distributed.UNREGISTER_ALL, world.unregister),
        # fake works are numbered by Python's generator, which is the process's
        replaced(*of_distributed.unique_ids(), itertools.count(1).__next__),
    ):
        dist.init_process_group(
            "fake",
            rank=sharding.rank,
            world_size=sharding.world_size,
            store=of_distributed.fake_store(),
        )
        # the group's would name its rank before every error of the process
        sys.excepthook = hook
        try:
            yield
        finally:
            world.names += world.pg_names.values()
            dist.destroy_process_group()
            # a mesh of the process's own that is alike would get tensors of the fake one
            of_distributed.forget_dtensor_shards()


class _ThreadsWorld:
    """What torch keeps of process groups (`distributed_c10d._World`), for one thread.

    Other threads have no group, or their own.
    """

    pg_names: dict[Any, str]

    def __init__(self, others: Any) -> None:
        for name in dir(others):  # newer releases keep more
            # the one is set below, the other computed of the rest
            if not name.startswith("_") and name not in ("default_pg", "pg_config_info"):
                # Empty ones of the same types, all dictionaries, lists and numbers.
                kind = type(getattr(others, name))
                setattr(self, name, kind())
        self.default_pg = None
        self.group_count = FIRST_GROUP
        self.names: list[str] = []  # of groups that are to be forgotten

    def unregister(self) -> None:
        """Forget this thread's groups, where torch would forget those of all threads."""
        of_distributed.unregister(self.names)
        self.names.clear()


@contextlib.contextmanager
def real_rank(device: str) -> Iterator[int]:
    """While entered, this process is the rank, which is yielded, of torchrun's environment.

    NCCL moves what is on GPUs, gloo what is on CPUs.
    """
    with one_gloo_thread():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,cuda:nccl")  # gloo for what is offloaded
        else:
            dist.init_process_group("gloo")
        # after an error the others wait in a collective: the group ends with the process
        yield dist.get_rank()
        # free DDP's reducer first: as the last owner of the group it would join gloo's threads
        # while it holds the GIL, for which they may wait (torch 2.13; pytorch/pytorch issue 56297)
        gc.collect()
        dist.destroy_process_group()


@contextlib.contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Give gloo's groups one thread instead of two.

    So what is held, and when, is deterministic: a thread frees what it has sent when it begins the
    next transfer. `init_process_group` ignores options for gloo (torch 2.13).
    """
    from torch.distributed import distributed_c10d

    torchs_own: Any = distributed_c10d.ProcessGroupGloo

    class OneThread(torchs_own):
        def __init__(
            self,
            store: Any,
            rank: int,
            size: int,
            timeout: Any,
            **more: Any,  # since torch 2.15
        ) -> None:
            try:
                options = of_distributed.one_thread(torchs_own, timeout)
                super().__init__(store, rank, size, options)
            except (AttributeError, TypeError):
                # where the private options are others: torch's own, two threads
                super().__init__(store, rank, size, timeout=timeout, **more)

    with patch.object(distributed_c10d, "ProcessGroupGloo", OneThread):
        yield


def is_fake_group() -> bool:
    """Tell whether the process group is a fake one, whose collectives move nothing."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake"


def group_of(args: tuple) -> "dist.ProcessGroup | None":
    """Return the process group among an operator's arguments, given as an object or by name.

    Without one it is the default group.
    """
    # Operators have their group behind the tensors.
    for value in reversed(args):
        if isinstance(value, dist.ProcessGroup):
            return value
        if of_distributed.is_boxed_group(value):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str) and value not in REDUCTIONS:
            return of_distributed.group_by_name(value)
    return dist.group.WORLD
