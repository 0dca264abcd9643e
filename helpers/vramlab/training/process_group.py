"""The process group of a rank: torchrun's for real ranks, torch's fake one for one rank of a world that is not there."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

from ..recipe.recipe import Sharding


@contextlib.contextmanager
def one_rank_of(sharding: Sharding | None) -> Iterator[None]:
    """While entered, this process is rank `sharding.rank` of `sharding.world_size`; no other rank need exist.

    The fake group's collectives return at once and move nothing (`torch.testing._internal.distributed.fake_pg`), so
    bytes are those of a real rank and values are not. None: nothing is done.
    """
    if sharding is None:
        yield
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _forget_slices()
    dist.init_process_group("fake", rank=sharding.rank, world_size=sharding.world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _forget_slices() -> None:
    """Clear what DTensor remembers of shapes by operator: it takes a process for one rank all its life."""
    import torch

    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # newer releases have two
        if clear:
            clear()


@contextlib.contextmanager
def real_rank(device: str) -> Iterator[int]:
    """While entered, this process is the rank that torchrun's environment says, over NCCL between GPUs and gloo between CPUs.

    Gives the rank.
    """
    import torch
    import torch.distributed as dist

    with one_gloo_thread():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,cuda:nccl")  # what is offloaded is summed up where it is
        else:
            dist.init_process_group("gloo")
        yield dist.get_rank()  # after an error the others wait in a collective: the group dies with the process
        # DDP's reducer must not be the last to hold the group: it would end gloo's threads while it has Python's lock,
        # for which they may be waiting (torch 2.13; pytorch/pytorch issue 56297)
        gc.collect()
        dist.destroy_process_group()


@contextlib.contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Gloo's groups that are made while this is entered do one transfer after the other, on one thread instead of two.

    A thread lets go of what it has sent when it begins with the next, so what is held and when does not hang on the
    scheduler. `init_process_group` takes options for gloo and ignores them (torch 2.13).
    """
    from torch.distributed import distributed_c10d

    plain = distributed_c10d.ProcessGroupGloo

    class OneThread(plain):
        def __init__(self, store, rank, size, timeout):
            options = plain._Options()
            options._threads, options._timeout = 1, timeout
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            device = plain.create_device(interface=interface) if interface else plain.create_default_device()
            options._devices = [device]
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneThread
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = plain


def rank() -> int:
    """This process's rank, 0 where there is no process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def alone() -> bool:
    """Whether this process's group is the fake one, whose collectives move nothing."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake"
